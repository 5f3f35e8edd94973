"""Has a positive series left its usual level, suddenly or slowly? (T2)

In logarithms, because a fall to a half and a rise to the double are the same step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from esper_telemetry.derived import Array, Derived
from esper_telemetry.metric import Metric, label, reports
from esper_telemetry.series.ema import FAST, SLOW, Ema


@dataclass(frozen=True, slots=True)
class Drifts(Derived):
    """Distance of series from their levels, [keys] each; NaN where undefined."""

    key: tuple[str, ...] = label()
    drift: Array | None = reports(
        Metric(
            key="{key}/drift",
            number=902,
            unit="ln",
            question="How far is this metric from its average so far? 0.7 is double, -0.7 half.",
            warn="4 times its spread",
            critical="8 times its spread, and more than 0.4",
            source="measured false alarms of the relative form: 4.6 per 100 updates",
            undefined="the first value, or one that is not positive",
        )
    )
    macd: Array | None = reports(
        Metric(
            key="{key}/macd",
            number=903,
            unit="ln",
            question="Is this metric above (+) or below (-) its long-term average, noise averaged out?",
            source="difference of a fast and a slow average",
            undefined="before the first positive value",
        )
    )


class LogDrift:
    """Drift of K positive series.

    Attributes:
        fast: average of the logarithms for the drift and as the fast part of macd.
        slow: the slow part.
    """

    def __init__(self, keys: int, beta_fast: float = FAST, beta_slow: float = SLOW) -> None:
        self.fast = Ema(keys, beta_fast)
        self.slow = Ema(keys, beta_slow)

    def step(self, x: Array, keys: tuple[str, ...] = ()) -> Drifts:
        """Takes one value of each series, [K], and compares it with the level before; what is not positive waits."""
        log = logarithm(x)
        drift = log - self.fast.mean
        self.fast.step(log)
        self.slow.step(log)
        macd = np.where(np.isnan(log), np.nan, self.fast.mean - self.slow.mean)
        return Drifts(keys, drift=drift, macd=macd)

    def relative(self, drift: Array) -> Array:
        """Drift in units of the spread so far, [K]: what thresholds are for. Call it before the next `step`."""
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio: Array = drift / self.fast.std
        return ratio

    def state(self) -> Array:
        """All of the state, [2, 4, K], to go into a checkpoint."""
        return np.stack([self.fast.state(), self.slow.state()])

    def restore(self, state: Array) -> None:
        """Continues from `state()`."""
        self.fast.restore(state[0])
        self.slow.restore(state[1])


def logarithm(x: Array) -> Array:
    """Natural logarithm; NaN of what is not positive and finite."""
    positive = np.isfinite(x) & (x > 0)
    return np.log(np.where(positive, x, np.nan))
