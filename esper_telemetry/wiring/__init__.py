"""Where events meet telemetry: `attach` makes it listen to whatever emits them, the bundled trainer or an adapter."""

from __future__ import annotations

from typing import Protocol

from esper_telemetry.events import BackwardEnd, MinibatchEnd, RolloutEnd, RunStart, UpdateEnd
from esper_telemetry.hooks import Hooks, Remover
from esper_telemetry.record import Level
from esper_telemetry.telemetry import Telemetry
from esper_telemetry.wiring.listener import Listener
from esper_telemetry.wiring.suspects import Suspects
from esper_telemetry.wiring.update import Update


class Source(Protocol):
    """Anything that emits events."""

    @property
    def hooks(self) -> Hooks:
        """Where to listen."""


def attach(telemetry: Telemetry, source: Source) -> Remover:
    """Makes `telemetry` observe and flush what happens in `source`; returns the function that ends this.

    At level OFF nothing is registered, so the trainer does no extra work.
    """
    if telemetry.level is Level.OFF:
        return lambda: None
    update, suspects = Update(telemetry), Suspects()
    telemetry.expect_updates(suspects=suspects.tensors, open_update=update.take)
    listener = Listener(telemetry.clock, source.hooks)
    listener.on(RunStart, update.start)
    listener.on(RolloutEnd, suspects.keep_rollout)
    listener.on(MinibatchEnd, suspects.keep_minibatch)
    listener.on(BackwardEnd, suspects.keep_backward)
    update.listen(listener)
    listener.on(UpdateEnd, update.end)
    return listener.stop
