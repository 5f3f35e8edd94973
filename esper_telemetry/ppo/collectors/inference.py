"""The policy as functions of arrays, and the actions that they sample: in NumPy if the policy is on the CPU, else in torch on its device.

On an AMD EPYC core NumPy takes a third of torch's time for a step of eight rows. Values are estimated after a rollout, even for a critic
with its own memory; estimating a value does not advance a memory. Actions are
sampled part by part under the restrictions of earlier parts, which are NumPy arrays on the host and tensors on a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from esper_telemetry.ppo.action_distributions import Sampler
from esper_telemetry.ppo.environments.environment_protocol import ActionSpec, Array, ObservationLayout, Task
from esper_telemetry.ppo.networks import MLP, Advance, Core, Network, RecurrentTrunk, as_matrices
from esper_telemetry.ppo.policy import ActorCritic, Tensors, add

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


def torch_trunk(trunk: nn.Module, context: Context) -> HostTrunk:
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
    policy: HostPolicy, observations: Array, terminated: Array, limited: Sequence[LimitedEpisodes], states: StateBuffer | None
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


FORBIDDEN_SCORE: Final = np.finfo(np.float32).min


class Restrictor:
    """Computes the restriction of one part of an action.

    Args:
        spec: specification of the part.
        relevant_choices: [size of `given`], bool: the choices for which the part matters; None if it always does.
        forced: [size], bool: only choice 0, which an irrelevant part must take.
        rows: [B] indices of the environments.
    """

    def __init__(self, spec: ActionSpec, relevant_choices: Any, forced: Any, rows: Any) -> None:
        self.spec, self.relevant_choices, self.forced, self.rows = spec, relevant_choices, forced, rows

    def __call__(self, mask: Any, actions: Mapping[str, Any], relevance: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return the allowed choices of the part [B, size], and whether it matters [B]; None without restrictions.

        They follow from the environment's mask and the earlier parts with their relevance.
        """
        given = self.spec.given
        if given is None:
            return mask, None
        if mask is not None and mask.ndim == 3:
            mask = mask[self.rows, actions[given]]
        relevant = relevance.get(given)
        if self.relevant_choices is not None:
            here = self.relevant_choices[actions[given]]
            relevant = here if relevant is None else relevant & here
        if relevant is None:
            return mask, None
        if self.spec.kind == "continuous":
            return None, relevant
        matters = relevant[:, None]
        return (matters if mask is None else mask & matters) | (self.forced & ~matters), relevant

    def to(self, device: torch.device) -> Restrictor:
        """Return the restrictor for tensors on a device."""
        arrays = (self.relevant_choices, self.forced, self.rows)
        return Restrictor(self.spec, *(None if array is None else torch.from_numpy(array).to(device) for array in arrays))


def restrictors(specs: Mapping[str, ActionSpec], num_envs: int) -> dict[str, Restrictor]:
    """Return a restrictor for every part, in NumPy; raise ValueError if a part depends on a part that is not chosen before it."""
    restrictors_of_parts: dict[str, Restrictor] = {}
    for name, spec in specs.items():
        relevant_choices = None
        if spec.given is not None:
            if spec.given not in restrictors_of_parts or specs[spec.given].kind != "categorical":
                raise ValueError(f"part {name!r} must be given an earlier categorical part, got {spec.given!r}")
            if spec.relevant_for is not None:
                relevant_choices = np.isin(np.arange(specs[spec.given].size), spec.relevant_for)
        elif spec.relevant_for is not None:
            raise ValueError(f"part {name!r} has relevant_for={spec.relevant_for} without a part that it is given")
        restrictors_of_parts[name] = Restrictor(spec, relevant_choices, np.arange(spec.size) == 0, np.arange(num_envs))
    return restrictors_of_parts


