"""Sources of events, and the optional protocols that they may support."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol, runtime_checkable

from esper_telemetry.events import Hooks, Remover
from esper_telemetry.updates.extensions import UpdateExtension


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
