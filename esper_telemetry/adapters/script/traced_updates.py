"""Choice of the updates of a script that are traced, so that a long run is hardly slower than without telemetry.

Tracing reads the graphs of losses and the script's arrays, which in small scripts takes longer than the training itself. The first updates
are all traced. Afterwards one in k is: k is the smallest power of two for which tracing takes at most a tenth of the script's own time, and
at most a quarter of the updates so far. The updates in between are only counted: their episodes, learning rates and steps are recorded.
"""

from __future__ import annotations

import math
import time
from collections import deque
from statistics import median

BUDGET = 0.1
"""Processor time of tracing that is allowed, as a share of the script's own."""

ALL_TRACED = 16
"""First updates, all of which are traced."""

PERIOD_SHARE = 4
"""Number of updates so far, divided by the longest period then."""

MAX_PERIOD = 16
"""Longest period of traced updates."""

TIMED_UPDATES = 5
"""Latest updates of either kind whose times are compared."""


class TracedUpdates:
    """Decides from the processor time of traced and other updates how many updates are counted after a traced one.

    Args:
        every_one: trace all updates.

    Attributes:
        counted: updates that have ended and were not traced.
    """

    def __init__(self, *, every_one: bool = False) -> None:
        self._every_one = every_one
        self._updates = self._left = self.counted = 0
        self._times: dict[bool, deque[float]] = {kind: deque(maxlen=TIMED_UPDATES) for kind in (True, False)}
        self._since = time.thread_time()

    @property
    def includes_this(self) -> bool:
        """True if the update under way is traced; its rollout belongs to it."""
        return not self._left

    @property
    def includes_next(self) -> bool:
        """True if the one after it will be traced if this one is not."""
        return self._left <= 1

    def end_update(self, *, raised: bool = False) -> None:
        """End the update under way.

        Args:
            raised: the next updates should be traced at any cost. An update whose first action has been chosen already is not.
        """
        now = time.thread_time()
        self._times[self.includes_this].append(now - self._since)
        self._since = now
        self._updates += 1
        self.counted += not self.includes_this
        if self._left:
            self._left = 1 if raised and self._left > 1 else self._left - 1
        elif not self._every_one and not raised and self._updates >= ALL_TRACED:
            self._left = self._period() - 1

    def _period(self) -> int:
        """Return k for the times so far; 2 until there are other times to compare with those of traced updates."""
        longest = min(MAX_PERIOD, max(1, self._updates // PERIOD_SHARE))
        if not self._times[False]:
            return 2
        traced, counted = (median(self._times[kind]) for kind in (True, False))
        wanted = max(1.0, (traced - counted) / (BUDGET * max(counted, 1e-9)))
        return 1 << min(math.ceil(math.log2(wanted)), longest.bit_length() - 1)
