"""How far stored recurrent states are from those that the current weights reach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import ClassVar

import torch
from torch import Tensor

from esper_telemetry.group import MetricGroup, reports
from esper_telemetry.metric import Metric
from esper_telemetry.metrics.masking import same_shape
from esper_telemetry.reduction import NAN, Array, Reduction, Slot, Statistic


@dataclass(frozen=True, slots=True)
class RelativeDistance(Reduction):
    """Length of a difference over the length of what it is measured against; the slots hold squares."""

    difference: Slot
    reference: Slot

    statistics: ClassVar[Mapping[str, Statistic]] = {"relative": lambda s: sqrt(s[0] / s[1]) if s[1] else NAN}

    @staticmethod
    def merge(rows: Array) -> Array:
        """Squares add."""
        merged: Array = rows.sum(axis=0)
        return merged


@dataclass(frozen=True, slots=True)
class Staleness(MetricGroup):
    """How old the states are from which sequences are trained."""

    distance: RelativeDistance = reports(
        Metric(
            key="lstm/staleness",
            number=731,
            unit="relative error",
            question="How far are the stored states from those that the current weights would have reached? Before the first step of an"
            " update exactly 0.",
            low=0.0,
            cost="sampled",
            healthy="< 0.1",
            warn="> 0.3",
            critical="> 1 in the last epoch; above 1e-4 before the first step: the wrong state was stored",
            source="Kapturowski 2019 (R2D2); sb3-contrib#265",
            undefined="the stored states are zero, or nobody recomputes them",
        )
    )


@torch.inference_mode()
def state_staleness(stored: Tensor, recomputed: Tensor) -> Staleness:
    """Length of `recomputed` - `stored` over that of `stored`, all entries together.

    Args:
        stored: states at the beginnings of sequences, as the collector left them; any shape.
        recomputed: the same states, unrolled with the current weights from where memory last began anew.
    """
    same_shape(stored=stored, recomputed=recomputed)
    norm = torch.linalg.vector_norm
    reference = stored.double()
    return Staleness(RelativeDistance(norm(recomputed.double() - reference).square(), norm(reference).square()))
