"""Networks that grow in the environments: their steps, joined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from esper_telemetry.events import GrowthStep
from esper_telemetry.summary import Growth


def joined(steps: Sequence[GrowthStep]) -> Growth | None:
    """All steps of an update; None where nothing grows."""
    if not steps:
        return None
    return Growth(
        hosts=_stacked([step.hosts for step in steps]),
        seeds=_stacked([step.seeds for step in steps]),
        rewards=_stacked([step.rewards for step in steps]),
        gates=_stacked([step.gates for step in steps]),
        last=tuple([step.last for step in steps]),
        horizon=steps[0].horizon,
        labels=steps[0].labels,
    )


def _stacked(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([part[name] for part in parts]) for name in parts[0]}
