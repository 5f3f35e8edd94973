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
    *("adv", "advs", "advantages_batch", "norm_advantages_batch"),
)
VALUES: Aliases = (
    *("newvalue", "new_value", "new_values", "newvalues", "values_pred", "value_pred", "vpred", "mb_newvalue"),
)
OLD_VALUES: Aliases = ("mb_values", "old_values", "old_value", "values_old", "mb_old_values", "target_values_batch")
RETURNS: Aliases = (
    *("mb_returns", "returns_mb", "batch_returns", "target", "targets", "return_batch", "ret", "returns_batch"),
)
ROWS: Aliases = ("mb_inds", "mb_indices", "mb_idx", "minibatch_ind", "inds", "indices", "idx", "rows", "index")
POLICY_LOSS: Aliases = (
    *("pg_loss", "policy_loss", "actor_loss", "loss_pi", "pi_loss", "policy_gradient_loss", "surrogate_loss"),
    "action_loss",
)
VALUE_LOSS: Aliases = ("v_loss", "value_loss", "critic_loss", "vf_loss", "loss_v")
ENTROPY_LOSS: Aliases = ("entropy_loss", "ent_loss", "loss_entropy", "entropy_bonus")
ENTROPY: Aliases = ("entropy", "ent", "dist_entropy", "mean_entropy")
LOSS: Aliases = ("loss", "total_loss")
EPOCH: Aliases = ("epoch", "epoch_num", "update_epoch", "_epoch")

FLAT_ADVANTAGES: Aliases = ("b_advantages", "b_adv", "batch_advantages", "flat_advantages")
FLAT_VALUES: Aliases = ("b_values", "batch_values", "flat_values")
FLAT_RETURNS: Aliases = ("b_returns", "batch_returns", "flat_returns")
FLAT_LOG_PROBS: Aliases = ("b_logprobs", "b_log_probs", "batch_log_probs", "flat_logprobs")

REWARDS: Aliases = ("rewards", "rews", "rewards_buf", "reward_buf", "rew_buf")
ROLLOUT_VALUES: Aliases = ("values", "vals", "values_buf", "val_buf", "value_buf")
ROLLOUT_ADVANTAGES: Aliases = ("advantages", "advs", "adv_buf", "advantages_buf")
ROLLOUT_RETURNS: Aliases = ("returns", "rets", "ret_buf", "returns_buf")
ROLLOUT_LOG_PROBS: Aliases = ("logprobs", "log_probs", "logprobs_buf", "logp_buf", "old_logprobs")
DONES: Aliases = ("dones", "terminations", "dones_buf", "done_buf", "terminateds")
NEXT_DONE: Aliases = ("next_done", "next_termination", "last_done")
NEXT_VALUE: Aliases = ("next_value", "last_value", "next_values", "last_values", "bootstrap_value")
ACTIONS: Aliases = ("actions", "acts", "actions_buf", "act_buf")
OBSERVATIONS: Aliases = ("obs", "observations", "states", "obs_buf", "observations_buf", "obs_buffer", "state_buf")
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

    def accept_flat(value: object) -> Tensor | None:
        column = as_tensor(value)
        if column is None or rows is None or column.dim() == 0 or column.numel() <= int(rows.max()):
            return None
        return column.reshape(-1)[rows.to(column.device)]

    def find(own: Aliases, flat: Aliases = ()) -> Tensor | None:
        column = variables.find(own, as_column(length))
        return variables.find(flat, accept_flat) if column is None and rows is not None else column

    return MinibatchVariables(
        advantages=find(ADVANTAGES, FLAT_ADVANTAGES),
        values=find(VALUES),
        old_values=find(OLD_VALUES, FLAT_VALUES),
        returns=find(RETURNS, FLAT_RETURNS),
        rows=rows,
    )


def find_losses(variables: Variables) -> dict[str, Tensor]:
    """Return the script's own losses by the names of `MinibatchEnd`, as it holds them; the entropy's has the script's sign, or is [N]."""

    def accept(value: object) -> Tensor | None:
        return value if isinstance(value, Tensor) and as_scalar(value) is not None else None

    kinds = {"policy": POLICY_LOSS, "value": VALUE_LOSS, "entropy": (*ENTROPY_LOSS, *ENTROPY), "total": LOSS}
    losses = {kind: loss for kind, names in kinds.items() if (loss := variables.find(names, accept)) is not None}
    if "entropy" not in losses:
        entropy = variables.find(ENTROPY, lambda value: value if isinstance(value, Tensor) else None)
        if entropy is not None and as_column()(entropy) is not None:
            losses["entropy"] = entropy
    return losses


