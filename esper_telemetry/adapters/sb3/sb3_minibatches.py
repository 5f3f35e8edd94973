"""Minibatches of a Stable-Baselines3 update: references between the trainer's steps, joined columns after the update.

**The minibatches of an update are joined once**: with one event per minibatch, an update of 300 minibatches with 64 rows took a seventh
longer. Between two minibatches the caches hold the trainer's own code, and a line takes five times as long as in a loop. Therefore only
references are kept there, and only the norms of gradients are computed. Sixteen minibatches are joined at a time. A tuple of references is
one object for Python's garbage collector, whose passes take as long as all the rest.

Shapes: N rows of a minibatch, padding included; R rows of all minibatches, without padding; M minibatches; H heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from esper_telemetry.adapters.columns import ADVANTAGE_EPS, Array, HeadColumns, LossColumns, cat, join_columns, loss_columns
from esper_telemetry.adapters.sb3.sb3_facts import MAX_CAPTURES, ActionHeads
from esper_telemetry.adapters.sb3.sb3_gradients import (
    MAX_PADDING,
    TrunkListener,
    clip_of,
    first_minibatch_event,
    head_norms,
    objective_event,
    shard_gradients,
)
from esper_telemetry.adapters.taps import Listener
from esper_telemetry.core import tensors as ops
from esper_telemetry.core.event_parts import FirstMinibatch, UsedAdvantages
from esper_telemetry.core.minibatch_objective import MinibatchObjective
from esper_telemetry.events import BackwardEnd, MinibatchStart, OptimizerStep, Remover, RolloutEnd, TrunkBackward
from esper_telemetry.recording.recorder import UpdateRecorder
from esper_telemetry.updates.update import JoinedMinibatches

sample_columns: Callable[[Any], tuple[Tensor, ...]] = attrgetter("old_log_prob", "advantages", "old_values", "returns", "actions")
"""The columns of a buffer's minibatch that are kept: all except the large observations and the states."""

MinibatchRow: TypeAlias = tuple[int, int, Array, Tensor | None, tuple[Tensor, ...], Tensor, Tensor, Tensor | None, Any]
"""An evaluated minibatch: epoch, index of its rollout in the record, numbers of its samples in the buffer, padding mask,
`sample_columns`. Then values, log-probabilities and entropy of `evaluate_actions`, and the result of `ActionHeads.capture`."""

MAX_FIRST_RATIO = 1e-5
"""Nats by which log-probabilities of the first minibatch may differ if ratios are 1."""


class MinibatchBlock(NamedTuple):
    """Some minibatches, one after the other, without padding: epoch and number of rows of each, and columns of all R rows.

    Attributes:
        rows: [R], transitions of the record's rollouts, counted time by time.
        columns: [R] each: `sample_columns`, then values and log-probabilities now.
        entropy: [R]; None if the policy returns none.
    """

    epochs: tuple[int, ...]
    counts: tuple[int, ...]
    rows: Array
    columns: tuple[Tensor, ...]
    entropy: Tensor | None
    heads: HeadColumns


class Fetched(NamedTuple):
    """A minibatch that the buffer has returned, and that the policy has not evaluated yet.

    Attributes:
        numbers: of its samples in the buffer.
        place: counts the minibatches that the buffer has returned in this update, from 1.
        alone: every earlier minibatch was evaluated, or a later one.
    """

    samples: Any
    numbers: Array
    epoch: int
    place: int
    alone: bool


