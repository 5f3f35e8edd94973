"""Variables of a script: where it calls into torch, and which of them are the tensors of a PPO update.

Shapes: T steps, B environments, N rows, D action dimensions.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from esper_telemetry.adapters.columns import next_values

T = TypeVar("T")

Aliases = tuple[str, ...]
"""Names that scripts have for the same thing, the commonest first."""

LOG_RATIO: Aliases = ("logratio", "log_ratio", "logratios", "log_ratios", "logprob_diff")
RATIO: Aliases = ("ratio", "ratios", "prob_ratio", "rho", "imp_weights", "ratio_batch")
NEW_LOG_PROBS: Aliases = (
    *("newlogprob", "new_logprob", "new_log_prob", "new_logprobs", "new_log_probs", "curr_log_probs", "logp"),
    "log_probs",
)
OLD_LOG_PROBS: Aliases = (
    *("mb_logprobs", "old_logprob", "old_log_prob", "old_logprobs", "old_log_probs", "mb_old_logprobs", "logp_old"),
)
ADVANTAGES: Aliases = (
    *("mb_advantages", "mb_adv", "mb_advs", "advantages_mb", "batch_advantages", "minibatch_advantages", "advantage"),
    *("adv", "advs", "advantages_batch", "norm_advantages_batch", "A_k"),
)
VALUES: Aliases = (
    *(
        "newvalue",
        "new_value",
        "new_values",
        "newvalues",
        "values_pred",
        "value_pred",
        "vpred",
        "mb_newvalue",
        "state_values",
    ),
)
OLD_VALUES: Aliases = ("mb_values", "old_values", "old_value", "values_old", "mb_old_values", "target_values_batch")
RETURNS: Aliases = (
    *(
        "mb_returns",
        "returns_mb",
        "batch_returns",
        "target",
        "targets",
        "return_batch",
        "ret",
        "returns_batch",
        "td_target",
    ),
    *("reward_sum", "batch_rtgs"),
)
ROWS: Aliases = ("mb_inds", "mb_indices", "mb_idx", "minibatch_ind", "inds", "indices", "idx", "rows", "index")
POLICY_LOSS: Aliases = (
    *("pg_loss", "policy_loss", "actor_loss", "loss_pi", "pi_loss", "policy_gradient_loss", "surrogate_loss"),
    *("action_loss", "a_loss"),
)
VALUE_LOSS: Aliases = ("v_loss", "value_loss", "critic_loss", "vf_loss", "loss_v", "c_loss", "obj_critic")
ENTROPY_LOSS: Aliases = ("entropy_loss", "ent_loss", "loss_entropy", "entropy_bonus")
ENTROPY: Aliases = ("entropy", "ent", "dist_entropy", "mean_entropy", "obj_entropy")
LOSS: Aliases = ("loss", "total_loss")
EPOCH: Aliases = ("epoch", "epoch_num", "update_epoch", "_epoch")

FLAT_ADVANTAGES: Aliases = ("b_advantages", "b_adv", "batch_advantages", "flat_advantages")
FLAT_VALUES: Aliases = ("b_values", "batch_values", "flat_values")
FLAT_RETURNS: Aliases = ("b_returns", "batch_returns", "flat_returns")
FLAT_LOG_PROBS: Aliases = ("b_logprobs", "b_log_probs", "batch_log_probs", "flat_logprobs")

REWARDS: Aliases = ("rewards", "rews", "rewards_buf", "reward_buf", "rew_buf", "r_hoder", "b_rewards", "batch_rewards")
ROLLOUT_VALUES: Aliases = ("values", "vals", "values_buf", "val_buf", "value_buf", "vs", "state_values", "old_values")
ROLLOUT_ADVANTAGES: Aliases = ("advantages", "advs", "adv_buf", "advantages_buf")
ROLLOUT_RETURNS: Aliases = ("returns", "rets", "ret_buf", "returns_buf")
ROLLOUT_LOG_PROBS: Aliases = (
    *("logprobs", "log_probs", "logprobs_buf", "logp_buf", "old_logprobs", "old_log_probs", "logprob_a_hoder"),
)
DONES: Aliases = ("dones", "terminations", "dones_buf", "done_buf", "terminateds")
NEXT_DONE: Aliases = ("next_done", "next_termination", "last_done")
NEXT_VALUE: Aliases = ("next_value", "last_value", "next_values", "last_values", "bootstrap_value")
NEXT_VALUES: Aliases = ("next_values", "vs_", "values_next", "next_vals")
ACTIONS: Aliases = ("actions", "acts", "actions_buf", "act_buf", "a_hoder")
OBSERVATIONS: Aliases = (
    *("obs", "observations", "states", "obs_buf", "observations_buf", "obs_buffer", "state_buf", "s_hoder"),
)
GLOBAL_STEP: Aliases = (
    *("global_step", "global_steps", "total_steps_done", "num_timesteps", "timestep", "env_steps", "step_count"),
    "agent_steps",
)
SETTINGS: Aliases = ("args", "config", "cfg", "hp", "hparams", "opts", "options", "params", "flags")
"""Names of the object with a script's settings."""

