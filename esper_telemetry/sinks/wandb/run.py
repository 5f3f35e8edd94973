"""A W&B run of our own: started without ever asking anything, ended with the status as exit code.

A W&B run that somebody else has open: our rows go in between theirs and never push theirs aside.

What a W&B run holds on disk already: a client that is killed loses rows that it has accepted, up to a second of them.
"""

from __future__ import annotations

import json
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any, Final, NamedTuple

from esper_telemetry.core.record import RunInfo, RunStatus
from esper_telemetry.sinks.layout import family_name
from esper_telemetry.sinks.protocol import StoredMetrics, logger
from esper_telemetry.sinks.text import plain

MODES = ("auto", "online", "offline")
AXES = ("axis/update", "axis/env_step", "axis/gradient_step", "axis/wall_time")
INIT_TIMEOUT_SECONDS = 30.0
FINISH_TIMEOUT_SECONDS = 15.0
"""Past this, what is not uploaded stays on disk for `wandb sync`; W&B's own default waits forever."""

EXIT_CODES = {
    RunStatus.FINISHED: 0,
    RunStatus.FAILED: 1,
    RunStatus.INTERRUPTED: 130,
    RunStatus.KILLED: 137,
    RunStatus.PREEMPTED: 143,
}
"""Those of a shell: 128 and the signal's number."""


class OwnRun:
    """A run that we started: one row per `log`, nobody else writes.

    W&B has no place for what a metric means; its definitions carry the axis of each family, and that axes need no charts.
    """

    def __init__(self, run: Any) -> None:
        self.run = run
        for axis in AXES:
            run.define_metric(axis, hidden=True)

    def chart_name(self, key: str) -> str:
        """The name that stands for the key's whole family."""
        return f"{family_name(key)}/*" if "/" in key else key

    def define(self, name: str, step_metric: str) -> None:
        """Draws the keys of that name over the axis."""
        self.run.define_metric(name, step_metric=step_metric)

    def log(self, row: Mapping[str, Any]) -> None:
        """Adds a row; never with `step=`, as W&B drops rows whose step lies behind its counter."""
        self.run.log(dict(row))

    def close(self, status: RunStatus) -> None:
        """Ends the run; all statuses but `finished` are a failure for W&B."""
        if status is RunStatus.PREEMPTED:
            self.run.mark_preempting()
        self.run.finish(exit_code=EXIT_CODES[status])


def start(run: RunInfo, parent: Path, *, mode: str, settings: Mapping[str, Any]) -> Any:
    """A new W&B run, or the one of that id to go on with; kept in `parent/wandb`."""
    parent.mkdir(parents=True, exist_ok=True)
    resolved = _resolved(mode)
    _wait_for_a_new_folder(parent / "wandb", run.run_id)
    try:
        opened = _init(run, parent, resolved, settings)
    except Exception as error:
        if resolved != "online":
            raise
        logger.warning("W&B cannot be reached (%s); the run is kept offline in %s/wandb", _brief(error), parent)
        opened = _init(replace(run, run_id=_free_id(run.run_id)), parent, "offline", settings)
    _warn_if_elsewhere(opened, parent)
    return opened


def _wait_for_a_new_folder(folder: Path, run_id: str) -> None:
    """Sleeps until the second is over in which an earlier part of the run began: W&B's folders are told apart by nothing else."""
    while any(folder.glob(f"*run-{time.strftime('%Y%m%d_%H%M%S')}-{run_id}")):
        time.sleep(0.05)


def _resolved(mode: str) -> str:
    """`auto` made definite: what WANDB_MODE says, else online where there is a key."""
    if mode != "auto":
        return mode
    return os.environ.get("WANDB_MODE") or ("online" if _has_key() else "offline")


def _has_key() -> bool:
    import wandb
    from wandb.errors import Error

    try:
        return bool(wandb.login(prompt=False, verify=False))
    except (Error, ValueError) as error:
        logger.warning("W&B refuses the key that is set (%s); the run is kept offline", _brief(error))
        return False


def _free_id(run_id: str) -> str:
    """The id itself once W&B's process is gone: that keeps the id of a run that failed to start as "in use".

    Where other runs are open in this process they need it, so the id is changed.
    """
    import wandb

    if wandb.setup().most_recent_active_run is not None:
        return f"{run_id}-offline"
    wandb.teardown()
    return run_id


def _init(run: RunInfo, parent: Path, mode: str, settings: Mapping[str, Any]) -> Any:
    import wandb

    return wandb.init(
        **settings,
        mode=mode,  # type: ignore[arg-type]
        id=run.run_id,
        name=run.name,
        resume="allow",
        dir=str(parent),
        config=plain(run.config),
        tags=list(run.tags),
        notes=run.notes or None,
        settings=_quiet(),
    )


