"""What a sink is: three methods, called by one reader of the journal, in order and never at the same time.

Any callable as a sink: it is called once with every record.

What a backend holds of a run, read back from it, to be compared with the journal.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

from esper_telemetry.core.record import Record, RunInfo, RunStatus
from esper_telemetry.core.suggestion import did_you_mean

logger = logging.getLogger("esper_telemetry.sinks")


@runtime_checkable
class Sink(Protocol):
    """Where records go. `open` comes first and once, then any number of `write`, then `close`.

    A call that raises is repeated later, with the same records or with some of them, so `write` takes all of them or raises. What it
    raises says what to do: OSError (and whatever else is not named here) tries again after a while, ValueError and TypeError look for
    the one record that is refused (`PoisonRecordError`), PermanentSinkError gives the sink up. Optional
    attributes, read with `getattr`:

    - `in_process: bool`, True when absent: run in a thread of the training process, not in the child process.
    - `name: str`: stable identity that cursors are kept under; the class's name when absent. No secrets.
    - `alarm(alarm: Alarm) -> None`: called when an alarm is raised, gets worse or is over, after the record that shows it and before the
      next; one that raises is repeated, and no record goes by meanwhile. A callable sink gets records only.
    - `recall(alarms: Sequence[Alarm]) -> None`: called after `open` with the alarms that were delivered before, where there are any.
    - `prepare_child() -> None`: called once before `open`, and only in a process that holds nothing of the user's.
    - `import_client() -> None`: imports the backend's client. Called before `open`, for one sink after the other and before any delivery
      has a thread: packages that several threads import at once are left half initialised. ModuleNotFoundError gives the sink up; after
      any other exception a fresh process tries again, three times at most.
    - `held(run: RunInfo) -> int | None`: called after `open`, the last update that the backend holds of this run, 0 for none: records up to
      it are passed over and all after it are sent, whatever was taken before. None leaves it at what was taken.
    - `stored(run: RunInfo) -> Stored | None` and `shown(run: RunInfo) -> Shown` (`sinks/stored.py`): what the backend holds of the run,
      and what it should hold of a record, both without `open`; `doctor` compares them.
    - `only_forward: bool`, False when absent: the backend draws nothing behind a later point, so what is missing is sent together with
      everything after it, and `write` begins anew there.
    - `place(run: RunInfo) -> Place`: where the run will be found, for people.
    """

    def open(self, run: RunInfo) -> None:
        """Connects, for a new run or one that goes on after a restart."""

    def write(self, records: Sequence[Record]) -> None:
        """Delivers all records, or raises."""

    def close(self, status: RunStatus) -> None:
        """Delivers what is buffered and ends the run in the backend."""


class PermanentSinkError(Exception):
    """Trying again cannot help: the sink is disabled for the rest of the run, with this message."""


class PoisonRecordError(ValueError):
    """The backend refuses one of the records, and would refuse it for ever: it is put aside and the others are sent.

    Raise it where you know which one; any ValueError or TypeError has the record looked for.

    Attributes:
        index: its place among the records of this `write`; None where the backend does not say.
    """

    def __init__(self, message: str, index: int | None = None) -> None:
        super().__init__(message)
        self.index = index


class DeadClientError(PermanentSinkError):
    """The backend's client is beyond repair in this process; a fresh process can go on."""


class Place(NamedTuple):
    """Where a backend keeps a run, and the command that shows it."""

    where: str
    command: str


def require_package(package: str, sink: str) -> None:
    """Raises ModuleNotFoundError with the install command unless the package is there; imports nothing."""
    if find_spec(package) is None:
        extras = {"rich": "cli", "prometheus_client": "prometheus", "wandb_workspaces": "wandb"}
        extra = extras.get(package, package)
        raise ModuleNotFoundError(
            f"{sink} needs {package.replace('_', '-')}: pip install 'esper-telemetry[{extra}]'", name=package
        )


def require_run_dir(run: RunInfo, sink: str, setting: str) -> Path:
    """The run's directory, absolute; raises PermanentSinkError naming the setting to give where the run has none."""
    if run.run_dir is None:
        raise PermanentSinkError(
            f"{sink} has nowhere to write, as run {run.name!r} has no run directory: give it {setting}"
        )
    return Path(run.run_dir).absolute()


def check_options(sink: str, options: Mapping[str, str], known: Sequence[str] = ()) -> None:
    """Raises ValueError naming the first option of a sink URI that the sink does not know."""
    for option in options:
        if option not in known:
            knows = f"it knows {', '.join(known)}" if known else "it has none"
            raise ValueError(f"sink {sink} has no option {option!r}: {knows}{did_you_mean(option, known)}")


@dataclass(frozen=True)
class FunctionSink:
    """Calls `function(record)` for each record, in order: `print` is a sink."""

    function: Callable[[Record], object]

    in_process: ClassVar[bool] = True
    uri: ClassVar[str] = ""
    """A function has no name on the command line."""

    @property
    def name(self) -> str:
        """`function:` and the callable's own name."""
        return f"function:{getattr(self.function, '__qualname__', type(self.function).__name__)}"

    def open(self, run: RunInfo) -> None:
        """Does nothing: a function needs no connection."""

    def write(self, records: Sequence[Record]) -> None:
        """Calls the function; what it raises goes to the relay."""
        for record in records:
            self.function(record)

    def close(self, status: RunStatus) -> None:
        """Does nothing."""


Shown = Callable[[Record], Mapping[str, float]]
"""Gives, of a record, the numbers that the backend should hold, as precisely as it stores them; called once per record, in order."""


@dataclass(slots=True)
class StoredMetrics:
    """What a backend holds.

    Attributes:
        rows: by update, its numbers by key; a histogram is the sum of its counts.
        repeated: by key, how many numbers stand there more than once, for the same update.
        ended: whether the backend takes the run for ended; None where it does not say.
    """

    rows: dict[int, dict[str, float]] = field(default_factory=dict)
    repeated: Counter[str] = field(default_factory=Counter)
    ended: bool | None = None

    def add(self, update: int, key: str, value: float) -> None:
        """One number as the backend holds it; the first stands."""
        row = self.rows.setdefault(update, {})
        if key in row:
            self.repeated[key] += 1
        else:
            row[key] = value


Stored = StoredMetrics
"""The name of `StoredMetrics` in earlier releases."""
