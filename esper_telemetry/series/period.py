"""Does a series oscillate? Test of the strongest frequency, power at known ones, autocorrelation (T4; Fisher 1929)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from esper_telemetry.derived import Array, Derived
from esper_telemetry.metric import Metric, label, reports


@dataclass(frozen=True, slots=True)
class Periods(Derived):
    """The strongest oscillation of series, [keys] each; NaN where undefined."""

    key: tuple[str, ...] = label()
    g: Array | None = reports(
        Metric(
            key="{key}/period/g",
            number=907,
            unit="fraction",
            question="What share of this metric's variation is its strongest oscillation?",
            low=0.0,
            high=1.0,
            cost="update",
            source="Fisher 1929",
            undefined="fewer than five values, or all the same",
        )
    )
    p: Array | None = reports(
        Metric(
            key="{key}/period/p",
            number=908,
            unit="probability",
            question="How likely is such an oscillation by chance?",
            low=0.0,
            high=1.0,
            cost="update",
            warn="< 0.001 on two windows that do not overlap",
            source="Fisher 1929; prewhitened, measured null rate at most 0.3 %",
            undefined="fewer than five values, or all the same",
        )
    )
    length: Array | None = reports(
        Metric(
            key="{key}/period/length",
            number=909,
            unit="updates",
            question="How long is the strongest oscillation? Compare with the environment's horizon.",
            low=2.0,
            cost="update",
            undefined="fewer than five values, or all the same",
        )
    )


@dataclass(frozen=True, slots=True)
class Memory(Derived):
    """Lag-1 autocorrelation of series, [keys]; NaN where undefined."""

    key: tuple[str, ...] = label()
    acf1: Array | None = reports(
        Metric(
            key="{key}/acf1",
            number=910,
            unit="correlation",
            question="Does this metric go back and forth (below 0) or carry on (above 0) from update to update?",
            low=-1.0,
            high=1.0,
            warn="< -0.3: updates undo each other",
            source="heuristic",
            undefined="fewer than three values, or all the same",
        )
    )


@dataclass(frozen=True, slots=True)
class KnownPeriod(Derived):
    """Power of series at a declared frequency, [keys]; NaN where undefined."""

    key: tuple[str, ...] = label()
    goertzel: Array | None = reports(
        Metric(
            key="{key}/period/goertzel",
            number=911,
            unit="power",
            question="How strongly does this metric oscillate at a period that is known beforehand?",
            low=0.0,
            undefined="no values",
        )
    )


def acf(x: Array, lag: int) -> float:
    """Biased autocorrelation of x [n] at `lag`; NaN where the values are too few or all the same."""
    if len(x) <= lag or x.max() == x.min():
        return math.nan
    d = x - x.mean()
    square = float(d @ d)
    return float(d[lag:] @ d[: len(d) - lag]) / square if square > 0 else math.nan


def goertzel(x: Array, k: int) -> float:
    """Power |Σ x_t e^(-2πikt/n)|² of x [n] at k cycles per window: unnormalised, mean and trend left in."""
    n = len(x)
    angles = 2.0 * np.pi * ((k * np.arange(n)) % n) / n
    return float(x @ np.cos(angles)) ** 2 + float(x @ np.sin(angles)) ** 2


def fisher(x: Array) -> tuple[float, float, float]:
    """Fisher's g of x [n], its probability under white noise, and the length of the strongest period.

    Over the ordinates 1 to ⌊(n-1)/2⌋ of the periodogram, without the mean and, for even n, without the fastest one.
    Pass a prewhitened series. NaN three times where the values are fewer than five or all the same.
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

    In whole numbers, because the terms cancel: floats lose three digits of p at 99 ordinates.
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


def memory(series: list[Array], keys: tuple[str, ...] = ()) -> Memory:
    """Lag-1 autocorrelation of each of K unfiltered series [n_k], oldest value first."""
    return Memory(keys, np.array([acf(x, 1) for x in series], dtype=np.float64))
