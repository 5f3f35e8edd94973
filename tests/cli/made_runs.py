"""Journals of runs that are made up record by record."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from healthy_run import FACTS, run, set_to

from esper_telemetry.core.record import Alarm, AlarmEvent, AlarmLevel, Record, RunInfo, RunStatus
from esper_telemetry.journal.file import JOURNAL_NAME, Journal
from esper_telemetry.journal.lines import JournalEvent, encode_alarm, encode_end, encode_event, encode_record, encode_run, to_json

KL_SPIKES = set_to({"policy/kl": 2.0, "policy/kl_max": 4.0})
ESCAPES = "\x1b[2J\x1b]0;title\x07\x9b31m\u202e\x08[/red][link=file:///x]"
MALFORMED = (b"[" * 100_000, b'{"kind":"record","seq":1,"axes":{},"values":{"policy/kl":null}}', b"\xff\0")


def journal(path: Path, records: list[Record], status: RunStatus | None = RunStatus.FINISHED, **facts: Any) -> Path:
    book = Journal.create(path)
    facts = {**FACTS, **facts}
    book.write(encode_run(RunInfo("r1", "run", path, 1e9, {"learning_rate": facts.get("learning_rate")}, facts=facts)))
    for record in records:
        book.write(encode_record(record))
    if status is RunStatus.FAILED:
        data = {"exception": "ValueError", "message": "x" * 5000}
        book.write(encode_event(JournalEvent("failure", data, seq=len(records), axes=records[-1].axes)))
    if status is not None:
        book.write(encode_end(status, seq=len(records)))
    book.close()
    return path


def hostile_run(run_dir: Path, text: str = ESCAPES) -> Path:
    """A finished run of 20 updates with that text in every text and name; lines 2 to 4 are malformed."""
    facts = {"env": text, "trainer": text, "num_envs": "eight"}
    head = RunInfo("r1", text, None, 1e9, {text: text}, (text,), text, {}, facts)
    records = [replace(record, values={**record.values, f"my/{text}": 1.0}) for record in run(20)]
    alarm = Alarm(
        *(4, records[3].axes, f"policy/{text}", AlarmEvent.RAISE, 0.9, AlarmLevel.CRITICAL, text),
        since=3,
        incident=1,
        cause=text,
        text=f"Since update 3, {text}",
    )
    rest = [encode_alarm(alarm), *map(encode_record, records), encode_end(RunStatus.FINISHED, seq=21)]
    run_dir.mkdir()
    malformed = b"".join(line + b"\n" for line in MALFORMED)
    (run_dir / JOURNAL_NAME).write_bytes(to_json(encode_run(head)) + malformed + b"".join(map(to_json, rest)))
    (run_dir / "config.json").write_text(json.dumps({"command": [text]}))
    (run_dir / "status.json").write_text(json.dumps({"sinks": {text: {"uri": text}}}))
    return run_dir


def wrong_script(folder: Path) -> Path:
    """A script whose trace of the advantages continues across the ends of episodes."""
    right = "args.gamma * args.gae_lambda * nextnonterminal * lastgaelam"
    text = (Path(__file__).parents[1] / "script" / "scripts" / "categorical.py").read_text(encoding="utf-8")
    assert right in text
    path = folder / "wrong.py"
    path.write_text(text.replace(right, "args.gamma * args.gae_lambda * lastgaelam"), encoding="utf-8")
    return path
