"""Objects that are saved and loaded with a trainer although they are no part of it: telemetry's history, a curriculum, a schedule."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any, Protocol


class Stateful(Protocol):
    """Anything with a state of tensors and plain data."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""


class Checkpointables:
    """Objects by name; whether they join before or after a checkpoint is loaded makes no difference."""

    def __init__(self) -> None:
        self._members: dict[str, Stateful] = {}
        self._loaded: dict[str, Any] = {}

    def join(self, name: str, member: Stateful) -> Callable[[], None]:
        """Save and load it from now on; returns the function that ends this. The second and third of a name are numbered."""
        numbered = (f"{name}-{number}" for number in itertools.count(2))
        name = name if name not in self._members else next(other for other in numbered if other not in self._members)
        self._members[name] = member
        if name in self._loaded:
            member.load_state_dict(self._loaded[name])

        def leave() -> None:
            self._members.pop(name, None)

        return leave

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all."""
        return {name: member.state_dict() for name, member in self._members.items()}

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Hand each its state, now or when it joins; one that was not saved is left as it is."""
        self._loaded = dict(states)
        for name, member in self._members.items():
            if name in states:
                member.load_state_dict(states[name])
