"""`Telemetry`: observe groups, log numbers, flush once per update, close.

One update: `observe` packs groups into rows on the device without synchronising; `flush` starts one copy to the host. On a CPU the
record is made inside `flush`; on CUDA at the first call after it, when the copy has long arrived. The record is journalled before
anything else sees it, and the relay feeds the sinks from the journal, so nothing here ever waits for a backend.

A trainer that is attached hands over whole updates (`submit`). Where a second core is free, a process there summarises them. It makes
the records of a loop of one's own too, as soon as these are worth it.

What is wrong in a record is found where it is made, and comes back with no wait: `on_alarm` calls whoever asked, and the next updates are
measured at DEBUG where the alarm is grave.

In a distributed run every rank has a `Telemetry`. They join what they measured at every flush; rank 0 has the journal and the sinks.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import partial, wraps
from inspect import signature
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NoReturn, ParamSpec, Self, SupportsFloat, TypeVar

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer

from esper_telemetry.core.arrays import IntegerLike, as_integer, as_number, as_settings, shown
from esper_telemetry.core.clock import Clock
from esper_telemetry.core.group import MetricGroup, Postponed
from esper_telemetry.core.packing import NO_VALUES, Values
from esper_telemetry.core.record import Axes, Level, RunInfo, RunStatus
from esper_telemetry.core.supervisor import fork_generation
from esper_telemetry.delivery.live import MAX_CLOSE_SECONDS
from esper_telemetry.delivery.status import CloseReport
from esper_telemetry.pipeline.follower import Follower, recorder_for
from esper_telemetry.pipeline.ranks import Note, Peers
from esper_telemetry.pipeline.record import FAILURE, INTERVENTION, Flush, OpenUpdate
from esper_telemetry.pipeline.response import AlarmCallback, Response
from esper_telemetry.pipeline.run import Recorder
from esper_telemetry.pipeline.sampling import BUDGET, Sampling
from esper_telemetry.pipeline.window import finish
from esper_telemetry.session import Detect, facts_of, watches
from esper_telemetry.sinks.registry import SinkLike
from esper_telemetry.updates.containment import Containment, Measurement
from esper_telemetry.updates.data import Snapshot
from esper_telemetry.updates.failure import Candidates, at_exit, failure_data, local_data, status_of
from esper_telemetry.updates.gradient_tap import Members, group_names
from esper_telemetry.updates.groups import summarize
from esper_telemetry.updates.model_watcher import WatchedModels

Event = TypeVar("Event")
Parameters = ParamSpec("Parameters")

NOT_PICKLED = (
    "a Telemetry belongs to the process that made it and cannot be pickled: leave it out of what is saved or sent to another process "
    "(environments, data loaders, checkpoints), and call observe, log and flush in the training process"
)
CLOSED = (
    "esper-telemetry: %s was called after close, and what is measured from here on is not recorded: close telemetry when training is over, "
    "or make another Telemetry"
)
NEVER_FLUSHED = (
    "esper-telemetry: flush was never called, so everything that was observed and logged is one record, marked as partial: call "
    "telemetry.flush(env_step=...) at the end of every update"
)
OVERDUE = (
    "esper-telemetry: several updates seem to have been observed since the last flush, and they will be one record: call "
    "telemetry.flush(env_step=...) at the end of every update"
)
BACKWARDS = "esper-telemetry: flush was given %s=%d after %d, so curves over it run backwards: pass the number since the run began"
REPEATED = (
    "esper-telemetry: flush was given update=%d after %d, and of an update that comes twice only the first record is shown: leave out "
    "update, or count on"
)

_logger = logging.getLogger("esper_telemetry")


def _with_suggestions(function: Callable[Parameters, None]) -> Callable[Parameters, None]:
    """The same function, whose TypeError for an unknown keyword argument names the one that is probably meant."""
    known = [*signature(function).parameters]

    @wraps(function)
    def checked(*args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        for name in kwargs:
            if name not in known:
                close = get_close_matches(name, known, 1, 0.5)
                hint = f"did you mean {close[0]!r}?" if close else f"it takes {', '.join(known[1:])}"
                raise TypeError(f"Telemetry has no argument {name!r}: {hint}")
        function(*args, **kwargs)

    return checked


class Telemetry:
    """Turns observed metric groups into one journalled record per update and sends it to the sinks.

    Args:
        sinks: sink objects, callables of one record, or URIs such as `"tensorboard"` and `"wandb:project"`; one or several.
        run_dir: where the journal and the local backends live; a new `runs/<name>-<time>` by default. None keeps nothing: no journal,
            all sinks in this process.
        name: what people call the run; the directory's name by default, and the default directory begins with it.
        level: `off`, `minimal`, `normal` or `debug`.
        config, tags, notes, facts: travel to every sink with the run; `attach` adds the trainer's own config and facts. `config` is a
            mapping, a dataclass or what `argparse` returns.
        close_timeout: seconds that `close` waits for the sinks at most, all together, as long as they take records; after them a process
            goes on by itself for some minutes (`docs/backends.md`, "The end of a run").
        resume: goes on in the run that `run_dir` holds, also in the backends. Give telemetry's state back by `load_state_dict`, unless an
            attached trainer loads a checkpoint. Updates that the journal holds already are not recorded again. Where several ranks
            report, each of them resumes.
        budget: share of the wall time that telemetry may take on the training thread; what is costly is measured in as many updates
            as that allows.
        detect: whether alarms are raised where a record shows that training goes wrong; or the thresholds to do so by.
        offload: whether an attached trainer's updates are summarised in a process beside it, and the records of a loop of one's own
            are made there once they take a noticeable share of its time. By default where a second core is free; never without a run
            directory.
        ranks: `all`: where `torch.distributed` is initialised, the ranks report as one. `alone`: this process reports its own numbers
            and needs no other one.

    With several ranks each makes its `Telemetry`, with the same level, and calls `flush` equally often: both wait for the others.
    Rank 0 alone claims the run directory, writes the journal and opens the sinks; the others' arguments for these are passed over, and
    what they `log` is too. What each rank observes of its own data is merged as if one process had measured all of it; what is the same
    everywhere, such as gradients that DistributedDataParallel has averaged, is rank 0's. `close` waits for nobody.

    Raises:
        ValueError: for an unknown level or sink, a budget that is no share, and an empty `run_dir`.
        TypeError: for thresholds that are none, and other arguments of the wrong type.
        FileExistsError: if `run_dir` holds a journal already.
        NotADirectoryError: if it is a file.
        FileNotFoundError, BlockingIOError: with `resume`, if it holds none, or a run that is still being trained.
        OSError: if `run_dir` can be no directory, or, with `resume`, cannot be written.
        RuntimeError: a rank made no `Telemetry` within a minute.
        All of them are raised on every rank, and nothing is left behind.

    Threads may share a Telemetry: one call at a time is served. It cannot be pickled; a copy of an object that holds one holds the same.

    Whatever else the system refuses, at the start or later, costs a warning and never the training: without shared memory, descriptors or
    processes updates are measured in this process; where a new `run_dir` cannot be written, the run has no journal.
    """

    @_with_suggestions
    def __init__(
        self,
        sinks: SinkLike | Iterable[SinkLike] | None = (),
        *,
        run_dir: str | Path | Literal["auto"] | None = "auto",
        name: str | None = None,
        level: str | Level = Level.NORMAL,
        config: object = None,
        tags: str | Sequence[str] | None = (),
        notes: str | None = "",
        facts: Mapping[str, Any] | None = None,
        close_timeout: float = MAX_CLOSE_SECONDS,
        budget: float = BUDGET,
        detect: Detect = True,
        offload: bool = True,
        resume: bool = False,
        ranks: Literal["all", "alone"] = "all",
    ) -> None:
        if not as_number(close_timeout, "close_timeout") > 0:
            raise ValueError(f"close_timeout must be a positive number of seconds, got {close_timeout}")
        _check_choices(
            ranks=(ranks, ("all", "alone")), offload=(offload, (True, False)), resume=(resume, (True, False))
        )
        if not isinstance(name, str | None):
            raise TypeError(f"name must be a text, got {shown(name)}")
        self.level = Level.parse(level)
        watch = watches(detect)
        self.sampling = Sampling(self.level, as_number(budget, "budget"))
        self._lock = threading.RLock()
        self.clock = Clock()
        self._generation = fork_generation()
        self._timeout = close_timeout
        self._config = as_settings(config, "config")
        self._facts = {**as_settings(facts, "facts"), **facts_of(detect)}
        self._offload = offload
        self._candidates: list[Candidates] = []
        self._open_update: Callable[[], Snapshot] = Snapshot
        self._leaving: list[Callable[[], None]] = []
        self._open = OpenUpdate()
        self._containment = Containment()
        self._watched = WatchedModels(self.clock)
        self._flush: Flush | None = None
        self._axes = Axes(update=0, env_step=0, gradient_step=0, wall_time=time.time())
        self._collected = 0
        self._flushed = time.perf_counter()
        self._closed = False
        self._attached = False
        self._flushes = 0
        self._warned: set[str] = set()
        self._recorder: Recorder | Follower | None = None
        self._peers: Peers | None = None
        if self.level > Level.OFF:
            self._peers = Peers.meet() if ranks == "all" else None
            labels = (tags,) if isinstance(tags, str) else tuple(map(str, tags or ()))
            settings = {"run_dir": run_dir, "name": name, "tags": labels, "notes": notes or ""}
            lends = offload and self._peers is None
            claim: Callable[..., Recorder] = partial(Recorder, sinks, level=self.level, watches=watch, resume=resume)
            claim = partial(claim, hand_over=lends)
            self._recorder = recorder_for(self._peers, partial(claim, **settings))
            self._axes = self._recorder.axes or self._axes
            self._at_exit = at_exit(self)
        self._response = Response(self.level, self.clock, together=self._peers is not None)

    @property
    def run_dir(self) -> Path | None:
        """Where this run's journal lives, on every rank; None without one."""
        return self._recorder.run_dir if self._recorder else None

    @property
    def ranks(self) -> int:
        """How many processes report together."""
        return self._peers.size if self._peers else 1

    @property
    def run(self) -> RunInfo | None:
        """What the sinks know of the run; None at OFF, before it has started and on all ranks but the first."""
        return self._recorder.run if self._recorder else None

    def __repr__(self) -> str:
        state = "off" if self.level is Level.OFF else "closed" if self._closed else "open"
        return (
            f"<Telemetry {state}, level {self.level.name.lower()}, run_dir {self.run_dir}, update {self._axes.update}>"
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError(NOT_PICKLED)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def start(self, *, config: Mapping[str, Any] | None = None, facts: Mapping[str, Any] | None = None) -> None:
        """Adds to the config and the facts of the run and announces it to the sinks; the first `flush` does so otherwise.

        What passes before a trainer says that it starts is no update's time.
        """
        if facts is not None:
            self._flushed = time.perf_counter()
        self._config.update(config or {})
        self._facts.update(facts or {})
        if self._recorder and self._recorder.run is None:
            self._recorder.start(self._config, self._facts, self._axes)

    def state_dict(self) -> dict[str, int]:
        """Where the run stands, for a checkpoint; waits until the journal holds everything so far, so that no gap can follow it."""
        self.materialise()
        if self._active and self._recorder and self._recorder.run is not None:
            self._recorder.sync()
        return {name: getattr(self._axes, name) for name in ("update", "env_step", "gradient_step")}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes on counting where a checkpoint was taken; before the first `flush`."""
        self._axes = Axes(state["update"], state["env_step"], state["gradient_step"], time.time())
        self._flushes = 0

    def observe(
        self,
        *groups: MetricGroup | Postponed | Iterable[MetricGroup],
        epoch: IntegerLike | Sequence[IntegerLike] = 0,
        step: IntegerLike | None = None,
    ) -> None:
        """Adds groups to the update's record; copies their numbers on the device and never waits for it.

        Args:
            groups: results of metric functions: a `MetricGroup` or several in a tuple.
            epoch: pass over the rollout, from 0; one per row for groups with several rows.
            step: optimizer steps taken in this update before the group was measured. By default the first `observe` of a kind of group
                after `flush` is step 0, the next step 1, and so on; pass it under gradient accumulation.

        Raises:
            TypeError: for what is no metric group, such as plain numbers, which `log` takes.
            ValueError: for epochs and steps that are no whole numbers from 0.
        """
        if not self._takes("observe"):
            return
        with self._lock, self.clock:
            epochs = _epochs(epoch)
            place = None if step is None else as_integer(step, "step")
            for group in list(_flat(groups)):
                if isinstance(group, Postponed):
                    self._open.window.postpone(group, epochs, place)
                else:
                    self._open.window.add(group, epochs, place)
            if self._open.window.overdue:
                self._warn(OVERDUE)

    def watch(
        self, model: nn.Module, optimizer: Optimizer, *, actor: Members | None = None, critic: Members | None = None
    ) -> Callable[[], None]:
        """Measures the model's gradients before and after clipping at every step of the optimizer, and the learning rate.

        Args:
            model: also one that is compiled, or wrapped in DistributedDataParallel.
            optimizer: of its parameters; watch each of several, with the same model.
            actor, critic: their modules, parameters, or names of either; what serves both may belong to both or neither.

        What a record holds are the gradients that the step is taken with: summed over accumulated passes, averaged over ranks, without a
        gradient scaler's scale; and those after whatever clips them. Where that cannot be told, a warning says so once. Returns the
        function that ends this; `close` does too. Leave `gradient_health` out of a loop that is watched.

        Raises:
            TypeError: for what is no module or no optimizer.
            ValueError: the optimizer trains nothing of the model, or is watched with another one; a group is no part of the model; ranks
                hold parts of its parameters.
        """
        if not isinstance(model, nn.Module) or not hasattr(optimizer, "register_step_pre_hook"):
            raise TypeError(f"watch takes a torch module and its optimizer, got {_kind(model)} and {_kind(optimizer)}")
        parts = {"actor": actor, "critic": critic}
        groups = {name: group_names(model, members) for name, members in parts.items() if members is not None}
        if not self._takes("watch"):
            return lambda: None
        remove = self._watched.add(model, optimizer)
        if groups:
            self._facts["groups"] = {**self._facts.get("groups", {}), **groups}
        return remove

    def submit(self, snapshot: Snapshot) -> None:
        """Adds a whole update, to be summarised when it is flushed: in the process beside this one if there is one, here otherwise.

        Its tensors must stay as they are until `flush` returns.
        """
        if not self._active or self._recorder is None:
            return
        with self._lock, self.clock:
            if not snapshot.on_device and not self._peers:
                self._open.snapshots.append(snapshot)
                return
            for measurements, epochs in self._containment.steps(summarize(snapshot, self._facts, self.update_level)):
                self.measure(measurements, epoch=epochs)
            if self.level >= Level.NORMAL and isinstance(self._recorder, Recorder) and self.run_dir is not None:
                self._open.witnesses.append(snapshot)

    def measure(self, measurements: Iterable[Measurement], *, epoch: int | Sequence[int] = 0) -> None:
        """Observes what metric functions find that are called on a trainer's behalf: one that raises costs its group and a warning."""
        if self._active:
            with self._lock, self.clock:
                self._containment.measure(measurements, partial(self._open.window.add, epoch=epoch, step=None))

    def attempt(self, function: Callable[[Event], None], event: Event) -> None:
        """Calls a hook of telemetry's own; one that raises costs what it would have measured, and a warning."""
        self._containment.attempt(partial(function, event), lambda _: None)

    def failed(self, function: Callable[..., object], error: Exception) -> None:
        """The same for a function that was called already, and has raised."""
        self._containment.note(function, error)

    def log(self, values: Mapping[str, SupportsFloat]) -> None:
        """Adds plain numbers to the update's record; non-finite ones are counted under `<key>_nonfinite`.

        Raises:
            ValueError: for a key that not every backend accepts.
            TypeError: for what is no mapping, and for a value that is not one number of Python, NumPy or torch.
        """
        if not self._takes("log"):
            return
        with self._lock, self.clock:
            self._open.logged.add(values)

    def flush(
        self, *, env_step: IntegerLike, update: IntegerLike | None = None, gradient_step: IntegerLike | None = None
    ) -> None:
        """Ends an update: everything observed since the last flush becomes one record.

        Args:
            env_step: environment steps at which this update's data were collected.
            update: index of the update; counted from 1 by default.
            gradient_step: optimizer steps so far; counted from the observed rows by default.

        Raises:
            TypeError, ValueError: for what is no whole number from 0 of Python, NumPy or torch.
        """
        if not self._takes("flush"):
            return
        with self._lock, self.clock:
            env_step = as_integer(env_step, "env_step")
            update = None if update is None else as_integer(update, "update")
            gradient_step = None if gradient_step is None else as_integer(gradient_step, "gradient_step")
            if self._recorded_elsewhere:
                self._pass_on(env_step, update, gradient_step)
                return
            if self._watched:
                self._containment.attempt(partial(self._take_watched, whole=True), lambda _: None)
            self.materialise()
            self.start()
            self._response.begin()
            self._send(env_step, update, gradient_step, partial=False)
            self._response.end(recorded=self._flush is not None)
            if self._flush and (self._peers or not self._flush.transfer.pending):
                self.materialise()  # ranks end their updates together: the device has nothing left to do
            if self._flush:
                self._flush = self._flush.lasting()
            self._hear()

    def materialise(self) -> None:
        """Makes the record of the last flush, if its numbers were still on their way from the device."""
        if not self._active or self._recorder is None or self._flush is None:
            return
        with self._lock, self.clock:
            flush, self._flush = self._flush, None
            tables, note = flush.transfer.tables(), Note(self.sampling.proposed, self._response.asked)
            if self._peers and not flush.partial:
                tables, note = self._peers.join(tables, note)
                self._response.agree(note.raised)
            self.sampling.adopt(note.every)
            if isinstance(self._recorder, Follower):
                return
            self._recorder.describe(tables)
            finished: list[Values] = []
            self._containment.attempt(partial(finish, tables, flush.level, flush.transfer.copies), finished.append)
            measured = finished[0] if finished else NO_VALUES
            seconds, cpu_seconds, elapsed = self._spent()
            self.sampling.learn(cpu_seconds if self._peers else seconds, elapsed)  # to wait for other ranks is no cost
            self._recorder.record(
                flush.axes,
                measured,
                flush.snapshots,
                numbers=flush.numbers,
                witnesses=flush.witnesses,
                level=flush.level,
                partial=flush.partial,
                seconds=seconds,
                cpu_seconds=cpu_seconds,
                elapsed=elapsed,
                metric_errors=self._containment.take(),
            )

    def begin_update(self, env_step: int) -> None:
        """An update begins, with data collected so far: its level is what alarms have asked for by now.

        If the update never ends, its record stands at `env_step`.
        """
        if not self._active:
            return
        self._collected = env_step
        self.materialise()
        self._hear()
        self._response.begin()

    @property
    def update_level(self) -> Level:
        """At which the update under way is measured: DEBUG where an alarm asks for it, else `level`."""
        return self._response.level

    @property
    def escalated(self) -> bool:
        """Whether an alarm has raised the level of the update under way."""
        return self._response.escalated

    def on_alarm(self, callback: AlarmCallback) -> Callable[[], None]:
        """Calls `callback(alarm)` when an alarm is raised, gets worse or is over; returns the function that ends this.

        It is called on the training thread, at the end of a rollout or of an update, or by `close`: an update or two after the one that
        shows it, so it may change the trainer. What it raises is logged, once, and training goes on; KeyboardInterrupt and
        SystemExit are not caught. Its time does not count as telemetry's. Of several ranks the first one's callbacks are called.

        Raises:
            TypeError: for what cannot be called.
        """
        self._takes("on_alarm")
        return self._response.on_alarm(callback)

    def notify_intervention(self, reason: str = "", **details: Any) -> None:
        """Says that training was changed on purpose, so that what follows is no surprise: a learning rate, a reward scale, a curriculum.

        Alarms that compare with the run's own history wait for three updates and begin a new history; those of certain faults do not. The
        journal keeps it as an event `intervention`.

        Args:
            reason: what was done, in words.
            details: settings that were changed; plain values.
        """
        if not self._takes("notify_intervention") or self._recorder is None or self._recorder.run is None:
            return
        with self._lock, self.clock:
            self.materialise()
            self._recorder.event(INTERVENTION, self._axes, {"reason": reason, **details})

    def expect_updates(self, *, candidates: Candidates, open_update: Callable[[], Snapshot]) -> None:
        """Prepares for a trainer that submits whole updates; called when one is attached.

        Args:
            candidates: as for `search_on_failure`.
            open_update: takes what has happened in an update that will not end.
        """
        self.search_on_failure(candidates)
        self._open_update, self._attached = open_update, True
        if self._takes("attach") and self._recorder and self._offload and not self._peers:
            self._recorder.offload()

    def search_on_failure(self, candidates: Candidates) -> None:
        """Searches these tensors, in forward order, for the first non-finite one when training raises; the latest caller's come first."""
        self._candidates.insert(0, candidates)

    def on_close(self, callback: Callable[[], None]) -> None:
        """Calls `callback()` when the run ends, before its open update is taken: for what listens to a trainer."""
        self._leaving.append(callback)

    def close(self, status: RunStatus | str = RunStatus.FINISHED) -> CloseReport | None:
        """Ends the run: writes what is open, waits for the sinks up to `close_timeout`, reports what they hold. Idempotent."""
        return self._end(RunStatus(status))

    def _end(self, status: RunStatus, failure: Mapping[str, Any] | None = None) -> CloseReport | None:
        """Ends the run as `close` does; the failure event comes behind the record of the open update."""
        with self._lock:
            return self._end_alone(status, failure)

    def _end_alone(self, status: RunStatus, failure: Mapping[str, Any] | None) -> CloseReport | None:
        if not self._active or self._recorder is None:
            return None
        self.materialise()
        self.start()
        if status is RunStatus.FINISHED and self._open and not self._flushes and not self._attached:
            self._warn(NEVER_FLUSHED)
        failed_after = self._axes
        for leave in self._leaving:
            self._containment.attempt(leave, lambda _: None)
        self._containment.attempt(self._open_update, self.submit)
        self._containment.attempt(partial(self._take_watched, whole=False), lambda _: self._watched.stop())
        if self._open:
            self._send(max(self._collected, self._axes.env_step), None, None, partial=True)
            self.materialise()
        if failure is not None:
            self._recorder.event(FAILURE, failed_after, failure)
        self._closed = True
        atexit.unregister(self._at_exit)
        if self._peers:
            self._peers.leave()
        report = self._recorder.close(status, self._timeout)
        self._hear()
        return report

    def abandon(self, error: BaseException) -> None:
        """Ends the run as failed from another thread, where the training thread is stuck for good; the open update is given up."""
        if not self._active or self._recorder is None:
            return
        self.start()
        self._closed = True
        self._recorder.event(FAILURE, self._axes, failure_data(error))
        self._recorder.close(RunStatus.FAILED, self._timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        status = status_of(error)
        failure = None
        if error is not None and status is RunStatus.FAILED and self._active:
            data: Candidates = partial(local_data, error)
            failure = failure_data(error, *self._candidates, data, self._watched.nonfinite_candidates)
        self._end(status, failure)

    @property
    def _active(self) -> bool:
        """Whether this object records: not at OFF, not after close, never in a forked copy of the process."""
        return self._recorder is not None and not self._closed and fork_generation() == self._generation

    def _takes(self, call: str) -> bool:
        """Whether a call of the user's is recorded; the first one that comes after `close` is told."""
        if self._active:
            return True
        if self._closed and fork_generation() == self._generation:
            self._warn(CLOSED, call)
        return False

    def _warn(self, message: str, *args: object) -> None:
        """Once."""
        if message not in self._warned:
            self._warned.add(message)
            _logger.warning(message, *args)

    @property
    def _recorded_elsewhere(self) -> bool:
        """Whether another process, which knows the run, makes all of the update's record: nothing of it is a row of this window."""
        beside = self._recorder is not None and self._recorder.offloaded and self._recorder.run is not None
        return beside and self._flush is None and self._open.travels and not self._watched

    def _pass_on(self, env_step: int, update: int | None, gradient_step: int | None) -> None:
        """What `flush` does with such an update: what no row needs is left out, because all that is touched is cold."""
        assert isinstance(self._recorder, Recorder)
        level = self._response.begin()
        axes = self._next_axes(env_step, update, gradient_step)
        numbers, snapshots = self._open.take()
        recorded = self._advance(axes)
        self._response.end(recorded=recorded)
        if recorded:
            self.sampling.adopt(self.sampling.proposed)
            seconds, cpu_seconds, elapsed = self._spent()
            self.sampling.learn(seconds, elapsed)
            self._recorder.record(
                *(axes, NO_VALUES, snapshots),
                numbers=numbers,
                level=level,
                partial=False,
                seconds=seconds,
                cpu_seconds=cpu_seconds,
                elapsed=elapsed,
                metric_errors=self._containment.take(),
            )
        self._hear()

    def _take_watched(self, *, whole: bool) -> None:
        """Adds what was seen of watched models to the update."""
        snapshot = self._watched.take(whole=whole)
        if snapshot:
            for measurements, epochs in self._containment.steps(summarize(snapshot, self._facts, self.update_level)):
                self.measure(measurements, epoch=epochs)
            self.measure(self._watched.rates())

    def _hear(self) -> None:
        """Takes in what was found in the records by now, and tells whoever asked; between records, so that nothing can interleave."""
        if self._recorder is not None:
            self._response.hear(self._recorder.found())
            self._response.call()

    def _send(self, env_step: int, update: int | None, gradient_step: int | None, *, partial: bool) -> None:
        assert self._recorder is not None
        axes = self._next_axes(env_step, update, gradient_step)
        flush = self._open.send(axes, self.update_level, partial=partial)
        if self._advance(axes):
            self._flush = flush

    def _advance(self, axes: Axes) -> bool:
        """Goes on to there; whether a record belongs there, because no earlier part of the run has it."""
        assert self._recorder is not None
        new = not self._recorder.covers(axes)
        if new and self._flushes:
            self._compare(axes)
        self._flushes += 1
        if new or axes.update <= self._recorder.recorded:
            self._axes = axes
        return new

    def _compare(self, axes: Axes) -> None:
        """Warns where the update does not lie behind the last one."""
        last = self._axes
        if axes.update <= last.update:
            self._warn(REPEATED, axes.update, last.update)
        if axes.env_step < last.env_step:
            self._warn(BACKWARDS, "env_step", axes.env_step, last.env_step)
        elif axes.gradient_step < last.gradient_step:
            self._warn(BACKWARDS, "gradient_step", axes.gradient_step, last.gradient_step)

    def _next_axes(self, env_step: int, update: int | None, gradient_step: int | None) -> Axes:
        """Where the update under way stands: as was said, or counted."""
        last = self._axes
        if gradient_step is None:
            gradient_step = last.gradient_step + self._open.gradient_steps
        return Axes(last.update + 1 if update is None else update, env_step, gradient_step, time.time())

    def _spent(self) -> tuple[float, float, float]:
        """Seconds since the last record: those that telemetry took, of the wall and of the processor, and all of them."""
        now = time.perf_counter()
        elapsed, self._flushed = now - self._flushed, now
        return *self.clock.take(), elapsed


def _flat(groups: Iterable[object]) -> Iterator[MetricGroup | Postponed]:
    """The groups one by one, those in tuples, lists and generators too; what is postponed as a whole."""
    for group in groups:
        if isinstance(group, MetricGroup | Postponed):
            yield group
        elif isinstance(group, Iterable) and not isinstance(group, Mapping | str | bytes | Tensor | np.ndarray):
            yield from _flat(group)
        else:
            raise TypeError(
                f"observe takes what metric functions return, got {shown(group)}: plain numbers go to telemetry.log({{'my/key': 0.3}})"
            )


def _epochs(epoch: object) -> int | list[int]:
    """The epoch, or one per row."""
    several = isinstance(epoch, Sequence) and not isinstance(epoch, str)
    if several or (isinstance(epoch, Tensor | np.ndarray) and epoch.ndim == 1):
        return [as_integer(one, "epoch") for one in epoch]  # type: ignore[attr-defined]  # mypy forgets what was asked
    return as_integer(epoch, "epoch")


def _check_choices(**choices: tuple[object, tuple[object, ...]]) -> None:
    """Raises ValueError for an argument that has none of its values."""
    for name, (value, known) in choices.items():
        if not isinstance(value, str | bool | np.bool_) or value not in known:
            raise ValueError(f"{name} must be {' or '.join(map(repr, known))}, got {shown(value)}")


def _kind(value: object) -> str:
    return (
        "None" if value is None else f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
    )
