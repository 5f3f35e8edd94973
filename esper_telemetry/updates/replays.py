"""Replays a sampled update's rollout through its policy, before the first step and after the last.

All passes use copies of the policy (`UpdateReplay`). They run in the worker if there is one, and otherwise on the training thread.
Shapes: N transitions, which form a grid [T, B].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from esper_telemetry.core.containment import Measurement
from esper_telemetry.core.event_parts import Activations, CollectionReplay, FirstMinibatch, Outputs, PolicyReplay, UsedAdvantages
from esper_telemetry.core.record import Level
from esper_telemetry.equations.comparison import EquationCheck
from esper_telemetry.equations.log_probs import LogProbInputs, log_prob
from esper_telemetry.equations.normalization import Scope, check_normalized_advantages
from esper_telemetry.equations.replayed_outputs import FIRST_DIFFERENCE, REPLAYED_LOG_PROBS, check_replayed_log_probs, check_values
from esper_telemetry.events import NONE, BeforeUpdate, RolloutEnd
from esper_telemetry.metrics.actions import greedy_agreement
from esper_telemetry.metrics.kl import kl_after_update, kl_rows
from esper_telemetry.metrics.lstm.states import bptt_stats, first_staleness, memory_use, state_staleness
from esper_telemetry.metrics.representation import capacity_loss, feature_drift, feature_norm, layer_responses, unit_activity
from esper_telemetry.updates.pickles import PolicyPickle, pickled_around, pickled_policy

if TYPE_CHECKING:
    from esper_telemetry.updates.update import JoinedMinibatches

MAX_COMPARED_TRANSITIONS = 512
"""Transitions whose features before and after an update are compared."""

MAX_REPLAYED_ENTRIES = 1 << 21
"""Largest number of entries of the policy and its inputs that are sent to the worker: eight megabytes."""

FIRST_RATIO = 1e-3
"""Nats by which the first minibatch's log-ratio exceeds rounding: the critical bound of `integrity/ratio_init` in single precision."""


class GridColumn(NamedTuple):
    """A number for each transition of a rollout, [T, B], and the places that are transitions."""

    numbers: Tensor
    valid: Tensor


class UpdateReplay(NamedTuple):
    """The policy before and after an update, and the rollout that is replayed.

    Attributes:
        inputs: `PolicyReplay` and `CollectionReplay`.
        before, after: the policy; `after` is None if the update did not end.
        modes: as of `BeforeUpdate`.
        with_capacity: a copy of the policy is trained too.
    """

    inputs: PolicyPickle
    before: PolicyPickle
    after: PolicyPickle | None
    modes: tuple[bool, ...] | None
    with_capacity: bool

    def load(self) -> tuple[PolicyReplay, CollectionReplay | None]:
        """Return the replay of the policy before the update."""
        policy: nn.Module = self.before.load()
        for module, mode in zip(policy.modules(), self.modes or (), strict=self.modes is not None):
            module.training = mode
        replay: tuple[PolicyReplay, CollectionReplay | None] = self.inputs.load(policy)
        return replay

    def load_after(self) -> PolicyReplay:
        """Return the replay of the policy after the update."""
        assert self.after is not None
        replay: PolicyReplay = self.inputs.load(self.after.load())[0]
        return replay


def update_replay(event: BeforeUpdate, *, with_capacity: bool, local: bool = False) -> UpdateReplay | None:
    """Return the replay with a copy of the policy; None if it is too large for another process, or cannot be loaded there.

    Raises:
        TypeError: if this process is to load it (`local`), and the policy cannot be copied.
    """
    assert event.network is not None
    if not local and sum(parameter.numel() for parameter in event.network.parameters()) > MAX_REPLAYED_ENTRIES:
        return None
    before = pickled_policy(event.network, local=local)
    if before is None:
        return None
    inputs = pickled_around(event.network, (event.policy, event.collection), {RolloutEnd: _shown_part}, local=local)
    if inputs is None:
        return None
    if not local and sum(tensor.numel() for tensor in inputs.tensors + before.tensors) > MAX_REPLAYED_ENTRIES:
        return None
    return UpdateReplay(inputs, before, None, event.modes, with_capacity)