def _quiet() -> Any:
    """Settings under which W&B prints nothing, inspects nothing, captures nothing, and flushes every second."""
    import wandb

    return wandb.Settings(
        init_timeout=INIT_TIMEOUT_SECONDS,
        finish_timeout=FINISH_TIMEOUT_SECONDS,
        console="off",
        silent=True,
        disable_git=True,
        disable_code=True,
        x_save_requirements=False,
        x_transaction_log_flush_interval=1.0,
        reinit="create_new",
    )


def _warn_if_elsewhere(opened: Any, parent: Path) -> None:
    """W&B moves to the system's temporary directory, without a word, where it may not write."""
    where = Path(opened.settings.sync_dir)
    if not where.resolve().is_relative_to(parent.resolve()):
        logger.warning("W&B cannot write to %s and keeps the run in %s", parent, where)


def _brief(error: Exception) -> str:
    """The first line of an error."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


PATIENCE = 10
"""How many rows wait for the owner's first call, which tells how the owner counts."""


class Owner(Enum):
    """How the owner of a joined run logs, as far as it was seen."""

    UNKNOWN = "no call seen"
    ENDS_ROWS = "each call is a row"
    LEAVES_ROWS_OPEN = "with step= or commit=False, so later calls add to the row"


class JoinedRun:
    """Writes into a run of which somebody else is the owner, and leaves it open.

    W&B drops a row whose `step=` lies behind the run's counter, and a row of ours that ends the current step moves the
    counter. So what we do follows from how the owner logs:

    - with `step=`, or `commit=False`: our row joins the owner's, which stays open, so the counter does not move; of
      several records within one row of theirs the newest stays (the journal has them all);
    - without: a row per record;
    - not at all, for `PATIENCE` records: a row per record.
    """

    def __init__(self, run: Any) -> None:
        self.run = run
        self.lock = threading.RLock()
        self.ours: int | None = None
        self.owner = Owner.UNKNOWN
        self.owner_step: int | None = None
        self.waiting: list[dict[str, Any]] = []
        self.in_open_row: dict[str, Any] = {}
        self.told = False
        self.stop = _observe(run, self._owner_logged)

    def chart_name(self, key: str) -> str:
        """The key: a name for a whole family could take in metrics of the owner."""
        return key

    def define(self, name: str, step_metric: str) -> None:
        """Draws the key over the axis."""
        self.run.define_metric(name, step_metric=step_metric)

    def log(self, row: Mapping[str, Any]) -> None:
        """Adds a row, joins it to the owner's, or keeps it until it is known which."""
        with self.lock:
            self.waiting.append(dict(row))
            if self.owner is Owner.UNKNOWN and len(self.waiting) > PATIENCE:
                self.owner = Owner.ENDS_ROWS
            self._settle()

    def close(self, status: RunStatus) -> None:
        """Delivers what waits; the run stays open."""
        with self.lock:
            if self.owner is Owner.UNKNOWN:
                self.owner = Owner.ENDS_ROWS
            self._settle()
            self.stop()

    def _settle(self) -> None:
        """Delivers the rows that wait, in the way that fits the owner."""
        if self.owner is Owner.UNKNOWN:
            return
        rows, self.waiting = self.waiting, []
        if self.owner is Owner.LEAVES_ROWS_OPEN:
            self._join(rows)
        else:
            for row in rows:
                self._send(row, commit=True)

    def _join(self, rows: list[dict[str, Any]]) -> None:
        """Puts the newest row into the owner's current one, over what we put there before."""
        if not rows:
            return
        if not self.told and (self.in_open_row or len(rows) > 1):
            self.told = True
            logger.warning(
                "the W&B run is logged to with step=, so of several updates within one step only the newest is shown "
                "there; the journal has all. A run of our own in the same group would show all: WandbSink(group=...)"
            )
        stale = dict.fromkeys(self.in_open_row.keys() - rows[-1].keys())
        self._send({**rows[-1], **stale}, commit=False)
        self.in_open_row = rows[-1]

    def _send(self, row: dict[str, Any], *, commit: bool) -> None:
        self.ours = threading.get_ident()
        try:
            self.run.log(row, commit=commit)
        finally:
            self.ours = None

    def _owner_logged(self, step: int | None, commit: bool | None) -> None:
        """Called before each row of the owner's; ours are told apart by their thread."""
        if self.ours == threading.get_ident():
            return
        with self.lock:
            leaves_open = step is not None or commit is False
            self.owner = Owner.LEAVES_ROWS_OPEN if leaves_open else Owner.ENDS_ROWS
            if not leaves_open or step != self.owner_step:
                self.in_open_row = {}
            self.owner_step = step


