"""Where events meet telemetry: `attach` makes it listen to whatever emits them, the bundled trainer or an adapter."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from esper_telemetry.hooks import Hooks, Remover
from esper_telemetry.record import Level
from esper_telemetry.telemetry import Telemetry
from esper_telemetry.wiring.close_look import CloseLook
from esper_telemetry.wiring.listener import Listener
from esper_telemetry.wiring.pairs import watch_pair
from esper_telemetry.wiring.replays import Replays
from esper_telemetry.wiring.update import Update

__all__ = ["Source", "attach", "watch_pair"]


class Companions(Protocol):
    """What a source saves and loads with itself."""

    def join(self, name: str, companion: Update) -> Callable[[], None]:
        """Adds one more; returns the function that ends this."""


class Source(Protocol):
    """Anything that emits events.

    One that has `companions` keeps the history of what is measured in its checkpoints. One that has `joins` emits these types of events,
    `MinibatchesEnd` and `BackwardsEnd` or one of them, and need not build a `MinibatchEnd` or a `BackwardEnd` each time.
    """

    @property
    def hooks(self) -> Hooks:
        """Where to listen."""


def attach(telemetry: Telemetry, source: Source) -> Remover:
    """Makes `telemetry` observe and flush what happens in `source`; returns the function that ends this.

    At level OFF nothing is registered, so the trainer does no extra work.

    Raises:
        TypeError: for anything else than a Telemetry and something that emits events.
    """
    if not isinstance(telemetry, Telemetry) or not isinstance(getattr(source, "hooks", None), Hooks):
        raise TypeError(
            f"attach takes a Telemetry and a trainer with hooks, got {type(telemetry).__name__} and {type(source).__name__}: "
            "telemetry.watch(model, optimizer) is for a loop of your own, TelemetryCallback for Stable-Baselines3"
        )
    if telemetry.level is Level.OFF:
        return lambda: None
    contained = partial(Listener, telemetry.clock, source.hooks, telemetry.attempt)
    replays = Replays(telemetry, contained())
    close_look = CloseLook(contained())
    for_this_update = contained()
    update = Update(telemetry, replays, close_look, for_this_update)
    listener = Listener(telemetry.clock, source.hooks)
    update.listen(listener, joined=getattr(source, "joins", ()))
    telemetry.expect_updates(candidates=update.nonfinite_candidates, open_update=update.take)
    companions: Companions | None = getattr(source, "companions", None)
    leave = None if companions is None else companions.join("telemetry", update)

    def stop() -> None:
        listener.stop()
        replays.stop()
        close_look.stop()
        for_this_update.stop()
        if leave is not None:
            leave()

    return stop
