"""What the families of the wiring share: listening on telemetry's clock, and stacking the minibatches of an update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from esper_telemetry.hooks import Hooks, Remover
from esper_telemetry.telemetry import Telemetry

Event = TypeVar("Event")


class Listener:
    """Registers hooks whose time counts as telemetry's, and removes them all at once."""

    def __init__(self, telemetry: Telemetry, hooks: Hooks) -> None:
        self._clock = telemetry.clock
        self._hooks = hooks
        self._removers: list[Remover] = []

    def on(self, event_type: type[Event], hook: Callable[[Event], None]) -> None:
        """Calls `hook` with every event of that type."""

        def timed(event: Event) -> None:
            with self._clock:
                hook(event)

        self._removers.append(self._hooks.on(event_type, timed))

    def stop(self) -> None:
        """Ends everything that was registered here."""
        while self._removers:
            self._removers.pop()()


class Family(Protocol):
    """Listens to some events and observes one family of metrics."""

    def __init__(self, telemetry: Telemetry) -> None: ...

    def listen(self, listener: Listener) -> None:
        """Registers the hooks."""


def stack(parts: Sequence[Tensor]) -> Tensor:
    """Minibatches [N, ...] as [M, N, ...]; shorter ones are padded with zeros."""
    longest = max(len(part) for part in parts)
    if all(len(part) == longest for part in parts):
        return torch.stack(list(parts))
    return torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)


def stack_valid(parts: Sequence[Tensor], masks: Sequence[Tensor | None]) -> Tensor | None:
    """Which rows of `stack(parts)` count, [M, N]; None where all do."""
    longest = max(len(part) for part in parts)
    if all(mask is None and len(part) == longest for part, mask in zip(parts, masks, strict=True)):
        return None
    known = [
        mask if mask is not None else part.new_ones(len(part), dtype=torch.bool)
        for part, mask in zip(parts, masks, strict=True)
    ]
    return stack(known)
