"""Evaluation: how good the policy is when it takes its likeliest actions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from esper_telemetry.group import Max, Mean, MetricGroup, Min, Moments, Sum, reports
from esper_telemetry.metric import Metric
from esper_telemetry.metrics.masking import moments, sample
from esper_telemetry.record import Level

NONE = "no evaluation since the last record"


@dataclass(frozen=True, slots=True)
class EvaluationStats(MetricGroup):
    """Whole episodes without exploration."""

    returns: Moments = reports(
        Metric(
            key="eval/return_mean",
            number=941,
            unit="return",
            question="How much does the policy earn when it takes its likeliest actions? Far above the training return: exploration costs"
            " much.",
            level=Level.MINIMAL,
            undefined=NONE,
        ),
        Metric(
            key="eval/return_std",
            number=942,
            unit="return",
            question="How much do the returns of evaluation episodes differ?",
            of="std",
            low=0.0,
            undefined=NONE,
        ),
    )
    smallest: Min = reports(
        Metric(
            key="eval/return_min",
            number=943,
            unit="return",
            question="What does the worst evaluation episode earn?",
            undefined=NONE,
        )
    )
    largest: Max = reports(
        Metric(
            key="eval/return_max",
            number=944,
            unit="return",
            question="What does the best evaluation episode earn?",
            undefined=NONE,
        )
    )
    length: Mean = reports(
        Metric(
            key="eval/length_mean",
            number=945,
            unit="steps",
            question="How long do evaluation episodes last?",
            low=0.0,
            level=Level.MINIMAL,
            undefined=NONE,
        )
    )
    count: Sum = reports(
        Metric(
            key="eval/count",
            number=946,
            unit="count",
            question="How many episodes were evaluated?",
            low=0.0,
            level=Level.MINIMAL,
            undefined=NONE,
        )
    )


@torch.inference_mode()
def evaluation_stats(returns: Sequence[float], lengths: Sequence[int]) -> EvaluationStats:
    """Mean, population std and extremes of the returns, and the mean length.

    Args:
        returns: undiscounted return of each evaluated episode.
        lengths: its number of steps.
    """
    if len(returns) != len(lengths):
        raise ValueError(f"every episode needs a return and a length, got {len(returns)} and {len(lengths)}")
    s = sample(torch.tensor(returns, dtype=torch.float64))
    return EvaluationStats(
        returns=moments(s),
        smallest=Min(s.where(torch.inf).amin()),
        largest=Max(s.where(-torch.inf).amax()),
        length=Mean(float(sum(lengths)), float(len(lengths))),
        count=Sum(float(len(returns))),
    )
