"""Sources of events with the optional protocols that they may support, and events of plugins as columns, metric groups and evidence.

A plugin that emits its own events on a trainer's hooks declares one class that joins them, and names it in the entry-point group
`esper_telemetry.updates`:

    [project.entry-points."esper_telemetry.updates"]
    mine = "my_package.telemetry:MyUpdate"

`attach` hands the class the events of an update. The record travels to the worker by its class, so both must be importable there. A class
may also be a `SupportsEvents`, a `SupportsProgress` or a `SupportsAlarmEvidence`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Self, runtime_checkable

from esper_telemetry.core.containment import Measurement
from esper_telemetry.core.facts import Facts
from esper_telemetry.core.record import Alarm, Level
from esper_telemetry.core.redaction import error_line
from esper_telemetry.events import Hooks, Remover

if TYPE_CHECKING:
    from esper_telemetry.updates.failure import Candidate

GROUP = "esper_telemetry.updates"

_logger = logging.getLogger("esper_telemetry")


class Capture(NamedTuple):
    """One piece of evidence: its type, and plain data."""

    type: str
    data: Mapping[str, Any]


class UpdateExtension(Protocol):
    """The events of one type in one update, joined: a picklable named tuple or dataclass of tensors and plain values.

    Attributes:
        event_type: type of the events; hooks receive exactly this type.
    """

    event_type: ClassVar[type]

    @classmethod
    def from_events(cls, events: Sequence[Any]) -> Self:
        """Return the record of an update's events, of which there is at least one; their tensors may be kept as they are."""

    @property
    def on_device(self) -> bool:
        """True if tensors are not on the CPU: then the update is measured in the trainer's process."""

    def measure(self, facts: Facts, level: Level) -> Iterable[Measurement]:
        """Yield metric functions with their arguments. If one raises, its group is left out and a warning is logged."""

    def evidence(self, facts: Facts) -> Iterable[Capture]:
        """Yield what the journal keeps of an update at DEBUG."""


@runtime_checkable
class SupportsEvents(Protocol):
    """An extension that writes its own events to the journal, for views: tables that hold more than metrics can."""

    def events(self, facts: Facts) -> Iterable[Capture]:
        """Yield the events that the journal keeps of every update, at NORMAL and DEBUG; a few kilobytes each."""


@runtime_checkable
class SupportsProgress(Protocol):
    """An extension whose views change during an update, because it takes seconds."""

    def progress(self, facts: Facts) -> Iterable[Capture]:
        """Yield the journal's events about the update so far, at NORMAL and DEBUG; the training thread asks at most twice a second."""


@runtime_checkable
class SupportsAlarmEvidence(Protocol):
    """An extension that adds evidence to alarms."""

    def alarm_evidence(self, alarm: Alarm) -> Mapping[str, Any]:
        """Return plain values for the evidence of an alarm that this update has raised; empty for other alarms."""


def progress_of(extension: UpdateExtension, facts: Facts) -> Iterable[Capture]:
    """Return an extension's events about the update so far; empty if it does not support them."""
    return extension.progress(facts) if isinstance(extension, SupportsProgress) else ()


@lru_cache(maxsize=1)
def update_extensions() -> tuple[type[UpdateExtension], ...]:
    """Return the classes that installed plugins declare. A warning is logged for a class that cannot be imported."""
    classes: list[type[UpdateExtension]] = []
    for entry in entry_points(group=GROUP):
        try:
            classes.append(entry.load())
        except (Exception, SystemExit) as error:  # from a plugin
            _logger.warning("the extension %s = %s cannot be used: %s", entry.name, entry.value, error_line(error))
    return tuple(classes)


@runtime_checkable
class EventSource(Protocol):
    """Anything that emits events: a trainer, an environment, an adapter."""

    @property
    def hooks(self) -> Hooks:
        """Hooks that the events are emitted on."""


@runtime_checkable
class ExtendedSource(Protocol):
    """A source that emits events in addition to `events`, and names the classes that join them."""

    @property
    def extensions(self) -> Collection[type[UpdateExtension]]:
        """Classes that join its own events, in addition to the plugins' classes."""


class Checkpointable(Protocol):
    """State that a checkpoint saves and loads."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""


class CheckpointRegistry(Protocol):
    """Objects that a source saves and loads with itself."""

    def join(self, name: str, member: Checkpointable) -> Remover:
        """Add an object; returns the function that ends this."""


@runtime_checkable
class SearchedSource(Protocol):
    """A source that searches the variables of a program for the first that is not finite."""

    @property
    def origin(self) -> Candidate | None:
        """That variable; None if all are finite."""


@runtime_checkable
class CheckpointedSource(Protocol):
    """A source whose checkpoints keep the history of what is measured."""

    @property
    def checkpointables(self) -> CheckpointRegistry:
        """Objects that are saved and loaded with it."""


class ObservedSource:
    """A source that is observed: `hooks` emit its events, and a call ends the observation."""

    def __init__(self, hooks: Hooks, remove: Remover) -> None:
        self.hooks = hooks
        self._remove = remove

    def __call__(self) -> None:
        """End the observation; harmless when repeated."""
        self._remove()
