"""Did the level of a series change? Sums that grow with every value off the old level (T5; Page 1954).

The sums do not reset by themselves: a detector resets them after it has raised its alarm.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from esper_telemetry.derived import Array, Derived
from esper_telemetry.metric import Metric, label, reports
from esper_telemetry.series.robust import spread
from esper_telemetry.series.trend import prewhiten

CUSUM_SLACK = 1.0
CUSUM_LEVEL = 8.0


@dataclass(frozen=True, slots=True)
class Changes(Derived):
    """Evidence for a change of level, [keys]; NaN where undefined."""

    key: tuple[str, ...] = label()
    cusum: Array | None = reports(
        Metric(
            key="{key}/cusum",
            number=912,
            unit="σ (robust)",
            question="Has this metric moved to another level? It adds up what is more than 1 σ off the old one.",
            low=0.0,
            warn="> 8, as a hint only",
            source="Page 1954; measured null rate 2 to 17 % per 100 updates",
            undefined="the robust z is",
        )
    )


@dataclass(frozen=True, slots=True)
class SlowChanges(Derived):
    """Evidence for a change of the mean in one direction, [keys]; NaN where undefined."""

    key: tuple[str, ...] = label()
    page_hinkley: Array | None = reports(
        Metric(
            key="{key}/page_hinkley",
            number=913,
            unit="as key",
            question="Has this metric risen above its mean so far, for good?",
            low=0.0,
            warn="8 times its spread",
            source="Page 1954",
            undefined="no value",
        )
    )


class Cusum:
    """Two-sided cumulative sums of K standardised series.

    Attributes:
        slack: what a value may be off without counting.
    """

    def __init__(self, keys: int, slack: float = CUSUM_SLACK) -> None:
        self.slack = slack
        self._sums = np.zeros((2, keys))

    @property
    def up(self) -> Array:
        """Sum of what was above, [K]."""
        up: Array = self._sums[0]
        return up

    @property
    def down(self) -> Array:
        """Sum of what was below, [K]."""
        down: Array = self._sums[1]
        return down

    def step(self, z: Array, keys: tuple[str, ...] = ()) -> Changes:
        """Takes one standardised value per series, [K]; NaN waits."""
        known = np.isfinite(z)
        grown = np.maximum(self._sums + np.where(known, np.stack([z, -z]) - self.slack, 0.0), 0.0)
        self._sums = np.where(known, grown, self._sums)
        return Changes(keys, np.where(known, self._sums.max(axis=0), np.nan))

    def reset(self, where: npt.NDArray[np.bool_]) -> None:
        """Starts the series in `where`, [K], anew."""
        self._sums[:, where] = 0.0

    def state(self) -> Array:
        """All of the state, [2, K], to go into a checkpoint."""
        return self._sums.copy()

    def restore(self, state: Array) -> None:
        """Continues from `state()`."""
        self._sums = np.array(state, dtype=np.float64)


def prewhitened_z(x: Array, *, baseline: int) -> Array:
    """The values after the baseline, freed from their memory and standardised: what `Cusum` is meant to be fed.

    Args:
        x: [n], oldest value first.
        baseline: how many of them tell what is usual, at least 5.

    Returns:
        [n - baseline] robust z; NaN where the baseline does not vary.
    """
    memory = prewhiten(x[:baseline]).a
    innovations = x[1:] - memory * x[:-1]
    usual = spread(innovations[None, : baseline - 1], scale_min=0.0, n_min=0)
    scale = np.where(usual.scale > 0, usual.scale, np.nan)
    z: Array = (innovations[baseline - 1 :] - usual.median) / scale
    return z


class PageHinkley:
    """How far K series have risen above their running means; feed -x to see falls.

    Attributes:
        delta: rise that is tolerated per value.
    """

    def __init__(self, keys: int, delta: float | Array) -> None:
        self.delta = delta
        self._state = np.stack([np.zeros(keys), np.zeros(keys), np.zeros(keys), np.full(keys, np.inf)])

    def step(self, x: Array, keys: tuple[str, ...] = ()) -> SlowChanges:
        """Takes one value per series, [K]; the running mean includes it. NaN waits."""
        known = np.isfinite(x)
        count, mean, total, lowest = self._state
        count = count + known
        mean = mean + np.where(known, x - mean, 0.0) / np.maximum(count, 1)
        total = total + np.where(known, x - mean - self.delta, 0.0)
        lowest = np.where(known, np.minimum(lowest, total), lowest)
        self._state = np.stack([count, mean, total, lowest])
        return SlowChanges(keys, np.where(known, total - np.where(known, lowest, 0.0), np.nan))

    def state(self) -> Array:
        """All of the state, [4, K], to go into a checkpoint."""
        return self._state.copy()

    def restore(self, state: Array) -> None:
        """Continues from `state()`."""
        self._state = np.array(state, dtype=np.float64)
