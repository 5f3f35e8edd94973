"""Rewards, as the environment gives them.

Returns: the regression targets of the critic.
"""

from __future__ import annotations

from dataclasses import dataclass

from esper_telemetry.core.arrays import ArrayLike, as_mask, as_tensor
from esper_telemetry.core.group import MetricGroup
from esper_telemetry.core.lazy import inference_mode
from esper_telemetry.core.metric import Metric, MetricFamily, reports
from esper_telemetry.core.record import Level
from esper_telemetry.core.reduction import Counts, Max, Mean, Min, Moments, Sum
from esper_telemetry.metrics.statistics import (
    REWARDS,
    Quantiles,
    as_quantiles,
    ascending,
    histogram,
    levels_for,
    moments,
    quantiles,
    sample,
    spread,
    where_any,
)

RETURNS_FAMILY = MetricFamily(
    "ret",
    "Returns",
    "The targets of the critic: advantages plus values.",
    place=130,
    question="What must the critic predict?",
    first=("ret/mean", "ret/std"),
)
REWARDS_FAMILY = MetricFamily(
    "reward",
    "Rewards",
    "Rewards per step as the environment pays them, before any normaliser.",
    place=140,
    question="What does the environment pay?",
    axis="axis/env_step",
    first=("reward/mean", "reward/std"),
)


@dataclass(frozen=True, slots=True)
class RewardStats(MetricGroup):
    """Rewards of a rollout before any normaliser."""

    moments: Moments = reports(
        Metric.quantity("reward/mean", 311, "mean of rewards", unit="reward")
        .asks("How much reward does a step bring on average?")
        .absent("no valid, finite reward"),
        Metric.quantity("reward/std", 312, "standard deviation of rewards", unit="reward", low=0.0, of="std")
        .asks("Do rewards vary at all? Exactly 0 for long means that the reward is not wired, or clipped away.")
        .bounds(healthy="> 0", critical="exactly 0 over 10 updates", source="heuristic")
        .absent("no valid, finite reward"),
    )
    absmax: Max = reports(
        Metric.quantity("reward/absmax", 313, "largest magnitude of rewards", unit="reward", low=0.0)
        .asks("What is the largest single reward or penalty? A jump points at the environment.")
        .absent("no valid, finite reward")
    )
    zero: Mean = reports(
        Metric.fraction("reward/zero_frac", 314, "share of steps without reward")
        .asks("Which share of the steps brings no reward? Near 1: rewards are sparse.")
        .absent("no valid, finite reward")
    )
    nonfinite: Sum = reports(
        Metric.count("reward/nonfinite", 315, "rewards that are not finite")
        .asks("How many rewards were NaN or infinite?")
        .bounds(healthy="0", critical="> 0", source="always an error of the environment")
        .advises("Fix the environment or its wrappers: a reward has to be a number.")
    )


@inference_mode
def reward_stats(rewards: ArrayLike, *, valid: ArrayLike | None = None) -> RewardStats:
    """Mean, spread and largest magnitude of the raw rewards; zeros are counted exactly.

    Args:
        rewards: [T, B] or [N].
        valid: bool, same shape; None where every entry is.
    """
    rewards = as_tensor(rewards)
    s = sample(rewards, as_mask(valid, rewards))
    zero = s.kept & (s.values == 0)
    return RewardStats(
        moments=spread(s),
        absmax=Max(where_any(s.values.abs().amax(-1), s.count)),
        zero=Mean(zero.sum(-1), s.count),
        nonfinite=Sum(s.nonfinite),
    )


@dataclass(frozen=True, slots=True)
class ReturnStats(MetricGroup):
    """Returns of a rollout, as the critic is trained on them."""

    moments: Moments = reports(
        Metric.quantity("ret/mean", 301, "mean of returns", unit="return", level=Level.MINIMAL)
        .asks("What return does the critic have to predict on average?")
        .absent("no valid, finite return"),
        Metric.quantity(
            "ret/std", 302, "standard deviation of returns", unit="return", low=0.0, of="std", level=Level.MINIMAL
        )
        .asks("How much do returns vary? A jump means that the scale of rewards changed.")
        .bounds(warn="robust z of log10 above 4", critical="robust z of log10 above 8", source="SB3#2240; cleanrl#441")
        .absent("no valid, finite return"),
        Metric.quantity("ret/skew", 303, "skewness of returns", unit="1", of="skew")
        .asks("Is one tail of the returns longer: a few very good (above 0) or very bad ones?")
        .absent("returns do not vary"),
    )
    smallest: Min = reports(
        Metric.quantity("ret/min", 304, "smallest of returns", unit="return")
        .asks("What is the lowest return?")
        .absent("no valid, finite return")
    )
    largest: Max = reports(
        Metric.quantity("ret/max", 305, "largest of returns", unit="return")
        .asks("What is the highest return?")
        .absent("no valid, finite return")
    )
    quantiles: Quantiles = reports(
        Metric.quantity("ret/p10", 306, "10 % quantile of returns", unit="return", of="p10")
        .asks("Below which return lie the lowest 10 %?")
        .absent("no valid, finite return"),
        Metric.quantity("ret/p50", 307, "median of returns", unit="return", of="p50")
        .asks("What is the median return?")
        .absent("no valid, finite return"),
        Metric.quantity("ret/p90", 308, "90 % quantile of returns", unit="return", of="p90")
        .asks("Above which return lie the highest 10 %?")
        .absent("no valid, finite return"),
    )
    histogram: Counts = reports(
        Metric.quantity("ret/hist", 310, "hist of returns", unit="return")
        .asks("How are the returns distributed?")
        .absent("no valid, finite return")
    )
    nonfinite: Sum = reports(
        Metric.nonfinite("ret/mean_nonfinite", 309, "non-finite inputs of mean of returns").asks(
            "How many valid returns were NaN or infinite?"
        )
    )


@inference_mode
def return_stats(returns: ArrayLike, *, valid: ArrayLike | None = None) -> ReturnStats:
    """Population moments, extremes and quantiles of the returns.

    Args:
        returns: [T, B] or [N].
        valid: bool, same shape; None where every entry is.
    """
    returns = as_tensor(returns)
    s = sample(returns, as_mask(valid, returns))
    found = quantiles(ascending(s), s.count, levels_for(returns))
    return ReturnStats(
        moments=moments(s),
        smallest=Min(found[0]),
        largest=Max(found[-1]),
        quantiles=as_quantiles(found, s.count),
        histogram=histogram(s, REWARDS),
        nonfinite=Sum(s.nonfinite),
    )
