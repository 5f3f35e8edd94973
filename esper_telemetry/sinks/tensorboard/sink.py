"""TensorBoard: one event with all values per record, straight into an event file of our own."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from esper_telemetry.core.record import Alarm, Histogram, Record, RunInfo, RunStatus
from esper_telemetry.sinks.budget import KeyBudget
from esper_telemetry.sinks.histogram import by_tag
from esper_telemetry.sinks.incidents import IncidentCards
from esper_telemetry.sinks.layout import family_name, importance, sections
from esper_telemetry.sinks.protocol import Place, Shown, StoredMetrics, check_options, require_package, require_run_dir
from esper_telemetry.sinks.readme import run_readme
from esper_telemetry.sinks.tensorboard.stored import single, stored_in

SUFFIX = ".esper"
ALARMS = "alarms"
"""The tag of the pages that say what went wrong."""
UPDATE, GRADIENT_STEP = "axis/update", "axis/gradient_step"
AXES = {UPDATE, GRADIENT_STEP}
ENDS = {RunStatus.FINISHED, RunStatus.FAILED}
"""Ends that the table of runs is told of: it keeps the first it hears, and the other kinds of runs are there to go on."""

OUTCOMES = 8
"""How many outcomes stand beside the settings in the table that compares runs."""


@dataclass(frozen=True)
class TensorBoardSink:
    """Writes the run as TensorBoard event files; x is the environment step.

    A directory that somebody else writes to as well is fine: ours is a file of its own, and the dashboard layout and
    the table of settings are then left as they are.

    Attributes:
        directory: where the event file goes; `RUN_DIR/tensorboard` when not given.
        max_keys: how many tags at most.
        details: also show the numbers of single layers and the histories of other keys.
    """

    directory: str | Path | None = None
    max_keys: int = 300
    details: bool = False
    _open: _EventFile | None = field(default=None, init=False, repr=False, compare=False)

    in_process: ClassVar[bool] = False
    only_forward: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_package("tensorboard", "TensorBoardSink")
        if "://" in str(self.directory) or (self.directory is not None and Path(self.directory).is_file()):
            raise ValueError(f"TensorBoardSink writes into a directory of this machine, got {str(self.directory)!r}")

    @classmethod
    def from_uri(cls, rest: str, options: Mapping[str, str]) -> TensorBoardSink:
        """`tensorboard[:DIR]`."""
        check_options("tensorboard", options)
        return cls(rest or None)

    @property
    def name(self) -> str:
        """`tensorboard`, and the directory where one was given."""
        return f"tensorboard:{self.directory}" if self.directory else "tensorboard"

    def place(self, run: RunInfo) -> Place:
        """The directory, and the command that shows it."""
        directory = self._directory(run)
        return Place(str(directory), f"tensorboard --logdir {shlex.quote(str(directory))}")

    def stored(self, run: RunInfo) -> StoredMetrics:
        """What the event files of ours hold; several runs in one directory are taken for parts of one."""
        return stored_in(self._directory(run), SUFFIX)

    def shown(self, run: RunInfo) -> Shown:
        """What they should hold of a record."""
        budget = KeyBudget(run, "TensorBoard", max_keys=self.max_keys, details=self.details, quiet=True)

        def numbers(record: Record) -> dict[str, float]:
            selected = budget.select(record)
            counts = {tag: sum(histogram.counts) for tag, histogram in by_tag(selected).items()}
            return {key: single(value) for key, value in _numbers(selected).items()} | counts

        return numbers

    def import_client(self) -> None:
        """Imports TensorBoard's writer and its messages."""
        import tensorboard.summary.writer.event_file_writer  # noqa: F401 - for its effect

        import esper_telemetry.sinks.tensorboard.events  # noqa: F401

    def open(self, run: RunInfo) -> None:
        """Starts a new event file, beside those of earlier parts of the run."""
        object.__setattr__(self, "_open", _EventFile(self._directory(run), run, self._budget(run)))

    def write(self, records: Sequence[Record]) -> None:
        """Appends one event per record; on disk when it returns."""
        if self._open is None:
            raise ValueError("TensorBoardSink.write needs open first")
        self._open.write(records)

    def alarm(self, alarm: Alarm) -> None:
        """Appends a page about its incident as it is known by then, among the texts; on disk when it returns."""
        if self._open is not None:
            self._open.alarm(alarm)

    def recall(self, alarms: Sequence[Alarm]) -> None:
        """Knows the alarms of earlier parts of the run, whose incidents may go on."""
        if self._open is not None:
            self._open.incidents.add(*alarms)

    def close(self, status: RunStatus) -> None:
        """Marks the end and closes the file."""
        if self._open is not None:
            self._open.close(status)
            object.__setattr__(self, "_open", None)

    def _directory(self, run: RunInfo) -> Path:
        if self.directory is not None:
            return Path(self.directory)
        return require_run_dir(run, "TensorBoardSink", "directory=") / "tensorboard"

    def _budget(self, run: RunInfo) -> KeyBudget:
        return KeyBudget(run, "TensorBoard", max_keys=self.max_keys, details=self.details)