ACTOR = r"(^|\.|_)(actor|policy|pi|action|act|logits|mean|mu|log_?std|dist|heads?)(_|\.|\d|$|net|head|mean|log_?std)"
CRITIC = r"(^|\.|_)(critic|value|vf|v|val|q)(_|\.|\d|$|net|head)"
"""Names of parameters, as regular expressions; the critic's are tried first. Parameters that match neither serve both."""

SKIPPED_PACKAGES = {"torch", "esper_telemetry", "accelerate", "contextlib", "gymnasium"}
"""Packages whose frames stand between the script and the tap."""

MAX_FRAMES = 4
"""Frames of the script that are searched, the innermost first."""

CO_OPTIMIZED = 0x1
"""Flag of code whose local variables are no dictionary."""


class Variables:
    """The variables of a frame, then the attributes of its `self` and its settings, then those of the frames that called it.

    An instance keeps alive what the script would release: do not store it beyond the call that made it.
    """

    def __init__(self, scopes: list[Mapping[str, Any]]) -> None:
        self._scopes = scopes

    def find(self, names: Aliases, accept: Callable[[Any], T | None]) -> T | None:
        """Return what `accept` makes of the first variable with one of these names that it accepts; names before scopes."""
        for name in names:
            for scope in self._scopes:
                if name in scope and (value := accept(scope[name])) is not None:
                    return value
        return None

    def values(self) -> Iterator[Any]:
        """All values."""
        for scope in self._scopes:
            yield from scope.values()


def calling_variables() -> Variables:
    """Return the variables of the script's frames that called into torch."""
    scopes: list[Mapping[str, Any]] = []
    for frame in _frames():
        scopes.append(_locals(frame))
        scopes += [vars(owner) for name in ("self", "agent") if hasattr(owner := scopes[-1].get(name), "__dict__")]
    scopes += [values for scope in list(scopes) for name in SETTINGS if (values := settings_of(scope.get(name)))]
    return Variables(scopes)


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    count = 0
    while frame is not None and count < MAX_FRAMES:
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in SKIPPED_PACKAGES:
            yield frame
            count += 1
            if frame.f_globals.get("__name__") == "__main__" and frame.f_locals is frame.f_globals:
                return
        frame = frame.f_back


def _locals(frame: FrameType) -> Mapping[str, Any]:
    """A copy of a frame's variables.

    Python 3.11 and 3.12 keep a dictionary of a function's variables with its frame once anyone has read them. Tensors are taken out of it
    again, or they would live longer than the script lets them.
    """
    variables = frame.f_locals
    if not frame.f_code.co_flags & CO_OPTIMIZED:
        return variables
    copied = dict(variables)
    if type(variables) is dict:
        for name, value in copied.items():
            if hasattr(value, "grad_fn"):
                del variables[name]
    return copied


def settings_of(value: object) -> dict[str, Any]:
    """Settings by name, of a dictionary or an object with attributes; empty for anything else."""
    if isinstance(value, Mapping):
        return {key: entry for key, entry in value.items() if isinstance(key, str)}
    return dict(vars(value)) if hasattr(value, "__dict__") and not callable(value) else {}


def as_tensor(value: object) -> Tensor | None:
    """Accept a tensor or an array of numbers, as a detached floating tensor."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "fbiu":
        value = torch.as_tensor(value)
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return None
    return value.detach() if value.is_floating_point() else value.detach().float()


def as_column(length: int | None = None) -> Callable[[object], Tensor | None]:
    """Accept one number per row, [N], also as [N, 1] and [T, b]; of that length where one is given."""

    def accept(value: object) -> Tensor | None:
        column = as_tensor(value)
        if column is None or column.dim() == 0 or (length is not None and column.numel() != length):
            return None
        return column.reshape(-1)

    return accept


def as_scalar(value: object) -> Tensor | None:
    """Accept a tensor with one entry, as 0-d."""
    scalar = value.detach() if isinstance(value, Tensor) and value.is_floating_point() else None
    return scalar.reshape(()) if scalar is not None and scalar.numel() == 1 else None


def as_integer(value: object) -> int | None:
    """Accept a whole number."""
    return None if isinstance(value, bool) or not isinstance(value, int | np.integer) else int(value)


def as_number(value: object) -> float | None:
    """Accept a number of Python."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


