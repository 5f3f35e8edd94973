"""Listening to the methods of single objects: what they were given and what they returned.

Nothing of a class is touched. An object with a tap can be pickled and copied, and comes out without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn, TypeAlias, TypeVar

from esper_telemetry.events import Remover

Heard: TypeAlias = Callable[[tuple[Any, ...], Mapping[str, Any], Any], object]
"""Is told of positional arguments, named arguments and result of a call."""

Failed: TypeAlias = Callable[[Callable[..., object], Exception], object]
"""Is told of a listener and what it has raised."""

Value = TypeVar("Value")


def raised(heard: Callable[..., object], error: Exception) -> NoReturn:
    """What a listener raises goes on to whoever called the method."""
    raise error


class Tap:
    """Stands in an object's attributes before one of its methods, tells listeners of every call and changes nothing."""

    def __init__(self, owner: object, name: str) -> None:
        self._owner, self._name = owner, name
        self._method = getattr(owner, name)
        self._before = vars(owner).get(name)
        self.listeners: tuple[tuple[Heard, Failed], ...] = ()
        self.muted = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The method's result."""
        result = self._method(*args, **kwargs)
        if not self.muted:
            for heard, failed in self.listeners:
                try:
                    heard(args, kwargs, result)
                except Exception as error:  # whatever a bug raises
                    failed(heard, error)
        return result

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Any]]:
        return _itself, (self._method,)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_method" not in vars(self):
            raise AttributeError(name)
        return getattr(self._method, name)

    def leave(self) -> None:
        """Puts back what was there, unless something else stands in its place by now: then it stays, and is silent."""
        if vars(self._owner).get(self._name) is not self:
            return
        if self._before is None:
            del vars(self._owner)[self._name]
        else:
            vars(self._owner)[self._name] = self._before


def listen(owner: object, name: str, heard: Heard, failed: Failed = raised) -> Remover:
    """Calls `heard` after every call of that method of that object; returns the function that ends this, in any order."""
    found = vars(owner).get(name)
    tap = found if isinstance(found, Tap) else Tap(owner, name)
    vars(owner)[name] = tap
    entry = heard, failed
    tap.listeners = (*tap.listeners, entry)

    def remove() -> None:
        if any(one is entry for one in tap.listeners):
            tap.listeners = tuple(one for one in tap.listeners if one is not entry)
            if not tap.listeners:
                tap.leave()

    return remove


@contextmanager
def silence(owners: Iterable[object]) -> Iterator[None]:
    """Within it the taps that these objects have tell nothing: what is called is not what its owner is doing."""
    taps = [value for owner in owners for value in vars(owner).values() if isinstance(value, Tap)]
    for tap in taps:
        tap.muted += 1
    try:
        yield
    finally:
        for tap in taps:
            tap.muted -= 1


def _itself(value: Value) -> Value:
    return value
