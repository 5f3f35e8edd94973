"""Settings, facts for the alarms, progress and parameter groups of a Stable-Baselines3 model, and its actions by head.

`ActionHeads.capture` is called between the trainer's own steps, so its speed matters. It returns references to as few tensors as
possible, and `joined` turns many captures into columns together.
"""

from __future__ import annotations

import dis
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.distributions import DiagGaussianDistribution
from torch import Tensor, nn

from esper_telemetry.adapters.columns import HeadColumns, Join, chosen_log_probs, head_actions, head_columns, head_names, join_columns
from esper_telemetry.adapters.environment_facts import environment_facts
from esper_telemetry.core.facts import UNCHECKED_FACT, optimizer_facts
from esper_telemetry.core.rate_schedule import SCHEDULE_FACT, RateSchedule
from esper_telemetry.updates.failure import Candidate, of_parameters
from esper_telemetry.updates.pickles import policy_copy

SQUASH_BOUND = math.atanh(0.99)
"""Size before the squash from which a squashed action counts as at its bound: 99 % of the way."""

MAX_CAPTURES = 16
"""Captures that are joined together. References to a few tensors of every call of an update would trigger Python's garbage
collector. Its full collection takes 0.2 s in a process that has loaded torch, more than all of telemetry's other work.
"""


def last_distribution(policy: Any) -> Any:
    """The torch distribution, or the list of them, that `policy` sampled from or evaluated last; it makes new ones for every call."""
    return getattr(policy.action_dist, "distributions", None) or policy.action_dist.distribution


