"""Contenders that work in turns of about a second, for machines whose speed changes from minute to minute.

Each contender is a process that runs during the whole measurement and waits between its turns. Two contenders' figures in the same turn,
seconds apart, give a ratio. On a shared machine, the median of many ratios is less noisy than a pair of whole runs.
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
"""Pause after a turn, so that a contender's worker and sink processes finish and do not slow the next one."""

Figures = Mapping[str, float]


class Turns:
    """The contender's side of the protocol: a line on stdin begins a turn, a line of JSON on stdout ends it."""

    def __init__(self) -> None:
        self._begun: tuple[float, ...] = ()
        _say("ready")

    def next(self) -> bool:
        """End the current turn, report its figures and wait for the next one; return False if none follows."""
        if self._begun:
            _say(since(self._begun))
        asked = bool(sys.stdin.readline())
        self._begun = clocks()
        return asked


def serve(work: Callable[[], object]) -> None:
    """Do the work once in every turn."""
    own = Turns()
    while own.next():
        work()


def clocks() -> tuple[float, ...]:
    """Return seconds of wall time, and of processor time of this thread and of the process."""
    return time.perf_counter(), time.thread_time(), time.process_time()


def since(begun: Sequence[float]) -> Figures:
    """Return the seconds since `clocks` were read, by name."""
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
            list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._answer()

    def turn(self) -> Figures:
        """Let it work for a turn; return seconds of wall time, and of processor time of the thread and of the process."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        found = self._answer()
        time.sleep(PAUSE_SECONDS)
        return found

    def end(self) -> None:
        """Let it close its backends and exit."""
        self._process.communicate()

    def _answer(self) -> Figures:
        """Return its next line of JSON; skip lines that libraries print."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                found: Figures = json.loads(line)
            except ValueError:
                continue
            return found
        raise RuntimeError(f"{self._process.args!r} ended before its turn")


class Ratio(NamedTuple):
    """Median of many ratios, with their quartiles."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def in_turns(contenders: Mapping[str, Contender], turns: int, warm_up: int = 0) -> dict[str, list[Figures]]:
    """Return the figures of every turn by contender; the order rotates, and the turns of the warm-up are left out."""
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
    """Return the ratio of a figure to another contender's in the same turn."""
    each = [a[figure] / b[figure] for a, b in zip(mine, theirs, strict=True)]
    low, middle, high = statistics.quantiles(each, n=4, method="inclusive")
    return Ratio(middle, low, high)
