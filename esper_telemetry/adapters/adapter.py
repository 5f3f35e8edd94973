"""`Adapter`, the base of adapters: taps, the counters of an update, gradients before they are clipped, optimizer steps and records.

An adapter defines where to tap a trainer, the names of its columns, and its facts. Everything else is here.
Shapes: K parameters with a gradient.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper_telemetry.adapters.columns import EpisodeCounter, numbers_by_key
from esper_telemetry.adapters.taps import Listener, listen, listen_to_clipping, remove_all
from esper_telemetry.core import tensors as ops
from esper_telemetry.core.clock import PhaseTimes
from esper_telemetry.events import BackwardEnd, EpisodeEnd, Hooks, OptimizerStep, Remover, RolloutEnd, RunStart, UpdateStart
from esper_telemetry.recording.recorder import JoinRows, UpdateRecorder
from esper_telemetry.telemetry import Telemetry, session_of
from esper_telemetry.updates.failure import Candidate, of_parameters

PLAIN_TYPES = (bool, int, float, str, type(None))


class Adapter:
    """Listens to the objects of one trainer and emits the events of its updates.

    A subclass calls `begin_run`, `listen` and `follow` when training begins, `begin_update` for every rollout, `begin_minibatch` for every
    minibatch, and `stop` when training ends, also after an exception. `end_update` writes the record; `begin_update` and `stop` call it,
    too, so a subclass may leave it out. If a listener raises, its events are lost and a warning is logged.

    Args:
        telemetry: receives the records, at a level above OFF.
        hooks: to emit the events on, if another object shows them to the user.
        join: joins the rows that the subclass has assigned to `row`; a subclass without it emits `MinibatchEnd`.

    Attributes:
        hooks: emit the events, also to listeners of your own.
        prefix: first segment of the keys of logged numbers.
        logged: what the trainer has logged in this update, by its own names.
        update, env_step, gradient_step: counts so far; the current update's steps are added when it ends.
        epoch, step: pass over the rollout and optimizer steps within this update, from 0.
        emits_steps: `OptimizerStep` is emitted; the state of its optimizer is then copied in sampled updates.
        adapts_rate: the learning rate changes within updates: records have the mean, and the range under `learning_rate/`.
        updating: True until the record of an update is written.
        learning: minibatches of an update may come.
        rollout_event: of the update; None if it is not known.
        stepped: `id` of the optimizers that have stepped in the current minibatch.
        row: columns of the current minibatch, passed to `join` once an optimizer has stepped; None without a `join`.
    """

    prefix: ClassVar[str] = ""
    ends_updates: ClassVar[bool] = False
    """The trainer says when an update ends, so `stop` leaves an update that an exception has ended to the session."""
    clipping_module: ModuleType = nn.utils
    """The module whose `clip_grad_norm_` the trainer calls."""

    def __init__(self, telemetry: Telemetry, *, hooks: Hooks | None = None, join: JoinRows | None = None) -> None:
        self.hooks = Hooks() if hooks is None else hooks
        self.telemetry, self.session = telemetry, session_of(telemetry)
        self.logged: dict[str, Any] = {}
        self.update = self.env_step = self.gradient_step = self.epoch = self.step = 0
        self.emits_steps, self.adapts_rate, self.updating, self.learning = True, False, False, False
        self.rollout_event: RolloutEnd | None = None
        self.row: Any = None
        self.parameters: Mapping[str, Tensor] = {}
        self.optimizers: Sequence[Optimizer] = ()
        self.times = PhaseTimes()
        self.stepped: set[int] = set()
        self._open = self._measured = False
        self._names: dict[int, str] = {}
        self._parts: tuple[tuple[str, ...], ...] = ()
        self._clipped_apart: tuple[frozenset[str], ...] = ()
        self._clipped: dict[tuple[str, ...], Tensor] = {}
        self._max_norm: float | None = None
        self._step_rates: list[float] = []
        self._counter: EpisodeCounter | None = None
        self._taps: list[Remover] = []
        self._steps: list[Remover] = []
        self._stop_clipping: Remover | None = None
        self.recorder = UpdateRecorder(self.session, self, join)
        self.session.search_on_failure(self.nonfinite_candidates)
        self.session.on_close(self.stop)

    # Methods that a subclass may override.

    def groups(self) -> Mapping[str, Sequence[str]]:
        """Return the names of the parameters of each part of the network, as in the fact `groups`."""
        return {}

    def end_fields(self) -> dict[str, Any]:
        """Return further fields of `UpdateEnd`, such as `epochs` and `coefficients`; they take precedence over the optimizers' values."""
        return {}

    def episodes(self, rollout: RolloutEnd) -> EpisodeEnd | None:
        """Return the event of the episodes that ended in a rollout without padding; None without any."""
        if rollout.valid is not None:
            return None
        if self._counter is None:
            self._counter = EpisodeCounter(rollout.ended.shape[1], complete=self.update == 1)
        rewards = rollout.rewards if rollout.raw_rewards is None else rollout.raw_rewards
        return self._counter.episodes(rewards, rollout.ended, rollout.env_step)

    def nonfinite_candidates(self) -> Iterator[Candidate]:
        """Yield the tensors to search for the first one that is not finite, in forward order."""
        return of_parameters(self.parameters.items())

    # What it calls.

    def listen(self, owner: object, name: str, listener: Listener, *, timed: bool = False) -> None:
        """Call `listener(args, kwargs, result)` after every call of that method of that object, until `stop`.

        Args:
            timed: add its time to telemetry's, unless timing would take longer than the call.
        """

        @wraps(listener)  # warnings name it
        def timed_listener(args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
            with self.session.clock:
                listener(args, kwargs, result)

        self._taps.append(listen(owner, name, timed_listener if timed else listener, self.session.failed))

    @property
    def listening(self) -> bool:
        """True from the first `listen` until `stop`."""
        return bool(self._taps)

    @property
    def sees_clips(self) -> bool:
        """True if `before_clip` is called; False if something else has replaced the module's `clip_grad_norm_` before `follow`."""
        return self._stop_clipping is not None

    def until_stop(self, remove: Remover) -> None:
        """Call `remove` in `stop`."""
        self._taps.append(remove)

    def follow(
        self, optimizers: Iterable[Optimizer], parameters: Mapping[str, Tensor], clipped_apart: Iterable[Sequence[str]] = ()
    ) -> None:
        """Emit `BackwardEnd` and `OptimizerStep` for the steps of only these optimizers from now on.

        Norms are taken before clipping: at the first `clip_grad_norm_` of a minibatch, or at the step if nothing clips.

        Args:
            optimizers: one or several, each of which steps at most once in a minibatch.
            parameters: that they train, by name.
            clipped_apart: names of the parameters in each call of `clip_grad_norm_`, if a minibatch has several, in the order of the calls.
        """
        self.optimizers, self.parameters = tuple(optimizers), parameters
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        apart = tuple(map(tuple, clipped_apart))
        self._clipped_apart = tuple(map(frozenset, apart))
        whole = tuple(parameters)
        # norms of single calls are combined if each parameter is in one call; otherwise all are taken at the first call
        self._parts = apart if sum(map(len, apart)) == len(set().union(*apart)) == len(whole) else (whole,)
        if self._stop_clipping is None:
            self._stop_clipping = listen_to_clipping(self, self.session.failed, self.clipping_module)
        remove_all(self._steps)
        attempt = self.session.attempt
        for one in self.optimizers:
            before = one.register_step_pre_hook(lambda optimizer, *_: attempt(self.before_step, optimizer))
            after = one.register_step_post_hook(lambda optimizer, *_: attempt(self.after_step, optimizer))
            self._steps += [before.remove, after.remove]

    def begin_run(self, config: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Emit `RunStart`."""
        self.hooks.emit(RunStart(config, facts, self.update, self.env_step, self.gradient_step))

    def begin_update(self, env_step: int, rollout: Callable[[], RolloutEnd] | None = None, *, environment: float | None = None) -> None:
        """Begin an update with data that were collected at that environment step.

        Args:
            env_step: as the trainer counts; it never decreases.
            rollout: returns the event of the rollout, in which `update` and `env_step` count already.
            environment: seconds of the rollout that the environments took.
        """
        with self.session.clock:
            self.end_update()
            self.times.end("rollout", environment=environment)
            self.update, self.env_step = self.update + 1, max(env_step, self.env_step)
            self.epoch = self.step = 0
            self.updating = self.learning = True
            if rollout is not None:
                self.session.attempt(self._emit_rollout, rollout)
            if self.rollout_event is None:
                self.hooks.emit(UpdateStart(self.update, self.env_step))
            self.times.begin()

    def begin_minibatch(self, epoch: int) -> None:
        """Begin a minibatch of that pass over the rollout; the previous minibatch counts if an optimizer has stepped."""
        self.finish_minibatch()
        self.epoch, self._open = epoch, True

    def finish_minibatch(self) -> None:
        """Keep the row of the current minibatch if an optimizer has stepped."""
        if self.stepped:
            if self.row is not None:
                self.recorder.minibatch(self.row)
            self.step += 1
            self.stepped = set()
        self.row, self._open, self._measured = None, False, False
        self._clipped, self._max_norm = {}, None

    def end_learning(self, *, timed: bool = True) -> None:
        """The optimizers have taken the last step of the update; the trainer may log before `end_update`.

        Args:
            timed: the time until now was the update's, not the next rollout's.
        """
        if self.learning:
            self.finish_minibatch()
            self.learning = False
            if timed:
                self.times.end("update")
            self.gradient_step += self.step
            if self.rollout_event is not None and not self.rollout_event.ended.is_cpu:  # reading them earlier would wait for the device
                self.session.attempt(self._emit_episodes, self.rollout_event)

    def end_update(self) -> None:
        """Write the record of the update, if there is one."""
        if self.updating:
            self.end_learning()
            self.updating = False
            fields = self.end_fields()
            if self._step_rates:
                self.logged |= {"learning_rate/min": min(self._step_rates), "learning_rate/max": max(self._step_rates)}
                fields["learning_rate"] = sum(self._step_rates) / len(self._step_rates)
            logged, self.logged, self._step_rates = self.logged, {}, []
            self.telemetry.log(numbers_by_key(self.prefix, logged))
            counts = self.update, self.env_step, self.gradient_step
            self.recorder.end(counts, self.optimizers, self.parameters, self.groups, self.times, **fields)
            self.rollout_event = None

    def stop(self) -> None:
        """Stop listening, and write the record of the current update; see `ends_updates`."""
        if self.ends_updates and self.learning:
            self.updating = self.learning = False
        stop_clipping, self._stop_clipping = self._stop_clipping, None
        if stop_clipping is not None:
            stop_clipping()
        remove_all(self._steps)
        remove_all(self._taps)
        self.session.attempt(lambda adapter: adapter.end_update(), self)

    # Gradients.

    def owns(self, parameters: Sequence[Tensor]) -> bool:
        """Return True for followed parameters, while a minibatch is open."""
        return self._open and any(id(parameter) in self._names for parameter in parameters)

    def before_clip(self, parameters: Sequence[Tensor], max_norm: float, norms: Tensor | None) -> None:
        """Keep the norms of a part of the gradients; emit all once they are complete, or now if a hook reads the gradients."""
        if self._measured:
            return
        self._max_norm = float(max_norm)
        whole = norms is not None and len(norms) == len(parameters)
        present = parameters if whole else [parameter for parameter in parameters if parameter.grad is not None]
        names: tuple[Any, ...] = tuple(map(self._names.get, map(id, present)))
        if names not in self._parts or (len(self._parts) > 1 and self.hooks.wants_now(BackwardEnd)):
            self.emit_gradients(self._max_norm)
            return
        if norms is None or len(norms) != len(names) or ops.doubtful_norms(norms):
            with torch.no_grad():
                norms = ops.gradient_norms([p.grad for p in present if p.grad is not None])
        self._clipped[names] = norms
        if len(self._clipped) == len(self._parts):
            self.emit_gradients(self._max_norm)

    def emit_gradients(self, max_norm: float | None) -> None:
        """Emit the norms of all gradients before clipping. `max_norm` is None without a clip."""
        self._measured = True
        parts = [part for part in self._parts if part in self._clipped]
        names, columns = tuple(itertools.chain(*parts)), [self._clipped[part] for part in parts]
        if len(parts) < len(self._parts) or not parts:
            known = {*names}
            rest = {name: p.grad for name, p in self.parameters.items() if name not in known and p.grad is not None}
            if rest:
                with torch.no_grad():
                    names, columns = (*names, *rest), [*columns, ops.gradient_norms(list(rest.values()))]
        if names:
            norms = columns[0] if len(columns) == 1 else torch.cat(columns)
            apart = () if max_norm is None else self._clipped_apart
            if 0 < len(parts) < len(self._parts):  # the step came before the other clips
                apart = tuple(map(frozenset, parts))
            self.hooks.emit(BackwardEnd(self.epoch, self.step, self.parameters, names, norms, max_norm, clipped_apart=apart))

    def before_step(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step; gradients that were clipped are measured already."""
        if self._open and not self._measured:
            self.emit_gradients(self._max_norm)

    def after_step(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped."""
        if not self._open or id(optimizer) in self.stepped:
            return
        self.stepped.add(id(optimizer))
        if self.adapts_rate:
            self._step_rates.append(float(optimizer.param_groups[0]["lr"]))
        if self.emits_steps and self.hooks.wants(OptimizerStep):
            own = {id(p) for group in optimizer.param_groups for p in group["params"]}
            trained = {name: p for name, p in self.parameters.items() if id(p) in own}
            self.hooks.emit(OptimizerStep(self.epoch, self.step, optimizer, trained))

    # Inside.

    def _emit_rollout(self, make: Callable[[], RolloutEnd]) -> None:
        self.rollout_event = rollout = make()
        self.hooks.emit(rollout)
        if rollout.ended.is_cpu:
            self._emit_episodes(rollout)

    def _emit_episodes(self, rollout: RolloutEnd) -> None:
        episodes = self.episodes(rollout)
        if episodes is not None:
            self.hooks.emit(episodes)


def named_parameters(**parts: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of parts of a network by name, such as `actor.0.weight`. A shared parameter has its first name."""
    known: dict[int, tuple[str, Tensor]] = {}
    for part, module in parts.items():
        for name, parameter in module.named_parameters():
            known.setdefault(id(parameter), (f"{part}.{name}", parameter))
    return dict(known.values())


def parameter_groups(parameters: Mapping[str, Tensor], actor: Iterable[Tensor], critic: Iterable[Tensor]) -> dict[str, list[str]]:
    """Return the fact `groups`: names of the parameters of `actor` and `critic` alone, and of both (`shared`)."""
    of_actor, of_critic = {*map(id, actor)}, {*map(id, critic)}
    groups: dict[str, list[str]] = {"actor": [], "shared": [], "critic": []}
    for name, parameter in parameters.items():
        owned = id(parameter) in of_actor, id(parameter) in of_critic
        if any(owned):
            groups["shared" if all(owned) else "actor" if owned[0] else "critic"].append(name)
    return {group: names for group, names in groups.items() if names}


def last_layer(names: Collection[str]) -> list[str]:
    """Return the fact `value_head` from the names of the critic's parameters: the last weight and the parameters after it."""
    listed = list(names)
    weights = [place for place, name in enumerate(listed) if name.endswith("weight")]
    return listed[weights[-1] :] if weights else []


def plain_settings(value: Any) -> Any:
    """Return settings as numbers, text, lists and dictionaries; tensors of one entry as numbers, other objects as text."""
    if isinstance(value, Mapping):
        return {str(key): plain_settings(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain_settings(entry) for entry in value]
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    return value if isinstance(value, PLAIN_TYPES) else str(value)
