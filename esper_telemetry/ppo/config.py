"""Settings of the bundled trainer; the defaults suit classic control on a CPU."""

from __future__ import annotations

import math
from dataclasses import dataclass

ACTIVATIONS = ("tanh", "relu")
LARGEST_SEED = 2**32 - 1
"""What every library that is seeded here accepts."""


@dataclass(frozen=True, slots=True)
class PPOConfig:
    """Settings of PPO (Schulman et al. 2017, arXiv:1707.06347); a wrong one raises ValueError.

    Attributes:
        num_steps: steps per environment and rollout.
        num_epochs: passes over each rollout.
        num_minibatches: optimizer steps per pass.
        learning_rate: of Adam, at the start.
        anneal_learning_rate: lowers it linearly to zero over the run.
        gamma: discount factor.
        gae_lambda: decay of the advantage estimator's trace (arXiv:1506.02438).
        clip: the ratio is clipped to 1 ± this.
        entropy_coef: weight of the entropy bonus.
        value_coef: weight of the value loss, 0.5 MSE.
        max_grad_norm: limit of the global gradient norm; None clips nothing.
        normalize_advantages: to mean 0 and (unbiased) standard deviation 1 over the rollout.
        hidden_sizes: widths of the hidden layers of actor and critic.
        activation: `tanh` or `relu`.
        shared_trunk: actor and critic share their hidden layers.
        log_std: initial log standard deviation of continuous actions.
        seed: of initial weights, sampling and shuffling, and of environments that were made without one.
    """

    num_steps: int = 128
    num_epochs: int = 8
    num_minibatches: int = 4
    learning_rate: float = 2.5e-3
    anneal_learning_rate: bool = True
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip: float = 0.2
    entropy_coef: float = 0.0
    value_coef: float = 0.5
    max_grad_norm: float | None = 0.5
    normalize_advantages: bool = True
    hidden_sizes: tuple[int, ...] = (64, 64)
    activation: str = "tanh"
    shared_trunk: bool = False
    log_std: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError, one sentence with the offending value, for the first wrong setting."""
        for name in ("num_steps", "num_epochs", "num_minibatches"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1", getattr(self, name))
        for name in ("learning_rate", "clip"):
            require(0 < getattr(self, name) < math.inf, f"{name} must be positive and finite", getattr(self, name))
        for name in ("gamma", "gae_lambda"):
            require(0 <= getattr(self, name) <= 1, f"{name} must be between 0 and 1", getattr(self, name))
        for name in ("entropy_coef", "value_coef"):
            require(0 <= getattr(self, name) < math.inf, f"{name} must be finite, 0 or more", getattr(self, name))
        require(
            self.max_grad_norm is None or self.max_grad_norm > 0, "max_grad_norm must be positive", self.max_grad_norm
        )
        require(len(self.hidden_sizes) > 0, "hidden_sizes must name at least one layer", self.hidden_sizes)
        require(all(size >= 1 for size in self.hidden_sizes), "hidden_sizes must be at least 1 each", self.hidden_sizes)
        require(self.activation in ACTIVATIONS, f"activation must be one of {', '.join(ACTIVATIONS)}", self.activation)
        require(0 <= self.seed <= LARGEST_SEED, f"seed must be between 0 and {LARGEST_SEED}", self.seed)

    def check_rollout(self, num_envs: int) -> None:
        """Raises ValueError, with counts that would do, unless the minibatches divide a rollout of `num_envs`."""
        rows = self.num_steps * num_envs
        if rows % self.num_minibatches:
            fitting = [count for count in range(1, rows + 1) if rows % count == 0]
            near = sorted(sorted(fitting, key=lambda count: abs(count - self.num_minibatches))[:4])
            raise ValueError(
                f"num_minibatches must divide the rollout of {num_envs} x {self.num_steps} = {rows} rows, "
                f"got {self.num_minibatches}; the nearest that do are {', '.join(map(str, near))}"
            )


def require(condition: bool, rule: str, value: object) -> None:
    """Raises ValueError with the rule and the value that breaks it."""
    if not condition:
        raise ValueError(f"{rule}, got {value!r}")
