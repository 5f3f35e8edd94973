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

SOURCE = "Kapturowski 2019 (R2D2); sb3-contrib#265; ikostrikov#278"
NO_STATES = "the stored states are zero, or nobody recomputes them"


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
            question="How far are the stored states from those that the current weights would have reached, after the last step?",
            low=0.0,
            cost="sampled",
            healthy="< 0.1",
            warn="> 0.3",
            critical="> 1",
            source=SOURCE,
            undefined=NO_STATES,
        )
    )


@dataclass(frozen=True, slots=True)
class FirstStaleness(MetricGroup):
    """Whether training reaches the states that acting reached, with the same weights."""

    distance: RelativeDistance = reports(
        Metric(
            key="lstm/staleness_first",
            number=735,
            unit="relative error",
            question="Does training reach the stored states before the first step of an update? Anything but 0, up to rounding, means"
            " another first state, other observations or other resets than in acting.",
            low=0.0,
            cost="sampled",
            healthy="about 0",
            critical="> 1e-4",
            source=SOURCE,
            undefined=NO_STATES,
        )
    )


@torch.inference_mode()
def state_staleness(stored: Tensor, recomputed: Tensor) -> Staleness:
    """Length of `recomputed` - `stored` over that of `stored`, all entries together.

    Args:
        stored: states at the beginnings of sequences, as the collector left them; any shape.
        recomputed: the same states, unrolled with the current weights from where memory last began anew.
    """
    return Staleness(_distance(stored, recomputed))


@torch.inference_mode()
def first_staleness(stored: Tensor, recomputed: Tensor) -> FirstStaleness:
    """The same before the first step, with the weights that the states were stored under."""
    return FirstStaleness(_distance(stored, recomputed))


def _distance(stored: Tensor, recomputed: Tensor) -> RelativeDistance:
    same_shape(stored=stored, recomputed=recomputed)
    norm = torch.linalg.vector_norm
    reference = stored.double()
    return RelativeDistance(norm(recomputed.double() - reference).square(), norm(reference).square())
