"""Columns of a journal: they equal its records. If their files are damaged, the journal decides."""

import multiprocessing
import os
import signal
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from esper_telemetry import Axes, Record, RunInfo, RunStatus, read_run
from esper_telemetry.core.record import Histogram
from esper_telemetry.journal import read, record_columns
from esper_telemetry.journal.file import Journal, JournalReader, compress
from esper_telemetry.journal.lines import JournalEvent, encode_end, encode_event, encode_record, encode_run, to_json
from esper_telemetry.journal.record_columns import COLUMNS_NAME, RecordTable, segments


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_columns, "SEGMENT_RECORDS", 100)
    monkeypatch.setattr(read, "MAX_PARSED_NUMBERS", 10)


def record(update: int) -> Record:
    values = {"policy/kl": 0.1 * update, **({"value/r2": float(update)} if update % 3 == 0 else {})}
    return Record(update, Axes(update, 10 * update, 2 * update, 1e9 + update), values)


def journal_of(run_dir: Path, updates: range) -> Journal:
    journal = Journal.create(run_dir) if updates.start == 1 else Journal.open(run_dir)
    if updates.start == 1:
        journal.write(encode_run(RunInfo("a", run_dir.name, run_dir, 1e9)))
    for update in updates:
        journal.write(encode_record(record(update)), encode_event(JournalEvent("checkpoint", {"update": update})))
    return journal


def cached(run_dir: Path) -> list[Path]:
    return sorted((run_dir / COLUMNS_NAME).glob("*.npz"))


def test_a_long_run_is_read_as_its_records_are(tmp_path: Path) -> None:
    journal = journal_of(tmp_path / "run", range(1, 351))
    journal.write(encode_end(RunStatus.FINISHED, seq=351))

    for _ in ("parsed", "from the cache"):
        run = read_run(tmp_path / "run")

        assert [*run.records] == [record(update) for update in range(1, 351)] and len(run.records) == 350
        assert (run.records[-1], run.records[3:5]) == (record(350), (record(4), record(5)))
        assert [event.data["update"] for event in run.events] == [*range(1, 351)]
        assert isinstance(run.records, RecordTable) and [*run.records.without_histograms()] == [*run.records]
        assert run.status is RunStatus.FINISHED and "350 of 2 keys" in repr(run)
        frame = run.to_pandas()
        assert [*frame.columns] == ["env_step", "gradient_step", "wall_time", "policy/kl", "value/r2"]
        assert frame.iloc[5].to_list() == [60, 12, 1e9 + 6, 0.1 * 6, 6.0] and frame["value/r2"].isna().sum() == 350 - 116
        assert len(cached(tmp_path / "run")) == 3


@pytest.mark.parametrize(
    ("valid", "other"),
    [
        (b'"edges":[0.0,', b'"edges":['),
        (b'"counts":[3.0', b'"counts":[null'),
        (b'"counts":', b'"number":'),
        (b"]}}}", b']}},"values":{"policy/kl":7.0}}'),
        (b"]}}}", b']}},"partial":true}'),
        (b"]}}}", b"]}}"),
        (b"7.5", b"-7.5e0"),
    ],
)
def test_records_with_histograms_are_damaged_for_columns_if_they_are_for_a_reader(tmp_path: Path, valid: bytes, other: bytes) -> None:
    """Columns do not parse histograms whose form they know, so the fifth of eight lines differs from the others."""
    histogram = {"adv/raw/hist": Histogram((0.0, 1.5e-7, 7.5), (3.0, 4.0))}
    lines = [to_json(encode_record(replace(record(update), histograms=histogram))) for update in range(1, 9)]
    assert valid in lines[4]
    lines[4] = lines[4].replace(valid, other)
    (tmp_path / "journal.jsonl").write_bytes(to_json(encode_run(RunInfo("a", "run", None, 1e9))) + b"".join(lines))
    path = tmp_path / "journal.jsonl"

    with closing(JournalReader(path)) as plain, closing(JournalReader(path)) as reader:
        expected = [replace(entry, histograms={}) for entry in plain.read() if isinstance(entry, Record)]
        (segment,) = segments(reader)
        damaged = [reader.damaged_lines(), plain.damaged_lines()]

    assert [*segment.records(range(len(segment.counts)))] == expected
    assert damaged[0] == damaged[1]


def test_the_first_record_of_an_update_counts(tmp_path: Path) -> None:
    journal = journal_of(tmp_path / "run", range(1, 201))
    for update in (150, 201):
        journal.write(encode_record(Record(300 + update, Axes(update, 0, 0, 0.0), {"policy/kl": -1.0})))

    run = read_run(tmp_path / "run")

    assert [each.axes.update for each in run.records] == [*range(1, 202)]
    assert run.to_pandas()["policy/kl"].iloc[[149, 200]].to_list() == [15.0, -1.0]


