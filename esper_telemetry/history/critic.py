"""Fit of the critic, scale of the advantages, and trend of the policy, from the values of a record and earlier ones.

The floor under Var(R) is a millionth of its average over earlier updates, so that an update with constant returns yields nothing
instead of a huge number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from esper_telemetry.core.metric import Array, Derived, Metric, reports
from esper_telemetry.core.record import Level
from esper_telemetry.history.trend import theil_sen

BETA = 0.99
VARIANCE_FLOOR = 1e-6  # of the average Var(R)


@dataclass(frozen=True, slots=True)
class CriticFit(Derived, absent="returns do not vary, or by less than a millionth of their average variance"):
    """The critic's errors relative to the returns' spread."""

    sources: ClassVar[tuple[str, ...]] = ("value/bias", "value/err/std", "value/std", "value/target/std")
    explained_variance: float | None = reports(
        Metric.quantity("value/explained_variance", 441, "explained variance", unit="1", high=1.0, level=Level.MINIMAL)
        .asks(
            "What share of the returns' variance does the critic explain? 1 is perfect, 0 a constant, below 0 worse "
            "than a constant. It ignores a constant error: see value/r2."
        )
        .bounds(
            healthy="> 0.5 late in training",
            warn="< 0.1 unless value/loss_norm < 0.1",
            critical="< 0 unless value/loss_norm < 0.1",
            source="bounds of esper-lite; noise while returns vary much less than before (baselines#454, ray#10159)",
        )
        .changed("after 0.2.0: bounds hold unless `value/loss_norm` is small")
    )
    r2: float | None = reports(
        Metric.quantity("value/r2", 442, "R² of the critic", unit="1", high=1.0, level=Level.MINIMAL)
        .asks("How well do the critic's estimates match the returns, including a constant error? At most value/explained_variance.")
        .bounds(
            healthy="within 0.05 of value/explained_variance",
            warn="more than 0.2 below it",
            critical="< 0 after it was above 0.3",
            source="R² = 1 - MSE / Var(R)",
        )
    )
    bias_over_std: float | None = reports(
        Metric.quantity("value/bias_over_std", 443, "bias of the critic in standard deviations of returns", unit="σ_R")
        .asks("How large is the critic's constant error, in units of the returns' spread?")
        .bounds(
            healthy="|.| < 0.1",
            warn="|.| > 0.5 unless value/loss_norm < 0.1",
            critical="|.| > 1 unless value/loss_norm < 0.1",
            source="heuristic; noise while returns vary much less than before",
        )
        .changed("after 0.2.0: bounds hold unless `value/loss_norm` is small")
    )
    corr: float | None = reports(
        Metric.correlation("value/corr", 446, "correlation of values and returns", unit="Pearson")
        .asks("Does the critic rank states as the returns do?")
        .bounds(healthy="> 0.5", source="heuristic")
        .absent("the critic is constant, or returns do not vary, or by less than a millionth of their average variance")
    )
    nrmse: float | None = reports(
        Metric.magnitude("value/nrmse", 444, "error of the critic in standard deviations of returns", unit="σ_R")
        .asks("How large is the critic's typical error, in units of the returns' spread?")
        .bounds(
            healthy="< 0.7",
            warn="> 1 unless value/loss_norm < 0.1",
            critical="> 2 unless value/loss_norm < 0.1",
            source="RMSE / (σ_R + √floor); noise while returns vary much less than before",
        )
        .changed("after 0.2.0: bounds hold unless `value/loss_norm` is small")
        .advises("Look at `value/explained_variance` and `value/bias`: noise, a lagging critic and a wrong scale look alike here.")
    )
    loss_norm: float | None = reports(
        Metric.magnitude("value/loss_norm", 445, "value loss over the variance of returns", unit="1 (0.5 MSE / Var R)", level=Level.MINIMAL)
        .asks(
            "How large is the critic's loss, relative to the variance of all returns so far? The first place to "
            "look when the critic goes wrong."
        )
        .bounds(healthy="< 0.5", warn="> 1", critical="> 5", source="critical bound of esper-lite, 400 updates")
        .absent("returns have never varied")
    )


@dataclass(frozen=True, slots=True)
class VarianceAverage:
    """Exponential average of Var(R) over updates, corrected for its start.

    Attributes:
        total: Σ (1-β) β^(t-i) Var_i.
        updates: t.
    """

    total: float = 0.0
    updates: int = 0

    @property
    def mean(self) -> float:
        """The average; 0 before the first update."""
        return self.total / (1 - BETA**self.updates) if self.updates else 0.0

    def after(self, variance: float) -> VarianceAverage:
        """Return the average with one more update."""
        return VarianceAverage(BETA * self.total + (1 - BETA) * variance, self.updates + 1)


@dataclass(frozen=True, slots=True)
class CriticMoments:
    """Moments of the critic's estimates over the rows of a rollout; None if they were not measured.

    Attributes:
        bias: mean of V - R.
        error_std, value_std, return_std: standard deviations of V - R, V and R.
    """

    bias: float | None
    error_std: float | None
    value_std: float | None
    return_std: float | None


def critic_fit(measured: CriticMoments, earlier: VarianceAverage) -> tuple[CriticFit, VarianceAverage]:
    """Return explained variance and related metrics, and the average of Var(R) including this update.

    EV = 1 - Var(R-V) / Var(R); R² = 1 - MSE / Var(R) = EV - bias² / Var(R); absent if Var(R) <= 1e-6 of its earlier average.
    """
    bias, error_std, return_std = measured.bias, measured.error_std, measured.return_std
    if bias is None or error_std is None or return_std is None:
        return CriticFit(), earlier
    variance, mse = return_std**2, error_std**2 + bias**2
    average = earlier.after(variance)
    loss_norm = mse / 2 / average.mean if average.mean > 0 else None
    floor = VARIANCE_FLOOR * earlier.mean
    if variance <= floor:
        return CriticFit(loss_norm=loss_norm), average
    corr: float | None = None
    if measured.value_std:  # Pearson's r of V and R, from Var(V - R) = Var V + Var R - 2 r σ_V σ_R
        r = (measured.value_std**2 + variance - error_std**2) / (2 * measured.value_std * return_std)
        corr = max(-1.0, min(1.0, r))
    fit = CriticFit(
        explained_variance=1 - error_std**2 / variance,
        r2=1 - mse / variance,
        bias_over_std=bias / return_std,
        corr=corr,
        nrmse=math.sqrt(mse) / (return_std + math.sqrt(floor)),
        loss_norm=loss_norm,
    )
    return fit, average


MAGNITUDE_FLOOR = 1e-6  # of the largest magnitude: rounding noise of float32


@dataclass(frozen=True, slots=True)
class AdvantageScale(Derived):
    """Extremes of the raw advantages relative to their spread."""

    sources: ClassVar[tuple[str, ...]] = ("adv/raw/mean", "adv/raw/std", "adv/raw/min", "adv/raw/max")
    absmax_over_std: float | None = reports(
        Metric.magnitude("adv/raw/absmax_over_std", 216, "largest advantage in standard deviations", unit="σ")
        .asks("How far out is the most surprising single step? It alone may decide the update.")
        .bounds(healthy="< 6", warn="> 10", critical="> 20", source="about √(2 ln N) for a Gaussian; heuristic")
        .absent("advantages do not vary")
    )
    std_floored: float | None = reports(
        Metric.fraction("adv/std_floored", 217, "advantages without spread", unit="flag")
        .asks("Are all advantages equal, so that normalising them amplifies rounding noise? 1 if so.")
        .bounds(healthy="0", warn="1", source="std <= 1e-6 max|A|")
        .absent("no valid advantage")
    )


def advantage_scale(mean: float | None, std: float | None, smallest: float | None, largest: float | None) -> AdvantageScale:
    """Return max|A - mean A| / std A, and whether the spread is lost in rounding, from a rollout's raw advantages."""
    if mean is None or std is None or smallest is None or largest is None:
        return AdvantageScale()
    floored = std <= MAGNITUDE_FLOOR * max(abs(smallest), abs(largest))
    far = max(largest - mean, mean - smallest)
    return AdvantageScale(absmax_over_std=far / std if std > 0 else None, std_floored=float(floored))


