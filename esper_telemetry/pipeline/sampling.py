"""Choice of the updates that are sampled, so that telemetry stays within its fraction of the wall time.

Metrics of the cost class "free" are measured in every update. Metrics that need a pass over gradients or over the optimizer's state are
measured in every k-th update, and their hooks are removed in between. k is the smallest power of two that the budget allows, given the
cost of sampled and other updates so far. A part of the budget is only for samples, so that telemetry still samples if a trainer with
calls in every minibatch uses the whole budget.

If the worker falls behind, samples become rarer too, even at DEBUG: k doubles with every update until the worker keeps up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from esper_telemetry.core.record import Level

BUDGET = 0.02
"""Fraction of the wall time that telemetry may take on the training thread."""

INITIAL_PERIOD = 8
"""Period of samples until the costs are known: the first update warms up, and samples of a fast run are expensive."""

MAX_PERIOD = 64
"""Maximum period of samples, regardless of the cost."""

EARLY_MAX_PERIOD = 16
"""The maximum period in the first updates, since a short script would end before a second sample. It grows to `MAX_PERIOD`."""

EARLY_SHARE = 4
"""Number of updates so far, divided by the maximum period from there on."""

UNCLOCKED_FACTOR = 2.0
"""Cost of an unsampled update to the trainer, relative to the time on telemetry's clock: the trainer also builds events, and
finds its caches colder."""

MIN_SAMPLES_SHARE = 0.25
"""Fraction of the budget that is reserved for samples, even if telemetry's cost in every update has used all of it."""

AVERAGE_WEIGHT = 0.1
"""Weight of the latest update in the averages."""


class Average:
    """An exponentially weighted average, corrected for the bias of its start."""

    def __init__(self) -> None:
        self.count = 0
        self._total = self._weight = 0.0

    def add(self, value: float) -> None:
        """Add the next value."""
        self.count += 1
        self._total += AVERAGE_WEIGHT * (value - self._total)
        self._weight += AVERAGE_WEIGHT * (1.0 - self._weight)

    @property
    def value(self) -> float:
        """The average; 0 without values."""
        return self._total / self._weight if self.count else 0.0


@dataclass(slots=True)
class Sampling:
    """Decides update by update whether it is sampled.

    Attributes:
        level: DEBUG samples every update that its worker can follow, NORMAL every k-th, MINIMAL none.
        budget: fraction of the wall time, over 0 and at most 1.
        every: k.
        proposed: k for the costs so far; `adopt` sets it, at the same update on all ranks.
        late_factor: factor by which k is increased because the worker is behind.

    Raises:
        ValueError: for a budget outside that range.
    """

    level: Level
    budget: float = BUDGET
    every: int = INITIAL_PERIOD
    proposed: int = INITIAL_PERIOD
    late_factor: int = 1
    _updates: int = 0
    _last_sample: int = 0
    _sampled: bool = False
    _escalated: bool = False
    _usual_cost: Average = field(default_factory=Average)
    _sampled_cost: Average = field(default_factory=Average)
    _elapsed: Average = field(default_factory=Average)

    def __post_init__(self) -> None:
        if not 0 < self.budget <= 1:
            raise ValueError(f"budget must be a fraction of the wall time over 0 and at most 1, got {self.budget}")
        if self.level is Level.DEBUG:
            self.every = self.proposed = 1

    def begin(self, *, raised: bool = False, possible: bool = True) -> bool:
        """Return whether the update that begins now is sampled; call it once per update.

        Args:
            raised: whether an alarm has raised its level; it is then sampled regardless of the cost, unless the worker is behind.
            possible: whether the source shows the update.
        """
        raised = raised and possible and not self.is_late
        self._sampled, self._escalated = possible and self.due, raised
        self._updates += 1
        if self._sampled:
            self._last_sample = self._updates
        return self._sampled or raised

    @property
    def is_late(self) -> bool:
        """True while the worker is behind."""
        return self.late_factor > 1

    @property
    def due(self) -> bool:
        """True if the next update will be sampled; its period may still change until then."""
        return self.level >= Level.NORMAL and (not self._last_sample or self._updates + 1 >= self._last_sample + self.every)

    @property
    def period(self) -> int | None:
        """Period of sampled updates; None if no updates are sampled."""
        return self.every if self.level >= Level.NORMAL else None

    def state(self) -> list[int]:
        """Return the state for a checkpoint; costs are measured again."""
        return [self._updates, self._last_sample, self.every]

    def restore(self, state: list[int]) -> None:
        """Continue from `state()`."""
        self._updates, self._last_sample, self.every = state
        self.proposed = self.every

    def adopt(self, every: int, *, late: bool = False) -> None:
        """Set k, counted from the last sampled update.

        Args:
            every: k for the costs so far.
            late: whether the worker is behind.
        """
        self.late_factor = min(MAX_PERIOD, 2 * self.late_factor) if late else max(1, self.late_factor // 2)
        self.every = min(MAX_PERIOD, every * self.late_factor)

    def learn(self, seconds: float, elapsed: float) -> None:
        """Add the cost of telemetry since the last call; the first update, which warms up, is ignored.

        Args:
            seconds: time on the training thread.
            elapsed: wall time.
        """
        if self._updates < 2 or self._escalated:
            return
        (self._sampled_cost if self._sampled else self._usual_cost).add(seconds)
        self._elapsed.add(elapsed)
        if self.level is Level.NORMAL and self._sampled_cost.count and self._usual_cost.count:
            self.proposed = self._affordable()

    def _affordable(self) -> int:
        """Return the smallest power of two that keeps the average cost within the budget, or samples within their fraction of it."""
        budget = self.budget * self._elapsed.value
        left = budget - UNCLOCKED_FACTOR * self._usual_cost.value
        extra = self._sampled_cost.value - self._usual_cost.value
        if extra <= 0:
            return 1 if left >= 0 else INITIAL_PERIOD
        room = max(left, MIN_SAMPLES_SHARE * budget)
        longest = min(MAX_PERIOD, max(EARLY_MAX_PERIOD, 1 << (self._updates // EARLY_SHARE).bit_length() >> 1))
        return min(longest, 1 << max(0, math.ceil(math.log2(extra / room))))
