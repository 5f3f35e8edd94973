"""Rewards, as the environment gives them.

Returns: the regression targets of the critic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from esper_telemetry.core.arrays import ArrayLike, as_mask, as_tensor
from esper_telemetry.core.group import MetricGroup
from esper_telemetry.core.metric import Metric, reports
from esper_telemetry.core.record import Level
from esper_telemetry.core.reduction import Counts, Max, Mean, Min, Moments, Sum
from esper_telemetry.metrics.actions import ascending, moments, quantiles, sample, spread, where_any
from esper_telemetry.metrics.statistics import REWARDS, Quantiles, as_quantiles, histogram, levels_for

NO_ROWS = "no valid, finite reward"


@dataclass(frozen=True, slots=True)
class RewardStats(MetricGroup):
    """Rewards of a rollout before any normaliser."""

    moments: Moments = reports(
        Metric(
            key="reward/mean",
            number=311,
            unit="reward",
            question="How much reward does a step bring on average?",
            undefined=NO_ROWS,
        ),
        Metric(
            key="reward/std",
            number=312,
            unit="reward",
            question="Do rewards vary at all? Exactly 0 for long means that the reward is not wired, or clipped away.",
            of="std",
            low=0.0,
            healthy="> 0",
            critical="exactly 0 over 10 updates",
            source="heuristic",
            undefined=NO_ROWS,
        ),
    )
    absmax: Max = reports(
        Metric(
            key="reward/absmax",
            number=313,
            unit="reward",
            question="What is the largest single reward or penalty? A jump points at the environment.",
            low=0.0,
            undefined=NO_ROWS,
        )
    )
    zero: Mean = reports(
        Metric(
            key="reward/zero_frac",
            number=314,
            unit="fraction",
            question="Which share of the steps brings no reward? Near 1: rewards are sparse.",
            low=0.0,
            high=1.0,
            undefined=NO_ROWS,
        )
    )
    nonfinite: Sum = reports(
        Metric(
            key="reward/nonfinite",
            number=315,
            unit="count",
            question="How many rewards were NaN or infinite?",
            low=0.0,
            healthy="0",
            critical="> 0",
            source="always an error of the environment",
        )
    )


@torch.inference_mode()
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


NO_RETURN = "no valid, finite return"


@dataclass(frozen=True, slots=True)
class ReturnStats(MetricGroup):
    """Returns of a rollout, as the critic is trained on them."""

    moments: Moments = reports(
        Metric(
            key="ret/mean",
            number=301,
            unit="return",
            question="What return does the critic have to predict on average?",
            level=Level.MINIMAL,
            undefined=NO_RETURN,
        ),
        Metric(
            key="ret/std",
            number=302,
            unit="return",
            question="How much do returns vary? A jump means that the scale of rewards changed.",
            of="std",
            low=0.0,
            level=Level.MINIMAL,
            warn="robust z of log10 above 4",
            critical="robust z of log10 above 8",
            source="SB3#2240; cleanrl#441",
            undefined=NO_RETURN,
        ),
        Metric(
            key="ret/skew",
            number=303,
            unit="1",
            question="Is one tail of the returns longer: a few very good (above 0) or very bad ones?",
            of="skew",
            undefined="returns do not vary",
        ),
    )
    smallest: Min = reports(
        Metric(key="ret/min", number=304, unit="return", question="What is the lowest return?", undefined=NO_RETURN)
    )
    largest: Max = reports(
        Metric(key="ret/max", number=305, unit="return", question="What is the highest return?", undefined=NO_RETURN)
    )
    quantiles: Quantiles = reports(
        Metric(
            key="ret/p10",
            number=306,
            unit="return",
            question="Below which return lie the lowest 10 %?",
            of="p10",
            undefined=NO_RETURN,
        ),
        Metric(
            key="ret/p50",
            number=307,
            unit="return",
            question="What is the median return?",
            of="p50",
            undefined=NO_RETURN,
        ),
        Metric(
            key="ret/p90",
            number=308,
            unit="return",
            question="Above which return lie the highest 10 %?",
            of="p90",
            undefined=NO_RETURN,
        ),
    )
    histogram: Counts = reports(
        Metric(
            key="ret/hist",
            number=310,
            unit="return",
            question="How are the returns distributed?",
            undefined=NO_RETURN,
        )
    )
    nonfinite: Sum = reports(
        Metric(
            key="ret/mean_nonfinite",
            number=309,
            unit="count",
            question="How many valid returns were NaN or infinite?",
            low=0.0,
            level=Level.MINIMAL,
            healthy="absent",
            critical="> 0",
            undefined="none was",
            when_positive=True,
        )
    )


@torch.inference_mode()
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
