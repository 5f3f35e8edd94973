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
from esper_telemetry.alarms.rule_registry import alarm_rules, as_rules, with_alarms
from esper_telemetry.alarms.thresholds import Thresholds
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
from esper_telemetry.pipeline.record import DetectorFactory
from esper_telemetry.pipeline.response import AlarmCallback
from esper_telemetry.pipeline.run import RunOptions
from esper_telemetry.pipeline.sampling import BUDGET
from esper_telemetry.recording.pairs import measure_pair
from esper_telemetry.recording.recorder import UpdateRecorder
from esper_telemetry.session import SessionOptions, TelemetrySession
from esper_telemetry.sinks.protocol import require_package
from esper_telemetry.sinks.registry import SinkLike
from esper_telemetry.updates.gradient_watcher import Members
from esper_telemetry.updates.sources import EventSource, ObservedSource

MAX_CLOSE_TIMEOUT_SECONDS: Final = 1e8
"""Three years; operating systems wait no longer than some centuries."""

Parameters = ParamSpec("Parameters")

Detect = bool | Thresholds | DetectorFactory
"""The `detect=` argument: whether alarms are raised, or by which thresholds; or what makes another detector from a run's facts."""

NOT_PICKLED: Final = (
    "a Telemetry belongs to the process that made it and cannot be pickled: leave it out of what is saved or sent to another process "
    "(environments, data loaders, checkpoints), and call observe, log and flush in the training process"
)


