"""The rollout, passed through a Stable-Baselines3 policy once more; see `events.PolicyReplay`.

Shapes: T steps, B environments, N = T B transitions counted time by time, H width of a recurrent state, F width of latents.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from stable_baselines3.common.utils import obs_as_tensor
from torch import Tensor, nn

from esper_telemetry.adapters.columns import Array, LossColumns, policy_loss
from esper_telemetry.adapters.sb3.distributions import ActionHeads, last_distribution
from esper_telemetry.adapters.sb3.gradients import advantages_as_used, clip_of
from esper_telemetry.adapters.taps import listen, without_trace
from esper_telemetry.core.event_parts import Activations, Copy, Outputs, StateGradients
from esper_telemetry.core.tensors import allow_recurrent_gradients
from esper_telemetry.events import RolloutEnd
from esper_telemetry.updates.pickles import policy_copy

CHUNK_ROWS = 1024
"""Rows of a feed-forward pass at once."""

PART_ROWS = 512
"""Transitions that are enough to say how layers respond (Moalla 2024)."""

MAX_GRADIENT_ENVS = 4
"""Environments through whose time gradients are taken."""

ACTOR_PARTS = ("features_extractor", "pi_features_extractor", "mlp_extractor", "lstm_actor")
"""Networks between observations and the actor's latents."""

NONLINEAR = (nn.ReLU, nn.Tanh, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Mish, nn.Softplus)

Observations: TypeAlias = "Tensor | dict[str, Tensor]"


class StoredRollout(NamedTuple):
    """Inputs of a rollout from the buffer, before its rows are put in another order.

    Attributes:
        observations: [T, B, ...], or several by name.
        actions: [T, B, D].
        starts: [T, B], 1 where a step began an episode.
        masks: of actions, [T, B, A]; None without any.
    """

    observations: Any
    actions: Array
    starts: Array
    masks: Array | None

    def rows(self, rows: Array, device: torch.device) -> Observations:
        """Observations [n, ...] of these transitions."""
        observations: Observations = obs_as_tensor(_each(self.observations, lambda part: _flat(part)[rows]), device)
        return observations

    def envs(self, envs: Array) -> StoredRollout:
        """The rollout in these environments."""
        observations = _each(self.observations, lambda part: part[:, envs])
        masks = None if self.masks is None else self.masks[:, envs]
        return StoredRollout(observations, self.actions[:, envs], self.starts[:, envs], masks)


def stored_rollout(buffer: Any) -> StoredRollout:
    """Return the inputs in a full buffer from which no minibatch has been taken yet."""
    observations = dict(buffer.observations) if isinstance(buffer.observations, dict) else buffer.observations
    return StoredRollout(observations, buffer.actions, buffer.episode_starts, getattr(buffer, "action_masks", None))


class LossSettings(NamedTuple):
    """Settings of the actor's loss in an update.

    Attributes:
        advantages: [T, B] as they multiply the ratio.
        clip: range of the ratio; None without one.
        entropy_coef: weight of the entropy.
    """

    advantages: Tensor
    clip: float | None
    entropy_coef: float