def _shown_part(rollout: RolloutEnd) -> tuple[type[RolloutEnd], tuple[Any, ...]]:
    """Pickle a rollout without the columns that no pass is compared with."""
    left_out = {"observations": None, "transitions": None, "scales": NONE, "raw_rewards": None}
    columns = (field.name for field in fields(rollout))
    return RolloutEnd, tuple([left_out[name] if name in left_out else getattr(rollout, name) for name in columns])


def replay_measurements(replay: UpdateReplay, precision: str | None, level: Level) -> Iterator[Measurement]:
    """Yield all measurements that take copies of the policy before and after an update."""
    passes = FirstPasses.take(*replay.load())
    yield from passes.measurements(CollectionProbe(), precision, level, with_capacity=replay.with_capacity)
    if replay.after is not None:
        yield from passes.compared(replay.load_after())


class FirstPasses(NamedTuple):
    """Passes of the policy before the first step.

    Attributes:
        policy, collection: replays that gave them.
        stored, now: outputs that were acted on, and outputs of the policy.
    """

    policy: PolicyReplay
    collection: CollectionReplay | None
    stored: Outputs
    now: Outputs

    @classmethod
    def take(cls, policy: PolicyReplay, collection: CollectionReplay | None) -> FirstPasses:
        """Take the passes; passes of a collection also give values."""
        now = None if collection is None else collection.outputs("")
        return cls(policy, collection, policy.stored(), policy.outputs() if now is None else now)

    def checks(self, probe: CollectionProbe, precision: str | None) -> Iterator[Measurement]:
        """Yield the equations of collection."""
        if self.collection is not None:
            yield from probe.before_update(self.stored, self.now, self.collection, precision)

    def measurements(self, probe: CollectionProbe, precision: str | None, level: Level, *, with_capacity: bool) -> Iterator[Measurement]:
        """Yield all measurements before the first step."""
        yield from self.checks(probe, precision)
        if self.stored.memory is not None and self.now.memory is not None:
            yield partial(first_staleness, self.stored.memory, self.now.memory)
        yield from layer_metrics(self.policy.activations(), level)
        yield from _memory_metrics(self.policy)
        if with_capacity:
            copy = self.policy.copy()
            if copy.parameters:
                yield partial(capacity_loss, copy.network, copy.parameters, copy.observations)

    def compared(self, after: PolicyReplay) -> Iterator[Measurement]:
        """Yield the distance of the policy after the update from the outputs acted on, and from its outputs before the update."""
        stored, before, now = self.stored, self.now, after.outputs()
        if stored.logits or stored.means:  # else another object than the policy has acted
            yield lambda: kl_after_update(kl_rows(stored, now), relevant=now.relevance)
        if stored.logits and now.logits:
            yield partial(greedy_agreement, stored.logits, now.logits, relevant=now.relevance)
        if before.features is not None and now.features is not None:
            some = slice(None, None, max(1, len(now.features) // MAX_COMPARED_TRANSITIONS))
            yield partial(feature_drift, before.features[some], now.features[some])
        if stored.memory is not None and now.memory is not None:
            yield partial(state_staleness, stored.memory, now.memory)


def layer_metrics(activations: Activations, level: Level) -> Iterator[Measurement]:
    """Units of single layers, and the size of the features before the last nonlinearity; at DEBUG how layers respond."""
    if activations.layers:
        yield lambda: unit_activity(activations.layers).layers
        if level >= Level.DEBUG:
            yield partial(layer_responses, activations.layers)
    if activations.last is not None:
        yield partial(feature_norm, activations.last)


def _memory_metrics(policy: PolicyReplay) -> Iterator[Measurement]:
    """Measure gradients at the states of a recurrent policy, and its distance from its policy without memory."""
    gradients = policy.state_gradients()
    if gradients is not None:
        yield partial(bptt_stats, gradients.first, gradients.last)
    without = policy.without_memory()
    if without is not None:
        yield partial(memory_use, kl_rows(policy.stored_part(), without), relevant=without.relevance)


class CollectionProbe:
    """Compares the outputs acted on in a sampled update with the policy's outputs before the first step.

    Attributes:
        needs_modes: passes in the mode of training are compared with minibatches, in the samples to come.
    """

    def __init__(self) -> None:
        self._stored: GridColumn | None = None
        self._training: Tensor | None = None
        self._left: UpdateReplay | None = None
        self._first_stored: Tensor | None = None
        self.needs_modes = False

    def leave_to_worker(self, replay: UpdateReplay) -> None:
        """Leave the checks before the first step to the worker; they are repeated here if the first minibatch differs."""
        self._stored = self._training = None
        self._left = replay

    def before_update(self, stored: Outputs, now: Outputs, collection: CollectionReplay, precision: str | None) -> Iterator[Measurement]:
        """Yield the checks; `stored` are the outputs that were acted on, `now` the policy's outputs."""
        self._stored = self._training = self._left = None
        grid = partial(_grid, collection)
        if now.values is not None:
            yield partial(self._values, grid, now.values, collection, precision)
        if stored.logits or stored.means:
            self._stored = grid(_log_probs(stored, collection))
            yield partial(self._log_probs, grid, now, collection, precision)
            if self._stored is not None and (collection.has_modes or self.needs_modes):
                training = collection.outputs("training")
                self._training = None if training is None else grid(_log_probs(training, collection)).numbers

    def first_minibatch(self, event: FirstMinibatch, precision: str | None) -> Iterator[Measurement]:
        """Yield the check of a minibatch if a known mistake that only training makes explains a ratio that is not 1.

        Mistakes that acting and training share cancel out. If the rollout differs from its replay, the replay's check gives the reason.
        """
        stored, trained = event.stored.detach().double(), event.trained.detach().double()
        if not FIRST_RATIO < float((trained - stored).abs().max()) < torch.inf:
            return
        self._first_stored = stored
        self._repeat(precision)
        if self._stored is None:
            return
        alternatives = {one.name: partial(event.passes, one.name) for one in REPLAYED_LOG_PROBS.hypotheses}
        check = check_replayed_log_probs(trained, stored, alternatives=alternatives, precision=precision)
        if check.explanations:
            self._training = None
            yield lambda: check

    def after_minibatches(self, minibatches: JoinedMinibatches, precision: str | None) -> Iterator[Measurement]:
        """Yield the check of the first minibatch, whose log-probabilities training has computed in its own mode."""
        rows, ratio = minibatches.rows, minibatches.log_ratio
        if rows is not None and minibatches.counts:
            rows, ratio = rows[: minibatches.counts[0]], ratio[: minibatches.counts[0]].detach().double()
        size = float(ratio.abs().max()) if rows is not None and len(ratio) else 0.0
        differs = FIRST_RATIO < size < torch.inf
        if differs:
            self._repeat(precision)
        stored, training, first_stored = self._stored, self._training, self._first_stored
        self._stored = self._training = self._left = self._first_stored = None
        if not differs or stored is None or rows is None or int(rows.max()) >= stored.numbers.numel():
            return
        self.needs_modes = True  # in later samples: custom code of the policy may depend on the mode
        if training is not None:
            acted = stored.numbers.flatten()[rows]
            trained = training.flatten()[rows]
            # dropout and batch norm give other numbers in each pass, so only the size of the difference is known
            similar = 1 / 4 < float((trained - acted).square().mean().sqrt() / ratio.square().mean().sqrt()) < 4
            other = {"other_mode": lambda: acted + ratio} if similar else {}
            check = check_replayed_log_probs(acted + ratio, acted, alternatives=other, precision=precision)
            # a mismatch of stored log-probabilities and stored actions is a separate difference
            is_sound = (
                first_stored is not None
                and first_stored.shape == acted.shape
                and torch.allclose(first_stored, acted, rtol=0, atol=FIRST_RATIO)
            )
            if similar or (is_sound and (check.error or 0.0) > FIRST_DIFFERENCE):
                yield lambda: check

    def _repeat(self, precision: str | None) -> None:
        """Repeat the checks that were left to the worker."""
        replay, self._left = self._left, None
        if replay is not None:
            for check in FirstPasses.take(*replay.load()).checks(self, precision):
                check()

    def _values(
        self, grid: Callable[[Tensor], GridColumn], now: Tensor, collection: CollectionReplay, precision: str | None
    ) -> EquationCheck:
        replayed = grid(now)

        def numbers(outputs: Outputs) -> Tensor | None:
            return None if outputs.values is None else grid(outputs.values).numbers

        return check_values(
            collection.values, replayed.numbers, alternatives=_alternatives(collection, numbers), valid=replayed.valid, precision=precision
        )

    def _log_probs(
        self, grid: Callable[[Tensor], GridColumn], replayed: Outputs, collection: CollectionReplay, precision: str | None
    ) -> EquationCheck:
        assert self._stored is not None
        acted = self._stored.numbers

        def of_step(steps: int) -> Tensor:
            """Log-probabilities of the actions under the distributions of the step `steps` later; the stored number if it is missing."""
            envs, rows = acted.shape[1], collection.rows
            place = torch.full((acted.numel(),), -1, dtype=torch.long, device=rows.device)
            place[rows] = torch.arange(len(rows), device=rows.device)
            wanted = rows + steps * envs
            inside = (wanted >= 0) & (wanted < acted.numel())
            source = torch.where(inside, place[wanted.clamp(0, acted.numel() - 1)], -1)
            numbers = _log_probs(_rows_of(replayed, source.clamp(min=0)), collection)
            return grid(torch.where(source >= 0, numbers, acted.flatten()[rows])).numbers

        passes = _alternatives(collection, lambda outputs: grid(_log_probs(outputs, collection)).numbers)
        shifts = {"observation_before": partial(of_step, -1), "observation_after": partial(of_step, 1)}
        check = check_replayed_log_probs(
            acted,
            grid(_log_probs(replayed, collection)).numbers,
            alternatives={**passes, **shifts},
            valid=self._stored.valid,
            precision=precision,
        )
        if not check.matches:  # then the first minibatch differs for the same reason
            self._stored = None
        return check


def used_advantages(event: UsedAdvantages, precision: str | None) -> Iterator[Measurement]:
    """Yield the check of the advantages in use, unless the loss explains a difference, or nothing does."""
    if event.used.shape != event.raw.shape:
        return
    over: Scope = "minibatch" if event.normalized else "nothing"
    first = None if event.rollout is None else event.rollout.flatten()[: len(event.raw)]  # as many as the minibatch has rows
    check = check_normalized_advantages(
        event.raw,
        event.used,
        over=over,
        rollout=event.rollout,
        environments=event.environments,
        in_order=first if first is not None and len(first) == len(event.raw) else None,
        valid=event.valid,
        precision=precision,
    )
    # a policy loss with another sign or weight gives some of the same numbers; its gradient decides
    of_loss = any(one.of == "loss" for one in check.hypotheses)
    if check.explained and not of_loss:
        yield lambda: check


def _alternatives(collection: CollectionReplay, numbers: Callable[[Outputs], Tensor | None]) -> dict[str, Callable[[], Tensor | None]]:
    """Return the numbers of every hypothesis, computed on access."""

    def run(name: str) -> Tensor | None:
        outputs = collection.outputs(name)
        return None if outputs is None else numbers(outputs)

    return {one.name: partial(run, one.name) for one in REPLAYED_LOG_PROBS.hypotheses}


def _rows_of(outputs: Outputs, rows: Tensor) -> Outputs:
    def take(columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {head: column if column.dim() == 1 else column[rows] for head, column in columns.items()}

    return outputs._replace(logits=take(outputs.logits), means=take(outputs.means), log_std=take(outputs.log_std))


def _grid(collection: CollectionReplay, column: Tensor) -> GridColumn:
    shape, rows = collection.values.shape, collection.rows
    numbers = torch.zeros(shape.numel(), dtype=torch.float64, device=column.device)
    numbers.index_copy_(0, rows, column.detach().double())
    valid = torch.zeros(shape.numel(), dtype=torch.bool, device=column.device).index_fill(0, rows, True)
    return GridColumn(numbers.view(shape), valid.view(shape))


def _log_probs(outputs: Outputs, collection: CollectionReplay) -> Tensor:
    """Log-probabilities [N] of the stored actions under the distributions of `outputs`, before a squash."""
    rows = collection.rows
    actions = {head: column.flatten(0, 1)[rows].double() for head, column in collection.actions.items()}
    means = {head: part.double() for head, part in outputs.means.items()}
    return log_prob(
        LogProbInputs(
            stored=torch.zeros(len(rows), dtype=torch.float64, device=rows.device),
            actions=actions,
            logits={head: part.double() for head, part in outputs.logits.items()},
            means=means,
            std={head: outputs.log_std[head].double().exp().expand_as(part) for head, part in means.items()},
            relevant=outputs.relevance,
        )
    )
