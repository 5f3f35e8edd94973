"""How gradients travel through time: whether what is learned at the end of a sequence reaches its beginning."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from esper_telemetry.group import Mean, MetricGroup, reports
from esper_telemetry.metric import Metric
from esper_telemetry.record import Level

PASCANU = "Pascanu 2013, 1211.5063"
NO_MEMORY = "no recurrent policy, or every environment began anew"


@dataclass(frozen=True, slots=True)
class BpttStats(MetricGroup):
    """Gradients of the loss at the recurrent state h."""

    first: Mean = reports(
        Metric(
            key="lstm/bptt/h0_grad_norm",
            number=732,
            unit="gradient norm",
            question="How much of the loss's gradient reaches the state in which sequences begin?",
            low=0.0,
            cost="sampled",
            healthy="1e-4 to 10",
            critical="> 100: gradients explode through time",
            source=PASCANU,
            undefined=NO_MEMORY,
        )
    )
    profile: Mean = reports(
        Metric(
            key="lstm/bptt/profile_ratio",
            number=733,
            unit="ratio",
            question="How much larger is the gradient at the beginning of a sequence than at its end? Far above 1: it explodes on the"
            " way, near 0: it vanishes.",
            low=0.0,
            level=Level.DEBUG,
            cost="debug",
            source=PASCANU,
            undefined=f"{NO_MEMORY}, or the last step has no gradient",
        )
    )


@torch.inference_mode()
def bptt_stats(first: Tensor, last: Tensor) -> BpttStats:
    """Norm of the gradient before the first step, and of its last layer's over that after the last step.

    Args:
        first: ∂L/∂h before the first step, [layers, envs, H].
        last: ∂L/∂h of the last layer after the last step, [envs, H].
    """
    norm = torch.linalg.vector_norm
    end = norm(last.double())
    ratio = norm(first[-1].double()) / end
    defined = torch.isfinite(ratio)
    begin = norm(first.double())
    return BpttStats(
        first=Mean(begin.nan_to_num(0.0, 0.0), torch.isfinite(begin)),
        profile=Mean(torch.where(defined, ratio, 0.0), defined),
    )