def restricted_parts(specs: Mapping[str, ActionSpec], masked: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the names of the parts with masks, and of the parts with a relevance."""
    relevant: list[str] = []
    for name, spec in specs.items():
        if spec.relevant_for is not None or spec.given in relevant:
            relevant.append(name)
    names = set(masked) | set(relevant)
    return [name for name, spec in specs.items() if name in names and spec.kind == "categorical"], relevant


class ActionColumns(NamedTuple):
    """The columns of a rollout about the chosen actions; see `Rollout` for their shapes."""

    actions: Tensors
    log_probs: Tensor
    head_log_probs: Tensors
    action_masks: Tensors
    relevance: Tensors
    scores: Tensors


@torch.no_grad()
def action_columns(policy: ActorCritic, scores: Tensors, actions: Tensors, *, masks: Tensors, relevance: Tensors) -> ActionColumns:
    """Return the columns with the log-probabilities of actions under the scores they were sampled from. All shapes are [T, B, ...]."""
    shape = next(iter(scores.values())).shape[:2]
    flat_scores, flat_actions, flat_masks, flat_relevance = (
        {name: column.flatten(0, 1) for name, column in columns.items()} for columns in (scores, actions, masks, relevance)
    )
    parts = policy.log_probs(policy.normalize(flat_scores, flat_masks), flat_actions, flat_relevance)
    parts = {name: part.view(shape) for name, part in parts.items()}
    head_log_probs = parts if len(parts) > 1 else {}
    return ActionColumns(actions, add(list(parts.values())), head_log_probs, masks, relevance, scores)


class ActionBuffer:
    """The actions of T steps in B environments on the host.

    Args:
        masked: names of the parts for which the environment has action masks.
        greedy: take the most likely actions instead of sampling them.
    """

    def __init__(self, env: Task, policy: ActorCritic, num_steps: int, masked: tuple[str, ...], *, greedy: bool = False) -> None:
        shape = (num_steps, env.num_envs)
        heads = {name: policy.head(name) for name in env.action_specs}
        with_masks, with_relevance = restricted_parts(env.action_specs, masked)
        self._policy, self._shape, self._greedy = policy, shape, greedy
        self._restrictors = restrictors(env.action_specs, env.num_envs)
        self._scores = {name: np.zeros((*shape, head.width), np.float32) for name, head in heads.items()}
        self._actions = {name: head.action_buffer(shape) for name, head in heads.items()}
        self._masks = {name: np.ones((*shape, heads[name].size), bool) for name in with_masks}
        self._relevance = {name: np.ones(shape, bool) for name in with_relevance}
        self._squashes = {name: head.squash for name, head in heads.items() if head.squash is not None}
        self._plain = not (self._masks or self._relevance or self._squashes)
        self._noise: dict[str, Array] = {}
        self._samplers: dict[str, Sampler] = {}

    def begin(self, generator: torch.Generator) -> None:
        """Begin a rollout: sample all of its noise."""
        heads = {name: self._policy.head(name) for name in self._actions}
        if not (self._greedy and self._noise):
            self._noise = {name: head.noise(self._shape, generator).numpy() for name, head in heads.items()}
        if self._greedy:
            for noise in self._noise.values():
                noise.fill(0)
        self._samplers = {name: head.sampler() for name, head in heads.items()}

    def choose(self, t: int, scores: Mapping[str, Array], masks: Mapping[str, Array]) -> dict[str, Array]:
        """Return the environment's actions at step t, sampled from the scores [B, width] by head under its masks."""
        if self._plain:
            for name, score in scores.items():
                self._scores[name][t] = score
                self._actions[name][t] = self._samplers[name](score, self._noise[name][t])
            return {name: actions[t] for name, actions in self._actions.items()}
        chosen_actions: dict[str, Array] = {}
        relevance: dict[str, Array] = {}
        for name, score in scores.items():
            mask, relevant = self._restrictors[name](masks.get(name), chosen_actions, relevance)
            self._scores[name][t] = score
            if mask is not None:
                self._masks[name][t] = mask
                score = np.where(mask, score, FORBIDDEN_SCORE)
            action = self._samplers[name](score, self._noise[name][t])
            if relevant is not None:
                self._relevance[name][t] = relevance[name] = relevant
                action = action * relevant.reshape(-1, *[1] * (action.ndim - 1))
            self._actions[name][t] = action
            chosen_actions[name] = self._actions[name][t]
        return chosen_actions | {name: squash.as_numpy(chosen_actions[name]) for name, squash in self._squashes.items()}

    def check_finite(self, observations: Array, layout: ObservationLayout) -> None:
        """Raise FloatingPointError for the first observation [T, B, ...] whose scores are not finite."""
        for name, scores in self._scores.items():
            if not np.isfinite(scores).all():
                t, row = np.argwhere(~np.isfinite(scores).all(-1))[0]
                observation = observations[t, row] if layout.alone else layout.numbers_of(observations[t, row])
                raise FloatingPointError(
                    f"environment {row} returned at step {t} of the rollout an observation for which the policy's scores "
                    f"for {name} are not finite: {np.array2string(observation, threshold=8)}"
                )

    def finish(self, device: torch.device) -> ActionColumns:
        """Return the columns of the rollout; raise ValueError if a mask allowed nothing."""
        for name, mask in self._masks.items():
            empty = np.argwhere(~mask.any(-1))
            if len(empty):
                raise ValueError(f"the action mask of {name!r} allows no choice at (step, environment) {tuple(empty[0].tolist())}")
        scores, actions, masks, relevance = (
            {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
            for arrays in (self._scores, self._actions, self._masks, self._relevance)
        )
        return action_columns(self._policy, scores, actions, masks=masks, relevance=relevance)
