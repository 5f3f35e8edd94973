"""Listening on telemetry's clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from esper_telemetry.clock import Clock
from esper_telemetry.hooks import Hooks, Remover

Event = TypeVar("Event")


class Listener:
    """Registers hooks whose time counts as telemetry's, and removes them all at once."""

    def __init__(self, clock: Clock, hooks: Hooks) -> None:
        self._clock = clock
        self._hooks = hooks
        self._removers: list[Remover] = []

    def on(self, event_type: type[Event], hook: Callable[[Event], None]) -> None:
        """Calls `hook` with every event of that type."""

        def timed(event: Event) -> None:
            with self._clock:
                hook(event)

        self._removers.append(self._hooks.on(event_type, timed))

    def keep(self, event_type: type[Event]) -> list[Event]:
        """A list that every event of that type is appended to; too cheap to be timed."""
        events: list[Event] = []
        self._removers.append(self._hooks.on(event_type, events.append))
        return events

    def stop(self) -> None:
        """Ends everything that was registered here."""
        while self._removers:
            self._removers.pop()()
