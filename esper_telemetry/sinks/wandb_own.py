"""A W&B run of our own: started without ever asking anything, ended with the status as exit code."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from esper_telemetry.record import RunInfo, RunStatus
from esper_telemetry.sinks.families import family_name
from esper_telemetry.sinks.plain import plain
from esper_telemetry.sinks.protocol import logger

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
