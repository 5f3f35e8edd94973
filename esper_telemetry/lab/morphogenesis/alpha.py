"""How a seed's weight moves from one value to another: curves over a number of epochs."""

from __future__ import annotations

from math import exp

import torch
from torch import Tensor

CURVES = ("linear", "cosine", "sigmoid_soft", "sigmoid", "sigmoid_steep")
STEEPNESS = (6.0, 12.0, 24.0)
"""Of the three sigmoid curves."""

TARGETS = (0.5, 0.7, 1.0)
TEMPOS = (2, 3, 5)
SPEEDS = (0, 2, 3, 5)
"""Epochs that blending takes, and that a change of it takes; 0 is at once."""


def progress(done: Tensor, total: Tensor, curve: Tensor) -> Tensor:
    """How much of the way is behind, 0 to 1, after `done` of `total` epochs along a curve (an index into `CURVES`).

    Every curve begins at 0, ends at 1 and never turns back; sigmoids are stretched so that they do.
    """
    t = torch.where(total > 0, (done / total.clamp(min=1)).clamp(0, 1), 1.0)
    shapes = [t, (1 - torch.cos(torch.pi * t)) / 2, *(_sigmoid(t, steepness) for steepness in STEEPNESS)]
    return torch.stack(shapes, -1).gather(-1, curve.unsqueeze(-1)).squeeze(-1)


def _sigmoid(t: Tensor, steepness: float) -> Tensor:
    low, high = (1 / (1 + exp(-end * steepness / 2)) for end in (-1.0, 1.0))
    return (torch.sigmoid(steepness * (t - 0.5)) - low) / (high - low)
