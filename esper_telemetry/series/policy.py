"""What the history of entropies and the heads of one update say of the whole policy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from esper_telemetry.derived import Array, Derived
from esper_telemetry.metric import Metric, reports
from esper_telemetry.series.trend import theil_sen

ENTROPY_WINDOW = 20


@dataclass(frozen=True, slots=True)
class PolicyTrend(Derived):
    """How fast the policy makes up its mind."""

    entropy_rate: float | None = reports(
        Metric(
            key="policy/entropy_rate",
            number=127,
            unit="1/update",
            question="How fast does entropy fall, as a fraction per update? An early warning of premature collapse.",
            healthy="> -0.1",
            warn="< -0.1 in the first quarter of training",
            critical="< -0.3 in the first quarter of training",
            source="Theil-Sen slope of ln entropy over 20 updates; heuristic",
            undefined="fewer than 2 updates, or an entropy that is not positive",
        )
    )


def entropy_rate(entropies: Sequence[float] | Array, *, window: int = ENTROPY_WINDOW) -> PolicyTrend:
    """Theil-Sen slope of ln entropy over the last `window` updates, oldest first."""
    latest = np.asarray(entropies, dtype=np.float64)[-window:]
    if len(latest) < 2 or not (latest > 0).all():
        return PolicyTrend()
    return PolicyTrend(float(theil_sen(np.log(latest))))


@dataclass(frozen=True, slots=True)
class LargestShift(Derived):
    """The head whose actions changed most."""

    action_shift_js: float | None = reports(
        Metric(
            key="policy/action_shift_js",
            number=128,
            unit="fraction of ln 2",
            question="How much did the mix of actions change since the last rollout, in the head where it changed most?",
            low=0.0,
            high=1.0,
            healthy="< 0.02",
            warn="> 0.10",
            critical="> 0.25",
            source="measured on healthy and broken runs",
            undefined="the first rollout, or no categorical head",
        )
    )


def largest_shift(shifts: Iterable[float]) -> LargestShift:
    """The largest of the heads' shifts."""
    return LargestShift(max(shifts, default=None))