def _observe(run: Any, seen: Callable[[int | None, bool | None], None]) -> Callable[[], object]:
    """Calls `seen(step, commit)` before each row that goes into the run; gives back what ends it.

    W&B has no public way to see this: `wandb.log` is bound to the run when it starts, so replacing `run.log` would miss
    it, and both end in this one method. Without it the owner is taken for one who passes steps.
    """
    inner = getattr(run, "_partial_history_callback", None)
    if inner is None:
        seen(0, None)
        return lambda: None

    def observed(data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        seen(step, commit)
        inner(data, step, commit)

    run._partial_history_callback = observed
    return lambda: run.__dict__.pop("_partial_history_callback", None)


BLOCK: Final = 32768
FILE_HEADER: Final = 7
PIECE: Final = struct.Struct("<IHB")
WHOLE, FIRST, LAST = 1, 2, 4
UPDATE: Final = "axis/update"
SETTLE_SECONDS: Final = 2.0
"""How long a file without an end must stay as it is: a client that has been told to finish may still be writing."""


class OwnInterrupts(NamedTuple):
    """What a file holds: the project, the last update (0 for none), and whether the run was ended."""

    project: str
    update: int
    ended: bool


def last_update(folder: Path, run_id: str, project: str, *, besides: Path) -> int | None:
    """The last update that any part of the run holds, 0 for none; None where there is no part `besides` this one."""
    files = [file for file in folder.glob(f"*run-*-{run_id}/run-{run_id}.wandb") if file.parent.name != besides.name]
    found = [held for held in map(_settled, files) if held.project == project]
    return max((held.update for held in found), default=None)


def stored_in(folder: Path, run_id: str, project: str) -> StoredMetrics:
    """What all parts of an offline run hold on disk."""
    stored = StoredMetrics()
    for file in sorted(folder.glob(f"offline-run-*-{run_id}/run-{run_id}.wandb")):
        if _settled(file).project == project:
            _add(stored, file)
    return stored


def _add(stored: StoredMetrics, file: Path) -> None:
    from wandb.proto.wandb_internal_pb2 import Record

    stored.ended = False
    for data in records(file.read_bytes()):
        record = Record.FromString(data)
        match record.WhichOneof("record_type"):
            case "history":
                update = _update(record.history)
                for key, value in _numbers(record.history):
                    stored.add(update, key, value)
            case "exit":
                stored.ended = True


def _numbers(history: Any) -> Iterator[tuple[str, float]]:
    """The row's numbers, without those that W&B adds; a histogram as the sum of its counts."""
    for item in history.item:
        key, *part = item.nested_key or [item.key]
        if key.startswith("_") or (part and part != ["values"]):
            continue
        value = json.loads(item.value_json)
        yield key, float(sum(value) if part else value)


def _settled(file: Path) -> OwnInterrupts:
    """What the file holds once nobody writes it any more."""
    size = -1
    while not (held := _read(file)).ended and size != (size := file.stat().st_size):
        time.sleep(SETTLE_SECONDS)
    return held


def _read(file: Path) -> OwnInterrupts:
    from wandb.proto.wandb_internal_pb2 import Record

    held = OwnInterrupts("", 0, False)
    for data in records(file.read_bytes()):
        record = Record.FromString(data)
        match record.WhichOneof("record_type"):
            case "run":
                held = held._replace(project=record.run.project)
            case "history":
                held = held._replace(update=max(held.update, _update(record.history)))
            case "exit":
                held = held._replace(ended=True)
    return held


def _update(history: Any) -> int:
    keys = (("/".join(item.nested_key) or item.key, item.value_json) for item in history.item)
    return int(next((json.loads(value) for key, value in keys if key == UPDATE), 0))


def records(data: bytes) -> Iterator[bytes]:
    """The whole records of a file; what comes after a piece that is cut off or no piece is left out."""
    position, parts = FILE_HEADER, b""
    while position + PIECE.size <= len(data):
        if BLOCK - position % BLOCK < PIECE.size:
            position += BLOCK - position % BLOCK
            continue
        _, length, kind = PIECE.unpack_from(data, position)
        position += PIECE.size + length
        if not kind or position > len(data):
            return
        parts = (
            data[position - length : position] if kind in (WHOLE, FIRST) else parts + data[position - length : position]
        )
        if kind in (WHOLE, LAST):
            yield parts
