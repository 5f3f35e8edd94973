"""Heads of the policy: each chooses one part of an action and knows the log-probability of what it chose.

A head's linear layer gives its *scores*: logits of a categorical, means of a Gaussian (`ppo/gaussian.py`). The rollout keeps the scores
that were acted on, so the log-probability at collection belongs to the distribution that was really sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper_telemetry.core.tensors import mask_logits
from esper_telemetry.ppo.squash import Squash

Array: TypeAlias = npt.NDArray[Any]
Sampler: TypeAlias = Callable[[Array, Array], Array]
Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)


class PolicyHead(nn.Module):
    """A linear layer from trunk features to scores, and the distribution over actions that the scores stand for.

    Args:
        features: width of the trunk's output.
        size: number of choices or of dimensions.
        width: number of scores; `size` unless said otherwise.

    Attributes:
        squash: from what was chosen to what the environment takes; None where these are the same.
    """

    kind: str
    squash: Squash | None

    def __init__(self, features: int, size: int, *, width: int | None = None) -> None:
        super().__init__()
        self.size, self.width = size, width or size
        self.squash = None
        self.linear = orthogonal(nn.Linear(features, self.width), gain=0.01)

    def forward(self, features: Tensor) -> Tensor:
        """Scores [N, width] from trunk features [N, F]."""
        scores: Tensor = self.linear(features)
        return scores

    def normalize(self, scores: Tensor, mask: Tensor | None = None) -> Tensor:
        """What `log_prob` and `entropy` read, from the scores [N, width] and the choices allowed [N, size]."""
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
        """A function of scores [B, width] and noise [B, size], in NumPy, that returns actions; holds until weights change."""
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


class Categorical(PolicyHead):
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


def sample_categorical(scores: Array, noise: Array) -> Array:
    """The index of the largest sum, [B]."""
    indices: Array = (scores + noise).argmax(-1)
    return indices


def orthogonal(layer: Layer, gain: float) -> Layer:
    """The layer with orthogonal weights of that gain and zero bias."""
    nn.init.orthogonal_(layer.weight, gain)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer
