"""W&B runs to write into: a run that the sink starts, which never asks questions, and a run that the user has open.

The sink also checks the disk under its own run: W&B reports a full disk only in its own log, and loses rows that it has accepted.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from enum import Enum
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import urlsplit

from esper_telemetry.core.messages import one_line, shown
from esper_telemetry.core.metric import family_name
from esper_telemetry.core.record import RunInfo, RunStatus
from esper_telemetry.core.redaction import error_line
from esper_telemetry.journal.lines import plain
from esper_telemetry.sinks.sink_protocol import logger

DEFAULT_SERVER: Final = "https://api.wandb.ai"
MODES: Final = ("auto", "online", "offline")
AXES: Final = ("axis/update", "axis/env_step", "axis/gradient_step", "axis/wall_time")
INIT_TIMEOUT_SECONDS: Final = 30.0
FINISH_TIMEOUT_SECONDS: Final = 15.0
"""After this time, rows that are not uploaded stay on disk for `wandb sync`; W&B's own default waits forever."""

EXIT_CODES: Final = {
    RunStatus.FINISHED: 0,
    RunStatus.FAILED: 1,
    RunStatus.INTERRUPTED: 130,
    RunStatus.KILLED: 137,
    RunStatus.PREEMPTED: 143,
}
"""Exit codes of a shell: 128 plus the signal's number."""

MAX_WAITING_ROWS: Final = 10
"""Rows that wait for the owner's first call, which shows how the owner logs."""

MIN_FREE_BYTES: Final = 1 << 20
"""Free space that a row needs: more than W&B keeps in memory before it writes."""
LOG_CHECK_SECONDS: Final = 30.0
CLIENT_LOG: Final = Path("logs", "debug-internal.log")
FULL_DISK_SIGNS: Final = (b"no space left", b"disk quota exceeded", b"file too large")


class OwnRun:
    """A run that the sink started: one row per `log`, and no other writer.

    W&B cannot store the meaning of a metric; its definitions hold the axis of each family, and hide charts of the axes.
    """

    def __init__(self, run: Any) -> None:
        self.run = run
        for axis in AXES:
            run.define_metric(axis, hidden=True)

    def chart_name(self, key: str) -> str:
        """Return the name that matches the key's whole family."""
        return f"{family_name(key)}/*" if "/" in key else key

    def log(self, row: Mapping[str, Any]) -> None:
        """Add a row; never with `step=`, because W&B drops rows whose step is before its counter."""
        self.run.log(dict(row))

    def close(self, status: RunStatus) -> None:
        """End the run; W&B treats all statuses except `finished` as a failure."""
        if status is RunStatus.PREEMPTED:
            self.run.mark_preempting()
        self.run.finish(exit_code=EXIT_CODES[status])


def start(run: RunInfo, parent: Path, *, mode: str, settings: Mapping[str, Any]) -> Any:
    """Return a new W&B run in `parent/wandb`, or resume the run with that id; offline if the server cannot be reached."""
    parent.mkdir(parents=True, exist_ok=True)
    resolved = _resolved(mode)
    # W&B names the folder of a run by the second of its start and its id, so two parts must not begin in the same second.
    while any((parent / "wandb").glob(f"*run-{time.strftime('%Y%m%d_%H%M%S')}-{run.run_id}")):
        time.sleep(0.05)
    try:
        opened = _init(run, parent, resolved, settings)
    except Exception as error:
        if resolved != "online":
            raise
        logger.warning("W&B cannot be reached (%s); the run is kept offline in %s/wandb", error_line(error), parent)
        opened = _init(replace(run, run_id=_free_id(run.run_id)), parent, "offline", settings)
    where = Path(opened.settings.sync_dir)
    if not where.resolve().is_relative_to(parent.resolve()):  # W&B moves to the temporary directory without a warning
        logger.warning("W&B cannot write to %s and keeps the run in %s", parent, where)
    return opened


def _resolved(mode: str) -> str:
    """Return `auto` resolved: the value of WANDB_MODE, else online if there is a key."""
    if mode != "auto":
        return mode
    if os.environ.get("WANDB_MODE"):
        return os.environ["WANDB_MODE"]
    import wandb
    from wandb.errors import Error

    try:
        return "online" if wandb.login(prompt=False, verify=False) else "offline"
    except (Error, ValueError) as error:
        logger.warning("W&B refuses the key that is set (%s); the run is kept offline", error_line(error))
        return "offline"


