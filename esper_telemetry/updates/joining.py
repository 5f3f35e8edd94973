"""Joins the events of an update: rollouts with those before them, minibatches one after the other, backward passes stacked.

Between two minibatches this code only keeps references: by the next one the trainer has pushed it out of the processor's caches, and a
line takes three to six times as long as in a loop over all of them when the update is over. Whole events are not kept either: they hold
memory that the trainer would use again for the next minibatch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from esper_telemetry.events import (
    NONE,
    BackwardEnd,
    BackwardsEnd,
    MinibatchEnd,
    MinibatchesEnd,
    RecurrentForward,
    RolloutEnd,
    Scale,
)
from esper_telemetry.metrics.actions import ActionTotal, mean_action
from esper_telemetry.metrics.gradients.actor_critic import leaf_gradients
from esper_telemetry.metrics.lstm.gates import cell_weights
from esper_telemetry.metrics.lstm.states import state_ages, state_size
from esper_telemetry.metrics.rollout import constant_rows, cut_entries, observation_window
from esper_telemetry.updates.data import (
    TARGET_COLUMNS,
    ActionChoices,
    BackwardGradients,
    CollectedRows,
    Layer,
    Normalizer,
    RecurrentState,
    RolloutContext,
    copied,
)

DRIFT_UPDATES = 10
"""Updates over which the drift of a normaliser is measured."""

MAX_OBSERVATION_ENTRIES = 1 << 15
"""Entries of a rollout's observations up to which they travel: then to copy them costs less than to look at them."""


def rows_that_count(valid: Tensor | None, relevant: Tensor | None) -> Tensor | None:
    """Return the rows that are valid and in which a head matters; None where that is every row."""
    if valid is None or relevant is None:
        return relevant if valid is None else valid
    return valid & relevant


class RolloutHistory:
    """Puts each rollout beside the ones before it.

    Resets of memory are read off the states, which are exactly zero where a step begins without memory, and not off the flags that should
    have reset them: otherwise a trainer that forgets to reset would look like one that does not.
    """

    def __init__(self) -> None:
        self._choices: Mapping[str, ActionChoices] = {}
        self._means: Mapping[str, ActionTotal] = {}
        self._ages: Tensor | None = None
        self._targets: Tensor | None = None
        self._scales: dict[str, deque[tuple[Tensor, Tensor]]] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the columns that the next rollout is compared with."""
        return {
            "chosen": {head: tuple(choices) for head, choices in self._choices.items()},
            "means": {head: tuple(total) for head, total in self._means.items()},
            "ages": self._ages,
            "scales": {name: list(history) for name, history in self._scales.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self._choices = {head: ActionChoices(*choices) for head, choices in state["chosen"].items()}
        self._ages = state["ages"]
        self._means = {head: ActionTotal(*total) for head, total in state["means"].items()}
        self._scales = {name: deque(history, DRIFT_UPDATES + 1) for name, history in state["scales"].items()}

    def take(
        self, event: RolloutEnd, *, categorical: Iterable[str], layers: tuple[Layer, ...], sampled: bool = False
    ) -> tuple[RolloutEnd, RolloutContext]:
        """Return the rollout without its largest columns, and the columns that it is compared with.

        The trainer may collect the next rollout in the same memory, so columns that outlive the update are copied.

        Args:
            event: the next rollout.
            categorical: its categorical heads.
            layers: of its LSTM, in sampled updates.
            sampled: keep the distributions, of which equations are checked in sampled updates.
        """
        observations = event.observations
        travels = observations is not None and observations.numel() <= MAX_OBSERVATION_ENTRIES
        context = RolloutContext(
            previous_choices={
                head: choices.to(event.actions[head].device)
                for head, choices in self._choices.items()
                if head in event.actions
            },
            mean_actions={
                head: self._means.get(head)
                for head in dict.fromkeys((*event.means, *event.log_std))
                if head in event.actions
            },
            memory=self._memory(event, layers),
            normalizers={name: self._normalizer(name, scale, event.valid) for name, scale in event.scales.items()},
            constant=None if observations is None or travels else constant_rows(observations, valid=event.valid),
            window=None if observations is None or travels else observation_window(observations),
        )
        if sampled:
            context = context._replace(previous_targets=self._targets)
        # the targets of the first environment [6, T], so that a sampled update can tell whether advantages are stale
        valid = torch.ones_like(event.ended[:, 0]) if event.valid is None else event.valid[:, 0]
        columns = [valid if name == "valid" else getattr(event, name)[:, 0] for name in TARGET_COLUMNS]
        self._targets = torch.stack([column.to(event.rewards.dtype) for column in columns])
        counted = {head: rows_that_count(event.valid, event.relevance.get(head)) for head in event.actions}
        self._choices = {
            head: copied(ActionChoices(event.actions[head], counted[head]))
            for head in dict.fromkeys((*categorical, *event.action_masks))
            if head in event.actions
        }
        self._means = {head: mean_action(event.actions[head], valid=counted[head]) for head in context.mean_actions}
        small = observations if travels else None
        trimmed = replace(event, states=None, scales=NONE, observations=small)
        return trimmed if sampled else replace(trimmed, logits=NONE, means=NONE), context

    def _normalizer(self, name: str, scale: Scale, valid: Tensor | None) -> Normalizer:
        """Count the cut entries here, because the normalised entries do not travel."""
        history = self._scales.setdefault(name, deque(maxlen=DRIFT_UPDATES + 1))
        history.append((scale.mean.flatten().clone(), scale.std.flatten().clone()))
        cut, entries = cut_entries(scale.normalized, scale.limit, valid=valid)
        previous = history[0] if len(history) > DRIFT_UPDATES else None
        return Normalizer(*history[-1], previous, cut, entries)

    def _memory(self, event: RolloutEnd, layers: tuple[Layer, ...]) -> RecurrentState | None:
        """Sum the states, which are a rollout's largest tensor, over units: their statistics need a sixteenth of them or less."""
        if event.states is None:
            return None
        size = state_size(event.states)
        ages = state_ages(size.empty, None if self._ages is None else self._ages.to(size.empty.device))
        self._ages = ages[-1] + 1
        return RecurrentState(size, ages, layers)


