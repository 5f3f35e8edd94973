"""What a backend holds of a run, read back from it, to be compared with the journal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from esper_telemetry.record import Record

Shown = Callable[[Record], Mapping[str, float]]
"""Gives, of a record, the numbers that the backend should hold, as precisely as it stores them; called once per record, in order."""


@dataclass(slots=True)
class Stored:
    """What a backend holds.

    Attributes:
        rows: by update, its numbers by key; a histogram is the sum of its counts.
        repeated: by key, how many numbers stand there more than once, for the same update.
        ended: whether the backend takes the run for ended; None where it does not say.
    """

    rows: dict[int, dict[str, float]] = field(default_factory=dict)
    repeated: Counter[str] = field(default_factory=Counter)
    ended: bool | None = None

    def add(self, update: int, key: str, value: float) -> None:
        """One number as the backend holds it; the first stands."""
        row = self.rows.setdefault(update, {})
        if key in row:
            self.repeated[key] += 1
        else:
            row[key] = value
