import json
import logging
import math
import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from run_cli import run_cli

from esper_telemetry.core.record import Alarm, AlarmEvent, AlarmLevel, Axes, Histogram, Level, MetricInfo, Record, RunInfo, RunStatus
from esper_telemetry.journal import file as journal_file
from esper_telemetry.journal.file import JOURNAL_NAME, Journal, JournalReader, end_if_open
from esper_telemetry.journal.lines import (
    End,
    JournalEvent,
    decode,
    encode_alarm,
    encode_end,
    encode_event,
    encode_metrics,
    encode_record,
    encode_run,
    plain,
    to_json,
)
from esper_telemetry.journal.memory_journal import MemoryJournal
from esper_telemetry.journal.read import damaged_lines, read_contents, read_run

KL = MetricInfo("nats", "Is the policy moving?", low=0.0, healthy="< 0.02")
ALARM = Alarm(
    seq=7,
    axes=Axes(7, 56, 28, 1e9),
    type="policy/kl_spike",
    event=AlarmEvent.RAISE,
    severity=0.8,
    level=AlarmLevel.CRITICAL,
    key="policy/kl",
    value=0.21,
    threshold=0.095,
    since=7,
    streak=1,
    incident=1,
    cause="policy/kl_spike",
    text="One update moved the policy much further than usual.",
    evidence={"rows": [1, 2]},
)


PARTIAL = Record(1, Axes(1, 8, 4, 2.0), {}, {"policy/ratio": Histogram((0.0, 1.0, 2.0), (3.0, 4.0))}, partial=True)


def info(**changes: Any) -> RunInfo:
    return RunInfo("id-1", "walker", changes.pop("run_dir", None), 1.5, metrics={"policy/kl": KL}, **changes)


def record(seq: int, value: float = 0.25, update: int | None = None) -> Record:
    return Record(seq, Axes(update or seq, seq * 8, seq * 4, 1e9 + seq / 3), {"policy/kl": value})


def written(run_dir: Path, *lines: dict[str, Any]) -> Path:
    """The path of a journal with these lines that no one writes any more."""
    journal = Journal.create(run_dir)
    journal.write(*lines)
    journal.close()
    return journal.path


def seqs(entries: list[Any]) -> list[int]:
    return [entry.seq for entry in entries if isinstance(entry, Record)]


@pytest.mark.parametrize(
    ("line", "value"),
    [
        (encode_run(info(tags=("a",), facts={"clip": 0.2})), info(tags=("a",), facts={"clip": 0.2})),
        (encode_record(record(3, 0.1 + 0.2)), record(3, 0.1 + 0.2)),
        (encode_record(PARTIAL), PARTIAL),
        (encode_end(RunStatus.FAILED, seq=9), End(RunStatus.FAILED, 9)),
        (encode_alarm(ALARM), ALARM),
        (encode_event(JournalEvent("checkpoint", {"at": 3}, 7)), JournalEvent("checkpoint", {"at": 3}, 7)),
        (encode_metrics({"policy/kl": KL}), JournalEvent("metrics", {"policy/kl": KL})),
    ],
)
def test_what_was_written_is_what_is_read(line: dict[str, Any], value: object) -> None:
    assert decode(json.loads(to_json(line))) == value


def test_a_reader_tells_the_run_where_its_journal_lies_now(tmp_path: Path) -> None:
    written(tmp_path / "before", encode_run(info(run_dir=Path("elsewhere"))))
    (tmp_path / "before").rename(tmp_path / "after")

    assert read_run(tmp_path / "after").info.run_dir == tmp_path / "after"


def test_lines_of_a_later_version_are_ignored_and_its_fields_too() -> None:
    assert decode({"kind": "hologram", "seq": 1}) is None
    later = encode_run(info()) | {"metrics": {"policy/kl": {"unit": "nats", "question": "?", "smell": "sweet"}}}
    run = decode(later)
    assert isinstance(run, RunInfo)
    assert run.metrics == {"policy/kl": MetricInfo("nats", "?")}


def test_a_broken_line_is_named() -> None:
    with pytest.raises(ValueError, match="a record lacks axes"):
        decode({"kind": "record", "seq": 1})


class Colour(Enum):
    RED = 1


