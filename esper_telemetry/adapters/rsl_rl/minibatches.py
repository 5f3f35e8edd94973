"""Minibatches of an RSL-RL update: references between the trainer's steps, joined columns when it is over.

RSL-RL clips the gradients of the actor and then those of the critic, each by a norm of its own, and the norms that both clips take are
recorded. Where somebody reads the gradients, as in a sampled update, all norms are taken before the first clip.

Shapes: N rows of a minibatch, R rows of all M minibatches; T steps, B environments, D action dimensions; K parameters with a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from esper_telemetry.adapters.columns import LossColumns, policy_loss
from esper_telemetry.adapters.rsl_rl.facts import HEAD, is_gaussian, parameters_of, raw_model
from esper_telemetry.adapters.taps import ErrorHandler, Tap
from esper_telemetry.core import tensors as ops
from esper_telemetry.events import BackwardEnd, BeforeUpdate, OptimizerStep
from esper_telemetry.recording.recorder import UpdateRecorder
from esper_telemetry.updates.update import JoinedMinibatches


class StorageMinibatch(NamedTuple):
    """A minibatch that the storage has given out.

    Attributes:
        columns: the storage's own minibatch.
        epoch: pass over the rollout, from 0.
        rows: [N], transitions of the rollout, counted time by time; None where the storage does not show them.
    """

    columns: Any
    epoch: int
    rows: Tensor | None


class BatchesTap(Tap):
    """Stands before a storage's generator of minibatches and shows each to a listener, before the trainer receives it.

    Numbers of rows are read from the suspended generator, which keeps them to itself.
    """

    def __init__(
        self, storage: Any, name: str, listener: Callable[[StorageMinibatch], object], on_error: ErrorHandler
    ) -> None:
        super().__init__(storage, name)
        self._storage, self._listener, self._on_error = storage, listener, on_error
        vars(storage)[name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """The generator's minibatches."""
        generator = self._method(*args, **kwargs)
        for columns in generator:
            try:
                variables = getattr(getattr(generator, "gi_frame", None), "f_locals", {})
                epoch = int(variables.get("epoch", variables.get("ep", 0)))
                self._listener(StorageMinibatch(columns, epoch, self._rows(variables)))
            except Exception as error:  # a bug of ours must not reach the trainer
                self._on_error(self._listener, error)
            yield columns

    def _rows(self, variables: Mapping[str, Any]) -> Tensor | None:
        """Rows of a feed-forward minibatch, or all steps of the environments of a recurrent one."""
        rows = variables.get("batch_idx")
        if isinstance(rows, Tensor):
            return rows
        start, stop, storage = variables.get("start"), variables.get("stop"), self._storage
        if start is None or stop is None:
            return None
        numbers = torch.arange(storage.num_transitions_per_env * storage.num_envs, device=storage.device)
        return numbers.view(-1, storage.num_envs)[:, start:stop].flatten()


class EvaluatedMinibatch(NamedTuple):
    """Columns [N] or [N, 1] of a minibatch; the storage's own minibatch is not kept, whose observations take memory that the trainer would
    use again.

    Attributes:
        epoch, rows: as in `StorageMinibatch`.
        advantages: as used.
        old_log_probs, old_values, returns: of the storage.
        log_probs: of the actions now.
        parameters: of the distribution now, [N, D] each: mean and standard deviation of a Gaussian, the second alone where nobody asks for
            means; empty for others.
    """

    epoch: int
    rows: Tensor | None
    advantages: Tensor
    old_log_probs: Tensor
    old_values: Tensor
    returns: Tensor
    log_probs: Tensor
    parameters: tuple[Tensor, ...]


