"""Warnings about the use of a telemetry, each logged once: calls in the wrong order, and records that take much of a loop's time."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from esper_telemetry.core.record import Axes

AFTER_CLOSE: Final = (
    "esper-telemetry: %s was called after close, so further measurements are not recorded: close telemetry when training is over, "
    "or make another Telemetry"
)
NEVER_FLUSHED: Final = (
    "esper-telemetry: flush was never called, so everything that was observed and logged is one record, marked as partial: call "
    "telemetry.flush(env_step=...) at the end of every update"
)
OVERDUE: Final = (
    "esper-telemetry: several updates seem to have been observed since the last flush, and they will be one record: call "
    "telemetry.flush(env_step=...) at the end of every update"
)
BACKWARDS: Final = "esper-telemetry: flush was given %s=%d after %d, so curves over it run backwards: pass the number since the run began"
REPEATED: Final = (
    "esper-telemetry: flush was given update=%d after %d, and only the first record of a repeated update is shown: leave out "
    "update, or keep counting"
)
RECOMMENDATION: Final = (
    "esper-telemetry: records take %.1f %% of the time of this loop, more than the budget of %.1f %%: Telemetry(offload=True) makes them in"
    " a worker process"
)

RECOMMENDATION_RECORDS: Final = 100
RECOMMENDATION_SECONDS: Final = 10.0
"""Records and wall time after which the cost of in-process records is compared with the budget."""

_logger = logging.getLogger("esper_telemetry")


class UsageWarnings:
    """Logs each warning once.

    Args:
        budget: fraction of the wall time that telemetry may take on the training thread.
    """

    def __init__(self, budget: float) -> None:
        self._budget = budget
        self._logged: set[str] = set()
        self._records, self._seconds, self._elapsed = 0, 0.0, 0.0

    def warn(self, message: str, *args: object) -> None:
        """Log one of the messages above, unless it was logged before."""
        if message not in self._logged:
            self._logged.add(message)
            _logger.warning(message, *args)

    def check_order(self, axes: Axes, last: Axes) -> None:
        """Warn if an update does not come after the last one."""
        if axes.update <= last.update:
            self.warn(REPEATED, axes.update, last.update)
        if axes.env_step < last.env_step:
            self.warn(BACKWARDS, "env_step", axes.env_step, last.env_step)
        elif axes.gradient_step < last.gradient_step:
            self.warn(BACKWARDS, "gradient_step", axes.gradient_step, last.gradient_step)

    def add_record(self, seconds: float, elapsed: float, *, can_use_worker: Callable[[], bool]) -> None:
        """Count the time that a record took, out of `elapsed` since the previous one; recommend a worker if records exceed the budget."""
        self._records += 1
        self._seconds += seconds
        self._elapsed += elapsed
        if self._records < RECOMMENDATION_RECORDS or self._elapsed < RECOMMENDATION_SECONDS:
            return
        share = self._seconds / self._elapsed
        if share > self._budget and RECOMMENDATION not in self._logged and can_use_worker():
            self.warn(RECOMMENDATION, 100 * share, 100 * self._budget)
