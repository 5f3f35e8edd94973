"""What a rollout says before anything is normalised: rewards, advantages, returns, the critic, and whether they fit together."""

from __future__ import annotations

from esper_telemetry.events import RolloutEnd
from esper_telemetry.metrics.advantages import advantage_stats
from esper_telemetry.metrics.integrity import gae_identity, nonfinite_count
from esper_telemetry.metrics.returns import return_stats
from esper_telemetry.metrics.rewards import reward_stats
from esper_telemetry.metrics.values import value_fit
from esper_telemetry.telemetry import Telemetry
from esper_telemetry.wiring.family import Listener


class Rollouts:
    """Observes `adv/raw/*`, `ret/*`, `reward/*`, `value/*` and the rollout's integrity."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry

    def listen(self, listener: Listener) -> None:
        """Hears `RolloutEnd`."""
        listener.on(RolloutEnd, self._observe)

    def _observe(self, event: RolloutEnd) -> None:
        valid = event.valid
        self._telemetry.observe(
            advantage_stats(event.advantages, valid=valid),
            return_stats(event.returns, valid=valid),
            reward_stats(event.rewards, valid=valid),
            value_fit(event.values, event.returns, valid=valid),
            gae_identity(event.advantages, event.values, event.returns, valid=valid),
            nonfinite_count((event.rewards, event.log_probs, event.values, event.advantages), valid=valid),
        )
