"""The rollout, shown to a policy of Stable-Baselines3 once more; see `replay.Replay`."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from esper_telemetry.adapters.sb3.activations import heard
from esper_telemetry.adapters.sb3.heads import Heads, drawn_from
from esper_telemetry.adapters.sb3.losses import LossRows, clip_of, policy_loss, used_advantages
from esper_telemetry.adapters.sb3.passes import (
    Latents,
    StoredPass,
    alone,
    distribution,
    features,
    feed_forward,
    recurrent,
    rows_of,
)
from esper_telemetry.adapters.sb3.untouched import untouched
from esper_telemetry.events import Activations, Copy, Outputs, RolloutEnd, StateGradients
from esper_telemetry.ppo.environments.protocol import Array

PART = 512
"""Transitions that are enough to tell how layers respond (Moalla 2024)."""

MOST_ENVS = 4
"""Environments through whose time gradients are taken."""


class CallbackReplay:
    """A `Replay` of a model of Stable-Baselines3.

    Args:
        model: its policy is asked as it is when a method is called.
        heads: of its actions.
        rollout: what was told of the rollout.
        kept: what the buffer held of it.
        after: states after each step [T, layers, 2, B, H]; None for a feed-forward policy.
    """

    def __init__(self, model: Any, heads: Heads, rollout: RolloutEnd, kept: StoredPass, after: Tensor | None) -> None:
        self._model, self._heads, self._rollout, self._kept, self._after = model, heads, rollout, kept, after

    def stored(self) -> Outputs:
        """See `Replay`."""
        return self._stored(self._rows)

    def stored_part(self) -> Outputs:
        """See `Replay`."""
        return self._stored(self._some)

    @torch.no_grad()
    def outputs(self) -> Outputs:
        """See `Replay`."""
        with untouched(self._policy):
            latents = self._latents()
            found = self._described(latents.actor, self._rows)
        return found._replace(memory=latents.memory, features=latents.actor)

    @torch.no_grad()
    def without_memory(self) -> Outputs | None:
        """See `Replay`."""
        if self._after is None:
            return None
        with untouched(self._policy):
            return self._described(alone(self._policy, self._observations), self._some)

    @torch.no_grad()
    def activations(self) -> Activations:
        """See `Replay`; layers of a recurrent policy respond to memory as it was stored."""
        policy = self._policy
        with untouched(policy), heard(policy) as found:
            given = features(policy, self._observations)
            memory = self._memory(self._some)
            policy.mlp_extractor.forward_actor(given if memory is None else memory)
        layers = found.layers if memory is None else {**found.layers, "core": memory}
        return Activations(layers, found.last)

    def state_gradients(self) -> StateGradients | None:
        """See `Replay`."""
        states = self._rollout.states
        if states is None or self._after is None:
            return None
        known = states[0].abs().amax((0, 1, 3)).nonzero().flatten()[:MOST_ENVS]
        if not len(known):
            return None
        with untouched(self._policy), torch.enable_grad():
            return self._through_time(known)

    def copy(self) -> Copy:
        """See `Replay`."""
        policy = copied_trunk(self._policy)
        parameters = {id(p): p for part in policy.children() for p in part.parameters() if p.requires_grad}
        return Copy(lambda rows: alone(policy, rows), list(parameters.values()), self._tensor_observations())

    @property
    def _policy(self) -> Any:
        return self._model.policy

    @cached_property
    def _rows(self) -> Array:
        """Numbers of all transitions, [N]."""
        return np.arange(self._kept.starts.size)

    @cached_property
    def _some(self) -> Array:
        """Numbers of some transitions, evenly spread, [n]."""
        count = len(self._rows)
        found: Array = np.linspace(0, count - 1, min(count, PART)).round().astype(np.int64)
        return found

    @property
    def _observations(self) -> Any:
        """Of some transitions."""
        return rows_of(self._kept, self._some, self._policy.device)

    def _tensor_observations(self) -> Tensor:
        found = self._observations
        if not isinstance(found, Tensor):
            raise TypeError("a copy of the network is trained on observations that are one array each")
        return found

    def _latents(self) -> Latents:
        states = self._rollout.states
        if states is None:
            return feed_forward(self._policy, self._kept, self._rows)
        return recurrent(self._policy, self._kept, states[0])

    def _described(self, latents: Tensor, rows: Array) -> Outputs:
        distribution(self._policy, latents, self._kept, rows)
        described = self._heads.describe(drawn_from(self._policy))
        return Outputs(described.logits, described.means, described.log_std, {}, None)

    def _stored(self, rows: Array) -> Outputs:
        at = torch.from_numpy(rows).to(self._policy.device)
        rollout = self._rollout
        logits, means, log_std = (_taken(columns, at) for columns in (rollout.logits, rollout.means, rollout.log_std))
        return Outputs(logits, means, log_std, {}, self._memory(rows))

    def _memory(self, rows: Array) -> Tensor | None:
        """What the LSTM gave when the rollout was collected, [n, H]."""
        if self._after is None:
            return None
        return self._after[:, -1, 0].flatten(0, 1)[torch.from_numpy(rows).to(self._after.device)]

    def _through_time(self, envs: Tensor) -> StateGradients:
        """Gradients of the actor's loss at h before the first step and after the last of these environments."""
        policy, rollout = self._policy, self._rollout
        assert rollout.states is not None
        part = self._of(envs.cpu().numpy())
        first = rollout.states[0][:, 0, envs].clone().requires_grad_()
        memory = rollout.states[0][:, 1, envs].contiguous()
        starts = torch.as_tensor(part.starts, dtype=torch.float32, device=policy.device)
        count = len(envs)
        rows = np.arange(part.starts.size)
        known = features(policy, rows_of(part, rows, policy.device)).unflatten(0, (-1, count))
        outputs, state = [], (first, memory)
        for given, begins in zip(known, starts, strict=True):
            _, state = policy._process_sequence(given, state, begins, policy.lstm_actor)
            outputs.append(state[0][-1])  # and not the output beside it: so its gradient holds that of its own step
        loss = self._loss(policy.mlp_extractor.forward_actor(torch.cat(outputs)), part, envs)
        gradients = torch.autograd.grad(loss, [first, state[0]], materialize_grads=True)
        return StateGradients(gradients[0], gradients[1][-1])

    def _of(self, envs: Array) -> StoredPass:
        """The rollout in these environments."""
        kept = self._kept
        observations = (
            {name: part[:, envs] for name, part in kept.observations.items()}
            if isinstance(kept.observations, dict)
            else kept.observations[:, envs]
        )
        masks = None if kept.masks is None else kept.masks[:, envs]
        return StoredPass(observations, kept.actions[:, envs], kept.starts[:, envs], masks)

    def _loss(self, latents: Tensor, part: StoredPass, envs: Tensor) -> Tensor:
        """The actor's loss of these environments, 0-d."""
        model, rollout = self._model, self._rollout
        found = distribution(model.policy, latents, part, np.arange(part.starts.size))
        actions = torch.as_tensor(part.actions, device=latents.device).flatten(0, 1)
        discrete = list(self._heads.kinds.values()) == ["categorical"]
        log_probs = found.log_prob(actions.long().flatten() if discrete else actions)
        entropy = found.entropy()
        advantages = used_advantages(model, rollout.advantages.flatten(), None).view_as(rollout.advantages)
        old, empty = rollout.log_probs[:, envs].flatten(), torch.zeros_like(log_probs)
        used, bonus = advantages[:, envs].flatten(), -log_probs if entropy is None else entropy
        rows = LossRows(log_probs - old, log_probs, used, empty, empty, empty, bonus)
        loss: Tensor = policy_loss(rows, clip_of(model)).mean() - model.ent_coef * bonus.mean()
        return loss


def _taken(columns: Mapping[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
    return {name: column.flatten(0, 1)[rows] for name, column in columns.items()}


def copied_trunk(policy: Any) -> Any:
    """The policy with copies of the networks between observations and the actor's latents, and no others."""
    names = ("features_extractor", "pi_features_extractor", "mlp_extractor", "lstm_actor")
    parts = {name: getattr(policy, name) for name in names if hasattr(policy, name)}
    found = copy.copy(policy)
    vars(found)["_modules"] = copy.deepcopy(parts)
    return found
