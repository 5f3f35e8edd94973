"""Listeners on the methods of single objects.

A foreign trainer is observed on the objects that it holds, never on classes: a tap stands in an object's attributes before one of its
methods. An object with a tap can be pickled and copied, and comes out without it, so that what is saved during training is clean. Taps are
silent while the adapter itself passes rows through the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn, TypeAlias, TypeVar

import torch
from torch import nn

from esper_telemetry.events import Remover

Listener: TypeAlias = Callable[[tuple[Any, ...], Mapping[str, Any], Any], object]
"""Receives positional arguments, keyword arguments and result of a call."""

ErrorHandler: TypeAlias = Callable[[Callable[..., object], Exception], object]
"""Receives a listener and the exception that it raised."""

Value = TypeVar("Value")


def reraise(listener: Callable[..., object], error: Exception) -> NoReturn:
    """Raise a listener's exception in whoever called the method."""
    raise error


class Tap:
    """Stands in an object's attributes before one of its methods and calls listeners after every call."""

    def __init__(self, owner: object, name: str) -> None:
        self._owner, self._name = owner, name
        self._method = getattr(owner, name)
        self._previous = vars(owner).get(name)
        self.listeners: tuple[tuple[Listener, ErrorHandler], ...] = ()
        self.muted = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The method's result."""
        result = self._method(*args, **kwargs)
        if not self.muted:
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
        """Put back what was there; a tap that something else has replaced stays in its place and is silent."""
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


@contextmanager
def without_trace(policy: nn.Module) -> Iterator[None]:
    """Context in which passes through `policy` reach no listener, and random numbers come from copies of the generators.

    After it the policy's buffers are what they were.
    """
    taps = [value for module in policy.modules() for value in vars(module).values() if isinstance(value, Tap)]
    buffers = [(buffer, buffer.clone()) for buffer in policy.buffers()]
    devices = {parameter.device for parameter in policy.parameters() if parameter.is_cuda}
    for tap in taps:
        tap.muted += 1
    try:
        with torch.random.fork_rng(devices=[device.index or 0 for device in devices]):
            yield
    finally:
        for tap in taps:
            tap.muted -= 1
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


@contextmanager
def in_mode(policy: nn.Module, *, training: bool, set_mode: Callable[[bool], object] | None = None) -> Iterator[None]:
    """Context in which `policy` and its modules are in that mode, as `set_mode` sets it; after it each is in its own again."""
    modes = [(module, module.training) for module in policy.modules()]
    (set_mode or policy.train)(training)
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _identity(value: Value) -> Value:
    return value
