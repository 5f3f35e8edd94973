"""Heads of the policy: each chooses one part of an action and computes the log-probability of its choice.

A head's linear layer computes its *scores*: logits of a categorical, means of a Gaussian. The rollout keeps the scores used for acting,
so the log-probability at collection belongs to the distribution that was really sampled.

A Gaussian action is stored as it was sampled. If it is beyond the bounds, the environment clips it, which the policy does not see. A
squashed action reaches the environment as the tanh of the sample, stretched to the bounds. The sample is stored because the inverse of a
tanh near 1 has lost its digits. Its probability is the probability of the tanh in (-1, 1), since the stretch cancels in the ratio. Its
entropy, also as a bonus, is the closed-form entropy of the Gaussian before the tanh. A bonus therefore widens σ even if actions
pile up at the bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper_telemetry.core.tensors import mask_logits
from esper_telemetry.ppo.config import LOG_STD_RANGE, PPOConfig
from esper_telemetry.ppo.environments.environment_protocol import ActionSpec, Array
from esper_telemetry.ppo.networks import orthogonal

LOG_TWO = math.log(2.0)


class Squash(nn.Module):
    """Map from real numbers into bounds: tanh, then an affine map onto [low, high].

    Raises:
        ValueError: a bound is not finite.
    """

    bounds: Tensor

    def __init__(self, part: str, spec: ActionSpec) -> None:
        super().__init__()
        low, high = (np.array(bounds, np.float64) for bounds in bounds_of(spec))
        if not np.isfinite([low, high]).all():
            raise ValueError(f"squash needs finite bounds, but the action part {part!r} has low={low.tolist()} and high={high.tolist()}")
        self._rows = np.stack([low, high, (low + high) / 2, (high - low) / 2]).astype(np.float32)
        self.register_buffer("bounds", torch.from_numpy(self._rows), persistent=False)

    def forward(self, draws: Tensor) -> Tensor:
        """Actions within the bounds [..., D], from samples [..., D]."""
        low, high, middle, reach = self.bounds
        actions: Tensor = (middle + reach * draws.tanh()).clamp(low, high)
        return actions

    def as_numpy(self, draws: Array) -> Array:
        """Return the actions in NumPy."""
        low, high, middle, reach = self._rows
        actions: Array = np.clip(middle + reach * np.tanh(draws), low, high)
        return actions

    def log_slope(self, draws: Tensor) -> Tensor:
        """Log derivative of the tanh, [...] summed over dimensions: log(1 - tanh²u) = 2 (log 2 - u - softplus(-2u)).

        This form does not underflow for large |u| (Haarnoja et al. 2018, arXiv:1812.05905, appendix C).
        """
        slope: Tensor = 2.0 * (LOG_TWO - draws - F.softplus(-2.0 * draws)).sum(-1)
        return slope


def bounds_of(spec: ActionSpec) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Lower and upper bounds of a continuous part, infinite if it is unbounded."""
    unbounded = (math.inf,) * spec.size
    return spec.low or tuple(-bound for bound in unbounded), spec.high or unbounded


Sampler: TypeAlias = Callable[[Array, Array], Array]


