"""Faulty sinks of a plugin: one takes ten seconds for every write, one refuses certain records."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from esper_telemetry.core.record import Record, RunInfo, RunStatus

REFUSED = (30, 31, 90)


@dataclass(frozen=True)
class SlowSink:
    name: str = "slow"
    in_process: ClassVar[bool] = False

    def open(self, run: RunInfo) -> None: ...

    def write(self, records: Sequence[Record]) -> None:
        time.sleep(10.0)

    def close(self, status: RunStatus) -> None: ...


@dataclass(frozen=True)
class PickySink:
    name: str = "picky"
    in_process: ClassVar[bool] = False

    def open(self, run: RunInfo) -> None: ...

    def write(self, records: Sequence[Record]) -> None:
        if any(record.axes.update in REFUSED for record in records):
            raise ValueError("a value that this backend does not store")

    def close(self, status: RunStatus) -> None: ...
