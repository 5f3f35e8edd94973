"""Gradients as a script clips them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from esper_telemetry.core.tensors import gradient_norms


class Taken(NamedTuple):
    """Norms [K] of the gradients of one optimizer step before clipping, names of their parameters, and the limit."""

    names: tuple[str, ...]
    norms: Tensor
    max_norm: float | None


class ScriptGradients:
    """Norms that were taken before the script clipped, until its optimizer takes its step.

    Attributes:
        max_norm: to which the script clipped last; None where it has not.
    """

    def __init__(self) -> None:
        self.max_norm: float | None = None
        self._norms: dict[int, Tensor] = {}
        self._limits: list[float] = []

    @torch.no_grad()
    def before_clip(self, parameters: Sequence[Tensor], max_norm: float | None) -> None:
        """Gradients are about to be clipped together; those that were clipped in this step before keep their norms."""
        fresh = [p for p in parameters if p.grad is not None and id(p) not in self._norms]
        if fresh:
            norms = gradient_norms([p.grad for p in fresh if p.grad is not None])
            self._norms.update(zip(map(id, fresh), norms.unbind(), strict=True))
        if max_norm is not None:
            self._limits.append(max_norm)
            self.max_norm = max_norm

    def forget(self) -> None:
        """The step is none of ours."""
        self._norms, self._limits = {}, []

    @torch.no_grad()
    def take(self, parameters: Mapping[str, Tensor]) -> Taken | None:
        """Of these parameters, clipped or not; None where none has a gradient. Clipped in several parts, there is no one limit."""
        norms, limits = self._norms, self._limits
        self.forget()
        present = {name: p for name, p in parameters.items() if p.grad is not None}
        if not present:
            return None
        left = [p for p in present.values() if id(p) not in norms]
        if left:
            norms.update(
                zip(map(id, left), gradient_norms([p.grad for p in left if p.grad is not None]).unbind(), strict=True)
            )
        found = torch.stack([norms[id(p)] for p in present.values()])
        return Taken(tuple(present), found, limits[0] if len(limits) == 1 and not left else None)
