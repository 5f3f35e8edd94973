"""The minibatches of an update, paired: what the buffer gave, what the policy said of it, what became of the gradients."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from esper_telemetry import ops
from esper_telemetry.adapters.sb3.heads import Heads, drawn_from
from esper_telemetry.adapters.sb3.losses import rows_of, used_advantages, valid_rows
from esper_telemetry.adapters.sb3.losses_later import UpdateLosses
from esper_telemetry.adapters.sb3.shards import shard_gradients
from esper_telemetry.environments.protocol import Array
from esper_telemetry.events import BackwardEnd, MinibatchEnd, MinibatchStart, OptimizerStep, RolloutEnd
from esper_telemetry.hooks import Hooks


class Kept(NamedTuple):
    """What is kept of a minibatch's samples until the update ends: all but the observations, which are large."""

    old_log_prob: Tensor
    advantages: Tensor
    old_values: Tensor
    returns: Tensor
    actions: Tensor
    mask: Tensor | None


class Evaluated(NamedTuple):
    """A minibatch that the policy was asked about: when, its samples, their numbers in the buffer, and the answer."""

    place: tuple[int, int]
    samples: Kept
    numbers: Array
    found: tuple[Tensor, Tensor, Tensor | None]
    drawn: Any


class Minibatches:
    """Tells of an update's minibatches: of gradients and steps at once, of all else when the update is over.

    Between two minibatches the same code would take five times as long, because the trainer's has filled the caches.

    Attributes:
        epoch: pass over the rollout, from 0; -1 before the first.
        step: optimizer steps taken in this update.
    """

    def __init__(self, model: Any, heads: Heads, hooks: Hooks) -> None:
        self._model, self._heads, self._hooks = model, heads, hooks
        envs, steps = model.n_envs, model.n_steps
        self._order = np.arange(envs * steps).reshape(steps, envs).T.ravel()
        self._old: Mapping[str, Tensor] = {}
        self.begin(None, {})

    def begin(self, rollout: RolloutEnd | None, parameters: Mapping[str, Tensor]) -> None:
        """An update begins: with this rollout and these trainable parameters."""
        self.epoch, self.step = -1, 0
        self._rollout, self._parameters = rollout, parameters
        self._losses = UpdateLosses(self._model)
        self._given: tuple[Any, Array] | None = None
        self._open: Evaluated | None = None
        self._done: list[Evaluated] = []
        self._backward = False

    def passed(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """The buffer was asked for a pass over its rows."""
        self.epoch += 1

    def given(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], samples: Any) -> None:
        """The buffer gave a minibatch; one before it that led to no step, because training stops, is done."""
        self.finish()
        if self.epoch == 0 and self.step == 0 and self._hooks.wants(MinibatchStart):
            self._hooks.emit(MinibatchStart(0, 0, partial(shard_gradients, self._model, samples)))
        self._given = samples, args[0]

    def evaluated(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """The policy was asked about it."""
        if self._given is not None:
            samples, numbers = self._given
            place = max(self.epoch, 0), self.step
            self._open = Evaluated(place, kept_of(samples), numbers, result, drawn_from(self._model.policy))
            self._given, self._backward = None, False

    def clips(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """The policy was asked for its parameters, which happens between the backward pass and clipping."""
        if self._open is not None and not self._backward:
            self._tell_gradients(self._model.max_grad_norm)

    def stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """The optimizer took a step."""
        if self._open is None:
            return
        if (
            not self._backward
        ):  # somebody trains without clipping, or clips in a way of their own: the norms are those applied
            self._tell_gradients(None)
        if self._hooks.wants(OptimizerStep):
            self._hooks.emit(OptimizerStep(max(self.epoch, 0), self.step, optimizer, self._parameters))
        self.finish()
        self.step += 1

    def finish(self) -> None:
        """The minibatch that is open, if there is one, is done."""
        done, self._open = self._open, None
        if done is not None and self._hooks.wants(MinibatchEnd):
            self._done.append(done)

    def take(self) -> list[Evaluated]:
        """All minibatches that are done."""
        self.finish()
        done, self._done = self._done, []
        return done

    def tell(self, done: Evaluated) -> None:
        """Tells of one of them."""
        self._hooks.emit(self._event(done))

    def _tell_gradients(self, max_norm: float | None) -> None:
        gradients = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        if not gradients:
            return
        self._backward = True
        if self._hooks.wants(BackwardEnd):
            norms = ops.gradient_norms(list(gradients.values()))
            names = tuple(gradients)
            self._hooks.emit(BackwardEnd(max(self.epoch, 0), self.step, self._parameters, names, norms, max_norm))

    @torch.no_grad()
    def _event(self, done: Evaluated) -> MinibatchEnd:
        samples, valid = done.samples, valid_rows(done.samples)
        values, log_probs, entropy = done.found
        answer = values.detach(), log_probs.detach(), None if entropy is None else entropy.detach()
        rows_in = rows_of(samples, answer, used_advantages(self._model, samples.advantages, valid))
        described = self._heads.describe(done.drawn)
        rows = self._rows(done.numbers, valid)
        return MinibatchEnd(
            epoch=done.place[0],
            step=done.place[1],
            log_ratio=rows_in.log_ratio,
            advantages=rows_in.advantages,
            values=rows_in.values,
            old_values=samples.old_values,
            returns=samples.returns,
            losses=self._losses.of(rows_in, valid),
            logits=described.logits,
            action_masks=described.masks,
            log_std=described.log_std,
            means=described.means,
            valid=valid,
            head_log_ratios=self._head_log_ratios(described.logits, samples, rows, rows_in.log_ratio),
            rows=rows,
        )

    def _rows(self, numbers: Array, valid: Tensor | None) -> Tensor:
        """Which transitions the rows are, time by time, [N]; the buffer counts them environment by environment."""
        known = torch.from_numpy(self._order[numbers]).to(self._model.device)
        if valid is None:
            return known
        return torch.zeros(len(valid), dtype=torch.int64, device=valid.device).masked_scatter(valid, known)

    def _head_log_ratios(
        self, logits: Mapping[str, Tensor], samples: Any, rows: Tensor, log_ratio: Tensor
    ) -> dict[str, Tensor]:
        names = self._heads.names
        if len(names) < 2 or self._rollout is None:
            return dict.fromkeys(names, log_ratio)
        now = self._heads.log_probs(logits, self._heads.actions(samples.actions))
        old = self._rollout.head_log_probs
        return {name: now[name] - old[name].flatten()[rows] for name in names}


def kept_of(samples: Any) -> Kept:
    """Of a buffer's minibatch."""
    mask = getattr(samples, "mask", None)
    return Kept(samples.old_log_prob, samples.advantages, samples.old_values, samples.returns, samples.actions, mask)
