"""Rollouts as snapshots keep them, and what one rollout must know of the one before.

The minibatches of an update, joined.

More columns of an update's minibatches, where anyone looks at them.

Networks that grow in the environments: their steps, joined.

The backward passes of an update, stacked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from esper_telemetry.events import (
    BackwardEnd,
    BackwardsEnd,
    GrowthStep,
    MinibatchEnd,
    MinibatchesEnd,
    RecurrentForward,
    RolloutEnd,
    Scale,
)
from esper_telemetry.metrics.actions import ActionTotal, mean_action
from esper_telemetry.metrics.gradients.interference import leaf_gradients
from esper_telemetry.metrics.lstm.gates import lstm_weights
from esper_telemetry.metrics.lstm.states import state_ages, state_size
from esper_telemetry.metrics.rollout import constant_rows, cut_entries
from esper_telemetry.updates.data import (
    ActionChoices,
    Actions,
    BackwardGradients,
    Details,
    Growth,
    Layer,
    LeafGradients,
    Normalizer,
    RecurrentState,
    RolloutData,
    SampledActions,
    copied,
)

DRIFT_OVER = 10
"""Updates over which the drift of a normaliser is measured."""

MOST_OBSERVED = 1 << 15
"""Entries of a rollout's observations up to which they are kept: then to copy them costs less than to look at them."""