def why_offline(mode: str) -> str:
    """Return why a run of that mode is offline, and how to put the next one online; W&B is not imported."""
    if mode == "offline":
        return "offline, because the sink has mode=offline"
    if mode == "auto" and (environment := os.environ.get("WANDB_MODE")):
        return f"offline, because WANDB_MODE={environment} is set"
    host = urlsplit(os.environ.get("WANDB_BASE_URL", DEFAULT_SERVER)).hostname
    with suppress(OSError, NetrcParseError):
        has_key = bool(os.environ.get("WANDB_API_KEY")) or netrc(os.environ.get("NETRC")).authenticators(host or "")
        if has_key:
            return "offline, because the server could not be reached or refused the API key"
    return "offline, because no API key was found: `wandb login` stores one for the next run"


def _free_id(run_id: str) -> str:
    """Return an id that W&B accepts. Its process keeps the id of a run that failed to start as "in use", so the process is ended.

    If other runs in this process need W&B's process, the id is changed instead.
    """
    import wandb

    if wandb.setup().most_recent_active_run is not None:
        return f"{run_id}-offline"
    wandb.teardown()
    return run_id


def _init(run: RunInfo, parent: Path, mode: str, settings: Mapping[str, Any]) -> Any:
    """Start a run that prints nothing, inspects nothing, captures nothing, and flushes every second."""
    import wandb

    return wandb.init(
        **settings,
        mode=mode,  # type: ignore[arg-type]
        id=run.run_id,
        name=run.name if _is_accepted("name", run.name) else None,
        resume="allow",
        dir=str(parent),
        config=plain(run.config),
        tags=[tag for tag in run.tags if _is_accepted("tag", tag)],
        notes=run.notes if run.notes and _is_accepted("notes", run.notes) else None,
        settings=wandb.Settings(
            init_timeout=INIT_TIMEOUT_SECONDS,
            finish_timeout=FINISH_TIMEOUT_SECONDS,
            console="off",
            silent=True,
            disable_git=True,
            disable_code=True,
            x_save_requirements=False,
            x_transaction_log_flush_interval=1.0,
            reinit="create_new",
        ),
    )


def _is_accepted(what: Literal["name", "tag", "notes"], value: str) -> bool:
    """Return whether W&B accepts a text of a run; a refused text is left out, with a warning."""
    import wandb

    try:
        wandb.Settings(**{"run_tags": (value,)} if what == "tag" else {f"run_{what}": value})
    except ValueError as error:
        reason = " ".join(str(error).split()).partition(" [type=")[0].rpartition("Value error, ")[2]
        logger.warning("W&B does not accept the %s %s (%s): it is left out there", what, shown(value), one_line(reason))
        return False
    return True


class Owner(Enum):
    """How the owner of a joined run logs, if that has been observed."""

    UNKNOWN = "no call observed"
    ENDS_ROWS = "each call is a row"
    LEAVES_ROWS_OPEN = "with step= or commit=False, so later calls add to the row"


