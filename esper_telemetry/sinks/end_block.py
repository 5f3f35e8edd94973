"""The block of text at the end of a run: the outcome, the incidents, the locations of its data, and the commands that show them.

`train` and `run` print it, and so does every run with a console sink. It is read from the journal, so it agrees with `diagnose`.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

from esper_telemetry.alarms.verdict.bounds import COLOURS as TONE_COLOURS
from esper_telemetry.alarms.verdict.bounds import Tone
from esper_telemetry.alarms.verdict.remarks import REMARK
from esper_telemetry.alarms.verdict.run_outcome import outcome_of
from esper_telemetry.core.messages import capitalized, without_numbers
from esper_telemetry.core.record import RUN_FAILED, Alarm, AlarmLevel, RunInfo, RunStatus
from esper_telemetry.core.redaction import masked
from esper_telemetry.journal.read import alarms, events_of, last_outcome, read_run
from esper_telemetry.sinks.console import ConsoleSink, make_console, takes_output
from esper_telemetry.sinks.pages import REPORT_NAME, IncidentCards, alarm_text
from esper_telemetry.sinks.sink_protocol import PermanentSinkError, Place, Sink, SupportsPlace

MAX_INCIDENTS: Final = 5
"""Number of incidents in the block. The first incidents tend to cause the others; the report and `diagnose` list all."""
MAX_REMARKS: Final = 3
LABEL_COLUMNS: Final = 13
LEVEL_COLOURS: Final = {AlarmLevel.CRITICAL: "red", AlarmLevel.WARN: "yellow", AlarmLevel.INFO: "cyan"}
VIEWS: Final = {"report": "report {run}", "terminal": "watch {run}", "causes": "diagnose {run}", "comparison": "compare {run} OTHER_RUN"}
"""Commands about a run directory, by what they show."""
VIEWS_EXTRA: Final = ("report", "terminal", "comparison")
"""The commands that need the extra `views`."""
BROKEN_OFF: Final = {RunStatus.INTERRUPTED, RunStatus.PREEMPTED}
"""Statuses of runs that are meant to be resumed."""


class EndBlockLine(NamedTuple):
    """A line of the block, with its style as `rich` names it."""

    text: str
    style: str = ""


@dataclass(frozen=True)
class RunEnd:
    """A run that has ended in this process.

    Attributes:
        run: its description; None if this process did not record it.
        run_dir: None without one.
        sinks: sinks of the run; the location of the console is not listed.
        status: how it ended.
        resume: the line on how to resume an interrupted run; None for the user's own loop, empty for no line.
        loss: the sentence on records that the journal lacks; empty if it is complete.
        repeated: the sentence on updates that were trained again and not recorded; empty if there are none.
        is_readable: whether records can be read from the journal.
    """

    run: RunInfo | None
    run_dir: Path | None
    sinks: Sequence[Sink] = ()
    status: RunStatus = RunStatus.FINISHED
    resume: str | None = None
    loss: str = ""
    repeated: str = ""
    is_readable: bool = True

    def verdict(self) -> Iterator[EndBlockLine]:
        """Yield the exception that ended the run, or its outcome, and its first incidents."""
        if self.run is None or self.run_dir is None:
            return
        if self.loss:
            described = ": the following lines describe the other records" if self.is_readable else ""
            yield EndBlockLine(f"{capitalized(self.loss)}{described}", "bold red")
        if not self.is_readable:
            return
        if self.repeated:
            yield EndBlockLine(f"{capitalized(self.repeated)}. The following lines describe the recorded updates", "bold")
        try:
            cards = IncidentCards(list(alarms(self.run_dir)), last_outcome(self.run_dir))
            remarks = [event.data for event in events_of(self.run_dir, REMARK) if not event.data.get("quiet")]
            if cards.tone is Tone.GOOD:  # what was measured does no harm, unlike a setting or a mistake in the program
                remarks = [data for data in remarks if not data.get("key")]
        except OSError as error:
            yield EndBlockLine(f"the journal cannot be read: {error}", "bold red")
            return
        if text := cards.sentence():
            yield EndBlockLine(capitalized(text), "bold red" if cards.failure else TONE_COLOURS[cards.tone])
        else:
            yield EndBlockLine(_outcome_of_short_run(self.run_dir))
        for data in remarks[:MAX_REMARKS]:
            yield EndBlockLine(f"update {data['update']}: {data['text']}")
        numbers = sorted({alarm.incident for alarm in cards.raised})
        causes = [cause for number in numbers if (cause := cards.cause(number)) and cause.type != RUN_FAILED]
        if not numbers:
            explained = "no alarm explains it; `diagnose`, below, lists what may" if cards.tone is Tone.WARN else "no alarm was raised"
            yield EndBlockLine("the journal does not contain an alarm" if self.loss else explained)
        elif causes:
            yield EndBlockLine("what went wrong", "bold")
            by_words: dict[str, list[Alarm]] = {}
            for cause in causes:
                by_words.setdefault(without_numbers(alarm_text(cause)), []).append(cause)
            shown = list(by_words.values())[:MAX_INCIDENTS]
            for first, *others in shown:
                yield from _incident(first, cards)
                if others:
                    times = f"{len(others)} more time{'s' * (len(others) > 1)}"
                    yield EndBlockLine(f"    {times}, the last one since update {others[-1].since:,}, {cards.state(others[-1])}")
            if left := len(causes) - sum(map(len, shown)):
                yield EndBlockLine(f"  and {left} later incidents")

    def openings(self) -> Iterator[EndBlockLine]:
        """Yield the locations of the run and its backends, and the commands and addresses that open them."""
        places = list(self._places())
        if self.run_dir is None and not places:
            return
        yield EndBlockLine("where it is", "bold")
        if self.run_dir is not None:
            state = "lacks records" if self.loss else "has every number"
            yield _labelled("run", f"{self.run_dir} (journal.jsonl in it {state if self.is_readable else 'cannot be read'})")
            if (self.run_dir / REPORT_NAME).is_file():
                yield _labelled("report", str(self.run_dir / REPORT_NAME))
        for name, place in places:
            yield _labelled(name, f"{place.where} ({place.note})" if place.note else place.where)
        yield EndBlockLine("open it with", "bold")
        if self.run_dir is not None and self.is_readable:
            has_views = find_spec("textual") is not None and find_spec("plotly") is not None
            for label, command in VIEWS.items():
                if has_views or label not in VIEWS_EXTRA:
                    command = command.format(run=shlex.quote(str(self.run_dir)))
                    yield _labelled(label, f"esper-telemetry {command}", "$ ")
            if not has_views:
                yield _labelled("more", "pip install 'esper-telemetry[views]' adds the commands report, watch and compare")
        for name, place in places:
            if place.command:
                yield _labelled(name, place.command, "$ ")
            width = max((len(page) for page, _ in place.pages), default=0)
            for position, (page, address) in enumerate(place.pages):
                label = "" if place.command or position else name
                yield _labelled(label, f"{page:<{width}}  {address}")
        if self.status in BROKEN_OFF and self.run_dir is not None:
            call = f"resume with: Telemetry(run_dir={str(self.run_dir)!r}, resume=True), and the model of your last checkpoint"
            if line := call if self.resume is None else self.resume:
                yield EndBlockLine(line, "bold")

    def _places(self) -> Iterator[tuple[str, Place]]:
        for sink in self.sinks:
            if self.run is None or not isinstance(sink, SupportsPlace) or isinstance(sink, ConsoleSink):
                continue
            try:
                place = sink.place(self.run)
            except PermanentSinkError:  # neither the run nor the sink has a directory
                continue
            yield type(sink).__name__.removesuffix("Sink").replace("Wandb", "W&B"), place


def _outcome_of_short_run(run_dir: Path) -> str:
    """Return the outcome of a run that is too short for an outcome event in its journal."""
    try:
        run = read_run(run_dir)
    except (OSError, ValueError):  # the disk was full from the first line
        return "outcome not known: the journal cannot be read"
    return capitalized(outcome_of(run.records, run.info.facts, run.status).text)


def _labelled(label: str, text: str, prompt: str = "") -> EndBlockLine:
    return EndBlockLine(f"  {label:<{LABEL_COLUMNS}}{prompt}{text}", "bold" if prompt else "")


def _incident(cause: Alarm, cards: IncidentCards) -> Iterator[EndBlockLine]:
    """Yield the cause of an incident with its state, its sentence and the alarms that came with it."""
    active = {alarm.type for alarm in cards.active.values() if alarm.incident == cause.incident}
    yield EndBlockLine(f"  {cause.type}, since update {cause.since:,}, {cards.state(cause)}", LEVEL_COLOURS[cause.level])
    yield EndBlockLine(f"    {alarm_text(cause)}")
    if others := sorted({alarm.type for alarm in cards.of(cause.incident)} - {cause.type}):
        names = (f"{name} (still active)" if name in active else name for name in others)
        yield EndBlockLine(f"    with it came {', '.join(names)}")


def block_lines(end: RunEnd, run_dirs: Sequence[Path] = ()) -> list[str]:
    """Return the block as plain lines, for a run that is the last of `run_dirs`."""
    count = len(run_dirs)
    earlier = [f"{count} runs, of which this is the last: {', '.join(map(str, run_dirs))}"] if count > 1 else []
    return [masked(line) for line in (*earlier, *(line.text for line in (*end.verdict(), *end.openings())))]


def print_lines(console: Any, lines: Iterable[EndBlockLine]) -> None:
    """Print each line on rich's console as one line, without wrapping."""
    for line in lines:
        console.print(masked(line.text), style=line.style or None)


def print_end(end: RunEnd) -> None:
    """Print the block on stdout if the run has a console sink; print nothing while the terminal is blocked."""
    if end.run is None or not any(isinstance(sink, ConsoleSink) for sink in end.sinks):
        return
    console = make_console(markup=False, highlight=False, soft_wrap=True)
    if takes_output(console):
        print_lines(console, [*end.verdict(), *end.openings()])
