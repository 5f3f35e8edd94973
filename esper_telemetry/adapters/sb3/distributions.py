"""Actions and action distributions of a Stable-Baselines3 policy, by head.

A recorder is called between the trainer's own steps, where every line counts: `capture` returns references to as few tensors as possible,
and `join` turns many captures into columns at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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
"""A squashed action counts as at its bound from 99 % of the way, in units before the squash."""

MAX_CAPTURES = 16
"""Captures that are joined at once. References to a few tensors of every call of an update would wake Python's garbage collector, whose
full collection takes a fifth of a second in a process that has loaded torch, more than everything else that telemetry does."""


def last_distribution(policy: Any) -> Any:
    """The torch distribution, or the list of them, that `policy` sampled from or evaluated last; it makes new ones for every call."""
    return getattr(policy.action_dist, "distributions", None) or policy.action_dist.distribution


class ActionHeads:
    """The parts of an action under the names that the bundled trainer would give them.

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
        """Log-probabilities [...] of each categorical head, where there are several; empty otherwise."""
        if len(self.names) < 2:
            return {}
        return {name: chosen_log_probs(columns.logits[name], actions[name]) for name in self.names}

    def score_counts(self, scores: int) -> list[int]:
        """Return how many of a layer's scores each head has; empty where the space does not say."""
        heads = len(self.names)
        sizes = self._space.nvec.ravel().tolist() if isinstance(self._space, spaces.MultiDiscrete) else []
        return sizes if sum(sizes) == scores else [] if sizes or scores % heads else [scores // heads] * heads


class DistributionRecorder:
    """Keeps the distributions of a policy until their columns are needed, in as few tensors as its kind of distribution allows.

    Attributes:
        capture: returns what is needed of the distribution that a policy sampled from or evaluated last.
    """

    def __init__(self, heads: ActionHeads, policy: Any) -> None:
        self._heads, self._head = heads, heads.names[0]
        self.capture: Callable[[Any], Any] = lambda policy: heads.columns(last_distribution(policy))
        if heads.continuous:
            self.capture = _means_and_stds
        elif heads.single_choice:
            self.capture = _logits_and_masks if hasattr(policy.action_dist, "apply_masking") else _logits

    def summary(self, policy: Any, shape: tuple[int, int]) -> HeadColumns | None:
        """Columns of a rollout [T, B] that updates need which are not sampled, from the policy that has collected it.

        None where only captures of its steps give them: several heads, masks, and a spread that depends on the state.
        """
        if self.capture is _logits:
            return HeadColumns()
        log_std = getattr(policy, "log_std", None)
        if type(policy.action_dist) is not DiagGaussianDistribution or not isinstance(log_std, Tensor):
            return None
        return HeadColumns(log_std={self._head: log_std.detach().clone().expand(*shape, -1)})

    def join(self, captures: Sequence[Any], join: Join) -> HeadColumns:
        """Return the columns of several captures."""
        if not (self._heads.continuous or self._heads.single_choice):
            return join_columns(captures, join)
        if self.capture is _logits:
            return HeadColumns(logits={self._head: join(tuple(captures))})
        first, second = zip(*captures, strict=True)
        if self._heads.continuous:
            return HeadColumns(means={self._head: join(first)}, log_std={self._head: join(second).log()})
        masked = all(masks is not None for masks in second)
        return HeadColumns(logits={self._head: join(first)}, action_masks={self._head: join(second)} if masked else {})


def _means_and_stds(policy: Any) -> tuple[Tensor, Tensor]:
    distribution = policy.action_dist.distribution
    return distribution.mean.detach(), distribution.stddev.detach()


def _logits(policy: Any) -> Tensor:
    logits: Tensor = policy.action_dist.distribution.logits
    return logits.detach() if logits.requires_grad else logits


def _logits_and_masks(policy: Any) -> tuple[Tensor, Tensor | None]:
    distribution = policy.action_dist.distribution
    return distribution.logits.detach(), distribution.masks