class Rollouts:
    """Takes rollouts one after the other.

    Whether memory began anew is read off the states themselves, which are zero there: a trainer that forgets to reset them
    shows as one that never does.
    """

    def __init__(self) -> None:
        self._chosen: Mapping[str, ActionChoices] = {}
        self._means: Mapping[str, ActionTotal] = {}
        self._ages: Tensor | None = None
        self._scales: dict[str, deque[tuple[Tensor, Tensor]]] = {}

    def state_dict(self) -> dict[str, Any]:
        """What the next rollout is compared with."""
        return {
            "chosen": {head: tuple(choices) for head, choices in self._chosen.items()},
            "means": {head: tuple(total) for head, total in self._means.items()},
            "ages": self._ages,
            "scales": {name: list(history) for name, history in self._scales.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a saved state."""
        self._chosen = {head: ActionChoices(*choices) for head, choices in state["chosen"].items()}
        self._ages = state["ages"]
        self._means = {head: ActionTotal(*total) for head, total in state["means"].items()}
        self._scales = {name: deque(history, DRIFT_OVER + 1) for name, history in state["scales"].items()}

    def take(self, event: RolloutEnd, *, sizes: Mapping[str, int], layers: tuple[Layer, ...]) -> RolloutData:
        """The next rollout. It is the trainer's, which may collect the one after it in the same memory: what outlives it is copied.

        Args:
            event: tells of it.
            sizes: number of actions of each categorical head.
            layers: of its LSTM, as far as they are looked at.
        """
        chosen = {
            head: ActionChoices(actions, _counted(event.valid, event.relevance.get(head)))
            for head, actions in event.actions.items()
        }
        return RolloutData(
            rewards=event.rewards,
            values=event.values,
            advantages=event.advantages,
            returns=event.returns,
            log_probs=event.log_probs,
            next_values=event.next_values,
            ended=event.ended,
            terminated=event.terminated,
            gamma=event.gamma,
            valid=event.valid,
            raw_rewards=event.raw_rewards,
            actions=self._actions(event, sizes, chosen),
            memory=self._memory(event, layers),
            normalizers={name: self._normalizer(name, scale, event.valid) for name, scale in event.scales.items()},
            acted=event.actions,
            head_log_probs=event.head_log_probs,
            **_observed(event),
        )

    def _actions(self, event: RolloutEnd, sizes: Mapping[str, int], acted: Mapping[str, ActionChoices]) -> Actions:
        chosen = {head: acted[head] for head in {**sizes, **event.action_masks}}
        previous, self._chosen = self._chosen, {head: copied(choices) for head, choices in chosen.items()}
        return Actions(
            sizes=sizes,
            chosen=chosen,
            previous={head: _beside(choices, chosen[head]) for head, choices in previous.items() if head in chosen},
            action_masks=event.action_masks,
            continuous=self._continuous(event, acted),
        )

    def _normalizer(self, name: str, scale: Scale, valid: Tensor | None) -> Normalizer:
        """Counts what was cut here, because the entries of observations travel nowhere."""
        history = self._scales.setdefault(name, deque(maxlen=DRIFT_OVER + 1))
        history.append((scale.mean.flatten().clone(), scale.std.flatten().clone()))
        cut, entries = cut_entries(scale.normalized, scale.limit, valid=valid)
        previous = history[0] if len(history) > DRIFT_OVER else None
        return Normalizer(*history[-1], previous, cut, entries)

    def _continuous(self, event: RolloutEnd, acted: Mapping[str, ActionChoices]) -> dict[str, SampledActions]:
        found = {head: _drawn(event, head, acted[head], self._means.get(head)) for head in event.means}
        self._means = {head: mean_action(drawn.actions, valid=drawn.counted) for head, drawn in found.items()}
        return found

    def _memory(self, event: RolloutEnd, layers: tuple[Layer, ...]) -> RecurrentState | None:
        if event.states is None:
            return None
        size = state_size(event.states)
        earlier = None if self._ages is None else self._ages.to(size.empty.device)
        ages = state_ages(size.empty, earlier)
        self._ages = ages[-1] + 1
        return RecurrentState(size, ages, layers)


def _observed(event: RolloutEnd) -> dict[str, Tensor]:
    """The observations, or of many what is asked of them."""
    observations = event.observations
    if observations is None:
        return {}
    if observations.numel() <= MOST_OBSERVED:
        return {"observations": observations}
    return {"constant": constant_rows(observations, valid=event.valid)}


def _beside(choices: ActionChoices, others: ActionChoices) -> ActionChoices:
    """The choices on the device of the others: a checkpoint may bring them back on another."""
    device = others.actions.device
    return ActionChoices(choices.actions.to(device), None if choices.counted is None else choices.counted.to(device))


def _drawn(event: RolloutEnd, head: str, acted: ActionChoices, previous: ActionTotal | None) -> SampledActions:
    """What a Gaussian head drew."""
    log_std = event.log_std.get(head)
    return SampledActions(
        actions=acted.actions,
        std=None if log_std is None else log_std.exp(),
        bounds=event.bounds.get(head),
        counted=acted.counted,
        previous=previous,
    )


def _counted(valid: Tensor | None, relevant: Tensor | None) -> Tensor | None:
    """Where a head mattered, [T, B]; None where it always did."""
    if relevant is None:
        return valid
    return relevant if valid is None else valid & relevant


def layers_of(event: RecurrentForward) -> tuple[Layer, ...]:
    """Copies: the update changes the weights, the next rollout the rest."""
    parts = zip(event.cells, event.inputs, event.states, strict=True)
    return tuple(Layer(lstm_weights(cell), x.clone(), *state.clone().unbind(1)) for cell, x, state in parts)


Named: TypeAlias = Mapping[str, Tensor]


class MinibatchColumns(NamedTuple):
    """What is kept of minibatches: these fields of `MinibatchEnd`, of one minibatch after the other."""

    epoch: tuple[int, ...]
    valid: tuple[Tensor | None, ...]
    log_ratio: tuple[Tensor, ...]
    advantages: tuple[Tensor, ...]
    rows: tuple[Tensor | None, ...]
    losses: tuple[Named, ...]
    logits: tuple[Named, ...]
    action_masks: tuple[Named, ...]
    log_std: tuple[Named, ...]
    head_log_ratios: tuple[Named, ...]
    relevance: tuple[Named, ...]


kept_of: Callable[[MinibatchEnd], tuple[Any, ...]] = attrgetter(*MinibatchColumns._fields)


class Joining:
    """Takes minibatches as they come, of sources that do not join them, and gives them back as one.

    Only what is measured is kept alive. To keep whole events would scatter the memory that the trainer uses again for every minibatch,
    which costs it more than all the rest here. Nothing else is done before the update is over: between two minibatches this code has
    left the processor's caches, and takes five times as long as it does sixteen times in a row.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[Any, ...]] = []

    def add(self, event: MinibatchEnd) -> None:
        """The next minibatch."""
        self._kept.append(kept_of(event))

    def take(self) -> MinibatchesEnd | None:
        """The rows of all minibatches, one after the other; None where there are none."""
        if not self._kept:
            return None
        kept, self._kept = MinibatchColumns(*zip(*self._kept, strict=True)), []
        counts = tuple(map(len, kept.log_ratio))
        return MinibatchesEnd(
            epochs=kept.epoch,
            counts=counts,
            log_ratio=torch.cat(kept.log_ratio),
            advantages=torch.cat(kept.advantages),
            valid=_valid(kept.valid, counts),
            losses=_joined(kept.losses, torch.stack),
            logits=_joined(kept.logits),
            action_masks=_joined(kept.action_masks),
            log_std=_joined([_by_row(spread, count) for spread, count in zip(kept.log_std, counts, strict=True)]),
            head_log_ratios=_joined(kept.head_log_ratios) if len(kept.head_log_ratios[0]) > 1 else {},
            relevance=_joined(kept.relevance),
            rows=_rows(kept.rows),
        )


def _valid(valid: Sequence[Tensor | None], counts: Sequence[int]) -> Tensor | None:
    """Which rows count, [R]; None where all do."""
    known = next((flags for flags in valid if flags is not None), None)
    if known is None:
        return None
    parts = zip(valid, counts, strict=True)
    return torch.cat([known.new_ones(count) if flags is None else flags for flags, count in parts])


def _rows(rows: Sequence[Tensor | None]) -> Tensor | None:
    """Which transitions the rows are, [R]; None where a minibatch does not say."""
    known = [numbers for numbers in rows if numbers is not None]
    return torch.cat(known) if len(known) == len(rows) else None


def _joined(columns: Sequence[Named], join: Callable[[list[Tensor]], Tensor] = torch.cat) -> dict[str, Tensor]:
    """Each column by its name, of all minibatches that have it."""
    names = dict.fromkeys(chain.from_iterable(columns))
    return {name: join([column[name] for column in columns if name in column]) for name in names}


def _by_row(log_std: Named, count: int) -> Named:
    """Per head [count, D], whether or not it depends on the state."""
    return {head: spread.expand(count, -1) for head, spread in log_std.items()}


class DetailJoining:
    """Takes minibatches as they come and gives back what `Joining` does not keep of them."""

    def __init__(self) -> None:
        self._events: list[MinibatchEnd | MinibatchesEnd] = []

    def add(self, event: MinibatchEnd) -> None:
        """The next minibatch."""
        self._events.append(event)

    def add_all(self, event: MinibatchesEnd) -> None:
        """All of them, from a source that tells of none alone."""
        if event.values is not None:
            self._events.append(event)

    def take(self, rollout: RolloutEnd | None) -> Details | None:
        """All minibatches, with what the rollout knows of their rows where they say which they are; None where a column is missing."""
        events, self._events = self._events, []
        critic = [
            _details_joined([getattr(event, name) for event in events]) for name in ("values", "old_values", "returns")
        ]
        values, old_values, returns = critic
        if values is None or old_values is None or returns is None:
            return None
        known = Details(
            values=values,
            old_values=old_values,
            returns=returns,
            means={head: torch.cat([event.means[head] for event in events]) for head in events[0].means},
        )
        rows = [event.rows for event in events if event.rows is not None]
        if rollout is None or len(rows) < len(events):
            return known
        return with_rollout(known, rollout, torch.cat(rows))


def _details_joined(columns: Sequence[Tensor | None]) -> Tensor | None:
    """[R]; None where there are no minibatches, or one lacks it."""
    known = [column for column in columns if column is not None]
    return torch.cat(known) if known and len(known) == len(columns) else None


def with_rollout(known: Details, rollout: RolloutEnd, rows: Tensor) -> Details:
    """The same with what was acted on in these rows [R] of the rollout."""
    return known._replace(
        raw_advantages=rollout.advantages.flatten()[rows],
        actions={head: rollout.actions[head].flatten()[rows] for head in rollout.logits},
        old_logits={head: logits.flatten(0, 1)[rows] for head, logits in rollout.logits.items()},
        old_means={head: means.flatten(0, 1)[rows] for head, means in rollout.means.items()},
        old_log_std={head: _of_rows(std, rows) for head, std in rollout.log_std.items()},
    )


def _of_rows(log_std: Tensor, rows: Tensor) -> Tensor:
    """[R, D] of [T, B, D], or of [D] where it does not depend on the state."""
    return log_std.expand(len(rows), -1) if log_std.dim() == 1 else log_std.flatten(0, 1)[rows]


def joined_growth(steps: Sequence[GrowthStep]) -> Growth | None:
    """All steps of an update; None where nothing grows."""
    if not steps:
        return None
    return Growth(
        hosts=_stacked([step.hosts for step in steps]),
        seeds=_stacked([step.seeds for step in steps]),
        rewards=_stacked([step.rewards for step in steps]),
        gates=_stacked([step.gates for step in steps]),
        last=tuple([step.last for step in steps]),
        horizon=steps[0].horizon,
        labels=steps[0].labels,
    )


def _stacked(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([part[name] for part in parts]) for name in parts[0]}


class TensorLeaf(NamedTuple):
    """Gradients [N, F] of the actor's and of the critic's loss at the trunk output that both use."""

    actor: Tensor
    critic: Tensor


def joined_gradients(backwards: Sequence[BackwardEnd]) -> BackwardsEnd:
    """All passes of a source that tells of each alone; at least one."""
    epochs, _, _, names, norms, _, heads = zip(*backwards, strict=True)
    return BackwardsEnd(epochs, names, norms, backwards[-1].parameters, backwards[-1].max_norm, heads)


def gradient_parts(backwards: BackwardsEnd, leaves: Sequence[TensorLeaf]) -> tuple[BackwardGradients, ...]:
    """All passes, those with gradients in the same parameters together: a frozen part of the network makes another one."""
    kinds = dict.fromkeys(backwards.names)
    whole = len(kinds) == 1 and len(leaves) == len(backwards.epochs)
    return tuple([_gradients_stacked(backwards, names, leaves if whole else ()) for names in kinds if names])


def _gradients_stacked(
    backwards: BackwardsEnd, names: tuple[str, ...], leaves: Sequence[TensorLeaf]
) -> BackwardGradients:
    """Those that have gradients in the parameters of these names."""
    places = [place for place, found in enumerate(backwards.names) if found == names]
    return BackwardGradients(
        epochs=tuple([backwards.epochs[place] for place in places]),
        names=names,
        numels=tuple([backwards.parameters[name].numel() for name in names]),
        norms=torch.stack([backwards.norms[place] for place in places]),
        max_norm=backwards.max_norm,
        leaves=_leaves(leaves) if leaves else None,
        heads=_heads([backwards.heads[place] for place in places]) if backwards.heads else None,
    )


def _heads(norms: Sequence[Tensor | None]) -> Tensor | None:
    """[M, H]; None where a pass does not say."""
    known = [own for own in norms if own is not None]
    return torch.stack(known) if known and len(known) == len(norms) else None


def _leaves(leaves: Sequence[TensorLeaf]) -> LeafGradients:
    found = leaf_gradients([leaf.actor for leaf in leaves], [leaf.critic for leaf in leaves])
    return LeafGradients(found.actor, found.critic, found.dots)
