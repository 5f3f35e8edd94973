"""A W&B run that somebody else has open: our rows go in between theirs and never push theirs aside."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

from esper_telemetry.record import RunStatus
from esper_telemetry.sinks.protocol import logger

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
