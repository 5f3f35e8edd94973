"""Replays the rollout through a Stable-Baselines3 policy: as it was stored, and as a known mistake would read it.

See `event_parts.PolicyReplay` and `event_parts.CollectionReplay`. Shapes: T steps, B environments, N = T B transitions counted time by
time, H width of a recurrent state, F width of latents.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from stable_baselines3.common.utils import obs_as_tensor
from torch import Tensor, nn

from esper_telemetry.adapters.columns import Array, HeadColumns, LossColumns, policy_loss
from esper_telemetry.adapters.sb3.sb3_facts import ActionHeads, last_distribution
from esper_telemetry.adapters.sb3.sb3_gradients import advantages_as_used, clip_of
from esper_telemetry.adapters.taps import in_mode, listen, without_trace
from esper_telemetry.core.event_parts import Activations, CollectionReplay, Copy, Outputs, StateGradients
from esper_telemetry.core.tensors import allow_recurrent_gradients, are_rescaled
from esper_telemetry.events import RolloutEnd
from esper_telemetry.updates.pickles import policy_copy

CHUNK_ROWS = 1024
"""Rows of a feed-forward pass at once."""

PART_ROWS = 512
"""Transitions that suffice to measure how layers respond (Moalla 2024)."""

MAX_GRADIENT_ENVS = 4
"""Environments through whose time gradients are taken."""

MAX_OLDER_ENTRIES = 1 << 20
"""Largest number of weights that are copied in a sampled update, for a comparison in the next one."""

ACTOR_PARTS = ("features_extractor", "pi_features_extractor", "mlp_extractor", "lstm_actor")
"""Networks between observations and the actor's latents."""

NONLINEAR = (nn.ReLU, nn.Tanh, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Mish, nn.Softplus)

MODE_LAYERS = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm)
"""Layers that behave differently in training."""

Observations: TypeAlias = "Tensor | dict[str, Tensor]"

LstmState: TypeAlias = tuple[Tensor, Tensor]
"""h and c, [layers, B, H] each."""


class StoredRollout(NamedTuple):
    """Inputs of a rollout from the buffer, before its rows are reordered.

    Attributes:
        observations: [T, B, ...], or several by name.
        actions: [T, B, D].
        starts: [T, B], 1 if a step began an episode.
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


class Memory(NamedTuple):
    """States before the first step of a rollout; `critic` is None if the critic lacks an LSTM."""

    actor: LstmState
    critic: LstmState | None

    @classmethod
    def stored(cls, buffer: Any, device: torch.device) -> Memory | None:
        """Return a copy of what a full buffer has stored; None without states."""
        if not hasattr(buffer, "hidden_states_pi"):
            return None
        names = [(f"hidden_states_{part}", f"cell_states_{part}") for part in ("pi", "vf")]
        first: list[Any] = [[torch.tensor(getattr(buffer, name)[0], device=device) for name in pair] for pair in names]
        return cls(*first)

    @classmethod
    def received(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any], of_lstm: LstmState) -> Memory:
        """Return the arguments of the policy's call; `of_lstm` are the arguments of its actor's LSTM."""
        states: Any = args[1] if len(args) > 1 else kwargs.get("lstm_states")
        return cls(states.pi, states.vf) if hasattr(states, "pi") and hasattr(states, "vf") else cls(of_lstm, None)

    def empty(self) -> Memory:
        """Return states of zeros."""
        actor, critic = (None if s is None else (torch.zeros_like(s[0]), torch.zeros_like(s[1])) for s in self)
        assert actor is not None
        return Memory(actor, critic)

    def equals(self, actor: Sequence[Tensor], starts: Array) -> bool:
        """Return whether these are the actor's states in the environments [B] whose episode does not begin with the step."""
        going = torch.as_tensor(~starts.astype(bool))
        pairs = zip(self.actor, actor, strict=True)
        return all(torch.equal(one.cpu()[:, going], two.cpu()[:, going]) for one, two in pairs)