ENTROPY_WINDOW = 20


@dataclass(frozen=True, slots=True)
class PolicyTrend(Derived):
    """Speed at which the policy becomes certain."""

    sources: ClassVar[tuple[str, ...]] = ("policy/entropy",)
    entropy_rate: float | None = reports(
        Metric.quantity("policy/entropy_rate", 127, "rate of entropy loss", unit="1/update")
        .asks("How fast does entropy fall, as a fraction per update? An early warning of premature collapse.")
        .bounds(
            healthy="> -0.1",
            warn="< -0.1 in the first quarter of training",
            critical="< -0.3 in the first quarter of training",
            source="Theil-Sen slope of ln entropy over 20 updates; heuristic",
        )
        .absent("fewer than 2 updates, or an entropy that is not positive")
    )


def entropy_rate(entropies: Sequence[float] | Array, updates: Array | None = None) -> PolicyTrend:
    """Theil-Sen slope of ln entropy over the last `ENTROPY_WINDOW` values, oldest first; `updates` are their numbers if some have none."""
    latest = np.asarray(entropies, dtype=np.float64)[-ENTROPY_WINDOW:]
    if len(latest) < 2 or not (latest > 0).all():
        return PolicyTrend()
    return PolicyTrend(theil_sen(np.log(latest), None if updates is None else updates[-ENTROPY_WINDOW:]))


@dataclass(frozen=True, slots=True)
class LargestShift(Derived):
    """The head whose actions changed most."""

    sources: ClassVar[tuple[str, ...]] = ("policy/head/{head}/action_shift_js",)
    action_shift_js: float | None = reports(
        Metric.fraction("policy/action_shift_js", 128, "shift of the mix of actions", unit="fraction of ln 2")
        .asks("How much did the action mix change since the last rollout, in the head that changed most?")
        .bounds(healthy="< 0.02", warn="> 0.10", critical="> 0.25", source="measured on healthy and broken runs")
        .absent("the first rollout, or no categorical head")
    )


def largest_shift(shifts: Iterable[float]) -> LargestShift:
    """Return the largest of the heads' shifts."""
    return LargestShift(max(shifts, default=None))
