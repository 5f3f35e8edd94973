"""Sinks: their three methods, the optional members, and the errors that they raise.

Delivery finds an optional member by `isinstance` with its `Supports...` protocol, so a user's sink need not inherit from anything.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple, Protocol, runtime_checkable

from esper_telemetry.core.messages import did_you_mean
from esper_telemetry.core.record import Alarm, Record, RunInfo, RunStatus
from esper_telemetry.core.redaction import MASKED_LOG, masked
from esper_telemetry.journal.lines import JournalEvent

logger = logging.getLogger("esper_telemetry.sinks")
logger.addFilter(MASKED_LOG)


@runtime_checkable
class Sink(Protocol):
    """A backend. `open` is called first and once, then `write` any number of times, then `close`, never concurrently.

    A call that raises is repeated later, with the same records or some of them, so `write` must take all of them or raise. After OSError,
    and any exception not named here, it is called again after a pause. After ValueError or TypeError, delivery searches for the refused
    record (`PoisonRecordError`). PermanentSinkError disables the sink. A sink may implement any of the `Supports...` protocols below; most
    have `in_process` and `name`. `close` may be called twice, or without `open`; `open` may be repeated after a failure. A classmethod
    `from_uri` (`sinks.registry.SupportsFromUri`) parses the sink's URI.
    """

    def open(self, run: RunInfo) -> None:
        """Connect, for a new run or a resumed one."""

    def write(self, records: Sequence[Record]) -> None:
        """Deliver all records, or raise."""

    def close(self, status: RunStatus) -> None:
        """Deliver buffered records and end the run in the backend."""


@runtime_checkable
class SupportsName(Protocol):
    """A sink with its own identity, under which its cursor is stored; other sinks use the class's name. It must not contain secrets."""

    name: str


@runtime_checkable
class SupportsUri(Protocol):
    """A sink with its spelling on the command line; other sinks use the name. Empty for a sink without a spelling."""

    uri: str


@runtime_checkable
class SupportsProcessChoice(Protocol):
    """A sink that says whether it runs in the training process (`in_process`, True by default) or in the sink process."""

    in_process: bool


@runtime_checkable
class SupportsInline(Protocol):
    """A sink in the training process that the training thread calls between two updates, if `inline` is True.

    Its calls must return at once, even if its terminal or file blocks. Other sinks have a separate thread, which has a cost: with a
    second thread, the locks of the C library take an atomic instruction each, in every tensor operation.
    """

    inline: bool


@runtime_checkable
class SupportsAlarms(Protocol):
    """A sink that takes alarms. A callable sink gets only records."""

    def alarm(self, alarm: Alarm) -> None:
        """Deliver an alarm that is raised, gets worse or ends, after the record that shows it and before the next one.

        A call that raises is repeated, and no record is sent meanwhile.
        """


@runtime_checkable
class SupportsOutcome(Protocol):
    """A sink that shows the outcome of the run."""

    def outcome(self, event: JournalEvent) -> None:
        """Deliver the outcome of the run when it changes and at the end; its data has `outcome`, `text` and the numbers that decided it.

        It follows the record that shows it and precedes the next one. A call that raises is repeated, as for an alarm.
        """


@runtime_checkable
class SupportsRecall(Protocol):
    """A sink that must know earlier alarms after a restart."""

    def recall(self, alarms: Sequence[Alarm]) -> None:
        """Receive the alarms that were delivered before; called after `open`, if there are any."""


@runtime_checkable
class SupportsChildPreparation(Protocol):
    """A sink that sets up its client for a process without the user's own objects, such as the sink process."""

    def prepare_child(self) -> None:
        """Set up the client; called once before `open`, and only in such a process."""


@runtime_checkable
class SupportsClientImport(Protocol):
    """A sink whose client takes long to import, or starts threads."""

    def import_client(self) -> None:
        """Import the client; called before `open`, for one sink after the other and before any delivery has a thread.

        Packages that several threads import at once are left half initialised. ModuleNotFoundError disables the sink; after any other
        exception a fresh process tries again, at most three times.
        """


