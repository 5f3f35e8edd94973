"""Which updates are looked at closely, so that telemetry stays within its share of the wall time.

What is free runs in every update. What costs a pass over gradients or the optimizer's state is done in every k-th: k is as small as the
budget allows, by what sampled and other updates have cost so far. A part of the budget is for close looks alone: a trainer that has to be
asked in every minibatch uses all of it, and is watched closely all the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from esper_telemetry.core.record import Level

BUDGET = 0.02
"""Share of the wall time that telemetry may take on the training thread."""

FIRST = 8
"""Every how many updates, until the costs are known."""

MOST = 64
"""At least one update in this many is looked at, whatever it costs."""

UNSEEN = 2.0
"""Telemetry takes about this many times what its clock sees of an update that is not looked at closely: the trainer builds events, and
finds its caches colder (`docs/architecture.md`)."""

CLOSE_SHARE = 0.25
"""Of the budget, for close looks at least: what telemetry costs in every update may have used all of it."""

WEIGHT = 0.1
"""Of the latest update in the averages."""


class Average:
    """An exponentially weighted average without the bias of its start."""

    def __init__(self) -> None:
        self.count = 0
        self._total = self._weight = 0.0

    def add(self, value: float) -> None:
        """Takes the next value."""
        self.count += 1
        self._total += WEIGHT * (value - self._total)
        self._weight += WEIGHT * (1.0 - self._weight)

    @property
    def value(self) -> float:
        """The average; 0 of nothing."""
        return self._total / self._weight if self.count else 0.0


@dataclass(slots=True)
class Sampling:
    """Decides update by update.

    Attributes:
        level: DEBUG looks at every update, NORMAL at every k-th, MINIMAL at none.
        budget: share of the wall time, over 0 and at most 1.
        every: k.
        proposed: what k had better be, by the costs so far; `adopt` makes it so, at the same update on all ranks.

    Raises:
        ValueError: for a budget outside of that range.
    """

    level: Level
    budget: float = BUDGET
    every: int = FIRST
    proposed: int = FIRST
    _updates: int = 0
    _looked: int = 0
    _sampled: bool = False
    _raised: bool = False
    _plain: Average = field(default_factory=Average)
    _close: Average = field(default_factory=Average)
    _elapsed: Average = field(default_factory=Average)

    def __post_init__(self) -> None:
        if not 0 < self.budget <= 1:
            raise ValueError(f"budget must be a share of the wall time over 0 and at most 1, got {self.budget}")
        if self.level is Level.DEBUG:
            self.every = self.proposed = 1

    def begin(self, *, raised: bool = False) -> bool:
        """Whether the update that begins now is looked at closely; call it once per update.

        Args:
            raised: whether an alarm has raised its level, so that it is, whatever it costs.
        """
        self._updates += 1
        self._raised = raised
        due = not self._looked or self._updates >= self._looked + self.every
        self._sampled = self.level >= Level.NORMAL and due
        if self._sampled:
            self._looked = self._updates
        return self._sampled or raised

    @property
    def period(self) -> int | None:
        """Every how many updates one is looked at closely; None where none is."""
        return self.every if self.level >= Level.NORMAL else None

    def state(self) -> list[int]:
        """Where it stands, to go into a checkpoint; costs are measured anew."""
        return [self._updates, self._looked, self.every]

    def restore(self, state: list[int]) -> None:
        """Continues from `state()`."""
        self._updates, self._looked, self.every = state
        self.proposed = self.every

    def adopt(self, every: int) -> None:
        """Sets k, counted from the update that was looked at last."""
        self.every = every

    def learn(self, seconds: float, elapsed: float) -> None:
        """Takes what telemetry cost since the last call, and how much time has passed; the first update, which warms up, does not count.

        Args:
            seconds: on the training thread.
            elapsed: of wall time.
        """
        if self._updates < 2 or self._raised:
            return
        (self._close if self._sampled else self._plain).add(seconds)
        self._elapsed.add(elapsed)
        if self.level is Level.NORMAL and self._close.count and self._plain.count:
            self.proposed = self._affordable()

    def _affordable(self) -> int:
        """The smallest power of two that keeps the average cost within the budget, or close looks within their share of it."""
        budget = self.budget * self._elapsed.value
        left = budget - UNSEEN * self._plain.value
        extra = self._close.value - self._plain.value
        if extra <= 0:
            return 1 if left >= 0 else FIRST
        room = max(left, CLOSE_SHARE * budget)
        return min(MOST, 1 << max(0, math.ceil(math.log2(extra / room))))