class RolloutReplay:
    """A `PolicyReplay` of a model with a full buffer. Its passes write to the policy, so they need a copy.

    Args:
        rollout: the event of the rollout.
        acted: observations [T, B, ...] as the policy received them; None if they were not kept.
        received: states before the first step, as the policy was called; None for a feed-forward policy.
        after: states after each step [T, layers, 2, B, H]; likewise.
        older: weights of the policy in the previous sampled update; may be empty.
    """

    def __init__(
        self,
        model: Any,
        heads: ActionHeads,
        rollout: RolloutEnd,
        *,
        acted: Tensor | None,
        received: Memory | None,
        after: Tensor | None,
        older: Sequence[Tensor],
    ) -> None:
        self._policy, self._heads, self._rollout = model.policy, heads, rollout
        self._acted, self._received, self._after, self._older = acted, received, after, older
        buffer = model.rollout_buffer
        observations = dict(buffer.observations) if isinstance(buffer.observations, dict) else buffer.observations
        masks = getattr(buffer, "action_masks", None)
        self._inputs = StoredRollout(observations, buffer.actions, buffer.episode_starts, masks)
        self._memory = Memory.stored(buffer, model.device) or received
        if after is not None:
            used = advantages_as_used(model, rollout.advantages.flatten(), None).view_as(rollout.advantages)
            self._used_advantages, self._clip, self._entropy_coef = used, clip_of(model), float(model.ent_coef)

    def collection(self) -> CollectionReplay:
        """Return the passes over the inputs that the policy acted on."""
        rollout = self._rollout
        has_modes = any(isinstance(module, MODE_LAYERS) for module in self._policy.modules())
        rows = torch.arange(rollout.rewards.numel(), device=self._policy.device)
        return CollectionReplay(rollout.values, rollout.actions, rows, self.hypothesis, has_modes)

    def stored(self) -> Outputs:
        """See `PolicyReplay`."""
        return self._stored(slice(None))

    def stored_part(self) -> Outputs:
        """See `PolicyReplay`."""
        return self._stored(self._part)

    @torch.no_grad()
    def outputs(self) -> Outputs:
        """See `PolicyReplay`."""
        with without_trace(self._policy):
            return self._pass(self._inputs, self._memory, critic=False)

    @torch.no_grad()
    def hypothesis(self, name: str) -> Outputs | None:
        """See `CollectionReplay.outputs`."""
        policy = self._policy
        with without_trace(policy):
            if name == "older_weights":
                return self._of_older_weights()
            if name in ("other_mode", "training"):
                set_mode = getattr(policy, "set_training_mode", None)
                with in_mode(policy, training=name == "training" or not policy.training, set_mode=set_mode):
                    return self._pass(self._inputs, self._memory)
            if name == "random_passes":
                torch.manual_seed(0)  # of the copy that `without_trace` made
                return self._pass(self._inputs, self._memory)
            mistaken = self._mistaken(name)
            return None if mistaken is None else self._pass(*mistaken)

    @torch.no_grad()
    def without_memory(self) -> Outputs | None:
        """See `PolicyReplay`."""
        if self._after is None:
            return None
        with without_trace(self._policy):
            latents = _memoryless_latents(self._policy, self._observations)
            return self._outputs_of(latents, self._inputs, self._part, None)

    @torch.no_grad()
    def activations(self) -> Activations:
        """See `PolicyReplay`; layers of a recurrent policy respond to the stored memory."""
        policy, calls = self._policy, list[tuple[str, Tensor, Tensor]]()
        parts = {"features": policy.features_extractor, "actor": policy.mlp_extractor.policy_net}
        with without_trace(policy), ExitStack() as stack:
            for part, network in parts.items():
                for name, module in network.named_modules():
                    if isinstance(module, NONLINEAR):
                        note = partial(_note_response, calls, f"{part}_{name}".replace(".", "_"))
                        stack.callback(listen(module, "forward", note))
            features = _features(policy, self._observations)[0]
            memory = self._memory_after(self._part)
            policy.mlp_extractor.forward_actor(features if memory is None else memory)
        layers = {name: response for name, _, response in calls}
        if memory is not None:
            layers["core"] = memory
        return Activations(layers, calls[-1][1].flatten(1) if calls else None)

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

    @property
    def _part(self) -> Array:
        """Numbers of some transitions, evenly spread, [n]."""
        count = self._inputs.starts.size
        rows: Array = np.linspace(0, count - 1, min(count, PART_ROWS)).round().astype(np.int64)
        return rows

    @property
    def _observations(self) -> Any:
        return self._inputs.rows(self._part, self._policy.device)

    def _mistaken(self, name: str) -> tuple[StoredRollout, Memory | None] | None:
        """Return the inputs that a mistake reads instead of the stored ones; None if it does not apply."""
        inputs, memory = self._inputs, self._memory
        if not name:
            return inputs, memory
        if name == "mask_missing":
            return None if inputs.masks is None else (inputs._replace(masks=None), memory)
        if name in ("other_observations", "other_statistics"):
            own = self._other_observations()
            both = [] if own is None else [torch.from_numpy(_flat(one)) for one in (inputs.observations, own)]
            if own is None or are_rescaled(*both) != (name == "other_statistics"):
                return None
            return inputs._replace(observations=own), memory
        if memory is None:
            return None
        if name == "memory_zero":
            return inputs, memory.empty()
        if name in ("other_memory", "memory_stored_late"):
            received, starts, after = self._received, inputs.starts[0], self._after
            known = received is None or any(received.equals(s.actor, starts) for s in (memory, received.empty()))
            stores_late = after is not None and memory.equals(after[0].unbind(1), np.zeros_like(starts))
            return None if known or stores_late != (name == "memory_stored_late") else (inputs, received)
        starts, none = inputs.starts, np.zeros_like(inputs.starts[:1])
        flags = {
            "memory_not_reset": np.zeros_like(starts),
            "memory_empty": np.ones_like(starts),
            "memory_reset_late": np.concatenate([none, starts[:-1]]),
            "memory_reset_early": np.concatenate([starts[1:], none]),
        }
        return (inputs._replace(starts=flags[name]), memory) if name in flags else None

    def _other_observations(self) -> Array | None:
        """Observations as the policy received them; None if they are stored for the same, the previous or the next step."""
        stored, acted = self._inputs.observations, self._acted
        if acted is None or not isinstance(stored, np.ndarray) or acted.numel() != stored.size:
            return None
        own = acted.cpu().numpy().reshape(stored.shape)
        pairs = ((own, stored), (own[1:], stored[:-1]), (own[:-1], stored[1:]))
        return None if any((one == two).all() for one, two in pairs) else own

    def _of_older_weights(self) -> Outputs | None:
        parameters = list(self._policy.parameters())
        if len(self._older) != len(parameters):
            return None
        now = [parameter.data for parameter in parameters]
        try:
            for parameter, weights in zip(parameters, self._older, strict=True):
                parameter.data = weights
            return self._pass(self._inputs, self._memory)
        finally:
            for parameter, weights in zip(parameters, now, strict=True):
                parameter.data = weights

    def _pass(self, inputs: StoredRollout, memory: Memory | None, *, critic: bool = True) -> Outputs:
        """Outputs in the policy's current mode; memory runs through the whole rollout."""
        policy, hidden, rows = self._policy, None, np.arange(inputs.starts.size)
        begins = range(0, len(rows), CHUNK_ROWS)
        chunks = (_features(policy, inputs.rows(rows[begin : begin + CHUNK_ROWS], policy.device)) for begin in begins)
        parts: Iterable[tuple[Tensor, Tensor]] = chunks
        if memory is not None:
            hidden, read = self._recurrent(chunks, inputs.starts, memory, critic=critic)
            parts = [(hidden, read)]
        networks = policy.mlp_extractor
        latents = [(networks.forward_actor(x), networks.forward_critic(y) if critic else y) for x, y in parts]
        latent, of_critic = (torch.cat(part) for part in zip(*latents, strict=True))
        outputs = self._outputs_of(latent, inputs, rows, hidden)
        return outputs._replace(features=latent, values=policy.value_net(of_critic).flatten() if critic else None)

    def _recurrent(self, chunks: Iterable[tuple[Tensor, Tensor]], starts: Array, memory: Memory, *, critic: bool) -> tuple[Tensor, Tensor]:
        """Hidden states [N, H] of the actor, and the critic's inputs."""
        policy = self._policy
        features, of_critic = (torch.cat(parts) for parts in zip(*chunks, strict=True))
        begins = torch.as_tensor(starts, dtype=torch.float32, device=policy.device)
        hidden = self._through(features, memory.actor, begins, policy.lstm_actor)
        if not critic or getattr(policy, "shared_lstm", False):
            return hidden, hidden
        if getattr(policy, "lstm_critic", None) is not None and memory.critic is not None:
            return hidden, self._through(of_critic, memory.critic, begins, policy.lstm_critic)
        return hidden, policy.critic(of_critic)

    def _through(self, features: Tensor, state: Any, begins: Tensor, lstm: nn.Module) -> Tensor:
        outputs = []
        for row, starts in zip(features.unflatten(0, begins.shape), begins, strict=True):
            output, state = self._policy._process_sequence(row, state, starts, lstm)
            outputs.append(output)
        return torch.cat(outputs)

    def _outputs_of(self, latents: Tensor, inputs: StoredRollout, rows: Array, memory: Tensor | None) -> Outputs:
        _distribution(self._policy, latents, inputs, rows)
        columns = self._heads.columns(last_distribution(self._policy))
        return Outputs(columns.logits, columns.means, columns.log_std, {}, memory)

    def _stored(self, rows: Any) -> Outputs:
        rollout = self._rollout
        heads = HeadColumns(rollout.logits, rollout.means, rollout.log_std).map(lambda column: column.flatten(0, 1)[rows])
        return Outputs(heads.logits, heads.means, heads.log_std, {}, self._memory_after(rows))

    def _memory_after(self, rows: Any) -> Tensor | None:
        """Outputs [n, H] of the LSTM when the rollout was collected."""
        return None if self._after is None else self._after[:, -1, 0].flatten(0, 1)[rows]

    def _through_time(self, policy: Any, states: Tensor, envs: Tensor) -> StateGradients:
        """Gradients of the actor's loss at h before the first step and after the last of these environments, by a copy of the policy."""
        allow_recurrent_gradients(policy)
        inputs = self._inputs.envs(envs.cpu().numpy())
        first = states[:, 0, envs].clone().requires_grad_()
        starts = torch.as_tensor(inputs.starts, dtype=torch.float32, device=policy.device)
        observations = inputs.rows(np.arange(inputs.starts.size), policy.device)
        features = _features(policy, observations)[0].unflatten(0, (-1, len(envs)))
        outputs, state = [], (first, states[:, 1, envs].contiguous())
        for row, begins in zip(features, starts, strict=True):
            _, state = policy._process_sequence(row, state, begins, policy.lstm_actor)
            outputs.append(state[0][-1])  # and not `output`: so its gradient includes this step's
        loss = self._loss(policy, policy.mlp_extractor.forward_actor(torch.cat(outputs)), inputs, envs)
        gradients = torch.autograd.grad(loss, [first, state[0]], materialize_grads=True)
        return StateGradients(gradients[0], gradients[1][-1])

    def _loss(self, policy: Any, latents: Tensor, inputs: StoredRollout, envs: Tensor) -> Tensor:
        """The actor's loss of these environments, 0-d."""
        distribution = _distribution(policy, latents, inputs, np.arange(inputs.starts.size))
        actions = torch.as_tensor(inputs.actions, device=latents.device).flatten(0, 1)
        log_probs = distribution.log_prob(actions.long().flatten() if self._heads.single_choice else actions)
        entropy = distribution.entropy()
        old, empty = self._rollout.log_probs[:, envs].flatten(), torch.zeros_like(log_probs)
        used, bonus = self._used_advantages[:, envs].flatten(), -log_probs if entropy is None else entropy
        columns = LossColumns(log_probs - old, log_probs, used, empty, empty, empty, bonus)
        loss: Tensor = policy_loss(columns, self._clip).mean() - self._entropy_coef * bonus.mean()
        return loss


