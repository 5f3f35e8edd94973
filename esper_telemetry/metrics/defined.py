"""Means over the values that are defined: what is not finite is left out instead of poisoning the rest."""

from __future__ import annotations

import torch
from torch import Tensor

from esper_telemetry.group import Mean


def defined_together(*values: Tensor) -> tuple[Mean, ...]:
    """`defined` of several tensors of one shape, in one go."""
    stacked = torch.stack(values)
    finite = torch.isfinite(stacked)
    totals = torch.where(finite, stacked, stacked.new_zeros(()))
    return tuple(map(Mean, totals.unbind(), finite.unbind()))


def defined(values: Tensor) -> Mean:
    """The mean over the finite values, each of which counts once; absent where there are none."""
    finite = torch.isfinite(values)
    return Mean(torch.where(finite, values, values.new_zeros(())), finite)
