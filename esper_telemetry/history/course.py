"""Course of a noisy series: blocks of updates, the noise between neighbours, and rises that exceed it.

`rise` says whether a level is above the first one. It uses a Mann-Kendall test whose statistic is corrected for autocorrelation (Hamed and
Rao 1998). It also uses the height in units of the noise between neighbouring blocks, which detects steps and rises that are lost again. A
fall is a rise of the negated series.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Final, NamedTuple

import numpy as np

from esper_telemetry.core.metric import Array
from esper_telemetry.history.trend import mann_kendall, theil_sen

MAX_BLOCKS: Final = 128
FIRST_BLOCKS: Final = 16
"""Blocks at the beginning that are never merged: everything is compared with the first rollouts."""

FIRST_EPISODES: Final = 100
FIRST_SHARE: Final = 0.1
MIN_FIRST_EPISODES: Final = 8
"""Episodes of the level that a series begins with: a share of all episodes, within these bounds."""
LAST_SHARE: Final = 0.2
LAST_EPISODES: Final = 10
"""Share of the updates whose level a series ends with, and their minimum number of episodes."""
MIN_END_BLOCKS: Final = 3
END_EPISODES: Final = 100
"""Minimum number of blocks and of episodes at the end in which a rise can be lost."""
SHIFT_ERRORS: Final = 3.2
SCAN_ERRORS: Final = 4.5
SHIFT_STDS: Final = 0.5
"""Minimum difference of two levels that is not chance: standard errors of the difference (more for the best of many levels), and standard
deviations of the first episodes."""
MIN_PROGRESS: Final = 0.05
"""Share of the way from the first episodes to a solving return, below which a rise within their spread does not count."""
MIN_SHRINKAGE: Final = 0.1
MIN_JITTER_VALUES: Final = 8
MIN_CLEAR_BLOCKS: Final = 8
"""Number of blocks that must all differ from the first level by `SHIFT_STDS` for a clear direction, even if they vary strongly."""

MIN_TREND_SCORE: Final = 3.2
"""Corrected Mann-Kendall score against a straight trend; it is strict, because the residuals contain any curvature."""
MIN_COURSE_SCORE: Final = 4.3
MIN_COURSE_NOISE: Final = 5.0
"""The score against a monotone course of any shape, and the height in units of noise that is also needed."""
MIN_PERSISTENT_NOISE: Final = 4.0
MIN_HEIGHT_NOISE: Final = 9.0
"""Height in units of the noise, with and without the correction for its persistence."""

MAX_RETURN: Final = 1e100
MAX_EPISODES: Final = 1e15
"""Limits of the followed values, so that squares and their sums stay finite."""


class EpisodeBlock(NamedTuple):
    """Consecutive updates as one: their mean, episodes, first and last update, and the squared deviations of all episodes."""

    mean: float
    episodes: float
    begin: int
    end: int
    squares: float = 0.0

    def joined(self, other: EpisodeBlock) -> EpisodeBlock:
        """Return both as one, weighted by episodes."""
        episodes, difference = self.episodes + other.episodes, other.mean - self.mean
        mean = self.mean + difference * (other.episodes / episodes)
        squares = self.squares + other.squares + difference**2 * (self.episodes * other.episodes / episodes)
        return EpisodeBlock(mean, episodes, self.begin, other.end, squares)

    @property
    def variance(self) -> float:
        """Variance of the episodes, from the spreads that updates report."""
        return self.squares / max(1.0, self.episodes - 1)


@dataclass(slots=True)
class Blocks:
    """Means of one series in blocks of enough episodes. Beyond `MAX_BLOCKS`, the later ones are joined in pairs.

    Attributes:
        least: minimum number of episodes of a block.
        blocks: the complete blocks.
        open: the incomplete block; None before the next value.
        size: minimum number of updates of a block.
        settling: steps per environment that the first block needs.
        has_spread: whether updates report the spread of their episodes.
        early: updates before `MIN_CLEAR_BLOCKS` blocks are complete, with steps per environment so far.
    """

    least: float
    blocks: list[EpisodeBlock] = field(default_factory=list)
    open: EpisodeBlock | None = None
    size: int = 1
    count: int = 0
    settling: float = 0.0
    has_spread: bool = False
    early: list[tuple[float, EpisodeBlock]] = field(default_factory=list)

    def add(
        self, value: float, episodes: float, update: int, *, std: float | None = None, settling: float = 0.0, steps: float = math.inf
    ) -> None:
        """Add the value of an update.

        Args:
            value, episodes: mean and number of the update's episodes.
            update: its number.
            std: spread of its episodes; None if it is not reported.
            settling: steps per environment before which only short episodes can have ended.
            steps: steps per environment so far.
        """
        if not episodes > 0:
            return
        value, episodes = clamped(value), min(episodes, MAX_EPISODES)
        self.has_spread |= std is not None
        block = EpisodeBlock(value, episodes, update, update, clamped(std or 0.0) ** 2 * episodes)
        self.open = block if self.open is None else self.open.joined(block)
        self.count += 1
        if not self.blocks:
            self.settling = max(self.settling, settling)
        if len(self.blocks) < MIN_CLEAR_BLOCKS:
            self.early.append((steps, block))
        else:
            self.early.clear()
        if self.open.episodes < self.least or self.count < self.size or (not self.blocks and steps < self.settling):
            return
        self.blocks.append(self.open if self.blocks else self._settled())
        self.open, self.count = None, 0
        if len(self.blocks) >= MAX_BLOCKS:
            first, later = self.blocks[:FIRST_BLOCKS], self.blocks[FIRST_BLOCKS:]
            self.blocks = first + [a.joined(b) for a, b in zip(later[::2], later[1::2], strict=False)]
            self.blocks += later[len(later) // 2 * 2 :]
            self.size *= 2

    def _settled(self) -> EpisodeBlock:
        """Return the first block, without updates in the first half of the settling if there are enough others."""
        blocks = [block for steps, block in self.early if steps >= self.settling / 2]
        if sum(block.episodes for block in blocks) < self.least:
            blocks = [block for _, block in self.early]
        return reduce(EpisodeBlock.joined, blocks)

    def early_trend(self) -> tuple[int, float]:
        """Return the direction of the updates before there are `MIN_CLEAR_BLOCKS` blocks, 0 if it is not clear, and their first level."""
        means = np.array([block.mean for steps, block in self.early if steps >= self.settling / 2])
        if len(means) < MIN_CLEAR_BLOCKS:
            return 0, 0.0
        straight, course = trend_scores(means)
        is_clear = abs(straight) >= MIN_TREND_SCORE or abs(course) >= MIN_COURSE_SCORE - 8 / len(means)
        return (round(math.copysign(1, course)) if is_clear else 0), float(np.mean(means[:3]))

    @property
    def values(self) -> Array:
        """Means of the complete blocks."""
        return np.array([block.mean for block in self.blocks])

    @property
    def episodes(self) -> float:
        """Episodes of all updates."""
        return sum(block.episodes for block in self.blocks) + (self.open.episodes if self.open else 0.0)

    @property
    def constant(self) -> float | None:
        """The value that all updates share, up to rounding; None if they differ."""
        values = [block.mean for block in self.blocks + ([self.open] if self.open else [])]
        return values[0] if max(values) - min(values) <= 1e-9 * max(map(abs, values)) else None

    @property
    def first_level(self) -> EpisodeBlock | None:
        """The first blocks with enough episodes; None without blocks."""
        level: EpisodeBlock | None = None
        enough = min(FIRST_EPISODES, max(MIN_FIRST_EPISODES, FIRST_SHARE * self.episodes))
        for block in self.blocks:
            level = block if level is None else level.joined(block)
            if level.episodes >= enough:
                break
        return level

    @property
    def last_level(self) -> EpisodeBlock:
        """The last fifth of the updates, with enough episodes."""
        return self._fifth_before(len(self.blocks))

    def shift(self) -> int:
        """Return 1 if the last fifth of the updates is above the first level, -1 if it is below, 0 if neither is certain.

        The means of episodes are compared. Their standard error follows from their spread, or from the noise between blocks if that
        is larger, because the episodes of an update may be correlated.
        """
        first, last = self.first_level, self.last_level
        if first is None or last.begin <= first.end:
            return 0
        about = noise_about_course(self.values if last.mean > first.mean else -self.values)
        far = self._errors(about, first, last) >= SHIFT_ERRORS or self._is_clear(first, last)
        return 0 if not (far and _differ(first, last)) else 1 if last.mean > first.mean else -1

    def matters(self, threshold: float | None, *, fell: bool) -> bool:
        """Return whether the last fifth of the updates differs relevantly from the first level; a significant trend may be irrelevant.

        It differs by `SHIFT_STDS` standard deviations of the first episodes. With many episodes less is enough: `SHIFT_ERRORS`
        standard errors, if that is `MIN_PROGRESS` of the way to a return that solves the task.

        Args:
            threshold: the return that solves the task; None if it is not known.
            fell: whether any fifth may differ instead of the last one, because a rise that is lost ends where it began.
        """
        first, count = self.first_level, len(self.blocks)
        if first is None:
            return False
        progress = 0.0 if threshold is None else MIN_PROGRESS * abs(threshold - first.mean)

        def apart(level: EpisodeBlock) -> bool:
            difference = abs(level.mean - first.mean)
            many = difference >= SHIFT_ERRORS * max(_error((first, level)), 1e-9 * abs(first.mean))
            return _differ(first, level) or (many and difference >= progress)

        return any(apart(self._fifth_before(end)) for end in (range(1, count + 1) if fell else [count]))

    def lost(self, noise: Noise) -> bool:
        """True if a fifth of the updates was above the first level, and half of that rise is lost in the last fifth or episodes."""
        first, end = self.first_level, self.blocks[-MIN_END_BLOCKS:]
        for block in self.blocks[: -len(end)][::-1]:
            if sum(each.episodes for each in end) >= END_EPISODES:
                break
            end.insert(0, block)
        if first is None:
            return False
        lasts = [self.last_level, reduce(EpisodeBlock.joined, end)]
        lasts = [last for last in lasts if float(np.max(self.values)) + first.mean > 2 * last.mean]
        begin = max((last.begin for last in lasts), default=0)
        places = (place for place in range(2, len(self.blocks)) if self.blocks[place - 1].end < begin)
        return any(self._is_lost(noise, first, top, last) for top in map(self._fifth_before, places) for last in lasts)

    def _is_lost(self, noise: Noise, first: EpisodeBlock, top: EpisodeBlock, last: EpisodeBlock) -> bool:
        if not (first.end < top.begin and top.end < last.begin and top.mean > first.mean and _differ(first, top)):
            return False
        if top.mean - last.mean <= (top.mean - first.mean) / 2:
            return False
        if self._is_clear(first, top):
            return top.mean - last.mean >= SCAN_ERRORS * _error((top, last))
        risen = self._errors(noise.lasting, first, top) >= SCAN_ERRORS
        return risen and self._errors(noise.lasting, top, last) >= SHIFT_ERRORS

    def _fifth_before(self, end: int) -> EpisodeBlock:
        """Return the blocks before that position that cover a fifth of the updates and enough episodes, as one."""
        level, updates = self.blocks[end - 1], self.blocks[-1].end
        for block in self.blocks[: end - 1][::-1]:
            if level.episodes >= LAST_EPISODES and self.blocks[end - 1].end - block.end >= LAST_SHARE * updates:
                break
            level = block.joined(level)
        return level

    def _is_clear(self, first: EpisodeBlock, other: EpisodeBlock) -> bool:
        """Return True if all blocks after the first level are on the side of `other`.

        A return that rises fast, or rises and falls, varies through learning, which `noise_of` cannot distinguish from noise.
        """
        later, above = [block for block in self.blocks if block.begin > first.end], other.mean > first.mean
        apart = all(_differ(first, block) and (block.mean > first.mean) is above for block in later)
        return apart and len(later) >= MIN_CLEAR_BLOCKS

    def _errors(self, lasting: float, *levels: EpisodeBlock) -> float:
        """Return the difference of two levels in standard errors; `lasting` is the noise of blocks if the spread of episodes is unknown.

        If the spread is known, variation of the policies beyond it is real, and the differences of neighbours measure it.
        """
        per_block = sum(block.episodes for block in self.blocks) / len(self.blocks)
        scale = min(jitter(self.values), lasting) if self.has_spread else lasting
        error = _error(levels, scale**2 * per_block)
        first, second = levels
        return abs(second.mean - first.mean) / max(error, 1e-9 * abs(first.mean), 1e-300)


def clamped(value: float) -> float:
    """Return a return, or its spread, clamped to the limits of the followed values."""
    return min(max(value, -MAX_RETURN), MAX_RETURN)


def _error(levels: Sequence[EpisodeBlock], least: float = 0.0) -> float:
    """Return the standard error of a difference of levels, whose episodes have at least that variance."""
    return math.sqrt(sum(max(level.variance, least) / level.episodes for level in levels))


def _differ(first: EpisodeBlock, other: EpisodeBlock) -> bool:
    """Return whether two levels differ enough to matter."""
    return abs(other.mean - first.mean) > max(SHIFT_STDS * math.sqrt(first.variance), 1e-9 * abs(first.mean))


class Noise(NamedTuple):
    """Standard deviation of a series about its course, and the correlation of neighbouring deviations."""

    scale: float
    persistence: float

    @property
    def lasting(self) -> float:
        """Standard deviation of lasting deviations, as of an autoregression with that persistence."""
        return self.scale / math.sqrt(1 - self.persistence)


class Rise(NamedTuple):
    """A rise: the index of its top, its height, and its evidence."""

    top: int
    height: float
    significant: bool


def noise_of(values: Array) -> Noise:
    """Return the noise of a series from the differences of neighbours, so that slow courses do not count.

    Differences of white noise have a lag-1 correlation of -0.5, differences of persistent noise a correlation near 0. Differences beyond
    three times the median are cut there, because a step is not noise. Values that stick out from both neighbours count fully.
    """
    steps = np.diff(values)
    steps = steps - np.mean(steps)
    cap = 3 * _median(np.abs(steps))
    steps = np.clip(steps, -cap, cap)
    squares = float(steps @ steps)
    correlation = float(steps[1:] @ steps[:-1]) / squares if squares > 0 else -0.5
    one, two, three = values[:-2], values[1:-1], values[2:]
    middle = np.maximum(np.minimum(one, two), np.minimum(np.maximum(one, two), three))
    spikes = math.sqrt(float(np.mean((values - np.concatenate([middle[:1], middle, middle[-1:]])) ** 2)))
    scale = max(math.sqrt(squares / len(steps) / 2), spikes)
    return Noise(scale, min(max(1 + 2 * correlation, 0.0), 0.97))


def jitter(values: Array) -> float:
    """Return the standard deviation of a series about its course, by the median of second differences, to exclude slopes and steps."""
    if len(values) < MIN_JITTER_VALUES:
        return 0.0
    return _median(np.abs(np.diff(values, 2))) / (0.6745 * math.sqrt(6))


def _median(values: Array) -> float:
    """Median, in a fifth of the time of `np.median` for series of this size."""
    ordered, middle = np.sort(values), len(values) // 2
    return float(ordered[middle] if len(values) % 2 else (ordered[middle - 1] + ordered[middle]) / 2)


def smoothed(values: Array, width: int) -> Array:
    """Return means over `width` neighbours, with whole windows at both ends."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    begins = np.clip(np.arange(len(values)) - width // 2, 0, len(values) - width)
    means: Array = (sums[begins + width] - sums[begins]) / width
    return means


