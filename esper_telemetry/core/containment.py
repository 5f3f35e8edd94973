"""Calls to code that may raise anything: an exception loses only its own result, with a warning, and never the record or the training.

They are used for metric functions called for a trainer, and for alarms, detectors and plugins of users. Functions that
users call themselves raise immediately.

`SystemExit` and all other exceptions are contained too: user code that calls `sys.exit` in an alarm must not end
training. Only an interrupt gets through, see `is_interrupt`.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, TypeVar

from esper_telemetry.core.group import MetricGroup, Postponed
from esper_telemetry.core.interrupts import is_interrupt
from esper_telemetry.core.redaction import error_line

Measurement = Callable[[], MetricGroup | Postponed | Iterable[MetricGroup | Postponed]]
"""A metric function with its arguments that has not been called yet, such as a `functools.partial`."""

Result = TypeVar("Result")

METRIC_MODULES: Final = tuple(f"{MetricGroup.__module__.partition('.')[0]}.{part}." for part in ("metrics", "equations"))
"""Prefixes of the modules with metric functions."""
NOTE_BYTES: Final = 128
"""Maximum bytes of a function's name in a `CallNote`."""

_logger = logging.getLogger("esper_telemetry")


class CallNote:
    """The name of the contained function under way, in memory that outlives this process; a `memory` of None disables it."""

    def __init__(self, memory: memoryview | None = None) -> None:
        self.memory = memory
        self._name = ""

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Note the function that is called inside."""
        before = self._name
        self._write(name)
        try:
            yield
        finally:
            self._write(before)

    def _write(self, name: str) -> None:
        self._name = name
        if self.memory is not None:
            content = name.encode("utf-8", "backslashreplace")[: NOTE_BYTES - 1] + b"\0"
            self.memory[: len(content)] = content

    @staticmethod
    def read(memory: memoryview) -> str:
        """Return the name in another process's note."""
        return bytes(memory[:NOTE_BYTES]).partition(b"\0")[0].decode("utf-8", "replace")


call_note: Final = CallNote()
"""The note of this process; a worker gives it memory that its trainer reads."""


class Containment:
    """Calls functions, counts the exceptions, and warns once per function.

    Args:
        banned: names of functions that are not called, because they have ended a process.
    """

    def __init__(self, banned: Collection[str] = ()) -> None:
        self._banned = frozenset(banned)
        self._errors = 0
        self._warned: set[str] = set()

    def take(self) -> int:
        """Return the number of calls that have raised since the last time."""
        errors, self._errors = self._errors, 0
        return errors

    def measure(self, measurements: Iterable[Measurement], use: Callable[[MetricGroup | Postponed], object]) -> None:
        """Pass the groups of all measurements that do not raise to `use`; an exception of `use` counts as the measurement's."""

        def use_all(groups: MetricGroup | Postponed | Iterable[MetricGroup | Postponed]) -> None:
            for group in [groups] if isinstance(groups, MetricGroup | Postponed) else list(groups):  # all of them or none
                use(group)

        for measurement in self.steps(measurements):
            self.attempt(measurement, use_all)

    def steps(self, items: Iterable[Result]) -> Iterator[Result]:
        """Yield the items until making the next one raises."""
        iterator = iter(items)
        while (item := self.attempt(partial(next, iterator, None), name=_name_of(items))) is not None:
            yield item

    def attempt(self, function: Callable[[], Result], use: Callable[[Result], object] = lambda _: None, *, name: str = "") -> Result | None:
        """Pass the result of the function to `use` and return it; None if one of them raises.

        Args:
            function: the function to call.
            use: receives its result.
            name: name of the function in the warning; its own by default.
        """
        if self._banned and (name or _name_of(function)) in self._banned:
            return None
        try:
            if call_note.memory is None:
                use(result := function())
            else:
                with call_note.of(name or _name_of(function)):
                    use(result := function())
        except BaseException as error:
            self.note(function, error, name=name)
            return None
        return result

    def note(self, culprit: Any, error: BaseException, *, name: str = "") -> None:
        """Count that `culprit` has raised, and warn the first time; raises an interrupt again."""
        if is_interrupt(error):
            raise error
        self._errors += 1
        if not name:
            frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
            metrics = [f.f_code.co_name for f in frames if f.f_globals.get("__name__", "").startswith(METRIC_MODULES)]
            name = next((metric for metric in metrics if not metric.startswith("<")), _name_of(culprit))
        if name not in self._warned:
            self._warned.add(name)
            message = "%s failed (%s): what it measures is missing from the records, training continues"
            _logger.warning(message, name, error_line(error), exc_info=error if _logger.isEnabledFor(logging.DEBUG) else None)


def _name_of(culprit: Any) -> str:
    culprit = getattr(culprit, "__wrapped__", culprit)  # of a cache
    function = getattr(culprit, "func", culprit)  # of a partial
    return str(getattr(function, "__name__", type(function).__name__))
