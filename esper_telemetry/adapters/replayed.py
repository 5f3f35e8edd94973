"""Equations of collection that need the live policy: it passes over its rollout once more before the first step.

Shapes: N transitions, which stand in a grid [T, B].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from esper_telemetry.core.equations.equation import Equation
from esper_telemetry.events import CollectionReplay, FirstMinibatch, MinibatchesEnd, Outputs, UsedAdvantages
from esper_telemetry.metrics.integrity.equations import EquationCheck
from esper_telemetry.metrics.integrity.rollouts.collection import (
    REPLAYED_LOG_PROBS,
    check_replayed_log_probs,
    check_values,
)
from esper_telemetry.metrics.integrity.rollouts.log_probs import LogProbInputs, log_prob
from esper_telemetry.metrics.integrity.targets.normalization import Scope, check_normalized_advantages
from esper_telemetry.updates.containment import Measurement

FIRST_RATIO = 1e-3
"""Nats by which the first minibatch's log-ratio exceeds rounding: the critical bound of `integrity/ratio_init` in single precision."""


LOSS_EXPLANATIONS = frozenset({"sign", "other_std", "variance"})
"""Explanations of normalised advantages that a policy loss with another sign or weight gives as well: its gradient tells."""


class GridColumn(NamedTuple):
    """A number for each transition of a rollout, [T, B], and the places that are transitions."""

    numbers: Tensor
    valid: Tensor


class CollectionProbe:
    """Compares what was acted on in a sampled update with what the policy gives before the first step."""

    def __init__(self) -> None:
        self._stored: GridColumn | None = None
        self._training: Tensor | None = None
        self._looks_for_modes = False

    def before_update(
        self, stored: Outputs, now: Outputs, collection: CollectionReplay, precision: str | None
    ) -> Iterator[Measurement]:
        """Yield the checks; `stored` are the outputs that were acted on, `now` those of the policy."""
        self._stored = self._training = None
        grid = partial(_grid, collection)
        if now.values is not None:
            yield partial(self._values, grid, now.values, collection, precision)
        if stored.logits or stored.means:
            self._stored = grid(_log_probs(stored, collection))
            yield partial(self._log_probs, grid, now, collection, precision)
            if self._stored is not None and (collection.has_modes or self._looks_for_modes):
                training = collection.outputs("training")
                self._training = None if training is None else grid(_log_probs(training, collection)).numbers

    def first_minibatch(self, event: FirstMinibatch, precision: str | None) -> Iterator[Measurement]:
        """Yield the check of a minibatch in which a known mistake of training alone explains a ratio that is not 1.

        What acting and training have in common cancels out, and where the rollout differs from its own replay, that says why.
        """
        stored, trained = event.stored.detach().double(), event.trained.detach().double()
        if self._stored is None or not FIRST_RATIO < float((trained - stored).abs().max()) < torch.inf:
            return
        alternatives = {one.name: partial(event.passes, one.name) for one in REPLAYED_LOG_PROBS.hypotheses}
        check = check_replayed_log_probs(trained, stored, alternatives=alternatives, precision=precision)
        if check.explanations:
            self._training = None
            yield lambda: check

    def after_minibatches(self, minibatches: MinibatchesEnd, precision: str | None) -> Iterator[Measurement]:
        """Yield the check of the first minibatch, whose log-probabilities training has computed in its own mode."""
        stored, training = self._stored, self._training
        self._stored = self._training = None
        if stored is None or minibatches.rows is None or not minibatches.counts:
            return
        first = slice(0, minibatches.counts[0])
        rows, ratio = minibatches.rows[first], minibatches.log_ratio[first].detach().double()
        size = float(ratio.abs().max()) if len(ratio) else 0.0
        if not FIRST_RATIO < size < torch.inf or int(rows.max()) >= stored.numbers.numel():
            return
        self._looks_for_modes = True  # in the samples to come: what differs may depend on the mode in code of its own
        if training is not None:
            acted = stored.numbers.flatten()[rows]
            trained = training.flatten()[rows]
            # dropout and batch norm give other numbers in each pass: so the difference is known by its size alone
            similar = 1 / 4 < float((trained - acted).square().mean().sqrt() / ratio.square().mean().sqrt()) < 4
            if similar:
                other = {"other_mode": lambda: acted + ratio}
                yield partial(check_replayed_log_probs, acted + ratio, acted, alternatives=other, precision=precision)

    def _values(
        self,
        grid: Callable[[Tensor], GridColumn],
        now: Tensor,
        collection: CollectionReplay,
        precision: str | None,
    ) -> EquationCheck:
        replayed = grid(now)

        def numbers(outputs: Outputs) -> Tensor | None:
            return None if outputs.values is None else grid(outputs.values).numbers

        return check_values(
            collection.rollout.values,
            replayed.numbers,
            alternatives=_alternatives(collection, numbers),
            valid=replayed.valid,
            precision=precision,
        )

    def _log_probs(
        self,
        grid: Callable[[Tensor], GridColumn],
        replayed: Outputs,
        collection: CollectionReplay,
        precision: str | None,
    ) -> EquationCheck:
        assert self._stored is not None
        acted = self._stored.numbers

        def of_step(steps: int) -> Tensor:
            """Log-probabilities of the actions under the distributions of the step `steps` later; the stored ones where it is missing."""
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
    check = check_normalized_advantages(event.raw[None], event.used[None], over=over, precision=precision)
    names = {one.hypothesis.name for one in check.explanations}
    if check.matches or (names and not names & LOSS_EXPLANATIONS):
        yield lambda: check


def _alternatives(
    collection: CollectionReplay, numbers: Callable[[Outputs], Tensor | None]
) -> dict[str, Callable[[], Tensor | None]]:
    """Return the numbers of every hypothesis, computed when they are asked for."""

    def run(name: str) -> Tensor | None:
        outputs = collection.outputs(name)
        return None if outputs is None else numbers(outputs)

    equation: Equation = REPLAYED_LOG_PROBS
    return {one.name: partial(run, one.name) for one in equation.hypotheses}


def _rows_of(outputs: Outputs, rows: Tensor) -> Outputs:
    """The distributions of these rows."""

    def take(columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {head: column if column.dim() == 1 else column[rows] for head, column in columns.items()}

    return outputs._replace(logits=take(outputs.logits), means=take(outputs.means), log_std=take(outputs.log_std))


def _grid(collection: CollectionReplay, column: Tensor) -> GridColumn:
    shape, rows = collection.rollout.rewards.shape, collection.rows
    numbers = torch.zeros(shape.numel(), dtype=torch.float64, device=column.device)
    numbers.index_copy_(0, rows, column.detach().double())
    valid = torch.zeros(shape.numel(), dtype=torch.bool, device=column.device).index_fill(0, rows, True)
    return GridColumn(numbers.view(shape), valid.view(shape))


def _log_probs(outputs: Outputs, collection: CollectionReplay) -> Tensor:
    """Log-probabilities [N] of the stored actions under the distributions of `outputs`, before a squash."""
    rows = collection.rows
    actions = {head: column.flatten(0, 1)[rows].double() for head, column in collection.rollout.actions.items()}
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
