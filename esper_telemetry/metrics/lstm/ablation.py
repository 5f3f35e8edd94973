"""Whether memory is used at all: what the policy would do without it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from esper_telemetry.group import Mean, MetricGroup, reports
from esper_telemetry.metric import Metric
from esper_telemetry.metrics.exact_kl import joint_kl
from esper_telemetry.record import Level


@dataclass(frozen=True, slots=True)
class MemoryUse(MetricGroup):
    """What memory changes in the policy."""

    kl: Mean = reports(
        Metric(
            key="lstm/ablate_kl",
            number=734,
            unit="nats",
            question="How differently would the policy act if it remembered nothing? Near 0: memory is ignored.",
            low=0.0,
            level=Level.DEBUG,
            cost="debug",
            healthy="> 1e-3 where the task needs memory",
            source="KL(π(·|x,h)‖π(·|x,0)); heuristic",
            undefined="no recurrent policy, or no valid row",
        )
    )


@torch.inference_mode()
def memory_use(rows: Mapping[str, Tensor], *, relevant: Mapping[str, Tensor] | None = None) -> MemoryUse:
    """Mean KL between the policy with memory and without.

    Args:
        rows: per head [n], from `categorical_kl` or `gaussian_kl`, of the same weights with memory and without.
        relevant: per head [n] bool; heads left out always take part.
    """
    return MemoryUse(joint_kl(rows, relevant))
