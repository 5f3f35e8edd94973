"""The controller's reward, a weighted sum of components, and the contributions of seeds, measured by switching subsets of them off."""

from __future__ import annotations

from collections.abc import Mapping
from math import factorial

import torch
from torch import Tensor

from esper_telemetry.lab.morphogenesis.kinds import Op
from esper_telemetry.lab.morphogenesis.slots import EFFECTIVE, Slots, among, look_up, potential

AGE_POTENTIAL = (0.3, 2.0)
"""Potential per epoch in a stage, and its maximum."""

OP_COSTS: Mapping[Op, float] = {Op.GERMINATE: 0.15, Op.FOSSILIZE: 0.01, Op.PRUNE: 0.005, Op.SET_ALPHA: 0.005}
MAX_RENT = 1.5

REWARDS: Mapping[str, Mapping[str, float]] = {
    "shaped": {
        "accuracy_delta": 5.0,
        "attribution": 1.0,
        "shaping": 0.02,
        "rent": -0.01,
        "alpha_shock": -0.05,
        "op_cost": -0.1,
        "fossil_bonus": 1.0,
        "final": 5.0,
        "rollback": -2.0,
    },
    "basic": {"shaping": 0.02, "rent": -0.005, "fossil_bonus": 1.0, "final": 10.0, "rollback": -2.0},
    "sparse": {"final": 10.0},
}
"""Weights of the components by mode; other components have weight 0."""


def potentials(slots: Slots) -> Tensor:
    """Sum of the potentials of all seeds [N], by stage and by the epochs in it."""
    rate, most = AGE_POTENTIAL
    height = potential(slots.stage)
    return (height + (height > 0) * (rate * (slots.age - 1).clamp(min=0)).clamp(max=most)).sum(1)


def shaping(before: Tensor, after: Tensor, gamma: float, *, last: bool) -> Tensor:
    """Potential-based shaping (Ng et al. 1999), γΦ(s') - Φ(s), [N], with Φ = 0 after the last step.

    Its discounted sum over an episode is -Φ of the first state, so it does not change which policy is best.
    """
    return gamma * (torch.zeros_like(after) if last else after) - before


def attribution(slots: Slots, accuracy: Tensor) -> Tensor:
    """Sum over seeds [N] of the harmonic mean of the progress since a seed's stage began and of its contribution."""
    progress = (accuracy.unsqueeze(1) - slots.anchor).clamp(min=0)
    worth = slots.contribution.clamp(min=0)
    both = 2 * progress * worth / (progress + worth).clamp(min=1e-8)
    return torch.where(among(slots.stage, EFFECTIVE), both, 0.0).sum(1)


def rent(parameters: Tensor) -> Tensor:
    """Cost per step [N] of the parameters in seeds, relative to those of the host, with decreasing increments."""
    return parameters.log1p().clamp(max=MAX_RENT)


def op_cost(op: Tensor) -> Tensor:
    """Cost of operations [N]."""
    return look_up(tuple(OP_COSTS.get(one, 0.0) for one in Op), op)


def total(components: Mapping[str, Tensor], mode: str) -> Tensor:
    """Weighted sum of the components [N]."""
    return torch.stack([weight * components[name] for name, weight in REWARDS[mode].items()]).sum(0)


MAX_SLOTS = 4
"""All 2^S subsets of the seeds are measured every epoch."""


def contributions(accuracy: Tensor) -> Tensor:
    """Accuracy lost when one seed alone is off [N, S].

    Args:
        accuracy: [N, 2^S]; seed s is off where bit s of the column's number is set.
    """
    alone = [2**slot for slot in range(accuracy.shape[1].bit_length() - 1)]
    return accuracy[:, :1] - accuracy[:, alone]


def shapley_values(accuracy: Tensor) -> Tensor:
    """Shapley values of the seeds [N, S] (Shapley 1953): their sum is the accuracy with all seeds minus that without any.

    Args:
        accuracy: [N, 2^S], as above.
    """
    slots = accuracy.shape[1].bit_length() - 1
    weights = torch.zeros(2**slots, slots, dtype=torch.float64)
    for subset in range(2**slots):  # a set bit is a seed that is off
        on = slots - subset.bit_count()
        for slot in range(slots):
            others = on - (not subset >> slot & 1)
            share = factorial(others) * factorial(slots - 1 - others) / factorial(slots)
            weights[subset, slot] = -share if subset >> slot & 1 else share
    return (accuracy.double() @ weights.to(accuracy.device)).float()
