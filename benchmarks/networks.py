"""Networks for measuring the cost of gradient telemetry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

BATCH = 256
SEQUENCE = 8


@dataclass(frozen=True)
class Network:
    """A network, and rows to train it on.

    Attributes:
        build: makes it; its weights depend only on torch's generator.
        inputs: shape of the input.
        calls: passes over its gradients in one round of a comparison.
    """

    build: Callable[[], nn.Module]
    inputs: tuple[int, ...]
    calls: int

    def made(self) -> tuple[nn.Module, Tensor]:
        """Return the network and its inputs."""
        torch.manual_seed(0)
        return self.build(), torch.randn(self.inputs)


class Towers(nn.Module):
    """Separate actor and critic, with three linear layers each: 12 tensors."""

    def __init__(self, inputs: int, hidden: int, actions: int) -> None:
        super().__init__()
        self.actor, self.critic = tower(inputs, hidden, actions), tower(inputs, hidden, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[N, actions + 1]."""
        return torch.cat([self.actor(x), self.critic(x)], -1)


class Remembering(nn.Module):
    """An LSTM below an actor and a critic."""

    def __init__(self, size: int, actions: int) -> None:
        super().__init__()
        self.memory = nn.LSTM(size, size)
        self.actor, self.critic = nn.Linear(size, actions), nn.Linear(size, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[T, N, actions + 1]."""
        features, _ = self.memory(x)
        return torch.cat([self.actor(features), self.critic(features)], -1)


def tower(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, outputs))


def deep(width: int, depth: int) -> nn.Sequential:
    return nn.Sequential(*[layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())])


def with_gradients(network: Network) -> tuple[nn.Module, Tensor]:
    """Return the network after one backward pass, and its inputs."""
    model, x = network.made()
    loss_of(model, x).backward()
    return model, x


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """Return a loss whose gradient reaches every parameter."""
    loss: Tensor = model(x).square().mean()
    return loss


NETWORKS = {
    "MLP 64x64": Network(lambda: Towers(4, 64, 2), (BATCH, 4), 400),
    "MLP 4M": Network(lambda: Towers(64, 1400, 6), (BATCH, 64), 30),
    "25M in 100 tensors": Network(lambda: deep(706, 50), (32, 706), 7),
    "LSTM 512": Network(lambda: Remembering(512, 6), (SEQUENCE, 32, 512), 60),
}