def rise(values: Array, levels: Array, noise: Noise, width: int, scores: tuple[float, float]) -> Rise:
    """Return the rise of a series from its first `width` values to the highest of its `levels`, and whether it exceeds noise.

    The `scores` are the trend scores of the values; those of the negated values are the negated scores.
    """
    top = int(np.argmax(levels))
    height = float(levels[top] - np.mean(values[:width]))
    if height <= 0 or height <= 1e-9 * float(np.max(np.abs(values))):
        return Rise(top, max(height, 0.0), significant=False)
    straight, course = scores
    floor = 1e-9 * float(np.max(np.abs(values)))
    in_noise = height / max(noise.scale, floor)
    lasting = height / max(noise.lasting, floor)
    significant = (
        straight >= MIN_TREND_SCORE
        or (course >= MIN_COURSE_SCORE - 8 / len(values) and in_noise >= MIN_COURSE_NOISE)
        or lasting >= MIN_PERSISTENT_NOISE + 4 / math.sqrt(len(values))
        or in_noise >= MIN_HEIGHT_NOISE
    )
    return Rise(top, height, significant)


def trend_scores(values: Array) -> tuple[float, float]:
    """Return Mann-Kendall's standard score, corrected for the autocorrelation about a straight line and about a monotone course."""
    test = mann_kendall(values)
    if test.z is None:
        return 0.0, 0.0
    line = theil_sen(values) * np.arange(len(values))
    course = monotone(values) if test.s > 0 else -monotone(-values)
    return test.z * _shrinkage(values - line), test.z * _shrinkage(values - course)