class Ratio(NamedTuple):
    """The log-ratio of a minibatch, [N], and the object that the script holds it in."""

    log_ratio: Tensor
    source: object


def find_ratio(variables: Variables) -> Ratio | None:
    """Return the minibatch's log-ratio: itself, from the ratio, or from new and old log-probabilities."""

    def accept(value: object) -> Ratio | None:
        tensor = as_tensor(value) if isinstance(value, Tensor) else None
        return None if tensor is None or tensor.dim() == 0 else Ratio(tensor.reshape(-1), value)

    direct = variables.find(LOG_RATIO, accept)
    if direct is not None:
        return direct
    ratio = variables.find(RATIO, accept)
    if ratio is not None:
        return Ratio(ratio.log_ratio.log(), ratio.source)
    new = variables.find(NEW_LOG_PROBS, accept)
    old = None if new is None else variables.find(OLD_LOG_PROBS, as_column(new.log_ratio.numel()))
    return None if new is None or old is None else Ratio(new.log_ratio - old, new.source)


class MinibatchVariables(NamedTuple):
    """Columns of a minibatch, [N] each; None for those that the script does not have."""

    advantages: Tensor | None
    values: Tensor | None
    old_values: Tensor | None
    returns: Tensor | None
    rows: Tensor | None


def find_minibatch(variables: Variables, length: int) -> MinibatchVariables:
    """Return the columns of a minibatch, under a name of their own or as rows of the flattened rollout."""

    def accept_rows(value: object) -> Tensor | None:
        if isinstance(value, np.ndarray) and value.dtype.kind == "i":
            value = torch.as_tensor(value)
        if isinstance(value, Tensor) and value.dtype is torch.long and value.dim() == 1 and len(value) == length:
            return value.clone()
        return None

    rows = variables.find(ROWS, accept_rows)
    # a slice is one of columns that the script has shuffled: it does not say which rows of the rollout they are
    part = variables.find(ROWS, lambda value: value if isinstance(value, slice) else None) if rows is None else None

    def accept_flat(value: object) -> Tensor | None:
        column = as_tensor(value)
        if column is None or column.dim() == 0:
            return None
        if rows is None:
            column = column.reshape(-1)[part]
            return column if column.numel() == length else None
        return column.reshape(-1)[rows.to(column.device)] if column.numel() > int(rows.max()) else None

    def find(own: Aliases, flat: Aliases = ()) -> Tensor | None:
        column = variables.find(own, as_column(length))
        if column is not None or (rows is None and part is None):
            return column
        return variables.find(flat if part is None else (*own, *flat), accept_flat)

    return MinibatchVariables(
        advantages=find(ADVANTAGES, FLAT_ADVANTAGES),
        values=find(VALUES),
        old_values=find(OLD_VALUES, FLAT_VALUES),
        returns=find(RETURNS, FLAT_RETURNS),
        rows=rows,
    )


def find_losses(variables: Variables, rows: int = 0) -> dict[str, Tensor]:
    """Return the script's own losses by the names of `MinibatchEnd`, as it holds them: 0-d, or one for each of so many rows; the entropy's
    has the script's sign.
    """

    def scalar(value: object) -> Tensor | None:
        return value if isinstance(value, Tensor) and as_scalar(value) is not None else None

    def of_rows(value: object) -> Tensor | None:
        return value if isinstance(value, Tensor) and value.requires_grad and value.numel() == rows else None

    kinds = {"policy": POLICY_LOSS, "value": VALUE_LOSS, "entropy": (*ENTROPY_LOSS, *ENTROPY), "total": LOSS}
    losses = {kind: loss for kind, names in kinds.items() if (loss := variables.find(names, scalar)) is not None}
    for kind, names in {"policy": POLICY_LOSS, "value": VALUE_LOSS, "entropy": ENTROPY}.items():
        if kind not in losses and (loss := variables.find(names, of_rows)) is not None:
            losses[kind] = loss
    return losses


