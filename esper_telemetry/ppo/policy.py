"""The policy: one or two trunks, a head per part of the action, and a value."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor, nn

from esper_telemetry.environments.protocol import ActionSpec
from esper_telemetry.ppo.config import PPOConfig
from esper_telemetry.ppo.heads import Categorical, Gaussian, Head, orthogonal
from esper_telemetry.ppo.mlp import MLP, as_matrices

Array = npt.NDArray[Any]
Scores = Callable[[Array], dict[str, Array]]
Values = Callable[[Array], Array]


class ActorCritic(nn.Module):
    """Actor and critic for observations of one shape and any mixture of heads.

    Attributes:
        actor: trunk that the heads read; the only one where `critic` is None.
        critic: trunk that the value reads; None where the actor's is shared.
        heads: by name of the action's part.
    """

    def __init__(
        self, observation_shape: tuple[int, ...], actions: Mapping[str, ActionSpec], config: PPOConfig
    ) -> None:
        super().__init__()
        inputs = math.prod(observation_shape)
        self.actor = MLP(inputs, config.hidden_sizes, config.activation)
        self.critic = None if config.shared_trunk else MLP(inputs, config.hidden_sizes, config.activation)
        self.heads = nn.ModuleDict(
            {name: make_head(spec, self.actor.features, config) for name, spec in actions.items()}
        )
        self.value = orthogonal(nn.Linear(self.actor.features, 1), gain=1.0)

    def trunks(self, observations: Tensor) -> tuple[Tensor, ...]:
        """Trunk outputs [N, F] of observations [N, ...]: one if it is shared, else the actor's and the critic's."""
        if self.critic is None:
            return (self.actor(observations),)
        return self.actor(observations), self.critic(observations)

    def scores(self, features: Tensor) -> dict[str, Tensor]:
        """Scores of every head from the actor's trunk output [N, F]."""
        return {name: head(features) for name, head in self.heads.items()}

    def normalize(self, scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What `log_prob` and `entropy` read, by head, from the scores [N, size] by head."""
        return {name: self.head(name).normalize(score) for name, score in scores.items()}

    def log_prob(self, normalized: Mapping[str, Tensor], actions: Mapping[str, Tensor]) -> Tensor:
        """Log-probability [N] of the joint action: the sum over heads."""
        return add([self.head(name).log_prob(part, actions[name]) for name, part in normalized.items()])

    def entropy(self, normalized: Mapping[str, Tensor]) -> Tensor:
        """Mean entropy of the joint action in nats, 0-d: the sum over heads."""
        return add([self.head(name).entropy(part) for name, part in normalized.items()])

    def values(self, features: Tensor) -> Tensor:
        """Estimates [N] from the critic's trunk output [N, F]."""
        values: Tensor = self.value(features).squeeze(-1)
        return values

    def head(self, name: str) -> Head:
        """The head that chooses that part of the action."""
        head = self.heads[name]
        assert isinstance(head, Head)
        return head

    def groups(self) -> dict[str, list[str]]:
        """Names of the parameters that serve the actor, the critic or both, and of each head's."""
        prefixes = {f"head:{name}": f"heads.{name}." for name in self.heads}
        heads = {
            group: [n for n, _ in self.named_parameters() if n.startswith(prefix)] for group, prefix in prefixes.items()
        }
        trunk = [f"actor.{name}" for name, _ in self.actor.named_parameters()]
        critic = [f"critic.{name}" for name, _ in self.critic.named_parameters()] if self.critic else []
        policy = [name for names in heads.values() for name in names]
        owners = {"actor": policy, "shared": trunk} if self.critic is None else {"actor": trunk + policy}
        return owners | {"critic": [*critic, "value.weight", "value.bias"]} | heads

    def check_finite(self) -> None:
        """Raises FloatingPointError, naming the first, where weights are not finite; synchronises once."""
        if not torch.stack([torch.isfinite(weight).all() for weight in self.parameters()]).all():
            name = next(name for name, weight in self.named_parameters() if not torch.isfinite(weight).all())
            raise FloatingPointError(f"the policy's weights are not finite after this update, {name} first")

    def acting(self) -> tuple[Scores, Values]:
        """Functions of host observations [N, ...] for the rollout: scores by head, and values [N].

        On the CPU they are NumPy, several times as fast as torch on a few rows; elsewhere they copy to the device and
        back.
        """
        if self.value.weight.is_cpu:
            return numpy_scores(self), numpy_values(self)
        return torch_scores(self), torch_values(self)


def make_head(spec: ActionSpec, features: int, config: PPOConfig) -> Head:
    """The head for one part of an action."""
    if spec.kind == "categorical":
        return Categorical(features, spec.size)
    return Gaussian(features, spec.size, config.log_std)


def add(terms: Sequence[Tensor]) -> Tensor:
    """Their sum; the term itself where there is one."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def numpy_scores(policy: ActorCritic) -> Scores:
    """Scores by head, in NumPy, from views of the weights."""
    trunk = policy.actor.as_numpy()
    heads = [(name, *as_matrices(policy.head(name).linear)) for name in policy.heads]

    def scores(observations: Array) -> dict[str, Array]:
        features = trunk(observations)
        return {name: features @ weight + bias for name, weight, bias in heads}

    return scores


def numpy_values(policy: ActorCritic) -> Values:
    """Values, in NumPy, from views of the weights."""
    trunk = (policy.critic or policy.actor).as_numpy()
    weight, bias = as_matrices(policy.value)
    return lambda observations: (trunk(observations) @ weight + bias)[:, 0]


def torch_scores(policy: ActorCritic) -> Scores:
    """Scores by head, on the policy's device."""
    device = policy.value.weight.device

    @torch.no_grad()
    def scores(observations: Array) -> dict[str, Array]:
        features = policy.actor(torch.from_numpy(observations).to(device))
        return {name: score.cpu().numpy() for name, score in policy.scores(features).items()}

    return scores


def torch_values(policy: ActorCritic) -> Values:
    """Values, on the policy's device."""
    device = policy.value.weight.device

    @torch.no_grad()
    def values(observations: Array) -> Array:
        features = (policy.critic or policy.actor)(torch.from_numpy(observations).to(device))
        array: Array = policy.values(features).cpu().numpy()
        return array

    return values
