"""`TelemetrySession`: one run in this process, as trainers, adapters and commands use it.

It gathers the measurements of an update, hands them to the pipeline when the update is flushed, and feeds the sinks from the journal.
`Telemetry` is the interface for users; `telemetry.session_of` returns its session.

`observe` packs groups into rows on the device without synchronising; `flush` starts one copy to the host. On a CPU the record is made
inside `flush`. On CUDA it is made at the next call, when the copy has arrived. The journal receives the record first, and sinks read the
journal, so nothing here waits for a backend.

A run chooses its pipeline once, when it starts (`TelemetrySession.start`):

| updates come from | `offload=None` | `offload=True` | `offload=False` |
|---|---|---|---|
| an attached trainer or an adapter, on a CPU | worker | worker | in process |
| the user's own loop | in process | worker | in process |
| several ranks, one core, no run directory, no memory files | in process | in process | in process |

Several ranks exchange their measurements, which a worker does not have. On CUDA the tensors of an update are copied to the host for the
worker (`pipeline.window.ship`). In sampled updates, and without a worker, they are measured on the device.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, SupportsFloat, TypeVar, cast

import torch
from torch import nn
from torch.optim import Optimizer

from esper_telemetry.core.arrays import IntegerLike, as_integer
from esper_telemetry.core.clock import Clock
from esper_telemetry.core.containment import Containment, Measurement
from esper_telemetry.core.facts import Facts
from esper_telemetry.core.group import NO_VALUES, Values
from esper_telemetry.core.interrupts import SerialCalls, is_interrupt
from esper_telemetry.core.process_memory import DeviceSampler
from esper_telemetry.core.record import Axes, Level, RunInfo, RunStatus, SinkBacklog
from esper_telemetry.core.redaction import redacted
from esper_telemetry.delivery.live import Deliveries, log_undelivered
from esper_telemetry.delivery.status import CloseReport
from esper_telemetry.events import Hooks
from esper_telemetry.journal.lines import plain
from esper_telemetry.metrics.performance import telemetry_health
from esper_telemetry.metrics.ratio import RatioDiagnostics
from esper_telemetry.pipeline.in_process import (
    FAILURE,
    INTERVENTION,
    DetectorFactory,
    InProcessPipeline,
    PipelineSettings,
)
from esper_telemetry.pipeline.rank_exchange import Peers, RankDecision
from esper_telemetry.pipeline.response import AlarmCallback, AlarmResponse
from esper_telemetry.pipeline.run_recorder import RunOptions, RunPosition, RunRecorder
from esper_telemetry.pipeline.sampling import Sampling
from esper_telemetry.pipeline.usage import AFTER_CLOSE, NEVER_FLUSHED, OVERDUE, UsageWarnings
from esper_telemetry.pipeline.window import FlushCost, FlushedUpdate, OpenUpdate, Transfer, as_epochs, finish, flattened, ship
from esper_telemetry.pipeline.worker import WorkerPipeline, can_use_worker
from esper_telemetry.sinks.end_block import RunEnd, print_end
from esper_telemetry.sinks.notify import NotifySink
from esper_telemetry.sinks.sink_registry import SinkLike, as_sinks
from esper_telemetry.updates.extensions import Capture, ObservedSource, UpdateExtension, progress_of
from esper_telemetry.updates.failure import Candidates, at_exit, failure_data, local_data, status_of
from esper_telemetry.updates.gradient_watcher import Members, WatchedModels, group_names
from esper_telemetry.updates.groups import measure
from esper_telemetry.updates.update import Update

_logger = logging.getLogger("esper_telemetry")

SYNC_SECONDS: Final = 20.0
"""Time that a checkpoint waits for the journal to be on the disk."""

LogRatios = RatioDiagnostics
"""The group that knows the precision of a loop's arithmetic; under this name, the reference does not list the session as its maker."""

