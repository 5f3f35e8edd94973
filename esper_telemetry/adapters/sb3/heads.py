"""What a policy's distribution says of each part of an action, in the terms of `events`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

NEAR_BOUND = math.atanh(0.99)
"""A squashed action counts as at its bound from 99 % of the way, in units before the squash."""


class Description(NamedTuple):
    """What the heads say of their distributions, by head; see `events.MinibatchEnd`."""

    logits: dict[str, Tensor]
    means: dict[str, Tensor]
    log_std: dict[str, Tensor]
    masks: dict[str, Tensor]


def drawn_from(policy: Any) -> Any:
    """What `policy` has drawn from, or evaluated, last: torch distributions, which it makes anew for every call."""
    return getattr(policy.action_dist, "distributions", None) or policy.action_dist.distribution


class Heads:
    """The parts of an action under the names that the bundled trainer would give them.

    Args:
        space: of actions: Discrete, MultiDiscrete, MultiBinary or Box.
        squash: whether a Box's actions go through a tanh.
    """

    def __init__(self, space: spaces.Space[Any], *, squash: bool = False) -> None:
        self._space, self._squash = space, squash
        self.names = self._names()

    @property
    def kinds(self) -> dict[str, str]:
        """`categorical` or `continuous`, by head."""
        return dict.fromkeys(self.names, "continuous" if isinstance(self._space, spaces.Box) else "categorical")

    @property
    def gaussian(self) -> bool:
        """Whether there is one head, and its actions are numbers."""
        return isinstance(self._space, spaces.Box)

    @property
    def single_choice(self) -> bool:
        """Whether there is one head, and its actions are choices."""
        return isinstance(self._space, spaces.Discrete)

    def describe(self, drawn: Any) -> Description:
        """Of N rows, from what `drawn_from` gives."""
        if isinstance(self._space, spaces.Box):
            (name,) = self.names
            return Description({}, {name: drawn.mean.detach()}, {name: drawn.stddev.detach().log()}, {})
        parts = self._parts(drawn)
        logits = {name: logits_of(part) for name, part in zip(self.names, parts, strict=True)}
        known = ((name, getattr(part, "masks", None)) for name, part in zip(self.names, parts, strict=True))
        return Description(logits, {}, {}, {name: masks for name, masks in known if masks is not None})

    def actions(self, stored: Tensor) -> dict[str, Tensor]:
        """Per head [...] (categorical) or [..., D] (continuous, before a squash), from a buffer's [..., D]."""
        if isinstance(self._space, spaces.Box):
            (name,) = self.names
            return {name: torch.atanh(stored.clamp(-1 + 1e-6, 1 - 1e-6)) if self._squash else stored}
        return {name: stored[..., index].long() for index, name in enumerate(self.names)}

    def bounds(self, device: torch.device) -> dict[str, Tensor]:
        """Per bounded Gaussian head [2, D]."""
        if not isinstance(self._space, spaces.Box):
            return {}
        low, high = self._space.low.ravel(), self._space.high.ravel()
        both = torch.tensor(np.stack([low, high]), dtype=torch.float32, device=device)
        if self._squash:
            both = torch.tensor([[-NEAR_BOUND], [NEAR_BOUND]], device=device).expand(2, len(low))
        return {self.names[0]: both} if bool(both.isfinite().any()) else {}

    def log_probs(self, logits: Mapping[str, Tensor], actions: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of each categorical head [...], where there are several; empty otherwise."""
        if len(self.names) < 2:
            return {}
        return {name: _chosen(logits[name], actions[name]) for name in self.names}

    def rows(self, scores: int) -> list[int]:
        """How many of so many scores each part of an action has; empty where that cannot be told."""
        parts = len(self.names)
        sizes = self._space.nvec.ravel().tolist() if isinstance(self._space, spaces.MultiDiscrete) else []
        return sizes if sum(sizes) == scores else [] if sizes or scores % parts else [scores // parts] * parts

    def _names(self) -> tuple[str, ...]:
        if isinstance(self._space, spaces.MultiDiscrete):
            return tuple(f"action_{index}" for index in range(self._space.nvec.size))
        if isinstance(self._space, spaces.MultiBinary):
            return tuple(f"action_{index}" for index in range(int(np.prod(self._space.shape))))
        return ("action",)

    def _parts(self, drawn: Any) -> Sequence[Any]:
        """One distribution per head."""
        if isinstance(drawn, (list, tuple)):
            return drawn
        return drawn.logits.unbind(-1) if isinstance(drawn, torch.distributions.Bernoulli) else (drawn,)


def logits_of(part: Any) -> Tensor:
    """[N, A], of a categorical distribution, or of the log-odds [N] of a bit."""
    if isinstance(part, Tensor):
        odds = part.detach()
        return torch.stack([torch.zeros_like(odds), odds], -1)
    logits: Tensor = part.logits
    return logits.detach()


def _chosen(logits: Tensor, actions: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, actions.unsqueeze(-1)).squeeze(-1)
