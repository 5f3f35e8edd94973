"""Whether a sink is called: it is while it works, not for a while after it failed, and then with one record to see."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Final

FIRST_RETRY_SECONDS: Final = 0.5
LONGEST_RETRY_SECONDS: Final = 60.0
LONGEST_RETRY_AT_END_SECONDS: Final = 2.0
"""Between attempts once no more lines come: somebody waits for the end."""
JITTER: Final = 0.25
"""Share by which a pause is shortened at random: a hundred runs whose server comes back must not all call at once."""


class Breaker:
    """The circuit breaker of one sink: closed while it works, open after a failure, half-open for one attempt after a pause.

    Args:
        failures: in a row, so far; the first pause follows from it.
        draw: gives a random number in [0, 1).
    """

    def __init__(self, failures: int = 0, *, draw: Callable[[], float] = random.random) -> None:
        self.failures = failures
        self._draw = draw
        self._until = time.monotonic() + self._delay(LONGEST_RETRY_SECONDS) if failures else 0.0

    @property
    def half_open(self) -> bool:
        """Whether the next call is a trial: as little as possible goes with it."""
        return self.failures > 0

    def pause(self) -> float:
        """Seconds until the next attempt; 0 or less where it may be made now."""
        return self._until - time.monotonic() if self.failures else 0.0

    def worked(self) -> None:
        """Closes: the sink took what it was given."""
        self.failures = 0

    def failed(self, *, at_end: bool = False) -> None:
        """Opens: for 0.5 s after the first failure, then for twice as long, up to a minute; `at_end` up to two seconds."""
        self.failures += 1
        longest = LONGEST_RETRY_AT_END_SECONDS if at_end else LONGEST_RETRY_SECONDS
        self._until = time.monotonic() + self._delay(longest)

    def hurry(self) -> None:
        """Makes the next attempt possible at once."""
        self._until = 0.0

    def _delay(self, longest: float) -> float:
        delay = min(longest, FIRST_RETRY_SECONDS * 2.0 ** min(self.failures - 1, 10))
        return delay * (1.0 - JITTER * self._draw())
