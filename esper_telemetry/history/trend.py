"""Trends of a series beyond its own memory (T3; Mann 1945, Sen 1968), and oscillations (T4; Fisher 1929).

Successive values of a training curve depend on each other, so trend tests find trends in noise: 45 % false
alarms at an autocorrelation of 0.9. The series is therefore prewhitened first, with a coefficient measured on the
detrended series.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from esper_telemetry.core.metric import Array, Derived, Metric, label, reports


@dataclass(frozen=True, slots=True)
class Periods(Derived, absent="fewer than five values, or all the same", cost="update"):
    """The strongest oscillation of series, [keys] each; NaN where undefined."""

    key: tuple[str, ...] = label()
    g: Array | None = reports(
        Metric.fraction("{key}/period/g", 907, "strength of the strongest oscillation")
        .asks("What share of this metric's variation is its strongest oscillation?")
        .bounds(source="Fisher 1929")
    )
    p: Array | None = reports(
        Metric.fraction("{key}/period/p", 908, "chance of such an oscillation", unit="probability")
        .asks("How likely is such an oscillation by chance?")
        .bounds(
            warn="< 0.001 on two windows that do not overlap",
            source="Fisher 1929; prewhitened, measured null rate at most 0.3 %",
        )
    )
    length: Array | None = reports(
        Metric.quantity(
            "{key}/period/length", 909, "length of the strongest oscillation", unit="updates", low=2.0
        ).asks("How long is the strongest oscillation? Compare with the environment's horizon.")
    )


@dataclass(frozen=True, slots=True)
class PeriodMemory(Derived):
    """Lag-1 autocorrelation of series, [keys]; NaN where undefined."""

    key: tuple[str, ...] = label()
    acf1: Array | None = reports(
        Metric.correlation("{key}/acf1", 910, "correlation of successive updates", unit="correlation")
        .asks("Does this metric alternate (below 0) or persist (above 0) from update to update?")
        .bounds(warn="< -0.3: updates undo each other", source="heuristic")
        .absent("fewer than three values, or all the same")
        .advises("Below 0 updates undo each other: lower the learning rate, use larger batches.")
    )


@dataclass(frozen=True, slots=True)
class KnownPeriod(Derived):
    """Power of series at a declared frequency, [keys]; NaN where undefined."""

    key: tuple[str, ...] = label()
    goertzel: Array | None = reports(
        Metric.magnitude("{key}/period/goertzel", 911, "strength of a known oscillation", unit="power")
        .asks("How strongly does this metric oscillate at a period that is known beforehand?")
        .absent("no values")
    )


def acf(x: Array, lag: int) -> float:
    """Biased autocorrelation of x [n] at `lag`; NaN if the values are too few or all the same."""
    if len(x) <= lag or x.max() == x.min():
        return math.nan
    d = x - x.mean()
    square = float(d @ d)
    return float(d[lag:] @ d[: len(d) - lag]) / square if square > 0 else math.nan


def goertzel(x: Array, k: int) -> float:
    """Power |Σ x_t e^(-2πikt/n)|² of x [n] at k cycles per window, unnormalised and with mean and trend."""
    n = len(x)
    angles = 2.0 * np.pi * ((k * np.arange(n)) % n) / n
    return float(x @ np.cos(angles)) ** 2 + float(x @ np.sin(angles)) ** 2


def fisher(x: Array) -> tuple[float, float, float]:
    """Fisher's g of x [n], its probability under white noise, and the length of the strongest period.

    It uses the ordinates 1 to ⌊(n-1)/2⌋ of the periodogram, without the mean and, for even n, without the fastest one.
    Pass a prewhitened series. All three are NaN if the values are fewer than five or all the same.
    """
    ordinates = (len(x) - 1) // 2
    if ordinates < 2 or x.max() == x.min():
        return math.nan, math.nan, math.nan
    power = np.abs(np.fft.rfft(x - x.mean())[1 : ordinates + 1]) ** 2
    total = float(power.sum())
    if not total > 0:
        return math.nan, math.nan, math.nan
    strongest = int(power.argmax())
    g = float(power[strongest]) / total
    return g, fisher_p(g, ordinates), len(x) / (strongest + 1)


def fisher_p(g: float, ordinates: int) -> float:
    """Probability of a share of at least g among m > 1 ordinates of white noise: Σ (-1)^(i-1) C(m,i) (1-ig)^(m-1).

    It is computed in whole numbers, because the terms cancel: floats lose three digits of p at 99 ordinates.
    """
    top, bottom = g.as_integer_ratio()
    terms = range(1, min(ordinates, bottom // top) + 1)
    total = sum((-1) ** (i - 1) * math.comb(ordinates, i) * (bottom - i * top) ** (ordinates - 1) for i in terms)
    probability: float = total / bottom ** (ordinates - 1)
    return min(max(probability, 0.0), 1.0)


def periods(series: list[Array], keys: tuple[str, ...] = ()) -> Periods:
    """The strongest oscillation of each of K prewhitened series [n_k], oldest value first."""
    g, p, length = np.array([fisher(x) for x in series], dtype=np.float64).reshape(-1, 3).T
    return Periods(keys, g=g, p=p, length=length)


def memory(series: list[Array], keys: tuple[str, ...] = ()) -> PeriodMemory:
    """Lag-1 autocorrelation of each of K unfiltered series [n_k], oldest value first."""
    return PeriodMemory(keys, np.array([acf(x, 1) for x in series], dtype=np.float64))


A_MAX = 0.98
N_MIN = 5  # prewhitening divides by n - 4


@dataclass(frozen=True, slots=True)
class Trends(Derived, cost="update"):
    """Slopes of series and how significant they are, [keys] each; NaN where undefined."""

    key: tuple[str, ...] = label()
    slope: Array | None = reports(
        Metric.quantity("{key}/trend/slope", 905, "trend", unit="per update")
        .asks("How fast does this metric rise or fall over the last updates?")
        .bounds(source="Sen 1968")
        .absent("fewer than five values")
    )
    mk_z: Array | None = reports(
        Metric.quantity("{key}/trend/mk_z", 906, "significance of the trend", unit="Z")
        .asks("Is the trend real? Beyond ±3 it is not chance.")
        .bounds(
            warn="beyond ±3, and half a power of ten over the window",
            source="Mann 1945; prewhitened, measured null rate 0 to 3 %",
        )
        .absent("fewer than five values, or all the same")
        .advises("See the key without this ending for what to try.")
    )


class MannKendall(NamedTuple):
    """Mann-Kendall test for a monotone trend.

    Attributes:
        s: rising pairs minus falling pairs.
        variance: variance of s without trend, corrected for ties.
        z: s minus its sign, in standard deviations; None if all values are tied.
        tau: s divided by the number of pairs.
    """

    s: float
    variance: float
    z: float | None
    tau: float


class Prewhitened(NamedTuple):
    """A series without its own memory.

    Attributes:
        y: [n-1], x_t - a x_(t-1), which keeps the trend, scaled by 1 - a.
        a: lag-1 coefficient, corrected for small samples.
        slope: Theil-Sen slope of x.
        acf1: autocorrelation of the detrended series, uncorrected.
    """

    y: Array
    a: float
    slope: float
    acf1: float


@lru_cache(maxsize=16)
def _pairs(n: int) -> tuple[Array, Array]:
    """Indices of all pairs i < j."""
    i, j = np.triu_indices(n, 1)
    return i, j  # type: ignore[return-value]  # integers, used as indices


def theil_sen(x: Array) -> float:
    """Median slope over all pairs of points of x [n], per point; NaN for fewer than two."""
    if len(x) < 2:
        return math.nan
    i, j = _pairs(len(x))
    return float(np.median((x[j] - x[i]) / (j - i)))


def mann_kendall(x: Array) -> MannKendall:
    """Return the test on x [n], which should be free of autocorrelation."""
    n = len(x)
    i, j = _pairs(n)
    s = float(np.sign(x[j] - x[i]).sum())
    ties = np.unique(x, return_counts=True)[1].astype(np.float64)
    variance = (n * (n - 1) * (2 * n + 5) - float((ties * (ties - 1) * (2 * ties + 5)).sum())) / 18.0
    z = (s - np.sign(s)) / math.sqrt(variance) if variance > 0 else None
    return MannKendall(s, variance, None if z is None else float(z), s / max(n * (n - 1) / 2, 1))


def prewhiten(x: Array) -> Prewhitened:
    """Return x [n], n > 4, without its lag-1 memory.

    The coefficient is measured on the detrended series, corrected for its small-sample bias and clipped to ±0.98.
    Adding the trend back afterwards (TFPW) would add a spurious trend: 72 % false alarms at an autocorrelation of 0.9.
    """
    n = len(x)
    if n < N_MIN:
        raise ValueError(f"prewhitening needs at least {N_MIN} values, got {n}")
    slope = theil_sen(x)
    raw = acf(x - slope * np.arange(n), 1)
    acf1 = 0.0 if math.isnan(raw) else raw
    a = min(max((n * acf1 + 1.0) / (n - 4), -A_MAX), A_MAX)
    return Prewhitened(x[1:] - a * x[:-1], a, slope, acf1)


def trends(series: list[Array], keys: tuple[str, ...] = ()) -> Trends:
    """Slope and significance of each series.

    Args:
        series: K arrays [n_k], oldest value first, at most a few hundred values; the test takes O(n²).
        keys: names of the series.
    """
    slopes, scores = np.full((2, len(series)), np.nan)
    for k, x in enumerate(series):
        if len(x) >= N_MIN:
            whitened = prewhiten(x)
            z = mann_kendall(whitened.y).z if x.max() > x.min() else None
            slopes[k], scores[k] = whitened.slope, math.nan if z is None else z
    return Trends(keys, slope=slopes, mk_z=scores)
