"""How the gradients of two losses compare that several ranks have each measured of their own rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from esper_telemetry.reduction import NAN, Array, Reduction, Slot, Statistic


def compared(actor: Tensor, critic: Tensor, coefs: Tensor | float, dots: Tensor | None) -> list[Tensor]:
    """log10 of critic over actor, the critic's share of the squares, the clipped actor, and the cosine where there are `dots`.

    Args:
        actor, critic: norms [M], float64.
        coefs: clip coefficients [M], or one.
        dots: inner products [M], float64.
    """
    square = critic.square()
    found = [(critic / actor).log10(), square / (square + actor.square()), actor * coefs]
    return found if dots is None else [*found, (dots / (actor * critic)).clamp(-1.0, 1.0)]


@dataclass(frozen=True, slots=True)
class Pull(Reduction):
    """A mean over optimizer steps of a number that the two gradients of each step give, here log10 of critic over actor.

    The loss of all rows is the mean of the ranks' losses weighted by their rows, so each rank's gradient of its own rows counts with its
    share of the rows; the squares of norms of different rows add, and so do the inner products.

    Attributes:
        total, count: of the number, over steps at which it is defined.
        actor, critic: norms.
        dot: inner product.
        coef: clip coefficient.
        rows: over which the losses' means are.
    """

    total: Slot
    count: Slot
    actor: Slot
    critic: Slot
    dot: Slot
    coef: Slot
    rows: Slot

    place: ClassVar[int] = 0
    statistics: ClassVar[Mapping[str, Statistic]] = {"mean": lambda s: s[0] / s[1] if s[1] else NAN}

    @staticmethod
    def merge(rows: Array) -> Array:
        """Totals and counts add over steps; what they were made from has no meaning then."""
        merged: Array = rows.sum(axis=0)
        return merged

    @classmethod
    def join(cls, ranks: Array) -> Array:
        """The number that the gradients of all ranks' rows give at one step."""
        _, _, actor, critic, dot, coef, rows = np.moveaxis(ranks, -1, 0)
        share = rows / rows.sum(axis=0)
        norms = [np.sqrt(np.square(share * norm).sum(axis=0)) for norm in (actor, critic)]
        together = [*norms, coef[0], (share**2 * dot).sum(axis=0)]
        found = compared(*(torch.from_numpy(np.ascontiguousarray(part)) for part in together))[cls.place].numpy()
        defined = np.isfinite(found)
        parts = (np.where(defined, found, 0.0), defined, norms[0], norms[1], together[3], coef[0], rows.sum(axis=0))
        return np.stack(parts, axis=-1)


@dataclass(frozen=True, slots=True)
class ShareOfCritic(Pull):
    """The critic's share of the squares."""

    place: ClassVar[int] = 1


@dataclass(frozen=True, slots=True)
class EffectivePull(Pull):
    """The actor's norm after clipping."""

    place: ClassVar[int] = 2


@dataclass(frozen=True, slots=True)
class Agreement(Pull):
    """The cosine."""

    place: ClassVar[int] = 3
