"""What is known of a way in which a run goes wrong."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AlarmType:
    """One way in which a run goes wrong.

    Attributes:
        type: its name, `family/what`.
        reads: keys or key templates that tell it.
        meaning: what has happened, in one sentence.
        action: what to try, the likeliest first.
        hard: the run is wrong for certain, however well it seems to learn.
    """

    type: str
    reads: tuple[str, ...]
    meaning: str
    action: str
    hard: bool = False
