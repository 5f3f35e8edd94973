"""Malformed journals: each malformed line is reported as one damaged line with a reason, and all other lines are read."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from esper_telemetry import Telemetry
from esper_telemetry.core.record import Alarm, AlarmEvent, AlarmLevel, Axes, Histogram, Record, RunInfo, RunStatus, judgeable
from esper_telemetry.journal import file as journal_file
from esper_telemetry.journal import packed
from esper_telemetry.journal.file import JOURNAL_NAME, Journal, JournalReader, end_if_open, journal_path
from esper_telemetry.journal.lines import (
    JournalEvent,
    decode_line,
    encode_alarm,
    encode_end,
    encode_event,
    encode_record,
    encode_run,
    to_json,
)
from esper_telemetry.journal.read import read_contents, read_run, run_info

AXES = Axes(1, 8, 4, 2.0)
RUN = encode_run(RunInfo("id-1", "walker", None, 1.5, facts={"num_envs": 8, "max_grad_norm": 0.5}))
RECORD = encode_record(Record(1, AXES, {"policy/kl": 0.25}, {"a": Histogram((0.0, 1.0), (3.0,))}))
ALARM = encode_alarm(Alarm(1, AXES, "policy/kl_spike", AlarmEvent.RAISE, 0.8, AlarmLevel.CRITICAL, "policy/kl", evidence={"values": {}}))
EVENT = encode_event(JournalEvent("remark", {"update": 1, "text": "news"}, 1, AXES))
END = encode_end(RunStatus.FINISHED, seq=2)


def changed(line: dict[str, Any], path: str, value: Any) -> bytes:
    """Return the line with another value at a path such as `axes.update`."""
    line = json.loads(to_json(line))
    *groups, name = path.split(".")
    inner = line
    for group in groups:
        inner = inner[group]
    inner[name] = value
    return json.dumps(line).encode()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"\xff{}", "it is not UTF-8"),
        (b"\0\0\0", "it is not JSON: Expecting value"),
        (b"[1]", "it is not an object"),
        (b"{}", "it lacks a kind"),
        (b'{"kind":["record"]}', "it lacks a kind"),
        (b"[" * 100_000, "JSON nested more than 64 levels deep"),
        (b'{"kind":"event","type":"x","data":' + b'{"a":' * 70 + b"1" + b"}" * 71, "JSON nested more than 64 levels deep"),
        (b'{"kind":"record","seq":' + b"9" * 5000 + b"}", "it is not JSON: NaN, Infinity, or a number with thousands of digits"),
        (changed(RECORD, "values.policy/kl", float("nan")), "it is not JSON: NaN, Infinity, or a number with thousands of digits"),
        (b'{"kind":"record","seq":1}', "a record lacks axes"),
        (changed(RECORD, "values.policy/kl", None), "policy/kl of values is null, not a finite number"),
        (changed(RECORD, "values.policy/kl", "high"), "policy/kl of values is text, not a finite number"),
        (changed(RECORD, "values.policy/kl", {}), "policy/kl of values is an object, not a finite number"),
        (changed(RECORD, "values.policy/kl", 10**400), "policy/kl of values is a huge number, not a finite number"),
        (to_json(RECORD).replace(b":0.25", b":1e999"), "policy/kl of values is inf, not a finite number"),
        (changed(RECORD, "values", [1]), "values of a record is a list, not an object"),
        (changed(RECORD, "axes.update", -1), "update of axes is -1, not a whole number from 0 on"),
        (changed(RECORD, "axes.wall_time", 1e308), "wall_time of axes is 1e+308, not a time in seconds since the epoch"),
        (changed(RECORD, "histograms.a.counts", ["x"]), "histogram a needs finite counts, and one edge more"),
        (changed(RECORD, "partial", "yes"), "partial of a record is text, not true or false"),
        (changed(ALARM, "text", None), "text of an alarm is null, not text of at most 65,536 characters"),
        (changed(ALARM, "severity", 7), "severity of an alarm is 7, not a number from 0 to 1"),
        (changed(ALARM, "level", "purple"), "'purple' is not a valid AlarmLevel"),
        (changed(ALARM, "evidence.usual", {"policy/kl": 3}), "evidence of an alarm is an object, not an object of evidence"),
        (changed(EVENT, "data", "text"), "data of an event is text, not an object"),
        (changed(EVENT, "data.update", None), "update of remark event is null, not a whole number from 0 on"),
        (changed(END, "status", {}), "{} is not a valid RunStatus"),
        (changed(RUN, "run_id", "../x"), "a run id must consist of up to 128 letters, digits, '.', '_' and '-', got '../x'"),
        (changed(RUN, "started", 1e300), "started of a run line is 1e+300, not a time in seconds since the epoch"),
        (changed(RUN, "metrics", {"a": {"unit": 1}}), "the description of a lacks question"),
        (changed(RUN, "tags", "one"), "tags of a run line is text, not a list of texts"),
    ]
)  # fmt: skip
def test_a_malformed_line_has_a_reason(line: bytes, reason: str) -> None:
    assert decode_line(line) == (None, reason)


@pytest.mark.parametrize("line", [RUN, RECORD, ALARM, EVENT, END])
def test_what_this_package_writes_has_none(line: dict[str, Any]) -> None:
    assert decode_line(to_json(line))[1] == ""


def test_facts_of_another_form_are_left_out_and_the_run_stays() -> None:
    """The journal is strict JSON, so a setting that is not finite is written as text."""
    line = json.loads(to_json(RUN))
    line["facts"] = {"num_envs": "eight", "groups": [1], "max_grad_norm": "inf", "own": {"any": "thing"}}

    entry, fault = decode_line(json.dumps(line).encode())

    assert isinstance(entry, RunInfo)
    assert entry.facts == {"max_grad_norm": float("inf"), "own": {"any": "thing"}}
    assert fault == (
        "num_envs of facts is text, not a number of a usual size or null; "
        "groups of facts is a list, not an object of lists of texts or null"
    )


def test_control_characters_are_left_out_of_every_text() -> None:
    entry, _ = decode_line(changed(EVENT, "data.text", "a\x1b[2Jb\u202e\x9b1m"))

    assert isinstance(entry, JournalEvent)
    assert entry.data["text"] == "ab"


def test_what_detectors_calculate_with_is_finite_and_of_bounded_size() -> None:
    values = {"a": 1.7e308, "b": -1.7e308, "c": float("nan"), "d": float("inf"), "e": 0.25}

    assert judgeable(values) == {"a": 1e100, "b": -1e100, "e": 0.25}
    assert judgeable({"e": 0.25}) == {"e": 0.25}


def written(run_dir: Path, *lines: bytes) -> Path:
    run_dir.mkdir()
    (run_dir / JOURNAL_NAME).write_bytes(b"".join(line.rstrip(b"\n") + b"\n" for line in lines))
    return run_dir


def test_damaged_lines_are_numbered_with_their_reasons(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = read_run(written(tmp_path / "run", to_json(RUN), b"x", to_json(RECORD), changed(RECORD, "seq", None), to_json(END)))

    assert (len(run.records), run.status, run.damaged) == (1, RunStatus.FINISHED, (2, 4))
    assert [line.reason for line in run.damaged] == [
        "it is not JSON: Expecting value",
        "seq of a record is null, not a whole number from 0 on",
    ]
    assert "2 lines of" in caplog.text
    assert "(2: it is not JSON: Expecting value; 4: seq of a record is null" in caplog.text


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [("started", "today", "started of a run line is text"), ("schema", 99, "its schema 99 is newer than 1: update esper-telemetry")],
)
def test_a_journal_whose_only_run_line_is_damaged_says_why(field: str, value: Any, reason: str, tmp_path: Path) -> None:
    run_dir = written(tmp_path / "run", changed(RUN, field, value), to_json(RECORD))

    for read in (run_info, read_run, read_contents):
        with pytest.raises(ValueError, match=rf"no line that describes the run: line 1 of .* \({reason}"):
            read(run_dir)


def test_a_line_that_is_too_long_is_left_out_and_never_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line of 100 bytes with a limit of 64, and a line whose end is not written yet."""
    monkeypatch.setattr(journal_file, "CHUNK_BYTES", 16)
    monkeypatch.setattr(journal_file, "MAX_LINE_BYTES", 64)
    (tmp_path / JOURNAL_NAME).write_bytes(to_json(END) + b"9" * 100 + b"\n" + to_json(END) + b"9" * 100)
    reader = JournalReader(tmp_path / JOURNAL_NAME)

    assert len(reader.read()) == 2
    assert reader.damaged_lines() == (2,)
    with (tmp_path / JOURNAL_NAME).open("ab") as file:
        file.write(b"\n" + to_json(END))
    assert len(reader.read()) == 1
    assert reader.damaged_lines() == (2, 4)
    reader.close()


