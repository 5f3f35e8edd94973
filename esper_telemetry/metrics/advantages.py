"""Advantages as GAE estimates them, and the advantages that multiply the ratio."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from esper_telemetry.core.arrays import ArrayLike, as_mask, as_tensor
from esper_telemetry.core.group import MetricGroup
from esper_telemetry.core.lazy import Tensor, inference_mode, torch
from esper_telemetry.core.metric import Metric, MetricFamily, reports
from esper_telemetry.core.record import Level
from esper_telemetry.core.reduction import NAN, AdditiveReduction, Counts, Max, Mean, Min, Moments, PooledMean, Slot, Statistic, Sum
from esper_telemetry.core.requirements import checked_arguments
from esper_telemetry.metrics.statistics import (
    REWARDS,
    Quantiles,
    as_quantiles,
    ascending,
    histogram,
    levels_for,
    moments,
    quantiles,
    rows_of,
    same_shape,
    sample,
    spread,
)

ADVANTAGES_FAMILY = MetricFamily(
    "adv",
    "Advantages",
    "An advantage says how much better an action turned out than the critic expected: it is the learning signal of "
    "the policy. `adv/raw` describes the estimates, `adv/norm` the values that multiply the ratio after normalisation.",
    place=80,
    question="Do the advantages carry a signal?",
    first=("adv/raw/std", "adv/participation"),
)


@dataclass(frozen=True, slots=True)
class AdvantageStats(MetricGroup, absent="no valid, finite advantage"):
    """Advantages of a rollout before normalisation."""

    moments: Moments = reports(
        Metric.quantity("adv/raw/mean", 201, "mean of raw advantages", unit="advantage")
        .asks("Are outcomes on average better or worse than the critic expected? Far from 0: the critic is biased.")
        .bounds(healthy="|mean| < 0.5 std", source="heuristic"),
        Metric.std("adv/raw/std", 202, "standard deviation of raw advantages", unit="advantage", level=Level.MINIMAL)
        .asks("How much do outcomes differ from what the critic expected? This is the learning signal.")
        .bounds(healthy="> 1e-3 of ret/std", source="heuristic"),
        Metric.quantity("adv/raw/skew", 203, "skewness of raw advantages", unit="1", of="skew")
        .asks("Is one tail longer: rare large successes (above 0) or rare large failures?")
        .absent("advantages do not vary"),
        Metric.quantity("adv/raw/kurtosis", 204, "kurtosis of raw advantages", unit="1 (excess)", low=-2.0, of="kurtosis")
        .asks("Do a few outliers dominate the update? 0 for a normal distribution.")
        .bounds(healthy="< 10", warn="> 30", critical="> 100", source="heuristic")
        .absent("advantages do not vary")
        .advises("Clip or normalise rewards; use more steps per update."),
    )
    smallest: Min = reports(
        Metric.quantity("adv/raw/min", 205, "smallest of raw advantages", unit="advantage").asks("What was the worst surprise?")
    )
    largest: Max = reports(
        Metric.quantity("adv/raw/max", 206, "largest of raw advantages", unit="advantage").asks("What was the best surprise?")
    )
    positive: Mean = reports(
        Metric.fraction("adv/raw/pos_frac", 207, "share above 0 of raw advantages")
        .asks("What share of the actions turned out better than expected?")
        .bounds(healthy="0.3 to 0.7", warn="outside 0.15 to 0.85", source="heuristic")
        .advises("The critic is biased: look at `value/bias_over_std`.")
    )
    quantiles: Quantiles = reports(
        Metric.quantity("adv/raw/p05", 208, "5 % quantile of raw advantages", unit="advantage", of="p05").asks(
            "How bad were the worst 5 % of the actions?"
        ),
        Metric.quantity("adv/raw/p95", 209, "95 % quantile of raw advantages", unit="advantage", of="p95").asks(
            "How good were the best 5 % of the actions?"
        ),
    )
    histogram: Counts = reports(
        Metric.quantity("adv/raw/hist", 225, "histogram of raw advantages", unit="advantage").asks("How are the advantages distributed?")
    )
    nonfinite: Sum = reports(
        Metric.nonfinite("adv/raw/mean_nonfinite", 210, "non-finite inputs of mean of raw advantages").asks(
            "How many valid advantages were NaN or infinite?"
        )
    )


@checked_arguments()
@inference_mode
def advantage_stats(advantages: ArrayLike, *, valid: ArrayLike | None = None) -> AdvantageStats:
    """Return population moments, extremes and quantiles of the advantages before normalisation.

    Args:
        advantages: [T, B] or [N].
        valid: bool, same shape; None if every entry is valid.
    """
    advantages = as_tensor(advantages)
    s = sample(advantages, as_mask(valid, advantages))
    at_levels = quantiles(ascending(s), s.count, levels_for(advantages))
    return AdvantageStats(
        moments=moments(s),
        smallest=Min(at_levels[0]),
        largest=Max(at_levels[-1]),
        positive=Mean((s.values > 0).sum(-1), s.count),
        quantiles=as_quantiles(at_levels, s.count),
        histogram=histogram(s, REWARDS),
        nonfinite=Sum(s.nonfinite),
    )


def _off_unit(slots: Sequence[float]) -> float:
    mean, std = Moments.statistics["mean"](slots), Moments.statistics["std"](slots)
    return max(abs(mean), abs(std - 1) / 2)


@dataclass(frozen=True, slots=True)
class StandardMoments(Moments):
    """Moments of normalised values; `off_unit` is max(|mean|, |std - 1| / 2)."""

    statistics: ClassVar[Mapping[str, Statistic]] = {**Moments.statistics, "off_unit": _off_unit}


@dataclass(frozen=True, slots=True)
class Participation(AdditiveReduction):
    """Evenness of magnitudes, (Σ|x|)² / (n Σx²): 1 if all are equal, 1/n if all but one are zero."""

    count: Slot
    magnitude: Slot
    square: Slot

    statistics: ClassVar[Mapping[str, Statistic]] = {"participation": lambda s: s[1] ** 2 / (s[0] * s[2]) if s[0] and s[2] else NAN}


@dataclass(frozen=True, slots=True)
class NormalizedAdvantageStats(MetricGroup, absent="no valid, finite advantage"):
    """The advantages that multiply the ratio."""

    moments: StandardMoments = reports(
        Metric.quantity("adv/norm/mean", 211, "mean of normalised advantages", unit="σ")
        .asks("Do the advantages that the update uses average 0, as normalisation promises?")
        .bounds(
            healthy="|mean| < 0.01", critical="|mean| > 0.05", source="identity; stale, double or missing normalisation, or a wrong mask"
        ),
        Metric.std("adv/norm/std", 212, "standard deviation of normalised advantages", unit="σ")
        .asks("Do the advantages that the update uses have standard deviation 1?")
        .bounds(
            healthy="within 0.02 of 1",
            critical="< 0.01 unless adv/raw/std < 0.01",
            source="identity; SB3 divides by the unbiased std, a factor √((N-1)/N); near 0 the update has no signal",
        ),
        Metric.magnitude("integrity/adv_norm", 802, "normalisation of advantages", unit="σ", of="off_unit", level=Level.MINIMAL)
        .asks("Is advantage normalisation intact over the whole update? max(|mean|, |std - 1| / 2).")
        .bounds(healthy="< 0.01", critical="> 0.05, if normalisation is on", source="identity"),
    )
    participation: Participation = reports(
        Metric.fraction("adv/participation", 213, "effective share of the batch")
        .asks("What share of the batch effectively drives the policy gradient? 0.637 for normal advantages.")
        .bounds(healthy="> 0.4", warn="< 0.2", critical="< 0.05", source="participation ratio; 2/π for a Gaussian")
        .absent("all advantages are 0")
    )
    sign_flip: Mean | None = reports(
        Metric.fraction("adv/sign_flip_frac", 214, "share of signs that normalisation flips")
        .asks(
            "What share of the actions is punished although they did better than expected, or rewarded although they did worse, "
            "because normalisation shifted their advantage across 0?"
        )
        .bounds(healthy="< 0.15", warn="> 0.3", source="heuristic")
        .advises("The mean advantage is far from 0, so the critic is biased: look at `value/bias_over_std`.")
    )
    nonfinite: Sum = reports(
        Metric.nonfinite("adv/norm/mean_nonfinite", 215, "non-finite inputs of mean of normalised advantages").asks(
            "How many valid advantages that multiply the ratio were NaN or infinite?"
        )
    )


@checked_arguments()
@inference_mode
def normalized_advantage_stats(
    normalized: ArrayLike, advantages: ArrayLike | None = None, *, valid: ArrayLike | None = None, dim: int | None = None
) -> NormalizedAdvantageStats:
    """Return moments, participation and flipped signs of normalised advantages; minibatches of an update are merged.

    Args:
        normalized: the values that multiply the ratio, [N] or [M, N].
        advantages: the same before normalisation, same shape, for the share of flipped signs.
        valid: bool, same shape; None if every entry is valid.
        dim: axis to reduce; None reduces all axes to one row, -1 keeps the leading axis as optimizer steps.
    """
    normalized = as_tensor(normalized)
    advantages = None if advantages is None else as_tensor(advantages, normalized)
    valid = as_mask(valid, normalized)
    same_shape(normalized=normalized, advantages=advantages, valid=valid)
    s = sample(normalized, valid, dim=dim)
    square = torch.linalg.vecdot(s.values, s.values)
    sign_flip = None
    if advantages is not None:  # the sign of a zero advantage is undefined
        sign_flip = Mean((s.values * rows_of(advantages, dim).double() < 0).sum(-1), s.count)
    return NormalizedAdvantageStats(
        moments=StandardMoments(*spread(s).slots()),
        participation=Participation(s.count, s.values.abs().sum(-1), square),
        sign_flip=sign_flip,
        nonfinite=Sum(s.nonfinite),
    )


@inference_mode
def flips_in_order(normalized: Tensor, advantages: Tensor, *, counted: Tensor | None = None, valid: Tensor | None = None) -> Mean:
    """Return the share of actions whose sign changed, for advantages in unknown order: normalisation preserves the order of values.

    The result is absent if the numbers of counted values differ.

    Args:
        normalized: the values that multiply the ratio, from one pass over all rows, any shape.
        advantages: the values before normalisation, any shape and order.
        counted: which entries of `normalized` count, bool; None if all count.
        valid: which entries of `advantages` count, bool; None if all count.
    """
    used, raw = sample(normalized, counted), sample(advantages, valid)
    rows = min(used.values.shape[-1], raw.values.shape[-1])
    flips = (ascending(used)[:rows] * ascending(raw)[:rows] < 0).sum(-1)
    whole = used.count == raw.count
    return Mean(flips * whole, used.count * whole)


@dataclass(frozen=True, slots=True)
class MinibatchRows(MetricGroup):
    """Size of the minibatches."""

    rows: PooledMean = reports(
        Metric.count("adv/minibatch_rows", 867, "rows of a minibatch")
        .asks("Over how many rows is a minibatch's gradient averaged, and its advantages normalised?")
        .bounds(healthy="8 and more", warn="< 4 with normalisation in minibatches: advantages are signs", source="x/|x|")
    )


def minibatch_rows(counts: Sequence[int]) -> MinibatchRows:
    """Return the mean number of rows of the minibatches of all ranks; `counts` has the rows of each minibatch."""
    return MinibatchRows(PooledMean(float(sum(counts)), float(len(counts))))
