"""Hooks by event type: the seam between whatever trains and whatever watches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Event = TypeVar("Event")
Remover = Callable[[], None]


class Hooks:
    """Functions to call when something happens in a trainer, keyed by the type of the event.

    Hooks run in the order of registration, those that ask for it after all others, in the trainer's thread. An event type
    without hooks costs a dictionary look-up: ask `wants` before building an event that is expensive to build.
    """

    def __init__(self) -> None:
        self._early: dict[type, list[Callable[[Any], None]]] = {}
        self._late: dict[type, list[Callable[[Any], None]]] = {}
        self._hooks: dict[type, tuple[Callable[[Any], None], ...]] = {}

    def on(self, event_type: type[Event], hook: Callable[[Event], None], *, last: bool = False) -> Remover:
        """Calls `hook` with every event of exactly that type; returns the function that ends this.

        Args:
            last: call it after the hooks that do not say so, whenever they were registered.
        """
        hooks = (self._late if last else self._early).setdefault(event_type, [])
        hooks.append(hook)
        self._line_up(event_type)

        def remove() -> None:
            if hook in hooks:
                hooks.remove(hook)
                self._line_up(event_type)

        return remove

    def _line_up(self, event_type: type) -> None:
        self._hooks[event_type] = (*self._early.get(event_type, ()), *self._late.get(event_type, ()))
        if not self._hooks[event_type]:
            del self._hooks[event_type]

    def wants(self, event_type: type) -> bool:
        """Whether anything listens to events of that type."""
        return event_type in self._hooks

    def emit(self, event: object) -> None:
        """Hands the event to its hooks: to those that were registered when it came, whatever they change."""
        for hook in self._hooks.get(type(event), ()):
            hook(event)
