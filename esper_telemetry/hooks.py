"""Hooks by event type: the seam between whatever trains and whatever watches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Event = TypeVar("Event")
Remover = Callable[[], None]


class Hooks:
    """Functions to call when something happens in a trainer, keyed by the type of the event.

    Hooks run in the order of registration, those that ask for it after all others, in the trainer's thread. An event type
    without hooks costs two dictionary look-ups: ask `wants` before building an event that is expensive to build.
    """

    def __init__(self) -> None:
        self._hooks: dict[type, list[Callable[[Any], None]]] = {}
        self._last: dict[type, list[Callable[[Any], None]]] = {}

    def on(self, event_type: type[Event], hook: Callable[[Event], None], *, last: bool = False) -> Remover:
        """Calls `hook` with every event of exactly that type; returns the function that ends this.

        Args:
            last: call it after the hooks that do not say so, whenever they were registered.
        """
        hooks = (self._last if last else self._hooks).setdefault(event_type, [])
        hooks.append(hook)

        def remove() -> None:
            if hook in hooks:
                hooks.remove(hook)

        return remove

    def wants(self, event_type: type) -> bool:
        """Whether anything listens to events of that type."""
        return bool(self._hooks.get(event_type) or self._last.get(event_type))

    def emit(self, event: object) -> None:
        """Hands the event to its hooks."""
        for hook in (*self._hooks.get(type(event), ()), *self._last.get(type(event), ())):
            hook(event)
