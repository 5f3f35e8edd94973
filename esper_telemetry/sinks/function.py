"""Any callable as a sink: it is called once with every record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from esper_telemetry.record import Record, RunInfo, RunStatus


@dataclass(frozen=True)
class FunctionSink:
    """Calls `function(record)` for each record, in order: `print` is a sink."""

    function: Callable[[Record], object]

    in_process: ClassVar[bool] = True
    uri: ClassVar[str] = ""
    """A function has no name on the command line."""

    @property
    def name(self) -> str:
        """`function:` and the callable's own name."""
        return f"function:{getattr(self.function, '__qualname__', type(self.function).__name__)}"

    def open(self, run: RunInfo) -> None:
        """Does nothing: a function needs no connection."""

    def write(self, records: Sequence[Record]) -> None:
        """Calls the function; what it raises goes to the relay."""
        for record in records:
            self.function(record)

    def close(self, status: RunStatus) -> None:
        """Does nothing."""
