"""How badly gradients explode or vanish, on a scale without steps, against thresholds that know the run (G10, G11).

AutoClip (2007.14469) and ZClip (2504.02507) are relatives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from esper_telemetry.derived import Array, Derived
from esper_telemetry.metric import Metric, label, reports
from esper_telemetry.record import Level
from esper_telemetry.series.robust import N_MIN, SCALE_MIN, WINDOW, History, decades, spread

DECADES_EXPLODE = 2.0
DECADES_VANISH = 4.0
SPREADS = 6.0
CLAMP_EXPLODE = (2.0, 200.0)
CLAMP_VANISH = (1e-8, 1e-2)
EXPLODE_AT_START = 10.0  # times the clip limit, while the history is short
VANISH_AT_START = 1e-7
HEALTHY_BELOW = 0.5  # only updates below this severity enter the history
REBASELINE_AFTER = 50


@dataclass(frozen=True, slots=True)
class GroupSeverity(Derived):
    """Severities and their thresholds per group, [groups] each; NaN where undefined."""

    group: tuple[str, ...] = label()
    severity_explode: Array | None = reports(
        Metric(
            key="grad/{group}/severity_explode",
            number=514,
            unit="severity",
            question="Does this part of the network have exploding gradients? 0 no, 1 a hundred times the threshold.",
            low=0.0,
            high=1.0,
            healthy="0",
            warn="> 0.25",
            critical=">= 0.75",
            source="ramp of two decades above the adaptive threshold",
            undefined="the group has no gradient",
        )
    )
    severity_vanish: Array | None = reports(
        Metric(
            key="grad/{group}/severity_vanish",
            number=515,
            unit="severity",
            question="Does this part of the network have vanishing gradients? 0 no, 1 exactly zero or nearly so.",
            low=0.0,
            high=1.0,
            healthy="0",
            warn="> 0.25",
            critical=">= 0.75",
            source="ramp of four decades below the adaptive threshold",
            undefined="the group has no gradient",
        )
    )
    threshold_explode: Array | None = reports(
        Metric(
            key="grad/{group}/threshold_explode",
            number=516,
            unit="gradient norm",
            question="Above which norm do this group's gradients count as exploding?",
            low=0.0,
            source="median + 6 robust standard deviations of its log10 norms, 2 to 200 clip limits",
            undefined="the group has no gradient",
        )
    )
    threshold_vanish: Array | None = reports(
        Metric(
            key="grad/{group}/threshold_vanish",
            number=517,
            unit="gradient norm",
            question="Below which norm do this group's gradients count as vanishing?",
            low=0.0,
            source="median - 6 robust standard deviations of its log10 norms, 1e-8 to 1e-2 clip limits",
            undefined="the group has no gradient",
        )
    )


@dataclass(frozen=True, slots=True)
class LayerSeverity(Derived):
    """Severities per parameter tensor, [layers] each; NaN where undefined."""

    layer: tuple[str, ...] = label()
    severity_explode: Array | None = reports(
        Metric(
            key="grad/layer/{layer}/severity_explode",
            number=524,
            unit="severity",
            question="Does this parameter tensor have exploding gradients? 0 no, 1 a hundred times its own threshold.",
            low=0.0,
            high=1.0,
            level=Level.DEBUG,
            cost="debug",
            healthy="0",
            warn="> 0.25",
            critical=">= 0.75",
            source="as grad/{group}/severity_explode, with a history of its own",
            undefined="the tensor has no gradient",
        )
    )
    severity_vanish: Array | None = reports(
        Metric(
            key="grad/layer/{layer}/severity_vanish",
            number=525,
            unit="severity",
            question="Does this parameter tensor have vanishing gradients? 0 no, 1 exactly zero or nearly so.",
            low=0.0,
            high=1.0,
            level=Level.DEBUG,
            cost="debug",
            healthy="0",
            warn="> 0.25",
            critical=">= 0.75",
            source="as grad/{group}/severity_vanish, with a history of its own",
            undefined="the tensor has no gradient",
        )
    )


class Thresholds(NamedTuple):
    """Norms from which on gradients explode or vanish; median and scale of log10 norms, NaN of too few; [K] each."""

    explode: Array
    vanish: Array
    median: Array
    scale: Array


def explode_severity(norms: Array, threshold: Array | float, *, decades_wide: float = DECADES_EXPLODE) -> Array:
    """0 up to the threshold, 1 from `decades_wide` above it and for what is not finite; linear in log10 between."""
    norms = np.asarray(norms, dtype=np.float64)
    ramp = np.clip((_log10(norms) - np.log10(threshold)) / decades_wide, 0.0, 1.0)
    return np.where(np.isfinite(norms), ramp, 1.0)


def vanish_severity(norms: Array, threshold: Array | float, *, decades_wide: float = DECADES_VANISH) -> Array:
    """0 down to the threshold and for what is not finite, 1 from `decades_wide` below it; linear in log10 between."""
    norms = np.asarray(norms, dtype=np.float64)
    ramp = np.clip((np.log10(threshold) - _log10(norms)) / decades_wide, 0.0, 1.0)
    return np.where(np.isfinite(norms), ramp, 0.0)


def _log10(norms: Array) -> Array:
    """Logarithm of finite norms; -inf of zero, 0 in place of what is not finite."""
    finite = np.where(np.isfinite(norms), norms, 1.0)
    return np.log10(finite, out=np.full_like(finite, -np.inf), where=finite > 0)


def adaptive_thresholds(
    history: Array,
    max_grad_norm: float,
    *,
    n_min: int = N_MIN,
    scale_min: float = SCALE_MIN,
    k: float = SPREADS,
    clamp_explode: tuple[float, float] = CLAMP_EXPLODE,
    clamp_vanish: tuple[float, float] = CLAMP_VANISH,
) -> Thresholds:
    """Thresholds from the history of each group: its median ± k robust standard deviations, within absolute bounds.

    Args:
        history: [K, W], log10 of norms, NaN where there is none yet.
        max_grad_norm: the clip limit, which sets the scale of the bounds.
        n_min: fewest norms; below it the thresholds are 10 clip limits and 1e-7. 0 asks for none.
        scale_min: smallest standard deviation, in decades.
        k: how many of them.
        clamp_explode: bounds in clip limits: a slow boil must not become normal.
        clamp_vanish: likewise.
    """
    median, scale = spread(history, scale_min=scale_min, n_min=n_min)
    explode = _clamp(10.0 ** (median + k * scale), clamp_explode, max_grad_norm)
    vanish = _clamp(10.0 ** (median - k * scale), clamp_vanish, max_grad_norm)
    early = np.isnan(median)
    return Thresholds(
        np.where(early, EXPLODE_AT_START * max_grad_norm, explode),
        np.where(early, VANISH_AT_START, vanish),
        median,
        scale,
    )


def _clamp(thresholds: Array, bounds: tuple[float, float], unit: float) -> Array:
    return np.clip(thresholds, bounds[0] * unit, bounds[1] * unit)


class NormBaseline:
    """What gradient norms of K groups usually are: thresholds from healthy updates only.

    An update whose severity is 0.5 or more does not enter the history, because anomalies must not train their own
    baseline; after 50 such updates in a row the group starts a new one.

    Attributes:
        max_grad_norm: the clip limit.
        rejected: [K] unhealthy updates in a row.
    """

    def __init__(self, groups: tuple[str, ...], max_grad_norm: float, window: int = WINDOW) -> None:
        self.groups = groups
        self.max_grad_norm = max_grad_norm
        self.rejected = np.zeros(len(groups), dtype=np.int64)
        self._history = History(len(groups), window)

    def step(self, mean: Array, peak: Array) -> tuple[GroupSeverity, npt.NDArray[np.bool_]]:
        """Judges one update by the updates before it.

        Args:
            mean: [K] mean norm of each group over the update's steps; NaN where it has no gradient.
            peak: [K] its largest norm; infinite where a gradient was not finite.

        Returns:
            Severities and thresholds; and the groups, [K] bool, whose baseline starts anew with this update.
        """
        thresholds = adaptive_thresholds(self._history.values, self.max_grad_norm)
        present = ~np.isnan(mean) | np.isinf(peak)
        explode = np.where(present, explode_severity(peak, thresholds.explode), np.nan)
        vanish = np.where(present, vanish_severity(mean, thresholds.vanish), np.nan)
        anew = self._learn(mean, np.fmax(explode, vanish), present)
        limits = (np.where(present, limit, np.nan) for limit in (thresholds.explode, thresholds.vanish))
        return GroupSeverity(self.groups, explode, vanish, *limits), anew

    def _learn(self, mean: Array, severity: Array, present: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        healthy = present & (severity < HEALTHY_BELOW)
        self.rejected = np.where(healthy, 0, self.rejected + (present & ~healthy))
        anew = self.rejected >= REBASELINE_AFTER
        self._history.clear(anew)
        self.rejected[anew] = 0
        self._history.push(decades(mean), where=healthy | anew)
        return anew

    def state(self) -> dict[str, Array]:
        """All of the state, to go into a checkpoint."""
        return {**self._history.state(), "rejected": self.rejected.astype(np.float64)}

    def restore(self, state: dict[str, Array]) -> None:
        """Continues from `state()`."""
        self._history.restore(state)
        self.rejected = np.array(state["rejected"], dtype=np.int64)