class _EventFile:
    """The event file of a run that is open."""

    def __init__(self, directory: Path, run: RunInfo, budget: KeyBudget) -> None:
        from esper_telemetry.sinks.tensorboard import events as tensorboard_events

        self.events: Any = tensorboard_events
        self.directory = directory
        self.run = run
        self.budget = budget
        self.tags: set[str] = set()
        self.incidents = IncidentCards()
        self.writer: Any = None
        self._start()

    def write(self, records: Sequence[Record]) -> None:
        with self._appending():
            self._append(records)

    def alarm(self, alarm: Alarm) -> None:
        """A viewer keeps one text per tag and step, so a page holds the whole incident, after the exception that ended the run."""
        known = IncidentCards([*self.incidents.alarms, alarm])
        with self._appending():
            text = "\n\n".join([*known.headline(), known.incident(alarm.incident)])
            page = self.events.markdown(ALARMS, text)
            self.writer.add_event(self.events.event(alarm.axes, [page]))
            self.writer.flush()
        self.incidents.add(alarm)

    @contextmanager
    def _appending(self) -> Iterator[None]:
        if self.writer is None:
            self._start()
        try:
            yield
        except OSError:
            self.writer = None  # its thread is dead and stays dead; the next attempt starts a new file
            raise

    def close(self, status: RunStatus) -> None:
        if self.writer is None:
            return
        if not self.shared and status in ENDS:
            self.writer.add_event(self.events.note(time.time(), self.events.session_end(status, time.time())))
        self.writer.close()

    def _start(self) -> None:
        """Starts a file and writes what the run is into it."""
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        earlier = [path.name for path in self.directory.glob("*tfevents*")]
        self.shared = not all(name.endswith(SUFFIX) for name in earlier)
        self.resumes = bool(earlier) and not self.shared
        if self.resumes:
            wait_for_a_later_name(max(earlier))
        self.tags.clear()
        self.writer = EventFileWriter(str(self.directory), filename_suffix=SUFFIX)
        self._describe_run()

    def _describe_run(self) -> None:
        pages = [self.events.markdown("run", run_readme(self.run))]
        if not self.shared:
            pages += [self.events.session_start(self.run), self.events.experiment(self.run, outcomes(self.run))]
        for page in pages:
            self.writer.add_event(self.events.note(self.run.started, page))
        self.writer.flush()

    def _append(self, records: Sequence[Record]) -> None:
        if records and self.resumes:
            self.writer.add_event(self.events.restart(records[0].axes))
            self.resumes = False
        for record in records:
            self._append_record(self.budget.select(record))
        self.writer.flush()

    def _append_record(self, record: Record) -> None:
        known = len(self.tags)
        values = [self._scalar(tag, number) for tag, number in _numbers(record).items()]
        values += [self._histogram(tag, counted) for tag, counted in by_tag(record).items()]
        self.writer.add_event(self.events.event(record.axes, values))
        if len(self.tags) > known and not self.shared:
            dashboard = self.events.layout(sections(self.tags - AXES, self.run))
            self.writer.add_event(self.events.event(record.axes, [dashboard]))

    def _scalar(self, tag: str, number: float) -> Any:
        """A value; the first of its tag carries the description."""
        if tag in self.tags:
            return self.events.scalar(tag, number)
        self.tags.add(tag)
        return self.events.scalar(tag, number, self.events.scalar_info(tag, self.run.describe(tag)))

    def _histogram(self, tag: str, counted: Histogram) -> Any:
        return self.events.histogram(tag, counted)


def wait_for_a_later_name(latest: str) -> None:
    """Sleeps until the second in the name of the latest event file is over: files are read in the order of their names."""
    second = int(latest.split(".")[3])
    time.sleep(min(1.0, max(0.0, second + 1 - time.time())))


def outcomes(run: RunInfo) -> list[str]:
    """The tags that stand for the result where runs are compared: the first two of the leading families, alarms last."""
    leading = [
        key for key, info in run.metrics.items() if "{" not in key and (info.headline or info.level == "minimal")
    ]
    chosen: dict[str, list[str]] = {}
    for key in sorted(leading, key=partial(_precedence, run)):
        chosen.setdefault(family_name(key), []).append(key)
    return [key for keys in chosen.values() for key in keys[:2]][:OUTCOMES]


def _precedence(run: RunInfo, key: str) -> tuple[bool, int, bool, int]:
    """Alarms last, families by importance, and in each headlines in their order before others."""
    headline = run.metrics[key].headline
    return family_name(key) == "alarm", importance(key), not headline, headline


def _numbers(record: Record) -> dict[str, float]:
    """The values, and the axes that are not TensorBoard's own."""
    axes = {UPDATE: record.axes.update, GRADIENT_STEP: record.axes.gradient_step}
    return {**record.values, **axes}
