"""Outcome of a run or of a part of it: solved, learning, converged, flat, declining, failed, or too short to tell.

The outcome depends only on the records, so a journal gives the same verdict as the live run. It follows the mean return of the episodes of
an update. Without returns it follows the return in evaluation or the mean reward; if all returns are equal, the success rate or the length.

- failed: the run ended with an exception, as failed or killed; or numbers are non-finite in each of its last `FAILED_RECORDS` records
  and it has not learned, or returns are non-finite too;
- too short to tell: fewer than `MIN_EPISODES` episodes or `MIN_BLOCKS` blocks (`MIN_SPREAD_BLOCKS` if updates report the spread of their
  episodes), unless the updates show a clear trend, as a few long episodes may, or a mean over the last hundred episodes drifts (`Drift`);
  for a flat curve, fewer than `MIN_FLAT_UPDATES` updates or `MIN_FLAT_EPISODES` episodes (`MIN_ENDED_UPDATES` and `MIN_ENDED_EPISODES` if
  the run has finished);
- solved: rose, has not declined, and its return has passed the environment's threshold and has not fallen far below it since;
- converged: rose, and has stayed at its last level, near its best, for `STABLE_SHARE` of the run and `MIN_STABLE_BLOCKS` blocks;
- learning: rose above the first rollouts in any other way;
- declining: fell below the first rollouts, or lost `LOST_SHARE` of its improvement, which is also visible in the return;
- flat: neither rose above the first rollouts nor fell below them; if updates report the spread of their episodes, also if the level at the
  end does not differ enough from the first one (`Blocks.matters`).

The return is the mean over the last hundred episodes (`history.recent_return`), and the best return is its highest value. The outcome never
contradicts them: a run whose return is not above the first rollouts has not learned, and a run whose return is above them declines only if
it has lost a clear part of its best.

A block is a group of updates with `BLOCK_EPISODES` episodes. `history.course` decides by blocks when a level is above the first one, which
is strict for a few slowly rising blocks. `Blocks.shift` compares the first episodes with the last fifth of the updates.

During a run a new outcome replaces the previous one after it has lasted for `CONFIRMING_UPDATES` updates and `CONFIRMING_SHARE` of the run,
or at once if the numbers contradict the previous one. The verdict at the end uses all records.
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

from esper_telemetry.core.facts import Facts
from esper_telemetry.core.messages import number
from esper_telemetry.core.metric import Array
from esper_telemetry.core.record import Record, RunStatus, judgeable
from esper_telemetry.history.course import Blocks, Noise, noise_of, rise, smoothed, trend_scores
from esper_telemetry.history.recent_return import COUNT, MAX_RETURN, RECENT_EPISODES, RECENT_RETURN, RETURN_STD, UPDATE_RETURN, RecentMean

NOT_REPORTED: Final = "no returns are reported: check that the trainer records the returns of episodes"
NOT_OBSERVED: Final = "no returns are reported: observe esper_telemetry.metrics.episode_stats(returns, lengths) after each rollout"
"""The reason for an empty verdict, for a trainer and for an own loop that calls this package."""
OUTCOME: Final = "outcome"  # type of the journal's event
OUTCOME_UPDATES: Final = 1000
"""Updates after which the outcome is in the journal again, so that readers of a long run need not judge all of it."""
MIN_EPISODES: Final = 20
MIN_BLOCKS: Final = 8
MIN_SPREAD_BLOCKS: Final = 3
"""Blocks needed for a rise or a fall if updates report the spread of their episodes."""
MIN_DRIFT: Final = 2.5
"""Standard errors of the changes of a moving average; for a flat curve the probability to exceed them on one side is 0.6 %."""
MIN_DRIFT_UPDATES: Final = 10
MIN_FLAT_UPDATES: Final = 20
MIN_FLAT_EPISODES: Final = 40
MIN_ENDED_UPDATES: Final = 10
MIN_ENDED_EPISODES: Final = 100  # the same for a finished run
MIN_FLAT_AVERAGED_EPISODES: Final = 300
"""A flat curve needs more episodes than a rising one: learning may begin late, and a mean of a hundred episodes reacts slowly."""
BLOCK_EPISODES: Final = 5
AVERAGED_BLOCK_EPISODES: Final = 25
"""Episodes of a block; more if the logged value is already a mean of the last hundred."""
FIRST_LENGTHS: Final = 2.0
"""Steps per environment, in lengths of an episode, before which only short episodes have ended, unless all are truncated at one length."""
LOST_SHARE: Final = 0.5
STABLE_SHARE: Final = 1 / 3
STABLE_BAND: Final = 0.2
"""Share of the rise that a return above the first rollouts must lose to decline."""
MIN_STABLE_BLOCKS: Final = 8
MAX_STABLE_CHANGE: Final = 0.1
STABLE_ERRORS: Final = 3.0
MAX_STABLE_ERROR: Final = 0.15
"""Change of a stable level over the last `STABLE_SHARE` of the run: share of the rise, standard errors, and their largest share of it."""
SOLVED_EPISODES: Final = 100  # episodes before which the return cannot have passed a threshold
HALF_WAY: Final = 0.5  # share of the way to the threshold below which a settled return needs an explanation
SOLVED_BAND: Final = 0.1  # a solved task's return may fall below the threshold by this share of its distance from the first rollouts
MIN_FALL_SHARE: Final = 0.02  # share of the first level that a declining run must lose
CONFIRMING_UPDATES: Final = 2
CONFIRMING_SHARE: Final = 0.1
FAILED_RECORDS: Final = 3
RETURN = UPDATE_RETURN
CUT_OFF = "episode/truncated_frac"
LENGTH, EVALUATION, EVALUATION_COUNT = "episode/length_mean", "eval/return_mean", "eval/count"
REWARD, NONFINITE = "reward/mean", "numerics/nonfinite"
SUCCESS = re.compile(r"(^|.*/)(is_)?success(_rate|_frac|_mean|_ratio)?")
NAMES: Final = {
    RETURN: "return",
    RECENT_RETURN: "return",
    EVALUATION: "return in evaluation",
    REWARD: "mean reward",
    LENGTH: "length of episodes",
}


@lru_cache(maxsize=4096)
def is_success(key: str) -> bool:
    """Return whether a key is a success rate; cached because every update has the same keys."""
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
"""Outcomes of a run that has learned something, and outcomes that need an explanation."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Verdict on a run, with the numbers that it is based on.

    Attributes:
        kind: the outcome.
        text: one sentence that begins with the kind.
        key: metric that the verdict follows; empty if there is none.
        updates, episodes: number of judged updates and episodes; episodes are estimated if records do not count them.
        first: level of the first rollouts, if any.
        last: mean return over the last hundred episodes, or over all if there are fewer.
        best: highest value of this mean after 20 episodes.
        since: first update with a stable level, a return above the threshold, or non-finite numbers; None for other kinds.
        threshold: reward threshold of the environment, if known.
        before: text of the outcome before the run failed or was killed, if it could be told.
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
    before: str = ""

    @property
    def began_above(self) -> bool:
        """True if the first rollouts were already above the environment's threshold."""
        return self.threshold is not None and self.first is not None and self.first >= self.threshold

    @property
    def is_far_below(self) -> bool:
        """True if the return has settled before half of the way from the first rollouts to the environment's threshold."""
        if self.kind is not OutcomeKind.CONVERGED or None in (self.threshold, self.first, self.last):
            return False
        return self.last - self.first < HALF_WAY * (self.threshold - self.first)  # type: ignore[operator]  # they are known

    @property
    def needs_explanation(self) -> bool:
        """True for a bad outcome, and for a return that has settled far below the environment's threshold."""
        return self.kind in BAD or self.is_far_below

    def data(self) -> dict[str, Any]:
        """Return plain values for the journal's event."""
        return {"outcome": str(self.kind), **{name: getattr(self, name) for name in self.__slots__ if name != "kind"}}

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Outcome:
        """Return the outcome from plain values, without keys added by a later version. Raises ValueError for an unknown kind."""
        values = {name: data[name] for name in cls.__slots__ if name in data and name != "kind"}
        return cls(OutcomeKind(data.get("outcome", "")), **values)


