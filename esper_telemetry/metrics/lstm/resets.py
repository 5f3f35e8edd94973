"""Where memory begins anew, and how long it lasts: memory that is never reset leaks from one episode into the next."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from esper_telemetry.group import Max, Mean, MetricGroup, reports
from esper_telemetry.metric import Metric
from esper_telemetry.metrics.masking import same_shape
from esper_telemetry.record import Level

NO_ROWS = "no valid step, or a policy without memory"


@dataclass(frozen=True, slots=True)
class ResetStats(MetricGroup):
    """How often memory begins anew and how old it is."""

    rate: Mean = reports(
        Metric(
            key="lstm/reset_rate",
            number=741,
            unit="fraction",
            question="In which share of the steps does memory begin anew? 0 although episodes end: it leaks across episodes.",
            low=0.0,
            high=1.0,
            level=Level.MINIMAL,
            healthy="1 over the mean length of episodes",
            critical="0 while episodes end",
            source="identity",
            undefined=NO_ROWS,
        )
    )
    unbroken: Mean = reports(
        Metric(
            key="lstm/chunk_no_reset_frac",
            number=742,
            unit="fraction",
            question="In which share of the environments did memory never begin anew in this rollout?",
            low=0.0,
            high=1.0,
            undefined=NO_ROWS,
        )
    )
    age: Mean = reports(
        Metric(
            key="lstm/age/mean",
            number=743,
            unit="steps",
            question="How many steps does memory reach back on average?",
            low=0.0,
            undefined=NO_ROWS,
        )
    )
    oldest: Max = reports(
        Metric(
            key="lstm/age/max",
            number=744,
            unit="steps",
            question="How many steps does the oldest memory reach back?",
            low=0.0,
            undefined=NO_ROWS,
        )
    )


@torch.no_grad()
def state_ages(resets: Tensor, start: Tensor | None = None) -> Tensor:
    """Steps since memory last began anew, [T, B], 0 where it does.

    Args:
        resets: [T, B] bool: the step begins without memory.
        start: [B] age at the first step, where that is not a reset; None counts from the first step on. The ages with which the next
            rollout starts are the last ones plus 1.
    """
    steps = torch.arange(len(resets), device=resets.device).unsqueeze(-1)
    last = torch.where(resets.bool(), steps, -1).cummax(0).values
    before = 0 if start is None else start
    return torch.where(last < 0, steps + before, steps - last)


@torch.inference_mode()
def reset_stats(resets: Tensor, ages: Tensor, *, valid: Tensor | None = None) -> ResetStats:
    """Rate of resets, environments without one, and ages.

    Args:
        resets: [T, B] bool: the step begins without memory.
        ages: [T, B], from `state_ages`.
        valid: [T, B] bool; None where every step is.
    """
    same_shape(resets=resets, ages=ages, valid=valid)
    counts = torch.ones_like(resets, dtype=torch.bool) if valid is None else valid.bool()
    steps, resets = counts.sum(), resets.bool() & counts
    present = counts.any(0)
    age = torch.where(counts, ages.double(), 0.0)
    return ResetStats(
        rate=Mean(resets.sum(), steps),
        unbroken=Mean((present & ~resets.any(0)).sum(), present.sum()),
        age=Mean(age.sum(), steps),
        oldest=Max(torch.where(counts, age, -math.inf).amax()),
    )
