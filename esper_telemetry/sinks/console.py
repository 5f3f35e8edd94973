"""The terminal: a progress bar where it is one and the run's length is known, else a line per update, at most one a second.

Numbers that do not fit into the width of a terminal are left out, the least important first.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from esper_telemetry.core.record import Alarm, AlarmEvent, AlarmLevel, Record, RunInfo, RunStatus
from esper_telemetry.sinks.protocol import Place, check_options, require_package
from esper_telemetry.sinks.text import ProgressBar, fitting, plain_length


def make_console(*, piped_width: int | None = None, **settings: Any) -> Any:
    """Return rich's console; with NO_COLOR it writes no escape sequence at all, where rich itself still writes bold and dim.

    Args:
        piped_width: columns where the output is no terminal and COLUMNS does not say how many.
        settings: passed on to `rich.console.Console`.
    """
    from rich.console import Console

    plain = {"force_terminal": False, "color_system": None} if os.environ.get("NO_COLOR") else {}
    console = Console(**{**settings, **plain})
    if piped_width is not None and not console.file.isatty() and "COLUMNS" not in os.environ:
        console.width = piped_width
    return console


def is_live(console: Any) -> bool:
    """Return whether a line of that console can be redrawn; FORCE_COLOR in a pipe colours the text and redraws nothing."""
    return bool(console.is_terminal and console.file.isatty() and not console.is_dumb_terminal)


class Column(NamedTuple):
    """A number of the line: what it is called, the keys it is taken from (the first present), how it is written."""

    label: str
    keys: tuple[str, ...]
    style: str = ".3g"


COLUMNS = (
    Column("return", ("episode/return_mean_100", "episode/return_mean"), ".1f"),
    Column("steps/s", ("train/env_steps_per_second",), ",.0f"),
    Column("kl", ("policy/kl",)),
    Column("explained", ("value/explained_variance",), ".2f"),
    Column("entropy", ("policy/entropy_norm", "policy/entropy"), ".2f"),
    Column("clipped", ("policy/clip_frac",), ".0%"),
    Column("grad", ("grad/global/norm_preclip",)),
)
"""The most important first."""

TOTALS = ("total_steps", "total_timesteps")
"""Names of the setting that says how many environment steps a run has."""

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
        self.run = run
        self.every_seconds = every_seconds
        self.clock = clock
        self.console = make_console(highlight=False, soft_wrap=True)
        self.total = total_steps(run)
        self.bar = ProgressBar(self.console, self.total) if self.total and is_live(self.console) else None
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
        width = self.console.width if self.console.file.isatty() else None
        self.console.print(line(record, self.total, width))
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


def total_steps(run: RunInfo) -> int | None:
    """Return how many environment steps the run has, as its trainer or its settings say; None where nobody does."""
    known = [source.get(name) for source in (run.facts, run.config) for name in TOTALS]
    return next((total for total in known if isinstance(total, int) and total > 0), None)


def line(record: Record, total: int | None = None, width: int | None = None) -> str:
    """Return one line, in rich's markup, of how far the run is and of the numbers that are present and fit into the width."""
    step = record.axes.env_step
    far = f"step {step:,}" + (f"/{total:,} ({min(1.0, step / total):.0%})" if total else "")
    head = f"[bold]update {record.axes.update:,}[/bold]  [dim]{far}[/dim]"
    return "  ".join([head, *fitting(numbers(record), None if width is None else width - plain_length(head))])


def alarm_line(alarm: Alarm) -> str:
    """One line, in rich's markup: the type, since when, and what it means."""
    from rich.markup import escape

    if alarm.event is AlarmEvent.CLEAR:
        head = f"over at update {alarm.axes.update:,}, since {alarm.since:,}"
        return f"[green]{escape(alarm.type)}[/green]  [dim]{head}[/dim]"
    colour = ALARM_COLOURS[alarm.level]
    text = escape(" ".join(alarm.text.split()))
    return f"[{colour}]{alarm.level.upper()} {escape(alarm.type)}[/{colour}]  since update {alarm.since:,}  {text}"


def numbers(record: Record) -> list[str]:
    """Return the numbers that are present, in rich's markup, the most important first."""
    return [f"[dim]{column.label}[/dim] {text}" for column in COLUMNS if (text := _text(column, record.values))]


def _text(column: Column, values: Mapping[str, float]) -> str:
    found = [values[key] for key in column.keys if key in values]
    return format(found[0], column.style) if found else ""
