"""Whether the network can still learn something new: a copy of it is asked to fit random targets (Lyle 2022)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from esper_telemetry.group import Last, MetricGroup, reports
from esper_telemetry.metric import Metric
from esper_telemetry.record import Level

STEPS = 20
LEARNING_RATE = 1e-3
SEED = 0


@dataclass(frozen=True, slots=True)
class CapacityLoss(MetricGroup):
    """What is left of an error of 1."""

    loss: Last = reports(
        Metric(
            key="repr/capacity_loss",
            number=763,
            unit="loss",
            question="How much of random targets can the network not learn in a few steps? It grows as the network loses the ability to"
            " learn; 1 is nothing learned.",
            low=0.0,
            level=Level.DEBUG,
            cost="debug",
            source="20 steps of Adam on a copy; Lyle 2022, 2204.09560",
            undefined="nobody copied the network, or its features are not finite",
        )
    )


def capacity_loss(
    network: Callable[[Tensor], Tensor],
    parameters: Sequence[Tensor],
    inputs: Tensor,
    *,
    steps: int = STEPS,
    learning_rate: float = LEARNING_RATE,
    seed: int = SEED,
) -> CapacityLoss:
    """Mean squared error, in units of the targets' variance, after some steps towards random targets.

    Args:
        network: inputs [n, ...] to features [n, F]; a copy, for it is trained.
        parameters: of the copy.
        inputs: [n, ...].
        steps: of Adam on all inputs at once.
        learning_rate: of these steps.
        seed: of the targets and of the linear layer that reads the features, drawn from a generator of its own.

    """
    with torch.enable_grad():
        targets, readout = _drawn(network, inputs, seed)
        optimizer = torch.optim.Adam([*parameters, readout], lr=learning_rate)
        for _ in range(steps):
            optimizer.zero_grad()
            _error(network(inputs), readout, targets).backward()
            optimizer.step()
        left = _error(network(inputs), readout, targets).detach()
    return CapacityLoss(Last(left / targets.square().mean()))


def _drawn(network: Callable[[Tensor], Tensor], inputs: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Targets [n, 1] of mean 0, and weights [F, 1] so small that the first estimates are near 0."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randn(len(inputs), 1, generator=generator).to(inputs.device)
    width = network(inputs).shape[-1]
    weights = torch.randn(width, 1, generator=generator).to(inputs.device) / (10 * width)
    return targets - targets.mean(), weights.requires_grad_()


def _error(features: Tensor, readout: Tensor, targets: Tensor) -> Tensor:
    return (features @ readout - targets).square().mean()
