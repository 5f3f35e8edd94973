"""Heads that choose real numbers: diagonal Gaussians, as they are or squashed into the bounds of the action space.

What is stored, and what log-probabilities are of, is what was chosen. An action that lies beyond the bounds is cut to them
by the environment, without the policy's knowledge. A squashed one cannot: the environment gets the tanh of what was drawn,
stretched to the bounds, while the draw itself is stored, because a tanh near 1 has lost the digits that its inverse needs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from esper_telemetry.ppo.config import LOG_STD_RANGE
from esper_telemetry.ppo.environments.protocol import ActionSpec
from esper_telemetry.ppo.heads import Array, PolicyHead, Sampler
from esper_telemetry.ppo.squash import Squash, bounds_of

HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)
NEAR_BOUND = math.atanh(0.99)
"""A squashed action never reaches its bounds; from 99 % of the way it counts as if it did."""


class Gaussian(PolicyHead):
    """`size` real numbers, independent; scores are means, the standard deviation does not depend on the state.

    Squashed, its log-probability is that of tanh(u) in (-1, 1). Its entropy is always that of the Gaussian itself, before
    any squash: that of a squashed one has no closed form.

    Args:
        features: width of what it reads.
        spec: of the part, with its bounds.
        log_std: where the log standard deviation begins.
        squash: how to keep actions within bounds; None leaves this to the environment.

    Attributes:
        bounds: [2, D], lower and upper: from where an action, as it is stored, counts as at the bounds; None without any.
    """

    kind = "continuous"
    bounds: Tensor | None

    def __init__(self, features: int, spec: ActionSpec, log_std: float, squash: Squash | None = None) -> None:
        super().__init__(features, spec.size)
        self.log_std = nn.Parameter(torch.full((spec.size,), log_std))
        self._bound(spec, squash)

    def _bound(self, spec: ActionSpec, squash: Squash | None) -> None:
        self.squash = squash
        bounds = torch.tensor(bounds_of(spec))
        if squash is not None:
            bounds = torch.tensor([[-NEAR_BOUND], [NEAR_BOUND]]).expand(2, self.size).clone()
        self.register_buffer("bounds", bounds if bounds.isfinite().any() else None, persistent=False)

    def log_prob(self, normalized: Tensor, actions: Tensor) -> Tensor:
        """Log-probability [N] of actions [N, size], summed over dimensions."""
        z = (actions - normalized) * torch.exp(-self.log_std)
        log_prob = -0.5 * z.square().sum(-1) - (self.log_std.sum() + self.size * HALF_LOG_TWO_PI)
        return log_prob if self.squash is None else log_prob - self.squash.log_slope(actions)

    def entropy(self, normalized: Tensor, relevance: Tensor | None = None) -> Tensor:
        """It depends on the standard deviation alone."""
        entropy = self.log_std.sum() + self.size * (HALF_LOG_TWO_PI + 0.5)
        return entropy if relevance is None else entropy * relevance.to(entropy.dtype).mean()

    def noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Standard normal noise."""
        return torch.randn(*shape, self.size, generator=generator)

    def sampler(self) -> Sampler:
        """Mean plus standard deviation times noise."""
        std = self.log_std.detach().exp().cpu().numpy()
        return lambda scores, noise: scores + std * noise

    def sample(self, scores: Tensor, noise: Tensor) -> Tensor:
        """Mean plus standard deviation times noise."""
        return scores + self.log_std.detach().exp() * noise

    def action_buffer(self, shape: tuple[int, ...]) -> Array:
        """Vectors."""
        return np.zeros((*shape, self.size), np.float32)

    def description(self, scores: Tensor, mask: Tensor | None = None) -> Mapping[str, Tensor]:
        """The log standard deviation [size] and the means [N, size]."""
        return {"log_std": self.log_std.detach().clone(), "means": scores.detach()}


class StateDependentGaussian(Gaussian):
    """The same with a standard deviation for every state; scores are means, then log standard deviations, [N, 2 size]."""

    def __init__(self, features: int, spec: ActionSpec, log_std: float, squash: Squash | None = None) -> None:
        PolicyHead.__init__(self, features, spec.size, width=2 * spec.size)
        nn.init.constant_(self.linear.bias[spec.size :], log_std)
        self._bound(spec, squash)

    def split(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Means and log standard deviations [..., size]."""
        means, log_std = scores.split(self.size, -1)
        return means, log_std.clamp(*LOG_STD_RANGE)

    def log_prob(self, normalized: Tensor, actions: Tensor) -> Tensor:
        """Log-probability [N] of actions [N, size], summed over dimensions."""
        means, log_std = self.split(normalized)
        z = (actions - means) * torch.exp(-log_std)
        log_prob = -(0.5 * z.square() + log_std).sum(-1) - self.size * HALF_LOG_TWO_PI
        return log_prob if self.squash is None else log_prob - self.squash.log_slope(actions)

    def entropy(self, normalized: Tensor, relevance: Tensor | None = None) -> Tensor:
        """Mean over the rows."""
        rows = self.split(normalized)[1].sum(-1) + self.size * (HALF_LOG_TWO_PI + 0.5)
        return rows.mean() if relevance is None else torch.where(relevance, rows, 0.0).mean()

    def sampler(self) -> Sampler:
        """Mean plus standard deviation times noise."""

        def sample(scores: Array, noise: Array) -> Array:
            log_std = np.clip(scores[:, self.size :], *LOG_STD_RANGE)
            actions: Array = scores[:, : self.size] + np.exp(log_std) * noise
            return actions

        return sample

    def sample(self, scores: Tensor, noise: Tensor) -> Tensor:
        """Mean plus standard deviation times noise."""
        means, log_std = self.split(scores)
        return means + log_std.exp() * noise

    def description(self, scores: Tensor, mask: Tensor | None = None) -> Mapping[str, Tensor]:
        """The log standard deviations and the means, [N, size] both."""
        means, log_std = self.split(scores.detach())
        return {"log_std": log_std, "means": means}


def make_gaussian(
    part: str, spec: ActionSpec, features: int, log_std: float, *, state_dependent: bool, squashed: bool
) -> Gaussian:
    """The head of a continuous part; raises ValueError where it cannot be squashed."""
    kind = StateDependentGaussian if state_dependent else Gaussian
    return kind(features, spec, log_std, Squash(part, spec) if squashed else None)
