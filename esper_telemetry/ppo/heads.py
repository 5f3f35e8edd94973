"""Heads of the policy: each chooses one part of an action and knows the log-probability of what it chose.

A head's linear layer gives its *scores*: logits of a categorical, means of a Gaussian. The rollout keeps the scores
that were acted on, so the log-probability at collection belongs to the distribution that was really sampled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper_telemetry.ops import mask_logits

Array: TypeAlias = npt.NDArray[Any]
Sampler: TypeAlias = Callable[[Array, Array], Array]

HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)


class Head(nn.Module):
    """A linear layer from trunk features to scores, and the distribution over actions that the scores stand for."""

    kind: str

    def __init__(self, features: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.linear = orthogonal(nn.Linear(features, size), gain=0.01)

    def forward(self, features: Tensor) -> Tensor:
        """Scores [N, size] from trunk features [N, F]."""
        scores: Tensor = self.linear(features)
        return scores

    def normalize(self, scores: Tensor, mask: Tensor | None = None) -> Tensor:
        """What `log_prob` and `entropy` read, from the scores [N, size] and the choices allowed [N, size]."""
        return scores

    def log_prob(self, normalized: Tensor, actions: Tensor) -> Tensor:
        """Log-probability [N] of actions [N] or [N, size]."""
        raise NotImplementedError

    def entropy(self, normalized: Tensor, relevance: Tensor | None = None) -> Tensor:
        """Entropy in nats, mean over the rows, 0-d; rows [N] where the head is irrelevant have none."""
        raise NotImplementedError

    def noise(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Noise [*shape, size] that `sampler` turns into actions."""
        raise NotImplementedError

    def sampler(self) -> Sampler:
        """A function of scores and noise, NumPy [B, size], that returns actions; holds until weights change."""
        raise NotImplementedError

    def sample(self, scores: Tensor, noise: Tensor) -> Tensor:
        """The same in tensors."""
        raise NotImplementedError

    def action_buffer(self, shape: tuple[int, ...]) -> Array:
        """Room for actions, `shape` of them."""
        raise NotImplementedError

    def description(self, scores: Tensor, mask: Tensor | None = None) -> Mapping[str, Tensor]:
        """What events tell of the distribution: `logits`, or `log_std` and `means`, detached."""
        raise NotImplementedError


class Categorical(Head):
    """One of `size` choices; scores are logits."""

    kind = "categorical"

    def normalize(self, scores: Tensor, mask: Tensor | None = None) -> Tensor:
        """Log-probabilities [N, size] of all choices; a large negative finite number where one is forbidden."""
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
        return sample_categorical

    def sample(self, scores: Tensor, noise: Tensor) -> Tensor:
        """The index of the largest sum."""
        return (scores + noise).argmax(-1)

    def action_buffer(self, shape: tuple[int, ...]) -> Array:
        """Indices."""
        return np.zeros(shape, np.int64)

    def description(self, scores: Tensor, mask: Tensor | None = None) -> Mapping[str, Tensor]:
        """The logits [N, size]."""
        return {"logits": mask_logits(scores.detach(), mask)}


class Gaussian(Head):
    """`size` real numbers, independent; scores are means, the standard deviation does not depend on the state."""

    kind = "continuous"

    def __init__(self, features: int, size: int, log_std: float) -> None:
        super().__init__(features, size)
        self.log_std = nn.Parameter(torch.full((size,), log_std))

    def log_prob(self, normalized: Tensor, actions: Tensor) -> Tensor:
        """Log-probability [N] of actions [N, size], summed over dimensions."""
        z = (actions - normalized) * torch.exp(-self.log_std)
        return -0.5 * z.square().sum(-1) - (self.log_std.sum() + self.size * HALF_LOG_TWO_PI)

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


def sample_categorical(scores: Array, noise: Array) -> Array:
    """The index of the largest sum, [B]."""
    indices: Array = (scores + noise).argmax(-1)
    return indices


def orthogonal(linear: nn.Linear, gain: float) -> nn.Linear:
    """The layer with orthogonal weights of that gain and zero bias."""
    nn.init.orthogonal_(linear.weight, gain)
    nn.init.zeros_(linear.bias)
    return linear
