"""Norms of gradients, taken where they are clipped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import GeneratorType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad

from esper_telemetry.adapters.sb3.taps import Failed
from esper_telemetry.core import tensors as ops
from esper_telemetry.events import Remover

NAME = "clip_grad_norm_"


class Clipped(Protocol):
    """Whoever hears of clipping."""

    def owns(self, parameters: Sequence[Tensor]) -> bool:
        """Whether these are the parameters that it watches."""

    def about_to_clip(self, max_norm: float, norms: Tensor | None) -> None:
        """They are about to be clipped together; norms [K] of all that have a gradient, None where they are not known."""


class ClipObserver:
    """Stands in the place of `torch.nn.utils.clip_grad_norm_`, and does to the last bit what that does.

    A clip needs the norm of every gradient, which is what telemetry reports. To take them twice would cost more than all else it does in
    a minibatch; taken once, gradients are clipped in less time than torch takes. Parameters that nobody here watches, devices and types
    where bits could differ, and everything but a plain call are left to torch.
    """

    def __init__(self, clip: Callable[..., Tensor]) -> None:
        self._clip = clip
        self._proved: bool | None = None
        self.listeners: tuple[tuple[Clipped, Failed], ...] = ()

    def __call__(self, parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Tensor:
        """The norm of all gradients before clipping, 0-d."""
        if isinstance(parameters, Tensor):
            return self._clip(parameters, max_norm, *args, **kwargs)
        given = list(parameters)
        owners = [entry for entry in self.listeners if entry[0].owns(given)]
        if not owners:
            again: Iterable[Tensor] = (p for p in given) if isinstance(parameters, GeneratorType) else given
            return self._clip(again, max_norm, *args, **kwargs)
        gradients = [p.grad for p in given if p.grad is not None]
        if args or kwargs or not self._ours(gradients, max_norm):
            _tell(owners, max_norm, None)
            return self._clip(given, max_norm, *args, **kwargs)
        raw = ops.raw_norms(gradients)
        _tell(owners, max_norm, raw)
        return ops.clip_by_norms(gradients, raw, float(max_norm))

    def __reduce__(self) -> str | tuple[Any, ...]:
        return getattr, (clip_grad, NAME)

    def _ours(self, gradients: Sequence[Tensor], max_norm: float) -> bool:
        """Whether these can be clipped here, which is tried once."""
        plain = all(map(_plain, gradients))
        if plain and gradients and self._proved is None:
            self._proved = equals_torch(gradients, max_norm)
        return plain and bool(self._proved)


def _plain(gradient: Tensor) -> bool:
    return gradient.dtype is torch.float32 and gradient.is_cpu and not (gradient.is_sparse or gradient.requires_grad)


def _tell(owners: Sequence[tuple[Clipped, Failed]], max_norm: float, norms: Tensor | None) -> None:
    for owner, failed in owners:
        try:
            owner.about_to_clip(max_norm, norms)
        except Exception as error:  # whatever a bug raises
            failed(owner.about_to_clip, error)


@torch.no_grad()
def equals_torch(gradients: Sequence[Tensor], max_norm: float) -> bool:
    """Whether torch makes the same of copies of these gradients, to the last bit: clipped as asked, and to half their norm."""
    limits = (float(max_norm), 0.5 * float(ops.total_norm(ops.raw_norms(gradients))))
    return all(_equal(gradients, limit) for limit in limits)


def _equal(gradients: Sequence[Tensor], limit: float) -> bool:
    ours, theirs = [g.clone() for g in gradients], [nn.Parameter(torch.empty_like(g)) for g in gradients]
    for parameter, gradient in zip(theirs, gradients, strict=True):
        parameter.grad = gradient.clone()
    norm = ops.clip_by_norms(ours, ops.raw_norms(ours), limit)
    wanted = clip_grad.clip_grad_norm_(theirs, limit)
    pairs = [(norm, wanted), *((mine, p.grad) for mine, p in zip(ours, theirs, strict=True) if p.grad is not None)]
    return all(torch.equal(mine, other) for mine, other in pairs)


def listen_to_clipping(listener: Clipped, failed: Failed) -> Remover | None:
    """Tells `listener` of clipping by `torch.nn.utils.clip_grad_norm_`; None where something else stands in its place already."""
    owner = vars(nn.utils)
    found = owner[NAME]
    if not isinstance(found, ClipObserver):
        if found is not clip_grad.clip_grad_norm_:
            return None
        found = owner[NAME] = ClipObserver(found)
    clipping: ClipObserver = found
    entry = listener, failed
    clipping.listeners = (*clipping.listeners, entry)

    def remove() -> None:
        clipping.listeners = tuple(one for one in clipping.listeners if one is not entry)
        if not clipping.listeners and owner[NAME] is clipping:
            owner[NAME] = clip_grad.clip_grad_norm_

    return remove