@dataclass(slots=True)
class Drift:
    """Changes of a moving average from update to update, which are independent although the averages are not.

    Attributes:
        count, total, squares: number, sum and sum of squares of the changes.
        first, last: first and last average, if any.
    """

    count: int = 0
    total: float = 0.0
    squares: float = 0.0
    first: float | None = None
    last: float | None = None

    def add(self, value: float) -> None:
        """Add the average of the next update."""
        if self.last is None:
            self.first = value
        else:
            change = value - self.last
            self.count, self.total, self.squares = self.count + 1, self.total + change, self.squares + change**2
        self.last = value

    @property
    def direction(self) -> int:
        """1 for a rise and -1 for a fall by `MIN_DRIFT` standard errors; otherwise, or for few updates, 0."""
        spread = self.squares - self.total**2 / max(self.count, 1)
        is_clear = self.count >= MIN_DRIFT_UPDATES and self.total**2 >= MIN_DRIFT**2 * max(spread, 0.0)
        return int(math.copysign(1, self.total)) if is_clear and self.total else 0


Candidate = tuple[OutcomeKind, int]
"""A kind that later updates must confirm, and the number of updates when it was first found."""


class OutcomeJudge:
    """Judges a run record by record.

    Args:
        facts: the run's `reward_threshold`, `env`, `num_envs` and `normalize_rewards`.

    Attributes:
        outcome: the verdict so far.
        has_changed: it has been something other than too short to tell.
    """

    def __init__(self, facts: Mapping[str, Any] | None = None) -> None:
        self._facts = Facts.of(facts)
        self._series: dict[str, Blocks] = {}
        self._recent: dict[str, RecentMean] = {}
        self._drift = Drift()
        self._updates = self._next = self._returned = 0
        self._env_step = 0
        self._episodes, self._counted, self._all_cut_off = 0.0, False, True
        self._per_return = BLOCK_EPISODES if self._facts.reported_returns else 1  # a script prints means of its own
        self._nonfinite = self._nonfinite_since = self._nonfinite_returns = 0
        self._passed_since: int | None = None
        self._ending, self._ended = "", False
        self._candidate: Candidate | None = None
        self._sign, self._note = 1.0, ""
        self.outcome, self.has_changed = Outcome(), False

    def step(self, record: Record) -> Outcome | None:
        """Add a record; return the outcome if its kind has changed, and every `OUTCOME_UPDATES` updates.

        A long run is judged again each time it has grown by 5 %.
        """
        before, was_failed = self.outcome.kind, bool(self._ending)
        self.add(record)
        is_due = self.has_changed and self._updates - self._returned >= OUTCOME_UPDATES
        if self._updates >= self._next or was_failed or self._nonfinite == FAILED_RECORDS or is_due:
            self._next = max(self._updates + 1, math.ceil(1.05 * self._updates))
            self.outcome, self._candidate = self._confirmed(self._judged())
        if is_due and self.outcome.kind is before:
            self._returned = self._updates
            return self.outcome
        return self._changed(before)

    def failure(self, sentence: str) -> Outcome | None:
        """Set the sentence about the exception that ended the run, until the next record; return the outcome if its kind has changed."""
        before, self._ending = self.outcome.kind, sentence
        self.outcome = self._judged()
        return self._changed(before)

    def end(self, status: RunStatus | None, sentence: str = "") -> Outcome:
        """Return the final outcome by all records and the run's status; `sentence` describes a bad end."""
        if status in (RunStatus.FAILED, RunStatus.KILLED) and not self._ending:
            self._ending = sentence or f"The run ended as {status} after update {self._updates:,}"
        self._ended = status is RunStatus.FINISHED
        judged = self._judged()
        return self.so_far() if judged.kind is OutcomeKind.TOO_SHORT else judged

    def recent(self, key: str) -> float:
        """Return the mean of a key over the last hundred episodes; NaN without a value."""
        return self._recent[key].mean if key in self._recent else math.nan

    def so_far(self) -> Outcome:
        """Return the current outcome of a run that has not ended."""
        return self._confirmed(self._judged())[0]

    def _changed(self, before: OutcomeKind) -> Outcome | None:
        if self.outcome.kind is before:
            return None
        self.has_changed, self._returned = True, self._updates
        return self.outcome

    def add(self, record: Record) -> None:
        """Add a record without judging."""
        values, update = judgeable(record.values), record.axes.update
        self._updates += 1
        self._ending, self._ended = "", False
        nonfinite = values.get(NONFINITE)
        if nonfinite is not None:
            self._nonfinite = self._nonfinite + 1 if nonfinite > 0 else 0
            self._nonfinite_since = update if self._nonfinite == 1 else self._nonfinite_since
            self._nonfinite_returns = self._nonfinite_returns + 1 if values.get(f"{RETURN}_nonfinite", 0.0) > 0 else 0
        self._add_episodes(record)
        if EVALUATION in values:
            self._put(EVALUATION, values[EVALUATION], values.get(EVALUATION_COUNT, BLOCK_EPISODES), update)
        if self._facts.normalize_rewards is False and REWARD in values:
            self._put(REWARD, values[REWARD], BLOCK_EPISODES, update)
        self._note_threshold(update)

    def _add_episodes(self, record: Record) -> None:
        values, update, environments = record.values, record.axes.update, self._facts.num_envs
        steps, self._env_step = record.axes.env_step - self._env_step, record.axes.env_step
        length = values.get(LENGTH, 0.0)
        passed = record.axes.env_step / environments if environments is not None and environments > 0 else 0.0
        passed = passed or math.inf  # of environments that are not seen
        is_counted = length > 0 and steps > 0 and self._facts.step_unit is None
        estimate = max(1.0, steps / length) if is_counted else float(BLOCK_EPISODES)
        episodes = values.get(COUNT, estimate if RETURN in values or RECENT_RETURN in values else 0.0)
        episodes *= self._per_return
        self._episodes += episodes
        self._counted |= COUNT in values
        if episodes > 0:
            self._all_cut_off &= values.get(CUT_OFF) == 1
            settling = length if self._all_cut_off else FIRST_LENGTHS * length
            recent = values.get(RECENT_RETURN)
            if COUNT not in values and recent == values.get(RETURN):
                recent = None  # a log of another trainer has the mean of the update alone
            for key in (RETURN, RECENT_RETURN, LENGTH, *filter(is_success, values)):
                if key in values:
                    std = values.get(RETURN_STD) if key == RETURN else None
                    std = std if std is None or 0 <= std <= MAX_RETURN else 0.0
                    own = recent if key in (RETURN, RECENT_RETURN) else None
                    self._put(key, values[key], episodes, update, own, std=std, settling=settling, steps=passed)

    def _number_of(self, episodes: int) -> str:
        return f"{episodes:,} episodes" if self._per_return == 1 else f"{round(episodes / self._per_return):,} reported returns"

    def _note_threshold(self, update: int) -> None:
        """Record since when the return has been above the environment's threshold, or not far below it."""
        threshold = self._facts.reward_threshold
        recent = self._recent.get(RETURN) or self._recent.get(RECENT_RETURN)
        if threshold is None or recent is None or self._episodes < SOLVED_EPISODES:
            return
        if self._passed_since is None:
            self._passed_since = update if recent.mean >= threshold else None
        elif (level := self._series[RETURN if RETURN in self._series else RECENT_RETURN].first_level) is not None:
            lost = recent.mean < threshold - SOLVED_BAND * max(threshold - level.mean, 0.0)
            self._passed_since = None if lost else self._passed_since

    def _put(self, key: str, value: float, episodes: float, update: int, recent: float | None = None, **block: Any) -> None:
        if recent is not None and not abs(recent) <= MAX_RETURN:
            recent = None
        if math.isfinite(value) and abs(value) <= MAX_RETURN and math.isfinite(episodes) and episodes > 0:
            least = AVERAGED_BLOCK_EPISODES if key == RECENT_RETURN else BLOCK_EPISODES
            if key == RECENT_RETURN:
                self._drift.add(value)
            blocks = self._series.setdefault(key, Blocks(least))
            blocks.add(value, episodes, update, **block)
            self._recent.setdefault(key, RecentMean()).add(value, episodes, recent=recent)

    def _confirmed(self, judged: Outcome) -> tuple[Outcome, Candidate | None]:
        """Return the outcome after a judgement, and the kind to be confirmed: a single judgement of another kind may be chance."""
        before, candidate = self.outcome, self._candidate
        kinds = {before.kind, judged.kind}
        at_once = OutcomeKind.FAILED in kinds or judged.kind is OutcomeKind.SOLVED or not self._holds(before.kind, judged)
        if before.kind is judged.kind or at_once:
            return judged, None
        if candidate is None or candidate[0] is not judged.kind:
            candidate = judged.kind, self._updates
        lasted = self._updates - candidate[1]
        is_confirmed = lasted >= max(CONFIRMING_UPDATES, CONFIRMING_SHARE * self._updates)
        if is_confirmed and judged.kind is not OutcomeKind.TOO_SHORT:
            return judged, None
        if before.kind is OutcomeKind.TOO_SHORT:
            text = f"{OutcomeKind.TOO_SHORT}: {self._levels(judged)}, to be confirmed by more updates"
            return replace(judged, kind=OutcomeKind.TOO_SHORT, text=text, since=None), candidate
        return self._worded(replace(judged, kind=before.kind, since=before.since)), candidate

    def _holds(self, kind: OutcomeKind, judged: Outcome) -> bool:
        """Return whether the latest numbers allow a kind; a new series without numbers does not contradict too short to tell."""
        if kind is OutcomeKind.TOO_SHORT or judged.last is None:
            return kind is OutcomeKind.TOO_SHORT
        return self._consistent(kind, judged) is kind

    def _consistent(self, kind: OutcomeKind, levels: Outcome, shift: int = 0) -> OutcomeKind:
        """Return the kind, or another one if the first rollouts, the return and the best return contradict it."""
        assert levels.first is not None and levels.last is not None and levels.best is not None
        first, gain = abs(levels.first), self._sign * (levels.last - levels.first)
        risen, lost = self._sign * (levels.best - levels.first), self._sign * (levels.best - levels.last)
        if kind in GOOD:
            lasts = gain > 0 and lost <= LOST_SHARE * risen
            return kind if lasts else OutcomeKind.DECLINING if gain > 0 else OutcomeKind.FLAT
        if kind is not OutcomeKind.DECLINING or -gain > MIN_FALL_SHARE * first:
            return kind
        if risen > MIN_FALL_SHARE * first and lost > STABLE_BAND * risen:
            return kind
        return OutcomeKind.LEARNING if gain > 0 and shift > 0 else OutcomeKind.FLAT

    def _judged(self) -> Outcome:
        outcome = self._by_course()
        since = self._nonfinite_since
        if self._ending:
            before = "" if outcome.kind is OutcomeKind.TOO_SHORT else outcome.text
            return replace(outcome, kind=OutcomeKind.FAILED, text=f"failed: {self._ending.rstrip('.')}", before=before)
        if self._nonfinite >= FAILED_RECORDS and (outcome.kind not in GOOD or self._nonfinite_returns >= FAILED_RECORDS):
            text = f"failed: numbers have been NaN or infinite since update {since:,}"
            return replace(outcome, kind=OutcomeKind.FAILED, text=text, since=since)
        return outcome

    def _by_course(self) -> Outcome:
        """Return the outcome by the best series available: returns, otherwise rewards; success or length if all returns are equal."""
        self._sign, self._note = 1.0, ""
        key = next((key for key in (RETURN, RECENT_RETURN, EVALUATION) if key in self._series), "")
        if not key and self._episodes == 0 and REWARD in self._series:
            return self._by_series(REWARD)
        if not key:
            why = NOT_OBSERVED if self._facts.own_loop else NOT_REPORTED
            why = "no episode has ended" if self._counted and not self._episodes else why
            why = why if self._updates else "no update has been recorded"
            return Outcome(text=f"{OutcomeKind.TOO_SHORT}: {why}", updates=self._updates)
        value = self._series[key].constant
        if value is None:
            return self._by_series(key)
        successes = sorted(filter(is_success, self._series))
        varied = [name for name in (*successes, LENGTH) if name in self._series and self._series[name].constant is None]
        if not varied or (varied[0] == LENGTH and value == 0):
            return self._by_series(key)
        # With equal positive returns shorter episodes are better, with equal penalties longer ones.
        self._sign = -1.0 if varied[0] == LENGTH and value > 0 else 1.0
        self._note = f" at a return of {number(value)} in every episode"
        return self._by_series(varied[0])

    def _by_series(self, key: str) -> Outcome:
        """Return the outcome by one series; larger values are better, or smaller ones if the sign is -1."""
        blocks, recent, sign = self._series[key], self._recent[key], self._sign
        first = blocks.first_level
        base = Outcome(
            key=key,
            updates=self._updates,
            episodes=round(blocks.episodes),
            threshold=self._facts.reward_threshold,
            first=first.mean if first else None,
        )
        values = sign * blocks.values
        few = len(values) < MIN_BLOCKS or blocks.episodes < MIN_EPISODES
        judged = not few or (blocks.has_spread and len(values) >= MIN_SPREAD_BLOCKS and blocks.episodes >= MIN_EPISODES)
        best = recent.highest if sign > 0 else recent.lowest
        levels = replace(base, last=recent.mean, best=recent.mean if math.isnan(best) else best)
        if not judged:
            enough, drift = blocks.episodes >= MIN_EPISODES, self._drift
            averaged = drift.direction if enough else 0, drift.first  # updates of a moving average are no samples
            direction, start = averaged if key == RECENT_RETURN else blocks.early_trend()
            if direction:
                kind = OutcomeKind.LEARNING if direction * sign > 0 else OutcomeKind.DECLINING
                return self._worded(replace(levels, kind=kind, first=start))
            needed = self._number_of(MIN_EPISODES) if not enough else f"{MIN_BLOCKS} blocks"
            counted = f"{self._number_of(base.episodes)} in {len(values)} blocks of updates; at least {needed} are needed"
            return replace(base, text=f"{OutcomeKind.TOO_SHORT}: {counted}")
        base = levels
        noise, shift = noise_of(values), round(sign) * blocks.shift()
        kind = OutcomeKind.FLAT if few else course_of(values, noise)
        if blocks.has_spread and not blocks.matters(base.threshold, fell=kind is OutcomeKind.DECLINING):
            kind = OutcomeKind.FLAT
        if (sign > 0 and kind is not OutcomeKind.DECLINING and blocks.lost(noise)) or (kind in GOOD and shift < 0):
            kind = OutcomeKind.DECLINING
        elif kind is OutcomeKind.FLAT and shift:
            kind = OutcomeKind.LEARNING if shift > 0 else OutcomeKind.DECLINING
        kind, since = self._consistent(kind, base, shift), None
        if kind is OutcomeKind.FLAT and not self._flat_is_known(key, blocks):
            kind = OutcomeKind.TOO_SHORT
        elif kind in GOOD and self._passed_since is not None and not base.began_above:
            kind, since = OutcomeKind.SOLVED, self._passed_since
        elif kind in GOOD and not few and not self._below_best(base):
            stable = stable_from(values, noise)
            kind, since = (kind, None) if stable is None else (OutcomeKind.CONVERGED, blocks.blocks[stable].begin)
        return self._worded(replace(base, kind=kind, since=since))

    def _worded(self, outcome: Outcome) -> Outcome:
        """Return the outcome with its sentence."""
        text = f"{outcome.kind}: {self._levels(outcome)}{self._note}{_clause(outcome, self._facts)}"
        return replace(outcome, text=text)

    def _levels(self, outcome: Outcome) -> str:
        """Return `return 21 -> 340 in 48 updates`; it starts from the best return if the run has fallen from it."""
        name = NAMES.get(outcome.key, outcome.key)
        first, last, best = (0.0 if level is None else level for level in (outcome.first, outcome.last, outcome.best))
        is_few = self._counted and outcome.episodes < RECENT_EPISODES
        few = f" (mean of all {self._number_of(outcome.episodes)})" if is_few else ""
        reach = f"-> {number(last)} in {outcome.updates:,} updates{few}"
        if outcome.kind is OutcomeKind.DECLINING and self._sign * (best - first) > self._sign * (first - last):
            return f"{name} {number(best)} at best {reach}, {number(first)} in the first rollouts"
        highest = f", {number(best)} at best" if outcome.kind in GOOD and self._below_best(outcome) else ""
        return f"{name} {number(first)} {reach}{highest}"

    def _below_best(self, outcome: Outcome) -> bool:
        """Return whether the return has lost more than `STABLE_BAND` of its rise."""
        first, last, best = (0.0 if level is None else level for level in (outcome.first, outcome.last, outcome.best))
        return self._sign * (best - last) > STABLE_BAND * self._sign * (best - first)

    def _flat_is_known(self, key: str, blocks: Blocks) -> bool:
        """Return True after enough updates and episodes; a finished run with many episodes needs fewer updates."""
        if self._ended and self._updates >= MIN_ENDED_UPDATES and blocks.episodes >= MIN_ENDED_EPISODES:
            return key != RECENT_RETURN or blocks.episodes >= MIN_FLAT_AVERAGED_EPISODES
        return self._updates >= MIN_FLAT_UPDATES and blocks.episodes >= flat_episodes(key)


