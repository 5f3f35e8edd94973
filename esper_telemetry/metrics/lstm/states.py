"""How large a recurrent state is: a state that explodes, drifts or stays empty shows here before the return does."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from esper_telemetry.group import Max, Mean, MetricGroup, Sum, label, reports
from esper_telemetry.metric import Metric
from esper_telemetry.metrics.masking import keep
from esper_telemetry.record import Level
from esper_telemetry.reduction import NAN, Array, Reduction, Slot, Statistic

PARTS = ("h", "c")
"""Parts of a recurrent state: hidden state and, of an LSTM, cell state."""
NO_ROWS = "no valid, finite state, or a policy without memory"


@dataclass(frozen=True, slots=True)
class RootMeanSquare(Reduction):
    """The root of a mean of squares: their sum and how many they are."""

    squares: Slot
    count: Slot

    statistics: ClassVar[Mapping[str, Statistic]] = {"rms": lambda s: math.sqrt(s[0] / s[1]) if s[1] else NAN}

    @staticmethod
    def merge(rows: Array) -> Array:
        """Sums and counts add."""
        merged: Array = rows.sum(axis=0)
        return merged


@dataclass(frozen=True, slots=True)
class StateStats(MetricGroup):
    """Size of the parts of a recurrent state; all layers together."""

    part: tuple[str, ...] = label()
    rms: RootMeanSquare = reports(
        Metric(
            key="lstm/{part}/rms",
            number=701,
            unit="state",
            question="How large is a typical entry of the recurrent state?",
            low=0.0,
            healthy="h: 0.05 to 0.9; c: < 5",
            warn="c > 10, or a robust z of log10 above 4",
            critical="c > 50, or a robust z of log10 above 12",
            source="heuristic; |h| < 1 by construction; the norm would grow with the number of units",
            undefined=NO_ROWS,
        )
    )
    absmax: Max = reports(
        Metric(
            key="lstm/{part}/absmax",
            number=702,
            unit="state",
            question="How large is the largest entry of the recurrent state?",
            low=0.0,
            critical="c > 50",
            source="heuristic",
            undefined=NO_ROWS,
        )
    )
    mean: Mean = reports(
        Metric(
            key="lstm/{part}/mean",
            number=703,
            unit="state",
            question="Does the recurrent state lean to one side?",
            healthy="near 0",
            warn="above 0.8 times the rms in magnitude",
            source="heuristic",
            undefined=NO_ROWS,
        )
    )
    env_rms: Max = reports(
        Metric(
            key="lstm/{part}/env_rms/max",
            number=704,
            unit="state",
            question="How large is the state in the environment where it is largest? Far above the rms: one environment went astray.",
            low=0.0,
            healthy="close to the rms",
            source="heuristic",
            undefined=NO_ROWS,
        )
    )
    nonfinite: Sum = reports(
        Metric(
            key="lstm/{part}/rms_nonfinite",
            number=705,
            unit="count",
            question="How many of the states held a NaN or an infinity?",
            low=0.0,
            level=Level.MINIMAL,
            healthy="absent",
            critical="> 0",
            undefined="none did",
            when_positive=True,
        )
    )


class StateSize(NamedTuple):
    """Recurrent states summed over layers and units: what their statistics need, at a fraction of the memory.

    Attributes:
        width: entries of one part of one state, over all layers.
        total, squares, absolute: [parts, T, B], sums of the entries, of their squares and of their magnitudes.
        largest: [parts, T, B], largest magnitude.
    """

    width: int
    total: Tensor
    squares: Tensor
    absolute: Tensor
    largest: Tensor

    @property
    def empty(self) -> Tensor:
        """[T, B], bool: the state is exactly zero, as it is where memory begins anew."""
        return (self.largest == 0).all(0)


@torch.no_grad()
def state_size(states: Tensor) -> StateSize:
    """Sums over layers and units of states [T, layers, parts, B, H]."""
    magnitudes = states.abs()  # its sum and maximum take a tenth of the time that the norms of order 1 and ∞ take
    return StateSize(
        states.shape[1] * states.shape[-1],
        states.sum(-1).sum(1).movedim(1, 0),
        torch.linalg.vector_norm(states, dim=-1).square().sum(1).movedim(1, 0),
        magnitudes.sum(-1).sum(1).movedim(1, 0),
        magnitudes.amax(-1).amax(1).movedim(1, 0),
    )


@torch.inference_mode()
def state_stats(size: StateSize, *, valid: Tensor | None = None) -> StateStats:
    """Root mean square, largest magnitude and signed mean of each part of the state.

    Args:
        size: of T states of B environments, from `state_size`.
        valid: [T, B] bool; None where every state counts.
    """
    allowed = None if valid is None else valid.bool().t()
    squares = keep(size.squares.double().mT, allowed)
    count = squares.count * size.width
    sums = squares.values.sum(-1)
    totals = keep(size.total.double().mT, squares.kept).values
    largest = keep(size.largest.double().mT, squares.kept).where(-math.inf)
    by_env = torch.where(count > 0, sums / count, -math.inf).amax(-1)
    return StateStats(
        part=PARTS[: len(size.squares)],
        rms=RootMeanSquare(sums.sum(-1), count.sum(-1)),
        absmax=Max(largest.amax((-1, -2))),
        mean=Mean(totals.sum((-1, -2)), count.sum(-1)),
        env_rms=Max(by_env.sqrt()),
        nonfinite=Sum(squares.nonfinite.sum(-1)),
    )
