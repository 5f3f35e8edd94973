"""Outputs of the policy for the rollout of an update, before and after it, for hooks that ask.

Training is not altered: gradients come from `torch.autograd.grad`, which does not change `.grad`, and random numbers are not used.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from esper_telemetry.core.event_parts import Activations, CollectionReplay, Copy, Outputs, StateGradients
from esper_telemetry.core.tensors import allow_recurrent_gradients, are_rescaled
from esper_telemetry.events import RolloutEnd
from esper_telemetry.ppo.emit import describe
from esper_telemetry.ppo.networks import MLP, RecurrentTrunk
from esper_telemetry.ppo.policy import ActorCritic, Tensors, Trunk
from esper_telemetry.ppo.rollout import Batch, Rollout, columns, flatten, index_on

Flags = npt.NDArray[np.bool_]
Loss: TypeAlias = Callable[[Batch, Tensor], Tensor]

SAMPLE_ROWS = 512
"""Number of transitions from which the responses of layers are measured (Moalla 2024)."""


def unroll(trunk: RecurrentTrunk, observations: Tensor, state: Tensor, fresh: Flags) -> tuple[Tensor, Tensor]:
    """Return features [T x b, F] of observations [T, b, ...], and the h [T, b, H] after every step that they are computed from.

    Memory is reset at `fresh` [T, b]. The gradient at an h comes only from its own step's features; after the last step that is all.
    """
    inputs = trunk.encoder(observations.flatten(0, 1)).unflatten(0, observations.shape[:2])
    begins = [0, *np.flatnonzero(fresh[1:].any(1)) + 1]  # one call of the core from each step with a reset to the next
    parts = []
    for first, after in itertools.pairwise([*begins, len(inputs)]):
        without_memory = torch.from_numpy(fresh[first]).to(inputs.device)
        part, state = trunk.core(inputs[first:after], state.masked_fill(without_memory[:, None], 0.0))
        parts.append(part)
    outputs = torch.cat(parts)
    return trunk.decoder(outputs.flatten(0, 1)), outputs


class TrainerReplay:
    """A `PolicyReplay` of the bundled trainer.

    Args:
        policy: the policy, with its present weights whenever a method is called.
        rollout: the rollout as the update sees it.
        batch: all transitions of the rollout, with the advantages that multiply the ratio.
        returns: [T, B].
        acted: the rollout as it was collected.
        loss: 0-d loss of a batch and the outputs [N, F] of the actor's trunk.
        envs: number of environments of one minibatch.
    """

    def __init__(
        self, policy: ActorCritic, rollout: Rollout, batch: Batch, returns: Tensor, *, acted: Rollout, loss: Loss, envs: int
    ) -> None:
        self._policy, self._rollout, self._batch, self._returns = policy, rollout, batch, returns
        self._acted, self._loss, self._envs = acted, loss, envs

    def stored(self) -> Outputs:
        """See `PolicyReplay`."""
        return self._stored(self._rows)

    @torch.no_grad()
    def outputs(self) -> Outputs:
        """See `PolicyReplay`."""
        features, memory = self._forward()
        return self._outputs(self._policy.scores(features), self._rows, memory)._replace(features=features)

    def stored_part(self) -> Outputs:
        """See `PolicyReplay`."""
        return self._stored(self._sample)

    def _stored(self, rows: Tensor) -> Outputs:
        return self._outputs(_select_rows(self._acted.scores, rows), rows, self._memory(rows), self._acted)

    @torch.no_grad()
    def without_memory(self) -> Outputs | None:
        """See `PolicyReplay`."""
        trunk = self._policy.actor
        if not isinstance(trunk, RecurrentTrunk):
            return None
        with self._policy.autocast():
            features = memoryless_features(trunk, self._observations).float()
        return self._outputs(self._policy.scores(features), self._sample, None)

    @torch.no_grad()
    def activations(self) -> Activations:
        """See `PolicyReplay`."""
        trunk = self._policy.actor
        if not isinstance(trunk, RecurrentTrunk):
            return responses({"trunk": trunk}, self._observations)
        encoder = responses({"encoder": trunk.encoder}, self._observations)
        memory = self._memory(self._sample)
        assert memory is not None
        decoder = responses({"decoder": trunk.decoder}, memory)
        return Activations({**encoder.layers, "core": memory, **decoder.layers}, decoder.last)

    def state_gradients(self) -> StateGradients | None:
        """See `PolicyReplay`; of the first environments with memory, as many as a minibatch has. None if all begin without memory."""
        trunk, rollout, memory = self._policy.actor, self._rollout, self._rollout.recurrence
        if not isinstance(trunk, RecurrentTrunk) or memory is None:
            return None
        with_memory = np.flatnonzero(~memory.fresh[0])[: self._envs]
        if not len(with_memory):
            return None
        empty = torch.zeros_like(self._returns)  # rows that are not transitions have an advantage of 0
        advantages = empty.flatten().index_copy(0, self._rows, self._batch.advantages).view_as(empty)
        device = rollout.rewards.device
        envs = index_on(with_memory, device)
        first = memory.states["actor"][:, :, envs].detach().requires_grad_()
        with self._policy.autocast():
            features, outputs = unroll(trunk, rollout.observations[:, envs], first, memory.fresh[:, with_memory])
        features = features.float()
        batch = columns(rollout, advantages, self._returns).map(lambda column: column[:, envs].flatten(0, 1))
        if memory.valid is not None:
            rows = index_on(np.flatnonzero(memory.valid[:, with_memory]), device)
            batch, features = batch.map(lambda column: column[rows]), features[rows]
        at_first, at_outputs = torch.autograd.grad(self._loss(batch, features), [first, outputs], materialize_grads=True)
        return StateGradients(at_first[:, 0], at_outputs[-1])

    def copy(self) -> Copy:
        """See `PolicyReplay`."""
        trunk = copy.deepcopy(self._policy.actor)
        allow_recurrent_gradients(trunk)
        network = (lambda rows: memoryless_features(trunk, rows)) if isinstance(trunk, RecurrentTrunk) else trunk
        return Copy(network, [p for p in trunk.parameters() if p.requires_grad], self._observations)

    def collection(self, event: RolloutEnd) -> CollectionReplay:
        """Return passes over the inputs that the rollout of that event acted on."""
        return CollectionReplay(event.values, event.actions, self._rows, self._collected)

    @torch.no_grad()
    def _collected(self, hypothesis: str) -> Outputs | None:
        """Outputs now, with values, for the stored inputs or the inputs of a hypothesis of `equations.replayed_outputs`."""
        policy, recurrence = self._policy, self._rollout.recurrence
        if hypothesis == "mask_missing" != self._other_inputs:
            masked = dict(self._rollout.action_masks)
            unmasked = replace(self._rollout, action_masks={})
            return self._outputs(policy.scores(self._forward()[0]), self._rows, None, unmasked) if masked else None
        if not hypothesis:
            features, memory = self._forward()
            outputs = self._outputs(policy.scores(features), self._rows, memory)
            critic = features if policy.critic is None else self._critic_features(policy.critic)
            return outputs._replace(features=features, values=policy.values(critic))
        if hypothesis == self._other_inputs:
            rollout = self._acted
            features, critic = self._unrolled(rollout)
        else:
            rollout = self._rollout
            changes = {} if recurrence is None else memory_changes(recurrence.fresh)
            if hypothesis not in changes:
                return None
            features, critic = self._unrolled(self._rollout, changes[hypothesis])
        outputs = self._outputs(policy.scores(features), self._rows, None, rollout)
        return outputs._replace(values=policy.values(critic))

    @cached_property
    def _other_inputs(self) -> str:
        """The hypothesis that describes how the update's inputs differ from the rollout's; empty without or with several differences."""
        rollout, acted = self._rollout, self._acted
        states, before = ({} if one.recurrence is None else one.recurrence.states for one in (rollout, acted))
        other_memory = any(state is not before[name] and not state.equal(before[name]) for name, state in states.items())
        if rollout.observations is not acted.observations and not rollout.observations.equal(acted.observations):
            scaled = are_rescaled(rollout.observations.flatten(0, 1), acted.observations.flatten(0, 1))
            return "" if other_memory else "other_statistics" if scaled else "other_observations"
        if rollout.action_masks is not acted.action_masks and not other_memory:
            return "mask_missing"
        if not other_memory:
            return ""
        return "other_memory" if any(state.any() for state in states.values()) else "memory_zero"

    def _critic_features(self, trunk: Trunk) -> Tensor:
        grid = self._batch.grid()
        with self._policy.autocast():
            if grid is None or not isinstance(trunk, RecurrentTrunk):
                features: Tensor = trunk(self._batch.observations)
            else:
                features = trunk(self._batch.observations, grid, grid.states["critic"])
            return features.float()

    def _unrolled(self, rollout: Rollout, change: MemoryChange | None = None) -> tuple[Tensor, Tensor]:
        """The actor's and the critic's features [N, F] of the observations of a rollout, with its memory or a change of it."""
        features, memory = [], rollout.recurrence
        with self._policy.autocast():
            for name, trunk in self._policy.named_trunks().items():
                if isinstance(trunk, RecurrentTrunk):
                    assert memory is not None
                    first = memory.states[name]
                    first = torch.zeros_like(first) if change is not None and change.empty else first
                    fresh = memory.fresh if change is None else change.fresh
                    outputs, _ = unroll(trunk, rollout.observations, first, fresh)
                else:
                    outputs = trunk(rollout.observations.flatten(0, 1))
                features.append(outputs.float()[self._rows])
        return features[0], features[-1]

    @cached_property
    def _rows(self) -> Tensor:
        """Numbers of all transitions, [N]."""
        rows = flatten(self._rollout, self._returns, self._returns, numbered=True).rows
        assert rows is not None
        return rows

    @cached_property
    def _sample_places(self) -> Tensor:
        """Positions of some of them, evenly spread, [n]."""
        count = len(self._batch)
        return torch.linspace(0, count - 1, min(count, SAMPLE_ROWS), device=self._rows.device).round().long()

    @property
    def _sample(self) -> Tensor:
        """Numbers of some transitions, [n]."""
        return self._rows[self._sample_places]

    @property
    def _observations(self) -> Tensor:
        """Observations of some transitions, [n, ...]."""
        return self._batch.observations[self._sample_places]

    def _forward(self) -> tuple[Tensor, Tensor | None]:
        """The actor's features [N, F] of all transitions, and its core's outputs [N, H]."""
        batch, trunk = self._batch, self._policy.actor
        grid = batch.grid()
        with self._policy.autocast():
            if grid is None or not isinstance(trunk, RecurrentTrunk):
                return trunk(batch.observations).float(), None
            outputs, _ = trunk.core(grid.pad(trunk.encoder(batch.observations)), grid.states["actor"], grid.marks())
            memory = grid.gather(outputs)
            return trunk.decoder(memory).float(), memory.float()

    def _memory(self, rows: Tensor) -> Tensor | None:
        """Outputs of the core when the rollout was collected, [n, H]."""
        recurrence = self._rollout.recurrence
        return None if recurrence is None else recurrence.after[:, -1, 0].flatten(0, 1)[rows]

    def _outputs(self, scores: Mapping[str, Tensor], rows: Tensor, memory: Tensor | None, rollout: Rollout | None = None) -> Outputs:
        """Outputs under the masks and the relevance of a rollout, by default the update's."""
        rollout = self._rollout if rollout is None else rollout
        logits, log_std, means = describe(self._policy, scores, _select_rows(rollout.action_masks, rows))
        return Outputs(logits, means, log_std, _select_rows(rollout.relevance, rows), memory)


