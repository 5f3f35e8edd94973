"""The console sink: a progress bar on a terminal if the run's length is known, else a line per update, at most one a second.

Numbers that do not fit into the width of a terminal are left out, least important first.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, NamedTuple

from esper_telemetry.alarms.verdict.bounds import COLOURS as TONE_COLOURS
from esper_telemetry.alarms.verdict.bounds import Tone, tone_of
from esper_telemetry.core.messages import end_text, printable
from esper_telemetry.core.record import Alarm, AlarmEvent, AlarmLevel, Record, RunInfo, RunStatus
from esper_telemetry.history.recent_return import RECENT_RETURN, UPDATE_RETURN
from esper_telemetry.journal.lines import JournalEvent
from esper_telemetry.sinks.sink_protocol import Place, check_options

MIN_COLUMNS, DEFAULT_COLUMNS = 20, 80
"""Narrowest width that is believed, and the width otherwise: some programs set COLUMNS=0, and rich then prints nothing."""


def make_console(*, piped_width: int | None = None, **settings: Any) -> Any:
    """Return a rich console that makes every text `printable`; with NO_COLOR it writes no escape sequences, not even bold and dim.

    Args:
        piped_width: width in columns if the output is not a terminal and COLUMNS is not set.
        settings: passed to `rich.console.Console`.
    """
    from rich.console import Console
    from rich.segment import Segment

    class PrintableConsole(Console):
        """Removes escape sequences from the texts and writes only its own; writes `?` for what its stream cannot encode."""

        def render(self, renderable: Any, options: Any = None) -> Iterator[Segment]:
            for part in super().render(renderable, options):
                text = part.text if part.control else printable(part.text)
                text = text.encode(self.encoding, "replace").decode(self.encoding)  # a pipe of Windows is cp1252
                yield Segment(text, part.style, part.control)

    plain = {"force_terminal": False, "color_system": None} if os.environ.get("NO_COLOR") else {}
    console = PrintableConsole(**{**settings, **plain})
    if piped_width is not None and not console.file.isatty() and "COLUMNS" not in os.environ:
        console.width = piped_width
    if console.width < MIN_COLUMNS:
        console.width = DEFAULT_COLUMNS
    return console


def is_live(console: Any) -> bool:
    """Return whether a line of that console can be redrawn; in a pipe it cannot, even if FORCE_COLOR colours the text."""
    return bool(console.is_terminal and console.file.isatty() and not console.is_dumb_terminal)


def takes_output(console: Any) -> bool:
    """Return whether a line can be written without blocking the training thread."""
    try:
        poll = select.poll()
        poll.register(console.file.fileno(), select.POLLOUT)
    except (OSError, ValueError, AttributeError):  # not a file of the system, as in a notebook; or Windows
        return True
    return bool(poll.poll(0))


class Column(NamedTuple):
    """A number of the line: its label, its keys (the first present key is shown), and its format; hidden if `unless` is present."""

    label: str
    keys: tuple[str, ...]
    style: str = ".3g"
    unless: str = ""


COLUMNS: Final = (
    Column("return", (RECENT_RETURN,), ".1f"),
    Column("return of the update", (UPDATE_RETURN,), ".1f", unless=RECENT_RETURN),
    Column("steps/s", ("train/env_steps_per_second",), ",.0f"),
    Column("kl", ("policy/kl",)),
    Column("explained", ("value/explained_variance",), ".2f"),
    Column("entropy", ("policy/entropy_norm", "policy/entropy"), ".2f"),
    Column("clipped", ("policy/clip_frac",), ".0%"),
    Column("grad", ("grad/global/norm_preclip",)),
)
"""Most important first."""

NUMBER_GAP_COLUMNS: Final = 2
"""Columns between two numbers."""
WIDE_BAR_COLUMNS, NARROW_BAR_COLUMNS, WIDE_TERMINAL_COLUMNS = 24, 8, 100
"""Width of the bar on a wide and on a narrower terminal, and the minimum width of a wide terminal."""
TIME_COLUMNS: Final = len("0:00:00")

REDRAW_SECONDS: Final = 0.5
"""Minimum time between two drawings of the bar, which take the training thread 1 to 3 ms each."""

MAX_STEPS: Final = 10**15
"""Largest number of environment steps that is accepted as the length of a run."""
TOTALS: Final = ("total_steps", "total_timesteps")
"""Names of the setting with the number of environment steps of a run."""

ALARM_COLOURS: Final = {AlarmLevel.CRITICAL: "bold red", AlarmLevel.WARN: "yellow", AlarmLevel.INFO: "cyan"}


@dataclass
class ConsoleSink:
    """Shows the progress of the run: steps, speed, return, KL and the like.

    On a terminal it shows one live bar, if the trainer said how many steps the run has. Otherwise it prints one compact line per update, at
    most one per `every_seconds`, and always the last update. An alarm has its own line when it is raised and when it ends.

    The training thread writes the lines. They wait while the terminal is blocked (Ctrl-S, or a pipe without a reader).
    """

    every_seconds: float = 1.0
    _output: _Output | None = field(default=None, init=False, repr=False, compare=False)
    _last_outcome: str = field(default="", init=False, repr=False, compare=False)
    _kind: str = field(default="", init=False, repr=False, compare=False)
    _active: dict[str, AlarmLevel] = field(default_factory=dict, init=False, repr=False, compare=False)

    in_process: ClassVar[bool] = True
    inline: ClassVar[bool] = True
    name: ClassVar[str] = "console"

    @classmethod
    def from_uri(cls, rest: str, options: Mapping[str, str]) -> ConsoleSink:
        """Return the sink of `console`, which has no options."""
        check_options("console", options)
        if rest:
            raise ValueError(f"sink console takes nothing after its name, got {rest!r}")
        return cls()

    def place(self, run: RunInfo) -> Place:
        """Return the terminal."""
        return Place("this terminal", "")

    def import_client(self) -> None:
        """Import rich before training begins: it takes a tenth of a second."""
        import rich.console
        import rich.markup
        import rich.progress  # noqa: F401  # `open` uses them

    def open(self, run: RunInfo) -> None:
        """Use the terminal that stdout is now."""
        self._output = _Output(run, self.every_seconds)

    def write(self, records: Sequence[Record]) -> None:
        """Show the latest record, unless a line was just printed."""
        if self._output and records:
            self._output.show(records[-1])

    def alarm(self, alarm: Alarm) -> None:
        """Print one line: red for a critical alarm, yellow for a warning, green at its end; nothing if it gets worse."""
        if alarm.event is AlarmEvent.CLEAR:
            self._active.pop(alarm.type, None)
        else:
            self._active[alarm.type] = alarm.level
        if self._output and alarm.event is not AlarmEvent.UPDATE:
            self._output.print(alarm_line(alarm))

    def outcome(self, event: JournalEvent) -> None:
        """Print the run's new outcome, unless the same words were just printed, as after a failure."""
        text, self._kind = str(event.data.get("text", "")), str(event.data.get("outcome", ""))
        if self._output and text != self._last_outcome:
            self._last_outcome = text
            self._output.print(outcome_line(event, self._tone))

    @property
    def _tone(self) -> Tone:
        return tone_of(self._kind, self._active.values())

    def close(self, status: RunStatus) -> None:
        """Print the last update if it has not been shown, and how the run ended."""
        if self._output:
            self._output.end(status, self._tone)
            self._output = None