def layers_of(event: RecurrentForward) -> tuple[Layer, ...]:
    """Return copies of the memory's layers: the update changes the weights, the next rollout the rest."""
    parts = zip(event.cells, event.inputs, event.states, strict=True)
    return tuple(Layer(cell_weights(cell), x.clone(), *state.clone().unbind(1)) for cell, x, state in parts)


CRITIC_COLUMNS = ("values", "old_values", "returns", "means")
"""Columns of minibatches that only sampled updates and value clipping need: in every update they would double what travels."""

COLUMNS = tuple(name for name in MinibatchEnd._fields if name not in ("step", *CRITIC_COLUMNS))


class MinibatchBuffer:
    """Keeps some columns of minibatches as they come.

    Args:
        names: of the columns, which are fields of `MinibatchEnd`.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._columns_of: Callable[[MinibatchEnd], tuple[Any, ...]] = attrgetter(*names)
        self._rows: list[tuple[Any, ...]] = []

    def add(self, event: MinibatchEnd) -> None:
        """Keep the next minibatch."""
        self._rows.append(self._columns_of(event))

    def take(self) -> dict[str, tuple[Any, ...]]:
        """Return each column of all minibatches since the last call, one entry per minibatch; empty where there are none."""
        rows, self._rows = self._rows, []
        return dict(zip(self._names, zip(*rows, strict=True), strict=False))


def joined_minibatches(buffer: MinibatchBuffer) -> MinibatchesEnd | None:
    """Return the rows of all minibatches in a buffer of `COLUMNS`, one minibatch after the other; None where there are none."""
    columns = buffer.take()
    if not columns:
        return None
    counts = tuple(map(len, columns["log_ratio"]))
    spreads = zip(columns["log_std"], counts, strict=True)
    flags = zip(columns["valid"], counts, strict=True)
    example = next((valid for valid in columns["valid"] if valid is not None), None)
    ratios = columns["head_log_ratios"]
    losses = _by_name(columns["losses"], torch.stack)
    return MinibatchesEnd(
        epochs=columns["epoch"],
        counts=counts,
        log_ratio=torch.cat(columns["log_ratio"]),
        advantages=torch.cat(columns["advantages"]),
        valid=None
        if example is None
        else torch.cat([example.new_ones(count) if valid is None else valid for valid, count in flags]),
        losses={name: column for name, column in losses.items() if len(column) == len(counts)},
        logits=_heads(columns["logits"]),
        action_masks=_heads(columns["action_masks"]),
        log_std=_heads([{head: std.expand(count, -1) for head, std in spread.items()} for spread, count in spreads]),
        head_log_ratios=_heads(ratios) if len(ratios[0]) > 1 else {},
        relevance=_heads(columns["relevance"]),
        rows=_whole(columns["rows"]),
    )


def with_critic(minibatches: MinibatchesEnd, buffer: MinibatchBuffer) -> MinibatchesEnd:
    """Return the same with `CRITIC_COLUMNS`, its own or those of a buffer; without them where one of a minibatch is missing."""
    columns = buffer.take()
    if columns:
        values, old_values, returns = (_whole(columns[name]) for name in CRITIC_COLUMNS[:3])
        means = columns["means"]
        minibatches = minibatches._replace(
            values=values,
            old_values=old_values,
            returns=returns,
            means=_heads(means),
        )
    if minibatches.values is None or minibatches.old_values is None or minibatches.returns is None:
        return without_critic(minibatches)
    return minibatches


def without_critic(minibatches: MinibatchesEnd) -> MinibatchesEnd:
    """Return the same without `CRITIC_COLUMNS`."""
    return minibatches._replace(values=None, old_values=None, returns=None, means=NONE)


def collected_rows(rollout: RolloutEnd, rows: Tensor) -> CollectedRows:
    """Return the columns of the rollout in these rows [R]."""
    return CollectedRows(
        advantages=rollout.advantages.flatten()[rows],
        actions={head: rollout.actions[head].flatten()[rows] for head in rollout.logits if head in rollout.actions},
        logits={head: logits.flatten(0, 1)[rows] for head, logits in rollout.logits.items()},
        means={head: means.flatten(0, 1)[rows] for head, means in rollout.means.items()},
        log_std={
            head: std.expand(len(rows), -1) if std.dim() == 1 else std.flatten(0, 1)[rows]
            for head, std in rollout.log_std.items()
        },
    )


def _whole(columns: Sequence[Tensor | None]) -> Tensor | None:
    """A column of all minibatches, [R]; None where one lacks it."""
    present = [column for column in columns if column is not None]
    return torch.cat(present) if len(present) == len(columns) else None


def _by_name(
    columns: Sequence[Mapping[str, Tensor]], join: Callable[[list[Tensor]], Tensor] = torch.cat
) -> dict[str, Tensor]:
    """Each column by its name, of all minibatches that have it."""
    names = dict.fromkeys(chain.from_iterable(columns))
    return {name: join([column[name] for column in columns if name in column]) for name in names}


def _heads(columns: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The columns of each head that all minibatches have."""
    whole = set(columns[0]).intersection(*columns)
    return _by_name([{name: column for name, column in part.items() if name in whole} for part in columns])


