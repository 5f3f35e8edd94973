"""Plain numbers that join the next record, checked at next to no cost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from esper_telemetry.record import check_key

MOST_KEYS: Final = 100_000
"""How many keys are remembered as checked; who logs more of them has made them up anew for every record."""


class Logged:
    """Numbers by key since the last `take`.

    A training loop logs the same keys again and again. Those that were checked are not checked again, and a call of which
    nothing is new and all numbers are finite takes no Python per number.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, float] = {}
        self._checked: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._numbers)

    def add(self, values: Mapping[str, float]) -> None:
        """Adds numbers; non-finite ones are counted under `<key>_nonfinite`.

        Raises:
            ValueError: for a key that not every backend accepts.
        """
        if {*map(type, values.values())} != {float}:
            values = dict(zip(values, map(float, values.values()), strict=True))
        if self._checked.issuperset(values) and math.isfinite(sum(values.values())):
            self._numbers.update(values)
            return
        for key, number in values.items():
            self._add(key, number)

    def take(self) -> dict[str, float]:
        """All numbers so far, which are forgotten here."""
        numbers, self._numbers = self._numbers, {}
        return numbers

    def _add(self, key: str, number: float) -> None:
        """One number, whatever it is."""
        if math.isfinite(number):
            self._numbers[self._legal(key)] = number
        else:
            counted = self._legal(f"{key}_nonfinite")
            self._numbers[counted] = self._numbers.get(counted, 0.0) + 1

    def _legal(self, key: str) -> str:
        if key not in self._checked:
            check_key(key)
            if len(self._checked) >= MOST_KEYS:
                self._checked.clear()
            self._checked.add(key)
        return key