def test_a_journal_that_grows_while_it_is_read_is_read_to_where_it_was(tmp_path: Path) -> None:
    journal = journal_of(tmp_path / "run", range(1, 151))
    run = read_run(tmp_path / "run")
    journal_of(tmp_path / "run", range(151, 351))

    assert len(run.records) == len([*run.records]) == len(run.to_pandas()) == 150
    assert read_run(tmp_path / "run").records[-1] == record(350)
    journal.close()


def test_a_reader_follows_a_journal_by_segments(tmp_path: Path) -> None:
    journal_of(tmp_path / "run", range(1, 151))
    reader = JournalReader(tmp_path / "run" / "journal.jsonl")
    first = sum(len(segment.counts) for segment in segments(reader))
    journal_of(tmp_path / "run", range(151, 301))

    assert (first, sum(len(segment.counts) for segment in segments(reader))) == (150, 150)
    reader.close()


def build_and_be_killed(run_dir: str) -> None:
    """Kill this process in the middle of writing its second segment."""
    save, calls = np.savez, []

    def savez(file: Any, **arrays: Any) -> None:
        calls.append(file)
        if len(calls) == 2:
            file.write(b"PK\x03\x04 half")
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        save(file, **arrays)

    record_columns.SEGMENT_RECORDS = 100  # type: ignore[misc]
    np.savez = savez  # type: ignore[assignment]
    read_run(run_dir)


@pytest.mark.system
def test_a_killed_build_leaves_whole_segments_only(tmp_path: Path) -> None:
    journal_of(tmp_path / "run", range(1, 351))
    process = multiprocessing.get_context("spawn").Process(target=build_and_be_killed, args=(str(tmp_path / "run"),))
    process.start()
    process.join()

    assert process.exitcode == -signal.SIGKILL and len(cached(tmp_path / "run")) == 1
    assert [*read_run(tmp_path / "run").records] == [record(update) for update in range(1, 351)]
    assert len(cached(tmp_path / "run")) == 3


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x93NUMPY", "zeros", "compressed", "truncated"])
def test_a_damaged_segment_costs_time_only(tmp_path: Path, content: bytes | str) -> None:
    journal_of(tmp_path / "run", range(1, 151))
    expected = read_run(tmp_path / "run").to_pandas()
    (path,) = cached(tmp_path / "run")
    with np.load(path) as arrays:
        parts = dict(arrays)
    if content == "zeros":
        np.savez(path, **{**parts, "values": parts["values"][:, :1]})
    elif content == "compressed":
        np.savez_compressed(path, **{**parts, "values": np.zeros((1000, 1000))})
    else:
        path.write_bytes(path.read_bytes()[:-100] if isinstance(content, str) else content)

    assert read_run(tmp_path / "run").to_pandas().equals(expected)


def test_another_run_in_the_directory_has_its_own_columns(tmp_path: Path) -> None:
    journal_of(tmp_path / "run", range(1, 151))
    read_run(tmp_path / "run")
    (tmp_path / "run" / "journal.jsonl").unlink()
    journal = journal_of(tmp_path / "run", range(1, 1))
    for update in range(1, 151):
        journal.write(encode_record(Record(update, Axes(update, 0, 0, 0.0), {"policy/kl": 7.0})))

    assert set(read_run(tmp_path / "run").to_pandas()["policy/kl"]) == {7.0}


def test_a_directory_that_cannot_be_written_has_no_cache(tmp_path: Path) -> None:
    journal_of(tmp_path / "run", range(1, 151))
    (tmp_path / "run" / COLUMNS_NAME).write_text("a file")

    assert len(read_run(tmp_path / "run").to_pandas()) == 150


def test_columns_and_damaged_lines_are_those_of_the_packed_journal_too(tmp_path: Path) -> None:
    journal = journal_of(tmp_path / "run", range(1, 101))
    os.write(journal._fd, b'{"kind":"record","seq":1}\n')
    journal.go_on()
    journal_of(tmp_path / "run", range(101, 151)).write(encode_end(RunStatus.FINISHED, seq=151))
    before = read_run(tmp_path / "run")
    compress(tmp_path / "run")
    after = read_run(tmp_path / "run")

    assert before.damaged == after.damaged == (202,) and [*before.records] == [*after.records]
    assert before.records[0] == record(1)  # of a file that has moved