def course_of(values: Array, noise: Noise) -> OutcomeKind:
    """Return the kind of a series of at least `MIN_BLOCKS` block means: learning, flat or declining."""
    count = len(values)
    width, last_width = max(3, math.ceil(count / 10)), max(3, math.ceil(count / 15))
    levels = smoothed(values, width)
    last = float(np.mean(values[-last_width:]))
    scores = trend_scores(values)
    upward = rise(values, levels, noise, width, scores)
    downward = rise(-values, -levels, noise, width, (-scores[0], -scores[1]))
    best = float(levels[upward.top])
    doubt = 3 * noise.lasting / math.sqrt(last_width)
    if upward.significant and best - last < max(LOST_SHARE * upward.height, doubt):
        return OutcomeKind.LEARNING
    fallen = float(np.mean(values[:width])) - last
    declining = upward.significant or (downward.significant and fallen >= max(LOST_SHARE * downward.height, doubt))
    return OutcomeKind.DECLINING if declining else OutcomeKind.FLAT


def stable_from(values: Array, noise: Noise) -> int | None:
    """Return the index of the block after which all levels stay near that of the last third; None if the series still changes at its end.

    Near is within `MAX_STABLE_CHANGE` of the rise, and noise. A series still changes if a straight line through its last blocks rises or
    falls by `MAX_STABLE_CHANGE` of the rise, and by `STABLE_ERRORS` standard errors. A change that is not known to `MAX_STABLE_ERROR` of
    the rise does not show a stable level.
    """
    count, width = len(values), max(3, math.ceil(len(values) / 10))
    last = values[-max(MIN_STABLE_BLOCKS, math.ceil(STABLE_SHARE * count)) :]
    levels = smoothed(values, width)
    height = float(np.max(levels) - np.mean(values[:width]))
    band = MAX_STABLE_CHANGE * height + noise.scale / math.sqrt(width)
    outside = np.flatnonzero(np.abs(levels - np.mean(last)) > band)
    begin = int(outside[-1]) + 1 if len(outside) else 0
    time = np.arange(len(last)) - (len(last) - 1) / 2
    slope = float(time @ last) / float(time @ time)
    change, error = abs(slope) * len(last), float(np.std(last - slope * time)) * math.sqrt(12 / len(last))
    is_stable = error <= MAX_STABLE_ERROR * height and change <= max(MAX_STABLE_CHANGE * height, STABLE_ERRORS * error)
    return begin if is_stable and count - begin >= len(last) else None


