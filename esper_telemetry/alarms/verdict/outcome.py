"""Outcome of a run or of a part of it: solved, learning, converged, flat, declining, failed, or too short to tell.

Judged on the records alone, so a journal gives the verdict that the live run had. The series that decides is the mean return of the
episodes of an update; where a run has none, that of evaluations or the mean reward; where all returns are equal, success or length.

- failed: an exception ended the run, or it ended as failed or was killed; or numbers are not finite in each of its last `FAILED_RECORDS`
  records, and it has not learned;
- too short to tell: fewer than `MIN_EPISODES` episodes or `MIN_BLOCKS` blocks (`MIN_SPREAD_BLOCKS` where updates report the spread of their
  episodes); for a flat curve fewer than `MIN_FLAT_UPDATES` updates or `MIN_FLAT_EPISODES` episodes (`MIN_ENDED_UPDATES` and
  `MIN_ENDED_EPISODES` where the run has finished);
- solved: rose, has not declined, and a mean over `SOLVED_EPISODES` episodes has passed the environment's own threshold;
- converged: rose, and has kept to its last level for `STABLE_SHARE` of the run and `MIN_STABLE_BLOCKS` blocks;
- learning: rose above the first rollouts otherwise;
- declining: lost `LOST_SHARE` of what it had gained, or fell below the first rollouts without a rise;
- flat: neither rose above the first rollouts nor fell below them; where updates report the spread of their episodes, also where the level
  at the end does not differ enough from the first one (`Blocks.matters`).

A block is a group of updates with `BLOCK_EPISODES` episodes. `history.course` says when a level is above the first one, by blocks alone,
which is strict where few blocks rise slowly. `Blocks.shift` says so besides, by the first episodes and those of the last fifth.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from typing import Any, Final

import numpy as np

from esper_telemetry.alarms.verdict.return_course import STD
from esper_telemetry.core.messages import number
from esper_telemetry.core.record import Record, RunStatus, judgeable
from esper_telemetry.history.course import Array, Blocks, Noise, noise_of, rise, smoothed

NOT_REPORTED: Final = (
    "no returns are reported: observe esper_telemetry.metrics.episode_stats(returns, lengths) after a rollout"
)

OUTCOME: Final = "outcome"
"""Type of the journal's event."""

MIN_EPISODES: Final = 20
MIN_BLOCKS: Final = 8
MIN_SPREAD_BLOCKS: Final = 3
"""Blocks from which on the spread of their episodes tells a rise or a fall, where updates report it."""
MIN_FLAT_UPDATES: Final = 20
MIN_FLAT_EPISODES: Final = 40
MIN_ENDED_UPDATES: Final = 10
MIN_ENDED_EPISODES: Final = 100
"""The same for a run that has finished: nothing more can follow."""
MIN_FLAT_AVERAGED_EPISODES: Final = 300
"""A flat curve needs more than a rising one: learning may begin late, and means of the last hundred episodes hold on to the first ones."""
BLOCK_EPISODES: Final = 5
AVERAGED_BLOCK_EPISODES: Final = 25
"""Episodes of a block; more where the logged value is itself the mean of the last hundred."""
FIRST_LENGTHS: Final = 2.0
"""Lengths of an episode, in steps per environment, before which only short ones have ended, unless all are cut off at one length."""
LOST_SHARE: Final = 0.5
STABLE_SHARE: Final = 1 / 3
STABLE_BAND: Final = 0.2
"""Share of the rise within which a stable level stays."""
MIN_STABLE_BLOCKS: Final = 8
SOLVED_EPISODES: Final = 100
FAILED_RECORDS: Final = 3
MAX_RETURN: Final = 1e100
"""Returns beyond it are passed over: their squares are no numbers."""

RETURN, RECENT_RETURN, COUNT = "episode/return_mean", "episode/return_mean_100", "episode/count"
CUT_OFF = "episode/truncated_frac"
LENGTH, EVALUATION, EVALUATION_COUNT = "episode/length_mean", "eval/return_mean", "eval/count"
REWARD, NONFINITE = "reward/mean", "numerics/nonfinite"
SUCCESS = re.compile(r"(^|.*/)(is_)?success(_rate|_frac|_mean|_ratio)?")
NAMES: Final = {
    RETURN: "return",
    RECENT_RETURN: "mean return of the last episodes",
    EVALUATION: "return in evaluation",
    REWARD: "mean reward",
    LENGTH: "length of episodes",
}


