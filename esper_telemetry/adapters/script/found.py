"""Tensors of a PPO update among the names of a script. Shapes: T steps, B environments, N rows, D action dimensions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from esper_telemetry.adapters.script import aliases
from esper_telemetry.adapters.script.frames import SETTINGS, Names, settings


def tensor(value: object) -> Tensor | None:
    """Floating tensors and arrays, detached; None for anything else."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "fbiu":
        value = torch.as_tensor(value)
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return None
    return value.detach() if value.is_floating_point() else value.detach().float()


def column(length: int | None = None) -> Callable[[object], Tensor | None]:
    """Accepts one number per row, [N], also as [N, 1] and [T, b]; of that length where one is given."""

    def accept(value: object) -> Tensor | None:
        found = tensor(value)
        if found is None or found.dim() == 0 or (length is not None and found.numel() != length):
            return None
        return found.reshape(-1)

    return accept


def scalar(value: object) -> Tensor | None:
    """Accepts a 0-d tensor of a loss."""
    found = value.detach() if isinstance(value, Tensor) and value.is_floating_point() else None
    return found.reshape(()) if found is not None and found.numel() == 1 else None


def integer(value: object) -> int | None:
    """Accepts a whole number that counts."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        return None
    return int(value)


class Ratio(NamedTuple):
    """The log-ratio of a minibatch, [N], and the object that the script holds it in."""

    log_ratio: Tensor
    source: object


def find_ratio(names: Names) -> Ratio | None:
    """The minibatch's log-ratio: itself, from the ratio, or from new and old log-probabilities."""

    def accept(value: object) -> Ratio | None:
        found = tensor(value) if isinstance(value, Tensor) else None
        return None if found is None or found.dim() == 0 else Ratio(found.reshape(-1), value)

    direct = names.find(aliases.LOG_RATIO, accept)
    if direct is not None:
        return direct
    ratio = names.find(aliases.RATIO, accept)
    if ratio is not None:
        return Ratio(ratio.log_ratio.log(), ratio.source)
    new = names.find(aliases.NEW_LOG_PROBS, accept)
    old = None if new is None else names.find(aliases.OLD_LOG_PROBS, column(new.log_ratio.numel()))
    return None if new is None or old is None else Ratio(new.log_ratio - old, new.source)


def find_rows(names: Names, length: int) -> Tensor | None:
    """Which rows of the flattened rollout a minibatch is made of, [N]."""

    def accept(value: object) -> Tensor | None:
        if isinstance(value, np.ndarray) and value.dtype.kind == "i":
            value = torch.as_tensor(value)
        if isinstance(value, Tensor) and value.dtype is torch.long and value.dim() == 1 and len(value) == length:
            return value.clone()
        return None

    return names.find(aliases.ROWS, accept)


class ScriptRows(NamedTuple):
    """Columns of a minibatch, [N] each, as far as they are known."""

    advantages: Tensor | None
    values: Tensor | None
    old_values: Tensor | None
    returns: Tensor | None
    rows: Tensor | None


def find_columns(names: Names, length: int) -> ScriptRows:
    """What belongs to the rows of a minibatch, under a name of its own or as rows of the flattened rollout."""
    rows = find_rows(names, length)

    def find(own: tuple[str, ...], flat: tuple[str, ...] = ()) -> Tensor | None:
        found = names.find(own, column(length))
        if found is None and rows is not None and flat:
            found = names.find(flat, picked(rows))
        return found

    return ScriptRows(
        advantages=find(aliases.ADVANTAGES, aliases.FLAT_ADVANTAGES),
        values=find(aliases.VALUES),
        old_values=find(aliases.OLD_VALUES, aliases.FLAT_VALUES),
        returns=find(aliases.RETURNS, aliases.FLAT_RETURNS),
        rows=rows,
    )


def picked(rows: Tensor) -> Callable[[object], Tensor | None]:
    """Accepts a flat column and takes these rows of it."""

    def accept(value: object) -> Tensor | None:
        found = tensor(value)
        if found is None or found.dim() == 0 or found.numel() <= int(rows.max()):
            return None
        return found.reshape(-1)[rows.to(found.device)]

    return accept


def find_losses(names: Names) -> dict[str, Tensor]:
    """Losses by the names that `MinibatchEnd` has for them; the entropy's is its negative mean."""
    kinds = {"policy": aliases.POLICY_LOSS, "value": aliases.VALUE_LOSS, "total": aliases.LOSS}
    found = {kind: loss for kind, known in kinds.items() if (loss := names.find(known, scalar)) is not None}
    entropy = names.find(aliases.ENTROPY, column())
    if entropy is not None:
        found["entropy"] = -entropy.mean()
    return found


class ScriptRollout(NamedTuple):
    """A rollout, [T, B] each, and the actions, [T, B] or [T, B, D]; copies."""

    rewards: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor
    log_probs: Tensor
    ended: Tensor
    next_values: Tensor
    actions: Tensor | None


