"""The last words of a training command: what the run reached, what went wrong, where each backend wrote."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from esper_telemetry.core.record import RUN_FAILED, AlarmLevel, Record
from esper_telemetry.journal.read import alarms
from esper_telemetry.sinks.console import ConsoleSink, make_console
from esper_telemetry.sinks.incidents import IncidentCards, alarm_text, cause_of
from esper_telemetry.sinks.protocol import Place, Sink
from esper_telemetry.telemetry import Telemetry

MOST_INCIDENTS = 5
"""Of which the summary tells, the first ones, which tend to be the cause of the others; the journal and `diagnose` know all."""

COLOURS = {AlarmLevel.CRITICAL: "red", AlarmLevel.WARN: "yellow", AlarmLevel.INFO: "cyan"}


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
        """Prints the exception that ended the run, its last values, what went wrong, and where each backend wrote and how to open it."""
        console = make_console(markup=False, highlight=False, soft_wrap=True)
        recorded = alarms(telemetry.run_dir) if telemetry.run_dir is not None and telemetry.run is not None else ()
        incidents = IncidentCards(list(recorded))
        if incidents.failure:
            console.print(incidents.failure, style="bold red")
        if self._last is not None:
            table = Table("what telemetry saw last", "", header_style="bold")
            for label, value in _values(self._last):
                table.add_row(label, value)
            console.print(table)
        if telemetry.run_dir is not None:
            _show_incidents(console, incidents, telemetry.run_dir)
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


def _show_incidents(console: Console, found: IncidentCards, run_dir: Path) -> None:
    """What went wrong, since when, and whether it still does; nothing where nothing did."""
    numbers = sorted({alarm.incident for alarm in found.raised})
    if not numbers:
        return
    console.print("what went wrong", style="bold")
    for number in numbers[:MOST_INCIDENTS]:
        _show_incident(console, found, number)
    if len(numbers) > MOST_INCIDENTS:
        console.print(f"  and {len(numbers) - MOST_INCIDENTS} later incidents")
    console.print(f"{'':<12} $ {shlex.join(['esper-telemetry', 'diagnose', str(run_dir)])}", style="bold")


def _show_incident(console: Console, found: IncidentCards, number: int) -> None:
    """One incident: its cause in a sentence, then what came with it."""
    cause = cause_of(found.of(number))
    if cause is None or cause.type == RUN_FAILED:  # that stands above already
        return
    active = [kind for kind, alarm in found.active.items() if alarm.incident == number]
    state = "still so at the end" if active else "over"
    console.print(f"  {cause.type}, since update {cause.since:,}, {state}", style=COLOURS[cause.level])
    console.print(f"    {alarm_text(cause)}")
    others = sorted({alarm.type for alarm in found.of(number)} - {cause.type})
    if others:
        console.print(f"    with it came {', '.join(others)}")


def _values(record: Record) -> list[tuple[str, str]]:
    axes = [("environment steps", f"{record.axes.env_step:,}"), ("updates", f"{record.axes.update:,}")]
    known = [line for line in LINES if line.key in record.values]
    return axes + [(line.label, line.form.format(record.values[line.key])) for line in known]
