"""What each seed is worth: accuracies with every subset of the seeds switched off, measured in one pass."""

from __future__ import annotations

from math import factorial

import torch
from torch import Tensor

MOST_SLOTS = 4
"""All 2^S subsets are measured every epoch, which few slots allow."""


def contributions(accuracy: Tensor) -> Tensor:
    """[N, S]: accuracy that is lost when a seed alone is off.

    Args:
        accuracy: [N, 2^S]; seed s is off where bit s of the column's number is set.
    """
    alone = [2**slot for slot in range(accuracy.shape[1].bit_length() - 1)]
    return accuracy[:, :1] - accuracy[:, alone]


def shapley_values(accuracy: Tensor) -> Tensor:
    """[N, S]: each seed's share of what all of them add, averaged over the orders in which they might come (Shapley 1953).

    They add up to the accuracy with all seeds less the accuracy without any.

    Args:
        accuracy: [N, 2^S], as above.
    """
    slots = accuracy.shape[1].bit_length() - 1
    weights = torch.zeros(2**slots, slots, dtype=torch.float64)
    for subset in range(2**slots):  # a bit that is set is a seed that is off
        on = slots - subset.bit_count()
        for slot in range(slots):
            others = on - (not subset >> slot & 1)
            share = factorial(others) * factorial(slots - 1 - others) / factorial(slots)
            weights[subset, slot] = -share if subset >> slot & 1 else share
    return (accuracy.double() @ weights.to(accuracy.device)).float()