def find_rollout(names: Names) -> ScriptRollout | None:
    """The rollout that the script learns from now; None where a part of it is not to be seen.

    Where there is a flag of the step after the last, `dones[t]` says that step t begins an episode, and otherwise that it ends one.
    """
    rewards = names.find(aliases.REWARDS, grid())
    if rewards is None:
        return None
    steps, size = rewards.shape
    whole = grid(steps, size)

    def find(own: tuple[str, ...], flat: tuple[str, ...] = ()) -> Tensor | None:
        found = names.find(own, whole)
        return names.find(flat, flattened(steps, size)) if found is None and flat else found

    longer = names.find(aliases.ROLLOUT_VALUES, grid(steps + 1, size))
    values = find(aliases.ROLLOUT_VALUES, aliases.FLAT_VALUES) if longer is None else longer[:-1]
    advantages = find(aliases.ROLLOUT_ADVANTAGES, aliases.FLAT_ADVANTAGES)
    returns = find(aliases.ROLLOUT_RETURNS, aliases.FLAT_RETURNS)
    log_probs = find(aliases.ROLLOUT_LOG_PROBS, aliases.FLAT_LOG_PROBS)
    dones = find(aliases.DONES)
    last = longer[-1] if longer is not None else names.find(aliases.NEXT_VALUE, column(size))
    if values is None or advantages is None or log_probs is None or dones is None or last is None:
        return None
    next_done = names.find(aliases.NEXT_DONE, column(size))
    ended = dones if next_done is None else torch.cat([dones[1:], next_done.reshape(1, size)])
    following = torch.cat([values[1:], last.reshape(1, size).to(values)])
    return ScriptRollout(
        rewards=rewards.clone(),
        values=values.clone(),
        advantages=advantages.clone(),
        returns=(advantages + values if returns is None else returns).clone(),
        log_probs=log_probs.clone(),
        ended=ended.bool(),
        next_values=following * (1 - ended.to(following)),
        actions=names.find(aliases.ACTIONS, acted(steps, size)),
    )


def grid(steps: int | None = None, size: int | None = None) -> Callable[[object], Tensor | None]:
    """Accepts [T, B], also as [T, B, 1]."""

    def accept(value: object) -> Tensor | None:
        found = tensor(value)
        if found is not None and found.dim() == 3 and found.shape[-1] == 1:
            found = found.squeeze(-1)
        if found is None or found.dim() != 2 or (steps is not None and tuple(found.shape) != (steps, size)):
            return None
        return found

    return accept


def flattened(steps: int, size: int) -> Callable[[object], Tensor | None]:
    """Accepts a flattened rollout, [T B], and gives it its shape back."""

    def accept(value: object) -> Tensor | None:
        found = tensor(value)
        return found.reshape(steps, size) if found is not None and found.numel() == steps * size else None

    return accept


def acted(steps: int, size: int) -> Callable[[object], Tensor | None]:
    """Accepts actions [T, B] or [T, B, D]: a copy."""

    def accept(value: object) -> Tensor | None:
        found = tensor(value)
        return (
            found.clone() if found is not None and tuple(found.shape[:2]) == (steps, size) and found.dim() < 4 else None
        )

    return accept


def find_facts(names: Names, max_norm: float | None) -> dict[str, Any]:
    """What detectors need to know, as far as the script's settings say it."""
    facts: dict[str, Any] = {"precision": "fp32", "max_grad_norm": max_norm, "advantage_correction": 1}
    for fact, known in aliases.FACTS.items():
        accept = text if fact == "env" else real
        value = names.find(known, accept)
        if value is not None:
            facts[fact] = value
    normalizes = names.find(aliases.NORMALIZES, flag)
    if normalizes is not None:
        facts.update(normalize_advantages=normalizes, normalize_minibatches=normalizes)
    if names.find(aliases.CLIPS_VALUES, flag) and "clip" in facts:
        facts["clip_value"] = facts["clip"]
    return facts


def real(value: object) -> float | int | None:
    """Accepts a number."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def flag(value: object) -> bool | None:
    """Accepts True and False."""
    return value if isinstance(value, bool) else None


def text(value: object) -> str | None:
    """Accepts a string."""
    return value if isinstance(value, str) else None


def find_config(names: Names) -> dict[str, Any]:
    """The script's settings, as far as they are plain values."""
    found = names.find(SETTINGS, lambda value: settings(value) or None) or {}
    return {key: value for key, value in found.items() if isinstance(value, str | int | float | bool | None)}


def find_names(names: Names, parameters: Iterable[Tensor]) -> dict[int, str]:
    """Names of parameters by their identity, from the smallest of the script's modules that hold most of them; else their places."""
    wanted = {id(parameter) for parameter in parameters}
    best: tuple[int, int] = (0, 0)
    found: dict[int, str] = {}
    for module in {id(value): value for value in names.values() if isinstance(value, nn.Module)}.values():
        named = {id(parameter): plain_name(name) for name, parameter in module.named_parameters()}
        score = (len(wanted & named.keys()), -len(named))
        if score[0] and score > best:
            best, found = score, named
    places = {key: f"parameter_{place}" for place, key in enumerate(dict.fromkeys(map(id, parameters)))}
    return places | {key: name for key, name in found.items() if key in wanted}


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers put before it."""
    return re.sub(r"(^|\.)(module|_orig_mod)(?=\.)", "", name).lstrip(".")


def groups_of(names: Iterable[str]) -> dict[str, list[str]]:
    """Which parameters serve the actor, the critic or both, by their names; empty where the names do not tell."""
    found: dict[str, list[str]] = {}
    for name in names:
        group = "critic" if re.search(aliases.CRITIC, name) else "actor" if re.search(aliases.ACTOR, name) else "shared"
        found.setdefault(group, []).append(name)
    return found if {"actor", "critic"} & found.keys() else {}


def half_square(losses: Mapping[str, Tensor], columns: ScriptRows) -> float:
    """By what the script's value loss is to be multiplied to be half the mean square, at weights that have not moved."""
    if "value" not in losses or columns.values is None or columns.returns is None:
        return 1.0
    square = float((columns.values - columns.returns).square().mean())
    loss = float(losses["value"])
    return next((factor for factor in (1.0, 0.5) if square and abs(loss * factor / square - 0.5) < 0.01), 1.0)
