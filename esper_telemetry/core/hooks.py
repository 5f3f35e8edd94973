"""`Hooks`: functions to call with events."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

Event = TypeVar("Event")
Remover = Callable[[], None]


class _Entry(NamedTuple):
    last: bool
    late: bool
    hook: Callable[[Any], None]


_is_last = attrgetter("last")


class Hooks:
    """Functions to call with events, keyed by the type of the event.

    Hooks run in the trainer's thread, in the order of registration; hooks registered with `last` run after all others. An event type
    without hooks costs a dictionary look-up: ask `wants` before building an expensive event.
    """

    def __init__(self) -> None:
        self._entries: dict[type, list[_Entry]] = {}
        self._hooks: dict[type, tuple[Callable[[Any], None], ...]] = {}
        self._wanted_now: set[type] = set()

    def on(
        self, event_type: type[Event], hook: Callable[[Event], None], *, last: bool = False, late: bool = False
    ) -> Remover:
        """Call `hook` with every event of exactly that type; returns a function that ends this.

        Args:
            last: call it after the hooks registered without `last`, regardless of when these were registered.
            late: allow calling it after the update. If all hooks allow this, a source may keep references
                and build all events after the update, in a loop, which takes a third of the time.
        """
        entry = _Entry(last, late, hook)
        entries = self._entries.setdefault(event_type, [])
        entries.append(entry)
        self._sort(event_type)

        def remove() -> None:
            if entry in entries:
                entries.remove(entry)
                self._sort(event_type)

        return remove

    def _sort(self, event_type: type) -> None:
        self._hooks[event_type] = tuple([one.hook for one in sorted(self._entries[event_type], key=_is_last)])
        if not self._hooks[event_type]:
            del self._hooks[event_type]
        if all(one.late for one in self._entries[event_type]):
            self._wanted_now.discard(event_type)
        else:
            self._wanted_now.add(event_type)

    def wants(self, event_type: type) -> bool:
        """Return whether anything listens to events of that type."""
        return event_type in self._hooks

    def wants_now(self, event_type: type) -> bool:
        """Return whether a hook wants events of that type immediately."""
        return event_type in self._wanted_now

    def emit(self, event: object) -> None:
        """Call the hooks of the event's type that were registered when it arrived, even if they change the hooks."""
        for hook in self._hooks.get(type(event), ()):
            hook(event)
