"""The last words of a training command: what the run reached, what telemetry saw, where each backend wrote."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from esper_telemetry.record import Record
from esper_telemetry.sinks import ConsoleSink, Place, Sink
from esper_telemetry.telemetry import Telemetry


class Line(NamedTuple):
    """One row of the summary: a label, a key and how its last value reads."""

    label: str
    key: str
    form: str = "{:.3g}"


LINES = (
    Line("return, last 100 episodes", "episode/return_mean_100", "{:.1f}"),
    Line("policy moved per update (KL)", "policy/kl"),
    Line("ratios clipped", "policy/clip_frac", "{:.1%}"),
    Line("exploration left (entropy)", "policy/entropy_norm", "{:.0%}"),
    Line("returns explained by the critic", "value/explained_variance", "{:.0%}"),
    Line("gradient norm before clipping", "grad/global/norm_preclip"),
    Line("steps per second", "train/env_steps_per_second", "{:,.0f}"),
    Line("telemetry's share of the time", "perf/telemetry_frac", "{:.1%}"),
)


class Summary:
    """Remembers the last record and says at the end what there is to know."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = sinks
        self._last: Record | None = None

    def observe(self, record: Record) -> None:
        """Takes a record, as a sink does."""
        self._last = record

    def show(self, telemetry: Telemetry) -> None:
        """Prints what the run reached and what telemetry saw, then where each backend wrote and how to open it."""
        console = Console(markup=False, highlight=False, soft_wrap=True)
        if self._last is not None:
            table = Table("what telemetry saw last", "", header_style="bold")
            for label, value in _values(self._last):
                table.add_row(label, value)
            console.print(table)
        for name, place in self._places(telemetry):
            console.print(f"{name:<12} {place.where}")
            if place.command:
                console.print(f"{'':<12} $ {place.command}", style="bold")

    def _places(self, telemetry: Telemetry) -> Iterator[tuple[str, Place]]:
        run = telemetry.run
        if run is None or run.run_dir is None:
            return
        yield "journal", Place(str(run.run_dir / "journal.jsonl"), "")
        for sink in self._sinks:
            place = getattr(sink, "place", None)
            if place is not None and not isinstance(sink, ConsoleSink):
                yield type(sink).__name__.removesuffix("Sink").replace("Wandb", "W&B"), place(run)


def _values(record: Record) -> list[tuple[str, str]]:
    axes = [("environment steps", f"{record.axes.env_step:,}"), ("updates", f"{record.axes.update:,}")]
    known = [line for line in LINES if line.key in record.values]
    return axes + [(line.label, line.form.format(record.values[line.key])) for line in known]
