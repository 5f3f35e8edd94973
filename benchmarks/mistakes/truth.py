"""Truth about a run, from its returns alone, by a rule that was fixed before any run was scored. It uses no code of the package.

Episodes are measured in the task itself, below all wrappers. *First* episodes ended in the first tenth of the steps; there are at least
`MIN_EPISODES`. *Last* episodes ended in the last fifth, *best* episodes in the best fifth that begins at a tenth of the steps.

- failed: the program ended with an exception;
- undecided: fewer than `3 * MIN_EPISODES` episodes;
- a fifth is above the first episodes if its mean exceeds their mean by `MIN_EFFECT` of their standard deviations and by `MIN_Z` standard
  errors;
- declining: the last fifth is below the first episodes by the same measure, or half of a rise is lost;
- learns: the last fifth is above the first episodes;
- flat: neither.

A program is harmful if most seeds are flat, declining or failed, and most seeds of its correct twin learn. Seeds that were not run do
not count, so one seed can decide.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from statistics import fmean, pstdev
from typing import Final

MIN_EPISODES: Final = 8
MIN_EFFECT: Final = 0.5
MIN_Z: Final = 3.0


@dataclass(frozen=True)
class Truth:
    """The course of a run.

    Attributes:
        kind: learns, flat, declining, failed, undecided, or missing.
        first, last: mean returns.
    """

    kind: str
    first: float = math.nan
    last: float = math.nan

    @property
    def good(self) -> bool | None:
        """True for a run that learns, False for one that does not, None if this is unknown."""
        return None if self.kind in ("undecided", "missing") else self.kind == "learns"

    @property
    def text(self) -> str:
        """`learns 21 -> 340`."""
        return self.kind if math.isnan(self.first) else f"{self.kind} {self.first:.4g} -> {self.last:.4g}"


def truth_of(results: Path, name: str, seed: int) -> Truth:
    """Return the truth about a long run."""
    directory = results / name / str(seed)
    if not (directory / "run.json").exists():
        return Truth("missing")
    if json.loads((directory / "run.json").read_text())["exit"]:
        return Truth("failed")
    path = directory / "returns.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    return judged([(int(step), float(total)) for step, total in map(str.split, lines)])


def judged(episodes: Sequence[tuple[int, float]]) -> Truth:
    """Return the truth by the steps at which episodes ended, and their returns."""
    if len(episodes) < 3 * MIN_EPISODES:
        return Truth("undecided")
    total = episodes[-1][0]

    def of(begin: float, end: float) -> list[float]:
        return [value for step, value in episodes if begin * total < step <= end * total]

    early = list(takewhile(lambda episode: episode[0] <= total / 10, episodes))
    first = [value for _, value in episodes[: max(len(early), MIN_EPISODES)]]
    fifths = [one for one in (of(tenth / 10, tenth / 10 + 0.2) for tenth in range(1, 9)) if len(one) > 1]
    last, best = fifths[-1], max(fifths, key=fmean)
    rise, best_rise = fmean(last) - fmean(first), fmean(best) - fmean(first)
    if above(first, best) and best_rise - rise > 0.5 * best_rise and above(last, best):
        kind = "declining"
    elif above(first, last):
        kind = "learns"
    else:
        kind = "declining" if above([-x for x in first], [-x for x in last]) else "flat"
    return Truth(kind, fmean(first), fmean(last))


def above(lower: Sequence[float], upper: Sequence[float]) -> bool:
    """True if the second mean is above the first, by effect size and standard errors."""
    difference = fmean(upper) - fmean(lower)
    error = math.sqrt(pstdev(lower) ** 2 / len(lower) + pstdev(upper) ** 2 / len(upper))
    return difference > 0 and difference >= MIN_EFFECT * pstdev(lower) and difference >= MIN_Z * error


def harm(results: Path, program: str, twin: str, seeds: Sequence[int]) -> bool | None:
    """True for a program that ruins the return, False for one that does not; None if too few seeds agree."""
    broken = majority([truth_of(results, program, seed).good for seed in seeds])
    learns = majority([truth_of(results, twin, seed).good for seed in seeds])
    if broken is None or learns is None:
        return None
    return learns and not broken


def majority(votes: Sequence[bool | None]) -> bool | None:
    """Return the vote of more than half of the seeds that have one."""
    yes, no = votes.count(True), votes.count(False)
    return None if yes == no else yes > no
