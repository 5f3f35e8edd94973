"""What a script writes to its own SummaryWriter, for the same record."""

from __future__ import annotations

import math
from typing import Any

from esper_telemetry.core.metric import segment

PREFIX = "script"
"""First segment of the keys."""

MOST = 256
"""Different tags that are mirrored."""

EPISODES = ("charts/episodic_return", "episodic_return", "charts/episode_reward")
"""Tags of single episodes' returns."""


def key_of(tag: str) -> str:
    """A tag as a key: `losses/value_loss` becomes `script/losses/value_loss`."""
    return "/".join([PREFIX, *(segment(part) for part in tag.split("/") if part)])


class Scalars:
    """Sums of the values of each tag since the last record; a tag that is written several times is reported by its mean.

    Attributes:
        tags: that the script has written.
    """

    def __init__(self) -> None:
        self.tags: set[str] = set()
        self._sums: dict[str, tuple[float, int]] = {}

    def see(self, tag: Any, value: Any) -> None:
        """A scalar is written; what is no finite number is passed over."""
        if not isinstance(tag, str) or (tag not in self.tags and len(self.tags) >= MOST):
            return
        self.tags.add(tag)
        number = float(value)
        if math.isfinite(number):
            total, count = self._sums.get(tag, (0.0, 0))
            self._sums[tag] = (total + number, count + 1)

    def take(self) -> dict[str, float]:
        """Values by key, and nothing is left."""
        found, self._sums = self._sums, {}
        return {key_of(tag): total / count for tag, (total, count) in found.items()}
