"""Plain numbers that join the next record, checked and handed on at next to no cost.

A training loop logs the same keys again and again. Keys that came together are checked once and become one object, which every later
update names instead of them; its numbers are a row of bytes beside that.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Mapping
from typing import Final, NamedTuple, SupportsFloat

import numpy as np

from esper_telemetry.conversion import as_number, shown
from esper_telemetry.record import check_key

MOST_KEYS: Final = 100_000
"""How many keys are remembered as checked; who logs more of them has made them up anew for every record."""


PLAIN: Final = (float, int, np.number)
"""What the sum of numbers is that can be packed as they are; that of tensors is one."""


class Keys:
    """Keys that come together, in their order; equal to nothing but itself.

    Attributes:
        names: [K].
        row: how their numbers are written as bytes.
    """

    __slots__ = ("names", "row")

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.row = struct.Struct(f"{len(names)}d")

    def __reduce__(self) -> tuple[type[Keys], tuple[tuple[str, ...]]]:
        return Keys, (self.names,)


class Numbers(NamedTuple):
    """Finite numbers of one update: their keys, [K], and 8 bytes for each."""

    keys: Keys
    row: bytes

    def by_key(self) -> dict[str, float]:
        """As they were logged."""
        return dict(zip(self.keys.names, self.keys.row.unpack(self.row), strict=True))


NO_NUMBERS: Final = Numbers(Keys(()), b"")


class Logged:
    """Numbers by key since the last `take`.

    A call with the keys of its like before the last `take`, and finite numbers, takes no Python per number.
    """

    def __init__(self) -> None:
        self._calls: list[Numbers] = []
        self._before: list[Numbers] = []
        self._nonfinite: Counter[str] = Counter()
        self._known: dict[tuple[str, ...], Keys] = {}
        self._checked: set[str] = set()
        self._remembered = 0

    def __bool__(self) -> bool:
        return bool(self._calls or self._nonfinite)

    def add(self, values: Mapping[str, SupportsFloat]) -> None:
        """Adds numbers; non-finite ones are counted under `<key>_nonfinite`.

        Raises:
            ValueError: for a key that not every backend accepts; then nothing is added.
            TypeError: for what is no mapping, and for a value that is not one number.
        """
        if not isinstance(values, Mapping):
            raise TypeError(f"log takes a mapping from keys to numbers, such as {{'my/key': 0.3}}, got {shown(values)}")
        names, numbers, keys = tuple(values), values.values(), self._expected
        try:
            total: object = sum(numbers)  # type: ignore[arg-type]  # where they cannot be added, they come one by one
            if keys is not None and keys.names == names and isinstance(total, PLAIN) and math.isfinite(total):
                self._calls.append(Numbers(keys, keys.row.pack(*numbers)))
                return
        except (TypeError, struct.error):
            pass  # something that is no number, or can be made one
        self._add_one_by_one(
            {key: number if type(number) is float else as_number(number, str(key)) for key, number in values.items()}
        )

    def take(self) -> Numbers:
        """All numbers so far, which are forgotten here; of a key that came twice the last."""
        calls, self._calls = self._calls, []
        self._before = calls
        if len(calls) == 1 and not self._nonfinite:
            return calls[0]
        values: dict[str, float] = {}
        for numbers in calls:
            values.update(numbers.by_key())
        values.update(self._nonfinite)
        self._nonfinite.clear()
        return self._numbers(values) if values else NO_NUMBERS

    @property
    def _expected(self) -> Keys | None:
        """Keys that the call in the place of the next one has brought before the last `take`."""
        place = len(self._calls)
        return self._before[place].keys if place < len(self._before) else None

    def _add_one_by_one(self, values: Mapping[str, float]) -> None:
        finite = {key: number for key, number in values.items() if math.isfinite(number)}
        nonfinite = [f"{key}_nonfinite" for key in values if key not in finite]
        self._check((*finite, *nonfinite))
        self._nonfinite.update(nonfinite)
        if finite:
            self._calls.append(self._numbers(finite))

    def _numbers(self, values: Mapping[str, float]) -> Numbers:
        names = tuple(values)
        keys = self._known.get(names) or self._learn(names)
        return Numbers(keys, keys.row.pack(*values.values()))

    def _learn(self, names: tuple[str, ...]) -> Keys:
        """Keys that have not come together before."""
        self._check(names)
        if self._remembered + len(names) > MOST_KEYS:
            self._known.clear()
            self._remembered = 0
        self._known[names] = keys = Keys(names)
        self._remembered += len(names)
        return keys

    def _check(self, names: tuple[str, ...]) -> None:
        for name in names:
            if name not in self._checked:
                check_key(name)
                if len(self._checked) >= MOST_KEYS:
                    self._checked.clear()
                self._checked.add(name)
