"""One run's way out of the training process: the journal's lines in order, and the relay that reads them."""

from __future__ import annotations

import json
import logging
import platform
import secrets
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from esper_telemetry.alarms.registry import registry
from esper_telemetry.core.metric import declared
from esper_telemetry.core.packing import SlotLayout, Values
from esper_telemetry.core.record import Axes, Level, MetricInfo, RunInfo, RunStatus
from esper_telemetry.core.redaction import redacted
from esper_telemetry.delivery.child import MAX_DETACHED_SECONDS
from esper_telemetry.delivery.live import Deliveries
from esper_telemetry.delivery.status import CloseReport, DeliveryStats, SinkReport, SinkState
from esper_telemetry.journal.file import Journal
from esper_telemetry.journal.lease import RunLease, lease_existing_run, lease_new_run
from esper_telemetry.journal.lines import JournalEvent, encode_end, encode_run, plain
from esper_telemetry.journal.read import JournalContents
from esper_telemetry.pipeline.record import INTERVENTION, JournalOutput, JournalWriter, Measured, Writer
from esper_telemetry.pipeline.watch import Found, Watches
from esper_telemetry.pipeline.window import NO_NUMBERS, Numbers
from esper_telemetry.pipeline.worker import HandOver, OffloadedWriter, worth_offloading
from esper_telemetry.sinks.registry import SinkLike, as_sinks
from esper_telemetry.updates.data import Snapshot

SYNC_SECONDS = 20.0
"""How long a checkpoint waits for the journal."""

PACKAGES = ("esper-telemetry", "torch", "numpy", "gymnasium", "wandb", "tensorboard", "mlflow")


GOING_ON = (
    "esper-telemetry: not everything is delivered yet: %s. A background process goes on for %.0f minutes at most; "
    "`esper-telemetry doctor %s` tells when it is done, and how to send the rest if the machine or container stops before."
)

_logger = logging.getLogger("esper_telemetry")


