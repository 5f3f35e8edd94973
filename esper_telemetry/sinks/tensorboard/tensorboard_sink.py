"""TensorBoard: one event with all values per record, in a separate event file.

One event with many values takes a twelfth of the time and a third of the bytes of one event per value. The file is written through
TensorBoard's `EventFileWriter`, without torch.
"""

from __future__ import annotations

import shlex
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np

from esper_telemetry.core.record import Alarm, Record, RunInfo, RunStatus
from esper_telemetry.journal.lines import JournalEvent
from esper_telemetry.sinks.layout import ALARM_FAMILY, UPDATE, KeyBudget, by_tag, counts_by_tag, family_of, overview_names, sections
from esper_telemetry.sinks.pages import IncidentCards, run_readme
from esper_telemetry.sinks.sink_protocol import OpenedSink, Place, Shown, StoredMetrics, check_options, require_package, require_run_dir

SUFFIX: Final = ".esper"
VERDICT_TAG: Final = "0_verdict"
"""Tag of the pages with the outcome and the incidents."""
ADDRESS: Final = "http://localhost:6006"
PAGES: Final = (
    ("overview", f"{ADDRESS}/?smoothing=0#timeseries"),
    ("charts by question", f"{ADDRESS}/#custom_scalars&_smoothingWeight=0"),
    ("verdict", f"{ADDRESS}/#text"),
)
"""Addresses of TensorBoard's pages, without smoothing, which would draw alarms and jumps as slopes."""
GRADIENT_STEP: Final = "axis/gradient_step"
AXES: Final = {UPDATE, GRADIENT_STEP}
FINAL_STATUSES: Final = {RunStatus.FINISHED, RunStatus.FAILED}
"""Statuses that are written into the table of runs. It keeps the first status, and runs with another status may be resumed."""

MAX_OUTCOMES: Final = 8
"""Number of outcomes next to the settings in the table that compares runs."""


@dataclass
class TensorBoardSink(OpenedSink):
    """Writes the run as TensorBoard event files; x is the environment step.

    If the directory holds event files of other writers, the dashboard layout and the table of settings are left as they are.

    Attributes:
        directory: folder of the event file; `RUN_DIR/tensorboard` by default.
        max_keys: maximum number of tags.
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
        """Return the sink of `tensorboard[:DIR]`."""
        check_options("tensorboard", options)
        return cls(rest or None)

    @property
    def name(self) -> str:
        """`tensorboard`, and the directory if one was given."""
        return f"tensorboard:{self.directory}" if self.directory else "tensorboard"

    def place(self, run: RunInfo) -> Place:
        """Return the directory, the command that shows it, and the addresses of its pages."""
        directory = self._directory(run)
        shown = directory if self.directory else directory.parent  # TensorBoard names a run in the directory itself "."
        return Place(str(directory), f"tensorboard --logdir {shlex.quote(str(shown))}", PAGES)

    def stored(self, run: RunInfo) -> StoredMetrics:
        """Return the numbers in this sink's event files; several runs in one directory are treated as parts of one."""
        return _stored_in(self._directory(run))

    def shown(self, run: RunInfo) -> Shown:
        """Return a function that maps a record to the numbers that the files should hold."""
        budget = self._budget(run, quiet=True)

        def numbers(record: Record) -> dict[str, float]:
            selected = budget.select(record)
            scalars = _scalars(selected)
            with np.errstate(over="ignore"):  # larger numbers are infinite in the file, too
                singles = np.array([*scalars.values()], np.float64).astype(np.float32).tolist()
            return {**dict(zip(scalars, singles, strict=True)), **counts_by_tag(selected)}

        return numbers

    def import_client(self) -> None:
        """Import TensorBoard's writer and its messages."""
        import tensorboard.summary.writer.event_file_writer  # noqa: F401 - for its effect

        import esper_telemetry.sinks.tensorboard.event_encoding  # noqa: F401

    def open(self, run: RunInfo) -> None:
        """Start a new event file, next to the files of earlier parts of the run."""
        self._open = _EventFile(self._directory(run), run, self._budget(run))

    def _directory(self, run: RunInfo) -> Path:
        if self.directory is not None:
            return Path(self.directory)
        return require_run_dir(run, "TensorBoardSink", "directory=") / "tensorboard"

    def _budget(self, run: RunInfo, *, quiet: bool = False) -> KeyBudget:
        return KeyBudget(run, "TensorBoard", max_keys=self.max_keys, details=self.details, quiet=quiet)


