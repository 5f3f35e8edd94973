"""Trends of a series beyond its own memory (T3; Mann 1945, Sen 1968), and oscillations (T4; Fisher 1929).

Two series are compared by their rank correlation, for a monotone relation of any shape (A5, T7; Spearman 1904).

Successive values of a training curve depend on each other, so trend tests find trends in noise: 45 % false
alarms at an autocorrelation of 0.9. The series is therefore prewhitened first, with a coefficient measured on the
detrended series.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

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
        .bounds(warn="< 0.001 on two windows that do not overlap", source="Fisher 1929; prewhitened, measured null rate at most 0.3 %")
    )
    length: Array | None = reports(
        Metric.quantity("{key}/period/length", 909, "length of the strongest oscillation", unit="updates", low=2.0).asks(
            "How long is the strongest oscillation? Compare with the environment's horizon."
        )
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
        .bounds(warn="beyond ±3, and half a power of ten over the window", source="Mann 1945; prewhitened, measured null rate 0 to 3 %")
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


@lru_cache(maxsize=128)
def _pairs(n: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Indices of all pairs i < j."""
    return np.triu_indices(n, 1)


def theil_sen(x: Array, at: Array | None = None) -> float:
    """Median slope over all pairs of points of x [n], per point, or per unit of their places `at` [n]; NaN for fewer than two."""
    if len(x) < 2:
        return math.nan
    i, j = _pairs(len(x))
    return float(np.median((x[j] - x[i]) / (j - i if at is None else at[j] - at[i])))


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


CORRELATION_WINDOW = 50
MIN_PAIRS = 20


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
        Metric.correlation("opt/update_to_weight/lr_response", 914, "response to the learning rate", unit="Spearman ρ", cost="update")
        .asks("Do the optimizer's steps shrink as the learning rate is lowered?")
        .bounds(healthy="> 0.5 while the learning rate decays", warn="<= 0: the schedule does not reach the optimizer", source="heuristic")
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


def advantage_gradient(adv_std: Array, actor_norm: Array) -> AdvantageGradient:
    """Return the rank correlation of the advantages' std with the actor's gradient norm over the last updates.

    Args:
        adv_std: [n], `adv/raw/std` per update, oldest first.
        actor_norm: [n], `grad/actor/norm_preclip` of the same updates.
    """
    x, y = np.asarray(adv_std)[-CORRELATION_WINDOW:], np.asarray(actor_norm)[-CORRELATION_WINDOW:]
    enough = int((np.isfinite(x) & np.isfinite(y)).sum()) >= MIN_PAIRS
    return AdvantageGradient(spearman(x, y) if enough else None)


def lr_response(lr: Array, update_norm: Array) -> LearningRateResponse:
    """Return the rank correlation of step sizes with the learning rate over one segment of its schedule.

    Args:
        lr: [n] learning rates, oldest first.
        update_norm: [n] step sizes of the same updates, or their logarithms, which have the same ranks.
    """
    return LearningRateResponse(spearman(np.asarray(update_norm), np.asarray(lr)))
