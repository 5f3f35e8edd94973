"""The moment from which the records of a loop of one's own are made in a process beside it.

What a record of a hundred values needs besides the numbers, histories and rules and a line of JSON, takes one to two milliseconds of the
training thread. That is nothing where an update takes a second, and a tenth of one that takes ten milliseconds. So the first records show
what they cost; where that is worth a process, one is started, and learns from the journal what the writer here has learned.
Until it has, records are made here, so nothing waits for it anywhere; then it reads the few that have come since, and takes over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from esper_telemetry.offload.process import worth_offloading
from esper_telemetry.offload.writer import OffloadedWriter
from esper_telemetry.record import RunInfo
from esper_telemetry.sampling import Average

WORTH_SHARE: Final = 0.005
"""Of the wall time that records take on the training thread, above which a process is worth its memory: a quarter of the budget."""
WORTH_SECONDS: Final = 1.0
"""How long a run goes on before it is asked: a process takes two to start."""
WORTH_RECORDS: Final = 20


class HandOver:
    """Weighs what records cost here, and brings the writer that makes them elsewhere.

    Args:
        start: makes that writer; None where the system refuses what it needs.
    """

    def __init__(self, start: Callable[[], OffloadedWriter | None]) -> None:
        self._start = start
        self._refused = False
        self._cost, self._pace = Average(), Average()
        self._elapsed = 0.0
        self._learning: OffloadedWriter | None = None

    def weigh(self, seconds: float, elapsed: float) -> None:
        """Takes what a record has cost the training thread, and the time since the one before, in seconds."""
        self._cost.add(seconds)
        self._pace.add(elapsed)
        self._elapsed += elapsed

    def writer(self, run: RunInfo) -> OffloadedWriter | None:
        """Who makes the records from now on; None while it is this process. Never waits."""
        if self._learning is None:
            if self._worthwhile and not self._refused:
                self._learning = self._start()
                self._refused = self._learning is None
                if self._learning is not None:
                    self._learning.go_on(run)
            return None
        if not self._learning.idle():
            return None
        self._learning.catch_up()
        return self._learning

    def give_up(self) -> None:
        """Ends a process that has not taken over."""
        if self._learning is not None:
            self._learning.dismiss()

    @property
    def _worthwhile(self) -> bool:
        known = self._cost.count >= WORTH_RECORDS and self._elapsed >= WORTH_SECONDS
        return known and self._cost.value > WORTH_SHARE * self._pace.value and worth_offloading()
