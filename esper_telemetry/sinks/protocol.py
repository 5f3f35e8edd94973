"""Sinks: the three methods that each has, the optional members that some have, and the errors that they raise.

Delivery finds an optional member by `isinstance` with its `Supports...` protocol, so a user's sink needs to inherit nothing.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar, Final, NamedTuple, Protocol, runtime_checkable

from esper_telemetry.core.messages import did_you_mean
from esper_telemetry.core.record import Alarm, Record, RunInfo, RunStatus
from esper_telemetry.core.redaction import MASKED_LOG, masked
from esper_telemetry.journal.lines import JournalEvent

logger = logging.getLogger("esper_telemetry.sinks")
logger.addFilter(MASKED_LOG)


@runtime_checkable
class Sink(Protocol):
    """A backend: `open` comes first and once, then any number of `write`, then `close`, in order and never at the same time.

    A call that raises is repeated later, with the same records or with some of them, so `write` takes all of them or raises. The exception
    says what to do: OSError (and whatever else is not named here) tries again after a while, ValueError and TypeError search for the one
    record that is refused (`PoisonRecordError`), PermanentSinkError disables the sink. A sink may have members of the `Supports...`
    protocols below, each by itself; `in_process` and `name` are the ones that most sinks have. `close` may come twice, or without
    `open`; `open` may be repeated after a failure. A classmethod `from_uri` (`sinks.registry.SupportsFromUri`) reads the sink's URI.
    """

    def open(self, run: RunInfo) -> None:
        """Connect, for a new run or one that goes on after a restart."""

    def write(self, records: Sequence[Record]) -> None:
        """Deliver all records, or raise."""

    def close(self, status: RunStatus) -> None:
        """Deliver what is buffered and end the run in the backend."""


@runtime_checkable
class SupportsName(Protocol):
    """A sink with an identity of its own, under which cursors are kept; the class's name without it. No secrets."""

    name: str


@runtime_checkable
class SupportsUri(Protocol):
    """A sink that says how it is spelled on the command line; its name without it. Empty for one that has no spelling."""

    uri: str


@runtime_checkable
class SupportsProcessChoice(Protocol):
    """A sink that says whether it runs in the training process (`in_process`, True without it) or in the sink process."""

    in_process: bool


@runtime_checkable
class SupportsInline(Protocol):
    """A sink in the training process that the training thread calls between two updates, where `inline` is True.

    Its calls must return at once, whatever the terminal or file behind it does. Without it, a sink has a thread of its own: in a process
    with a second thread the locks of the C library take an atomic instruction each, in every tensor operation.
    """

    inline: bool


@runtime_checkable
class SupportsAlarms(Protocol):
    """A sink that takes alarms. A callable sink gets records only."""

    def alarm(self, alarm: Alarm) -> None:
        """Deliver an alarm that is raised, gets worse or is over: after the record that shows it and before the next.

        One that raises is repeated, and no record goes by meanwhile.
        """


@runtime_checkable
class SupportsOutcome(Protocol):
    """A sink that shows what the run does."""

    def outcome(self, event: JournalEvent) -> None:
        """Deliver the outcome of the run, when it changes and at the end; its data has `outcome`, `text` and the numbers that decided.

        It comes after the record that shows it and before the next. One that raises is repeated, as an alarm is.
        """


@runtime_checkable
class SupportsRecall(Protocol):
    """A sink that must know earlier alarms after a restart."""

    def recall(self, alarms: Sequence[Alarm]) -> None:
        """Take the alarms that were delivered before; called after `open`, where there are any."""


@runtime_checkable
class SupportsChildPreparation(Protocol):
    """A sink that sets up its client for a process that holds nothing of the user's, such as the sink process."""

    def prepare_child(self) -> None:
        """Set up the client; called once before `open`, and only in such a process."""


@runtime_checkable
class SupportsClientImport(Protocol):
    """A sink whose client takes long to import, or starts threads."""

    def import_client(self) -> None:
        """Import the client; called before `open`, for one sink after the other and before any delivery has a thread.

        Packages that several threads import at once are left half initialised. ModuleNotFoundError disables the sink; after any other
        exception a fresh process tries again, three times at most.
        """


@runtime_checkable
class SupportsHeldUpdate(Protocol):
    """A sink whose backend can be asked for the last update that it holds."""

    def held(self, run: RunInfo) -> int | None:
        """Return the last update that the backend holds of this run, 0 for none; called after `open`.

        Records up to it are passed over and all after it are sent, whatever the cursor says. None leaves it at the cursor.
        """


