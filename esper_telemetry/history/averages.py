"""Exponential averages of series, corrected for their start (T1), and distances from them (T2)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from esper_telemetry.core.metric import Array, Derived, Metric, MetricFamily, label, reports

FAST = 0.9
SLOW = 0.99


HISTORIES_FAMILY = MetricFamily(
    "{key}",
    "Histories",
    "The headline metrics, gradient norms and the inputs of alarms also exist with these endings, which compare a value "
    "with earlier updates: `policy/kl/ema` is the running average of `policy/kl`. Positive quantities are "
    "compared as logarithms, so that a fall to a tenth counts as much as a tenfold rise.",
    place=900,
)


@dataclass(frozen=True, slots=True)
class Smoothed(Derived, absent="before the first value"):
    """Levels of series, [keys] each; NaN where undefined."""

    key: tuple[str, ...] = label()
    ema: Array | None = reports(
        Metric.quantity("{key}/ema", 900, "running average", unit="as key").asks(
            "What is the level of this metric, with noise averaged out?"
        )
    )
    ew_std: Array | None = reports(
        Metric.magnitude("{key}/ew_std", 901, "spread around the running average", unit="as key").asks(
            "How much does this metric vary around its average?"
        )
    )


def n_eff(t: Array, beta: float) -> Array:
    """Effective number of samples after `t` values: 1 at t = 1, (1+β)/(1-β) in the end."""
    decay = np.power(beta, t)
    effective: Array = (1.0 + beta) * (1.0 - decay) / ((1.0 - beta) * (1.0 + decay))
    return effective


class Ema:
    """Mean and population std of K series. The weights decay by β per value and sum to 1 from the first value on.

    A missing value (NaN) is ignored.

    Attributes:
        t: [K] number of values so far.
        mean: [K], NaN before the first value.
    """

    def __init__(self, keys: int, beta: float = FAST) -> None:
        if not 0.0 < beta < 1.0:
            raise ValueError(f"beta must be between 0 and 1, got {beta}")
        self.beta = beta
        self._state = np.zeros((4, keys))

    @property
    def t(self) -> Array:
        """Number of values so far, [K]."""
        t: Array = self._state[0]
        return t

    @property
    def mean(self) -> Array:
        """The average, [K]; NaN before the first value."""
        return np.where(self.t > 0, self._state[2], np.nan)

    @property
    def std(self) -> Array:
        """The spread, [K]; NaN before the first value."""
        _, weight, _, squares = self._state
        std: Array = np.sqrt(squares / np.where(self.t > 0, weight, np.nan))
        return std

    @property
    def n_eff(self) -> Array:
        """Effective number of samples, [K]."""
        return n_eff(self.t, self.beta)

    def step(self, x: Array) -> None:
        """Add one value of each series, [K]."""
        finite = np.isfinite(x)
        t, weight, mean, squares = self._state
        new_weight = np.where(finite, self.beta * weight + 1.0 - self.beta, weight)
        distance = np.where(finite, x - mean, 0.0)
        new_mean = mean + (1.0 - self.beta) / np.where(new_weight > 0, new_weight, 1.0) * distance
        off = (1.0 - self.beta) * distance * np.where(finite, x - new_mean, 0.0)
        self._state = np.stack([t + finite, new_weight, new_mean, np.where(finite, self.beta * squares, squares) + off])


@dataclass(frozen=True, slots=True)
class Drifts(Derived):
    """Distance of series from their levels, [keys] each; NaN where undefined."""

    key: tuple[str, ...] = label()
    drift: Array | None = reports(
        Metric.quantity("{key}/drift", 902, "distance from the running average", unit="ln")
        .asks("How far is this metric from its average so far? 0.7 is double, -0.7 half.")
        .bounds(
            warn="4 times its spread",
            critical="8 times its spread, and more than 0.4",
            source="measured false alarms of the relative form: 4.6 per 100 updates",
        )
        .absent("the first value, or one that is not positive")
        .advises("See the key without this ending for what to try.")
    )
    macd: Array | None = reports(
        Metric.quantity("{key}/macd", 903, "short against long average", unit="ln")
        .asks("Is this metric above (+) or below (-) its long-term average, with noise averaged out?")
        .bounds(source="difference of a fast and a slow average")
        .absent("before the first positive value")
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
        """Add one value of each series, [K]; returns its distance from the previous level. Values that are not positive are ignored."""
        log = logarithm(x)
        drift = log - self.fast.mean
        self.fast.step(log)
        self.slow.step(log)
        macd = np.where(np.isnan(log), np.nan, self.fast.mean - self.slow.mean)
        return Drifts(keys, drift=drift, macd=macd)


def logarithm(x: Array) -> Array:
    """Natural logarithm; NaN for values that are not positive and finite."""
    positive = np.isfinite(x) & (x > 0)
    return np.log(np.where(positive, x, np.nan))