Event = TypeVar("Event")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """The arguments of a `Telemetry` other than its sinks, checked.

    Attributes:
        run: arguments of the journal.
        level, budget, close_timeout, offload: as for `Telemetry`.
        config, facts: config and facts of the run.
        detector_factory: None if no alarms are raised.
        all_ranks: whether the ranks of a distributed run report as one.
        report: whether the run is written as a page when it ends.
        notify: addresses that get messages.
    """

    run: RunOptions
    level: Level
    budget: float
    close_timeout: float
    offload: bool | None
    config: dict[str, Any]
    facts: dict[str, Any]
    detector_factory: DetectorFactory | None
    all_ranks: bool
    report: bool
    notify: tuple[str, ...] = ()


class TelemetrySession:
    """One run: the update under way, the pipeline, the sinks.

    Threads may share a session: it serves one call at a time, and a call from a signal handler after the call that it interrupts. Calls do
    nothing in a forked copy of the process, at OFF, and after `close`.

    Args:
        sinks: as for `Telemetry`.
        options: its other arguments.

    Attributes:
        level: the level without escalation.
        facts: facts of the run so far.
        clock: the time that telemetry takes on the training thread.
        sampling: which updates are sampled.
        prints_end: whether the session prints the summary at the end of the run; commands print it themselves.

    Raises:
        Exception: as `Telemetry` does.
    """

    def __init__(self, sinks: SinkLike | Iterable[SinkLike] | None, options: SessionOptions) -> None:
        self.level = options.level
        self.sampling = Sampling(options.level, options.budget)
        self.clock = Clock()
        self.prints_end = True
        self._options = options
        self._config, self.facts = dict(options.config), Facts.of(plain(options.facts))
        self._calls = SerialCalls()
        self._devices = DeviceSampler()
        self._pid = os.getpid()
        self._containment = Containment()
        self._watched = WatchedModels(self.clock)
        self._open = OpenUpdate()
        self._pending: tuple[FlushedUpdate, Transfer] | None = None
        self._axes = Axes(update=0, env_step=0, gradient_step=0, wall_time=time.time())
        self._collected = self._flushes = self._dropped = 0
        self._flushed_at = time.perf_counter()
        self._candidates: list[Candidates] = []
        self._take_open_update: Callable[[], Update] = Update
        self._close_callbacks: list[Callable[[], None]] = []
        self._attached = self._closed = self._reports_at_close = self._was_interrupted = False
        self._checkpoint = self._axes  # from which a resumed run continues
        self._precision: str | None = None  # of the first log-ratios that were observed
        self._exchange = "done"  # of this flush with the other ranks: "due", "begun" or "done"
        self._asks_to_stop, self._stop_reasons = False, (False, False)
        self._usage = UsageWarnings(options.budget)
        self._peers: Peers | None = None
        self._recorder: RunRecorder | None = None
        self._deliveries: Deliveries | None = None
        self._journal_position = RunPosition()
        if self.level > Level.OFF:
            self._peers = Peers.meet() if options.all_ranks else None
            open_journal = partial(self._open_journal, sinks)
            # An error on rank 0 is raised on all ranks.
            self._journal_position = self._peers.from_rank_zero(open_journal) if self._peers else open_journal()
            self._axes = self._journal_position.axes or self._axes
            self._at_exit = at_exit(self)
        self._response = AlarmResponse(self.level, self.clock, together=self._peers is not None)

    def _open_journal(self, sinks: SinkLike | Iterable[SinkLike] | None) -> RunPosition:
        """Claim the run directory and start the delivery, on rank 0."""
        self._sinks = [*as_sinks(sinks), *map(NotifySink, self._options.notify)]
        settings = PipelineSettings(self.level, self._options.detector_factory, telemetry_health)
        recorder = RunRecorder(self._options.run, settings)
        if recorder.earlier is None:
            self._deliveries = Deliveries(recorder.journal, self._sinks)
        self._recorder = recorder
        return recorder.position

    @property
    def run_dir(self) -> Path | None:
        """The run directory, on every rank; None without one."""
        return self._journal_position.run_dir

    @property
    def run(self) -> RunInfo | None:
        """The run as sinks receive it; None at OFF, before the run has started, and on all ranks except rank 0."""
        return self._recorder.run if self._recorder else None

    @property
    def ranks(self) -> int:
        """Number of processes that report together."""
        return self._peers.size if self._peers else 1

    @property
    def precision(self) -> str | None:
        """Precision of the trainer's arithmetic; None if the trainer does not say."""
        return self.facts.precision

    @property
    def has_worker(self) -> bool:
        """True if a worker measures all updates. If a GPU is in use, sampled updates are measured on it."""
        return self._is_offloaded and not torch.cuda.is_initialized()

    @property
    def update_level(self) -> Level:
        """Level of the update under way: DEBUG if an alarm asks for it, else `level`."""
        return self._response.level

    @property
    def samples_next(self) -> bool:
        """True if the next update will probably be sampled, so that a source may record more of its rollout."""
        return self.sampling.due or (self._response.remaining > 0 and not self.sampling.is_late)

    @property
    def escalated(self) -> bool:
        """True while an alarm has raised the level of the update under way."""
        return self._response.escalated

    def __repr__(self) -> str:
        state = "off" if self.level is Level.OFF else "closed" if self._closed else "open"
        return f"{state}, level {self.level.name.lower()}, run_dir {self.run_dir}, update {self._axes.update}"

    # Calls of trainers and adapters.

    def expect_updates(self, *, candidates: Candidates, open_update: Callable[[], Update]) -> None:
        """Prepare for a trainer that submits whole updates; called when one is attached.

        Args:
            candidates: as for `search_on_failure`.
            open_update: returns the data of an update that will not end.
        """
        self.search_on_failure(candidates)
        self._take_open_update, self._attached = open_update, True
        self._accepts("attach")

    def search_on_failure(self, candidates: Candidates) -> None:
        """Search these tensors, in forward order, for the first non-finite one if training raises; the latest caller's come first."""
        self._candidates.insert(0, candidates)

    def on_close(self, callback: Callable[[], None]) -> None:
        """Call `callback()` when the run ends, before its open update is recorded."""
        self._close_callbacks.append(callback)

    def start(self, *, config: Mapping[str, Any] | None = None, facts: Mapping[str, Any] | None = None) -> None:
        """Add to the config and the facts of the run and announce it to the sinks; otherwise the first `flush` announces it.

        Time before a trainer says that it starts belongs to no update.
        """
        self._serve(partial(self._start, config=config, facts=facts))

    def _start(self, *, config: Mapping[str, Any] | None = None, facts: Mapping[str, Any] | None = None) -> None:
        if facts is not None:
            self._flushed_at = time.perf_counter()
            self.facts = Facts.of(plain({**self.facts, **facts}))
        self._config.update(config or {})
        precision = self.facts.precision or self._precision or self._watched.precision
        if precision != self.facts.precision:
            self.facts = Facts.of({**self.facts, "precision": precision})
        if self._recorder is not None and self._recorder.run is None:
            offload = self._attached if self._options.offload is None else self._options.offload
            worker = offload and self._peers is None
            redacted([plain(self._config), dict(self.facts), sys.argv])
            if self._deliveries is not None:
                self._deliveries.send_secrets()  # before the journal has the line that makes deliveries open their sinks
            self._recorder.start(self._config, self.facts, self._axes, worker=worker)
            # Sinks of a resumed run begin after its run line, because they open what an earlier part has closed.
            if self._deliveries is None:
                self._deliveries = Deliveries(self._recorder.journal, self._sinks)
                self._recorder.report_changed_settings()
                self._warn_of_repeated_updates()

    def _warn_of_repeated_updates(self) -> None:
        """Log which updates a run that continues from an older checkpoint does not record; commands say it themselves."""
        self._checkpoint = self._axes
        now, recorded = self._axes.update, self._journal_position.axes
        if self.prints_end and recorded is not None and now < recorded.update:
            message = (
                "esper-telemetry: the run continues after update %d, and its journal has updates up to %d: updates %d to %d are trained"
                " again and not recorded again. Their alarms are reported here, and the sinks continue with update %d. For another course"
                " from this checkpoint, pass a new run_dir without resume=True."
            )
            _logger.warning(message, now, recorded.update, now + 1, recorded.update, recorded.update + 1)

    def begin_update(self, env_step: int) -> None:
        """Begin an update, with data collected so far; alarms up to now decide its level.

        If the update never ends, its record has the axis `env_step`.
        """
        if self._active:
            self._serve(partial(self._begin_update, env_step))
            self.guard(AlarmResponse.call, self._response)

    def _begin_update(self, env_step: int) -> None:
        self._collected = env_step
        self._record_pending()
        self._receive_reports()
        self._response.begin_update(late=self.sampling.is_late)

    def submit(self, update: Update) -> None:
        """Add a whole update, to be measured by the pipeline when it is flushed.

        Its tensors must not change until `flush` returns; a device may write to them afterwards. Updates of several ranks are measured
        immediately, and so are updates on a device that are sampled or have no worker.
        """
        if self._active:
            self._serve(partial(self._submit, update))

    def _submit(self, update: Update) -> None:
        with self.clock:
            if not self._peers and not (update.on_device and (update.sampled or not self._ships)):
                self._open.updates.append(update)
                return
            self._measure_update(update)
            self._keep_for_evidence(update)

    def _keep_for_evidence(self, update: Update) -> None:
        """Keep an update that is measured already, for the evidence of alarms."""
        if self.level >= Level.NORMAL and self._recorder is not None and self.run_dir is not None:
            self._open.evidence_updates.append(update)

    @property
    def _ships(self) -> bool:
        """True if updates on a device are copied to the host, for a worker to measure them."""
        return self._is_offloaded and torch.cuda.is_initialized()

    @property
    def _is_offloaded(self) -> bool:
        return self._recorder is not None and isinstance(self._recorder.pipeline, WorkerPipeline)

    def measure(self, measurements: Iterable[Measurement]) -> None:
        """Observe the results of metric functions called for a trainer. If one raises, its group is lost, with a warning."""
        if self._active:
            self._serve(partial(self._measure, measurements))

    def _measure(self, measurements: Iterable[Measurement], epoch: int | Sequence[int] = 0) -> None:
        with self.clock:
            self._containment.measure(measurements, partial(self._open.window.add, epoch=epoch, step=None))

    def _measure_update(self, update: Update) -> None:
        for measurements, epochs in self._containment.steps(measure(update, self.facts, self.update_level)):
            self._measure(measurements, epochs)

    def report_progress(self, snapshot: Callable[[], UpdateExtension]) -> None:
        """Write the events of the update under way, unless an earlier part of the run has recorded this update."""
        if self._active:
            self._serve(partial(self._report_progress, snapshot))

    def _report_progress(self, snapshot: Callable[[], UpdateExtension]) -> None:
        recorder, earlier = self._recorder, self._journal_position.axes
        if recorder is None or recorder.run is None or self.run_dir is None:
            return
        with self.clock:
            self._record_pending()
            axes = replace(self._axes, update=self._axes.update + 1, wall_time=time.time())
            if earlier is None or axes.update > earlier.update:
                captures: list[Capture] = []
                self._containment.attempt(lambda: progress_of(snapshot(), self.facts), captures.extend)
                for capture in captures:
                    recorder.event(capture.type, axes, capture.data)

    def attempt(self, function: Callable[[Event], None], event: Event) -> None:
        """Call one of telemetry's hooks. If it raises, its measurements are lost, with a warning."""
        self._containment.attempt(partial(function, event))

    def guard(self, function: Callable[[Event], None], event: Event) -> None:
        """Call one of telemetry's hooks, as `attempt` does, but let `SystemExit` pass: an `on_alarm` callback of the user may raise it."""
        try:
            function(event)
        except Exception as error:
            self._containment.note(function, error)

    def failed(self, function: Callable[..., object], error: Exception) -> None:
        """Count and report one of telemetry's functions that has raised."""
        self._containment.note(function, error)

    def abandon(self, error: BaseException) -> None:
        """End the run as failed from another thread, if the training thread hangs; the open update is lost."""
        if self._active:
            self._start()
            self._closed = True
            if self._recorder is not None:
                self._recorder.event(FAILURE, self._axes, failure_data(error))
                self._end_journal(self._recorder, RunStatus.FAILED)

    # Calls of users, through `Telemetry`.

    def observe(self, groups: Iterable[object], epoch: IntegerLike | Sequence[IntegerLike] = 0, step: IntegerLike | None = None) -> None:
        """Add groups to the update's record; see `Telemetry.observe`."""
        if self._accepts("observe"):
            self._serve_checked(partial(self._observe, groups, epoch, step))

    def _observe(self, groups: Iterable[object], epoch: IntegerLike | Sequence[IntegerLike], step: IntegerLike | None) -> None:
        with self.clock:
            epochs = as_epochs(epoch)
            place = None if step is None else as_integer(step, "step")
            for group in list(flattened(groups)):
                if isinstance(group, LogRatios):
                    self._precision = self._precision or group.precision
                self._open.window.add(group, epochs, place)
            if self._open.window.overdue:
                self._usage.warn(OVERDUE)

    def watch(
        self, model: nn.Module, optimizer: Optimizer, *, actor: Members | None, critic: Members | None, stop_on_nonfinite: bool
    ) -> ObservedSource:
        """Measure the model's gradients at every step of the optimizer; see `Telemetry.watch`."""
        if not isinstance(model, nn.Module) or not hasattr(optimizer, "register_step_pre_hook"):
            kinds = [f"the class {x.__name__}" if isinstance(x, type) else type(x).__name__ for x in (model, optimizer)]
            kinds = ["None" if kind == "NoneType" else kind for kind in kinds]
            raise TypeError(f"watch takes a torch module and its optimizer, got {kinds[0]} and {kinds[1]}")
        parts = {"actor": actor, "critic": critic}
        groups = {name: group_names(model, members) for name, members in parts.items() if members is not None}
        if not self._accepts("watch"):
            return ObservedSource(Hooks(), lambda: None)
        part = next(iter(groups)) if len(groups) == 1 else type(model).__name__.lower()
        tap = self._watched.add(model, optimizer, part=part, stop_on_nonfinite=stop_on_nonfinite)
        if groups:
            groups = {part: [tap.prefix + name for name in names] for part, names in groups.items()}
            self.facts = Facts.of({**self.facts, "groups": {**self.facts.groups, **groups}})
        return ObservedSource(tap.hooks, partial(self._watched.remove, tap))

    def log(self, values: Mapping[str, SupportsFloat]) -> None:
        """Add plain numbers to the update's record; see `Telemetry.log`."""
        if self._accepts("log"):
            self._serve_checked(partial(self._log, values))

    def _log(self, values: Mapping[str, SupportsFloat]) -> None:
        with self.clock:
            self._open.logged.add(values)

    def flush(self, *, env_step: IntegerLike, update: IntegerLike | None = None, gradient_step: IntegerLike | None = None) -> None:
        """End an update; see `Telemetry.flush`."""
        if self._accepts("flush"):
            env_step = as_integer(env_step, "env_step")
            update = None if update is None else as_integer(update, "update")
            gradient_step = None if gradient_step is None else as_integer(gradient_step, "gradient_step")
            self._serve(partial(self._flush_or_drop, env_step, update, gradient_step))
            self.guard(AlarmResponse.call, self._response)

    def _flush_or_drop(self, env_step: int, update: int | None, gradient_step: int | None) -> None:
        """Flush; if telemetry itself fails, the update is lost, with a warning, and training continues."""
        self._exchange = "due"
        try:
            self._flush(env_step, update, gradient_step)
        except Exception as error:
            if self._exchange == "begun":  # the ranks disagree, or one of them is gone
                raise
            self._open, self._pending = OpenUpdate(), None
            self._dropped += 1
            self._containment.note(self.flush, error)
            if self._peers and self._exchange == "due":  # the other ranks wait for this one
                self._peers.join({}, RankDecision(self.sampling.proposed, 0, False, self._asks_to_stop))

    def _flush(self, env_step: int, update: int | None, gradient_step: int | None) -> None:
        with self.clock:
            if self._watched:
                self._containment.attempt(partial(self._take_watched, whole=True))
            self._record_pending()
            self._start()
            self._response.begin_update(late=self.sampling.is_late)
            self._end_update(self._next_axes(env_step, update, gradient_step), partial=False)
            self._response.end_update()
            if self._pending and (self._peers or not self._pending[1].pending):
                self._record_pending()  # ranks end their updates together, so the device has finished
            if self._pending and not self._ships:
                flushed, transfer = self._pending
                self._pending = flushed.with_copies(), transfer
            self._receive_reports()

    def on_alarm(self, callback: AlarmCallback) -> Callable[[], None]:
        """Call `callback(alarm)` with every alarm; see `Telemetry.on_alarm`."""
        self._accepts("on_alarm")
        return self._response.on_alarm(callback)

    def request_stop(self) -> None:
        """Make `should_stop` return True; see `Telemetry.request_stop`."""
        self._asks_to_stop = True

    def should_stop(self, *, alarms: bool) -> bool:
        """Return whether all ranks should end training; see `Telemetry.should_stop`."""
        here = self._response.is_critical, self._asks_to_stop
        is_critical, stops = here if self._peers is None else self._stop_reasons
        return stops or (alarms and is_critical)

    def notify_intervention(self, reason: str = "", **details: Any) -> None:
        """Note that training was changed on purpose; see `Telemetry.notify_intervention`."""
        if self._accepts("notify_intervention"):
            self.guard(self._serve, partial(self._intervene, {"reason": reason, **details}))

    def _intervene(self, data: Mapping[str, Any]) -> None:
        if self._recorder is not None and self._recorder.run is not None:
            with self.clock:
                self._record_pending()
                self._recorder.event(INTERVENTION, self._axes, data)

    def state_dict(self) -> dict[str, int]:
        """Return the counts of the run for a checkpoint; see `Telemetry.state_dict`."""
        return self._serve(self._synced_counts, deferred=self._counts(), is_question=True)

    def _synced_counts(self) -> dict[str, int]:
        self.guard(TelemetrySession._sync, self)
        return self._counts()

    def _sync(self) -> None:
        self._record_pending()
        if self._active and self._recorder is not None and self._recorder.run is not None:
            self._recorder.pipeline.sync(SYNC_SECONDS)

    def _counts(self) -> dict[str, int]:
        return {name: getattr(self._axes, name) for name in ("update", "env_step", "gradient_step")}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue the counts of a checkpoint; see `Telemetry.load_state_dict`."""
        counts = {name: as_integer(state.get(name), name) for name in self._counts()}
        self._axes = Axes(**counts, wall_time=time.time())
        self._flushes = 0

    def close(self, status: RunStatus, failure: Mapping[str, Any] | None = None) -> CloseReport | None:
        """End the run; see `Telemetry.close`. The event of a failure follows the record of the open update."""
        report = self._serve(partial(self._close, status, failure), deferred=None)
        self._reports_at_close = True
        self.guard(AlarmResponse.call, self._response)
        self._reports_at_close = False
        return report

    def _close(self, status: RunStatus, failure: Mapping[str, Any] | None) -> CloseReport | None:
        if not self._active:
            return None
        try:
            self._record_rest(status, failure)
        except BaseException as error:
            if isinstance(error, Exception) and not is_interrupt(error):
                self._containment.note(self.close, error)
            else:
                if self._pending is None:  # interrupted again: give up the rest and end the journal
                    self._end(status)
                raise
        try:
            return self._end(status)
        except Exception as error:
            self._containment.note(self.close, error)
            return None

    def _record_rest(self, status: RunStatus, failure: Mapping[str, Any] | None) -> None:
        self._record_pending()
        self._start()
        if status is RunStatus.FINISHED and self._open and not self._flushes and not self._attached:
            self._usage.warn(NEVER_FLUSHED)
        last_axes = self._axes
        with self._calls.nested():
            for callback in self._close_callbacks:
                self._containment.attempt(callback)
            self._containment.attempt(self._take_open_update, self.submit)
        self._containment.attempt(partial(self._take_watched, whole=False), lambda _: self._watched.stop())
        if self._open:
            self._end_update(self._next_axes(max(self._collected, last_axes.env_step), None, None), partial=True)
        self._record_pending()
        if failure is not None and self._recorder is not None:
            self._recorder.event(FAILURE, last_axes, failure)

    def _end(self, status: RunStatus) -> CloseReport | None:
        self._closed = True
        atexit.unregister(self._at_exit)
        if self._peers:
            self._peers.leave()
        if self._recorder is None:
            return None
        report = self._end_journal(self._recorder, status)
        self._receive_reports()
        return report

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        status = status_of(error)
        failure = None
        if error is not None and status is RunStatus.FAILED and self._active:
            data: Candidates = partial(local_data, error)
            candidates = *self._candidates, data, self._watched.nonfinite_candidates
            try:
                failure = failure_data(error, *candidates)
            except Exception as own:
                self._containment.note(failure_data, own)
        self.close(status, failure)

    @property
    def _active(self) -> bool:
        """True while this session records: not at OFF, after close, or in a forked copy of the process."""
        return self.level > Level.OFF and not self._closed and os.getpid() == self._pid

    def _serve(self, call: Callable[[], Result], deferred: Result | None = None, *, is_question: bool = False) -> Result:
        """Serve a call in its turn; a forked copy of the process has one thread and need not wait."""
        if os.getpid() != self._pid:
            return call()
        return self._calls.run(call, deferred=cast(Result, deferred), is_question=is_question)

    def _serve_checked(self, call: Callable[[], None]) -> None:
        """Serve a call with arguments of the user: only wrong arguments raise."""
        try:
            self._serve(call)
        except (TypeError, ValueError):
            raise
        except Exception as error:
            self._containment.note(call, error)

    def _accepts(self, call: str) -> bool:
        """Return whether a user's call is recorded. The first call after `close` logs a warning, unless a callback of `close` makes it."""
        if self._active:
            return True
        if self._closed and not self._reports_at_close and os.getpid() == self._pid:
            self._usage.warn(AFTER_CLOSE, call)
        return False

    def _take_watched(self, *, whole: bool) -> None:
        """Measure the watched models' gradients of the update."""
        update = self._watched.take(whole=whole)
        if update:
            self._measure_update(update)
            self._measure(self._watched.rates(self.facts.groups))
            if update.origin:
                self._keep_for_evidence(update)

    def _next_axes(self, env_step: int, update: int | None, gradient_step: int | None) -> Axes:
        """Return the axes of the update under way, as given or counted."""
        last = self._axes
        if gradient_step is None:
            gradient_step = last.gradient_step + self._open.gradient_steps
        return Axes(last.update + 1 if update is None else update, env_step, gradient_step, time.time())

    def _end_update(self, axes: Axes, *, partial: bool) -> None:
        """Start the copy of the update's numbers to the host."""
        flushed = self._open.flush(axes, self.update_level, partial=partial)
        transfer = self._open.window.send()
        if self._ships:
            shipment = ship(flushed)
            flushed = shipment.update._replace(devices=self._devices.sample())
            transfer.arrival = shipment.arrival or transfer.arrival
        earlier, last = self._journal_position, self._axes
        is_new = not earlier.covers(axes)
        if is_new and self._flushes:
            self._usage.check_order(axes, last)
        self._flushes += 1
        if is_new or (earlier.axes is not None and axes.update <= earlier.axes.update):
            self._axes = axes
        self._pending = flushed, transfer

    def _record_pending(self) -> None:
        """Hand the last update to the pipeline, if its numbers were still on their way from the device."""
        if not self._active or self._pending is None:
            return
        pending, self._pending = self._pending, None
        try:
            self._record(*pending)
            self._was_interrupted = False
        except BaseException as error:
            if is_interrupt(error):  # if not interrupted too, a later call such as `close` records the update
                self._pending = None if self._was_interrupted else pending
                self._was_interrupted = True
            raise

    def _record(self, flushed: FlushedUpdate, transfer: Transfer) -> None:
        with self.clock:
            tables = transfer.tables()
            proposed, requested = self.sampling.proposed, self._response.requested
            decision = RankDecision(proposed, requested, self._response.is_critical, self._asks_to_stop)
            if self._peers and not flushed.partial:
                self._exchange = "begun"
                tables, decision = self._peers.join(tables, decision)
                self._exchange = "done"
                self._response.agree(decision.debug_updates)
                self._stop_reasons = decision.is_critical, decision.stops
            self.sampling.adopt(decision.sample_every, late=self._recorder is not None and self._recorder.pipeline.is_late)
            if self._recorder is None or self._deliveries is None:
                return
            self._recorder.describe(tables)
            measured: Values | None = None
            if tables:
                measured = self._containment.attempt(partial(finish, tables, flushed.level, copies=int(transfer.pending)))
            now = time.perf_counter()
            elapsed, self._flushed_at = now - self._flushed_at, now
            seconds, cpu_seconds = self.clock.take()
            self.sampling.learn(cpu_seconds if self._peers else seconds, elapsed)  # waiting for other ranks does not count
            stats = self._deliveries.stats()
            cost = FlushCost(seconds, cpu_seconds, elapsed, self._containment.take())
            backlog = SinkBacklog(stats.queue_depth, stats.errors, stats.lags)
            begun = time.perf_counter()
            update = flushed._replace(measured=measured or NO_VALUES, cost=cost, backlog=backlog)
            if self._journal_position.covers(flushed.axes):
                self._response.receive(self._recorder.judge(update, self._checkpoint))
            else:
                self._recorder.record(update)
            self._usage.add_record(time.perf_counter() - begun, elapsed, can_use_worker=self._can_use_worker)

    def _can_use_worker(self) -> bool:
        """Return whether records are made here only because the loop is the user's own, although a worker could make them."""
        recorder = self._recorder
        if recorder is None or recorder.run_dir is None or self._attached or self._options.offload is not None:
            return False
        possible = self._peers is None and not torch.cuda.is_initialized()
        return possible and isinstance(recorder.pipeline, InProcessPipeline) and can_use_worker(recorder.settings)

    def _receive_reports(self) -> None:
        """Receive the alarms of new records for the user's callbacks, which are called when no other call is under way."""
        if self._recorder is not None:
            self._response.receive(self._recorder.pipeline.take_reports())
            if self._deliveries is not None:
                self._deliveries.poll()  # so that the console shows an update when it ends

    def _end_journal(self, recorder: RunRecorder, status: RunStatus) -> CloseReport:
        """Append the end line and wait for the sinks. The journal gets at most half of `close_timeout` seconds."""
        assert self._deliveries is not None
        timeout = self._options.close_timeout
        deadline = time.monotonic() + timeout
        try:
            recorder.end(status, timeout / 2)
            if self._options.report and recorder.run_dir is not None:
                from esper_telemetry.views.report import write_run_report

                write_run_report(recorder.run_dir)  # before the sinks close, because they store it
            self._deliveries.close(max(0.1, deadline - time.monotonic()), status=status)
        finally:  # an interrupt ends the wait, and the run is closed anyway
            report = self._deliveries.close(0.0, status=status)
            recorder.release()
            log_undelivered(report, recorder.run_dir)
            if self._loss(report):
                _logger.warning("esper-telemetry: %s", self._loss(report))
            if self.prints_end:
                self.attempt(print_end, self.run_end(status))
        return report

    def _loss(self, report: CloseReport) -> str:
        """Return the sentence on updates without a record and on records that the journal lacks; empty if there are none."""
        if self._recorder is None:
            return ""
        missing = self._recorder.totals.loss({sink.name: sink.sent for sink in report.sinks})
        count = "1 update has" if self._dropped == 1 else f"{self._dropped:,} updates have"
        dropped = f"{count} no record, because telemetry failed, as a warning said"
        return "; ".join(filter(None, [missing, dropped if self._dropped else ""]))

    def run_end(self, status: RunStatus, resume: str | None = None) -> RunEnd:
        """Return the summary at the end of the run; `resume` is its line on how to resume an interrupted run."""
        loss = self._loss(self._deliveries.close()) if self._closed and self._deliveries else ""
        sinks, repeated = (self._sinks, self._recorder.repeated) if self._recorder else ((), "")
        is_readable = self._recorder is None or self._recorder.totals.is_readable
        return RunEnd(self.run, self.run_dir, sinks, status, resume, loss, repeated, is_readable)
