"""Acting and valuing on the host during a rollout: NumPy where the policy is on the CPU, else torch on its device.

Measured on an AMD EPYC core, NumPy needs a third of torch's time for a step of eight rows.

The recurrent state of one trunk on the host, from one rollout to the next.

The critic's estimates of a rollout on the host, once it is collected: the weights have not changed meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from esper_telemetry.ppo.environments.protocol import Array
from esper_telemetry.ppo.networks.mlp import MLP, Network, as_matrices
from esper_telemetry.ppo.networks.recurrent import Advance, Core, RecurrentTrunk

if TYPE_CHECKING:
    from esper_telemetry.ppo.policy import ActorCritic

Context = Callable[[], AbstractContextManager[Any]]

MOST_BYTES = 32 << 20
"""Of observations that go through a network at once, where a rollout is valued: layers hold several times as much."""


@dataclass(frozen=True, slots=True)
class PolicyTrunk:
    """A trunk on the host.

    Attributes:
        encode: observations [N, ...] to what the core reads, or to features where there is no core.
        advance: what the core reads [B, F] and its state, which is overwritten, to its outputs [B, H]; None without a core.
        decode: outputs of the core [N, H] to features [N, F]; None without a core.
    """

    encode: Network
    advance: Advance | None = None
    decode: Network | None = None

    def __call__(self, observations: Array, state: Array | None = None) -> Array:
        """Features [N, F] of observations [N, ...]; `state` moves on by one step."""
        inputs = self.encode(observations)
        if self.advance is None or self.decode is None or state is None:
            return inputs
        return self.decode(self.advance(inputs, state))


@dataclass(frozen=True, slots=True)
class Acting:
    """What a rollout asks of the policy.

    Attributes:
        actor: trunk that the scores read.
        critic: trunk that the value reads; the actor's where it is shared.
        scores: features [N, F] to scores by head.
        value: features [..., F] to values [...].
    """

    actor: PolicyTrunk
    critic: PolicyTrunk
    scores: Callable[[Array], dict[str, Array]]
    value: Callable[[Array], Array]


def acting(policy: ActorCritic) -> Acting:
    """What a rollout on the host asks of the policy; it holds until the weights change."""
    return in_numpy(policy) if policy.value.weight.is_cpu and policy.precision == "fp32" else in_torch(policy)


def in_numpy(policy: ActorCritic) -> Acting:
    """Acting in NumPy."""
    actor = numpy_trunk(policy.actor)
    critic = actor if policy.critic is None else numpy_trunk(policy.critic)
    heads = [(name, *as_matrices(policy.head(name).linear)) for name in policy.heads]
    weight, bias = as_matrices(policy.value)

    def scores(features: Array) -> dict[str, Array]:
        return {name: features @ weight + bias for name, weight, bias in heads}

    return Acting(actor, critic, scores, lambda features: (features @ weight + bias)[..., 0])


def in_torch(policy: ActorCritic) -> Acting:
    """Acting in torch, with a copy to the device and back at every call."""
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

    return Acting(actor, critic, scores, value)


def numpy_trunk(trunk: nn.Module) -> PolicyTrunk:
    """A trunk in NumPy."""
    if isinstance(trunk, RecurrentTrunk):
        return PolicyTrunk(numpy_network(trunk.encoder), trunk.core.as_numpy(), trunk.decoder.as_numpy())
    return PolicyTrunk(numpy_network(trunk))


def numpy_network(network: nn.Module) -> Network:
    """Hidden layers in NumPy; convolutions stay in torch."""
    return network.as_numpy() if isinstance(network, MLP) else torch_network(network, torch.device("cpu"))


def torch_trunk(trunk: nn.Module, context: Context = nullcontext) -> PolicyTrunk:
    """A trunk in torch, on its device."""
    device = next(trunk.parameters()).device
    if not isinstance(trunk, RecurrentTrunk):
        return PolicyTrunk(torch_network(trunk, device, context))
    core = trunk.core

    @torch.no_grad()
    def advance(inputs: Array, state: Array) -> Array:
        outputs, after = core(tensor(inputs, device).unsqueeze(0), tensor(state, device))
        state[:] = after.cpu().numpy()
        array: Array = outputs[0].cpu().numpy()
        return array

    encode, decode = (torch_network(network, device, context) for network in (trunk.encoder, trunk.decoder))
    return PolicyTrunk(encode, advance, decode)


def torch_network(network: nn.Module, device: torch.device, context: Context = nullcontext) -> Network:
    """A network in torch, on its device, computing in that context; many large rows go through it in parts."""

    @torch.no_grad()
    def run(rows: Array) -> Array:
        size = max(1, MOST_BYTES // max(1, rows[:1].nbytes))
        with context():
            parts = [network(tensor(rows[at : at + size], device)).float() for at in range(0, len(rows), size)]
        array: Array = torch.cat(parts).cpu().numpy()
        return array

    return run


def tensor(array: Array, device: torch.device) -> Tensor:
    """The array on the device."""
    return torch.from_numpy(array).to(device)


def tensors(arrays: Mapping[str, Array], device: torch.device) -> dict[str, Tensor]:
    """The arrays on the device."""
    return {name: tensor(array, device) for name, array in arrays.items()}


class LSTMMemory:
    """What a trunk remembers of the episodes that are open.

    Attributes:
        state: [layers, parts, B, H] now.
        before: [layers, parts, B, H] when the rollout began.
        after: [T, layers, parts, B, H] after each step of the rollout, before an end of an episode cleared it.
    """

    def __init__(self, core: Core, num_steps: int, num_envs: int) -> None:
        shape = core.state_shape(num_envs)
        self.state, self.before = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        self.after = np.zeros((num_steps, *shape), np.float32)

    @property
    def outputs(self) -> Array:
        """[T, B, H]: what the core gave at each step."""
        outputs: Array = self.after[:, -1, 0]
        return outputs

    def begin(self) -> None:
        """A rollout begins: `before` becomes the state."""
        self.before[:] = self.state

    def keep(self, t: int, fresh: Array) -> None:
        """Step t is done; the environments in `fresh` [B] begin the next one without memory."""
        self.after[t] = self.state
        if fresh.any():
            self.state[:, :, fresh] = 0


class Final(NamedTuple):
    """Last observations [E, ...] of episodes that a limit cut at time `time` in the environments `rows` [E]."""

    time: int
    rows: Array
    observations: Array


def estimate(
    acting: Acting, observations: Array, terminated: Array, finals: Sequence[Final], memory: LSTMMemory | None
) -> tuple[Array, Array]:
    """Values [T, B] of the states acted in, and of those that followed, 0 after termination.

    Args:
        observations: [T + 1, B, ...].
        terminated: [T, B].
        finals: what limits cut.
        memory: of the trunk that the value reads, already moved through the rollout; None without memory.

    No estimate moves the memory on.
    """
    if memory is None:
        flat = acting.value(acting.critic(observations.reshape(-1, *observations.shape[2:])))
        values = flat.reshape(len(observations), -1)
    else:
        last = acting.value(acting.critic(observations[-1], memory.state.copy()))
        values = np.concatenate([acting.value(decoded(acting, memory)), last[None]])
    next_values = np.where(terminated, np.float32(0), values[1:])
    for_limits(acting, next_values, finals, memory)
    return values[:-1], next_values


def decoded(acting: Acting, memory: LSTMMemory) -> Array:
    """Features [T, B, F] of a rollout from what the core gave."""
    assert acting.critic.decode is not None
    outputs = memory.outputs
    return acting.critic.decode(outputs.reshape(-1, outputs.shape[-1])).reshape(*outputs.shape[:2], -1)


def for_limits(acting: Acting, next_values: Array, finals: Sequence[Final], memory: LSTMMemory | None) -> None:
    """Writes to [T, B] the values of the states in which a limit ended an episode."""
    if not finals:
        return
    rows = np.concatenate([final.rows for final in finals])
    times = np.concatenate([np.full(len(final.rows), final.time) for final in finals])
    state = None if memory is None else np.ascontiguousarray(np.moveaxis(memory.after[times, :, :, rows], 0, 2))
    features = acting.critic(np.concatenate([final.observations for final in finals]), state)
    next_values[times, rows] = acting.value(features)


def remember(acting: Acting, observations: Array, memory: LSTMMemory, fresh: Array) -> None:
    """Moves the critic's own memory through a rollout: observations [T + 1, B, ...], begins without memory [T + 1, B]."""
    assert acting.critic.advance is not None
    steps = len(memory.after)
    inputs = acting.critic.encode(observations[:-1].reshape(-1, *observations.shape[2:]))
    inputs = inputs.reshape(steps, -1, inputs.shape[-1])
    memory.begin()
    for t in range(steps):
        acting.critic.advance(inputs[t], memory.state)
        memory.keep(t, fresh[t + 1])
