"""Where events meet metrics: `attach` makes a telemetry listen to whatever emits events, the bundled trainer or an adapter."""

from __future__ import annotations

from typing import Protocol

from esper_telemetry.hooks import Hooks, Remover
from esper_telemetry.telemetry import Telemetry
from esper_telemetry.wiring.episodes import Episodes
from esper_telemetry.wiring.family import Listener
from esper_telemetry.wiring.gradients import Gradients
from esper_telemetry.wiring.policy import Policy
from esper_telemetry.wiring.rollout import Rollouts
from esper_telemetry.wiring.run import Run, Suspects, Updates

FAMILIES = (Run, Suspects, Rollouts, Episodes, Policy, Gradients, Updates)
"""In the order in which they hear an event; `Updates` is last because it flushes."""


class Source(Protocol):
    """Anything that emits events."""

    @property
    def hooks(self) -> Hooks:
        """Where to listen."""


def attach(telemetry: Telemetry, source: Source) -> Remover:
    """Makes `telemetry` observe and flush what happens in `source`; returns the function that ends this.

    At level OFF nothing is registered, so the trainer does no extra work.
    """
    if telemetry.level == 0:
        return lambda: None
    listener = Listener(telemetry, source.hooks)
    for family in FAMILIES:
        family(telemetry).listen(listener)
    return listener.stop
