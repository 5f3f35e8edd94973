"""Rewards, as the environment gives them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from esper_telemetry.conversion import ArrayLike, as_mask, as_tensor
from esper_telemetry.group import Max, Mean, MetricGroup, Moments, Sum, reports
from esper_telemetry.metric import Metric
from esper_telemetry.metrics.masking import sample, spread, where_any

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
