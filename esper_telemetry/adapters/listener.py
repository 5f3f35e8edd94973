"""Listening on telemetry's clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from esper_telemetry.core.clock import Clock
from esper_telemetry.events import Hooks, Remover

Event = TypeVar("Event")


class TimedListener:
    """Registers hooks whose time counts as telemetry's, and removes them all at once.

    Args:
        clock: telemetry's.
        hooks: where to listen.
        attempt: calls a hook with an event, and keeps to itself what the hook raises; without it everything is raised in the trainer.
    """

    def __init__(
        self, clock: Clock, hooks: Hooks, attempt: Callable[[Callable[[Any], None], Any], None] = lambda f, x: f(x)
    ) -> None:
        self._clock = clock
        self._attempt = attempt
        self._hooks = hooks
        self._removers: list[Remover] = []

    def on(self, event_type: type[Event], hook: Callable[[Event], None]) -> None:
        """Calls `hook` with every event of that type."""

        def timed(event: Event) -> None:
            with self._clock:
                self._attempt(hook, event)

        self._removers.append(self._hooks.on(event_type, timed))

    def once(self, event_type: type[Event], hook: Callable[[Event], None]) -> None:
        """Calls `hook` with the next event of that type, and then no more: nobody needs to build the others."""

        def timed(event: Event) -> None:
            remove()
            self._removers.remove(remove)
            with self._clock:
                self._attempt(hook, event)

        remove = self._hooks.on(event_type, timed)
        self._removers.append(remove)

    def untimed(self, event_type: type[Event], hook: Callable[[Event], None]) -> None:
        """The same for a hook that is not worth the time it takes to time it."""
        self._removers.append(self._hooks.on(event_type, hook))

    def keep(self, event_type: type[Event]) -> list[Event]:
        """A list that every event of that type is appended to."""
        events: list[Event] = []
        self.untimed(event_type, events.append)
        return events

    def another(self) -> TimedListener:
        """One like this that may end before; it ends with this one."""
        found = TimedListener(self._clock, self._hooks, self._attempt)
        self._removers.append(found.stop)
        return found

    def stop(self) -> None:
        """Ends everything that was registered here."""
        while self._removers:
            self._removers.pop()()
