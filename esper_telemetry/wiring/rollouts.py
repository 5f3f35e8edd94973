"""Rollouts as snapshots keep them, and what one rollout must know of the one before."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from esper_telemetry.events import RecurrentForward, RolloutEnd, Scale
from esper_telemetry.metrics.actions import ActionTotal, mean_action
from esper_telemetry.metrics.lstm import lstm_weights, state_ages, state_size
from esper_telemetry.metrics.normalizer import cut_entries
from esper_telemetry.metrics.observations import constant_rows
from esper_telemetry.summary import Actions, Choices, Drawn, Layer, Memory, Normalizer, Rollout, copied

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
        self._chosen: Mapping[str, Choices] = {}
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
        self._chosen = {head: Choices(*choices) for head, choices in state["chosen"].items()}
        self._ages = state["ages"]
        self._means = {head: ActionTotal(*total) for head, total in state["means"].items()}
        self._scales = {name: deque(history, DRIFT_OVER + 1) for name, history in state["scales"].items()}

    def take(self, event: RolloutEnd, *, sizes: Mapping[str, int], layers: tuple[Layer, ...]) -> Rollout:
        """The next rollout. It is the trainer's, which may collect the one after it in the same memory: what outlives it is copied.

        Args:
            event: tells of it.
            sizes: number of actions of each categorical head.
            layers: of its LSTM, as far as they are looked at.
        """
        chosen = {
            head: Choices(actions, _counted(event.valid, event.relevance.get(head)))
            for head, actions in event.actions.items()
        }
        return Rollout(
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

    def _actions(self, event: RolloutEnd, sizes: Mapping[str, int], acted: Mapping[str, Choices]) -> Actions:
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

    def _continuous(self, event: RolloutEnd, acted: Mapping[str, Choices]) -> dict[str, Drawn]:
        found = {head: _drawn(event, head, acted[head], self._means.get(head)) for head in event.means}
        self._means = {head: mean_action(drawn.actions, valid=drawn.counted) for head, drawn in found.items()}
        return found

    def _memory(self, event: RolloutEnd, layers: tuple[Layer, ...]) -> Memory | None:
        if event.states is None:
            return None
        size = state_size(event.states)
        earlier = None if self._ages is None else self._ages.to(size.empty.device)
        ages = state_ages(size.empty, earlier)
        self._ages = ages[-1] + 1
        return Memory(size, ages, layers)


def _observed(event: RolloutEnd) -> dict[str, Tensor]:
    """The observations, or of many what is asked of them."""
    observations = event.observations
    if observations is None:
        return {}
    if observations.numel() <= MOST_OBSERVED:
        return {"observations": observations}
    return {"constant": constant_rows(observations, valid=event.valid)}


def _beside(choices: Choices, others: Choices) -> Choices:
    """The choices on the device of the others: a checkpoint may bring them back on another."""
    device = others.actions.device
    return Choices(choices.actions.to(device), None if choices.counted is None else choices.counted.to(device))


def _drawn(event: RolloutEnd, head: str, acted: Choices, previous: ActionTotal | None) -> Drawn:
    """What a Gaussian head drew."""
    log_std = event.log_std.get(head)
    return Drawn(
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