class MinibatchListener:
    """Records gradients and steps immediately, and minibatches sixteen at a time.

    Args:
        listen: calls a listener after every call of a method of an object; returns the function that ends this.
        attempt: calls a function with an argument and handles its exceptions.

    Attributes:
        rollout: event of the rollouts that are learned from.
        epoch: pass over the rollout, from 0; -1 before the first.
        step: optimizer steps so far in this update.
    """

    def __init__(
        self,
        model: Any,
        heads: ActionHeads,
        recorder: UpdateRecorder,
        listen: Callable[[object, str, Listener], Remover],
        attempt: Callable[..., object],
    ) -> None:
        self._model, self._heads = model, heads
        self._listen, self._attempt = listen, attempt
        self._optimizer: Any = None
        self._stop_following: Remover = lambda: None
        self._recorder, self._hooks = recorder, recorder.hooks
        self._order = np.arange(model.n_envs * model.n_steps).reshape(model.n_steps, model.n_envs).T.ravel()
        self.rollout: RolloutEnd | None = None
        self._padded = hasattr(model.policy, "lstm_actor")
        self._sees_clipping = False
        self._when_clipping_is_seen: Callable[[], object] = lambda: None
        self._minibatches: list[MinibatchRow] = []
        self._complete = True
        self.begin(0)

    def begin(self, place: int, *, gradient_step: int = 0) -> None:
        """Begin an update; `place` is the index of its rollout in the record, `gradient_step` counts the earlier steps."""
        self._policy = self._model.policy
        named = dict(self._policy.named_parameters())
        self.epoch, self.step = -1, 0
        self._gradient_step = gradient_step
        self._place = place
        self._parameters = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
        self._names = tuple(self._parameters)
        self._parameter_ids = [*map(id, named.values())]
        self._fetched: dict[int, Fetched] = {}  # by identity of the observations, with which the policy is called
        self._fetched_count = self._newest_evaluated = 0
        self._raw_advantages: Any = None
        self._gradients_of_log_probs: list[Any] = []
        self._value_gradients: list[Tensor] | None = None
        self._open: MinibatchRow | None = None
        self._emitted = False
        self._wants_steps = self._hooks.wants(OptimizerStep)

    def taps(self) -> list[Remover]:
        """Return taps on the methods that training on minibatches calls."""
        policy, buffer, listen = self._policy, self._model.rollout_buffer, self._listen
        self._optimizer = None
        self._follow_optimizer()
        taps = [
            listen(buffer, "get", self._after_pass),
            listen(buffer, "_get_samples", self._after_samples),
            listen(buffer, "_get_samples", self._follow_optimizer),
            listen(policy, "evaluate_actions", self._after_evaluation),
            lambda: self._stop_following(),
        ]
        if self._hooks.wants(TrunkBackward):
            taps += TrunkListener(policy, self._heads, self._hooks, self._place_of_open, self._attempt).taps(listen)
        if not self._sees_clipping:
            self._when_clipping_is_seen = listen(policy, "parameters", self._after_parameters)
            taps.append(self._when_clipping_is_seen)
        return taps

    def _follow_optimizer(self, *_: Any) -> None:
        """Listen to the steps of the policy's optimizer, which may be another object than in the last minibatch."""
        optimizer = self._model.policy.optimizer
        if optimizer is not self._optimizer:
            self._stop_following()
            self._optimizer = optimizer
            after_step = partial(self._attempt, self._after_optimizer_step)
            self._stop_following = optimizer.register_step_post_hook(lambda own, *_: after_step(own)).remove

    def _after_pass(self, *_: Any) -> None:
        self.epoch += 1

    def _after_samples(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], samples: Any) -> None:
        """Handle a minibatch that the buffer returned. An earlier minibatch without a step, because training stops, is done."""
        self.finish()
        epoch, alone = max(self.epoch, 0), self._newest_evaluated == self._fetched_count
        self._fetched_count += 1
        self._fetched[id(samples.observations)] = Fetched(samples, args[0], epoch, self._fetched_count, alone)
        if alone and self.step == 0 and epoch == 0 and self._hooks.wants(MinibatchStart):
            self._hooks.emit(MinibatchStart(0, 0, partial(shard_gradients, self._model, samples)))
        if alone:
            self._emit_objective(samples, epoch, with_forward=True)

    def _emit_objective(self, samples: Any, epoch: int, *, with_forward: bool) -> None:
        """Emit `MinibatchObjective`, after the trainer's own pass only without another one."""
        self._value_gradients = None
        if self._hooks.wants(MinibatchObjective):
            self._value_gradients = []
            counts = {"epoch": epoch, "step": self.step, "gradient_step": self._gradient_step + self.step}
            event = objective_event(self._model, samples, self._parameters, self._value_gradients, **counts)
            self._hooks.emit(event if with_forward else replace(event, forward=None))

    def _after_evaluation(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        fetched = self._evaluated(args[0] if args else kwargs.get("obs"))
        if fetched is None:
            return
        self.finish()
        samples, epoch = fetched.samples, fetched.epoch
        if not fetched.alone:
            self._emit_objective(samples, epoch, with_forward=False)
        values, log_probs, entropy = result
        self._emitted = False
        if self._value_gradients is not None and values.requires_grad:
            values.register_hook(self._value_gradients.append)
        self._open = (
            epoch,
            self._place,
            fetched.numbers,
            samples.mask if self._padded else None,
            sample_columns(samples),
            values.detach(),
            log_probs.detach(),
            None if entropy is None else entropy.detach(),
            self._heads.capture(self._policy),
        )
        if self.step == 0 and epoch == 0 and self._hooks.wants(FirstMinibatch):
            event = first_minibatch_event(self._model, samples, log_probs.detach())
            self._hooks.emit(event)
            if log_probs.requires_grad and torch.allclose(event.stored, event.trained, rtol=0, atol=MAX_FIRST_RATIO):
                self._raw_advantages = samples.advantages
                log_probs.register_hook(self._gradients_of_log_probs.append)

    def _evaluated(self, observations: Any) -> Fetched | None:
        """Return the minibatch with these observations; if they were changed, the only open one, unless several were fetched."""
        fetched = self._fetched.pop(id(observations), None)
        if fetched is None and self._fetched:
            (key, last), *others = self._fetched.items()
            if others or not last.alone or last.place < self._fetched_count:
                self._complete = False
                self._emit_objective(last.samples, last.epoch, with_forward=False)
                return None
            fetched = self._fetched.pop(key)
        if fetched is not None:
            self._newest_evaluated = max(self._newest_evaluated, fetched.place)
        return fetched

    def _place_of_open(self) -> tuple[int, int, Tensor | None]:
        """Epoch and step, and the mask of padding of the open minibatch."""
        return max(self.epoch, 0), self.step, None if self._open is None else self._open[3]

    def owns(self, parameters: Sequence[Tensor]) -> bool:
        """Return True for the parameters of the policy while a minibatch is open."""
        return self._open is not None and [*map(id, parameters)] == self._parameter_ids

    def before_clip(self, parameters: Sequence[Tensor], max_norm: float, norms: Tensor | None) -> None:
        """Record gradients before clipping; `norms` [K] of all gradients, None if they were not computed."""
        if not self._sees_clipping:
            self._sees_clipping = True
            self._when_clipping_is_seen()
        if not self._emitted:
            self._emit_gradients(max_norm, norms)

    def _after_parameters(self, *_: Any) -> None:
        """The policy was asked for its parameters, which happens between the backward pass and clipping."""
        if self._open is not None and not (self._emitted or self._sees_clipping):
            self._emit_gradients(self._model.max_grad_norm, None)

    def _after_optimizer_step(self, optimizer: Any) -> None:
        """The optimizer took a step; norms of a minibatch that was not clipped are those applied."""
        if self._open is None:
            return
        if not self._emitted:
            self._emit_gradients(None, None)
        if self._gradients_of_log_probs:
            self._emit_used_advantages(self._open)
        if self._wants_steps:
            self._hooks.emit(OptimizerStep(max(self.epoch, 0), self.step, optimizer, self._parameters))
        self.finish()
        self.step += 1

    def _emit_used_advantages(self, minibatch: MinibatchRow) -> None:
        """Emit the factors of the ratios, which were 1: the gradient at log-probability i of a mean over N rows is -A_i / N."""
        gradients, raw, buffer = self._gradients_of_log_probs, self._raw_advantages, self._model.rollout_buffer
        self._gradients_of_log_probs = []
        _, _, numbers, mask, (_, _, old_values, _, _), *_ = minibatch
        valid = torch.ones_like(raw, dtype=torch.bool) if mask is None else mask > MAX_PADDING
        count, environments = int(valid.sum()), torch.zeros(len(raw), dtype=torch.long, device=raw.device)
        environments[valid] = torch.as_tensor(numbers // buffer.buffer_size, device=raw.device)
        at, own = torch.as_tensor(numbers, device=raw.device), raw.clone()
        rows, values = (torch.as_tensor(column, device=raw.device).flatten() for column in (buffer.advantages, buffer.values))
        if torch.equal(values[at].to(raw), old_values.flatten()[valid].to(raw)):  # the order of rows in the buffer
            own[valid] = rows[at].to(raw)
        event = UsedAdvantages(
            raw=own,
            used=-count * sum(gradients),
            normalized=bool(self._model.normalize_advantage) and count > 1,
            valid=valid,
            rollout=rows,
            environments=environments,
        )
        self._hooks.emit(event)

    def _emit_gradients(self, max_norm: float | None, raw: Tensor | None) -> None:
        self._emitted = True
        names, norms = self._names, raw
        if norms is None or not len(norms) == len(names) == len(self._parameter_ids) or ops.doubtful_norms(norms):
            gradients = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
            if not gradients:
                return
            names, values = tuple(gradients), list(gradients.values())
            with torch.no_grad():  # gradients may have a graph; `raw` are others if frozen parameters still have a gradient
                fits = raw is not None and len(raw) == len(values)
                norms = ops.checked_norms(values, raw) if raw is not None and fits else ops.gradient_norms(values)
        heads = head_norms(self._policy, self._heads)
        self._hooks.emit(BackwardEnd(max(self.epoch, 0), self.step, self._parameters, names, norms, max_norm, heads))

    def finish(self) -> None:
        """The open minibatch, if there is one, is done."""
        if self._open is not None:
            self._minibatches.append(self._open)
            self._open = None
            if len(self._minibatches) == MAX_CAPTURES:
                self.record()

    def record(self) -> None:
        """Record the minibatches that are done."""
        self.finish()
        minibatches, self._minibatches = self._minibatches, []
        if minibatches:
            self._recorder.minibatch(self._block(minibatches))

    def record_ends(self) -> None:
        """Begin with minibatches of other rollouts."""
        self.rollout, self._complete = None, True

    @torch.no_grad()
    def _block(self, minibatches: Sequence[MinibatchRow]) -> MinibatchBlock:
        """Join some minibatches and leave out their padding."""
        epochs, places, numbers, masks, samples, values, log_probs, entropies, captures = zip(*minibatches, strict=True)
        present = [mask for mask in masks if mask is not None]
        valid = (torch.cat(present) > MAX_PADDING).nonzero().flatten() if present else None

        def without_padding(column: Tensor) -> Tensor:
            return column if valid is None else column[valid]

        rows = [self._order[own] + place * len(self._order) for place, own in zip(places, numbers, strict=True)]
        return MinibatchBlock(
            epochs=epochs,
            counts=tuple([len(own) for own in numbers]),
            rows=np.concatenate(rows),
            columns=tuple([without_padding(cat(c)) for c in (*zip(*samples, strict=True), values, log_probs)]),
            entropy=None if entropies[0] is None else without_padding(cat(entropies)),
            heads=self._heads.joined(captures, torch.cat).map(without_padding),
        )

    @torch.no_grad()
    def joined(self, blocks: Sequence[MinibatchBlock]) -> JoinedMinibatches:
        """Return the minibatches that were recorded in blocks."""
        fields: Any = MinibatchBlock._make(zip(*blocks, strict=True))  # each field of all blocks
        counts = tuple(chain.from_iterable(fields.counts))
        joined = map(cat, zip(*fields.columns, strict=True))
        old_log_probs, advantages, old_values, returns, actions, values, log_probs = joined
        count = torch.tensor(counts, device=log_probs.device)
        minibatch = torch.repeat_interleave(torch.arange(len(counts), device=log_probs.device), count)

        def means(column: Tensor) -> Tensor:
            empty = torch.zeros(len(count), dtype=torch.float64, device=column.device)
            return empty.index_add_(0, minibatch, column.double()) / count

        if self._model.normalize_advantage:
            raw, centred = advantages, advantages.double() - means(advantages)[minibatch]
            std = (means(centred.square()) * count / (count - 1)).sqrt()
            advantages = (centred / (std[minibatch] + ADVANTAGE_EPS)).to(raw.dtype)
            if hasattr(self._model, "clip_range") and not self._padded:
                advantages = torch.where(count[minibatch] < 2, raw, advantages)  # PPO leaves a single row as it is
        columns = LossColumns(
            log_ratio=log_probs - old_log_probs,
            log_probs=log_probs,
            advantages=advantages,
            values=values.flatten(),
            old_values=old_values,
            returns=returns,
            entropy=-log_probs if blocks[0].entropy is None else cat(fields.entropy),
        )
        losses = loss_columns(columns, clip_of(self._model), clip_of(self._model, "clip_range_vf"))
        heads = join_columns(fields.heads, torch.cat)
        rows = torch.from_numpy(np.concatenate(fields.rows)).to(log_probs.device)
        ratios: dict[str, Tensor] = {}
        if self.rollout is not None and len(self._heads.names) > 1:
            now, stored = self._heads.log_probs(heads, self._heads.actions(actions)), self.rollout.head_log_probs
            ratios = {name: part - stored[name].flatten()[rows] for name, part in now.items()}
        return JoinedMinibatches(
            epochs=tuple(chain.from_iterable(fields.epochs)),
            valid=None,
            counts=counts,
            log_ratio=columns.log_ratio,
            advantages=advantages,
            values=columns.values,
            old_values=old_values,
            returns=returns,
            losses={name: means(column).to(column.dtype) for name, column in losses.items()},
            head_log_ratios=ratios,
            rows=rows if self._complete else None,
            **heads._asdict(),
        )
