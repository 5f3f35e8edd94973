"""Actions and action distributions of a Stable-Baselines3 policy, by head.

`ActionHeads.capture` is called between the trainer's own steps, so its speed matters. It returns references to as few tensors as
possible, and `joined` turns many captures into columns together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.distributions import DiagGaussianDistribution
from torch import Tensor

from esper_telemetry.adapters.columns import (
    HeadColumns,
    Join,
    chosen_log_probs,
    head_actions,
    head_columns,
    head_names,
    join_columns,
)

SQUASH_BOUND = math.atanh(0.99)
"""Size before the squash from which a squashed action counts as at its bound: 99 % of the way."""

MAX_CAPTURES = 16
"""Captures that are joined together. References to a few tensors of every call of an update would trigger Python's garbage
collector. Its full collection takes 0.2 s in a process that has loaded torch, more than all of telemetry's other work.
"""


def last_distribution(policy: Any) -> Any:
    """The torch distribution, or the list of them, that `policy` sampled from or evaluated last; it makes new ones for every call."""
    return getattr(policy.action_dist, "distributions", None) or policy.action_dist.distribution


class ActionHeads:
    """The parts of an action under the bundled trainer's names.

    Args:
        space: of actions: Discrete, MultiDiscrete, MultiBinary or Box.
        squash: a Box's actions go through a tanh.

    Attributes:
        names: of the heads.
        continuous: there is one head, and its actions are real numbers.
        single_choice: there is one head, and its actions are choices.
    """

    def __init__(self, space: spaces.Space[Any], *, squash: bool = False) -> None:
        self._space, self._squash = space, squash
        self.continuous = isinstance(space, spaces.Box)
        self.single_choice = isinstance(space, spaces.Discrete)
        several = isinstance(space, spaces.MultiDiscrete | spaces.MultiBinary)
        count = int(np.prod(space.shape)) if several and space.shape is not None else 1
        self.names = ("action_0",) if several and count == 1 else head_names(count)

    @property
    def kinds(self) -> dict[str, str]:
        """`categorical` or `continuous`, by head."""
        return dict.fromkeys(self.names, "continuous" if self.continuous else "categorical")

    def columns(self, distribution: Any) -> HeadColumns:
        """Columns of N rows, from what `last_distribution` returns."""
        parts: Sequence[Any] = (distribution,)
        if isinstance(distribution, list | tuple):
            parts = distribution
        elif isinstance(distribution, torch.distributions.Bernoulli):
            parts = distribution.logits.unbind(-1)
        return head_columns(dict(zip(self.names, parts, strict=True)))

    def actions(self, stored: Tensor) -> dict[str, Tensor]:
        """Per head [...] (categorical) or [..., D] (continuous, before a squash), from a buffer's [..., D]."""
        if self.continuous and self._squash:
            stored = torch.atanh(stored.clamp(-1 + 1e-6, 1 - 1e-6))
        return head_actions(stored, self.names, self.names if self.continuous else (), stored.shape[:-1])

    def bounds(self, device: torch.device) -> dict[str, Tensor]:
        """Per bounded Gaussian head [2, D]."""
        if not isinstance(self._space, spaces.Box):
            return {}
        low, high = self._space.low.ravel(), self._space.high.ravel()
        both = torch.tensor(np.stack([low, high]), dtype=torch.float32, device=device)
        if self._squash:
            both = torch.tensor([[-SQUASH_BOUND], [SQUASH_BOUND]], device=device).expand(2, len(low))
        return {self.names[0]: both} if bool(both.isfinite().any()) else {}

    def log_probs(self, columns: HeadColumns, actions: dict[str, Tensor]) -> dict[str, Tensor]:
        """Log-probabilities [...] of each categorical head; empty if there is only one head."""
        if len(self.names) < 2:
            return {}
        return {name: chosen_log_probs(columns.logits[name], actions[name]) for name in self.names}

    def score_counts(self, scores: int) -> list[int]:
        """Return the number of a layer's scores for each head; empty if the space does not define it."""
        heads = len(self.names)
        sizes = self._space.nvec.ravel().tolist() if isinstance(self._space, spaces.MultiDiscrete) else []
        return sizes if sum(sizes) == scores else [] if sizes or scores % heads else [scores // heads] * heads

    def capture(self, policy: Any) -> Any:
        """Return the inputs of `joined` from the distribution that the policy sampled from or evaluated last."""
        distribution = last_distribution(policy)
        if self.continuous:
            return distribution.mean.detach(), distribution.stddev.detach()
        if self.single_choice:
            return distribution.logits.detach(), getattr(distribution, "masks", None)
        return self.columns(distribution)

    def joined(self, captures: Sequence[Any], join: Join) -> HeadColumns:
        """Return the columns of several captures."""
        if not (self.continuous or self.single_choice):
            return join_columns(captures, join)
        (name,), (first, second) = self.names, zip(*captures, strict=True)
        if self.continuous:
            return HeadColumns(means={name: join(first)}, log_std={name: join(second).log()})
        masked = all(masks is not None for masks in second)
        return HeadColumns(logits={name: join(first)}, action_masks={name: join(second)} if masked else {})

    def summary(self, policy: Any, shape: tuple[int, int]) -> HeadColumns | None:
        """Columns of a rollout [T, B] for updates that are not sampled, from the policy that has collected it.

        None if only captures of its steps give them: several heads, masks, and a spread that depends on the state.
        """
        if self.single_choice and not hasattr(policy.action_dist, "apply_masking"):
            return HeadColumns()
        log_std = getattr(policy, "log_std", None)
        if type(policy.action_dist) is not DiagGaussianDistribution or not isinstance(log_std, Tensor):
            return None
        return HeadColumns(log_std={self.names[0]: log_std.detach().clone().expand(*shape, -1)})
