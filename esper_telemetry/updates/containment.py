"""Metric functions called so that a bug in one of them costs its group and a warning, never the record and never training.

What a user calls raises at once; this is for what telemetry calls on a trainer's behalf.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, TypeVar

from esper_telemetry.core.group import MetricGroup

Measurement = Callable[[], MetricGroup | Iterable[MetricGroup]]
"""A metric function with its arguments, as `functools.partial` makes it: not called yet."""

Result = TypeVar("Result")

METRICS: Final = f"{MetricGroup.__module__.partition('.')[0]}.metrics."
"""How the names of the modules begin that hold metric functions."""

_logger = logging.getLogger("esper_telemetry")


class Containment:
    """Calls functions, counts those that raise and warns of each of them once."""

    def __init__(self) -> None:
        self._errors = 0
        self._told: set[str] = set()

    def take(self) -> int:
        """How many calls have raised since the last time."""
        errors, self._errors = self._errors, 0
        return errors

    def measure(self, measurements: Iterable[Measurement], use: Callable[[MetricGroup], object]) -> None:
        """Hands to `use` the groups of all measurements that do not raise; one that `use` refuses counts as raised."""
        for measurement in self.steps(measurements):
            self.attempt(measurement, lambda found: _each(found, use))

    def steps(self, items: Iterable[Result]) -> Iterator[Result]:
        """The items, up to where making the next one raises."""
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
        """Hands to `use` what the function returns; nothing where one of them raises."""
        try:
            use(function())
        except Exception as error:  # whatever a bug raises
            self.note(function, error)

    def note(self, culprit: object, error: Exception) -> None:
        """Counts that it has raised, and says so the first time."""
        self._errors += 1
        name = _metric_function(error) or _name(culprit)
        if name not in self._told:
            self._told.add(name)
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            message = "%s failed (%s): what it measures is missing from the records, training goes on"
            _logger.warning(message, name, reason, exc_info=_logger.isEnabledFor(logging.DEBUG))


def _each(found: MetricGroup | Iterable[MetricGroup], use: Callable[[MetricGroup], object]) -> None:
    """Uses the groups of one measurement, all of them or none."""
    for group in [found] if isinstance(found, MetricGroup) else list(found):
        use(group)


def _metric_function(error: Exception) -> str:
    """The metric function that was called when it was raised; empty where none was."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    names = (frame.f_code.co_name for frame in frames if frame.f_globals.get("__name__", "").startswith(METRICS))
    return next((name for name in names if not name.startswith("<")), "")


def _name(culprit: Any) -> str:
    """Of the function behind a partial, a cache, a method or a running generator."""
    culprit = getattr(culprit, "__wrapped__", culprit)
    function = getattr(culprit, "func", culprit)
    return str(getattr(function, "__name__", type(function).__name__))