def _with_suggestions(function: Callable[Parameters, None]) -> Callable[Parameters, None]:
    """Return the function; its TypeError for an unknown keyword argument names the one that is probably meant."""
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
    """One record per update of what a training program measures, in the journal and in the sinks.

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
        budget: share of the wall time that telemetry may take on the training thread; costly metrics are measured in as many updates
            as that allows.
        detect: whether alarms are raised where a record shows that training goes wrong; or the thresholds to do so by.
        escalation: updates at DEBUG that follow a critical alarm; 0 for none. By default each alarm asks for its own number, 2 to 10.
        alarms: your own alarms, besides the built-in ones and those of installed plugins. The worker process needs to import them: one
            that the script itself defines is judged in this process.
        offload: whether records are made in a worker process. By default those of attached trainers and of adapters are, and those of
            your own loop are made on its thread; True moves these too, False keeps all on the training thread. Never without a run
            directory or a second core, with several ranks, or where CUDA is in use.
        resume: goes on in the run that `run_dir` holds, also in the backends. Give telemetry's state back by `load_state_dict`, unless an
            attached trainer loads a checkpoint. Updates that the journal holds already are not recorded again. Where several ranks
            report, each of them resumes.
        report: whether `close` writes the run as a page, `report.html` in `run_dir`, which takes some seconds after a long run; MLflow and
            W&B store it. Needs the extra `views`.
        ranks: `all`: where `torch.distributed` is initialised, the ranks report as one. `alone`: this process reports its own numbers
            and needs no other one.

    With several ranks each makes its `Telemetry`, with the same level, and calls `flush` equally often: both wait for the others.
    Rank 0 alone claims the run directory, writes the journal and opens the sinks; the others' arguments for these, and what they `log`,
    are ignored. What each rank observes of its own data is merged as if one process had measured all of it; what is the same
    everywhere, such as gradients that DistributedDataParallel has averaged, is rank 0's. `close` waits for nobody.

    Raises:
        ModuleNotFoundError: with `report`, without plotly.
        ValueError: for an unknown level or sink, a budget that is no share, and an empty `run_dir`.
        TypeError: for thresholds that are none, and other arguments of the wrong type.
        FileExistsError: if `run_dir` holds a journal already.
        NotADirectoryError: if it is a file.
        FileNotFoundError, BlockingIOError: with `resume`, if it holds none, or a run that is still being trained.
        OSError: if `run_dir` can be no directory, or, with `resume`, cannot be written.
        RuntimeError: a rank made no `Telemetry` within a minute.

    An error is raised on every rank, and nothing is left behind.

    Threads may share a Telemetry: it serves one call at a time, and a call from a signal handler when the call that it interrupts is over.
    It cannot be pickled; a copy of an object that holds one holds the same.

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
        escalation: int | None = None,
        alarms: AlarmRule | Iterable[AlarmRule] = (),
        offload: bool | None = None,
        resume: bool = False,
        report: bool = False,
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
                # only what differs from the usual: readers of the journal judge as the run was judged
                **({"thresholds": detect.changes()} if isinstance(detect, Thresholds) else {}),
                **({} if escalation is None else {"escalation": as_integer(escalation, "escalation")}),
            },
            all_ranks=ranks == "all",
            report=bool(report),
        )
        self._session = TelemetrySession(sinks, options)

    @property
    def level(self) -> Level:
        """Level at which the run is measured while nothing is wrong."""
        return self._session.level

    @property
    def run_dir(self) -> Path | None:
        """Directory of this run's journal, on every rank; None without one."""
        return self._session.run_dir

    @property
    def run(self) -> RunInfo | None:
        """The run as sinks receive it; None at OFF, before it has started and on all ranks but the first."""
        return self._session.run

    def observe(
        self,
        *groups: MetricGroup | Postponed | Iterable[MetricGroup],
        epoch: IntegerLike | Sequence[IntegerLike] = 0,
        step: IntegerLike | None = None,
    ) -> None:
        """Add groups to the update's record; copies their numbers on the device and never waits for it.

        Args:
            groups: results of metric functions: a `MetricGroup` or several in a tuple.
            epoch: pass over the rollout, from 0; one per row for groups with several rows.
            step: optimizer steps taken in this update before the group was measured. By default the first `observe` of a kind of group
                after `flush` is step 0, the next step 1, and so on; pass it under gradient accumulation.

        Raises:
            TypeError: for what is no metric group, such as plain numbers, which `log` takes.
            ValueError: for epochs and steps that are no whole numbers from 0.
        """
        self._session.observe(groups, epoch, step)

    def log(self, values: Mapping[str, SupportsFloat]) -> None:
        """Add plain numbers to the update's record; non-finite ones are counted under `<key>_nonfinite`.

        Raises:
            ValueError: for a key that not every backend accepts.
            TypeError: for what is no mapping, and for a value that is not one number of Python, NumPy or torch.
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
        """Measure the model's gradients before and after clipping at every step of the optimizer, and the learning rate.

        Args:
            model: also one that is compiled, or wrapped in DistributedDataParallel.
            optimizer: of its parameters; watch each of several, with the same model.
            actor, critic: their modules, parameters, or names of either; what serves both may belong to both or neither.
            stop_on_nonfinite: `backward` raises FloatingPointError, with the parameter's name, at the first gradient that is not finite.
                Each gradient is checked when it is computed, which on a GPU waits for the device. Not for loops with a gradient scaler,
                which makes gradients overflow on purpose. It is ignored at level `off`.

        A record holds the gradients that the step is taken with: summed over accumulated passes, averaged over ranks, without a
        gradient scaler's scale; and those after whatever clips them. Where that cannot be decided, a warning says so once. A call of the
        result ends this; `close` does too. `watch_pair` takes the result as its source. Leave `gradient_health` out of a loop that is
        watched.

        Raises:
            TypeError: for what is no module or no optimizer.
            ValueError: the optimizer trains nothing of the model, or is watched with another one; a group is no part of the model; ranks
                hold parts of its parameters.
        """
        _check_choice("stop_on_nonfinite", stop_on_nonfinite, (True, False))
        return self._session.watch(model, optimizer, actor=actor, critic=critic, stop_on_nonfinite=stop_on_nonfinite)

    def flush(
        self, *, env_step: IntegerLike, update: IntegerLike | None = None, gradient_step: IntegerLike | None = None
    ) -> None:
        """End an update: everything observed since the last flush becomes one record.

        Args:
            env_step: environment steps at which this update's data were collected.
            update: index of the update; counted from 1 by default.
            gradient_step: optimizer steps so far; counted from the observed rows by default.

        Raises:
            TypeError, ValueError: for what is no whole number from 0 of Python, NumPy or torch.
        """
        self._session.flush(env_step=env_step, update=update, gradient_step=gradient_step)

    def on_alarm(self, callback: AlarmCallback) -> Callable[[], None]:
        """Call `callback(alarm)` when an alarm is raised, gets worse or is over; returns the function that ends this.

        It is called on the training thread, at the end of a rollout or of an update, or by `close`. With a worker that is an update or
        two after the one that shows it. It may change the trainer. What it raises is logged, once, and training continues;
        KeyboardInterrupt and SystemExit are not caught. Its time is not part of telemetry's. Only the callbacks of rank 0 are called.

        Raises:
            TypeError: for what cannot be called.
        """
        return self._session.on_alarm(callback)

    def notify_intervention(self, reason: str = "", **details: Any) -> None:
        """Note that training was changed on purpose (a learning rate, a reward scale, a curriculum), so that its effects raise no alarm.

        Alarms that compare with the run's own history wait for three updates and begin a new history; those of certain faults do not. The
        journal keeps it as an event `intervention`.

        Args:
            reason: what was done, in words.
            details: settings that were changed; plain values.
        """
        self._session.notify_intervention(reason, **details)

    def state_dict(self) -> dict[str, int]:
        """Return the counts of the run, for a checkpoint; waits until the journal holds everything so far, so that no gap can follow it."""
        return self._session.state_dict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on counting where a checkpoint was taken; before the first `flush`."""
        self._session.load_state_dict(state)

    def close(self, status: RunStatus | str = RunStatus.FINISHED) -> CloseReport | None:
        """End the run: write what is open, wait for the sinks up to `close_timeout`, report what they hold. Idempotent."""
        return self._session.close(RunStatus(status))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
    """Return what trainers, adapters and commands use of a telemetry besides its methods for users."""
    return telemetry._session


