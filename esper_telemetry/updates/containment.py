"""Calls metric functions so that a bug in one of them costs its group and a warning, never the record and never training.

Functions that users call raise at once; this is for those that telemetry calls on a trainer's behalf.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, TypeVar

from esper_telemetry.core.group import MetricGroup, Postponed

Measurement = Callable[[], MetricGroup | Postponed | Iterable[MetricGroup]]
"""A metric function with its arguments, as `functools.partial` makes it: not called yet."""

Result = TypeVar("Result")

METRIC_MODULES: Final = f"{MetricGroup.__module__.partition('.')[0]}.metrics."
"""Beginning of the names of modules that hold metric functions."""

_logger = logging.getLogger("esper_telemetry")


class Containment:
    """Calls functions, counts those that raise and warns of each of them once."""

    def __init__(self) -> None:
        self._errors = 0
        self._warned: set[str] = set()

    def take(self) -> int:
        """Return the number of calls that have raised since the last time."""
        errors, self._errors = self._errors, 0
        return errors

    def measure(self, measurements: Iterable[Measurement], use: Callable[[MetricGroup | Postponed], object]) -> None:
        """Hand to `use` the groups of all measurements that do not raise; one that `use` refuses counts as raised."""

        def use_all(groups: MetricGroup | Postponed | Iterable[MetricGroup]) -> None:
            for group in (
                [groups] if isinstance(groups, MetricGroup | Postponed) else list(groups)
            ):  # all of them or none
                use(group)

        for measurement in self.steps(measurements):
            self.attempt(measurement, use_all)

    def steps(self, items: Iterable[Result]) -> Iterator[Result]:
        """Yield the items, up to where making the next one raises."""
        iterator = iter(items)
        while True:
            try:
                item = next(iterator)
            except StopIteration:
                return
            except Exception as error:  # whatever a bug raises
                self.note(items, error)
                return
            yield item

    def attempt(self, function: Callable[[], Result], use: Callable[[Result], object]) -> None:
        """Hand to `use` what the function returns; nothing where one of them raises."""
        try:
            use(function())
        except Exception as error:  # whatever a bug raises
            self.note(function, error)

    def note(self, culprit: Any, error: Exception) -> None:
        """Count that `culprit` has raised, and warn the first time."""
        self._errors += 1
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        metrics = [f.f_code.co_name for f in frames if f.f_globals.get("__name__", "").startswith(METRIC_MODULES)]
        culprit = getattr(culprit, "__wrapped__", culprit)  # of a cache
        function = getattr(culprit, "func", culprit)  # of a partial
        own = str(getattr(function, "__name__", type(function).__name__))
        name = next((name for name in metrics if not name.startswith("<")), own)
        if name not in self._warned:
            self._warned.add(name)
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            message = "%s failed (%s): what it measures is missing from the records, training goes on"
            _logger.warning(message, name, reason, exc_info=error if _logger.isEnabledFor(logging.DEBUG) else None)