class PolicyHead(nn.Module):
    """A linear layer from trunk features to scores, and the distribution over actions given by the scores.

    Args:
        features: width of the trunk's output.
        size: number of choices or of dimensions.
        width: number of scores; `size` by default.

    Attributes:
        squash: maps chosen actions to the environment's; None if they are the same.
    """

    kind: str
    squash: Squash | None

    def __init__(self, features: int, size: int, *, width: int | None = None) -> None:
        super().__init__()
        self.size, self.width = size, width or size
        self.squash = None
        # with this gain the first actions hardly depend on the observation (Andrychowicz et al. 2021, arXiv:2006.05990)
        self.linear = orthogonal(nn.Linear(features, self.width), gain=0.01)

    def forward(self, features: Tensor) -> Tensor:
        """Scores [N, width] from trunk features [N, F]."""
        scores: Tensor = self.linear(features)
        return scores

    def normalize(self, scores: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the input of `log_prob` and `entropy`, from the scores [N, width] and the allowed choices [N, size]."""
        return scores

    def log_prob(self, normalized: Tensor, actions: Tensor) -> Tensor:
        """Log-probability [N] of actions [N] or [N, size]."""
        raise NotImplementedError

    def entropy(self, normalized: Tensor, relevance: Tensor | None = None) -> Tensor:
        """Entropy in nats, mean over the rows, 0-d; rows [N] in which the head is irrelevant add 0."""
        raise NotImplementedError

    def noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Noise [*shape, size] that `sampler` turns into actions."""
        raise NotImplementedError

    def sampler(self) -> Sampler:
        """A function of scores [B, width] and noise [B, size], in NumPy, that returns actions; valid until weights change."""
        raise NotImplementedError

    def sample(self, scores: Tensor, noise: Tensor) -> Tensor:
        """Actions [B] or [B, size] from scores [B, width] and noise [B, size], in torch."""
        raise NotImplementedError

    def action_buffer(self, shape: tuple[int, ...]) -> Array:
        """Return an array for `shape` actions."""
        raise NotImplementedError

    def description(self, scores: Tensor, mask: Tensor | None = None) -> Mapping[str, Tensor]:
        """Parameters of the distribution for events: `logits`, or `log_std` and `means`, detached."""
        raise NotImplementedError


class Categorical(PolicyHead):
    """One of `size` choices; scores are logits."""

    kind = "categorical"

    def normalize(self, scores: Tensor, mask: Tensor | None = None) -> Tensor:
        """Log-probabilities [N, size] of all choices; a large negative finite number for forbidden ones."""
        return torch.log_softmax(mask_logits(scores, mask), -1)

    def log_prob(self, normalized: Tensor, actions: Tensor) -> Tensor:
        """Log-probability [N] of actions [N]; half the autograd nodes of a gather."""
        return -F.nll_loss(normalized, actions, reduction="none")

    def entropy(self, normalized: Tensor, relevance: Tensor | None = None) -> Tensor:
        """Mean over rows of the sum of -p log p, as one dot product; a forced choice has 1 log 1 = 0."""
        probabilities = normalized.exp()
        if relevance is not None:
            probabilities = probabilities * relevance.unsqueeze(-1)
        return torch.dot(probabilities.flatten(), normalized.flatten()) / -len(normalized)

    def noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Gumbel noise: the largest score plus noise is a sample (Maddison et al. 2014)."""
        return torch.empty(*shape, self.size).exponential_(generator=generator).log_().neg_()

    def sampler(self) -> Sampler:
        """The index of the largest sum."""
        return lambda scores, noise: (scores + noise).argmax(-1)

    def sample(self, scores: Tensor, noise: Tensor) -> Tensor:
        """The index of the largest sum."""
        return (scores + noise).argmax(-1)

    def action_buffer(self, shape: tuple[int, ...]) -> Array:
        """Indices."""
        return np.zeros(shape, np.int64)

    def description(self, scores: Tensor, mask: Tensor | None = None) -> Mapping[str, Tensor]:
        """The logits [N, size]."""
        return {"logits": mask_logits(scores.detach(), mask)}


HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)
NEAR_BOUND = math.atanh(0.99)
"""A squashed action never reaches its bounds; from 99 % of the way on it is considered to be there."""


class Gaussian(PolicyHead):
    """`size` independent real numbers; scores are means, and the standard deviation does not depend on the state.

    If it is squashed, its log-probability is the log-probability of tanh(u) in (-1, 1). Its entropy is always the Gaussian's, before
    any squash, because the entropy of a squashed Gaussian is not available in closed form.

    Args:
        features: width of the input.
        spec: specification of the part, with its bounds.
        log_std: initial log standard deviation.
        squash: how to keep actions within bounds; None leaves this to the environment.

    Attributes:
        bounds: [2, D], lower and upper: stored actions beyond these are considered to be at the bounds; None without bounds.
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
        """Return the entropy, which depends only on the standard deviation."""
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
    """A Gaussian with a standard deviation for every state; scores are means, then log standard deviations, [N, 2 size]."""

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


def make_head(part: str, spec: ActionSpec, features: int, config: PPOConfig) -> PolicyHead:
    """Return the head for one part of an action; raise ValueError for a continuous one that cannot be squashed."""
    if spec.kind == "categorical":
        return Categorical(features, spec.size)
    kind = StateDependentGaussian if config.state_dependent_std else Gaussian
    return kind(features, spec, config.log_std, Squash(part, spec) if config.squash else None)