class MemoryChange(NamedTuple):
    """Resets of memory [T, B], and whether memory is empty at the start of the rollout, under a hypothesis."""

    fresh: Flags
    empty: bool = False


def memory_changes(fresh: Flags) -> dict[str, MemoryChange]:
    """Return the changes of each hypothesis about memory, for a rollout whose memory is reset at `fresh` [T, B]."""
    none = np.zeros_like(fresh[:1])
    return {
        "memory_zero": MemoryChange(fresh, empty=True),
        "memory_not_reset": MemoryChange(np.zeros_like(fresh)),
        "memory_empty": MemoryChange(np.ones_like(fresh)),
        "memory_reset_late": MemoryChange(np.concatenate([none, fresh[:-1]])),
        "memory_reset_early": MemoryChange(np.concatenate([fresh[1:], none])),
    }


def _select_rows(columns: Tensors, rows: Tensor) -> dict[str, Tensor]:
    return {name: column.flatten(0, 1)[rows] for name, column in columns.items()}


def memoryless_features(trunk: RecurrentTrunk, observations: Tensor) -> Tensor:
    """Features [n, F] of observations [n, ...], each as the first of an episode."""
    state = torch.zeros(trunk.core.state_shape(len(observations)), device=observations.device)
    return trunk.step(observations, state)[0]


def responses(networks: Mapping[str, torch.nn.Module], rows: Tensor) -> Activations:
    """Return the responses of the layers of networks in sequence to rows [n, ...], except networks that are not an MLP."""
    layers: dict[str, Tensor] = {}
    last = None
    for name, network in networks.items():
        if isinstance(network, MLP):
            for depth, (before, after) in enumerate(network.responses(rows)):
                layers[f"{name}_{depth}"], last = after, before
    return Activations(layers, last)
