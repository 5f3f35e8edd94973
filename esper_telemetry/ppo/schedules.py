"""What changes over a run: learning rate, entropy bonus, and when an update has gone far enough."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from esper_telemetry.ppo.config import PPOConfig
from esper_telemetry.ppo.ranks import ALONE, Ranks

STOP_FACTOR = 1.5  # of `target_kl`: Stable-Baselines3 and Spinning Up
RATE_FACTOR, KL_BAND, RATE_BOUNDS = 1.5, 2.0, (1e-5, 1e-2)  # RSL-RL's adaptive schedule


def learning_rate(config: PPOConfig, current: float, remaining: float) -> float:
    """The rate of the next update, where `remaining` of the run, 1 to 0, is left."""
    if config.desired_kl is not None:
        return current
    return config.learning_rate * remaining if config.anneal_learning_rate else config.learning_rate


def adapted_rate(rate: float, kl: float, desired: float) -> float:
    """The rate after an update whose last pass moved the policy by `kl`."""
    lowest, highest = RATE_BOUNDS
    if kl > KL_BAND * desired:
        return max(lowest, rate / RATE_FACTOR)
    return min(highest, rate * RATE_FACTOR) if 0 < kl < desired / KL_BAND else rate


def entropy_coef(config: PPOConfig, remaining: float) -> float:
    """The weight of the entropy bonus, where `remaining` of the run, 1 to 0, is left."""
    if config.final_entropy_coef is None:
        return config.entropy_coef
    return config.final_entropy_coef + (config.entropy_coef - config.final_entropy_coef) * remaining


def mean_kl(log_ratios: Sequence[Tensor], ranks: Ranks = ALONE) -> float:
    """Mean of exp(l) - 1 - l over all rows of a pass, of all ranks (Schulman's k3 estimator); waits for the device."""
    log_ratio = torch.cat(list(log_ratios))
    terms = (log_ratio.expm1() - log_ratio).double()
    total, count = ranks.sum(torch.stack([terms.sum(), terms.new_tensor(len(terms))])).tolist()
    return float(total / count)