class TrunkGradients(NamedTuple):
    """Gradients [N, F] of the actor's and of the critic's loss at the trunk output that both use."""

    actor: Tensor
    critic: Tensor


def joined_backwards(backwards: Sequence[BackwardEnd]) -> BackwardsEnd:
    """Return all passes, at least one, of a source that emits each alone."""
    epochs, _, _, names, norms, _, heads, applied = zip(*backwards, strict=True)
    return BackwardsEnd(epochs, names, norms, backwards[-1].parameters, backwards[-1].max_norm, heads, applied)


def stacked_backwards(backwards: BackwardsEnd, trunk: Sequence[TrunkGradients]) -> tuple[BackwardGradients, ...]:
    """Return all passes, those with gradients in the same parameters together: a frozen part of the network makes another group."""
    groups = [names for names in dict.fromkeys(backwards.names) if names]
    whole = len(set(backwards.names)) == 1 and len(trunk) == len(backwards.epochs) > 0
    leaves = leaf_gradients([part.actor for part in trunk], [part.critic for part in trunk]) if whole else None
    return tuple([_stacked(backwards, names)._replace(leaves=leaves) for names in groups])


def _stacked(backwards: BackwardsEnd, names: tuple[str, ...]) -> BackwardGradients:
    """The passes with gradients in the parameters of these names."""
    passes = [index for index, own in enumerate(backwards.names) if own == names]

    def of_passes(columns: Sequence[Tensor | None]) -> Tensor | None:
        """One row of each pass; None where a pass has none."""
        present = [row for index in passes if columns and (row := columns[index]) is not None]
        return torch.stack(present) if present and len(present) == len(passes) else None

    return BackwardGradients(
        epochs=tuple([backwards.epochs[index] for index in passes]),
        names=names,
        numels=tuple([backwards.parameters[name].numel() for name in names]),
        norms=torch.stack([backwards.norms[index] for index in passes]),
        max_norm=backwards.max_norm,
        heads=of_passes(backwards.heads),
        applied=of_passes(backwards.applied),
    )