@runtime_checkable
class SupportsHeldUpdate(Protocol):
    """A sink whose backend can be asked for the last update that it holds."""

    def held(self, run: RunInfo) -> int | None:
        """Return the last update of this run that the backend holds, 0 for none; called after `open`.

        Records up to it are skipped and all later ones sent, regardless of the cursor. None follows the cursor.
        """


@runtime_checkable
class SupportsAudit(Protocol):
    """A sink whose backend can be read back, without `open`: `doctor` compares it with the journal."""

    def stored(self, run: RunInfo) -> StoredMetrics | None:
        """Return the numbers that the backend holds of the run; None if it cannot be read."""

    def shown(self, run: RunInfo) -> Shown:
        """Return a function that maps a record to the numbers that the backend should hold."""


@runtime_checkable
class SupportsForwardOnly(Protocol):
    """A sink whose backend cannot draw points before a later point, if `only_forward` is True.

    Missing records are sent together with everything after them, and `write` restarts there.
    """

    only_forward: bool


@runtime_checkable
class SupportsPlace(Protocol):
    """A sink that says where the run is."""

    def place(self, run: RunInfo) -> Place:
        """Return where the backend keeps the run, and the command that shows it."""


def sink_name(sink: Sink) -> str:
    """Return the identity of a sink: its `name`, or its class's."""
    return masked(str((sink.name if isinstance(sink, SupportsName) else "") or type(sink).__name__))


def sink_uri(sink: Sink) -> str:
    """Return how a sink is spelled on the command line: its `uri`, else its name."""
    return masked(str(sink.uri)) if isinstance(sink, SupportsUri) else sink_name(sink)


def runs_in_process(sink: Sink) -> bool:
    """Return whether a sink runs in the training process."""
    return sink.in_process if isinstance(sink, SupportsProcessChoice) else True


class PermanentSinkError(Exception):
    """Another attempt cannot help: the sink is disabled for the rest of the run, with this message."""


class PoisonRecordError(ValueError):
    """The backend permanently refuses one of the records. It goes to `dead_letter.jsonl`, and the others are sent.

    Raise it if you know which record; after any other ValueError or TypeError, delivery searches for the record.

    Attributes:
        index: position of the record in this `write`; None if the backend does not say.
    """

    def __init__(self, message: str, index: int | None = None) -> None:
        super().__init__(message)
        self.index = index


class DeadClientError(PermanentSinkError):
    """The backend's client cannot recover in this process; a fresh process can continue."""


class Place(NamedTuple):
    """The place at which a backend keeps a run, and how to see it there.

    Attributes:
        where: a path, an address or a sentence.
        command: command that shows the run, or sends it to a place that shows it; may be empty.
        pages: names and addresses of pages, once the command runs.
        note: a sentence on why the run is there, if people may ask.
    """

    where: str
    command: str
    pages: tuple[tuple[str, str], ...] = ()
    note: str = ""


def require_package(package: str, sink: str) -> None:
    """Raise ModuleNotFoundError with the install command unless the package is installed; imports nothing."""
    if find_spec(package) is None:
        extras = {"prometheus_client": "prometheus", "wandb_workspaces": "wandb", "plotly": "views"}
        extra = extras.get(package, package)
        raise ModuleNotFoundError(f"{sink} needs {package.replace('_', '-')}: pip install 'esper-telemetry[{extra}]'", name=package)


def require_run_dir(run: RunInfo, sink: str, setting: str) -> Path:
    """Return the run's directory, absolute; without one, raise PermanentSinkError naming the setting to give."""
    if run.run_dir is None:
        raise PermanentSinkError(f"{sink} cannot be written, because run {run.name!r} is without a run directory: give it {setting}")
    return Path(run.run_dir).absolute()