class StorageMinibatchListener:
    """Records minibatches and norms of gradients, and emits steps.

    Attributes:
        step: optimizer steps so far in this update.
        divergences: KL divergences by which RSL-RL sets its learning rate, one tensor of rows per minibatch.
        learning_rates: of the steps so far in this update.
    """

    def __init__(self, alg: Any, recorder: UpdateRecorder) -> None:
        self._alg, self._recorder, self._hooks = alg, recorder, recorder.hooks
        self._part_ids = [[*map(id, raw_model(alg, part).parameters())] for part in ("actor", "critic")]
        self.begin()

    def begin(self) -> None:
        """An update begins."""
        self.step = 0
        self.divergences: list[Tensor] = []
        self.learning_rates: list[float] = []
        self._parameters = {name: p for name, p in parameters_of(self._alg).items() if p.requires_grad}
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        self._part_names = [tuple([names[one] for one in part if one in names]) for part in self._part_ids]
        # all of their parameters are trained, and none of them twice
        self._parts_are_apart = sum(map(len, self._part_ids)) == len(set().union(*self._part_names)) == len(names)
        self._clipped_apart = tuple(map(frozenset, self._part_names))
        self._part_norms: list[tuple[tuple[str, ...], Tensor]] = []
        self._max_norm = 0.0
        self._gaussian = is_gaussian(self._alg)
        self._batch: StorageMinibatch | None = None
        self._evaluated: EvaluatedMinibatch | None = None
        self._values: Tensor | None = None
        self._emitted = False
        self._sampled = self._hooks.wants(BeforeUpdate)
        self._wants_gradients = self._hooks.wants_now(BackwardEnd)
        self._wants_steps = self._hooks.wants(OptimizerStep)

    def after_batch(self, batch: StorageMinibatch) -> None:
        """The storage has given out a minibatch."""
        self._batch, self._evaluated, self._values, self._emitted = batch, None, None, False
        self._part_norms = []
        self._wants_gradients = self._hooks.wants_now(BackwardEnd)  # a sample's first epoch alone has them

    def after_log_probs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Tensor) -> None:
        """The actor gave the log-probabilities of a minibatch's actions; its advantages are normalised by now."""
        batch = self._batch
        if batch is not None:
            columns = batch.columns
            parameters = self._alg.actor.output_distribution_params if self._gaussian else ()
            if not self._sampled:
                parameters = parameters[1:]
            self._evaluated = EvaluatedMinibatch(
                batch.epoch,
                batch.rows,
                columns.advantages,
                columns.old_actions_log_prob,
                columns.values,
                columns.returns,
                result.detach(),
                tuple([p.detach() for p in parameters]),
            )

    def after_values(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Tensor) -> None:
        """The critic estimated the values of a minibatch."""
        if self._batch is not None:
            self._values = result.detach()

    def after_divergence(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Tensor) -> None:
        """The trainer compared the policy with the one that acted."""
        self.divergences.append(result.detach())

    def owns(self, parameters: Sequence[Tensor]) -> bool:
        """Return True for the parameters of the actor, and for those of the critic, while a minibatch is open."""
        return self._batch is not None and [*map(id, parameters)] in self._part_ids

    def before_clip(self, max_norm: float, norms: Tensor | None) -> None:
        """The actor's gradients are about to be clipped, and then those of the critic, which are known by then."""
        if self._emitted:
            return
        if self._wants_gradients or not self._parts_are_apart:
            self._record_norms(float(max_norm))
            return
        parts = self._part_norms
        parts.append(self._norms_of_part(self._part_names[len(parts)], norms))
        self._max_norm = float(max_norm)
        if len(parts) == 2:
            self._record_part_norms()

    def after_optimizer_step(self, optimizer: Any) -> None:
        """The optimizer took a step."""
        batch, evaluated, values = self._batch, self._evaluated, self._values
        if batch is None:
            return
        epoch = batch.epoch
        if self._part_norms and not self._emitted:  # the critic's gradients were not clipped
            self._record_part_norms()
        if not self._emitted:
            self._record_norms(None)
        if self._wants_steps:
            self._hooks.emit(OptimizerStep(epoch, self.step, optimizer, self._parameters))
        if evaluated is not None and values is not None:
            self._recorder.minibatch((evaluated, values))
        self.learning_rates.append(float(optimizer.param_groups[0]["lr"]))
        self.step += 1
        self._batch = None

    def joined(self, rows: Sequence[tuple[EvaluatedMinibatch, Tensor]]) -> JoinedMinibatches:
        """Return the minibatches that were recorded, each with the critic's estimates now."""
        return joined_minibatches(self._alg, *zip(*rows, strict=True), means=self._sampled)

    @torch.no_grad()
    def _record_norms(self, max_norm: float | None) -> None:
        """Record the norms of all gradients, once per minibatch; where nothing was clipped, `max_norm` is None."""
        gradients = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        self._emitted = True
        if gradients:
            self._record(tuple(gradients), ops.gradient_norms(list(gradients.values())), max_norm)

    @torch.no_grad()
    def _record_part_norms(self) -> None:
        """Record the norms of the parts that were clipped."""
        parts, self._part_norms = self._part_norms, []
        names = tuple([name for own, _ in parts for name in own])
        self._record(names, torch.cat([norms for _, norms in parts]), self._max_norm)

    def _record(self, names: tuple[str, ...], norms: Tensor, max_norm: float | None) -> None:
        self._emitted = True
        epoch = 0 if self._batch is None else self._batch.epoch
        parts = () if max_norm is None else self._clipped_apart
        self._hooks.emit(BackwardEnd(epoch, self.step, self._parameters, names, norms, max_norm, clipped_apart=parts))

    def _norms_of_part(self, names: tuple[str, ...], norms: Tensor | None) -> tuple[tuple[str, ...], Tensor]:
        """Norms of the actor's or the critic's gradients, from those that its clip has taken where these are good for all."""
        if norms is not None and len(norms) == len(names) and not ops.doubtful_norms(norms):
            return names, norms
        gradients = {name: grad for name in names if (grad := self._parameters[name].grad) is not None}
        return tuple(gradients), ops.gradient_norms(list(gradients.values())) if gradients else torch.empty(0)


