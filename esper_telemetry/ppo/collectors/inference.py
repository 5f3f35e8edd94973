"""The policy as functions of arrays: in NumPy if the policy is on the CPU, else in torch on its device.

On an AMD EPYC core NumPy takes a third of torch's time for a step of eight rows. Values are estimated after a rollout, even for a critic
with its own memory; estimating a value does not advance a memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from esper_telemetry.ppo.environments.environment_protocol import Array
from esper_telemetry.ppo.networks.mlp import MLP, Network, as_matrices
from esper_telemetry.ppo.networks.recurrent import Advance, Core, RecurrentTrunk
from esper_telemetry.ppo.policy import ActorCritic

Context = Callable[[], AbstractContextManager[Any]]

MAX_BATCH_BYTES: Final = 32 << 20
"""Maximum size of observations that go through a network at once: the outputs of its layers are several times as large."""


@dataclass(frozen=True, slots=True)
class HostTrunk:
    """A trunk as a function of arrays.

    Attributes:
        encode: observations [N, ...] to the core's inputs, or to features without a core.
        advance: the core's inputs [B, F] and its state, which is overwritten, to its outputs [B, H]; None without a core.
        decode: outputs of the core [N, H] to features [N, F]; None without a core.
    """

    encode: Network
    advance: Advance | None = None
    decode: Network | None = None

    def __call__(self, observations: Array, state: Array | None = None) -> Array:
        """Return features [N, F] of observations [N, ...]; `state` advances by one step."""
        inputs = self.encode(observations)
        if self.advance is None or self.decode is None or state is None:
            return inputs
        return self.decode(self.advance(inputs, state))


@dataclass(frozen=True, slots=True)
class HostPolicy:
    """A policy as functions of arrays; valid until the weights change.

    Attributes:
        actor: trunk of the scores.
        critic: trunk of the value; the actor's if it is shared.
        scores: features [N, F] to scores by head.
        value: features [..., F] to values [...].
    """

    actor: HostTrunk
    critic: HostTrunk
    scores: Callable[[Array], dict[str, Array]]
    value: Callable[[Array], Array]


def host_policy(policy: ActorCritic) -> HostPolicy:
    """Return the policy as functions of arrays, in NumPy if it computes on the CPU in float32."""
    return in_numpy(policy) if policy.value.weight.is_cpu and policy.precision == "fp32" else in_torch(policy)


def in_numpy(policy: ActorCritic) -> HostPolicy:
    """Return the policy in NumPy."""
    actor = numpy_trunk(policy.actor)
    critic = actor if policy.critic is None else numpy_trunk(policy.critic)
    heads = [(name, *as_matrices(policy.head(name).linear)) for name in policy.heads]
    weight, bias = as_matrices(policy.value)

    def scores(features: Array) -> dict[str, Array]:
        return {name: features @ weight + bias for name, weight, bias in heads}

    return HostPolicy(actor, critic, scores, lambda features: (features @ weight + bias)[..., 0])


def in_torch(policy: ActorCritic) -> HostPolicy:
    """Return the policy in torch, with a copy to the device and back at every call."""
    actor = torch_trunk(policy.actor, policy.autocast)
    critic = actor if policy.critic is None else torch_trunk(policy.critic, policy.autocast)
    device = policy.value.weight.device

    @torch.no_grad()
    def scores(features: Array) -> dict[str, Array]:
        return {name: score.cpu().numpy() for name, score in policy.scores(tensor(features, device)).items()}

    @torch.no_grad()
    def value(features: Array) -> Array:
        values: Array = policy.values(tensor(features, device)).cpu().numpy()
        return values

    return HostPolicy(actor, critic, scores, value)


def numpy_trunk(trunk: nn.Module) -> HostTrunk:
    """Return a trunk in NumPy; convolutions stay in torch."""
    encoder = trunk.encoder if isinstance(trunk, RecurrentTrunk) else trunk
    encode = encoder.as_numpy() if isinstance(encoder, MLP) else torch_network(encoder, torch.device("cpu"))
    if isinstance(trunk, RecurrentTrunk):
        return HostTrunk(encode, trunk.core.as_numpy(), trunk.decoder.as_numpy())
    return HostTrunk(encode)


def torch_trunk(trunk: nn.Module, context: Context = nullcontext) -> HostTrunk:
    """Return a trunk in torch, on its device."""
    device = next(trunk.parameters()).device
    if not isinstance(trunk, RecurrentTrunk):
        return HostTrunk(torch_network(trunk, device, context))
    core = trunk.core

    @torch.no_grad()
    def advance(inputs: Array, state: Array) -> Array:
        outputs, after = core(tensor(inputs, device).unsqueeze(0), tensor(state, device))
        state[:] = after.cpu().numpy()
        array: Array = outputs[0].cpu().numpy()
        return array

    encode, decode = (torch_network(network, device, context) for network in (trunk.encoder, trunk.decoder))
    return HostTrunk(encode, advance, decode)


def torch_network(network: nn.Module, device: torch.device, context: Context = nullcontext) -> Network:
    """Return a network in torch, on its device, computing in that context; many large rows are processed in parts."""

    @torch.no_grad()
    def run(rows: Array) -> Array:
        size = max(1, MAX_BATCH_BYTES // max(1, rows[:1].nbytes))
        with context():
            parts = [network(tensor(rows[at : at + size], device)).float() for at in range(0, len(rows), size)]
        array: Array = torch.cat(parts).cpu().numpy()
        return array

    return run


def tensor(array: Array, device: torch.device) -> Tensor:
    """Return the array on the device."""
    return torch.from_numpy(array).to(device)


class StateBuffer:
    """The recurrent state of one trunk on the host, from one rollout to the next.

    Attributes:
        state: [layers, parts, B, H] now.
        initial: [layers, parts, B, H] at the beginning of the rollout.
        after: [T, layers, parts, B, H] after each step of the rollout, before the end of an episode cleared it.
    """

    def __init__(self, core: Core, num_steps: int, num_envs: int) -> None:
        shape = core.state_shape(num_envs)
        self.state, self.initial = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        self.after = np.zeros((num_steps, *shape), np.float32)

    def begin(self) -> None:
        """Begin a rollout: the state becomes `initial`."""
        self.initial[:] = self.state

    def store(self, t: int, fresh: Array) -> None:
        """Store the state after step t; the environments in `fresh` [B] begin the next step with a state of zeros."""
        self.after[t] = self.state
        if fresh.any():
            self.state[:, :, fresh] = 0


def advance_critic(policy: HostPolicy, observations: Array, states: StateBuffer, fresh: Array) -> None:
    """Advance the critic's own memory through a rollout, from observations [T + 1, B, ...] and resets [T + 1, B]."""
    assert policy.critic.advance is not None
    steps = len(states.after)
    inputs = policy.critic.encode(observations[:-1].reshape(-1, *observations.shape[2:]))
    inputs = inputs.reshape(steps, -1, inputs.shape[-1])
    states.begin()
    for t in range(steps):
        policy.critic.advance(inputs[t], states.state)
        states.store(t, fresh[t + 1])


