"""`esper-telemetry doctor`: whether every backend holds what the journal holds, and what repairs it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from esper_telemetry.alarms.rules.task import Failure, bad_ending
from esper_telemetry.cli.mistakes import without_warnings, wrong_use
from esper_telemetry.cli.own_process import prepare_for, prepared
from esper_telemetry.delivery.doctor import Health, SinkCheck, examined
from esper_telemetry.delivery.doctor import doctor as examine
from esper_telemetry.delivery.status import sink_name
from esper_telemetry.journal.file import damage_sentence, journal_path
from esper_telemetry.sinks.console import is_live, make_console
from esper_telemetry.sinks.registry import as_sink

if TYPE_CHECKING:
    from esper_telemetry.cli.main import Doctor


def doctor(options: Doctor) -> int:
    """Prints what was found; 1 where something is missing, differs, stands twice or cannot be read."""
    with wrong_use(), without_warnings():
        asked = [prepared(as_sink(uri)) for uri in options.sink]
        prepare_for(options.run_dir)
        with _progress() as progress:
            health = examine(options.run_dir, progress=progress)
        directory = Path(options.run_dir).absolute()
        others = {sink_name(sink): examined(directory, sink, name=sink_name(sink), ended=False) for sink in asked}
    sinks = [*(sink for sink in health.sinks if sink.name not in others), *others.values()]
    if options.json:
        print(json.dumps(_as_dict(health, sinks), indent=1))
    else:
        print(_page(options.run_dir, health, sinks))
    return 0 if health.well and all(sink.equal is not False for sink in sinks) else 1


@contextmanager
def _progress() -> Iterator[Callable[[str], object]]:
    """Show on a terminal which backend is being compared; yields what takes its name."""
    console = make_console(stderr=True)
    if not is_live(console):
        yield lambda name: None
        return
    with console.status("reading the journal") as status:
        yield lambda name: status.update(f"comparing {name}")


def _page(run_dir: str, health: Health, sinks: list[SinkCheck]) -> str:
    lines = [f"{run_dir}: {health.records:,} records, the run {_state(health)}"]
    ending = _ending(health)
    if ending:
        lines.append(ending)
    if health.closed_stale:
        lines.append("its trainer was gone without a word: the run is ended as killed now")
    if health.lost:
        lines.append(f"{health.lost:,} lines could not be written, as the disk was full: they are lost")
    if health.damaged:
        lines.append(damage_sentence(journal_path(run_dir), health.damaged))
    return "\n".join([*lines, *map(str, sinks)])


def _state(health: Health) -> str:
    if health.status is None:
        return "goes on" if health.under_way else "has no end yet"
    delivered = ", and a background process still delivers it" if health.under_way else ""
    return f"ended as {health.status}{delivered}"


def _ending(health: Health) -> str:
    """The sentence on a run that failed or was killed; empty for others."""
    event = health.failure
    failures = [] if event is None or event.axes is None else [Failure(event.seq, event.axes, event.data)]
    return bad_ending(health.status, health.last_update, failures)


def _as_dict(health: Health, sinks: list[SinkCheck]) -> dict[str, object]:
    return {
        "records": health.records,
        "status": health.status,
        "ending": _ending(health),
        "under_way": health.under_way,
        "closed_stale": health.closed_stale,
        "lost_lines": health.lost,
        "damaged_lines": list(health.damaged),
        "equal": health.well and all(sink.equal is not False for sink in sinks),
        "sinks": [sink.as_dict() for sink in sinks],
    }