def find_total_loss(variables: Variables, accept: Callable[[Tensor], bool]) -> Tensor | None:
    """Return the script's loss of a minibatch with its graph, where `accept` takes it."""

    def scalar(value: object) -> Tensor | None:
        one = isinstance(value, Tensor) and value.requires_grad and value.numel() == 1
        return value if one and isinstance(value, Tensor) and accept(value) else None

    return variables.find(LOSS, scalar)


def find_rows(variables: Variables) -> object:
    """Return the object in which the script holds the rows of a minibatch, or its returns; None where it has neither."""
    return variables.find((*ROWS, *RETURNS), lambda value: value if isinstance(value, Tensor | np.ndarray) else None)


class RolloutVariables(NamedTuple):
    """A rollout, [T, B] each, values after it, [1, B], and actions, [T, B, D]; copies, because scripts reuse the memory. Observations
    [T, B, ...] are the script's own.
    """

    rewards: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor
    log_probs: Tensor
    ended: Tensor
    next_values: Tensor
    last_values: Tensor
    actions: Tensor | None
    observations: Tensor | None

    def with_ends(self, ended: Tensor) -> RolloutVariables:
        """Return the same with the ends that the environments returned."""
        ended = ended.to(self.values.device)
        return self._replace(ended=ended, next_values=next_values(self.values, self.last_values, ended))


def find_rollout(variables: Variables) -> RolloutVariables | None:
    """Return the rollout that the script learns from now; None where a part of it is missing.

    Where there is a flag of the step after the last, `dones[t]` says that step t begins an episode, and otherwise that it ends one.
    """
    rewards = variables.find(REWARDS, _grid())
    if rewards is None:
        return None
    steps, envs = rewards.shape

    def accept_flat(value: object) -> Tensor | None:
        tensor = as_tensor(value)
        return tensor.reshape(steps, envs) if tensor is not None and tensor.numel() == steps * envs else None

    def accept_observations(value: object) -> Tensor | None:
        tensor = as_tensor(value)
        return tensor if tensor is not None and tensor.dim() > 2 and tuple(tensor.shape[:2]) == (steps, envs) else None

    def accept_actions(value: object) -> Tensor | None:
        tensor = as_tensor(value)
        if tensor is None or tuple(tensor.shape[:2]) != (steps, envs) or tensor.dim() > 3:
            return None
        return tensor.clone().reshape(steps, envs, -1)

    def find(own: Aliases, flat: Aliases = ()) -> Tensor | None:
        tensor = variables.find(own, _grid(steps, envs))
        return variables.find(flat, accept_flat) if tensor is None else tensor

    longer = variables.find(ROLLOUT_VALUES, _grid(steps + 1, envs))
    values = find(ROLLOUT_VALUES, FLAT_VALUES) if longer is None else longer[:-1]
    advantages = find(ROLLOUT_ADVANTAGES, FLAT_ADVANTAGES)
    returns = find(ROLLOUT_RETURNS, FLAT_RETURNS)
    log_probs = find(ROLLOUT_LOG_PROBS, FLAT_LOG_PROBS)
    advantages = _in_use(variables.find(FLAT_ADVANTAGES, as_column(steps * envs)), advantages, log_probs, variables)
    dones = find(DONES)
    last = longer[-1] if longer is not None else variables.find(NEXT_VALUE, as_column(envs))
    if values is None or advantages is None or log_probs is None or dones is None or last is None:
        return None
    next_done = variables.find(NEXT_DONE, as_column(envs))
    ended = (dones if next_done is None else torch.cat([dones[1:], next_done.reshape(1, envs)])).bool()
    return RolloutVariables(
        rewards=rewards.clone(),
        values=values.clone(),
        advantages=advantages.clone(),
        returns=(advantages + values if returns is None else returns).clone(),
        log_probs=log_probs.clone(),
        ended=ended,
        next_values=next_values(values, last, ended),
        last_values=last.clone().reshape(1, envs),
        actions=variables.find(ACTIONS, accept_actions),
        observations=variables.find(OBSERVATIONS, accept_observations),
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
    """Accept [T, B], also as [T, B, 1]; of that shape where one is given."""

    def accept(value: object) -> Tensor | None:
        tensor = as_tensor(value)
        if tensor is not None and tensor.dim() == 3 and tensor.shape[-1] == 1:
            tensor = tensor.squeeze(-1)
        if tensor is None or tensor.dim() != 2 or (steps is not None and tuple(tensor.shape) != (steps, envs)):
            return None
        return tensor

    return accept


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