class JoinedRun:
    """Writes into a run that the user has open, and leaves it open.

    W&B drops a row whose `step=` is before the run's counter. A row of the sink that ends the current step would move the
    counter. So the sink follows the owner's way of logging:

    - with `step=`, or `commit=False`: the sink's row joins the owner's, which stays open, so the counter does not move; of
      several records within one row of the owner, the newest stays (the journal has all);
    - without these: a row per record;
    - if the owner does not log for `MAX_WAITING_ROWS` records: a row per record.
    """

    def __init__(self, run: Any) -> None:
        self.run = run
        self.lock = threading.RLock()
        self.writing_thread: int | None = None
        self.owner = Owner.UNKNOWN
        self.owner_step: int | None = None
        self.waiting: list[dict[str, Any]] = []
        self.in_open_row: dict[str, Any] = {}
        self.warned = False
        self.stop_observing = _observe(run, self._on_owner_row)

    def chart_name(self, key: str) -> str:
        """Return the key: a name for a whole family might also match the owner's metrics."""
        return key

    def log(self, row: Mapping[str, Any]) -> None:
        """Add a row, join it to the owner's, or keep it until the owner's way of logging is known."""
        with self.lock:
            self.waiting.append(dict(row))
            if self.owner is Owner.UNKNOWN and len(self.waiting) > MAX_WAITING_ROWS:
                self.owner = Owner.ENDS_ROWS
            self._deliver()

    def close(self, status: RunStatus) -> None:
        """Deliver the waiting rows; the run stays open."""
        with self.lock:
            if self.owner is Owner.UNKNOWN:
                self.owner = Owner.ENDS_ROWS
            self._deliver()
            self.stop_observing()

    def _deliver(self) -> None:
        if self.owner is Owner.UNKNOWN:
            return
        rows, self.waiting = self.waiting, []
        if self.owner is Owner.ENDS_ROWS:
            for row in rows:
                self._send(row, commit=True)
        elif rows:
            self._join(rows)

    def _join(self, rows: list[dict[str, Any]]) -> None:
        """Put the newest row into the owner's current row, replacing an earlier one of the sink."""
        if not self.warned and (self.in_open_row or len(rows) > 1):
            self.warned = True
            logger.warning(
                "the W&B run is logged to with step=, so it shows only the newest of several updates within one step; "
                "the journal has all. A separate run in the same group would show all: WandbSink(group=...)"
            )
        stale = dict.fromkeys(self.in_open_row.keys() - rows[-1].keys())
        self._send({**rows[-1], **stale}, commit=False)
        self.in_open_row = rows[-1]

    def _send(self, row: dict[str, Any], *, commit: bool) -> None:
        self.writing_thread = threading.get_ident()
        try:
            self.run.log(row, commit=commit)
        finally:
            self.writing_thread = None

    def _on_owner_row(self, step: int | None, commit: bool | None) -> None:
        """Learn from a row of the owner; the sink's own rows are recognised by their thread."""
        if self.writing_thread == threading.get_ident():
            return
        with self.lock:
            leaves_open = step is not None or commit is False
            self.owner = Owner.LEAVES_ROWS_OPEN if leaves_open else Owner.ENDS_ROWS
            if not leaves_open or step != self.owner_step:
                self.in_open_row = {}
            self.owner_step = step


def _observe(run: Any, on_row: Callable[[int | None, bool | None], None]) -> Callable[[], object]:
    """Call `on_row(step, commit)` before each row that is added to the run; returns a function that ends this.

    W&B has no public hook. `wandb.log` is bound to the run when it starts, so replacing `run.log` would miss its calls; both call
    this one method. If it is missing, the owner is treated as passing steps.
    """
    inner = getattr(run, "_partial_history_callback", None)
    if inner is None:
        on_row(0, None)
        return lambda: None

    def observed(data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        on_row(step, commit)
        inner(data, step, commit)

    run._partial_history_callback = observed
    return lambda: run.__dict__.pop("_partial_history_callback", None)


class DiskWatch:
    """Checks the disk under a run's folder, and W&B's own log in it, before every write."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._log_position = 0
        self._checked_at = time.monotonic()
        self._reported = False

    def check(self) -> None:
        """Raise OSError if the disk is full, and once if W&B's log says that it could not store rows."""
        try:
            disk = os.statvfs(self._folder)
            free = disk.f_bavail * disk.f_frsize
        except OSError:
            free = MIN_FREE_BYTES
        if free < MIN_FREE_BYTES:
            raise OSError(errno.ENOSPC, "the disk is full: W&B would lose rows without a warning", str(self._folder))
        if not self._reported and time.monotonic() - self._checked_at >= LOG_CHECK_SECONDS:
            self._checked_at = time.monotonic()
            if any(sign in self._new_log_text().lower() for sign in FULL_DISK_SIGNS):
                self._reported = True
                raise OSError(errno.ENOSPC, "W&B could not store some rows: esper-telemetry doctor finds them")

    def _new_log_text(self) -> bytes:
        try:
            with (self._folder / CLIENT_LOG).open("rb") as log:
                log.seek(self._log_position)
                text = log.read()
        except OSError:
            return b""
        self._log_position += len(text)
        return text