@lru_cache(maxsize=4096)
def is_success(key: str) -> bool:
    """Return whether a key is a success rate; cached, as every update has the same keys."""
    return SUCCESS.fullmatch(key) is not None


class OutcomeKind(StrEnum):
    """What a run does."""

    SOLVED = "solved"
    LEARNING = "learning"
    CONVERGED = "converged"
    FLAT = "flat"
    DECLINING = "declining"
    FAILED = "failed"
    TOO_SHORT = "too short to tell"


GOOD: Final = frozenset({OutcomeKind.SOLVED, OutcomeKind.LEARNING, OutcomeKind.CONVERGED})
BAD: Final = frozenset({OutcomeKind.FLAT, OutcomeKind.DECLINING, OutcomeKind.FAILED})
"""Outcomes of a run that has learned something, and those that need an explanation."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Verdict on what a run does, with the numbers that decided.

    Attributes:
        kind: the outcome.
        text: in one sentence, which begins with the kind.
        key: whose values decided; empty where none did.
        updates, episodes: that were judged; episodes are estimated where no record counts them.
        first, last, best: levels of the series; None where there is none.
        since: update from which on the level is stable, or above the threshold, or numbers are not finite; None elsewhere.
        threshold: of the environment, where one is known.
    """

    kind: OutcomeKind = OutcomeKind.TOO_SHORT
    text: str = "too short to tell: no update has been recorded"
    key: str = ""
    updates: int = 0
    episodes: int = 0
    first: float | None = None
    last: float | None = None
    best: float | None = None
    since: int | None = None
    threshold: float | None = None

    def data(self) -> dict[str, Any]:
        """Return plain values, as the journal's event has them."""
        return {
            "outcome": str(self.kind),
            **{name: getattr(self, name) for name in self.__slots__ if name != "kind"},
        }

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Outcome:
        """Return the outcome of plain values; those that a later version added are ignored. Raises ValueError for an unknown kind."""
        values = {name: data[name] for name in cls.__slots__ if name in data and name != "kind"}
        return cls(OutcomeKind(data.get("outcome", "")), **values)