@dataclass
class Settings:
    path: Path
    sizes: tuple[int, ...]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Level.NORMAL, "NORMAL"),
        (Colour.RED, "RED"),
        (RunStatus.KILLED, "killed"),
        (np.float32(0.5), 0.5),
        (np.arange(3), [0, 1, 2]),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (torch.tensor(2), 2),
        (torch.float32, "torch.float32"),
        (math.sqrt, "math.sqrt"),
        (math.nan, "nan"),
        (float("inf"), "inf"),
        ({1: {Path("a")}}, {"1": ["a"]}),
        (Settings(Path("a/b"), (64, 64)), {"path": "a/b", "sizes": [64, 64]}),
        (Settings, f"{__name__}.Settings"),
        (b"x", "b'x'"),
    ],
)
def test_settings_become_json_that_a_person_can_read(value: object, expected: object) -> None:
    assert plain(value) == expected
    json.dumps(plain(value), allow_nan=False)


def test_settings_that_contain_themselves_come_to_an_end() -> None:
    settings: dict[str, Any] = {}
    settings["self"] = settings

    json.dumps(plain(settings))


def test_each_call_is_one_write_and_is_there_when_it_returns(tmp_path: Path) -> None:
    journal = Journal.create(tmp_path / "deep" / "run")

    assert journal.write(encode_run(info()), encode_record(record(1)))

    assert len((tmp_path / "deep" / "run" / JOURNAL_NAME).read_bytes().splitlines()) == 2
    assert journal.records == 1
    journal.close()
    journal.close()
    assert not journal.write(encode_record(record(2)))
    assert journal.lost == 1


def test_a_directory_holds_one_run(tmp_path: Path) -> None:
    Journal.create(tmp_path).close()

    with pytest.raises(FileExistsError, match="already holds a run: pass another run directory"):
        Journal.create(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_directory_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)

    with pytest.raises(PermissionError, match="cannot write to run directory"):
        Journal.create(tmp_path / "run")


def test_a_line_that_is_not_strict_json_costs_that_line_and_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal.create(tmp_path)

    assert not journal.write(encode_record(record(1)), encode_record(record(2, float("nan"))), encode_record(record(3)))
    assert not journal.write(encode_record(record(4, float("inf"))))
    journal.close()

    reader = JournalReader(journal.path)
    assert seqs(reader.read()) == [1, 3]
    reader.close()
    assert (journal.lost, journal.lost_records) == (2, 2)
    (warned,) = [each.getMessage() for each in caplog.records]
    assert "the line of record is left out" in warned


def test_a_forked_process_writes_nothing(tmp_path: Path) -> None:
    script = textwrap.dedent("""
        import os, sys
        from esper_telemetry.journal.file import Journal
        from esper_telemetry.journal.lines import encode_record
        from esper_telemetry.core.record import Axes, Record
        journal = Journal.create(sys.argv[1])
        line = encode_record(Record(1, Axes(1, 8, 4, 2.0), {}))
        if os.fork() == 0:
            refused = not journal.write(line)
            journal.close()
            os._exit(0 if refused else 1)
        assert os.wait()[1] == 0
        assert journal.write(line)
    """)

    subprocess.run([sys.executable, "-c", script, tmp_path / "forked"], check=True)

    assert len((tmp_path / "forked" / JOURNAL_NAME).read_bytes().splitlines()) == 1


def test_a_full_disk_costs_nothing_once_there_is_space_again(tmp_path: Path) -> None:
    """The size limit cuts a line in two. After the limit is lifted, the line is completed and the waiting lines follow."""
    script = textwrap.dedent("""
        import resource, signal, sys
        from esper_telemetry.journal.file import Journal
        from esper_telemetry.journal.lines import encode_record
        from esper_telemetry.core.record import Axes, Record
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        journal = Journal.create(sys.argv[1])
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
        def write(seq):
            return journal.write(encode_record(Record(seq, Axes(seq, 8, 4, 2.0), {"policy/kl": 0.25})))
        results = [write(seq) for seq in range(1, 31)]
        assert results[0] and not results[-1], results
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        assert write(31)
        assert (journal.records, journal.lost) == (31, 0)
    """)
    run = subprocess.run([sys.executable, "-c", script, tmp_path], check=True, capture_output=True, text=True)

    assert run.stderr.count("cannot write to") == 1
    reader = JournalReader(tmp_path / JOURNAL_NAME)
    assert seqs(reader.read()) == list(range(1, 32))
    assert not reader.damage
    reader.close()


