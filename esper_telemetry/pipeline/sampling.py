"""Choice of the updates that are sampled, so that telemetry stays within its share of the wall time.

Metrics of the cost class "free" are measured in every update. Those that cost a pass over gradients or over the optimizer's state are
measured in every k-th, their hooks unregistered in between. k is the smallest power of two that the budget allows, by the cost of sampled
and other updates so far. A part of the budget is for samples alone: telemetry of a trainer that must be asked in every minibatch
uses all of it, and still samples.

A worker that falls behind makes samples rarer too, at DEBUG as well: k doubles with every update until the worker keeps up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from esper_telemetry.core.record import Level

BUDGET = 0.02
"""Share of the wall time that telemetry may take on the training thread."""

INITIAL_PERIOD = 8
"""Every how many updates one is sampled until the costs are known: the first update warms up, and samples of a fast run are costly."""

MAX_PERIOD = 64
"""At least one update in this many is sampled, whatever it costs."""

EARLY_MAX_PERIOD = 16
"""The same in the first updates: a short script would be over before a second look. It grows to `MAX_PERIOD` with the updates so far."""

EARLY_SHARE = 4
"""The updates so far over the longest period, from there on."""

UNCLOCKED_FACTOR = 2.0
"""An update that is not sampled costs the trainer about this many times what telemetry's clock measures: the trainer builds events, and
finds its caches colder."""

MIN_SAMPLES_SHARE = 0.25
"""Share of the budget that is for samples: what telemetry costs in every update may have used all of it."""

AVERAGE_WEIGHT = 0.1
"""Weight of the latest update in the averages."""


class Average:
    """An exponentially weighted average without the bias of its start."""

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
        budget: share of the wall time, over 0 and at most 1.
        every: k.
        proposed: the k that the costs so far allow; `adopt` sets it, at the same update on all ranks.
        late_factor: times that k is larger because the worker is behind.

    Raises:
        ValueError: for a budget outside of that range.
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
            raise ValueError(f"budget must be a share of the wall time over 0 and at most 1, got {self.budget}")
        if self.level is Level.DEBUG:
            self.every = self.proposed = 1

    def begin(self, *, raised: bool = False) -> bool:
        """Return whether the update that begins now is sampled; call it once per update.

        Args:
            raised: whether an alarm has raised its level; then it is sampled at any cost, unless the worker is behind.
        """
        raised = raised and not self.is_late
        self._sampled, self._escalated = self.due, raised
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
        """True where the update that begins next is sampled; its period may still change until then."""
        return self.level >= Level.NORMAL and (
            not self._last_sample or self._updates + 1 >= self._last_sample + self.every
        )

    @property
    def period(self) -> int | None:
        """Every how many updates one is sampled; None where none is."""
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
            every: k by the costs so far.
            late: whether the worker is behind.
        """
        self.late_factor = min(MAX_PERIOD, 2 * self.late_factor) if late else max(1, self.late_factor // 2)
        self.every = min(MAX_PERIOD, every * self.late_factor)

    def learn(self, seconds: float, elapsed: float) -> None:
        """Add the cost of telemetry since the last call; the first update, which warms up, does not count.

        Args:
            seconds: on the training thread.
            elapsed: of wall time.
        """
        if self._updates < 2 or self._escalated:
            return
        (self._sampled_cost if self._sampled else self._usual_cost).add(seconds)
        self._elapsed.add(elapsed)
        if self.level is Level.NORMAL and self._sampled_cost.count and self._usual_cost.count:
            self.proposed = self._affordable()

    def _affordable(self) -> int:
        """Return the smallest power of two that keeps the average cost within the budget, or samples within their share of it."""
        budget = self.budget * self._elapsed.value
        left = budget - UNCLOCKED_FACTOR * self._usual_cost.value
        extra = self._sampled_cost.value - self._usual_cost.value
        if extra <= 0:
            return 1 if left >= 0 else INITIAL_PERIOD
        room = max(left, MIN_SAMPLES_SHARE * budget)
        longest = min(MAX_PERIOD, max(EARLY_MAX_PERIOD, 1 << (self._updates // EARLY_SHARE).bit_length() >> 1))
        return min(longest, 1 << max(0, math.ceil(math.log2(extra / room))))
