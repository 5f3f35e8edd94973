"""Adam and SGD for rows of parameters: each row has its own clipping, its own moments and its own count of steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

MOMENTUM = 0.9
BETAS, EPS = (0.9, 0.999), 1e-8


class Moments(NamedTuple):
    """An optimizer's memory of R rows: [R, size] twice and the steps taken [R]; R may be several axes."""

    first: Tensor
    second: Tensor
    steps: Tensor

    @staticmethod
    def of(rows: Tensor) -> Moments:
        """Empty, as of new parameters."""
        return Moments(torch.zeros_like(rows), torch.zeros_like(rows), torch.zeros_like(rows[..., 0]))

    def cleared(self, where: Tensor) -> Moments:
        """Nothing is remembered of the rows where [R] is set; all others keep what they have."""
        return Moments(
            *(torch.where(where.view(*where.shape, *[1] * (part.dim() - where.dim())), 0.0, part) for part in self)
        )


def clipped(gradients: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """Gradients [..., size] whose rows have at most that norm, and the norms [...] that they had."""
    norms = gradients.norm(dim=-1)
    return gradients * (limit / (norms + 1e-6)).clamp(max=1.0).unsqueeze(-1), norms


def adam(rows: Tensor, gradients: Tensor, moments: Moments, rate: float, where: Tensor) -> tuple[Tensor, Moments]:
    """One step (Kingma & Ba 2015) of the rows where [R] is set; the others and their moments stay as they are."""
    mask = where.unsqueeze(-1)
    steps = moments.steps + where
    first = torch.where(mask, torch.lerp(moments.first, gradients, 1 - BETAS[0]), moments.first)
    second = torch.where(mask, torch.lerp(moments.second, gradients.square(), 1 - BETAS[1]), moments.second)
    corrected = [1 - beta ** steps.clamp(min=1).unsqueeze(-1) for beta in BETAS]
    change = rate * (first / corrected[0]) / ((second / corrected[1]).sqrt() + EPS)
    return torch.where(mask, rows - change, rows), Moments(first, second, steps)


def sgd(rows: Tensor, gradients: Tensor, moments: Moments, rate: float, where: Tensor) -> tuple[Tensor, Moments]:
    """One step with momentum of the rows where [R] is set."""
    mask = where.unsqueeze(-1)
    first = torch.where(mask, MOMENTUM * moments.first + gradients, moments.first)
    return torch.where(mask, rows - rate * first, rows), Moments(first, moments.second, moments.steps + where)


Optimizer = Callable[[Tensor, Tensor, Moments, float, Tensor], tuple[Tensor, Moments]]
OPTIMIZERS: Mapping[str, Optimizer] = {"adam": adam, "sgd": sgd}