class _Output:
    """The lines, or the bar, of one run."""

    def __init__(self, run: RunInfo, every_seconds: float) -> None:
        self._console = make_console(highlight=False, soft_wrap=True)
        self._total = total_steps(run)
        self._bar = ProgressBar(self._console, self._total) if self._total and is_live(self._console) else None
        self._every_seconds = REDRAW_SECONDS if self._bar else every_seconds
        self._shown_at = float("-inf")
        self._waiting: Record | None = None
        self._last: Record | None = None
        self._lines: list[str] = []

    def show(self, record: Record) -> None:
        """Show a record, or keep it until the next line is due."""
        self._last = self._waiting = record
        if time.monotonic() - self._shown_at >= self._every_seconds:
            self._show_waiting()
        self._write_lines()

    def print(self, text: str) -> None:
        """Print a separate line."""
        self._lines.append(text)
        self._write_lines()

    def end(self, status: RunStatus, tone: Tone) -> None:
        """Show waiting lines and how the run ended: in green only if it has learned something and nothing is wrong."""
        if self._waiting is not None:
            self._show_waiting()
        if self._bar is not None and takes_output(self._console):
            self._bar.end()
        colour = TONE_COLOURS[Tone.BAD if status is RunStatus.FAILED else tone]
        reached = f" after {self._last.axes.update:,} updates, {self._last.axes.env_step:,} steps" if self._last else ""
        self.print(f"[{colour}]{status.value}[/{colour}]{reached}")

    def _show_waiting(self) -> None:
        assert self._waiting is not None
        if not takes_output(self._console):
            return
        if self._bar is not None:
            self._bar.show(self._waiting, numbers(self._waiting))
        else:
            width = self._console.width if self._console.file.isatty() else None
            self._lines.append(line(self._waiting, self._total, width))
        self._shown_at, self._waiting = time.monotonic(), None

    def _write_lines(self) -> None:
        if self._lines and takes_output(self._console):
            lines, self._lines = self._lines, []  # first: an interrupt after the output would repeat it
            self._console.print("\n".join(lines))