def find_total_loss(variables: Variables, accept: Callable[[Tensor], bool]) -> Tensor | None:
    """Return the script's loss of a minibatch with its graph, where `accept` takes it."""

    def scalar(value: object) -> Tensor | None:
        one = isinstance(value, Tensor) and value.requires_grad and value.numel() == 1
        return value if one and isinstance(value, Tensor) and accept(value) else None

    return variables.find(LOSS, scalar)


def find_rows(variables: Variables) -> object:
    """Return the object in which the script holds the rows of a minibatch, or its returns; None where it has neither."""
    return variables.find(
        (*ROWS, *RETURNS), lambda value: value if isinstance(value, Tensor | np.ndarray | slice) else None
    )


class RolloutVariables(NamedTuple):
    """A rollout, [T, B] each, and values after it, [1, B]; copies, because scripts reuse the memory."""

    rewards: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor
    log_probs: Tensor
    ended: Tensor
    next_values: Tensor
    last_values: Tensor


class RolloutFinder:
    """Searches variables for the parts of the rollout that a script learns from now, [T, B] each.

    Args:
        variables: of the script.
        ends: [T, B], bool: steps since the rollout before that ended an episode, as the environments returned them; None where they do
            not say. Then there is no rollout without rewards [T, B].
    """

    def __init__(self, variables: Variables, ends: Tensor | None = None) -> None:
        self._variables = variables
        self.rewards = None if ends is None else variables.find(REWARDS, _grid(*ends.shape))
        if self.rewards is None and (other := variables.find(REWARDS, _grid())) is not None:
            self.rewards, ends = other, None
        self._ends = ends
        shape = ends.shape if ends is not None else (0, 0) if self.rewards is None else self.rewards.shape
        self.steps, self.envs = shape[0], shape[1]

    def find(self, own: Aliases, flat: Aliases = ()) -> Tensor | None:
        """Return a column under a name of its own, or under one of the flattened."""

        def accept_flat(value: object) -> Tensor | None:
            tensor = as_tensor(value)
            fits = tensor is not None and tensor.numel() == self.steps * self.envs
            return tensor.reshape(self.steps, self.envs) if tensor is not None and fits else None

        tensor = self._variables.find(own, _grid(self.steps, self.envs))
        return self._variables.find(flat, accept_flat) if tensor is None else tensor

    @property
    def log_probs(self) -> Tensor | None:
        """Log-probabilities at collection."""
        return self.find(ROLLOUT_LOG_PROBS, FLAT_LOG_PROBS)

    @property
    def actions(self) -> Tensor | None:
        """Actions [T, B, D], copied."""

        def accept(value: object) -> Tensor | None:
            tensor = _stacked(value)
            if tensor is not None and self.envs == 1 and tensor.dim() > 0 and len(tensor) == self.steps:
                return tensor.clone().reshape(self.steps, 1, -1)
            if tensor is None or tuple(tensor.shape[:2]) != (self.steps, self.envs) or tensor.dim() > 3:
                return None
            return tensor.clone().reshape(self.steps, self.envs, -1)

        return self._variables.find(ACTIONS, accept)

    @property
    def observations(self) -> Tensor | None:
        """Observations [T, B, ...], the script's own."""

        def accept(value: object) -> Tensor | None:
            tensor, steps = _stacked(value), self.steps
            if (
                tensor is not None
                and self.envs == 1
                and tensor.dim() > 1
                and len(tensor) == steps != 1 != tensor.shape[1]
            ):
                tensor = tensor.unsqueeze(1)
            fits = tensor is not None and tensor.dim() > 2 and tuple(tensor.shape[:2]) == (steps, self.envs)
            return tensor if fits else None

        return self._variables.find(OBSERVATIONS, accept)

    @property
    def ended(self) -> Tensor | None:
        """Steps that ended an episode, bool: where there is a flag of the step after the last, `dones[t]` says that step t begins one."""
        dones, next_done = self.find(DONES), self._variables.find(NEXT_DONE, as_column(self.envs))
        if self._ends is not None or dones is None:
            return self._ends
        return (dones if next_done is None else torch.cat([dones[1:], next_done.reshape(1, self.envs)])).bool()

    def rollout(self) -> RolloutVariables | None:
        """Return all parts; None where one is missing."""
        if self.rewards is None:
            return None
        variables, size = self._variables, self.rewards.numel()
        longer = variables.find(ROLLOUT_VALUES, _grid(self.steps + 1, self.envs))
        values = self.find(ROLLOUT_VALUES, FLAT_VALUES) if longer is None else longer[:-1]
        log_probs, returns, ended = self.log_probs, self.find(ROLLOUT_RETURNS, FLAT_RETURNS), self.ended
        advantages = self.find(ROLLOUT_ADVANTAGES, FLAT_ADVANTAGES)
        advantages = _in_use(variables.find(FLAT_ADVANTAGES, as_column(size)), advantages, log_probs, variables)
        following = self.find(NEXT_VALUES)
        last = longer[-1] if longer is not None else variables.find(NEXT_VALUE, as_column(self.envs))
        last = following[-1] if last is None and following is not None else last
        if values is None or advantages is None or log_probs is None or last is None or ended is None:
            return None
        ended = ended.to(values.device)
        return RolloutVariables(
            rewards=self.rewards.clone(),
            values=values.clone(),
            advantages=advantages.clone(),
            returns=(advantages + values if returns is None else returns).clone(),
            log_probs=log_probs.clone(),
            ended=ended,
            next_values=next_values(values, last, ended),
            last_values=last.clone().reshape(1, self.envs),
        )