def copied_weights(policy: nn.Module) -> list[Tensor]:
    """Return copies of the weights of a policy; none of a large one."""
    parameters = list(policy.parameters())
    small = sum(parameter.numel() for parameter in parameters) <= MAX_OLDER_ENTRIES
    return [parameter.detach().clone() for parameter in parameters] if small else []


def _note_response(calls: list[tuple[str, Tensor, Tensor]], name: str, args: Any, kwargs: Any, result: Tensor) -> None:
    """Keep name, input and response [n, D] of a nonlinearity; responses of convolutions are maps and not units."""
    if result.dim() == 2:
        calls.append((name, args[0], result))


def _features(policy: Any, observations: Observations) -> tuple[Tensor, Tensor]:
    """Features [n, F] of the actor and of the critic."""
    features = policy.extract_features(observations)
    return features if isinstance(features, tuple) else (features, features)


def _memoryless_latents(policy: Any, observations: Observations) -> Tensor:
    """Latents [n, F] of observations, each as the first of an episode."""
    features = _features(policy, observations)[0]
    if hasattr(policy, "lstm_actor"):
        lstm = policy.lstm_actor
        zero = torch.zeros(lstm.num_layers, len(features), lstm.hidden_size, device=features.device)
        features, _ = lstm(features.unsqueeze(0), (zero, zero))
        features = features.squeeze(0)
    latents: Tensor = policy.mlp_extractor.forward_actor(features)
    return latents


def _distribution(policy: Any, latents: Tensor, inputs: StoredRollout, rows: Array) -> Any:
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
