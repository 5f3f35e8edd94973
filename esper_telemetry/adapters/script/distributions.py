"""The distributions that a script acts and learns by, seen where it asks them for log-probabilities."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

MOST = 64
"""Distributions of one minibatch that are kept: more are no heads."""

LARGEST = 1 << 22
"""Numbers of one rollout that are kept at most."""


class ScriptHead(NamedTuple):
    """What a head says of its distribution: `logits` [N, A], or `mean` and `log_std` [N, D]."""

    logits: Tensor | None = None
    mean: Tensor | None = None
    log_std: Tensor | None = None

    @property
    def rows(self) -> int:
        """N."""
        first = self.logits if self.logits is not None else self.mean
        return 0 if first is None else len(first)


class Distributions:
    """Keeps what heads say while a rollout is collected and while it is learned from, told apart by whether gradients are recorded."""

    def __init__(self) -> None:
        self._acted: list[ScriptHead] = []
        self._learned: list[ScriptHead] = []
        self._size = 0

    def see(self, distribution: Any) -> None:
        """A distribution that is asked for a log-probability."""
        head = head_of(distribution)
        if head is None:
            return
        if torch.is_grad_enabled():
            self._learned = [*self._learned[-MOST:], head]
            return
        self._size += sum(part.numel() for part in head if part is not None)
        if self._size <= LARGEST:
            self._acted.append(head)

    def learned(self, rows: int) -> dict[str, ScriptHead]:
        """The heads of a minibatch of so many rows, seen since the last call; empty where they do not fit it."""
        found, self._learned = [head for head in self._learned if head.rows == rows], []
        return named(found)

    def acted(self, steps: int, size: int) -> dict[str, ScriptHead]:
        """The heads of a rollout, [T, B, ...] each, seen since the last call; empty where they do not fit it."""
        found, self._acted = self._acted, []
        whole, self._size = self._size <= LARGEST, 0
        at_once = [head for head in found if head.rows == steps * size != size]
        if whole and at_once and len(at_once) == len(found):
            return named([ScriptHead(*(_shaped(part, steps, size) for part in head)) for head in found])
        count = len(found) // steps if steps else 0
        if not whole or count == 0 or any(head.rows != size for head in found[: steps * count]):
            return {}
        series = [found[place : steps * count : count] for place in range(count)]
        return named([ScriptHead(*(_stacked(parts) for parts in zip(*heads, strict=True))) for heads in series])


def head_of(distribution: Any) -> ScriptHead | None:
    """What a categorical or normal distribution over rows says; None for others."""
    if hasattr(distribution, "logits"):
        logits = distribution.logits.detach()
        return ScriptHead(logits=_finite(_rows(logits))) if logits.dim() > 1 else None
    mean = distribution.loc.detach()
    return ScriptHead(mean=_rows(mean), log_std=_rows(distribution.scale.detach()).log()) if mean.dim() > 1 else None


def _rows(parameters: Tensor) -> Tensor:
    """[N, A] of [T, b, A] too."""
    return parameters.reshape(-1, parameters.shape[-1])


def _shaped(part: Tensor | None, steps: int, size: int) -> Tensor | None:
    """[T, B, A] of [T B, A]."""
    return None if part is None else part.reshape(steps, size, -1)


def _finite(logits: Tensor) -> Tensor:
    """Masked actions hold a large negative finite number."""
    return logits.clamp(min=torch.finfo(logits.dtype).min)


def named(heads: list[ScriptHead]) -> dict[str, ScriptHead]:
    """Heads by name: `action`, or with their places where there are several."""
    return {f"action_{place}" if len(heads) > 1 else "action": head for place, head in enumerate(heads)}


def _stacked(parts: tuple[Tensor | None, ...]) -> Tensor | None:
    known = [part for part in parts if part is not None]
    return (
        torch.stack(known) if known and len(known) == len(parts) and len({part.shape for part in known}) == 1 else None
    )