class Recorder:
    """Writes a run's journal and keeps its sinks fed.

    The run directory is claimed at once, so that a mistake shows before training starts; the journal's first line waits for `start`,
    when the trainer's facts are known.

    A resumed run goes on in its journal, after a `run` line of its own. Backends cannot take back what they were sent, so the first
    record of an update stands: what is trained again, from the checkpoint to where the journal stops, is not recorded again.
    """

    def __init__(
        self,
        sinks: SinkLike | Iterable[SinkLike] | None,
        *,
        run_dir: str | Path | Literal["auto"] | None,
        name: str | None,
        tags: tuple[str, ...],
        notes: str,
        level: Level,
        watches: Watches | None = None,
        resume: bool = False,
        hand_over: bool = False,
    ) -> None:
        resolved = as_sinks(sinks)
        self._claim = _claimed(run_dir, name, resume=resume)
        self._journal = self._claim.journal
        self.run_dir = self._journal.run_dir
        self.run: RunInfo | None = None
        self.offloaded = False
        self._held = self._claim.earlier
        self._seq = 0 if self._held is None else self._held.seq
        self._level = level
        self._watches = watches
        self._sinks = resolved
        self._name = _name(name, self.run_dir, default=run_dir == "auto")
        self._tags = tags
        self._notes = notes
        self._described: set[str] = set()
        self._known_layouts: set[SlotLayout] = set()
        self._writer: Writer = JournalWriter(self._journal, level, watches)
        self._hand_over = HandOver(self._offloaded_writer) if hand_over and self.run_dir is not None else None
        self._relay: Deliveries | None = None
        self._stats: DeliveryStats | None = None
        self._delivery = JournalOutput(0, 0)
        if self._held is None:
            self._relay = Deliveries(self._journal, resolved)

    @property
    def axes(self) -> Axes | None:
        """Of the last record of earlier parts of the run; None where there is none."""
        return None if self._held is None else self._held.axes

    @property
    def recorded(self) -> int:
        """The last update that earlier parts of the run have recorded."""
        return 0 if self._held is None else self._held.recorded

    def covers(self, axes: Axes) -> bool:
        """Whether an earlier part of the run has recorded this update: what is recorded stands."""
        return self._held is not None and self._held.covers(axes)

    def offload(self) -> None:
        """Leaves summaries to a process beside this one, where there is a core for it; before `start` only."""
        if self.run_dir is not None and self.run is None and worth_offloading():
            self._change_hands(self._offloaded_writer())
            self._hand_over = None

    def _offloaded_writer(self) -> OffloadedWriter | None:
        """The writer whose work is done by a process beside this one; None, and a warning, where the system refuses what that needs."""
        assert isinstance(self._journal, Journal)
        try:
            return OffloadedWriter(self._journal, self._level, self._watches)
        except (OSError, MemoryError) as error:
            message = (
                "esper-telemetry: cannot start the process that summarises updates (%s): training goes on and does it"
                " itself, which takes more of its time"
            )
            _logger.warning(message, error if isinstance(error, OSError) else "no memory")
            return None

    def start(self, config: Mapping[str, Any], facts: Mapping[str, Any], axes: Axes) -> None:
        """Writes the run line, which is what sinks open with, and `config.json`; a resumed run goes on from `axes`."""
        metrics = {entry.metric.key: entry.info() for entry in registry()}
        run = RunInfo(
            run_id=secrets.token_hex(6),
            name=self._name,
            run_dir=self.run_dir,
            started=time.time(),
            config=redacted(plain(config)),
            tags=self._tags,
            notes=self._notes,
            versions=_versions(),
            facts={"level": self._level.name.lower(), **facts},
            metrics=metrics,
        )
        self._described.update(metrics)
        if self._held is None:
            self.run = run
            self._writer.run(run)
        else:
            self.run = _resumed(run, self._held, axes)
            self._go_on(self.run, self._held)
        if self.run_dir:
            _write_config(self.run_dir, self.run)

    def _go_on(self, run: RunInfo, held: JournalContents) -> None:
        """The sinks start behind the new run line, so that they open what an earlier part of the run has closed."""
        end = [] if held.status else [encode_end(RunStatus.KILLED, seq=self._next_seq())]
        self._journal.write(*end, encode_run(run))
        self._writer.go_on(run)
        self._relay = Deliveries(self._journal, self._sinks)
        changed = sorted(name for name in run.config if plain(run.config[name]) != held.info.config.get(name))
        if changed and held.axes is not None:
            self.event(INTERVENTION, held.axes, {"reason": "the run goes on with other settings", "changed": changed})

    def describe(self, layouts: Iterable[SlotLayout]) -> None:
        """Writes the descriptions of keys that the run line did not have: those of user-made groups."""
        new: dict[str, MetricInfo] = {}
        for layout in layouts:
            if layout not in self._known_layouts:
                self._known_layouts.add(layout)
                new.update(metric_infos(layout.group))
        new = {key: info for key, info in new.items() if key not in self._described}
        self._described.update(new)
        if new:
            self._writer.describe(new, self._next_seq())

    def record(
        self,
        axes: Axes,
        measured: Values,
        snapshots: tuple[Snapshot, ...],
        *,
        numbers: Numbers = NO_NUMBERS,
        level: Level,
        witnesses: tuple[Snapshot, ...] = (),
        partial: bool,
        seconds: float,
        cpu_seconds: float | None = None,
        elapsed: float,
        metric_errors: int,
    ) -> None:
        """Appends a record; the sinks find it in the journal. Arguments as in `writer.Measured`."""
        assert self._relay is not None
        delivery = self._where_sinks_stand(self._relay.stats())
        begun = time.perf_counter()
        self._writer.record(
            Measured(
                *(self._next_seq(), axes, partial, level, measured, snapshots),
                *(seconds, elapsed, delivery, metric_errors, cpu_seconds),
                witnesses,
                numbers,
            )
        )
        if self._hand_over is not None:
            self._hand_over.weigh(time.perf_counter() - begun, elapsed)

    def _where_sinks_stand(self, stats: DeliveryStats) -> JournalOutput:
        """The same object as long as the relay has not looked again."""
        if stats is not self._stats:
            self._stats, self._delivery = stats, JournalOutput(stats.queue_depth, stats.errors, stats.lags)
        return self._delivery

    def found(self) -> Sequence[Found]:
        """What was found in the records since the last call, as far as is known here by now; never waits."""
        found = self._writer.found()
        if self._hand_over is not None and self.run is not None and self._journal.settled:
            self._change_hands(self._hand_over.writer(self.run))
        return found

    def _change_hands(self, writer: OffloadedWriter | None) -> None:
        """From now on that one makes the records; nobody does so far where there is none."""
        if writer is not None:
            self._writer, self._hand_over = writer, None
            self.offloaded = True

    def event(self, kind: str, axes: Axes, data: Mapping[str, Any]) -> None:
        """Appends something that happened besides records."""
        self._writer.event(JournalEvent(kind, data, seq=self._next_seq(), axes=axes))

    def sync(self) -> None:
        """Returns when the journal holds everything so far, on the disk; at the latest after `SYNC_SECONDS`."""
        self._writer.sync(SYNC_SECONDS)

    def close(self, status: RunStatus, timeout: float) -> CloseReport:
        """Appends the end line and waits for the sinks, `timeout` seconds in all, half of them at most for the journal."""
        assert self._relay is not None
        deadline = time.monotonic() + timeout
        if self._hand_over is not None:
            self._hand_over.give_up()
            self._hand_over = None
        try:
            self._writer.end(status, self._next_seq(), timeout / 2)
            self._relay.close(max(0.1, deadline - time.monotonic()), status=status)
        finally:  # an interrupt ends the wait, and the run is closed all the same
            report = self._relay.close(0.0, status=status)
            self._claim.release()
            self._tell(report)
        return report

    def _tell(self, report: CloseReport) -> None:
        """Says what is not delivered: one line for each sink that needs help, one for all that are fed by a process that goes on."""
        going_on = [sink for sink in report.sinks if sink.goes_on]
        for sink in report.sinks:
            if sink not in going_on and (sink.state is not SinkState.CLOSED or sink.pending):
                _logger.warning("esper-telemetry: %s", sink)
        if going_on:
            _logger.warning(GOING_ON, _left_to_do(going_on), MAX_DETACHED_SECONDS / 60, self.run_dir)

    def _next_seq(self) -> int:
        self._seq += 1
        return self._seq