class ProgressBar:
    """One live line at the bottom of the terminal, redrawn by `show`, because rich's own redrawing needs a thread.

    Args:
        console: rich's console.
        total_steps: environment steps of the whole run.
    """

    def __init__(self, console: Any, total_steps: int) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._console, self._total = console, total_steps
        self._bar_width = WIDE_BAR_COLUMNS if console.width >= WIDE_TERMINAL_COLUMNS else NARROW_BAR_COLUMNS
        self._steps_width = len(f"{total_steps:,}/{total_steps:,} steps")
        columns = (
            BarColumn(bar_width=self._bar_width),
            TextColumn("{task.completed:,.0f}/{task.total:,.0f} steps"),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.description}"),
        )
        self._progress = Progress(*columns, console=console, auto_refresh=False)
        self._task = self._progress.add_task("", total=total_steps)
        self._progress.start()

    def show(self, record: Record, numbers: Sequence[str]) -> None:
        """Move the bar to the record's step and write as many numbers next to it as fit."""
        space = self._console.width - self._bar_width - self._steps_width - TIME_COLUMNS - 3
        description = (" " * NUMBER_GAP_COLUMNS).join(fitting(numbers, space + NUMBER_GAP_COLUMNS))
        step = record.axes.env_step
        total = max(self._total, step)  # the last rollout may go beyond the steps that were asked for
        self._progress.update(self._task, total=total, completed=step, description=description, refresh=True)

    def end(self) -> None:
        """Leave the bar as it is."""
        self._progress.stop()


def total_steps(run: RunInfo) -> int | None:
    """Return how many environment steps the run has according to its trainer or its settings, or None."""
    totals = [source.get(name) for source in (run.facts, run.config) for name in TOTALS]
    return next((total for total in totals if isinstance(total, int) and 0 < total <= MAX_STEPS), None)


def line(record: Record, total: int | None = None, width: int | None = None) -> str:
    """Return one line, in rich's markup, with the progress of the run and the available numbers that fit into the width."""
    step = record.axes.env_step
    total = total and max(total, step)
    far = f"step {step:,}" + (f"/{total:,} ({step / total:.0%})" if total else "")
    head = f"[bold]update {record.axes.update:,}[/bold]  [dim]{far}[/dim]"
    return "  ".join([head, *fitting(numbers(record), None if width is None else width - plain_length(head))])


def alarm_line(alarm: Alarm) -> str:
    """Return one line, in rich's markup: the type, the first update, and the meaning."""
    from rich.markup import escape

    if alarm.event is AlarmEvent.CLEAR:
        head = f"{end_text(alarm.axes.update)}, active since {alarm.since:,}"
        return f"[green]{escape(alarm.type)}[/green]  [dim]{head}[/dim]"
    colour = ALARM_COLOURS[alarm.level]
    text = escape(" ".join(alarm.text.split()))
    since = "" if text.startswith("Since update") else f"since update {alarm.since:,}  "
    return f"[{colour}]{alarm.level.upper()} {escape(alarm.type)}[/{colour}]  {since}{text}"


def outcome_line(event: JournalEvent, tone: Tone) -> str:
    """Return one line, in rich's markup, with the outcome so far, in the colour of its tone."""
    from rich.markup import escape

    text = escape(str(event.data.get("text", "")))
    place = "" if event.axes is None else f"  [dim]update {event.axes.update:,}[/dim]"
    return f"[{TONE_COLOURS[tone]}]outcome[/]{place}  {text}"


def numbers(record: Record) -> list[str]:
    """Return the available numbers, in rich's markup, most important first."""
    texts = []
    for column in COLUMNS:
        value = next((record.values[key] for key in column.keys if key in record.values), None)
        if value is not None and column.unless not in record.values:
            texts.append(f"[dim]{column.label}[/dim] {format(value, column.style)}")
    return texts


def fitting(numbers: Sequence[str], space: int | None) -> Iterator[str]:
    """Yield the first numbers, in rich's markup, that fit into that many columns with a gap before each; all if it is None."""
    for number in numbers:
        if space is not None:
            space -= NUMBER_GAP_COLUMNS + plain_length(number)
            if space < 0:
                return
        yield number


def plain_length(markup: str) -> int:
    """Return the number of columns that a text in rich's markup takes."""
    from rich.text import Text

    return Text.from_markup(markup).cell_len
