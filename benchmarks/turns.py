"""Contenders that work in turns of a second or so, for machines that are faster in one minute than in the next.

Each is a process that lives all the time and waits while it is not its turn. What the first one and another did in the same turn, seconds
apart, gives a ratio; the median of many says what no pair of whole runs can say where other people's programs come and go.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

PAUSE_SECONDS = 0.3
"""After a turn: what processes beside a contender still have to do is not to slow the next one."""

Figures = Mapping[str, float]


class Turns:
    """A contender's side: its own process, in which it is somebody's turn whenever a line comes in."""

    def __init__(self) -> None:
        self._begun: tuple[float, ...] = ()
        _say("ready")

    def next(self) -> bool:
        """Ends the turn that is under way, and says what it took; waits for the next one, which there is unless this returns False."""
        if self._begun:
            _say(since(self._begun))
        asked = bool(sys.stdin.readline())
        self._begun = clocks()
        return asked


def serve(work: Callable[[], object]) -> None:
    """Works whenever it is its turn."""
    own = Turns()
    while own.next():
        work()


def clocks() -> tuple[float, ...]:
    """Seconds on the wall, and of the processor in this thread and in the process."""
    return time.perf_counter(), time.thread_time(), time.process_time()


def since(begun: Sequence[float]) -> Figures:
    """What has passed since `clocks` were read: a turn."""
    return {name: now - then for name, now, then in zip(("wall", "thread", "process"), clocks(), begun, strict=True)}


def _say(answer: object) -> None:
    print(json.dumps(answer), flush=True)


class Contender:
    """A process that has `Turns`.

    Args:
        command: of it; it inherits the environment.
    """

    def __init__(self, command: Sequence[object]) -> None:
        self._process = subprocess.Popen(
            list(map(str, command)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._answer()

    def turn(self) -> Figures:
        """Its next turn: seconds of wall time, and of processor time of the thread and of the process."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        found = self._answer()
        time.sleep(PAUSE_SECONDS)
        return found

    def end(self) -> None:
        """Lets it close what it has open."""
        self._process.communicate()

    def _answer(self) -> Figures:
        """What it says next, other people's lines aside."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                found: Figures = json.loads(line)
            except ValueError:
                continue
            return found
        raise RuntimeError(f"{self._process.args!r} ended before its turn")


class Ratio(NamedTuple):
    """Of many ratios the median, and between what the middle half of them lies."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def in_turns(contenders: Mapping[str, Contender], turns: int, warm_up: int = 0) -> dict[str, list[Figures]]:
    """What each did in every turn; whose turn it is first changes. The first turns warm up and do not count."""
    found: dict[str, list[Figures]] = {name: [] for name in contenders}
    order = list(contenders)
    for turn in range(warm_up + turns):
        order = order[1:] + order[:1]
        for name in order:
            figures = contenders[name].turn()
            if turn >= warm_up:
                found[name].append(figures)
    for contender in contenders.values():
        contender.end()
    return found


def ratio(mine: Sequence[Figures], theirs: Sequence[Figures], figure: str) -> Ratio:
    """Of a figure, over somebody else's in the same turn."""
    each = [a[figure] / b[figure] for a, b in zip(mine, theirs, strict=True)]
    low, middle, high = statistics.quantiles(each, n=4, method="inclusive")
    return Ratio(middle, low, high)
