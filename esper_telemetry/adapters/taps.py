"""Listeners on the methods of single objects, and on gradients just before they are clipped.

A trainer is observed on the objects that it holds, never on classes: a tap shadows one of an object's methods. A tapped object can be
pickled and copied, and the copy lacks the tap. So saved objects are clean, and the adapter's own passes through copies of the policy do
not reach listeners.

Norms before clipping are taken when `clip_grad_norm_` receives parameters: only then does every `.grad` exist unclipped. A hook on each
parameter takes a call per tensor and sees gradients that are not stored yet. Clipping needs the norms first, so it reuses them. The
result equals torch's bit for bit, in half of torch's time. No other module-level function is replaced while a model learns; a trainer that
imports the function by name has a copy of it in its module.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from types import GeneratorType, ModuleType
from typing import Any, NoReturn, Protocol, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad

from esper_telemetry.core import tensors as ops
from esper_telemetry.core.redaction import error_line
from esper_telemetry.events import Remover

_logger = logging.getLogger("esper_telemetry")

Listener: TypeAlias = Callable[[tuple[Any, ...], Mapping[str, Any], Any], object]
"""Receives positional arguments, keyword arguments and result of a call."""

ErrorHandler: TypeAlias = Callable[[Callable[..., object], Exception], object]
"""Receives a listener and the exception that it raised."""

Value = TypeVar("Value")


def reraise(listener: Callable[..., object], error: Exception) -> NoReturn:
    """Raise a listener's exception in the caller of the method."""
    raise error


def contained(function: Callable[..., None]) -> Callable[..., None]:
    """Return the function with its exceptions turned into warnings: a bug of ours must not reach the trainer."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
        except Exception as error:
            _logger.warning("esper-telemetry: %s failed: %s", function.__name__, error_line(error))

    return call


class Tap:
    """Attribute of an object that shadows one of its methods and calls listeners after every call."""

    def __init__(self, owner: object, name: str) -> None:
        self._owner, self._name = owner, name
        self._method = getattr(owner, name)
        self._previous = vars(owner).get(name)
        self.listeners: tuple[tuple[Listener, ErrorHandler], ...] = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The method's result."""
        result = self._method(*args, **kwargs)
        for listener, on_error in self.listeners:
            try:
                listener(args, kwargs, result)
            except Exception as error:  # a bug of ours must not reach the trainer
                on_error(listener, error)
        return result

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Any]]:
        return _identity, (self._method,)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_method" not in vars(self):
            raise AttributeError(name)
        return getattr(self._method, name)

    def remove(self) -> None:
        """Restore the method. A tap that something else has replaced is not removed, but no longer calls listeners."""
        if vars(self._owner).get(self._name) is not self:
            return
        if self._previous is None:
            del vars(self._owner)[self._name]
        else:
            vars(self._owner)[self._name] = self._previous


def listen(owner: object, name: str, listener: Listener, on_error: ErrorHandler = reraise) -> Remover:
    """Call `listener` after every call of that method of that object; return the function that ends this."""
    current = vars(owner).get(name)
    tap = current if isinstance(current, Tap) else Tap(owner, name)
    vars(owner)[name] = tap
    entry = listener, on_error
    tap.listeners = (*tap.listeners, entry)

    def remove() -> None:
        if any(one is entry for one in tap.listeners):
            tap.listeners = tuple(one for one in tap.listeners if one is not entry)
            if not tap.listeners:
                tap.remove()

    return remove


