"""Small journals to deliver, and a clock."""

import time
from pathlib import Path

import pytest

from esper_telemetry.core.record import Axes, MetricInfo, Record, RunInfo, RunStatus
from esper_telemetry.journal.file import Journal
from esper_telemetry.journal.lines import encode_end, encode_record, encode_run
from esper_telemetry.journal.memory_journal import MemoryJournal


def info() -> RunInfo:
    return RunInfo("id-1", "walker", None, 1.0, metrics={"policy/kl": MetricInfo("nats", "Is the policy moving?")})


def record(seq: int) -> Record:
    return Record(seq, Axes(seq, seq * 8, seq * 4, 1.0 + seq), {"policy/kl": seq / 1000})


def begun(run_dir: Path, records: int = 0) -> Journal:
    journal = Journal.create(run_dir)
    journal.write(encode_run(info()))
    add(journal, range(1, records + 1))
    return journal


def ended(run_dir: Path, records: int) -> Path:
    journal = begun(run_dir, records)
    end(journal)
    journal.close()
    return run_dir


def add(journal: Journal | MemoryJournal, seqs: range) -> None:
    for seq in seqs:
        journal.write(encode_record(record(seq)))


def end(journal: Journal | MemoryJournal) -> None:
    journal.write(encode_end(RunStatus.FINISHED, seq=journal.records + 1))


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