class _EventFile:
    def __init__(self, directory: Path, run: RunInfo, budget: KeyBudget) -> None:
        from esper_telemetry.sinks.tensorboard import event_encoding

        self.events: Any = event_encoding
        self.directory = directory
        self.run = run
        self.budget = budget
        self.tags: set[str] = set()
        self.overview = overview_names(run)
        self.incidents = IncidentCards()
        self.writer: Any = None
        self.shared = self.restarts = False
        self._start()

    def write(self, records: Sequence[Record]) -> None:
        with self._appending():
            if records and self.restarts:
                self.writer.add_event(self.events.restart(records[0].axes))
                self.restarts = False
            for record in records:
                self._append(self.budget.select(record))
            self.writer.flush()

    def show(self, event: Alarm | JournalEvent, cards: IncidentCards) -> None:
        """Append the verdict with an alarm or an outcome; a viewer keeps one text per tag and step."""
        if event.axes is not None:
            with self._appending():
                self.writer.add_event(self.events.event(event.axes, [self.events.markdown(VERDICT_TAG, cards.page())]))
                self.writer.flush()

    def close(self, status: RunStatus) -> None:
        if self.writer is None:
            return
        if not self.shared and status in FINAL_STATUSES:
            self.writer.add_event(self.events.note(time.time(), self.events.session_end(status, time.time())))
        self.writer.close()

    @contextmanager
    def _appending(self) -> Iterator[None]:
        if self.writer is None:
            self._start()
        try:
            yield
        except OSError:
            self.writer = None  # the writer's thread has ended; the next attempt starts a new file
            raise

    def _start(self) -> None:
        """Start a file with the description of the run."""
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        earlier = [path.name for path in self.directory.glob("*tfevents*")]
        self.shared = not all(name.endswith(SUFFIX) for name in earlier)
        self.restarts = bool(earlier) and not self.shared
        if self.restarts:  # files are read in the order of their names, which contain the second of their creation
            second = int(max(earlier).split(".")[3])
            time.sleep(min(1.0, max(0.0, second + 1 - time.time())))
        self.tags.clear()
        self.writer = EventFileWriter(str(self.directory), filename_suffix=SUFFIX)
        pages = [self.events.markdown("run", run_readme(self.run))]
        if not self.shared:
            pages += [self.events.session_start(self.run), self.events.experiment(self.run, outcomes(self.run))]
        for page in pages:
            self.writer.add_event(self.events.note(self.run.started, page))
        self.writer.flush()

    def _append(self, record: Record) -> None:
        values = []
        has_new_tag = False
        for key, number in _scalars(record).items():
            for tag in (key, self.overview.get(key)):
                info = None
                if tag is not None and tag not in self.tags:  # the first value of a tag carries its description
                    self.tags.add(tag)
                    has_new_tag, info = True, self.events.scalar_info(tag, self.run.describe(key))
                if tag is not None:
                    values.append(self.events.scalar(tag, number, info))
        values += [self.events.histogram(tag, histogram) for tag, histogram in by_tag(record).items()]
        self.writer.add_event(self.events.event(record.axes, values))
        if has_new_tag and not self.shared:
            keys = self.tags - AXES - set(self.overview.values())
            # TensorBoard draws all lines of a run in one colour, so that alarms in one chart would look the same.
            dashboard = self.events.layout(sections(keys, self.run, apart=(ALARM_FAMILY,)))
            self.writer.add_event(self.events.event(record.axes, [dashboard]))


def outcomes(run: RunInfo) -> list[str]:
    """Return the tags of the table that compares runs: the first two of the leading families, alarms last."""

    def precedence(key: str) -> tuple[bool, int, bool, int]:
        family, headline = family_of(key), run.metrics[key].headline
        return family.name == ALARM_FAMILY, family.place, not headline, headline

    leading = [key for key, info in run.metrics.items() if "{" not in key and (info.headline or info.level == "minimal")]
    chosen: dict[str, list[str]] = {}
    for key in sorted(leading, key=precedence):
        chosen.setdefault(family_of(key).name, []).append(key)
    return [key for keys in chosen.values() for key in keys[:2]][:MAX_OUTCOMES]


def _scalars(record: Record) -> dict[str, float]:
    """Return the values, and the axes for which TensorBoard has no field."""
    return {**record.values, UPDATE: record.axes.update, GRADIENT_STEP: record.axes.gradient_step}


MAX_EVENT_BYTES: Final = 1 << 28
"""Largest event that is read: protocol buffers end at 2 GB, and a damaged file may name any size."""


def _stored_in(directory: Path) -> StoredMetrics:
    """Return the numbers in all event files of this sink as TensorBoard shows them: a restart discards points at or after its step."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    rows: dict[int, list[tuple[int, dict[str, float]]]] = {}
    for path in sorted(directory.glob(f"*tfevents*{SUFFIX}")):
        for event in map(Event.FromString, _frames(path)):
            if event.HasField("session_log") and event.session_log.status == SessionLog.START:
                rows = {update: [row for row in parts if row[0] < event.step] for update, parts in rows.items()}
            numbers = dict(_numbers_of(event.summary))
            if UPDATE in numbers:
                rows.setdefault(int(numbers[UPDATE]), []).append((event.step, numbers))
    stored = StoredMetrics()
    for update in [*rows]:
        for _, numbers in rows.pop(update):  # 100,000 rows take a gigabyte
            stored.add_row(update, numbers)
    return stored


def _numbers_of(summary: Any) -> Iterator[tuple[str, float]]:
    for value in summary.value:
        match value.WhichOneof("value"):
            case "simple_value":
                yield value.tag, value.simple_value
            case "histo":
                yield value.tag, value.histo.num


def _frames(path: Path) -> Iterator[bytes]:
    """Yield the events of a file up to a torn one. TensorBoard's loader, in Python, takes 0.5 ms for the checksum of each."""
    with path.open("rb") as file:
        while len(head := file.read(12)) == 12:
            data = file.read(min(struct.unpack("<Q4x", head)[0], MAX_EVENT_BYTES))
            if len(file.read(4)) < 4:
                return
            yield data
