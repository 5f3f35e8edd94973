"""Episodes that finished: plain numbers, no tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from esper_telemetry.group import Max, Mean, MetricGroup, Min, Moments, Sum, reports
from esper_telemetry.metric import Metric
from esper_telemetry.record import Level

NONE = "no episode finished"


@dataclass(frozen=True, slots=True)
class EpisodeStats(MetricGroup):
    """Episodes that finished in a rollout."""

    returns: Moments = reports(
        Metric(
            key="episode/return_mean",
            number=931,
            unit="return",
            question="How well does the policy do, over the episodes that finished in this update?",
            level=Level.MINIMAL,
            undefined=NONE,
        ),
        Metric(
            key="episode/return_std",
            number=932,
            unit="return",
            question="How much do episodes differ in return?",
            of="std",
            low=0.0,
            undefined=NONE,
        ),
    )
    smallest: Min = reports(
        Metric(
            key="episode/return_min",
            number=933,
            unit="return",
            question="How bad was the worst episode of this update?",
            undefined=NONE,
        )
    )
    largest: Max = reports(
        Metric(
            key="episode/return_max",
            number=934,
            unit="return",
            question="How good was the best episode of this update?",
            undefined=NONE,
        )
    )
    lengths: Mean = reports(
        Metric(
            key="episode/length_mean",
            number=935,
            unit="steps",
            question="How long do episodes last?",
            low=0.0,
            level=Level.MINIMAL,
            undefined=NONE,
        )
    )
    count: Sum = reports(
        Metric(
            key="episode/count",
            number=936,
            unit="count",
            question="How many episodes finished in this update?",
            low=0.0,
            level=Level.MINIMAL,
        )
    )
    recent: Mean = reports(
        Metric(
            key="episode/return_mean_100",
            number=937,
            unit="return",
            question="How well does the policy do, over the last 100 finished episodes?",
            level=Level.MINIMAL,
            undefined="no episode has finished yet",
        )
    )
    nonfinite: Sum = reports(
        Metric(
            key="episode/return_mean_nonfinite",
            number=938,
            unit="count",
            question="How many episodes had a return that is NaN or infinite?",
            low=0.0,
            level=Level.MINIMAL,
            healthy="absent",
            critical="> 0",
            undefined="none had",
            when_positive=True,
        )
    )


def episode_stats(
    returns: Sequence[float], lengths: Sequence[float], *, recent_returns: Iterable[float] = ()
) -> EpisodeStats:
    """Returns and lengths of the episodes that finished in a rollout; without any, only their count.

    Args:
        returns: undiscounted sums of raw rewards, one per episode.
        lengths: steps, one per episode.
        recent_returns: returns of the last 100 finished training episodes, these included.

    Raises:
        ValueError: for different numbers of returns and lengths.
    """
    if len(returns) != len(lengths):
        raise ValueError(
            f"every episode has a return and a length, got {len(returns)} returns and {len(lengths)} lengths"
        )
    finite = [float(value) for value in returns if math.isfinite(value)]
    latest = [float(value) for value in recent_returns if math.isfinite(value)]
    return EpisodeStats(
        returns=_moments(finite),
        smallest=Min(min(finite, default=math.inf)),
        largest=Max(max(finite, default=-math.inf)),
        lengths=Mean(float(sum(lengths)), float(len(lengths))),
        count=Sum(float(len(returns))),
        recent=Mean(math.fsum(latest), float(len(latest))),
        nonfinite=Sum(float(len(returns) - len(finite))),
    )


def _moments(x: Sequence[float]) -> Moments:
    """Mean and std; the higher moments are not measured."""
    mean = math.fsum(x) / max(1, len(x))
    return Moments(float(len(x)), mean, math.fsum((value - mean) ** 2 for value in x), math.nan, math.nan)