def flat_episodes(key: str) -> int:
    """Return the number of episodes after which a series can be called flat."""
    return MIN_FLAT_AVERAGED_EPISODES if key == RECENT_RETURN else MIN_FLAT_EPISODES


def _clause(outcome: Outcome, facts: Facts) -> str:
    """Return the end of the sentence: the reason for the kind."""
    threshold = "" if outcome.threshold is None else number(outcome.threshold)
    passed = f"; the first rollouts were already above the environment's threshold of {threshold}, as can happen when rewards are scaled"
    passed = passed if outcome.began_above else ""
    match outcome.kind:
        case OutcomeKind.SOLVED:
            above = outcome.last is not None and outcome.threshold is not None and outcome.last >= outcome.threshold
            place = f"{'above' if above else 'not far below'} {threshold}, the threshold of {facts.env or 'the environment'}"
            return f", {place}, since update {outcome.since:,}"
        case OutcomeKind.CONVERGED:
            below = f", far below {threshold}, the threshold of {facts.env or 'the environment'}" if outcome.is_far_below else ""
            return f", stable since update {outcome.since:,}{below}{passed}"
        case OutcomeKind.FLAT:
            return f", no lasting rise above the first rollouts{passed}"
        case OutcomeKind.TOO_SHORT:
            least = f"{MIN_FLAT_UPDATES} updates and {flat_episodes(outcome.key)} episodes"
            return f", no change yet; to call a curve flat takes {least}"
        case _:
            return passed


def outcome_of(records: Iterable[Record], facts: Mapping[str, Any] | None = None, status: RunStatus | None = None) -> Outcome:
    """Return the outcome of some records of a run, such as a window of its updates."""
    judge = OutcomeJudge(facts)
    for record in records:
        judge.add(record)
    return judge.end(status)