class LimitedEpisodes(NamedTuple):
    """Last observations [E, ...] of episodes that a limit cut at time `time` in the environments `rows` [E]."""

    time: int
    rows: Array
    observations: Array


def estimate(
    policy: HostPolicy,
    observations: Array,
    terminated: Array,
    limited: Sequence[LimitedEpisodes],
    states: StateBuffer | None,
) -> tuple[Array, Array]:
    """Return the values [T, B] of the states acted in, and of the following states, 0 after termination.

    Args:
        policy: the policy that collected the rollout.
        observations: [T + 1, B, ...].
        terminated: [T, B].
        limited: the episodes that limits cut.
        states: recurrent states of the value's trunk, already advanced through the rollout; None without memory.
    """
    if states is None:
        flat = policy.value(policy.critic(observations.reshape(-1, *observations.shape[2:])))
        values = flat.reshape(len(observations), -1)
    else:
        assert policy.critic.decode is not None
        last = policy.value(policy.critic(observations[-1], states.state.copy()))
        outputs = states.after[:, -1, 0]
        features = policy.critic.decode(outputs.reshape(-1, outputs.shape[-1])).reshape(*outputs.shape[:2], -1)
        values = np.concatenate([policy.value(features), last[None]])
    next_values = np.where(terminated, np.float32(0), values[1:])
    if limited:
        rows = np.concatenate([part.rows for part in limited])
        times = np.concatenate([np.full(len(part.rows), part.time) for part in limited])
        state = None if states is None else np.ascontiguousarray(np.moveaxis(states.after[times, :, :, rows], 0, 2))
        features = policy.critic(np.concatenate([part.observations for part in limited]), state)
        next_values[times, rows] = policy.value(features)
    return values[:-1], next_values
