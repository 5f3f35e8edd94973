"""Contenders that take turns, timed call by call."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple


class Timed(NamedTuple):
    """Measurement of one contender.

    Attributes:
        microseconds: of processor time per call, the median over the rounds.
        ratio: over the first contender, the median over the rounds.
        rounds: ratio of each round.
    """

    microseconds: float
    ratio: float
    rounds: tuple[float, ...]


def take_turns(
    contenders: Mapping[str, Callable[[], object]], *, rounds: int, calls: int, prepare: Callable[[], object] = lambda: None
) -> dict[str, Timed]:
    """Run every contender `calls` times in every round, one after the other; the first one is the reference.

    The measure is the processor time of this thread, which other programs disturb less than wall time. A round's figure is the median of
    its calls.

    Args:
        contenders: by name.
        rounds: how many; a first one, which warms up, is dropped.
        calls: per round and contender.
        prepare: is called before every call, and not timed.
    """
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, contender in contenders.items():
            seconds = statistics.median(_seconds(contender, prepare) for _ in range(calls))
            if turn:
                found[name].append(1e6 * seconds)
    first = next(iter(found.values()))
    return {name: _timed(times, first) for name, times in found.items()}


def _timed(times: list[float], first: list[float]) -> Timed:
    ratios = tuple(mine / theirs for mine, theirs in zip(times, first, strict=True))
    return Timed(statistics.median(times), statistics.median(ratios), ratios)


def _seconds(contender: Callable[[], object], prepare: Callable[[], object]) -> float:
    prepare()
    collecting = gc.isenabled()
    gc.disable()
    start = time.thread_time()
    contender()
    seconds = time.thread_time() - start
    if collecting:
        gc.enable()
    return seconds