@runtime_checkable
class SupportsAudit(Protocol):
    """A sink whose backend can be read back, without `open`: `doctor` compares it with the journal."""

    def stored(self, run: RunInfo) -> StoredMetrics | None:
        """Return the numbers that the backend holds of the run; None where it cannot be read."""

    def shown(self, run: RunInfo) -> Shown:
        """Return a function that gives the numbers that the backend should hold of a record."""


@runtime_checkable
class SupportsForwardOnly(Protocol):
    """A sink whose backend draws nothing behind a later point, where `only_forward` is True.

    What it lacks is sent together with everything after it, and `write` restarts there.
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
    """The backend refuses one of the records, and would refuse it for ever: it goes to `dead_letter.jsonl`, and the others are sent.

    Raise it where you know which one; after any ValueError or TypeError delivery searches for the record.

    Attributes:
        index: position of the record in this `write`; None where the backend does not say.
    """

    def __init__(self, message: str, index: int | None = None) -> None:
        super().__init__(message)
        self.index = index


class DeadClientError(PermanentSinkError):
    """The backend's client is beyond repair in this process; a fresh process can go on."""


class Place(NamedTuple):
    """The place at which a backend keeps a run, and how to see it there.

    Attributes:
        where: a path, an address or a sentence.
        command: shows the run, or sends it to where it is shown; empty where nothing is to be done.
        pages: names and addresses of pages, once the command runs.
        note: a sentence on why the run is there, where people ask.
    """

    where: str
    command: str
    pages: tuple[tuple[str, str], ...] = ()
    note: str = ""


def require_package(package: str, sink: str) -> None:
    """Raise ModuleNotFoundError with the install command unless the package is there; imports nothing."""
    if find_spec(package) is None:
        extras = {"prometheus_client": "prometheus", "wandb_workspaces": "wandb", "plotly": "views"}
        extra = extras.get(package, package)
        raise ModuleNotFoundError(
            f"{sink} needs {package.replace('_', '-')}: pip install 'esper-telemetry[{extra}]'", name=package
        )


def require_run_dir(run: RunInfo, sink: str, setting: str) -> Path:
    """Return the run's directory, absolute; raises PermanentSinkError naming the setting to give where the run has none."""
    if run.run_dir is None:
        raise PermanentSinkError(
            f"{sink} has nowhere to write, as run {run.name!r} has no run directory: give it {setting}"
        )
    return Path(run.run_dir).absolute()


def check_options(sink: str, options: Mapping[str, str], names: Sequence[str] = ()) -> None:
    """Raise ValueError naming the first option of a sink URI that is not among the sink's."""
    for option in options:
        if option not in names:
            choice = f"it knows {', '.join(names)}" if names else "it has none"
            raise ValueError(f"sink {sink} has no option {option!r}: {choice}{did_you_mean(option, names)}")


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
        """Do nothing: a function needs no connection."""

    def write(self, records: Sequence[Record]) -> None:
        """Call the function; delivery handles what it raises."""
        for record in records:
            self.function(record)

    def close(self, status: RunStatus) -> None:
        """Do nothing."""


Shown = Callable[[Record], Mapping[str, float]]
"""Gives the numbers that the backend should hold of a record, as precisely as it stores them; called once per record, in order."""


OVERVIEW_FAMILY: Final = "0_overview"
"""First part of the names under which backends repeat the headline values: lists and charts are in alphabetical order."""


@dataclass(slots=True)
class StoredMetrics:
    """The numbers of a run in a backend, read back from it; without those of the overview, which repeat others.

    Attributes:
        rows: by update, its numbers by key; a histogram is the sum of its counts.
        repeated: by key, how many numbers the backend has more than once, for the same update.
        ended: whether the backend shows the run as ended; None where it does not say.
    """

    rows: dict[int, dict[str, float]] = field(default_factory=dict)
    repeated: Counter[str] = field(default_factory=Counter)
    ended: bool | None = None

    def add(self, update: int, key: str, value: float) -> None:
        """Add one number of the backend; of several for the same update, the first counts."""
        row = self.rows.setdefault(update, {})
        if key in row:
            self.repeated[key] += 1
        elif not key.startswith(f"{OVERVIEW_FAMILY}/"):
            row[key] = value


Stored = StoredMetrics
"""The name of `StoredMetrics` in earlier releases."""
