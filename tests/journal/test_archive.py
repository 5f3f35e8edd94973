"""Packed journals, and a journal after the disk was full."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from esper_telemetry.cli.train import _stopped_by_signals
from esper_telemetry.core.record import Axes, Record, RunInfo, RunStatus
from esper_telemetry.delivery.catch_up import replay
from esper_telemetry.journal.file import Journal, compress
from esper_telemetry.journal.lines import JournalEvent, encode_end, encode_record, encode_run
from esper_telemetry.journal.read import entries, read_run, run_info
from esper_telemetry.testing import MemorySink


def record(seq: int) -> Record:
    return Record(seq, Axes(seq, seq * 8, seq * 4, 1.0 + seq), {"policy/kl": seq / 1000, "policy/entropy": 0.7})


def ended(run_dir: Path, records: int = 500) -> Path:
    journal = Journal.create(run_dir)
    journal.write(encode_run(RunInfo("id-1", "walker", None, 1.0)))
    for seq in range(1, records + 1):
        journal.write(encode_record(record(seq)))
    journal.write(encode_end(RunStatus.FINISHED, seq=records + 1))
    journal.close()
    return run_dir


def test_a_packed_journal_is_a_third_of_its_size_or_less_and_reads_the_same(tmp_path: Path) -> None:
    before = read_run(ended(tmp_path / "run"))

    plain, packed = compress(tmp_path / "run")

    assert packed < plain / 3
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["journal.jsonl.gz"]
    assert read_run(tmp_path / "run") == before
    assert run_info(tmp_path / "run") == before.info
    assert compress(tmp_path / "run") == (packed, packed)


def test_a_packed_journal_is_replayed_once(tmp_path: Path) -> None:
    compress(ended(tmp_path / "run"))
    first, second = MemorySink(), MemorySink()

    assert replay(tmp_path / "run", first).complete
    assert replay(tmp_path / "run", second).complete

    assert [entry.seq for entry in first.records] == list(range(1, 501))
    assert first.statuses == [RunStatus.FINISHED]
    assert second.records == []


def test_a_run_that_goes_on_unpacks_its_journal(tmp_path: Path) -> None:
    compress(ended(tmp_path / "run", 3))

    journal = Journal.open(tmp_path / "run")
    journal.write(encode_record(record(4)))
    journal.close()

    assert [file.name for file in (tmp_path / "run").iterdir()] == ["journal.jsonl"]
    assert [entry.seq for entry in read_run(tmp_path / "run").records] == [1, 2, 3, 4]


def test_a_packed_run_is_not_written_over(tmp_path: Path) -> None:
    compress(ended(tmp_path / "run", 3))

    with pytest.raises(FileExistsError, match="already holds a run"):
        Journal.create(tmp_path / "run")


def test_only_a_run_that_is_over_is_packed(tmp_path: Path) -> None:
    journal = Journal.create(tmp_path / "run")
    journal.write(encode_run(RunInfo("id-1", "walker", None, 1.0)), encode_record(record(1)))

    with pytest.raises(ValueError, match="has not ended"):
        compress(tmp_path / "run")

    assert [file.name for file in (tmp_path / "run").iterdir()] == ["journal.jsonl"]
    journal.close()


@pytest.mark.system
def test_what_a_full_disk_has_cost_stands_where_it_is_missing(tmp_path: Path) -> None:
    """The memory limit holds two lines while the disk is full. Once there is space, they are written, followed by the number of lost
    lines.
    """
    script = textwrap.dedent("""
        import resource, sys
        from esper_telemetry.journal.file import Journal
        from esper_telemetry.journal.lines import encode_record, encode_run
        from esper_telemetry.journal import file
        from esper_telemetry.core.record import Axes, Record, RunInfo
        file.MAX_BACKLOG_BYTES = 400
        journal = Journal.create(sys.argv[1])
        journal.write(encode_run(RunInfo("id-1", "walker", None, 1.0)))
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (journal.path.stat().st_size, limit[1]))
        def write(seq):
            return journal.write(encode_record(Record(seq, Axes(seq, 8 * seq, 4, 2.0), {"policy/kl": 0.25})))
        assert not any([write(seq) for seq in range(1, 11)])
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        assert not write(11) or journal.lost
        write(12)
        print(journal.lost)
        journal.close()
    """)
    done = subprocess.run([sys.executable, "-c", script, tmp_path / "run"], check=True, capture_output=True, text=True)

    lines = [entry for entry in entries(tmp_path / "run") if not isinstance(entry, RunInfo)]
    (gap,) = [entry for entry in lines if isinstance(entry, JournalEvent)]
    seqs = [entry.seq for entry in lines if isinstance(entry, Record)]
    assert gap.type == "lost"
    assert gap.data["lines"] == int(done.stdout) == 12 - len(seqs) > 0
    assert seqs[-2:] == [11, 12]
    assert lines.index(gap) == len(seqs) - 2
    assert done.stderr.count("cannot write to") == 1


def test_a_handler_that_listened_for_sigterm_before_still_does() -> None:
    heard: list[int] = []
    stopped: list[Any] = []
    trainer = SimpleNamespace(stop=lambda: stopped.append(1), ranks=SimpleNamespace(alone=True))
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        with _stopped_by_signals(trainer) as came:  # all that the context manager uses of a trainer
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)

    assert (came, stopped, heard) == ([15], [1], [15, 15])
