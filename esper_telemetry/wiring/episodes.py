"""Episodes that finished, and the mean return of the last hundred."""

from __future__ import annotations

from collections import deque

from esper_telemetry.events import EpisodeEnd, UpdateEnd
from esper_telemetry.metrics.episodes import episode_stats
from esper_telemetry.telemetry import Telemetry
from esper_telemetry.wiring.family import Listener

RECENT = 100


class Episodes:
    """Observes `episode/*`; an update without a finished episode has only their count, 0."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._returns: list[float] = []
        self._lengths: list[int] = []
        self._recent: deque[float] = deque(maxlen=RECENT)

    def listen(self, listener: Listener) -> None:
        """Hears `EpisodeEnd` and `UpdateEnd`."""
        listener.on(EpisodeEnd, self._keep)
        listener.on(UpdateEnd, self._observe)

    def _keep(self, event: EpisodeEnd) -> None:
        self._returns.extend(event.returns)
        self._lengths.extend(event.lengths)
        self._recent.extend(event.returns)

    def _observe(self, _: UpdateEnd) -> None:
        self._telemetry.observe(episode_stats(self._returns, self._lengths, recent_returns=self._recent))
        self._returns, self._lengths = [], []
