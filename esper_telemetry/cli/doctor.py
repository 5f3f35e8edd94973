"""`esper-telemetry doctor`: compare every backend of a run with its journal, and print what repairs the differences."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from esper_telemetry.alarms.rules.task import Failure, bad_ending
from esper_telemetry.cli.mistakes import without_warnings, wrong_use
from esper_telemetry.cli.replay import prepared_sink
from esper_telemetry.delivery.cursors import Cursors
from esper_telemetry.delivery.health import RunHealth, SinkCheck, check_backend
from esper_telemetry.delivery.health import doctor as examine
from esper_telemetry.journal.file import damage_sentence, journal_path
from esper_telemetry.sinks.console import is_live, make_console
from esper_telemetry.sinks.protocol import sink_name

if TYPE_CHECKING:
    from esper_telemetry.cli.main import Doctor


def doctor(options: Doctor) -> int:
    """Print the comparison; 1 if something is missing, differs, is stored twice or cannot be read."""
    with wrong_use(), without_warnings():
        named_sinks = [prepared_sink(uri) for uri in options.sink]
        for name in Cursors(Path(options.run_dir)).names():
            with suppress(ValueError, TypeError, ImportError):  # a sink that cannot be made from its name
                prepared_sink(name)
        with _progress() as progress:
            health = examine(options.run_dir, progress=progress)
        directory = Path(options.run_dir).absolute()
        named = {
            sink_name(sink): check_backend(directory, sink, name=sink_name(sink), ended=False) for sink in named_sinks
        }
    sinks = [*(sink for sink in health.sinks if sink.name not in named), *named.values()]
    is_healthy = not health.lost and all(sink.healthy for sink in sinks)
    event = health.failure
    failures = [] if event is None or event.axes is None else [Failure(event.seq, event.axes, event.data)]
    ending = bad_ending(health.status, health.last_update, failures)
    if options.json:
        values = {
            "records": health.records,
            "status": health.status,
            "ending": ending,
            "under_way": health.under_way,
            "closed_stale": health.closed_stale,
            "lost_lines": health.lost,
            "damaged_lines": list(health.damaged),
            "equal": is_healthy,
            "sinks": [sink.as_dict() for sink in sinks],
        }
        print(json.dumps(values, indent=1))
    else:
        print(_page(options.run_dir, health, ending, sinks))
    return 0 if is_healthy else 1


@contextmanager
def _progress() -> Iterator[Callable[[str], object]]:
    """Show on a terminal which backend is being compared; yields the function that takes its name."""
    console = make_console(stderr=True)
    if not is_live(console):
        yield lambda name: None
        return
    with console.status("reading the journal") as status:
        yield lambda name: status.update(f"comparing {name}")


def _page(run_dir: str, health: RunHealth, ending: str, sinks: list[SinkCheck]) -> str:
    if health.status is None:
        state = "goes on" if health.under_way else "has no end yet"
    else:
        delivered = ", and a background process still delivers it" if health.under_way else ""
        state = f"ended as {health.status}{delivered}"
    lines = [f"{run_dir}: {health.records:,} records, the run {state}"]
    if ending:
        lines.append(ending)
    if health.closed_stale:
        lines.append("its trainer was gone without a word: the run is ended as killed now")
    if health.lost:
        lines.append(f"{health.lost:,} lines could not be written, as the disk was full: they are lost")
    if health.damaged:
        lines.append(damage_sentence(journal_path(run_dir), health.damaged))
    return "\n".join([*lines, *map(str, sinks)])