def _left_to_do(sinks: Sequence[SinkReport]) -> str:
    return ", ".join(f"{sink.name} ({sink.pending:,} records)" if sink.pending else sink.name for sink in sinks)


def metric_infos(group: type) -> dict[str, MetricInfo]:
    """The descriptions of every key, or key template, that a group type declares."""
    return {metric.key: metric.info() for _, metric in declared(group)}


def _claimed(run_dir: str | Path | Literal["auto"] | None, name: str | None, *, resume: bool) -> RunLease:
    if not resume:
        return lease_new_run(run_dir, name)
    if run_dir in ("auto", None):
        raise ValueError("resume needs the run directory to go on in: pass run_dir")
    return lease_existing_run(run_dir)


def _resumed(run: RunInfo, held: JournalContents, axes: Axes) -> RunInfo:
    """The run as it goes on: whatever identifies it is as it was, settings and facts that are given now win."""
    earlier = held.info
    resumed_from = {"update": axes.update, "env_step": axes.env_step, "gradient_step": axes.gradient_step}
    return replace(
        run,
        run_id=earlier.run_id,
        name=earlier.name,
        started=earlier.started,
        config={**earlier.config, **run.config},
        tags=run.tags or earlier.tags,
        notes=run.notes or earlier.notes,
        facts={**earlier.facts, **run.facts},
        metrics={**earlier.metrics, **run.metrics},
        resumed_from={**resumed_from, "recorded": held.recorded, "seq": held.seq},
    )


def _name(name: str | None, run_dir: Path | None, *, default: bool) -> str:
    """What people call the run: the given name, but with the time where the directory has it too."""
    if run_dir is not None and (default or name is None):
        return run_dir.name
    return name or "run"


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except (PackageNotFoundError, OSError):
            continue
    return found


def _write_config(run_dir: Path, run: RunInfo) -> None:
    settings = {
        "run_id": run.run_id,
        "name": run.name,
        "command": redacted(sys.argv),
        "config": run.config,
        "facts": run.facts,
        "versions": run.versions,
    }
    try:
        (run_dir / "config.json").write_text(json.dumps(plain(settings), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        message = "esper-telemetry: cannot write config.json in %s (%s); training goes on, and the journal holds it too"
        _logger.warning(message, run_dir, error.strerror)
