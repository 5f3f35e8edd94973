"""Adam and SGD for rows of parameters, in place: each row has its own clipping, its own moments and its own count of steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

MOMENTUM = 0.9
BETAS, EPS = (0.9, 0.999), 1e-8


class AdamMoments(NamedTuple):
    """An optimizer's memory of R rows: [R, size] twice and the steps taken [R]; R may be several axes."""

    first: Tensor
    second: Tensor
    steps: Tensor

    @staticmethod
    def of(rows: Tensor) -> AdamMoments:
        """Empty, as of new parameters."""
        return AdamMoments(torch.zeros_like(rows), torch.zeros_like(rows), torch.zeros_like(rows[..., 0]))

    def clear(self, where: Tensor) -> None:
        """Forgets the rows where [R] is set; all others keep what they have."""
        for part in self:
            part.masked_fill_(where.view(*where.shape, *[1] * (part.dim() - where.dim())), 0.0)


def clip(gradients: Tensor, limit: float) -> Tensor:
    """Shortens the rows of gradients [..., size] that are longer than that; returns the norms [...] that they had."""
    norms: Tensor = torch.linalg.vector_norm(gradients, dim=-1)
    gradients.mul_((limit / (norms + 1e-6)).clamp(max=1.0).unsqueeze(-1))
    return norms


def adam(rows: Tensor, gradients: Tensor, moments: AdamMoments, rate: float, where: Tensor) -> None:
    """One step (Kingma & Ba 2015) of the rows where [R] is set; the others and their moments stay as they are."""
    on = where.to(rows.dtype).unsqueeze(-1)
    steps = moments.steps.add_(where).clamp(min=1).unsqueeze(-1)
    moments.first.lerp_(gradients, on * (1 - BETAS[0]))
    moments.second.lerp_(gradients.square(), on * (1 - BETAS[1]))
    first, second = (1 - beta**steps for beta in BETAS)
    size = moments.second.sqrt().mul_(second.rsqrt()).add_(EPS)
    rows.addcdiv_(moments.first * (on * rate / first), size, value=-1.0)


def sgd(rows: Tensor, gradients: Tensor, moments: AdamMoments, rate: float, where: Tensor) -> None:
    """One step with momentum of the rows where [R] is set."""
    on = where.to(rows.dtype).unsqueeze(-1)
    moments.steps.add_(where)
    moments.first.lerp_(moments.first * MOMENTUM + gradients, on)
    rows.addcmul_(moments.first, on, value=-rate)


Optimizer = Callable[[Tensor, Tensor, AdamMoments, float, Tensor], None]
OPTIMIZERS: Mapping[str, Optimizer] = {"adam": adam, "sgd": sgd}