class OutcomeJudge:
    """Judges a run record by record.

    Args:
        facts: of the run: `reward_threshold`, `env`, `num_envs`, `normalize_rewards`.

    Attributes:
        outcome: the verdict so far.
        has_changed: it has been another one than too short to tell.
    """

    def __init__(self, facts: Mapping[str, Any] | None = None) -> None:
        self._facts = dict(facts or {})
        self._series: dict[str, Blocks] = {}
        self._updates = self._next = 0
        self._env_step = 0
        self._episodes, self._counted, self._all_cut_off = 0.0, False, True
        self._nonfinite = self._nonfinite_since = 0
        self._passed_since: int | None = None
        self._ending, self._ended = "", False
        self.outcome, self.has_changed = Outcome(), False

    def step(self, record: Record) -> Outcome | None:
        """Add a record; return the outcome where its kind has changed. A long run is judged again when it has grown by 5 %."""
        was_failed = bool(self._ending)
        self.add(record)
        if self._updates < self._next and not was_failed and self._nonfinite != FAILED_RECORDS:
            return None
        self._next = max(self._updates + 1, math.ceil(1.05 * self._updates))
        return self._changed()

    def failure(self, sentence: str) -> Outcome | None:
        """Take the sentence on the exception that ended the run, until a record follows; return the outcome if it is new."""
        self._ending = sentence
        return self._changed()

    def end(self, status: RunStatus | None, sentence: str = "") -> Outcome:
        """Return the outcome by all records, and by how the run ended; `sentence` says so where it ended badly."""
        if status in (RunStatus.FAILED, RunStatus.KILLED) and not self._ending:
            self._ending = sentence or f"The run ended as {status} after update {self._updates:,}"
        self._ended = status is RunStatus.FINISHED
        self.outcome = self._judged()
        return self.outcome

    def _changed(self) -> Outcome | None:
        before, self.outcome = self.outcome.kind, self._judged()
        if self.outcome.kind is before:
            return None
        self.has_changed = True
        return self.outcome

    def add(self, record: Record) -> None:
        """Add a record without judging."""
        values, update, facts = judgeable(record.values), record.axes.update, self._facts
        self._updates += 1
        self._ending, self._ended = "", False
        nonfinite = values.get(NONFINITE)
        if nonfinite is not None:
            self._nonfinite = self._nonfinite + 1 if nonfinite > 0 else 0
            self._nonfinite_since = update if self._nonfinite == 1 else self._nonfinite_since
        steps, self._env_step = record.axes.env_step - self._env_step, record.axes.env_step
        length, environments = values.get(LENGTH, 0.0), facts.get("num_envs")
        passed = record.axes.env_step / environments if isinstance(environments, int) and environments > 0 else math.inf
        estimate = max(1.0, steps / length) if length > 0 and steps > 0 else float(BLOCK_EPISODES)
        episodes = values.get(COUNT, estimate if RETURN in values or RECENT_RETURN in values else 0.0)
        self._episodes += episodes
        self._counted |= COUNT in values
        if episodes > 0:
            self._all_cut_off &= values.get(CUT_OFF) == 1
            settling = length if self._all_cut_off else FIRST_LENGTHS * length
            for key in (RETURN, RECENT_RETURN, LENGTH, *filter(is_success, values)):
                if key in values:
                    std = values.get(STD) if key == RETURN else None
                    std = std if std is None or 0 <= std <= MAX_RETURN else 0.0
                    self._put(key, values[key], episodes, update, std=std, settling=settling, passed=passed)
        if EVALUATION in values:
            self._put(EVALUATION, values[EVALUATION], values.get(EVALUATION_COUNT, BLOCK_EPISODES), update)
        if facts.get("normalize_rewards") is False and REWARD in values:
            self._put(REWARD, values[REWARD], BLOCK_EPISODES, update)
        threshold, recent = facts.get("reward_threshold"), values.get(RECENT_RETURN, -math.inf)
        if self._passed_since is None and isinstance(threshold, int | float) and self._episodes >= SOLVED_EPISODES:
            self._passed_since = update if max(recent, self._latest_mean()) >= threshold else None

    def _put(
        self,
        key: str,
        value: float,
        episodes: float,
        update: int,
        *,
        std: float | None = None,
        settling: float = 0.0,
        passed: float = math.inf,
    ) -> None:
        if math.isfinite(value) and abs(value) <= MAX_RETURN and math.isfinite(episodes) and episodes > 0:
            least = AVERAGED_BLOCK_EPISODES if key == RECENT_RETURN else BLOCK_EPISODES
            blocks = self._series.setdefault(key, Blocks(least))
            blocks.add(value, episodes, update, std=std, settling=settling, steps=passed)

    def _latest_mean(self) -> float:
        """Return the mean of the last blocks with `SOLVED_EPISODES` episodes; minus infinity where there are fewer."""
        total = episodes = 0.0
        for block in reversed(self._series[RETURN].blocks if RETURN in self._series else ()):
            total, episodes = total + block.mean * block.episodes, episodes + block.episodes
            if episodes >= SOLVED_EPISODES:
                return total / episodes
        return -math.inf

    def _judged(self) -> Outcome:
        outcome = self._by_course()
        since = self._nonfinite_since
        if self._ending:
            return replace(outcome, kind=OutcomeKind.FAILED, text=f"failed: {self._ending.rstrip('.')}")
        if self._nonfinite >= FAILED_RECORDS and outcome.kind not in GOOD:
            text = f"failed: numbers have not been finite since update {since:,}"
            return replace(outcome, kind=OutcomeKind.FAILED, text=text, since=since)
        return outcome

    def _by_course(self) -> Outcome:
        """Return the outcome by the series that says most: returns, else rewards; success or length where all returns are equal."""
        key = next((key for key in (RETURN, RECENT_RETURN, EVALUATION) if key in self._series), "")
        if not key and self._episodes == 0 and REWARD in self._series:
            return self._by_series(REWARD)
        if not key:
            why = "no episode has ended" if self._counted and not self._episodes else NOT_REPORTED
            why = why if self._updates else "no update has been recorded"
            return Outcome(text=f"{OutcomeKind.TOO_SHORT}: {why}", updates=self._updates)
        value = self._series[key].constant
        if value is None:
            return self._by_series(key)
        successes = sorted(filter(is_success, self._series))
        varied = [name for name in (*successes, LENGTH) if name in self._series and self._series[name].constant is None]
        if not varied or (varied[0] == LENGTH and value == 0):
            return self._by_series(key)
        # A reward that is the same in every episode pays more per step where episodes are shorter, a penalty where they are longer.
        sign = -1.0 if varied[0] == LENGTH and value > 0 else 1.0
        return self._by_series(varied[0], sign=sign, note=f" at a return of {number(value)} in every episode")

    def _by_series(self, key: str, *, sign: float = 1.0, note: str = "") -> Outcome:
        """Return the outcome by one series, which is better where it is larger, or smaller where `sign` is -1."""
        blocks, known = self._series[key], self._facts.get("reward_threshold")
        threshold = known if isinstance(known, int | float) else None
        base = Outcome(
            key=key,
            updates=self._updates,
            episodes=round(blocks.episodes),
            threshold=threshold,
            first=level.mean if (level := blocks.first_level) else None,
        )
        name = NAMES.get(key, key)
        values = sign * blocks.values
        few = len(values) < MIN_BLOCKS or blocks.episodes < MIN_EPISODES
        judged = not few or (blocks.has_spread and len(values) >= MIN_SPREAD_BLOCKS and blocks.episodes >= MIN_EPISODES)
        if not judged:
            needed = f"{MIN_EPISODES} episodes" if blocks.episodes < MIN_EPISODES else f"{MIN_BLOCKS} blocks"
            counted = f"{base.episodes:,} episodes in {len(values)} blocks of updates; at least {needed} are needed"
            return replace(base, text=f"{OutcomeKind.TOO_SHORT}: {counted}")
        noise = noise_of(values)
        shift, course = round(sign) * blocks.shift(), Course.of(values, noise)
        last, best = sign * course.last, sign * max(course.best, course.last)
        if few:
            last, best = blocks.last_level.mean, sign * float(np.max(values))
        base = replace(base, last=last, best=best)
        already = threshold is not None and base.first is not None and base.first >= threshold
        kind, since = OutcomeKind.FLAT if few else course.kind, None
        if blocks.has_spread and not blocks.matters(threshold, fell=kind is OutcomeKind.DECLINING):
            kind = OutcomeKind.FLAT
        if (sign > 0 and kind is not OutcomeKind.DECLINING and blocks.lost(noise)) or (kind in GOOD and shift < 0):
            kind = OutcomeKind.DECLINING
        elif kind is OutcomeKind.FLAT and shift:
            kind = OutcomeKind.LEARNING if shift > 0 else OutcomeKind.DECLINING
        if kind is OutcomeKind.FLAT and not self._flat_is_known(key, blocks):
            kind = OutcomeKind.TOO_SHORT
        elif kind in GOOD and self._passed_since is not None and not already:
            kind, since = OutcomeKind.SOLVED, self._passed_since
        elif kind is OutcomeKind.CONVERGED:
            since = blocks.blocks[course.stable].begin
        outcome = replace(base, kind=kind, since=since)
        return replace(outcome, text=f"{kind}: {name} {_levels(outcome)}{note}{_clause(outcome, self._facts, already)}")

    def _flat_is_known(self, key: str, blocks: Blocks) -> bool:
        """Return True for enough updates and episodes; a run that has finished with many episodes needs fewer updates."""
        if self._ended and self._updates >= MIN_ENDED_UPDATES and blocks.episodes >= MIN_ENDED_EPISODES:
            return key != RECENT_RETURN or blocks.episodes >= MIN_FLAT_AVERAGED_EPISODES
        return self._updates >= MIN_FLAT_UPDATES and blocks.episodes >= flat_episodes(key)