class ActionHeads:
    """The parts of an action under the bundled trainer's names.

    Args:
        space: of actions: Discrete, MultiDiscrete, MultiBinary or Box.
        squash: a Box's actions go through a tanh.

    Attributes:
        names: of the heads.
        continuous: there is one head, and its actions are real numbers.
        single_choice: there is one head, and its actions are choices.
    """

    def __init__(self, space: spaces.Space[Any], *, squash: bool = False) -> None:
        self._space, self._squash = space, squash
        self.continuous = isinstance(space, spaces.Box)
        self.single_choice = isinstance(space, spaces.Discrete)
        several = isinstance(space, spaces.MultiDiscrete | spaces.MultiBinary)
        count = int(np.prod(space.shape)) if several and space.shape is not None else 1
        self.names = ("action_0",) if several and count == 1 else head_names(count)

    @property
    def kinds(self) -> dict[str, str]:
        """`categorical` or `continuous`, by head."""
        return dict.fromkeys(self.names, "continuous" if self.continuous else "categorical")

    def columns(self, distribution: Any) -> HeadColumns:
        """Columns of N rows, from what `last_distribution` returns."""
        parts: Sequence[Any] = (distribution,)
        if isinstance(distribution, list | tuple):
            parts = distribution
        elif isinstance(distribution, torch.distributions.Bernoulli):
            parts = distribution.logits.unbind(-1)
        return head_columns(dict(zip(self.names, parts, strict=True)))

    def actions(self, stored: Tensor) -> dict[str, Tensor]:
        """Per head [...] (categorical) or [..., D] (continuous, before a squash), from a buffer's [..., D]."""
        if self.continuous and self._squash:
            stored = torch.atanh(stored.clamp(-1 + 1e-6, 1 - 1e-6))
        return head_actions(stored, self.names, self.names if self.continuous else (), stored.shape[:-1])

    def bounds(self, device: torch.device) -> dict[str, Tensor]:
        """Per bounded Gaussian head [2, D]."""
        if not isinstance(self._space, spaces.Box):
            return {}
        low, high = self._space.low.ravel(), self._space.high.ravel()
        both = torch.tensor(np.stack([low, high]), dtype=torch.float32, device=device)
        if self._squash:
            both = torch.tensor([[-SQUASH_BOUND], [SQUASH_BOUND]], device=device).expand(2, len(low))
        return {self.names[0]: both} if bool(both.isfinite().any()) else {}

    def log_probs(self, columns: HeadColumns, actions: dict[str, Tensor]) -> dict[str, Tensor]:
        """Log-probabilities [...] of each categorical head; empty if there is only one head."""
        if len(self.names) < 2:
            return {}
        return {name: chosen_log_probs(columns.logits[name], actions[name]) for name in self.names}

    def score_counts(self, scores: int) -> list[int]:
        """Return the number of a layer's scores for each head; empty if the space does not define it."""
        heads = len(self.names)
        sizes = self._space.nvec.ravel().tolist() if isinstance(self._space, spaces.MultiDiscrete) else []
        return sizes if sum(sizes) == scores else [] if sizes or scores % heads else [scores // heads] * heads

    def capture(self, policy: Any) -> Any:
        """Return the inputs of `joined` from the distribution that the policy sampled from or evaluated last."""
        distribution = last_distribution(policy)
        if self.continuous:
            return distribution.mean.detach(), distribution.stddev.detach()
        if self.single_choice:
            return distribution.logits.detach(), getattr(distribution, "masks", None)
        return self.columns(distribution)

    def joined(self, captures: Sequence[Any], join: Join) -> HeadColumns:
        """Return the columns of several captures."""
        if not (self.continuous or self.single_choice):
            return join_columns(captures, join)
        (name,), (first, second) = self.names, map(list, zip(*captures, strict=True))
        if self.continuous:
            return HeadColumns(means={name: join(first)}, log_std={name: join(second).log()})
        masked = all(masks is not None for masks in second)
        return HeadColumns(logits={name: join(first)}, action_masks={name: join(second)} if masked else {})

    def summary(self, policy: Any, shape: tuple[int, int]) -> HeadColumns | None:
        """Columns of a rollout [T, B] for updates that are not sampled, from the policy that has collected it.

        None if only captures of its steps give them: several heads, masks, and a spread that depends on the state.
        """
        if self.single_choice and not hasattr(policy.action_dist, "apply_masking"):
            return HeadColumns()
        log_std = getattr(policy, "log_std", None)
        if type(policy.action_dist) is not DiagGaussianDistribution or not isinstance(log_std, Tensor):
            return None
        return HeadColumns(log_std={self.names[0]: log_std.detach().clone().expand(*shape, -1)})


SETTINGS = (
    *("n_steps", "batch_size", "n_epochs", "n_envs", "gamma", "gae_lambda", "ent_coef", "vf_coef", "max_grad_norm"),
    *("normalize_advantage", "target_kl", "learning_rate", "clip_range", "clip_range_vf", "use_sde", "sde_sample_freq"),
    "seed",
)

SETTING_NAMES = {
    "clip": "clip_range",
    "num_epochs": "n_epochs",
    "minibatch_size": "batch_size",
    "rollout_size": "n_steps x n_envs",
    "entropy_coef": "ent_coef",
    "value_coef": "vf_coef",
}
"""Their names of settings, by ours."""

A2C_RECORD_TRANSITIONS = 2048
"""Transitions in a record of A2C: PPO's default number per update."""

ACTOR = ("policy_net", "pi_features_extractor", "action_net", "log_std", "lstm_actor")
CRITIC = ("value_net", "vf_features_extractor", "critic", "lstm_critic")

FORMULA_FUNCTIONS = ("abs", "float", "int", "max", "min", "pow", "round")
"""Built-in functions that a formula may call."""

STORING = ("STORE_GLOBAL", "STORE_DEREF", "STORE_ATTR", "STORE_SUBSCR")
"""Instructions by which a function changes something other than its own variables."""


class ModelProgress(NamedTuple):
    """Updates, environment steps and optimizer steps so far, as `events.RunStart` has them."""

    update: int
    env_step: int
    gradient_step: int


def progress_of(model: Any) -> ModelProgress:
    """Return a model's progress: updates follow from its environment steps, optimizer steps from its passes over rollouts."""
    minibatches = minibatches_of(model) if hasattr(model, "n_epochs") else 1
    updates = model.num_timesteps // (model.n_steps * model.n_envs)
    return ModelProgress(updates, model.num_timesteps, model._n_updates * minibatches)


def minibatches_of(model: Any) -> int:
    """Number of minibatches in one pass over a rollout."""
    rollout = int(model.n_steps * model.n_envs)
    return -(-rollout // int(getattr(model, "batch_size", rollout)))


def default_updates_per_record(model: Any) -> int:
    """1 if training takes several passes over a rollout; for A2C, whose updates are single steps, the number with 2048 transitions.

    A shorter run has a single record, whose last update is checked. An incomplete record is not checked.
    """
    if hasattr(model, "n_epochs"):
        return 1
    planned = max(1, min(A2C_RECORD_TRANSITIONS, int(model._total_timesteps - model.num_timesteps)))
    return -(-planned // int(model.n_steps * model.n_envs))


def config_of(model: Any) -> dict[str, Any]:
    """Return a model's settings as plain values; a schedule by its first value."""
    return {
        "algorithm": type(model).__name__,
        "policy": type(model.policy).__name__,
        **{name: _plain(getattr(model, name)) for name in SETTINGS if hasattr(model, name)},
        "policy_kwargs": {name: str(value) for name, value in model.policy_kwargs.items()},
    }


def facts_of(model: Any, heads: ActionHeads, updates: int) -> dict[str, Any]:
    """Return the facts for the alarms about a run whose records have that many updates each, as plain values."""
    policy, scaled, rate = model.policy, model.get_vec_normalize_env(), schedule_of(model)
    epochs, minibatches = getattr(model, "n_epochs", 1), minibatches_of(model)
    own = ("normalized_advantages", "log_ratios", "policy_loss", "value_loss", "entropy_loss", "total_loss")
    uncopied = ""
    try:
        policy_copy(policy)
    except TypeError as error:  # then no pass can be taken
        uncopied = str(error)
    schedule: dict[str, Any] = {}
    if rate is not None:
        counts = {"num_epochs": epochs, "num_minibatches": minibatches, "num_envs": model.n_envs}
        table = RateSchedule.tabulated(lambda over: rate(1.0 - over), total_steps=model._total_timesteps, counts=counts)
        schedule = {SCHEDULE_FACT: table.fact()}
    lstm, activation = getattr(policy, "lstm_actor", None), getattr(policy, "activation_fn", None)
    try:
        spec = model.get_env().get_attr("spec")[0]
    except Exception:  # of any kind, if an environment lacks the attribute
        spec = None
    return {
        "trainer": f"stable-baselines3 {type(model).__name__}",
        "setting_names": SETTING_NAMES,
        "value_coef_scale": 0.5,  # their value loss is the mean squared error, ours half of it
        "env": "",
        **environment_facts(model.get_env()),
        "total_steps": model._total_timesteps,
        "num_envs": model.n_envs,
        "ranks": 1,
        "horizon": None if spec is None else spec.max_episode_steps,
        "reward_threshold": None if spec is None else spec.reward_threshold,
        "precision": "fp32",
        **optimizer_facts(policy.optimizer),
        "advantage_correction": 1,
        "groups": groups_of(policy),
        "value_head": ["value_net"],
        "heads": heads.kinds,
        "max_grad_norm": model.max_grad_norm,
        "clip": _initial(getattr(model, "clip_range", None)),
        "clip_value": _initial(getattr(model, "clip_range_vf", None)),
        "gamma": model.gamma,
        "gae_lambda": model.gae_lambda,
        "normalize_advantages": bool(model.normalize_advantage),
        "normalize_minibatches": True,
        "num_steps": updates * model.n_steps,
        "num_epochs": epochs,
        "num_minibatches": updates * minibatches,
        "learning_rate": float(model.lr_schedule(1.0)),
        "value_coef": 2 * model.vf_coef,
        "entropy_coef": model.ent_coef,
        "policy": "mlp" if lstm is None else "lstm",
        "lstm_size": None if lstm is None else lstm.hidden_size,
        "activation": "tanh" if activation is nn.Tanh else "relu" if activation is nn.ReLU else None,
        "normalize_observations": bool(scaled is not None and scaled.norm_obs),
        "normalize_rewards": bool(scaled is not None and scaled.norm_reward),
        "fresh_normalizer": bool(model._n_updates > 0 and scaled is not None and _is_fresh(scaled)),
        "squashed": bool(getattr(policy, "squash_output", False)),
        "correlated_noise": bool(getattr(model, "use_sde", False)),
        "target_kl": getattr(model, "target_kl", None),
        "desired_kl": None,
        **schedule,
        UNCHECKED_FACT: {
            **dict.fromkeys(("gradient", "replayed_log_probs", "values") if uncopied else (), uncopied),
            **dict.fromkeys(own, "Stable-Baselines3 keeps them to itself; its gradients are checked"),
            **({"actions": "gSDE draws the noise of many steps at once"} if getattr(model, "use_sde", False) else {}),
            "schedules": "the learning rate is a custom function, which is not called because it may count its calls",
        },
    }


def _is_fresh(scaled: Any) -> bool:
    """True if a VecNormalize has seen at most the observations of its last reset."""
    moments = list(scaled.obs_rms.values()) if isinstance(scaled.obs_rms, Mapping) else [scaled.obs_rms]
    return bool(scaled.norm_obs) and all(one.count < scaled.num_envs + 1 for one in moments)


def schedule_of(model: Any) -> Callable[[float], float] | None:
    """Return the learning rate as a function of the remaining training; None for a function that may have side effects."""
    schedule: Any = getattr(model.lr_schedule, "value_schedule", model.lr_schedule)
    is_library = str(getattr(schedule, "__module__", "")).startswith("stable_baselines3.")
    return schedule if is_library or is_formula(schedule) else None


def is_formula(function: Any) -> bool:
    """Return True for a Python function that uses only its argument, numbers and `math`: calling it is free of side effects."""
    if not isinstance(function, FunctionType):
        return False
    code, known = function.__code__, function.__globals__
    numbers = (*(cell.cell_contents for cell in function.__closure__ or ()), *(function.__defaults__ or ()))
    of_math = vars(math) if known.get("math") is math else {}

    def harmless(name: str) -> bool:
        if name in known:
            return known[name] is math or isinstance(known[name], int | float)
        return name in FORMULA_FUNCTIONS or name in of_math

    stores = any(step.opname.startswith(STORING) for step in dis.get_instructions(code))
    nested = any(isinstance(constant, CodeType) for constant in code.co_consts)
    plain = all(isinstance(value, int | float) for value in numbers)
    return plain and all(map(harmless, code.co_names)) and not stores and not nested


def groups_of(policy: nn.Module) -> dict[str, list[str]]:
    """Names of the parameters that serve the `actor`, the `critic` or both (`shared`), and of the memory (`lstm`)."""
    owners = {name: _owner(policy, name) for name, _ in policy.named_parameters()}
    groups = {group: [name for name, owner in owners.items() if owner == group] for group in ("actor", "shared", "critic")}
    groups["lstm"] = [name for name in owners if name.split(".")[0] in ("lstm_actor", "lstm_critic")]
    return {group: members for group, members in groups.items() if members}


def _owner(policy: nn.Module, name: str) -> str:
    parts = name.split(".")
    if any(part in CRITIC for part in parts):
        return "critic"
    if any(part in ACTOR for part in parts):
        return "actor"
    if getattr(policy, "share_features_extractor", True) is False and parts[0] == "features_extractor":
        return "actor"  # the same object as `pi_features_extractor`
    return "actor" if getattr(policy, "shared_lstm", False) else "shared"


def _initial(schedule: Any) -> float | None:
    """First value of a schedule or of a constant."""
    return None if schedule is None else float(schedule(1.0) if callable(schedule) else schedule)


def _plain(value: Any) -> Any:
    if isinstance(value, int | float | str | None):
        return value
    try:
        return float(value(1.0)) if callable(value) else str(value)
    except Exception:  # not a schedule
        return str(value)


def nonfinite_candidates(model: Any) -> Iterator[Candidate]:
    """Candidates for the first non-finite tensor, in forward order: the latest observations, the buffer, parameters and gradients."""
    yield from _arrays("observations", model._last_obs, environments=0)
    buffer = model.rollout_buffer
    steps = buffer.buffer_size if buffer.full else buffer.pos
    yield from _arrays("rewards", buffer.rewards[:steps], environments=1)
    flat = buffer.generator_ready  # then the rows of all environments follow one another
    for name in ("observations", "values", "log_probs", "advantages", "returns"):
        yield from _arrays(name, getattr(buffer, name), environments=None if flat else 1, steps=None if flat else steps)
    yield from of_parameters(list(model.policy.named_parameters()))


def _arrays(name: str, value: Any, *, environments: int | None, steps: int | None = None) -> Iterator[Candidate]:
    """One array, or the parts of observations with several."""
    parts = {f"{name}[{key!r}]": part for key, part in value.items()} if isinstance(value, Mapping) else {name: value}
    for part_name, part in parts.items():
        if part is not None:
            yield Candidate(part_name, torch.as_tensor(part[:steps]), environments)
