"""`Telemetry`: observe groups, log numbers, flush once per update, close."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial, wraps
from inspect import signature
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, NoReturn, ParamSpec, Self, SupportsFloat

import numpy as np
from torch import nn
from torch.optim import Optimizer

from esper_telemetry.alarms.detectors import Detectors
from esper_telemetry.alarms.rule import AlarmRule
from esper_telemetry.alarms.thresholds import Thresholds, alarm_rules, as_rules, with_alarms
from esper_telemetry.core.arrays import IntegerLike, as_integer, as_number, as_settings, shown
from esper_telemetry.core.facts import checked_facts
from esper_telemetry.core.group import MetricGroup, Postponed
from esper_telemetry.core.record import Level, RunInfo, RunStatus
from esper_telemetry.core.redaction import redacted
from esper_telemetry.core.requirements import require_each, require_text
from esper_telemetry.delivery.live import MAX_CLOSE_SECONDS
from esper_telemetry.delivery.status import CloseReport
from esper_telemetry.events import Hooks, Remover
from esper_telemetry.journal.lines import plain
from esper_telemetry.pipeline.in_process import DetectorFactory
from esper_telemetry.pipeline.response import AlarmCallback
from esper_telemetry.pipeline.run_recorder import RunOptions
from esper_telemetry.pipeline.sampling import BUDGET
from esper_telemetry.recording.pairs import measure_pair
from esper_telemetry.recording.recorder import UpdateRecorder
from esper_telemetry.session import SessionOptions, TelemetrySession
from esper_telemetry.sinks.sink_protocol import require_package
from esper_telemetry.sinks.sink_registry import SinkLike
from esper_telemetry.updates.extensions import EventSource, ObservedSource
from esper_telemetry.updates.gradient_watcher import Members

MAX_CLOSE_TIMEOUT_SECONDS: Final = 1e8
"""Three years; operating systems cannot wait much longer than some centuries."""

Parameters = ParamSpec("Parameters")

Detect = bool | Thresholds | DetectorFactory
"""The `detect=` argument: whether alarms are raised, the thresholds for them, or a factory of another detector."""

NOT_PICKLED: Final = (
    "a Telemetry belongs to the process that made it and cannot be pickled: leave it out of what is saved or sent to another process "
    "(environments, data loaders, checkpoints), and call observe, log and flush in the training process"
)


def _with_suggestions(function: Callable[Parameters, None]) -> Callable[Parameters, None]:
    """Return the function; its TypeError for an unknown keyword argument suggests the closest name."""
    names = [*signature(function).parameters]

    @wraps(function)
    def checked(*args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        for name in kwargs:
            if name not in names:
                close = get_close_matches(name, names, 1, 0.5)
                hint = f"did you mean {close[0]!r}?" if close else f"it takes {', '.join(names[1:])}"
                raise TypeError(f"Telemetry has no argument {name!r}: {hint}")
        function(*args, **kwargs)

    return checked


class Telemetry:
    """Records what a training program measures, one record per update, in the journal and in the sinks.

    Args:
        sinks: sink objects, callables of one record, or URIs such as `"tensorboard"` and `"wandb:project"`; one or several.
        run_dir: directory for the journal and the local backends; a new `runs/<name>-<time>` by default. With None nothing is kept: no
            journal is written, and all sinks run in this process.
        name: display name of the run, and prefix of the default directory. By default the last three parts of the directory's path,
            from `runs` on, so that `seed1/telemetry` and `seed2/telemetry` differ in every backend.
        level: `off`, `minimal`, `normal` or `debug`.
        config, tags, notes, facts: sent to every sink with the run; `attach` adds the trainer's own config and facts. `config` is a
            mapping, a dataclass or the namespace that `argparse` returns.
        close_timeout: maximum number of seconds that `close` waits for all sinks together while they still take records. After that a
            background process continues for some minutes (`docs/backends.md`, "The end of a run").
        budget: fraction of the wall time that telemetry may take on the training thread. Costly metrics are measured in as many updates
            as it allows.
        detect: whether alarms are raised if a record shows that training goes wrong; or the thresholds for them.
        escalation: number of updates at DEBUG after a critical alarm; 0 for no such updates. By default each alarm asks for 2 to 10.
        alarms: your own alarms, in addition to the alarms that are built in or come from installed plugins. The worker process must be able
            to import them: this process evaluates an alarm that the script itself defines.
        offload: whether records are made in a worker process. By default, records of attached trainers and adapters are made there, and
            records of your own loop on its thread. True uses the worker for both, False for neither. No worker is used without a run
            directory or a second core, with several ranks, or if CUDA is in use.
        resume: continue the run that `run_dir` holds, also in the backends. Restore telemetry's state with `load_state_dict`, unless an
            attached trainer loads a checkpoint. Updates that the journal already holds are judged and not recorded again: a warning
            reports their alarms. If several ranks report, each of them must resume.
        report: whether `close` writes the run as a page, `report.html` in `run_dir`, which MLflow and W&B store. It takes some seconds
            after a long run and needs the extra `views`.
        notify: one or several addresses of Apprise, such as `slack://TOKEN_A/TOKEN_B/TOKEN_C`, that get a message when an incident
            becomes critical, and the outcome at the end. It needs the extra `notify`.
        ranks: with `all`, the ranks report as one if `torch.distributed` is initialised. With `alone`, this process reports only its own
            numbers and does not wait for other ranks.

    With several ranks, each makes its `Telemetry` with the same level and calls `flush` equally often: both calls wait for the other ranks.
    Only rank 0 claims the run directory, writes the journal and opens the sinks; on other ranks the arguments for these and calls of `log`
    are ignored. Measurements of each rank's own data are merged as if one process had measured all of it. For values that are the same on
    all ranks, such as gradients averaged by DistributedDataParallel, rank 0's are recorded. `close` does not wait for other ranks.

    Raises:
        ModuleNotFoundError: `report` is set and plotly is not installed.
        ValueError: an unknown level or sink, a budget that is not a fraction, or an empty `run_dir`.
        TypeError: an argument of the wrong type, such as `detect`.
        FileExistsError: `run_dir` holds a journal already.
        NotADirectoryError: `run_dir` is a file.
        FileNotFoundError, BlockingIOError: with `resume`, `run_dir` has no journal, or its run is still being trained.
        OSError: `run_dir` cannot be a directory or, with `resume`, cannot be written.
        RuntimeError: a rank did not make its `Telemetry` within a minute.

    An error is raised on every rank and leaves nothing behind.

    Threads may share a Telemetry: it serves one call at a time. A call from a signal handler is served after the call that it interrupts.
    A Telemetry cannot be pickled, and copying an object that holds one does not copy it.

    Anything else that the operating system refuses costs a warning and never the training. Without shared memory, descriptors or processes,
    updates are measured in this process; if a new `run_dir` cannot be written, no journal is kept.
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
        escalation: int | None = None,
        alarms: AlarmRule | Iterable[AlarmRule] = (),
        offload: bool | None = None,
        resume: bool = False,
        report: bool = False,
        notify: str | Sequence[str] | None = (),
        ranks: Literal["all", "alone"] = "all",
    ) -> None:
        seconds = as_number(close_timeout, "close_timeout")
        if not 0 < seconds <= MAX_CLOSE_TIMEOUT_SECONDS:
            limit = f"{MAX_CLOSE_TIMEOUT_SECONDS:,.0f}"
            raise ValueError(f"close_timeout must be positive and at most {limit} seconds, got {shown(close_timeout)}")
        _check_choice("ranks", ranks, ("all", "alone"))
        if offload is not None:
            _check_choice("offload", offload, (True, False))
        _check_choice("resume", resume, (True, False))
        _check_choice("report", report, (True, False))
        if report:
            require_package("plotly", "report=True")
        if name is not None:
            require_text("name", name, may_be_empty=True)
        if notes is not None:
            require_text("notes", notes, may_be_empty=True)
        labels = () if tags is None else require_each("tags", [tags] if isinstance(tags, str) else tags, require_text)
        addresses = () if notify is None else require_each("notify", [notify] if isinstance(notify, str) else notify, require_text)
        rules = tuple(as_rules(alarms))
        factory = detector_factory(detect, rules)
        if offload:
            check_sendable(rules)
        settings = as_settings(config, "config")
        redacted_name = redacted({"config": plain(settings), "name": name})["name"]  # the run directory gets it
        options = SessionOptions(
            run=RunOptions(run_dir, redacted_name, labels, notes or "", resume),
            level=Level.parse(level),
            detector_factory=factory,
            budget=as_number(budget, "budget"),
            close_timeout=seconds,
            offload=offload,
            config=settings,
            facts={
                **checked_facts(as_settings(facts, "facts")),
                # Only changes from the defaults, so that readers of the journal judge the run by the same thresholds.
                **({"thresholds": detect.changes()} if isinstance(detect, Thresholds) else {}),
                **({} if escalation is None else {"escalation": as_integer(escalation, "escalation")}),
            },
            all_ranks=ranks == "all",
            report=bool(report),
            notify=addresses,
        )
        self._session = TelemetrySession(sinks, options)

    @property
    def level(self) -> Level:
        """The level without escalation."""
        return self._session.level

    @property
    def run_dir(self) -> Path | None:
        """The directory of this run's journal, on every rank; None without one."""
        return self._session.run_dir

    @property
    def run(self) -> RunInfo | None:
        """The run as sinks receive it; None at OFF, before the run has started, and on all ranks except rank 0."""
        return self._session.run

    def observe(
        self,
        *groups: MetricGroup | Postponed | Iterable[MetricGroup],
        epoch: IntegerLike | Sequence[IntegerLike] = 0,
        step: IntegerLike | None = None,
    ) -> None:
        """Add groups to the update's record; copies their numbers on the device without synchronising.

        Args:
            groups: results of metric functions: a `MetricGroup`, or several in a tuple.
            epoch: pass over the rollout, from 0; a sequence gives one per row for groups with several rows.
            step: optimizer steps taken in this update before the group was measured. By default, the first `observe` of a kind of group
                after `flush` is step 0, the next step 1, and so on; pass it if you accumulate gradients.

        Raises:
            TypeError: for anything that is not a metric group, such as plain numbers; `log` takes those.
            ValueError: for epochs and steps that are not whole numbers from 0.
        """
        self._session.observe(groups, epoch, step)

    def log(self, values: Mapping[str, SupportsFloat]) -> None:
        """Add plain numbers to the update's record; non-finite numbers are counted under `<key>_nonfinite`.

        Raises:
            ValueError: for a key that some backend would not accept.
            TypeError: if `values` is not a mapping, or a value is not a single number of Python, NumPy or torch.
        """
        self._session.log(values)

    def watch(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        actor: Members | None = None,
        critic: Members | None = None,
        stop_on_nonfinite: bool = False,
    ) -> ObservedSource:
        """Measure the learning rate and the model's gradients before and after clipping, at every step of the optimizer.

        Args:
            model: the module; it may be compiled or wrapped in DistributedDataParallel.
            optimizer: optimizer of its parameters. If there are several, call `watch` for each, with the same model or with its own.
            actor, critic: their modules, parameters, or names of either. Shared parts may belong to both or to neither.
            stop_on_nonfinite: let `backward` raise FloatingPointError, with the parameter's name, at the first gradient that is not finite.
                Each gradient is checked when it is computed, which synchronises a GPU. Do not use it with a gradient scaler,
                which makes gradients overflow on purpose. It is ignored at level `off`.

        A record holds the gradients that the step uses, before and after clipping: summed over accumulated passes, averaged over ranks, and
        without a gradient scaler's scale. A warning says once if they cannot be determined. Call the result, or `close`, to stop measuring.
        `watch_pair` takes the result as its source. Do not call `gradient_health` in a loop that is watched.

        Raises:
            TypeError: for arguments that are not a module and an optimizer.
            ValueError: the optimizer trains no parameter of the model or is watched with another one; a group is not part of the model; or
                each rank holds only parts of the parameters.
        """
        _check_choice("stop_on_nonfinite", stop_on_nonfinite, (True, False))
        return self._session.watch(model, optimizer, actor=actor, critic=critic, stop_on_nonfinite=stop_on_nonfinite)

    def flush(self, *, env_step: IntegerLike, update: IntegerLike | None = None, gradient_step: IntegerLike | None = None) -> None:
        """End an update: everything observed since the last flush becomes one record.

        Args:
            env_step: number of environment steps when this update's data had been collected.
            update: index of the update; counted from 1 by default.
            gradient_step: optimizer steps so far; counted from the observed rows by default.

        Raises:
            TypeError, ValueError: for anything that is not a whole number from 0 of Python, NumPy or torch.
        """
        self._session.flush(env_step=env_step, update=update, gradient_step=gradient_step)

    def on_alarm(self, callback: AlarmCallback) -> Callable[[], None]:
        """Call `callback(alarm)` when an alarm is raised, gets worse or ends; returns a function that removes the callback.

        The callback runs on the training thread, at the end of a rollout or of an update, or in `close`. A worker delays it by an update or
        two. The callback may change the trainer. An exception in it is logged once, and training continues;
        KeyboardInterrupt and SystemExit are not caught. Its time is not included in telemetry's. Only callbacks on rank 0 are called.

        Raises:
            TypeError: if `callback` is not callable.
        """
        return self._session.on_alarm(callback)

    def request_stop(self) -> None:
        """Make `should_stop` return True on every rank, from the next `flush` on. Callbacks and signal handlers may call it."""
        self._session.request_stop()

    def should_stop(self, *, alarms: bool = True) -> bool:
        """Return whether the loop should end: an alarm has been critical, or a rank has called `request_stop`.

        Telemetry itself never ends training. Call it after `flush`, in which the ranks exchange the answer: it is the same on all of
        them, so that all stop after the same update, one update after an alarm. At level `off`, ranks do not exchange requests.

        Args:
            alarms: whether critical alarms count.
        """
        return self._session.should_stop(alarms=alarms)

    def notify_intervention(self, reason: str = "", **details: Any) -> None:
        """Note that training was changed on purpose (a learning rate, a reward scale, a curriculum), so that the change raises no alarm.

        Alarms that compare with the run's own history wait for three updates and begin a new history; alarms for definite faults do not.
        The journal keeps the note as an event `intervention`.

        Args:
            reason: description of the change.
            details: settings that were changed; plain values.
        """
        self._session.notify_intervention(reason, **details)

    def state_dict(self) -> dict[str, int]:
        """Return the counts of the run, for a checkpoint. Waits until the journal is complete up to now, so that resuming leaves no gap."""
        return self._session.state_dict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue the counts of a checkpoint; call it before the first `flush`."""
        self._session.load_state_dict(state)

    def close(self, status: RunStatus | str = RunStatus.FINISHED) -> CloseReport | None:
        """End the run: write the open update, wait for the sinks up to `close_timeout`, and report what they took. Idempotent."""
        return self._session.close(RunStatus(status))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._session.__exit__(kind, error, trace)

    def __repr__(self) -> str:
        return f"<Telemetry {self._session!r}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(NOT_PICKLED)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


def session_of(telemetry: Telemetry) -> TelemetrySession:
    """Return the session behind a telemetry, for trainers, adapters and commands."""
    return telemetry._session


def attach(telemetry: Telemetry, source: EventSource) -> Remover:
    """Make `telemetry` observe and flush the events of `source`; returns a function that detaches it.

    At level OFF nothing is registered, so the trainer does no extra work. A source may offer more than hooks: see `updates.extensions`.

    Raises:
        TypeError: for arguments that are not a Telemetry and an object that emits events.
    """
    emits = isinstance(source, EventSource) and isinstance(source.hooks, Hooks)
    if not isinstance(telemetry, Telemetry) or not emits:
        raise TypeError(
            f"attach takes a Telemetry and a trainer with hooks, got {type(telemetry).__name__} and {type(source).__name__}: "
            "telemetry.watch(model, optimizer) is for a loop of your own, TelemetryCallback for Stable-Baselines3"
        )
    if telemetry.level is Level.OFF:
        return lambda: None
    return UpdateRecorder(session_of(telemetry), source).stop


def watch_pair(telemetry: Telemetry, source: EventSource, name: str, *, module: nn.Module, host: nn.Module) -> Remover:
    """Compare the gradients of `module` and `host` at every optimizer step; returns a function that ends the comparison.

    Use it if you doubt that a module learns: a head, a new block, an adapter, a gated branch. It costs a few tensor operations per step.
    Nothing is measured below level NORMAL.

    Args:
        source: the bundled trainer, the callback of Stable-Baselines3 or TRL, the observer of rl_games, or the result of `attach_runner`,
            `attach_agent`, `attach_loss`, `attach_trainer` or `Telemetry.watch`.
        name: name of the pair in the keys `grad/pair/{pair}/...`.
        module, host: parts of the network that one optimizer trains. With a gradient scaler, `upstream` includes its scale.

    Raises:
        ValueError: one of them lacks parameters, or they share some.
    """
    return measure_pair(session_of(telemetry), source, name, module=module, host=host)


def detector_factory(detect: Detect, alarms: AlarmRule | Iterable[AlarmRule] = ()) -> DetectorFactory | None:
    """Resolve the `detect=` and `alarms=` arguments to a detector factory; None if no alarms are raised.

    Raises:
        TypeError: for anything else.
        ValueError: for two rules of one type, for rules while alarms are off, and for a bound of an alarm that is not among the rules.
    """
    added = tuple(as_rules(alarms))
    if added and not isinstance(detect, Thresholds) and detect is not True:
        raise ValueError("alarms are for detect=True or detect=Thresholds(...): no other detector uses them")
    with_alarms(alarm_rules(), added)
    if isinstance(detect, Thresholds):
        Thresholds(alarms=added).with_changes(detect.changes())  # bounds of alarms that this run does not have
    if isinstance(detect, bool | Thresholds):
        return None if detect is False else partial(Detectors, alarms=added) if added else Detectors
    given: object = detect
    if not callable(detect) or given is Thresholds:
        raise TypeError(f"detect takes True, False or Thresholds, got {shown(detect)}")
    return detect


def check_sendable(rules: Iterable[AlarmRule]) -> None:
    """Raise TypeError if a rule cannot be sent to the worker process that the user asked for."""
    for rule in rules:
        try:
            # A worker process cannot import definitions of the main script.
            reason = "it is defined in the script that runs" if b"__main__" in pickle.dumps(rule) else ""
        except (Exception, SystemExit) as error:  # pickling runs code of the rule
            reason = str(error)
        if reason:
            raise TypeError(
                f"alarm {rule.type!r} cannot be sent to the worker process ({reason}): define its judge in a module that can be "
                "imported, name it by an entry point of the group esper_telemetry.alarms, or leave out offload=True"
            )


def _check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise ValueError if an argument is not one of its choices."""
    if not isinstance(value, str | bool | np.bool_) or value not in choices:
        raise ValueError(f"{name} must be {' or '.join(map(repr, choices))}, got {shown(value)}")