@dataclass(frozen=True, slots=True)
class Course:
    """What a series of block means does.

    Attributes:
        kind: learning, converged, flat or declining.
        last, best: levels.
        stable: index of the block from which on the level is stable; the number of blocks where it is not.
    """

    kind: OutcomeKind
    last: float
    best: float
    stable: int

    @classmethod
    def of(cls, values: Array, noise: Noise) -> Course:
        """Return the course of at least `MIN_BLOCKS` values."""
        count = len(values)
        width, last_width = max(3, math.ceil(count / 10)), max(3, math.ceil(count / 15))
        levels = smoothed(values, width)
        last = float(np.mean(values[-last_width:]))
        upward, downward = rise(values, levels, noise, width), rise(-values, -levels, noise, width)
        best = float(levels[upward.top])
        doubt = 3 * noise.lasting / math.sqrt(last_width)
        if upward.significant and best - last < max(LOST_SHARE * upward.height, doubt):
            stable = _stable_from(values, levels, last, upward.height, noise)
            converged = count - stable >= max(MIN_STABLE_BLOCKS, STABLE_SHARE * count)
            return cls(OutcomeKind.CONVERGED if converged else OutcomeKind.LEARNING, last, best, stable)
        fallen = float(np.mean(values[:width])) - last
        declining = upward.significant or (downward.significant and fallen >= max(LOST_SHARE * downward.height, doubt))
        return cls(OutcomeKind.DECLINING if declining else OutcomeKind.FLAT, last, best, count)


