"""Shows the policy its rollout once more, before and after the updates that are looked at closely.

It takes two or three forward passes over the rollout, so nothing here is heard of in other updates.
"""

from __future__ import annotations

from esper_telemetry.events import AfterUpdate, BeforeUpdate
from esper_telemetry.policy_replay import Outputs
from esper_telemetry.record import Level
from esper_telemetry.summary import replayed
from esper_telemetry.telemetry import Telemetry
from esper_telemetry.wiring.listener import Listener

CAPACITY_EVERY = 10
"""Looks from one at which a copy of the network is trained to the next."""


class Replays:
    """Observes the replays of updates, when asked.

    Attributes:
        looks: how many there were; a checkpoint keeps it.
    """

    def __init__(self, telemetry: Telemetry, listener: Listener) -> None:
        self._telemetry = telemetry
        self._listener = listener
        self.looks = 0
        self._stored: Outputs | None = None
        self._before: Outputs | None = None

    def begin(self) -> None:
        """Looks at the update that begins now."""
        self.stop()
        self._listener.on(BeforeUpdate, self._look)
        self._listener.on(AfterUpdate, self._look_again)

    def stop(self) -> None:
        """Looks at nothing any more."""
        self._listener.stop()
        self._stored = self._before = None

    def _look(self, event: BeforeUpdate) -> None:
        self._stored, self._before = event.policy.stored(), event.policy.outputs()
        self._telemetry.measure(replayed.before_update(self._stored, self._before))
        self._telemetry.measure(replayed.responses(event.policy.activations(), self._telemetry.update_level))
        self._telemetry.measure(replayed.through_time(event.policy))
        if self._telemetry.update_level >= Level.DEBUG and self.looks % CAPACITY_EVERY == 0:
            self._telemetry.measure(replayed.capacity(event.policy.copy()))
        self.looks += 1

    def _look_again(self, event: AfterUpdate) -> None:
        if self._stored is not None and self._before is not None:
            self._telemetry.measure(replayed.after_update(self._stored, self._before, event.policy.outputs()))
        self.stop()