def packed_run(run_dir: Path, content: bytes) -> Path:
    run_dir.mkdir()
    (run_dir / f"{JOURNAL_NAME}.gz").write_bytes(content)
    return run_dir


@pytest.mark.system
def test_a_truncated_packed_journal_is_read_up_to_its_end(tmp_path: Path) -> None:
    """Twenty thousand records; the last third of the file is missing."""
    lines = [encode_record(Record(seq, Axes(seq, seq, seq, 1 / seq), {"policy/kl": 1 / seq})) for seq in range(1, 20_000)]
    whole = gzip.compress(b"".join(map(to_json, [RUN, *lines])))
    run = read_run(packed_run(tmp_path / "run", whole[: len(whole) * 2 // 3]))

    assert 10_000 < len(run.records) < 15_000
    assert [record.seq for record in run.records] == list(range(1, len(run.records) + 1))
    assert run.damaged == (len(run.records) + 2,)
    assert run.damaged[0].reason == "the compressed file ends here"
    with pytest.raises(OSError, match="the compressed file ends here"):
        Journal.open(tmp_path / "run")
    assert [file.name for file in (tmp_path / "run").glob(f"{JOURNAL_NAME}*")] == [f"{JOURNAL_NAME}.gz"]


@pytest.mark.parametrize("content", [b"no archive", b"\x1f\x8b\x08broken", b""])
def test_a_packed_journal_that_is_no_archive_says_so(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no line that describes the run"):
        read_run(packed_run(tmp_path / "run", content))


def test_a_bomb_is_read_up_to_a_multiple_of_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A million zeros compress to a thousand bytes. At most 200 times the file's size is unpacked."""
    monkeypatch.setattr(packed, "MIN_LIMIT_BYTES", 1000)
    run = read_run(packed_run(tmp_path / "run", gzip.compress(to_json(RUN) + b"0" * 1_000_000)))

    assert run.damaged == (2,)
    assert run.damaged[0].reason == "the compressed file unpacks to more than 200 times its size"


def test_millions_of_empty_lines_are_no_lines(tmp_path: Path) -> None:
    """The line after them is read, even if each call reads one entry."""
    journal = to_json(RUN) + b"\n" * 3_000_000 + to_json(encode_end(RunStatus.FINISHED, seq=1))
    reader = JournalReader(journal_path(packed_run(tmp_path / "run", gzip.compress(journal))))

    entries = [*reader.read(1), *reader.read(1), *reader.read(1)]
    assert [type(entry).__name__ for entry in entries] == ["RunInfo", "End"]
    assert reader.damaged_lines() == ()
    reader.close()


def test_a_journal_with_an_end_alone_is_begun_again(tmp_path: Path) -> None:
    """The trainer was killed before its first line, and another process wrote the end."""
    (tmp_path / JOURNAL_NAME).write_bytes(to_json(encode_end(RunStatus.KILLED, seq=1)))
    with Telemetry(run_dir=tmp_path) as telemetry:
        telemetry.flush(env_step=1)
    assert (len(read_run(tmp_path).records), read_run(tmp_path).status) == (1, RunStatus.FINISHED)

    (tmp_path / "other").mkdir()
    (tmp_path / "other" / JOURNAL_NAME).touch()
    assert not end_if_open(tmp_path / "other", RunStatus.KILLED)
    assert (tmp_path / "other" / JOURNAL_NAME).read_bytes() == b""


def test_the_head_is_what_stands_before_the_offset(tmp_path: Path) -> None:
    """A resumed run has a second run line."""
    first, second = (encode_run(RunInfo("id-1", name, None, 1.5)) for name in ("first", "second"))
    run_dir = written(tmp_path / "run", to_json(first), to_json(RECORD), to_json(second))
    reader = JournalReader(run_dir / JOURNAL_NAME)

    heads = [reader.head() for _ in range(3) if len(reader.read(1)) == 1]
    reader.close()

    assert [head.name for head in heads if head is not None] == ["first", "first", "second"]
    assert run_info(run_dir).name == "second"


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_a_journal_that_is_no_file_is_not_written(kind: str, tmp_path: Path) -> None:
    target = written(tmp_path / "other", to_json(RUN)) / JOURNAL_NAME
    (tmp_path / "run").mkdir()
    journal = tmp_path / "run" / JOURNAL_NAME
    journal.symlink_to(target) if kind == "link" else os.mkfifo(journal)

    with pytest.raises(OSError):  # the kind decides which error
        Journal.open(tmp_path / "run")
    with pytest.raises(OSError):
        Journal.create(tmp_path / "run")
    assert target.read_bytes() == to_json(RUN)