class CallbackReplay:
    """A `PolicyReplay` of a model of Stable-Baselines3; its passes write to the policy, so that they are for copies.

    Args:
        rollout: the event of the rollout.
        stored: its inputs.
        after: states after each step [T, layers, 2, B, H]; None for a feed-forward policy.
    """

    def __init__(
        self, model: Any, heads: ActionHeads, rollout: RolloutEnd, stored: StoredRollout, after: Tensor | None
    ) -> None:
        self._policy, self._heads, self._rollout, self._inputs, self._after = (
            model.policy,
            heads,
            rollout,
            stored,
            after,
        )
        self._loss_settings: LossSettings | None = None
        if after is not None:
            used = advantages_as_used(model, rollout.advantages.flatten(), None).view_as(rollout.advantages)
            self._loss_settings = LossSettings(used, clip_of(model), float(model.ent_coef))

    def stored(self) -> Outputs:
        """See `PolicyReplay`."""
        return self._stored(self._rows)

    def stored_part(self) -> Outputs:
        """See `PolicyReplay`."""
        return self._stored(self._part)

    @torch.no_grad()
    def outputs(self) -> Outputs:
        """See `PolicyReplay`."""
        states, memory, forward = self._rollout.states, None, self._policy.mlp_extractor.forward_actor
        with without_trace(self._policy):
            if states is None:
                latents = torch.cat([forward(part) for part in self._feature_chunks(self._rows)])
            else:
                latents, memory = self._recurrent_latents(states[0])
            outputs = self._outputs_of(latents, self._rows)
        return outputs._replace(memory=memory, features=latents)

    @torch.no_grad()
    def without_memory(self) -> Outputs | None:
        """See `PolicyReplay`."""
        if self._after is None:
            return None
        with without_trace(self._policy):
            return self._outputs_of(_memoryless_latents(self._policy, self._observations), self._part)

    @torch.no_grad()
    def activations(self) -> Activations:
        """See `PolicyReplay`; layers of a recurrent policy respond to memory as it was stored."""
        policy = self._policy
        with without_trace(policy), _nonlinearities(policy) as responses:
            features = _features(policy, self._observations)
            memory = self._memory(self._part)
            policy.mlp_extractor.forward_actor(features if memory is None else memory)
        layers = responses.layers if memory is None else {**responses.layers, "core": memory}
        return Activations(layers, responses.last)

    def state_gradients(self) -> StateGradients | None:
        """See `PolicyReplay`."""
        states = self._rollout.states
        if states is None or self._after is None:
            return None
        envs = states[0].abs().amax((0, 1, 3)).nonzero().flatten()[:MAX_GRADIENT_ENVS]
        if not len(envs):
            return None
        with without_trace(self._policy), torch.enable_grad():
            return self._through_time(policy_copy(self._policy), states[0], envs)

    def copy(self) -> Copy:
        """See `PolicyReplay`; of observations with several parts, the copy is given their numbers."""
        # copies of the networks between observations and the actor's latents, and of no others; `extract_features` asks both extractors
        names = (*ACTOR_PARTS, "vf_features_extractor")
        parts = {name: getattr(self._policy, name) for name in names if hasattr(self._policy, name)}
        policy = copy.copy(self._policy)
        vars(policy)["_modules"] = copy.deepcopy(parts)
        allow_recurrent_gradients(policy)
        actor = [part for name, part in policy.named_children() if name in ACTOR_PARTS]
        parameters = {id(p): p for part in actor for p in part.parameters() if p.requires_grad}
        observations = self._observations
        inputs = observations if isinstance(observations, Tensor) else torch.arange(len(self._part))

        def latents(rows: Tensor) -> Tensor:
            several = isinstance(observations, dict)
            given = {name: part[rows] for name, part in observations.items()} if several else rows
            return _memoryless_latents(policy, given)

        return Copy(latents, list(parameters.values()), inputs)

    @cached_property
    def _rows(self) -> Array:
        """Numbers of all transitions, [N]."""
        return np.arange(self._inputs.starts.size)

    @cached_property
    def _part(self) -> Array:
        """Numbers of some transitions, evenly spread, [n]."""
        count = len(self._rows)
        rows: Array = np.linspace(0, count - 1, min(count, PART_ROWS)).round().astype(np.int64)
        return rows

    @property
    def _observations(self) -> Any:
        """Observations of some transitions."""
        return self._inputs.rows(self._part, self._policy.device)

    def _feature_chunks(self, rows: Array) -> Iterator[Tensor]:
        for start in range(0, len(rows), CHUNK_ROWS):
            observations = self._inputs.rows(rows[start : start + CHUNK_ROWS], self._policy.device)
            yield _features(self._policy, observations)

    def _recurrent_latents(self, first: Tensor) -> tuple[Tensor, Tensor]:
        """Latents [N, F] and memory [N, H]; memory runs from the states `first` [layers, 2, B, H] through the whole rollout."""
        policy, (steps, envs) = self._policy, self._inputs.starts.shape
        features = torch.cat(list(self._feature_chunks(self._rows)))
        outputs, state = [], (first[:, 0].contiguous(), first[:, 1].contiguous())
        starts = torch.as_tensor(self._inputs.starts, dtype=torch.float32, device=policy.device)
        for inputs, begins in zip(features.unflatten(0, (steps, envs)), starts, strict=True):
            output, state = policy._process_sequence(inputs, state, begins, policy.lstm_actor)
            outputs.append(output)
        memory = torch.cat(outputs)
        return policy.mlp_extractor.forward_actor(memory), memory

    def _outputs_of(self, latents: Tensor, rows: Array) -> Outputs:
        distribution_of(self._policy, latents, self._inputs, rows)
        columns = self._heads.columns(last_distribution(self._policy))
        return Outputs(columns.logits, columns.means, columns.log_std, {}, None)

    def _stored(self, rows: Array) -> Outputs:
        at = torch.from_numpy(rows).to(self._policy.device)
        rollout = self._rollout
        logits, means, log_std = (
            {name: column.flatten(0, 1)[at] for name, column in columns.items()}
            for columns in (rollout.logits, rollout.means, rollout.log_std)
        )
        return Outputs(logits, means, log_std, {}, self._memory(rows))

    def _memory(self, rows: Array) -> Tensor | None:
        """Outputs [n, H] of the LSTM when the rollout was collected."""
        if self._after is None:
            return None
        return self._after[:, -1, 0].flatten(0, 1)[torch.from_numpy(rows).to(self._after.device)]

    def _through_time(self, policy: Any, states: Tensor, envs: Tensor) -> StateGradients:
        """Gradients of the actor's loss at h before the first step and after the last of these environments, by a copy of the policy."""
        allow_recurrent_gradients(policy)
        inputs = self._inputs.envs(envs.cpu().numpy())
        first = states[:, 0, envs].clone().requires_grad_()
        starts = torch.as_tensor(inputs.starts, dtype=torch.float32, device=policy.device)
        observations = inputs.rows(np.arange(inputs.starts.size), policy.device)
        features = _features(policy, observations).unflatten(0, (-1, len(envs)))
        outputs, state = [], (first, states[:, 1, envs].contiguous())
        for row, begins in zip(features, starts, strict=True):
            _, state = policy._process_sequence(row, state, begins, policy.lstm_actor)
            outputs.append(state[0][-1])  # and not the output beside it: so its gradient includes that of its own step
        loss = self._loss(policy, policy.mlp_extractor.forward_actor(torch.cat(outputs)), inputs, envs)
        gradients = torch.autograd.grad(loss, [first, state[0]], materialize_grads=True)
        return StateGradients(gradients[0], gradients[1][-1])

    def _loss(self, policy: Any, latents: Tensor, inputs: StoredRollout, envs: Tensor) -> Tensor:
        """The actor's loss of these environments, 0-d."""
        rollout, settings = self._rollout, self._loss_settings
        assert settings is not None
        distribution = distribution_of(policy, latents, inputs, np.arange(inputs.starts.size))
        actions = torch.as_tensor(inputs.actions, device=latents.device).flatten(0, 1)
        discrete = list(self._heads.kinds.values()) == ["categorical"]
        log_probs = distribution.log_prob(actions.long().flatten() if discrete else actions)
        entropy = distribution.entropy()
        old, empty = rollout.log_probs[:, envs].flatten(), torch.zeros_like(log_probs)
        used, bonus = settings.advantages[:, envs].flatten(), -log_probs if entropy is None else entropy
        columns = LossColumns(log_probs - old, log_probs, used, empty, empty, empty, bonus)
        loss: Tensor = policy_loss(columns, settings.clip).mean() - settings.entropy_coef * bonus.mean()
        return loss


