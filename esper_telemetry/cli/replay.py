"""`esper-telemetry replay`: send a journal to a backend, from where that backend stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from esper_telemetry.cli.mistakes import wrong_use
from esper_telemetry.core.record import Record
from esper_telemetry.delivery.catch_up import replay as replay_into
from esper_telemetry.delivery.cursors import Cursors
from esper_telemetry.journal.read import read_contents
from esper_telemetry.sinks.console import is_live, make_console
from esper_telemetry.sinks.protocol import Sink, SupportsChildPreparation, sink_name
from esper_telemetry.sinks.registry import as_sink

if TYPE_CHECKING:
    from esper_telemetry.cli.main import Replay


def replay(options: Replay) -> int:
    """Send the records that the backend does not have yet, and print how many."""
    with wrong_use():
        sink = prepared_sink(options.to)
        with _progress(options, sink) as advance:
            counted = CountedSink(sink, advance)
            report = replay_into(options.run_dir, counted, follow=options.follow, missing=options.missing)
    print(report)
    return 0 if report.complete else 1


def prepared_sink(uri: str) -> Sink:
    """Return a sink whose client is set up for this process, as in the child process of a run: a command's process holds nothing else."""
    sink = as_sink(uri)
    if isinstance(sink, SupportsChildPreparation):
        sink.prepare_child()
    return sink


class CountedSink:
    """A sink that reports how many records it was given; its other members are those of the wrapped sink.

    Args:
        sink: that the records are written to.
        advance: called with the number of records after each successful `write`.
    """

    def __init__(self, sink: Sink, advance: Callable[[int], object]) -> None:
        self.name = sink_name(sink)
        self.open = sink.open
        self.close = sink.close
        self._sink = sink
        self._advance = advance

    def write(self, records: Sequence[Record]) -> None:
        """Deliver all records, or raise."""
        self._sink.write(records)
        self._advance(len(records))

    def __getattr__(self, attribute: str) -> Any:
        """Return an optional member of the sink; raises AttributeError if it has none."""
        return getattr(self._sink, attribute)


@contextmanager
def _progress(options: Replay, sink: Sink) -> Iterator[Callable[[int], object]]:
    """Show on a terminal how many records were sent, and of how many; yields the function that counts them."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = make_console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not is_live(console)) as bar:
        total = None
        if not (bar.disable or options.follow or options.missing):
            sent = Cursors(Path(options.run_dir)).load(sink_name(sink)).records
            total = max(0, read_contents(options.run_dir).records - sent)
        task = bar.add_task(f"sending records to {sink_name(sink)}", total=total)
        yield lambda count: bar.advance(task, count)
