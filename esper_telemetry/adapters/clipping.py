"""Gradients at the moment before they are clipped, which adapters share.

Norms before clipping are taken where `clip_grad_norm_` receives parameters: the one moment at which every `.grad` is there and none is
clipped. A hook on each parameter costs a call per tensor and sees gradients that are not stored yet. A clip needs the norms first, so it is
made from them, bit for bit as torch makes it, in half of torch's time. It is the one function of a module that is replaced while a model
learns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import GeneratorType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad

from esper_telemetry.adapters.taps import ErrorHandler
from esper_telemetry.core import tensors as ops
from esper_telemetry.events import Remover

CLIP_FUNCTION = "clip_grad_norm_"


class ClipListener(Protocol):
    """Receives the gradients of its parameters before they are clipped."""

    def owns(self, parameters: Sequence[Tensor]) -> bool:
        """Return True for the parameters that it observes."""

    def before_clip(self, max_norm: float, norms: Tensor | None) -> None:
        """They are about to be clipped together; norms [K] of all that have a gradient, None where they were not computed."""


class ClipFunction:
    """Replaces `torch.nn.utils.clip_grad_norm_` with the same result to the last bit, and shares the norms that it computes.

    Taken a second time for telemetry, norms would cost more than everything else that it does in a minibatch. Parameters that no
    listener owns, devices and types where bits could differ, and everything but a plain call are left to torch.
    """

    def __init__(self, clip: Callable[..., Tensor]) -> None:
        self._clip = clip
        self._verified: bool | None = None
        self.listeners: tuple[tuple[ClipListener, ErrorHandler], ...] = ()

    def __call__(self, parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Tensor:
        """The norm of all gradients before clipping, 0-d."""
        if isinstance(parameters, Tensor):
            return self._clip(parameters, max_norm, *args, **kwargs)
        listed = list(parameters)
        owners = [entry for entry in self.listeners if entry[0].owns(listed)]
        if not owners:
            again: Iterable[Tensor] = (p for p in listed) if isinstance(parameters, GeneratorType) else listed
            return self._clip(again, max_norm, *args, **kwargs)
        gradients = [p.grad for p in listed if p.grad is not None]
        if args or kwargs or not self._reproduces_torch(gradients, max_norm):
            _report(owners, max_norm, None)
            return self._clip(listed, max_norm, *args, **kwargs)
        norms = ops.raw_norms(gradients)
        _report(owners, max_norm, norms)
        return ops.clip_by_norms(gradients, norms, float(max_norm))

    def __reduce__(self) -> str | tuple[Any, ...]:
        return getattr, (clip_grad, CLIP_FUNCTION)

    def _reproduces_torch(self, gradients: Sequence[Tensor], max_norm: float) -> bool:
        """Compare with torch once, at the first gradients."""
        plain = all(g.dtype is torch.float32 and g.is_cpu and not (g.is_sparse or g.requires_grad) for g in gradients)
        if plain and gradients and self._verified is None:
            self._verified = equals_torch(gradients, max_norm)
        return plain and bool(self._verified)


def _report(owners: Sequence[tuple[ClipListener, ErrorHandler]], max_norm: float, norms: Tensor | None) -> None:
    for owner, on_error in owners:
        try:
            owner.before_clip(max_norm, norms)
        except Exception as error:  # a bug of ours must not reach the trainer
            on_error(owner.before_clip, error)


@torch.no_grad()
def equals_torch(gradients: Sequence[Tensor], max_norm: float) -> bool:
    """Clip copies of these gradients, at `max_norm` and at half their norm, and return True where torch gives the same bits."""

    def equal(limit: float) -> bool:
        ours, theirs = [g.clone() for g in gradients], [nn.Parameter(torch.empty_like(g)) for g in gradients]
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = gradient.clone()
        norm = ops.clip_by_norms(ours, ops.raw_norms(ours), limit)
        expected = clip_grad.clip_grad_norm_(theirs, limit)
        clipped = [(mine, p.grad) for mine, p in zip(ours, theirs, strict=True) if p.grad is not None]
        return all(torch.equal(mine, other) for mine, other in [(norm, expected), *clipped])

    return all(map(equal, (float(max_norm), 0.5 * float(ops.total_norm(ops.raw_norms(gradients))))))


def listen_to_clipping(listener: ClipListener, on_error: ErrorHandler) -> Remover | None:
    """Call `listener` before `torch.nn.utils.clip_grad_norm_` clips; None where something else has replaced that function already."""
    owner = vars(nn.utils)
    current = owner[CLIP_FUNCTION]
    if not isinstance(current, ClipFunction):
        if current is not clip_grad.clip_grad_norm_:
            return None
        current = owner[CLIP_FUNCTION] = ClipFunction(current)
    clipping: ClipFunction = current
    entry = listener, on_error
    clipping.listeners = (*clipping.listeners, entry)

    def remove() -> None:
        clipping.listeners = tuple(one for one in clipping.listeners if one is not entry)
        if not clipping.listeners and owner[CLIP_FUNCTION] is clipping:
            owner[CLIP_FUNCTION] = clip_grad.clip_grad_norm_

    return remove