class SurroundingTap(Tap):
    """Tap that calls functions before and after each call, even if the call raises."""

    def __init__(self, owner: object, name: str, before: Callable[..., object], after: Callable[[], object]) -> None:
        super().__init__(owner, name)
        self._before, self._after = before, after
        vars(owner)[name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The method's result."""
        self._before(*args, **kwargs)
        try:
            return super().__call__(*args, **kwargs)
        finally:
            self._after()


class GeneratorTap(Tap):
    """Tap on a method that returns a generator: passes each item to a listener before the caller receives it.

    Args:
        listener: receives the item and the local variables of the generator.
        on_error: receives what the listener raises.
    """

    def __init__(self, owner: object, name: str, listener: Callable[[Any, Mapping[str, Any]], object], on_error: ErrorHandler) -> None:
        super().__init__(owner, name)
        self._listener, self._on_error = listener, on_error
        vars(owner)[name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """The generator's items."""
        generator = self._method(*args, **kwargs)
        for item in generator:
            try:
                self._listener(item, getattr(getattr(generator, "gi_frame", None), "f_locals", {}))
            except Exception as error:  # a bug of ours must not reach the trainer
                self._on_error(self._listener, error)
            yield item


@contextmanager
def without_trace(policy: nn.Module) -> Iterator[None]:
    """Context for passes through a copy of a policy. It restores the random number generators afterwards.

    Layers such as dropout draw only from the global generators. Buffers and attributes of modules are restored too, so that every pass
    begins in the same state.
    """
    buffers = [(buffer, buffer.clone()) for buffer in policy.buffers()]
    attributes = [(vars(module), dict(vars(module))) for module in policy.modules()]
    devices = {parameter.device for parameter in policy.parameters() if parameter.is_cuda}
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[device.index or 0 for device in devices]):
            yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        for now, earlier in attributes:
            now.clear()
            now.update(earlier)


@contextmanager
def in_mode(policy: nn.Module, *, training: bool, set_mode: Callable[[bool], object] | None = None) -> Iterator[None]:
    """Context in which `policy` and its modules are in that mode, as `set_mode` sets it. Their modes are restored afterwards."""
    modes = [(module, module.training) for module in policy.modules()]
    (set_mode or policy.train)(training)
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _identity(value: Value) -> Value:
    return value


def remove_all(removers: list[Remover]) -> None:
    """Call the removers, the last one first, and clear the list."""
    while removers:
        removers.pop()()


CLIP_FUNCTION = "clip_grad_norm_"


class ClipListener(Protocol):
    """Receives the gradients of its parameters before they are clipped."""

    def owns(self, parameters: Sequence[Tensor]) -> bool:
        """Return True for the parameters that it observes."""

    def before_clip(self, parameters: Sequence[Tensor], max_norm: float, norms: Tensor | None) -> None:
        """Handle parameters that are about to be clipped together; `norms` [K] of all gradients are None if they were not computed."""


class ClipFunction:
    """Replaces `torch.nn.utils.clip_grad_norm_`, with a bit-identical result, and shares the norms that it computes.

    Computing the norms twice would take longer than all of telemetry's other work in a minibatch. Torch handles parameters that no
    listener owns, devices and types whose bits could differ, and calls with further arguments.
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
        gradients, norms = [p.grad for p in listed if p.grad is not None], None
        try:
            if not (args or kwargs) and self._reproduces_torch(gradients, max_norm):
                norms = ops.raw_norms(gradients)
        except Exception as error:  # torch clips instead
            owners[0][1](self._reproduces_torch, error)
        for owner, on_error in owners:
            try:
                owner.before_clip(listed, max_norm, norms)
            except Exception as error:  # a bug of ours must not reach the trainer
                on_error(owner.before_clip, error)
        if norms is None:
            return self._clip(listed, max_norm, *args, **kwargs)
        return ops.clip_by_norms(gradients, norms, float(max_norm))

    def __reduce__(self) -> str | tuple[Any, ...]:
        return getattr, (clip_grad, CLIP_FUNCTION)

    def _reproduces_torch(self, gradients: Sequence[Tensor], max_norm: float) -> bool:
        """Compare with torch once, at the first gradients."""
        plain = all(g.dtype is torch.float32 and g.is_cpu and not (g.is_sparse or g.requires_grad) for g in gradients)
        if plain and gradients and self._verified is None:
            self._verified = equals_torch(gradients, max_norm)
        return plain and bool(self._verified)


@torch.no_grad()
def equals_torch(gradients: Sequence[Tensor], max_norm: float) -> bool:
    """Clip copies of these gradients, at `max_norm` and at half their norm, and return True if torch gives the same bits."""

    def equal(limit: float) -> bool:
        ours, theirs = [g.clone() for g in gradients], [nn.Parameter(torch.empty_like(g)) for g in gradients]
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = gradient.clone()
        norm = ops.clip_by_norms(ours, ops.raw_norms(ours), limit)
        expected = clip_grad.clip_grad_norm_(theirs, limit)
        clipped = [(mine, p.grad) for mine, p in zip(ours, theirs, strict=True) if p.grad is not None]
        return all(torch.equal(mine, other) for mine, other in [(norm, expected), *clipped])

    return all(map(equal, (float(max_norm), 0.5 * float(ops.total_norm(ops.raw_norms(gradients))))))


def listen_to_clipping(listener: ClipListener, on_error: ErrorHandler, module: ModuleType = nn.utils) -> Remover | None:
    """Call `listener` before that module's `clip_grad_norm_` clips; None if something else has replaced the function already."""
    owner = vars(module)
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