@torch.no_grad()
def joined_minibatches(
    alg: Any, rows: Sequence[EvaluatedMinibatch], values: Sequence[Tensor], *, means: bool
) -> JoinedMinibatches:
    """Return all minibatches of an update.

    Data augmentation by symmetries appends rows that no environment has shown: they are left out.

    Args:
        alg: the algorithm.
        rows, values: columns of each minibatch, and the critic's estimates now.
        means: whether means of the policy are kept.
    """
    counts = tuple([len(row.rows) if row.rows is not None else row.log_probs.numel() for row in rows])
    appended = any(row.log_probs.numel() != count for row, count in zip(rows, counts, strict=True))

    def counted(columns: Sequence[Tensor]) -> Tensor:
        """Columns [n, ...], one after the other; not cut where nothing is appended: to cut twenty takes as long as to join them."""
        cut = zip(columns, counts, strict=True)
        return torch.cat([column[:count] for column, count in cut] if appended else tuple(columns))

    def joined(columns: Sequence[Tensor]) -> Tensor:
        if appended or len({column.shape for column in columns}) > 1:
            columns = [column.flatten() for column in columns]
        return counted(columns).flatten()

    def joined_head(columns: Sequence[Tensor]) -> Tensor:
        return counted([column.flatten(0, -2) for column in columns])

    log_probs, old_values = joined([row.log_probs for row in rows]), joined([row.old_values for row in rows])
    columns = LossColumns(
        log_ratio=log_probs - joined([row.old_log_probs for row in rows]),
        log_probs=log_probs,
        advantages=joined([row.advantages for row in rows]),
        values=joined(values),
        old_values=old_values,
        returns=joined([row.returns for row in rows]),
        entropy=log_probs,
    )
    losses = {"policy": policy_loss(columns, alg.clip_param), "value": value_loss(alg, columns)}
    known = [row.rows for row in rows if row.rows is not None]
    gaussian = all(row.parameters for row in rows)
    return JoinedMinibatches(
        epochs=tuple([row.epoch for row in rows]),
        counts=counts,
        log_ratio=columns.log_ratio,
        advantages=columns.advantages,
        valid=None,
        losses={name: _means(loss, counts) for name, loss in losses.items()},
        log_std={HEAD: joined_head([row.parameters[-1] for row in rows]).log()} if gaussian else {},
        means={HEAD: joined_head([row.parameters[0] for row in rows])} if gaussian and means else {},
        rows=torch.cat(known) if len(known) == len(rows) else None,
        values=columns.values,
        old_values=columns.old_values,
        returns=columns.returns,
    )


def _means(column: Tensor, counts: tuple[int, ...]) -> Tensor:
    """Mean [M] of each minibatch's rows [R]."""
    if len(set(counts)) == 1:
        return column.view(len(counts), -1).mean(-1)
    return torch.stack([part.mean() for part in column.split(counts)])


def value_loss(alg: Any, columns: LossColumns) -> Tensor:
    """Half the squared error [R]; where values are clipped, the larger one of those of the value and of the clipped value."""
    error = (columns.values - columns.returns).square()
    if alg.use_clipped_value_loss:
        moved = (columns.values - columns.old_values).clamp(-alg.clip_param, alg.clip_param)
        error = torch.maximum(error, (columns.old_values + moved - columns.returns).square())
    return 0.5 * error