def _stable_from(values: Array, levels: Array, last: float, height: float, noise: Noise) -> int:
    """Return the index from which on all levels keep to the last one, without a trend among them; else the number of values."""
    count, width = len(values), max(3, math.ceil(len(values) / 10))
    band = STABLE_BAND * height + noise.scale / math.sqrt(width)
    outside = np.flatnonzero(np.abs(levels - last) > band)
    begin = int(outside[-1]) + 1 if len(outside) else 0
    third = (count - begin) // 3
    if third < 2:
        return count
    change = float(np.mean(values[-third:]) - np.mean(values[begin : begin + third]))
    return begin if abs(change) <= STABLE_BAND / 2 * height + 2 * noise.scale / math.sqrt(third) else count


def flat_episodes(key: str) -> int:
    """Return the episodes from which on a series can be called flat."""
    return MIN_FLAT_AVERAGED_EPISODES if key == RECENT_RETURN else MIN_FLAT_EPISODES


def _levels(outcome: Outcome) -> str:
    """Return `21 -> 340 in 48 updates`."""
    first, last = (0.0 if level is None else level for level in (outcome.first, outcome.last))
    return f"{number(first)} -> {number(last)} in {outcome.updates:,} updates"


def _clause(outcome: Outcome, facts: Mapping[str, Any], already: bool) -> str:
    """Return the end of the sentence: what makes the kind."""
    best = "" if outcome.best is None else number(outcome.best)
    threshold = "" if outcome.threshold is None else number(outcome.threshold)
    passed = (
        f"; the first rollouts were above the environment's threshold of {threshold} already, as where rewards are scaled"
        if already
        else ""
    )
    match outcome.kind:
        case OutcomeKind.SOLVED:
            return f", above {threshold}, the threshold of {facts.get('env') or 'the environment'}, since update {outcome.since:,}"
        case OutcomeKind.CONVERGED:
            return f", stable since update {outcome.since:,}{passed}"
        case OutcomeKind.FLAT:
            return f", never significantly above the first rollouts{passed}"
        case OutcomeKind.DECLINING:
            below = outcome.best is None or outcome.first is None or outcome.best <= outcome.first
            return passed if below else f", at best {best}{passed}"
        case OutcomeKind.TOO_SHORT:
            least = f"{MIN_FLAT_UPDATES} updates and {flat_episodes(outcome.key)} episodes"
            return f", no change yet; a flat curve is recognised from {least} on"
        case _:
            return passed


def outcome_of(
    records: Iterable[Record], facts: Mapping[str, Any] | None = None, status: RunStatus | None = None
) -> Outcome:
    """Return the outcome of some records of a run, such as a window of its updates."""
    judge = OutcomeJudge(facts)
    for record in records:
        judge.add(record)
    return judge.end(status)