def _in_use(
    flat: Tensor | None, advantages: Tensor | None, log_probs: Tensor | None, variables: Variables
) -> Tensor | None:
    """Return the flattened advantages as [T, B], where the script flattens its log-probabilities time by time; else `advantages`.

    Minibatches are taken from the flattened ones, which need not be those of the rollout.
    """
    if flat is None or advantages is None or log_probs is None:
        return advantages
    other = variables.find(FLAT_LOG_PROBS, as_column(log_probs.numel()))
    by_time = other is not None and torch.equal(other, log_probs.reshape(-1)) and min(log_probs.shape) > 1
    return flat.reshape(advantages.shape) if by_time else advantages


def _grid(steps: int | None = None, envs: int | None = None) -> Callable[[object], Tensor | None]:
    """Accept [T, B], also as [T, B, 1]; of that shape where one is given, and then also [T] of one environment, as a list too."""

    def accept(value: object) -> Tensor | None:
        if steps is None or envs != 1:
            tensor = as_tensor(value)
            if tensor is not None and tensor.dim() == 3 and tensor.shape[-1] == 1:
                tensor = tensor.squeeze(-1)
            fits = tensor is not None and tensor.dim() == 2 and (steps is None or tuple(tensor.shape) == (steps, envs))
            return tensor if fits else None
        tensor = _stacked(value)
        fits = tensor is not None and tensor.numel() == steps and steps in (*tensor.shape, 1)
        return tensor.reshape(steps, 1) if tensor is not None and fits else None

    return accept


def _stacked(value: object) -> Tensor | None:
    """Accept a tensor, an array, or a list of numbers, arrays or tensors of one shape, as a detached floating tensor."""
    if isinstance(value, list) and value and isinstance(value[0], int | float | np.generic | np.ndarray | Tensor):
        parts = [as_tensor(one) if isinstance(one, Tensor) else as_tensor(np.asarray(one)) for one in value]
        shapes = {None if part is None else part.shape for part in parts}
        return (
            torch.stack([part for part in parts if part is not None])
            if len(shapes) == 1 and None not in shapes
            else None
        )
    return as_tensor(value)


def parameter_names(variables: Variables, parameters: Iterable[Tensor]) -> dict[int, str]:
    """Return names of parameters by `id`, from the smallest of the script's modules that have most of them; else by their places."""
    places = {key: f"parameter_{place}" for place, key in enumerate(dict.fromkeys(map(id, parameters)))}
    best: tuple[int, int] = (0, 0)
    names: dict[int, str] = {}
    for module in {id(value): value for value in variables.values() if isinstance(value, nn.Module)}.values():
        named = {id(parameter): name for name, parameter in module.named_parameters()}
        score = (len(places.keys() & named.keys()), -len(named))
        if score[0] and score > best:
            best, names = score, named
    # without the prefixes of DataParallel and torch.compile
    plain = {key: re.sub(r"(^|\.)(module|_orig_mod)(?=\.)", "", name).lstrip(".") for key, name in names.items()}
    return places | {key: name for key, name in plain.items() if key in places}


def groups_of(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the parameters that serve the actor, the critic or both, by their names; empty where the names do not say."""
    groups: dict[str, list[str]] = {}
    for name in names:
        group = "critic" if re.search(CRITIC, name) else "actor" if re.search(ACTOR, name) else "shared"
        groups.setdefault(group, []).append(name)
    return groups if {"actor", "critic"} & groups.keys() else {}