def noise_about_course(values: Array) -> float:
    """Return the standard deviation of a series about its nearest non-decreasing course, larger if neighbours deviate together."""
    residuals = values - monotone(values)
    shrinkage = max(_shrinkage(residuals), MIN_SHRINKAGE)
    return float(np.std(residuals)) / shrinkage


def _shrinkage(residuals: Array) -> float:
    """Return the factor by which autocorrelated residuals shrink a standard score."""
    residuals = residuals - residuals.mean()
    squares, count = float(residuals @ residuals), len(residuals)
    if squares <= 0 or count < 6:
        return 1.0
    correlation = float(residuals[1:] @ residuals[:-1]) / squares
    correlation = min(max((correlation * count + 1) / (count - 4), 0.0), 0.97)  # without the bias of short series
    return math.sqrt((1 - correlation) / (1 + correlation))


def monotone(values: Array) -> Array:
    """Return the nearest non-decreasing series (pool adjacent violators)."""
    means, sizes = list[float](), list[int]()
    for value in values.tolist():
        means.append(value)
        sizes.append(1)
        while len(means) > 1 and means[-2] > means[-1]:
            size, mean = sizes.pop(), means.pop()
            total = sizes[-1] + size
            means[-1] += (mean - means[-1]) * size / total
            sizes[-1] = total
    return np.repeat(means, sizes)
