"""What one update has gathered so far, and what becomes of it when it is flushed."""

from __future__ import annotations

from typing import NamedTuple

from esper_telemetry.logged import Logged, Numbers
from esper_telemetry.record import Axes, Level
from esper_telemetry.summary import Snapshot, copied
from esper_telemetry.window import Transfer, Window


class Flush(NamedTuple):
    """A record whose numbers may still be on their way from the device; `witnesses` are kept for evidence alone."""

    axes: Axes
    level: Level
    transfer: Transfer
    numbers: Numbers
    snapshots: tuple[Snapshot, ...]
    witnesses: tuple[Snapshot, ...]
    partial: bool

    def lasting(self) -> Flush:
        """The same with copies of what the trainer may write to when it goes on."""
        return self._replace(snapshots=copied(self.snapshots), witnesses=copied(self.witnesses))


class OpenUpdate:
    """The update under way.

    Attributes:
        window: groups that were observed.
        logged: plain numbers.
        snapshots: whole updates of a trainer, still to be summarised.
        witnesses: those that are summarised already.
    """

    def __init__(self) -> None:
        self.window = Window()
        self.logged = Logged()
        self.snapshots: list[Snapshot] = []
        self.witnesses: list[Snapshot] = []

    def __bool__(self) -> bool:
        return bool(self.window or self.logged or any(self.snapshots))

    @property
    def travels(self) -> bool:
        """Whether there are only numbers that were logged, and what is still to be summarised, if anything."""
        return not (self.witnesses or self.window)

    @property
    def gradient_steps(self) -> int:
        """Optimizer steps that it has seen."""
        return self.window.gradient_steps + sum(snapshot.gradient_steps for snapshot in self.snapshots)

    def send(self, axes: Axes, level: Level, *, partial: bool) -> Flush:
        """Starts the copy of its numbers to the host; the next update begins with nothing."""
        numbers, snapshots = self.take()
        witnesses = tuple(self.witnesses)
        self.witnesses.clear()
        return Flush(axes, level, self.window.send(), numbers, snapshots, witnesses, partial)

    def take(self) -> tuple[Numbers, tuple[Snapshot, ...]]:
        """What `travels`; the next update begins without it."""
        numbers, snapshots = self.logged.take(), tuple(self.snapshots)
        self.snapshots.clear()
        return numbers, snapshots
