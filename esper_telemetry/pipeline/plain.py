"""Updates of which logged numbers are all there is, told in a hundred bytes besides these.

Between two updates of a trainer the processor's caches fill with something else, and then each type that a pickle must be told of costs
more than all the numbers. So an update is two rows of numbers, and what is seldom new stands in a pickle behind them.
"""

from __future__ import annotations

import math
import pickle
import struct
from typing import Final, TypeAlias

from esper_telemetry.core.packing import NO_VALUES
from esper_telemetry.core.record import Axes, Level
from esper_telemetry.pipeline.record import JournalOutput, Measured
from esper_telemetry.pipeline.window import Keys, Numbers

HEAD: Final = struct.Struct("=8q4d")
"""Number of the keys, bytes of the numbers, seq, update, env_step, gradient_step, level, metric_errors; wall_time, seconds, elapsed, and
cpu_seconds or NaN."""

MOST_KEYS: Final = 1024
"""Sets of keys that are named by a number; further ones are said each time."""

New: TypeAlias = tuple[tuple[str, ...] | None, JournalOutput | None]
"""Keys that were not said before, and a delivery that is not the last one."""


class Teller:
    """Puts updates into bytes."""

    def __init__(self) -> None:
        self._numbers: dict[Keys, int] = {}
        self._delivery: JournalOutput | None = None

    def tell(self, measured: Measured) -> bytes:
        """An update that is `plain`.

        Raises:
            struct.error: a count is no integer of 64 bits.
        """
        axes, (keys, row), delivery = measured.axes, measured.numbers, measured.delivery
        number = self._numbers.get(keys)
        head = HEAD.pack(
            *(-1 if number is None else number, len(row), measured.seq, axes.update, axes.env_step, axes.gradient_step),
            *(measured.level, measured.metric_errors, axes.wall_time, measured.seconds, measured.elapsed),
            math.nan if measured.cpu_seconds is None else measured.cpu_seconds,
        )
        if number is not None and delivery is self._delivery:
            return head + row
        return head + row + self._new(keys, delivery)

    def _new(self, keys: Keys, delivery: JournalOutput) -> bytes:
        """What the listener does not know yet, which it does from now on."""
        new: New = (None if keys in self._numbers else keys.names, None if delivery is self._delivery else delivery)
        if len(self._numbers) < MOST_KEYS:
            self._numbers.setdefault(keys, len(self._numbers))
        self._delivery = delivery
        return pickle.dumps(new, protocol=5)


class PlainListener:
    """Makes updates of these bytes again."""

    def __init__(self) -> None:
        self._keys: list[Keys] = []
        self._delivery = JournalOutput(0, 0)

    def hear(self, content: bytes) -> Measured:
        """The update that was told."""
        head = HEAD.unpack_from(content)
        number, size, seq, update, env_step, gradient_step, level, metric_errors = head[:8]
        wall_time, seconds, elapsed, cpu_seconds = head[8:]
        end = HEAD.size + size
        new: New = pickle.loads(content[end:]) if len(content) > end else (None, None)
        if new[1] is not None:
            self._delivery = new[1]
        keys = self._keys[number] if new[0] is None else self._learn(Keys(new[0]))
        axes = Axes(update, env_step, gradient_step, wall_time)
        return Measured(
            *(seq, axes, False, Level(level), NO_VALUES, (), seconds, elapsed, self._delivery),
            *(metric_errors, None if math.isnan(cpu_seconds) else cpu_seconds, ()),
            Numbers(keys, content[HEAD.size : end]),
        )

    def _learn(self, keys: Keys) -> Keys:
        if len(self._keys) < MOST_KEYS:
            self._keys.append(keys)
        return keys