class _Responses:
    """Responses of nonlinearities, in order: `layers` [n, D] by name, and the input `last` [n, F] of the last one."""

    def __init__(self) -> None:
        self.layers: dict[str, Tensor] = {}
        self.last: Tensor | None = None


@contextmanager
def _nonlinearities(policy: Any) -> Iterator[_Responses]:
    """Record the actor's nonlinearities; those of convolutions are left out, as their responses are maps and not units."""
    responses = _Responses()

    def recorder(name: str) -> Any:
        def record(args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Tensor) -> None:
            if result.dim() == 2:
                responses.layers[name], responses.last = result, args[0].flatten(1)

        return record

    parts = {"features": policy.features_extractor, "actor": policy.mlp_extractor.policy_net}
    with ExitStack() as stack:
        for part, network in parts.items():
            for name, module in network.named_modules():
                if isinstance(module, NONLINEAR):
                    stack.callback(listen(module, "forward", recorder(f"{part}_{name}".replace(".", "_"))))
        yield responses


def _features(policy: Any, observations: Observations) -> Tensor:
    """Outputs [n, F] of the actor's features extractor."""
    features = policy.extract_features(observations)
    actor: Tensor = features[0] if isinstance(features, tuple) else features
    return actor


def _memoryless_latents(policy: Any, observations: Observations) -> Tensor:
    """Latents [n, F] of observations, each as the first of an episode."""
    features = _features(policy, observations)
    if hasattr(policy, "lstm_actor"):
        lstm = policy.lstm_actor
        zero = torch.zeros(lstm.num_layers, len(features), lstm.hidden_size, device=features.device)
        features, _ = lstm(features.unsqueeze(0), (zero, zero))
        features = features.squeeze(0)
    latents: Tensor = policy.mlp_extractor.forward_actor(features)
    return latents


def distribution_of(policy: Any, latents: Tensor, inputs: StoredRollout, rows: Array) -> Any:
    """Return the distribution of these transitions, from their latents [n, F]; sets the policy's `action_dist`."""
    distribution = policy._get_action_dist_from_latent(latents)
    if inputs.masks is not None:
        distribution.apply_masking(_flat(inputs.masks)[rows])
    return distribution


def _flat(array: Array) -> Array:
    """[N, ...] of [T, B, ...]."""
    return array.reshape(-1, *array.shape[2:])


def _each(value: Any, change: Any) -> Any:
    return {name: change(part) for name, part in value.items()} if isinstance(value, Mapping) else change(value)