def test_what_waits_for_a_full_disk_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Memory holds two lines: the third is lost, and closing loses the other two as well."""
    line = encode_record(record(1))
    monkeypatch.setattr(journal_file, "MAX_BACKLOG_BYTES", 2 * len(to_json(line)))
    journal = Journal(tmp_path, os.open("/dev/full", os.O_WRONLY))

    with caplog.at_level(logging.WARNING):
        assert [journal.write(line) for _ in range(3)] == [False] * 3
        assert (journal.records, journal.lost) == (2, 1)
        journal.close()

    assert journal.lost == 3
    assert len(caplog.records) == 1


def test_a_reader_waits_for_a_torn_line_to_be_complete(tmp_path: Path) -> None:
    first, second = to_json(encode_record(record(1))), to_json(encode_record(record(2)))
    path = tmp_path / JOURNAL_NAME
    path.write_bytes(first + second[:20])
    reader = JournalReader(path)

    assert seqs(reader.read()) == [1]
    assert reader.offset == len(first)
    assert reader.read() == []
    path.write_bytes(first + second)
    assert seqs(reader.read()) == [2]
    reader.close()


def test_a_reader_gives_as_many_lines_as_asked_for_and_goes_on_from_its_offset(tmp_path: Path) -> None:
    journal = Journal.create(tmp_path)
    journal.write(*[encode_record(record(seq)) for seq in range(1, 8)])
    reader = JournalReader(journal.path)

    assert [seqs(reader.read(3)) for _ in range(4)] == [[1, 2, 3], [4, 5, 6], [7], []]
    again = JournalReader(journal.path, offset=reader.offset)
    journal.write(encode_record(record(8)))
    assert seqs(again.read()) == [8]
    for closing in (reader, again, journal):
        closing.close()


def test_lines_longer_than_a_chunk_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_file, "CHUNK_BYTES", 16)
    reader = JournalReader(written(tmp_path, *[encode_record(record(seq)) for seq in range(1, 4)]))

    assert seqs(reader.read()) == [1, 2, 3]
    reader.close()


def damaged_run(run_dir: Path) -> Path:
    """A finished run of 30 records. Line 17 was overwritten, and a killed writer left line 5 unfinished."""
    path = written(run_dir, encode_run(info()), *[encode_record(record(seq)) for seq in range(1, 4)])
    with path.open("ab") as file:
        file.write(b'{"kind":"record","se')
    journal = Journal.open(run_dir)
    journal.write(*[encode_record(record(seq)) for seq in range(4, 31)], encode_end(RunStatus.FINISHED, seq=31))
    journal.close()
    lines = path.read_bytes().split(b"\n")
    lines[16] = b"\0" * len(lines[16])
    path.write_bytes(b"\n".join(lines))
    return run_dir


def test_every_reader_says_once_which_lines_are_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same holds for a packed journal. An unfinished line of a killed writer is normal."""
    run_dir = damaged_run(tmp_path / "run")
    sentence = f"line 17 of {run_dir / JOURNAL_NAME} is damaged (it is not JSON: Expecting value): it is left out"

    run = read_run(run_dir)
    assert (run.damaged, run.skipped, len(run.records)) == ((17,), 1, 29)
    assert read_contents(run_dir).damaged == damaged_lines(run_dir) == (17,)
    assert [entry.getMessage() for entry in caplog.records] == [f"esper-telemetry: {sentence}"]

    assert f"{sentence}." in run_cli(["diagnose", run_dir], capsys).out
    assert json.loads(run_cli(["diagnose", run_dir, "--json"], capsys).out)["damaged_lines"] == [17]
    doctor = run_cli(["doctor", run_dir], capsys)
    assert (doctor.code, sentence in doctor.out) == (1, True)
    assert json.loads(run_cli(["doctor", run_dir, "--json"], capsys).out)["equal"] is False
    assert "packed as it is" in run_cli(["compress", run_dir], capsys).out
    assert read_run(run_dir).damaged == (17,)
    assert f"line 17 of {run_dir / JOURNAL_NAME}.gz is damaged" in caplog.text