def attach(telemetry: Telemetry, source: EventSource) -> Remover:
    """Make `telemetry` observe and flush the events of `source`; returns the function that ends this.

    At level OFF nothing is registered, so the trainer does no extra work. A source may offer more than hooks: see `updates.sources`.

    Raises:
        TypeError: for anything else than a Telemetry and something that emits events.
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
    """Compare the gradients of `module` and `host` at every optimizer step; returns the function that ends this.

    Use it if you doubt that a module learns: a head, a new block, an adapter, a gated branch. It costs a few tensor operations per step.
    Below NORMAL nothing is measured.

    Args:
        source: the bundled trainer, the callback of Stable-Baselines3 or TRL, or the result of `attach_runner`, `attach_loss`,
            `attach_trainer` or `Telemetry.watch`.
        name: of the pair, in the keys `grad/pair/{pair}/...`.
        module, host: parts of the network that one optimizer trains. If there is a gradient scaler, `upstream` has its scale.

    Raises:
        ValueError: one of them lacks parameters, or they share some.
    """
    return measure_pair(session_of(telemetry), source, name, module=module, host=host)


def detector_factory(detect: Detect, alarms: AlarmRule | Iterable[AlarmRule] = ()) -> DetectorFactory | None:
    """Resolve the `detect=` and `alarms=` arguments to what makes a run's detector; None where no alarms are raised.

    Raises:
        TypeError: for anything else.
        ValueError: for a rule whose type another one has, and for rules where alarms are off.
    """
    added = tuple(as_rules(alarms))
    if added and not isinstance(detect, Thresholds) and detect is not True:
        raise ValueError("alarms are for detect=True or detect=Thresholds(...): nothing else judges by them")
    with_alarms(alarm_rules(), added)
    if isinstance(detect, bool | Thresholds):
        return None if detect is False else partial(Detectors, alarms=added) if added else Detectors
    given: object = detect
    if not callable(detect) or given is Thresholds:
        raise TypeError(f"detect takes True, False or Thresholds, got {shown(detect)}")
    return detect


def check_sendable(rules: Iterable[AlarmRule]) -> None:
    """Raise TypeError where one of the rules cannot be sent to a worker process, for which the user has asked."""
    for rule in rules:
        try:
            # A worker process cannot import what the script that runs defines.
            reason = "it is defined in the script that runs" if b"__main__" in pickle.dumps(rule) else ""
        except (Exception, SystemExit) as error:  # pickling runs code of the rule
            reason = str(error)
        if reason:
            raise TypeError(
                f"alarm {rule.type!r} cannot be sent to the worker process ({reason}): define its judge in a module that can be "
                "imported, name it by an entry point of the group esper_telemetry.alarms, or leave out offload=True"
            )


def _check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise ValueError for an argument that has none of its values."""
    if not isinstance(value, str | bool | np.bool_) or value not in choices:
        raise ValueError(f"{name} must be {' or '.join(map(repr, choices))}, got {shown(value)}")
