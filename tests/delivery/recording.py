"""Sinks that log their calls, one JSON line per call, in any process."""

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from esper_telemetry.core.record import Record, RunInfo, RunStatus
from esper_telemetry.sinks.sink_protocol import DeadClientError, PermanentSinkError, PoisonRecordError


@dataclass(frozen=True)
class RecordingSink:
    """Appends each call to a file; `delay` makes every write slow."""

    file: Path
    name: str = "recording"
    delay: float = 0.0

    in_process: ClassVar[bool] = False

    def open(self, run: RunInfo) -> None:
        self._note("open", run_id=run.run_id, metrics=sorted(run.metrics))

    def write(self, records: Sequence[Record]) -> None:
        time.sleep(self.delay)
        self._note("write", seqs=[record.seq for record in records], values=[dict(r.values) for r in records])

    def close(self, status: RunStatus) -> None:
        self._note("close", status=str(status))

    def _note(self, call: str, **details: Any) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps({"call": call, "pid": os.getpid(), **details}) + "\n")


class LocalSink(RecordingSink):
    """The same in a thread of the training process."""

    in_process = True


@dataclass(frozen=True)
class FlakySink(RecordingSink):
    """Raises in its first `failures` calls of `failing`."""

    failing: str = "write"
    failures: int = 3

    def open(self, run: RunInfo) -> None:
        self._fail("open")
        super().open(run)

    def write(self, records: Sequence[Record]) -> None:
        self._fail("write")
        super().write(records)

    def close(self, status: RunStatus) -> None:
        self._fail("close")
        super().close(status)

    def _fail(self, call: str) -> None:
        failed = self.file.with_suffix(".failed")
        count = len(failed.read_text()) if failed.exists() else 0
        if call == self.failing and count < self.failures:
            failed.write_text("x" * (count + 1))
            raise ConnectionError(f"{call} refused")


class HopelessSink(RecordingSink):
    def open(self, run: RunInfo) -> None:
        raise PermanentSinkError("the key was revoked")


class GatedSink(RecordingSink):
    """Opening waits for the `gate`."""

    def open(self, run: RunInfo) -> None:
        while not gate(self.file).exists():
            time.sleep(0.02)
        super().open(run)


@dataclass(frozen=True)
class ImportingSink(RecordingSink):
    """Logs which thread imports its client; the first `failures` imports raise."""

    failures: int = 0
    error: type[Exception] = RecursionError

    def import_client(self) -> None:
        self._note("import", thread=threading.current_thread() is threading.main_thread())
        if sum(call["call"] == "import" for call in calls(self.file)) <= self.failures:
            raise self.error("the modules of the client are half initialised")


class LateImportingSink(RecordingSink):
    """Imports a package that is not installed, when it is opened."""

    def open(self, run: RunInfo) -> None:
        import_module("no_such_backend")


class AnnouncingSink(RecordingSink):
    """Logs that a write begins, before its delay."""

    def write(self, records: Sequence[Record]) -> None:
        self._note("begin")
        super().write(records)


class HangingSink(RecordingSink):
    """Never returns from its first write."""

    def write(self, records: Sequence[Record]) -> None:
        self._note("hang")
        time.sleep(3600)


@dataclass(frozen=True)
class PickySink(RecordingSink):
    """Refuses every batch with one of these records, with its own error as clients do."""

    refused: tuple[int, ...] = ()
    kind: type[Exception] = ValueError
    names_it: bool = False

    def write(self, records: Sequence[Record]) -> None:
        for index, record in enumerate(records):
            if record.seq in self.refused:
                if self.names_it:
                    raise PoisonRecordError("no such value", index)
                raise self.kind(f"bad value in a batch of {len(records)}")
        super().write(records)


class HangingOnceSink(RecordingSink):
    """In its first process, it never returns from its third record."""

    def write(self, records: Sequence[Record]) -> None:
        if records[-1].seq >= 3 and sum(call["call"] == "open" for call in calls(self.file)) == 1:
            self._note("hang")
            time.sleep(3600)
        super().write(records)


class DyingClientSink(RecordingSink):
    """In its first process, its client is dead at the third record."""

    def write(self, records: Sequence[Record]) -> None:
        if records[-1].seq >= 3 and sum(call["call"] == "open" for call in calls(self.file)) == 1:
            raise DeadClientError("the client is gone")
        super().write(records)


class ExitingSink(RecordingSink):
    """Calls sys.exit, as some clients do."""

    def open(self, run: RunInfo) -> None:
        if not self.file.exists():
            self.file.touch()
            raise SystemExit(1)
        super().open(run)


class NoisySink(RecordingSink):
    """Prints, asks for input, and warns of left-out values."""

    def open(self, run: RunInfo) -> None:
        print("noise of a backend")
        logging.getLogger("esper_telemetry").warning("2 keys are left out")
        try:
            input("your key? ")
        except EOFError:
            super().open(run)


class StartingSink(RecordingSink):
    """Starts a Python process, as clients do, and logs that process's import path."""

    def open(self, run: RunInfo) -> None:
        code = "import json, sys; print(json.dumps(sys.path))"
        self._note("open", path=json.loads(subprocess.check_output([sys.executable, "-c", code])))


def gate(file: Path) -> Path:
    return file.with_suffix(".gate")


def calls(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    lines = file.read_text().split("\n")[:-1]
    return [json.loads(line) for line in lines]


def seqs(file: Path) -> list[int]:
    """The numbers of all records that the sink accepted, in order."""
    return [seq for call in calls(file) if call["call"] == "write" for seq in call["seqs"]]


def statuses(file: Path) -> list[str]:
    return [call["status"] for call in calls(file) if call["call"] == "close"]