def test_the_head_is_what_lines_before_the_offset_say_of_the_run(tmp_path: Path) -> None:
    lines = encode_run(info()), encode_record(record(1)), encode_metrics({"my/reward": MetricInfo("1", "?")})
    reader = JournalReader(written(tmp_path, *lines))
    reader.read()

    head = reader.head()

    assert head is not None
    assert set(head.metrics) == {"policy/kl", "my/reward"}
    reader.close()


def test_an_end_is_added_for_a_writer_that_is_gone_but_only_once(tmp_path: Path) -> None:
    path = written(tmp_path, encode_run(info()), encode_record(record(1)))
    with path.open("ab") as file:
        file.write(b'{"kind":"record","se')

    assert end_if_open(tmp_path, RunStatus.KILLED)
    assert not end_if_open(tmp_path, RunStatus.FAILED)

    run = read_run(tmp_path)
    assert (run.status, run.skipped, len(run.records)) == (RunStatus.KILLED, 0, 1)
    assert path.read_bytes().endswith(b'{"kind":"end","seq":2,"status":"killed"}\n')


def test_a_run_is_read_back_whole(tmp_path: Path) -> None:
    """If an update is recorded twice, the first record counts, because backends have it. An end before a later run line is ignored."""
    journal = Journal.create(tmp_path)
    journal.write(encode_run(info()), encode_record(record(1, 0.1)), encode_record(record(2, 0.2)))
    journal.write(encode_end(RunStatus.FAILED), encode_run(info()), encode_record(record(4, 0.4, update=2)))
    journal.write(encode_metrics({"my/reward": KL}), encode_event(JournalEvent("rebaseline", {})))

    run = read_run(tmp_path)

    assert [(r.axes.update, r.values["policy/kl"]) for r in run.records] == [(1, 0.1), (2, 0.2)]
    assert run.status is None
    assert set(run.info.metrics) == {"policy/kl", "my/reward"}
    assert [event.type for event in run.events] == ["rebaseline"]
    journal.close()


def test_a_run_becomes_a_frame_indexed_by_update(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    later = Record(2, Axes(2, 16, 8, 3.0), {"value/loss": 7.0})
    written(tmp_path, encode_run(info()), encode_record(record(1, 0.5)), encode_record(later))

    frame = read_run(tmp_path).to_pandas()

    assert list(frame.columns) == ["env_step", "gradient_step", "wall_time", "policy/kl", "value/loss"]
    assert (frame.index.name, list(frame.index)) == ("update", [1, 2])
    assert frame.loc[1, "policy/kl"] == 0.5
    assert frame["policy/kl"].isna().tolist() == [False, True]


def test_a_frame_without_pandas_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, encode_run(info()))
    monkeypatch.setitem(sys.modules, "pandas", None)

    with pytest.raises(ImportError, match="pip install pandas"):
        read_run(tmp_path).to_pandas()


def test_what_is_no_run_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no run directory"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"it holds no journal\.jsonl"):
        read_run(tmp_path)
    (tmp_path / JOURNAL_NAME).touch()
    with pytest.raises(ValueError, match="no line that describes the run"):
        read_run(tmp_path)


def test_in_memory_each_reader_gets_the_head_and_what_follows() -> None:
    journal = MemoryJournal()
    journal.write(encode_run(info()), encode_record(record(1)))
    first, second = journal.reader(), journal.reader()
    journal.write(encode_record(record(2)), encode_end(RunStatus.FINISHED))

    assert [type(entry) for entry in first.read()] == [RunInfo, Record, End]
    assert [type(entry) for entry in second.read(1)] == [RunInfo]
    assert seqs(second.read(1)) == [2]
    assert journal.records == 2


def test_in_memory_a_reader_that_lags_too_far_loses_new_records_but_no_other_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("esper_telemetry.journal.memory_journal.MAX_WAITING_RECORDS", 2)
    journal = MemoryJournal()
    reader, closed = journal.reader(), journal.reader()
    closed.close()

    assert [journal.write(encode_record(record(seq))) for seq in (1, 2, 3)] == [True, True, False]
    assert journal.write(encode_end(RunStatus.FINISHED))

    assert journal.lost == 1
    assert seqs(entries := reader.read()) == [1, 2]
    assert entries[-1] == End(RunStatus.FINISHED)
    assert closed.read() == []
