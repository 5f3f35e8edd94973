"""The minibatches of an update as they pass: what the buffer gave, what the policy said of it, what became of the gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from esper_telemetry.adapters.sb3.columns import Block, Columns, MinibatchRow
from esper_telemetry.adapters.sb3.drawn import BLOCK, DrawnRecorder
from esper_telemetry.adapters.sb3.head_rows import HeadColumns
from esper_telemetry.adapters.sb3.shards import shard_gradients
from esper_telemetry.core import tensors as ops
from esper_telemetry.events import BackwardEnd, Hooks, MinibatchesEnd, MinibatchStart, OptimizerStep, RolloutEnd
from esper_telemetry.ppo.environments.protocol import Array

SAMPLES = ("old_log_prob", "advantages", "old_values", "returns", "actions")
"""What is kept of a buffer's minibatch: all but the observations, which are large, and states."""

kept_of: Callable[[Any], tuple[Tensor, ...]] = attrgetter(*SAMPLES)


class MinibatchListener:
    """Tells of gradients and steps at once, and of all minibatches when the update is over.

    Between two minibatches the trainer's own code has filled the caches, and a line of this takes five times as long as it would in a
    loop. So references are kept there, nothing is computed but the norms of gradients, and sixteen minibatches are joined at a time.

    Attributes:
        epoch: pass over the rollout, from 0; -1 before the first.
        step: optimizer steps taken in this update.
        hears_clipping: whether the trainer is known to clip where `about_to_clip` hears of it.
    """

    def __init__(
        self, model: Any, drawn: DrawnRecorder, columns: Columns, head_rows: HeadColumns, hooks: Hooks
    ) -> None:
        self._model, self._policy, self._hooks, self._columns = model, model.policy, hooks, columns
        self._kept_of_policy, self._head_rows = drawn.kept, head_rows
        self._padded = hasattr(model.policy, "lstm_actor")
        self.hears_clipping = False
        self._clear()
        self.begin(0, {})

    def begin(self, place: int, named: Mapping[str, Tensor]) -> None:
        """An update of these parameters begins; `place` is that of its rollout among those of the record."""
        parameters = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
        self.epoch, self.step = -1, 0
        self._place = place
        self._parameters = parameters
        self._names = tuple(parameters)
        self._everything = [*map(id, named.values())]
        self._samples: Any = None
        self._numbers: Array | None = None
        self._open: MinibatchRow | None = None
        self._told = False
        self._wants_norms, self._wants_steps = self._hooks.wants(BackwardEnd), self._hooks.wants(OptimizerStep)

    def passed(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """The buffer was asked for a pass over its rows."""
        self.epoch += 1

    def given(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], samples: Any) -> None:
        """The buffer gave a minibatch; one before it that led to no step, because training stops, is done."""
        self.finish()
        if self.step == 0 and self.epoch == 0 and self._hooks.wants(MinibatchStart):
            self._hooks.emit(MinibatchStart(0, 0, partial(shard_gradients, self._model, samples)))
        self._samples, self._numbers = samples, args[0]

    def evaluated(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """The policy was asked about it."""
        samples, numbers = self._samples, self._numbers
        if numbers is None:
            return
        values, log_probs, entropy = result
        self._samples = self._numbers = None
        self._told = False
        self._open = (
            max(self.epoch, 0),
            self._place,
            numbers,
            samples.mask if self._padded else None,
            kept_of(samples),
            values.detach(),
            log_probs.detach(),
            None if entropy is None else entropy.detach(),
            self._kept_of_policy(self._policy),
        )

    def owns(self, parameters: Sequence[Tensor]) -> bool:
        """Whether these are the parameters of the policy, and a minibatch is open."""
        return self._open is not None and [*map(id, parameters)] == self._everything

    def about_to_clip(self, max_norm: float, raw: Tensor | None) -> None:
        """The policy's gradients are about to be clipped; `raw` norms of all there are, where they are known."""
        self.hears_clipping = True
        if not self._told:
            self._tell_gradients(max_norm, raw)

    def asked(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """The policy was asked for its parameters, which happens between the backward pass and clipping."""
        if self._open is not None and not (self._told or self.hears_clipping):
            self._tell_gradients(self._model.max_grad_norm, None)

    def stepped(self, optimizer: Any) -> None:
        """The optimizer took a step; norms of a minibatch that was not clipped are those applied."""
        if self._open is None:
            return
        if not self._told:
            self._tell_gradients(None, None)
        if self._wants_steps:
            self._hooks.emit(OptimizerStep(max(self.epoch, 0), self.step, optimizer, self._parameters))
        self.finish()
        self.step += 1

    def finish(self) -> None:
        """The minibatch that is open, if there is one, is done."""
        if self._open is not None:
            self._done.append(self._open)
            self._open = None
            if len(self._done) == BLOCK:
                self._join()

    def tell(self, rollout: RolloutEnd | None) -> None:
        """Tells of all minibatches that are done; `rollout` is what was told of what they are taken from."""
        self.finish()
        if self._done:
            self._join()
        blocks = self._blocks
        self._clear()
        if blocks and self._hooks.wants(MinibatchesEnd):
            self._hooks.emit(self._columns.joined(blocks, rollout))

    def _clear(self) -> None:
        self._done: list[MinibatchRow] = []
        self._blocks: list[Block] = []

    def _join(self) -> None:
        done, self._done = self._done, []
        self._blocks.append(self._columns.block(done))

    def _tell_gradients(self, max_norm: float | None, raw: Tensor | None) -> None:
        self._told = True
        if not self._wants_norms:
            return
        names, norms = self._names, raw
        if norms is None or not len(norms) == len(names) == len(self._everything) or ops.doubtful_norms(norms):
            gradients = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
            if not gradients:
                return
            names, norms = tuple(gradients), _norms(list(gradients.values()), raw)
        heads = self._head_rows.norms()
        self._hooks.emit(BackwardEnd(max(self.epoch, 0), self.step, self._parameters, names, norms, max_norm, heads))


@torch.no_grad()
def _norms(gradients: Sequence[Tensor], raw: Tensor | None) -> Tensor:
    """[K] of gradients that may have a graph of their own; from `raw`, unless parameters are frozen whose gradient is still there."""
    if raw is not None and len(raw) == len(gradients):
        return ops.checked_norms(gradients, raw)
    return ops.gradient_norms(gradients)
