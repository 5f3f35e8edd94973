"""Rank correlation of two series, for a monotone relation of any shape (A5, T7; Spearman 1904)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from esper_telemetry.core.metric import Array, Derived, Metric, reports

CORRELATION_WINDOW = 50
N_MIN = 20


@dataclass(frozen=True, slots=True)
class AdvantageGradient(Derived):
    """Correlation of the scale of the advantages with the actor's gradient."""

    sources: ClassVar[tuple[str, ...]] = ("adv/raw/std", "grad/{group}/norm_preclip")
    grad_corr: float | None = reports(
        Metric.correlation("adv/grad_corr", 590, "leak of the advantages' scale into the gradient", unit="Spearman ρ")
        .asks("Does the scale of the raw advantages leak into the actor's gradient, past normalisation?")
        .bounds(healthy="-0.6 to 0.6 if advantages are normalised", source="heuristic")
        .absent("fewer than 20 updates, or either series is constant")
    )


@dataclass(frozen=True, slots=True)
class LearningRateResponse(Derived):
    """Correlation of the optimizer's step size with the learning rate."""

    sources: ClassVar[tuple[str, ...]] = ("opt/lr", "opt/update_to_weight")
    lr_response: float | None = reports(
        Metric.correlation(
            "opt/update_to_weight/lr_response", 914, "response to the learning rate", unit="Spearman ρ", cost="update"
        )
        .asks("Do the optimizer's steps shrink as the learning rate is lowered?")
        .bounds(
            healthy="> 0.5 while the learning rate decays",
            warn="<= 0: the schedule does not reach the optimizer",
            source="heuristic",
        )
        .absent("the learning rate or the size of the steps is constant, or fewer than 8 updates have both")
        .advises("Check that the schedule sets the learning rate of the optimizer's parameter groups.")
    )


def ranks(x: Array) -> Array:
    """Ranks of x [n] from 1; equal values share the average of theirs."""
    _, inverse, counts = np.unique(x, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((last - (counts - 1) / 2.0)[inverse.reshape(-1)], dtype=np.float64)


def spearman(x: Array, y: Array) -> float | None:
    """Rank correlation of x and y [n], in which pairs with a NaN do not count; None if either is constant."""
    finite = np.isfinite(x) & np.isfinite(y)
    a, b = ranks(x[finite]), ranks(y[finite])
    if len(a) < 2 or a.max() == a.min() or b.max() == b.min():
        return None
    a, b = a - a.mean(), b - b.mean()
    return min(max(float(a @ b) / math.sqrt(float(a @ a) * float(b @ b)), -1.0), 1.0)


def advantage_gradient(
    adv_std: Array, actor_norm: Array, *, window: int = CORRELATION_WINDOW, n_min: int = N_MIN
) -> AdvantageGradient:
    """Return the rank correlation of the advantages' std with the actor's gradient norm over the last updates.

    Args:
        adv_std: [n], `adv/raw/std` per update, oldest first.
        actor_norm: [n], `grad/actor/norm_preclip` of the same updates.
        window: number of latest updates that count.
        n_min: minimum number of updates with both.
    """
    x, y = np.asarray(adv_std)[-window:], np.asarray(actor_norm)[-window:]
    enough = int((np.isfinite(x) & np.isfinite(y)).sum()) >= n_min
    return AdvantageGradient(spearman(x, y) if enough else None)


def lr_response(lr: Array, update_norm: Array) -> LearningRateResponse:
    """Return the rank correlation of step sizes with the learning rate over one segment of its schedule.

    Args:
        lr: [n] learning rates, oldest first.
        update_norm: [n] step sizes of the same updates, or their logarithms, which have the same ranks.
    """
    return LearningRateResponse(spearman(np.asarray(update_norm), np.asarray(lr)))
