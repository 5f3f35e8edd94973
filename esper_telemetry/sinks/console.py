"""The terminal: a progress bar where it is one and the run's length is known, else a line per update, at most one a second."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from esper_telemetry.record import Alarm, AlarmEvent, AlarmLevel, Record, RunInfo, RunStatus
from esper_telemetry.sinks.progress import ProgressBar
from esper_telemetry.sinks.protocol import Place, check_options, require_package


class Column(NamedTuple):
    """A number of the line: what it is called, the keys it is taken from (the first present), how it is written."""

    label: str
    keys: tuple[str, ...]
    style: str = ".3g"


COLUMNS = (
    Column("return", ("episode/return_mean_100", "episode/return_mean"), ".1f"),
    Column("kl", ("policy/kl",)),
    Column("clipped", ("policy/clip_frac",), ".0%"),
    Column("entropy", ("policy/entropy_norm", "policy/entropy"), ".2f"),
    Column("explained", ("value/explained_variance",), ".2f"),
    Column("grad", ("grad/global/norm_preclip",)),
    Column("steps/s", ("train/env_steps_per_second",), ",.0f"),
)

ALARM_COLOURS = {AlarmLevel.CRITICAL: "bold red", AlarmLevel.WARN: "yellow", AlarmLevel.INFO: "cyan"}
STATUS_COLOURS = {RunStatus.FINISHED: "green", RunStatus.FAILED: "red"}


@dataclass(frozen=True)
class ConsoleSink:
    """Shows where the run stands: steps, speed, return, KL and the like.

    On a terminal one live bar, if the trainer said how many steps the run has; otherwise one compact line per update, at
    most one per `every_seconds`, and the last update always. An alarm is a line of its own, when it is raised and when it is over.
    """

    every_seconds: float = 1.0
    _open: _Terminal | None = field(default=None, init=False, repr=False, compare=False)

    in_process: ClassVar[bool] = True
    name: ClassVar[str] = "console"

    def __post_init__(self) -> None:
        require_package("rich", "ConsoleSink")

    @classmethod
    def from_uri(cls, rest: str, options: Mapping[str, str]) -> ConsoleSink:
        """`console`, without anything more."""
        check_options("console", options)
        if rest:
            raise ValueError(f"sink console takes nothing after its name, got {rest!r}")
        return cls()

    def place(self, run: RunInfo) -> Place:
        """The terminal."""
        return Place("this terminal", "")

    def open(self, run: RunInfo) -> None:
        """Takes the terminal that stdout is now."""
        object.__setattr__(self, "_open", _Terminal(run, self.every_seconds))

    def write(self, records: Sequence[Record]) -> None:
        """Shows the newest of the records, unless a line was printed a moment ago."""
        if self._open and records:
            self._open.show(records[-1])

    def alarm(self, alarm: Alarm) -> None:
        """Prints one line: red where it is critical, yellow for a warning, green where it is over; nothing where it gets worse."""
        if self._open and alarm.event is not AlarmEvent.UPDATE:
            self._open.console.print(alarm_line(alarm))

    def close(self, status: RunStatus) -> None:
        """Prints the last update if it was held back, and how the run ended."""
        if self._open:
            self._open.end(status)
            object.__setattr__(self, "_open", None)


class _Terminal:
    """What one run shows."""

    def __init__(self, run: RunInfo, every_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        from rich.console import Console

        self.run = run
        self.every_seconds = every_seconds
        self.clock = clock
        self.console: Any = Console(highlight=False, soft_wrap=True)
        total = run.facts.get("total_steps")
        self.bar = ProgressBar(self.console, total) if total and self.console.is_terminal else None
        self.printed_at = float("-inf")
        self.held_back: Record | None = None
        self.last: Record | None = None

    def show(self, record: Record) -> None:
        self.last = self.held_back = record
        if self.bar is not None:
            self.bar.show(record, numbers(record))
        elif self.clock() - self.printed_at >= self.every_seconds:
            self.print(record)

    def print(self, record: Record) -> None:
        self.console.print(line(record))
        self.printed_at = self.clock()
        self.held_back = None

    def end(self, status: RunStatus) -> None:
        if self.bar is not None:
            self.bar.end()
        elif self.held_back is not None:
            self.print(self.held_back)
        colour = STATUS_COLOURS.get(status, "yellow")
        reached = f" after {self.last.axes.update:,} updates, {self.last.axes.env_step:,} steps" if self.last else ""
        self.console.print(f"[{colour}]{status.value}[/{colour}]{reached}")


def line(record: Record) -> str:
    """One line, in rich's markup, of the numbers that are present."""
    head = f"[bold]update {record.axes.update:,}[/bold]  [dim]step {record.axes.env_step:,}[/dim]"
    return f"{head}  {numbers(record)}"


def alarm_line(alarm: Alarm) -> str:
    """One line, in rich's markup: the type, since when, and what it means."""
    from rich.markup import escape

    if alarm.event is AlarmEvent.CLEAR:
        head = f"over at update {alarm.axes.update:,}, since {alarm.since:,}"
        return f"[green]{escape(alarm.type)}[/green]  [dim]{head}[/dim]"
    colour = ALARM_COLOURS[alarm.level]
    text = escape(" ".join(alarm.text.split()))
    return f"[{colour}]{alarm.level.upper()} {escape(alarm.type)}[/{colour}]  since update {alarm.since:,}  {text}"


def numbers(record: Record) -> str:
    """The numbers that are present, in rich's markup."""
    found = [f"[dim]{column.label}[/dim] {text}" for column in COLUMNS if (text := _text(column, record.values))]
    return "  ".join(found)


def _text(column: Column, values: Mapping[str, float]) -> str:
    found = [values[key] for key in column.keys if key in values]
    return format(found[0], column.style) if found else ""
