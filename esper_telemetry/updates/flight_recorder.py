"""The flight recorder: every optimizer step of an update, and the transitions that the policy moved away from most."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from esper_telemetry.core.reduction import Mean
from esper_telemetry.metrics.gradients.norms import gradient_norms
from esper_telemetry.updates.data import BackwardGradients, Minibatches, RolloutData, Snapshot

MOST_ROWS = 16


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """One optimizer step.

    Attributes:
        step, epoch: which, from 0.
        kl: estimate k3 of the policy's move, nats.
        norm: of the gradient before clipping.
        clip_coef: what clipping multiplied it with.
        groups: norms of the declared groups.
    """

    step: int
    epoch: int
    kl: float | None = None
    norm: float | None = None
    clip_coef: float | None = None
    groups: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HeadShift:
    """What one head chose, and its log-probability of that then and now; None where nobody says."""

    action: int | float | list[float] | None = None
    old_log_prob: float | None = None
    new_log_prob: float | None = None


@dataclass(frozen=True, slots=True)
class WorstRow:
    """A transition whose probability changed more than that of others.

    Attributes:
        log_ratio: log-probability now minus at collection.
        advantage: what multiplies the ratio.
        step, epoch: the optimizer step whose minibatch it was in; `Flight.steps` tells the gradient of that minibatch.
        time, env: where it stands in the rollout; None where the trainer does not say.
        old_log_prob, new_log_prob: of all heads together.
        heads: each by itself.
    """

    log_ratio: float
    advantage: float
    step: int
    epoch: int
    time: int | None = None
    env: int | None = None
    old_log_prob: float | None = None
    new_log_prob: float | None = None
    heads: Mapping[str, HeadShift] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Flight:
    """What an update left for whoever asks why."""

    steps: tuple[OptimizerStep, ...] = ()
    worst: tuple[WorstRow, ...] = ()


def flight_of(snapshot: Snapshot, facts: Mapping[str, Any], *, rows: int = MOST_ROWS) -> Flight:
    """Every step of an update and its `rows` largest |log-ratio|; those that are not finite come first."""
    minibatches = snapshot.minibatches
    if minibatches is None:
        return Flight(tuple(_steps(None, snapshot.gradients, facts)))
    return Flight(
        tuple(_steps(minibatches, snapshot.gradients, facts)),
        tuple(_worst(minibatches, snapshot.rollout, rows)),
    )


def _steps(
    minibatches: Minibatches | None, gradients: tuple[BackwardGradients, ...], facts: Mapping[str, Any]
) -> Iterator[OptimizerStep]:
    norms = [row for part in gradients for row in _norms(part, facts)]
    divergences = [] if minibatches is None else _divergences(minibatches)
    epochs = [epoch for part in gradients for epoch in part.epochs]
    if minibatches is not None:
        epochs = list(minibatches.epochs)
    for step, epoch in enumerate(epochs):
        kl = divergences[step] if step < len(divergences) else None
        yield OptimizerStep(step, epoch, kl, **(norms[step] if step < len(norms) else {}))


def _norms(part: BackwardGradients, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Per step the arguments of `OptimizerStep` that gradients tell."""
    found = gradient_norms(part.norms, part.names, facts.get("groups"), max_norm=part.max_norm)
    total, coefs = _column(found.total.norm_preclip), _column(found.clip.coef)
    groups = [] if found.groups.norm_preclip is None else _table(found.groups.norm_preclip)
    names = found.groups.group
    return [
        {
            "norm": total[step] if total else None,
            "clip_coef": coefs[step] if coefs else None,
            "groups": dict(zip(names, groups[step], strict=True)) if groups else {},
        }
        for step in range(len(part.epochs))
    ]


def _column(mean: Mean | None) -> list[float | None]:
    """One number per step, None where it is undefined."""
    return [] if mean is None else [row[0] for row in _table(mean)]


def _table(mean: Mean) -> list[list[float | None]]:
    """Per step one number per label, None where it is undefined."""
    totals, counts = torch.as_tensor(mean.total), torch.as_tensor(mean.count)
    known = torch.where(counts > 0, totals, torch.nan)
    return [[None if n != n else n for n in row] for row in known.reshape(len(known), -1).tolist()]


def _divergences(minibatches: Minibatches) -> list[float | None]:
    """k3 of each minibatch over its valid, finite rows."""
    ratios = minibatches.log_ratio.double().split(list(minibatches.counts))
    flags = _valid(minibatches).split(list(minibatches.counts))
    kept = [ratio[flag & torch.isfinite(ratio)] for ratio, flag in zip(ratios, flags, strict=True)]
    return [float((torch.expm1(ratio.clamp(-20, 20)) - ratio).mean()) if len(ratio) else None for ratio in kept]


def _valid(minibatches: Minibatches) -> Tensor:
    known = minibatches.valid
    return torch.ones_like(minibatches.log_ratio, dtype=torch.bool) if known is None else known


def _worst(minibatches: Minibatches, rollout: RolloutData | None, count: int) -> Iterator[WorstRow]:
    sizes = minibatches.log_ratio.abs().nan_to_num(nan=torch.inf).masked_fill(~_valid(minibatches), -1.0)
    found = torch.topk(sizes, min(count, len(sizes)))
    ends = torch.tensor(minibatches.counts).cumsum(0)
    for size, row in zip(found.values.tolist(), found.indices.tolist(), strict=True):
        if size >= 0:
            step = int(torch.searchsorted(ends, row, right=True))
            yield _row(minibatches, rollout, row, step)


def _row(minibatches: Minibatches, rollout: RolloutData | None, row: int, step: int) -> WorstRow:
    log_ratio = minibatches.log_ratio[row].item()
    place = _place(minibatches, rollout, row)
    old = None if rollout is None or place is None else rollout.log_probs[place].item()
    return WorstRow(
        log_ratio=log_ratio,
        advantage=minibatches.advantages[row].item(),
        step=step,
        epoch=minibatches.epochs[step],
        time=place[0] if place else None,
        env=place[1] if place else None,
        old_log_prob=old,
        new_log_prob=None if old is None else old + log_ratio,
        heads={} if rollout is None or place is None else dict(_heads(minibatches, rollout, row, place)),
    )


def _place(minibatches: Minibatches, rollout: RolloutData | None, row: int) -> tuple[int, int] | None:
    """Time and environment of a row."""
    if rollout is None or minibatches.rows is None:
        return None
    time, env = divmod(int(minibatches.rows[row]), rollout.log_probs.shape[1])
    return time, env


def _heads(
    minibatches: Minibatches, rollout: RolloutData, row: int, place: tuple[int, int]
) -> Iterator[tuple[str, HeadShift]]:
    for head, actions in rollout.acted.items():
        ratios, olds = minibatches.head_log_ratios.get(head), rollout.head_log_probs.get(head)
        old = None if olds is None else olds[place].item()
        new = None if old is None or ratios is None else old + ratios[row].item()
        yield head, HeadShift(actions[place].tolist(), old, new)
