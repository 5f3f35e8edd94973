"""What the controller is paid: components computed once, and weights that make a reward of them.

What each seed is worth: accuracies with every subset of the seeds switched off, measured in one pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import factorial

import torch
from torch import Tensor

from esper_telemetry.lab.morphogenesis.slots import EFFECTIVE, Op, Slots, among, look_up, potential

AGE_POTENTIAL = (0.3, 2.0)
"""Potential per epoch in a stage, and the most of it."""

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
"""Weights of the components by mode; those that are not named count for nothing."""


def potentials(slots: Slots) -> Tensor:
    """[N]: how far all seeds of an environment have come, by stage and by the epochs in it."""
    rate, most = AGE_POTENTIAL
    height = potential(slots.stage)
    return (height + (height > 0) * (rate * (slots.age - 1).clamp(min=0)).clamp(max=most)).sum(1)


def shaping(before: Tensor, after: Tensor, gamma: float, *, last: bool) -> Tensor:
    """Potential-based shaping (Ng et al. 1999), γΦ(s') - Φ(s), [N]; the state after the last step has none.

    Discounted and summed over an episode it is -Φ of the first state, so no policy gains by it.
    """
    return gamma * (torch.zeros_like(after) if last else after) - before


def attribution(slots: Slots, accuracy: Tensor) -> Tensor:
    """[N]: what seeds have earned, each the harmonic mean of the progress since its stage began and of what it contributes."""
    progress = (accuracy.unsqueeze(1) - slots.anchor).clamp(min=0)
    worth = slots.contribution.clamp(min=0)
    both = 2 * progress * worth / (progress + worth).clamp(min=1e-8)
    return torch.where(among(slots.stage, EFFECTIVE), both, 0.0).sum(1)


def rent(parameters: Tensor) -> Tensor:
    """[N]: what parameters in seeds, over those of the host, cost per step, with falling increments."""
    return parameters.log1p().clamp(max=MAX_RENT)


def op_cost(op: Tensor) -> Tensor:
    """[N]: what operations cost."""
    return look_up(tuple(OP_COSTS.get(one, 0.0) for one in Op), op)


def total(components: Mapping[str, Tensor], mode: str) -> Tensor:
    """[N]: the reward."""
    return torch.stack([weight * components[name] for name, weight in REWARDS[mode].items()]).sum(0)


MAX_SLOTS = 4
"""All 2^S subsets are measured every epoch, which few slots allow."""


def contributions(accuracy: Tensor) -> Tensor:
    """[N, S]: accuracy that is lost when a seed alone is off.

    Args:
        accuracy: [N, 2^S]; seed s is off where bit s of the column's number is set.
    """
    alone = [2**slot for slot in range(accuracy.shape[1].bit_length() - 1)]
    return accuracy[:, :1] - accuracy[:, alone]


def shapley_values(accuracy: Tensor) -> Tensor:
    """[N, S]: each seed's share of what all of them add, averaged over the orders in which they might come (Shapley 1953).

    They add up to the accuracy with all seeds less the accuracy without any.

    Args:
        accuracy: [N, 2^S], as above.
    """
    slots = accuracy.shape[1].bit_length() - 1
    weights = torch.zeros(2**slots, slots, dtype=torch.float64)
    for subset in range(2**slots):  # a bit that is set is a seed that is off
        on = slots - subset.bit_count()
        for slot in range(slots):
            others = on - (not subset >> slot & 1)
            share = factorial(others) * factorial(slots - 1 - others) / factorial(slots)
            weights[subset, slot] = -share if subset >> slot & 1 else share
    return (accuracy.double() @ weights.to(accuracy.device)).float()