def check_options(sink: str, options: Mapping[str, str], names: Sequence[str] = ()) -> None:
    """Raise ValueError naming the first option of a sink URI that the sink does not have."""
    for option in options:
        if option not in names:
            choice = f"it knows {', '.join(names)}" if names else "it takes none"
            raise ValueError(f"sink {sink} has no option {option!r}: {choice}{did_you_mean(option, names)}")


class OpenedSink:
    """A sink that passes calls on to the run that `open` has opened, and does nothing about alarms without one."""

    _open: Any

    def _classified(self) -> AbstractContextManager[None]:
        """Return the context of calls, which may turn a client's exceptions into a sink's."""
        return nullcontext()

    def write(self, records: Sequence[Record]) -> None:
        """Write the records; raises ValueError before `open`."""
        if self._open is None:
            raise ValueError(f"{type(self).__name__}.write needs open first")
        with self._classified():
            self._open.write(records)

    def alarm(self, alarm: Alarm) -> None:
        """Add an event of an alarm."""
        self._show(alarm)

    def outcome(self, event: JournalEvent) -> None:
        """Show the outcome so far."""
        self._show(event)

    def _show(self, event: Alarm | JournalEvent) -> None:
        """Pass the event on with the verdict after it, which the run keeps unless it raises, because delivery then repeats the event."""
        if self._open is not None:
            with self._classified():
                cards = self._open.incidents.after(event)
                self._open.show(event, cards)
                self._open.incidents = cards

    def recall(self, alarms: Sequence[Alarm]) -> None:
        """Add the alarms of earlier parts of the run, whose incidents may continue."""
        if self._open is not None:
            self._open.incidents.add(*alarms)

    def close(self, status: RunStatus) -> None:
        """End the run; harmless when repeated."""
        if self._open is not None:
            self._open.close(status)
            self._open = None


@dataclass(frozen=True)
class FunctionSink:
    """Any callable as a sink: `function(record)` is called for each record, in order."""

    function: Callable[[Record], object]

    in_process: ClassVar[bool] = True
    uri: ClassVar[str] = ""
    """A function has no spelling on the command line."""

    @property
    def name(self) -> str:
        """`function:` and the callable's own name."""
        return f"function:{getattr(self.function, '__qualname__', type(self.function).__name__)}"

    def open(self, run: RunInfo) -> None:
        """Do nothing."""

    def write(self, records: Sequence[Record]) -> None:
        """Call the function; delivery handles its exceptions."""
        for record in records:
            self.function(record)

    def close(self, status: RunStatus) -> None:
        """Do nothing."""


Shown = Callable[[Record], Mapping[str, float]]
"""Maps a record to the numbers that the backend should hold, with the precision that it stores; called once per record, in order."""


OVERVIEW_FAMILY: Final = "0_overview"
OVERVIEW: Final = f"{OVERVIEW_FAMILY}/"
"""First part of the names under which backends repeat the headline values; it sorts first in alphabetical lists and charts."""


@dataclass(slots=True)
class StoredMetrics:
    """The numbers of a run read back from a backend, without the overview, which repeats other numbers.

    Attributes:
        rows: the numbers of each update, by key; a histogram is the sum of its counts.
        repeated: how many numbers the backend has more than once for the same update, by key.
        ended: whether the backend shows the run as ended; None if it does not say.
    """

    rows: dict[int, dict[str, float]] = field(default_factory=dict)
    repeated: Counter[str] = field(default_factory=Counter)
    ended: bool | None = None

    def add(self, update: int, key: str, value: float) -> None:
        """Add one number of the backend; the first one for an update counts."""
        row = self.rows.setdefault(update, {})
        if key in row:
            self.repeated[key] += 1
        elif not key.startswith(OVERVIEW):
            row[key] = value

    def add_row(self, update: int, numbers: Mapping[str, float]) -> None:
        """Add numbers of one update."""
        if update in self.rows:
            for key, value in numbers.items():
                self.add(update, key, value)
        else:
            self.rows[update] = {key: value for key, value in numbers.items() if not key.startswith(OVERVIEW)}


Stored = StoredMetrics
"""The name of `StoredMetrics` in earlier releases."""
