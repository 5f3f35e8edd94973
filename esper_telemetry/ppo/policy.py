"""The policy: one or two trunks, a head per part of the action, and a value.

bf16 is autocast of the trunks only, both in acting and in training, so the first minibatch reproduces the probabilities of collection. Two
passes are compiled if the settings ask for it: trunks without a memory, and losses. They stay separate, so that the gradients of the
two losses do too. CUDA graphs are not used: minibatches change their size if rows are invalid, and events outlive a
replay.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any, ParamSpec, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from esper_telemetry.ppo.action_distributions import Gaussian, PolicyHead, make_head
from esper_telemetry.ppo.config import PPOConfig
from esper_telemetry.ppo.environments.environment_protocol import ActionSpec, ObservationLayout
from esper_telemetry.ppo.networks import MLP, Core, Encoded, RecurrentTrunk, orthogonal
from esper_telemetry.ppo.rollout import Grid

Arguments = ParamSpec("Arguments")
Outcome = TypeVar("Outcome")

COMPILERS = ("g++", "clang++")


def compiled(function: Callable[Arguments, Outcome]) -> Callable[Arguments, Outcome]:
    """Return the function, compiled at its first call, so that a second backward pass through its results remains possible.

    Compiled backward passes reuse the memory of their inputs unless the process tells them not to, and then fail if a
    hook has read gradients during the pass.
    """
    import torch._functorch.config as functorch

    functorch.donated_buffer = False
    return torch.compile(function)


def require_compiler(device: torch.device) -> None:
    """Raise ValueError if this machine cannot compile for that device; on the CPU that needs a C++ compiler."""
    candidates = (os.environ.get("CXX"), *COMPILERS)
    if device.type == "cpu" and not any(name and shutil.which(name) for name in candidates):
        raise ValueError(f"compile needs a C++ compiler on the CPU: neither $CXX nor {' nor '.join(COMPILERS)} is found")


Trunk: TypeAlias = MLP | Encoded | RecurrentTrunk
Tensors: TypeAlias = Mapping[str, Tensor]

NOTHING: Tensors = MappingProxyType({})


class ActorCritic(nn.Module):
    """Actor and critic for observations of one layout and any mixture of heads.

    Args:
        observations: their layout, or the shape of a vector.
        actions: the parts of an action by name.
        config: settings of the networks.

    Attributes:
        precision: precision of the trunks: `fp32` or `bf16`.
        actor: trunk of the heads; the only one if `critic` is None.
        critic: trunk of the value; None if the actor's is shared.
        heads: heads by name of the action's part.
    """

    def __init__(self, observations: tuple[int, ...] | ObservationLayout, actions: Mapping[str, ActionSpec], config: PPOConfig) -> None:
        super().__init__()
        layout = observations if isinstance(observations, ObservationLayout) else ObservationLayout(math.prod(observations))
        self.precision = config.precision
        self.actor = make_trunk(layout, config)
        self.critic = None if config.shared_trunk else make_trunk(layout, config)
        self._head = {name: make_head(name, spec, self.actor.features, config) for name, spec in actions.items()}
        self.heads = nn.ModuleDict(self._head)  # its own look-ups take five times as long
        self._constant = {name: head for name, head in self._head.items() if type(head) is Gaussian}
        self.value = orthogonal(nn.Linear(self.actor.features, 1), gain=1.0)
        self._pass = compiled(self._trunks) if config.compile and config.policy == "mlp" else self._trunks

    def trunks(self, observations: Tensor, grid: Grid | None = None) -> tuple[Tensor, ...]:
        """Trunk outputs [N, F] of observations [N, ...]: one if it is shared, else the actor's and the critic's.

        Recurrent trunks need the positions of the rows in time: `grid`.
        """
        if self.precision == "fp32":
            return self._pass(observations, grid)
        with self.autocast():
            return tuple(output.float() for output in self._pass(observations, grid))

    def _trunks(self, observations: Tensor, grid: Grid | None) -> tuple[Tensor, ...]:
        trunks = self.named_trunks()
        if grid is None:
            return tuple(trunk(observations) for trunk in trunks.values())
        return tuple(trunk(observations, grid, grid.states[name]) for name, trunk in trunks.items())

    def autocast(self) -> AbstractContextManager[Any]:
        """The context in which trunks compute, both in acting and in training; heads, losses and memories stay in float32."""
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.value.weight.device.type, torch.bfloat16)

    def named_trunks(self) -> dict[str, Trunk]:
        """The trunks by name: `actor`, and `critic` if it has its own."""
        return {"actor": self.actor} if self.critic is None else {"actor": self.actor, "critic": self.critic}

    def cores(self) -> dict[str, Core]:
        """The recurrent cores by trunk; empty for a feed-forward policy."""
        return {name: trunk.core for name, trunk in self.named_trunks().items() if isinstance(trunk, RecurrentTrunk)}

    def scores(self, features: Tensor) -> dict[str, Tensor]:
        """Scores of every head from the actor's trunk output [N, F]."""
        return {name: head(features) for name, head in self.heads.items()}

    def normalize(self, scores: Mapping[str, Tensor], masks: Tensors = NOTHING) -> dict[str, Tensor]:
        """Return the input of `log_prob` and `entropy`, by head, from the scores and the allowed choices, [N, size] by head."""
        return {name: self.head(name).normalize(score, masks.get(name)) for name, score in scores.items()}

    def log_probs(self, normalized: Tensors, actions: Tensors, relevance: Tensors = NOTHING) -> dict[str, Tensor]:
        """Log-probability [N] of each part of the action; 0 if the part is irrelevant."""
        log_probs = {}
        for name, part in normalized.items():
            head, action, relevant = self.head(name), actions[name], relevance.get(name)
            if relevant is None:
                log_probs[name] = head.log_prob(part, action)
                continue
            matters = relevant if action.dim() == 1 else relevant.unsqueeze(-1)
            log_prob = head.log_prob(part, torch.where(matters, action, action.new_zeros(())))
            log_probs[name] = torch.where(relevant, log_prob, log_prob.new_zeros(()))
        return log_probs

    def log_prob(self, normalized: Tensors, actions: Tensors, relevance: Tensors = NOTHING) -> Tensor:
        """Log-probability [N] of the joint action: the sum over the heads that are relevant."""
        return add(list(self.log_probs(normalized, actions, relevance).values()))

    def entropy(self, normalized: Tensors, relevance: Tensors = NOTHING) -> Tensor:
        """Mean entropy of the joint action in nats, 0-d: the sum over the heads that are relevant."""
        return add([self.head(name).entropy(part, relevance.get(name)) for name, part in normalized.items()])

    def values(self, features: Tensor) -> Tensor:
        """Estimates [N] from the critic's trunk output [N, F]."""
        values: Tensor = self.value(features).squeeze(-1)
        return values

    def bounds(self) -> dict[str, Tensor]:
        """Per bounded Gaussian head [2, D]: stored actions beyond these are considered to be at the bound."""
        gaussians = {name: head for name, head in self.heads.items() if isinstance(head, Gaussian)}
        return {name: head.bounds for name, head in gaussians.items() if head.bounds is not None}

    def constant_log_std(self) -> Mapping[str, Tensor]:
        """Copies of the log standard deviations [D], per Gaussian head for which they do not depend on the state."""
        return {name: head.log_std.detach().clone() for name, head in self._constant.items()}

    def head(self, name: str) -> PolicyHead:
        """The head that chooses that part of the action."""
        return self._head[name]

    def groups(self) -> dict[str, list[str]]:
        """Names of the parameters of the actor, the critic or both, and separately of each head and the memory."""
        prefixes = {f"head:{name}": f"heads.{name}." for name in self.heads}
        heads = {group: [n for n, _ in self.named_parameters() if n.startswith(prefix)] for group, prefix in prefixes.items()}
        trunk = [f"actor.{name}" for name, _ in self.actor.named_parameters()]
        critic = [f"critic.{name}" for name, _ in self.critic.named_parameters()] if self.critic else []
        policy = [name for names in heads.values() for name in names]
        owners = {"actor": policy, "shared": trunk} if self.critic is None else {"actor": trunk + policy}
        memory = [name for name, _ in self.named_parameters() if ".core." in name]
        return owners | {"critic": [*critic, "value.weight", "value.bias"]} | heads | ({"lstm": memory} if memory else {})

    def check_finite(self) -> None:
        """Raise FloatingPointError for the first weights that are not finite; synchronises once."""
        if not torch.stack([torch.isfinite(weight).all() for weight in self.parameters()]).all():
            name = next(name for name, weight in self.named_parameters() if not torch.isfinite(weight).all())
            raise FloatingPointError(f"the policy's weights are not finite after this update, {name} first")


def add(terms: Sequence[Tensor]) -> Tensor:
    """Return the sum of the terms; a single term itself."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def make_trunk(layout: ObservationLayout, config: PPOConfig) -> Trunk:
    """Return the trunk for these settings: hidden layers, or for a recurrent policy encoder, memory and decoder."""
    if config.policy == "mlp":
        return make_layers(layout, config.hidden_sizes, config.activation)
    encoder = make_layers(layout, config.encoder_sizes, config.activation)
    core = Core(config.policy, encoder.features, config.lstm_size, config.lstm_layers)
    return RecurrentTrunk(encoder, core, MLP(config.lstm_size, config.hidden_sizes, config.activation))


def make_layers(layout: ObservationLayout, sizes: Sequence[int], activation: str) -> MLP | Encoded:
    """Return hidden layers for observations, preceded by encoders if there are images."""
    if layout.images:
        return Encoded(layout, sizes, activation)
    return MLP(layout.numbers, sizes, activation)
