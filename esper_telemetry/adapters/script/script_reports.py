"""Numbers that a script itself prints, logs or writes: returns of its episodes, and scalars."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Any

from esper_telemetry.adapters.columns import FinishedEpisode
from esper_telemetry.core.metric import segment

REPORTED_RETURN = re.compile(
    r"(?P<label>return|rewards?|scores?|(?:\b|_|ep|avg|mean)ret)\b(?:[^\n;,|:=]{0,40}[:=]\s*|\s+)[\[(]?(?P<number>[-+]?\d+(?:\.\d*)?(?:e[-+]?\d+)?)",
    re.IGNORECASE,
)
"""A word for the return of episodes in a printed line, and the number after it."""

MAX_REPORTED = 4
"""Such words of one line."""

MAX_RECENT_RETURNS = 100
"""Returns of episodes with which reported ones are compared."""

SAME_RETURN = 0.02
"""Largest difference between a reported return and an environment's, as a share of the largest return."""

MAX_TAGS = 256
"""Different tags of a script's scalars that are copied."""

EPISODE_TAGS = {"charts/episodic_return", "episodic_return", "charts/episode_reward"}
"""Tags of single episodes' returns."""


class ReturnLog:
    """Returns of episodes that a script prints or writes itself. They are used if they differ from the environments' returns."""

    def __init__(self) -> None:
        self._reported: dict[str, list[float]] = {}
        self._own: deque[float] = deque(maxlen=MAX_RECENT_RETURNS)

    def add_text(self, text: str) -> None:
        """Record the first number after each word for a return in a printed line."""
        for match in islice(REPORTED_RETURN.finditer(text), MAX_REPORTED):
            self.add(match["label"], float(match["number"]))

    def add(self, label: str, number: float) -> None:
        """Record a number whose name shows that it is a return."""
        if math.isfinite(number) and len(self._reported.setdefault(label.lower(), [])) < MAX_RECENT_RETURNS:
            self._reported[label.lower()].append(number)

    def take(self, episodes: Sequence[FinishedEpisode]) -> list[FinishedEpisode]:
        """Return the episodes that ended in a rollout: these, unless the script reports other returns since the last call."""
        self._own += [one.returned for one in episodes]
        reported, self._reported = self._reported, {}
        sure = {label: numbers for label, numbers in reported.items() if "reward" not in label}
        numbers = max((sure if self._own else reported).values(), key=len, default=[])
        low, high = (min(self._own), max(self._own)) if self._own else (math.inf, -math.inf)
        margin = SAME_RETURN * max(abs(low), abs(high)) if self._own else 0.0
        if not numbers or all(low - margin <= one <= high + margin for one in numbers):
            return [*episodes]
        length = round(sum(one.length for one in episodes) / len(episodes)) if episodes else 1
        return [FinishedEpisode(one, length, 0) for one in numbers]


class ScalarLog:
    """Means of the values of each tag that a script has written to its SummaryWriter since the last record.

    Attributes:
        tags: that the script has written.
    """

    def __init__(self) -> None:
        self.tags: set[str] = set()
        self._sums: dict[str, tuple[float, int]] = {}

    def add(self, tag: Any, value: Any) -> None:
        """Record a scalar; anything except a finite number is ignored."""
        if not isinstance(tag, str) or (tag not in self.tags and len(self.tags) >= MAX_TAGS):
            return
        self.tags.add(tag)
        number = float(value.item() if hasattr(value, "item") else value)  # an array with one entry too
        if math.isfinite(number):
            total, count = self._sums.get(tag, (0.0, 0))
            self._sums[tag] = (total + number, count + 1)

    def take(self) -> dict[str, float]:
        """Return means by key, `script/losses/value_loss` for `losses/value_loss`, and reset them."""
        sums, self._sums = self._sums, {}
        return {
            "/".join(["script", *(segment(part) for part in tag.split("/") if part)]): total / count for tag, (total, count) in sums.items()
        }
