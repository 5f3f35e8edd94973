"""Alarms about the task and about the exception that ends a run, which never explain another alarm; the course of the return as events."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from esper_telemetry.alarms.alarm_bounds import above, count, hard
from esper_telemetry.alarms.judges import StateJudge, reading
from esper_telemetry.alarms.rule import CAUSE_LAST_RANK, Finding, View, alarm
from esper_telemetry.alarms.rules.exploration_alarms import bonus_outweighs, calm_advice
from esper_telemetry.alarms.rules.integrity_alarms import NONFINITE_KEY
from esper_telemetry.core.messages import number, percent
from esper_telemetry.core.record import RUN_FAILED, Axes, RunStatus

COUNT, RETURN, EPISODE_RETURN = "episode/count", "episode/return_mean_100", "episode/return_mean"
SETTLE_UPDATES = 10  # updates with episodes after which the average return is meaningful
EPISODES_UPDATES = count("episodes_updates", 20, "smallest number of updates without the end of an episode")
EPISODES_FACTOR = count("episodes_factor", 5, "smallest multiple of the longest such gap so far")


@dataclass(slots=True)
class Gaps:
    """Whether an episode has ended, updates since the last end, and the longest gap before an end."""

    ended: bool = False
    gap: int = 0
    longest: int = 0


@reading(COUNT)
def no_episodes(view: View, ends: float, gaps: Gaps) -> Iterator[Finding]:
    """Episodes stopped ending, for much longer than an episode takes."""
    if view.facts.reported_returns:
        return
    if ends > 0:
        gaps.ended, gaps.gap, gaps.longest = True, 0, max(gaps.longest, gaps.gap)
    else:
        gaps.gap += 1
    horizon, steps = view.facts.horizon, view.facts.num_steps
    by_limit = horizon / steps if horizon is not None and steps else None  # updates per episode
    expected = by_limit or gaps.longest
    bound = max(view.limits[EPISODES_UPDATES], view.limits[EPISODES_FACTOR] * expected)
    wrong = (gaps.ended or by_limit is not None) and gaps.gap > bound
    words = f"no episode has ended for {gaps.gap} updates, so the return is unknown (usually at most {{}} updates pass between two ends)"
    yield Finding(hard(wrong), COUNT, ends, 0.0).says(words, max(expected, 1))


RETURN_DROP = above("return_drop", 0.6, "share of the gained return that is lost again")


@dataclass(slots=True)
class ReturnLevels:
    """Number of updates with a return, its average, the average when it settled, and the largest since."""

    count: int = 0
    level: float = 0.0
    first: float = 0.0
    best: float = 0.0


@reading(RETURN)
def return_drop(view: View, value: float, past: ReturnLevels) -> Iterator[Finding]:
    """A return that has lost much of what it had gained."""
    past.count += 1
    level = past.level if past.count > 1 else value
    level = past.level = level + max(0.1, 1 / past.count) * (value - level)
    if past.count == SETTLE_UPDATES:
        past.first = past.best = level
    if past.count < SETTLE_UPDATES:
        return
    best, drop = max(past.best, level), view.limits[RETURN_DROP]
    past.best, learned, lost = best, best - past.first, best - value
    wrong = learned > 0 and lost > drop * learned and lost > 0.3 * abs(best)
    finding = Finding(hard(wrong), RETURN, value, best - drop * learned, adaptive=True)
    outweighed = bonus_outweighs(view)
    yield finding.with_advice((lambda: calm_advice(view, starved=False)) if outweighed else None).with_text(
        lambda: (
            f"the return has been {number(value)}, down from {number(best)}: {percent(min(1.0, lost / learned))} of the improvement is lost"
        )
    )


FAILED_KEY: Final = f"alarm/{RUN_FAILED}"
MAX_MESSAGE_CHARACTERS: Final = 240
"""Characters of the exception's message that an alarm quotes; the journal's event keeps a thousand."""
MAX_NAMED_ENVIRONMENTS: Final = 8


class Failure(NamedTuple):
    """A `failure` event of a journal."""

    seq: int
    axes: Axes
    data: Mapping[str, Any]


def failure_findings(data: Mapping[str, Any], update: int) -> dict[str, Finding]:
    """Return the findings of a failure event by type of alarm, causes first."""
    sentence = failure_sentence(data, update)
    findings = {RUN_FAILED: Finding(1.0, FAILED_KEY).with_text(lambda: sentence)}
    tensor = first_tensor(data)
    if tensor:
        entries = float((data.get("nonfinite") or {}).get("count", 1))
        nonfinite = Finding(1.0, NONFINITE_KEY, entries, 0.0).with_text(lambda: f"the first non-finite tensor is {tensor}")
        findings = {NONFINITE_KEY: nonfinite, **findings}
    return findings


def bad_ending(status: RunStatus | None, last_update: int, failures: Sequence[Failure]) -> str:
    """Return the sentence about a run that failed or was killed; empty if it finished or is still running."""
    if status is RunStatus.KILLED:
        return (
            f"The run was killed after update {last_update:,}: its process ended without an exception (out of memory, a signal, "
            "a lost machine). Look for the reason in the log of the job or of the system."
        )
    if status is not RunStatus.FAILED:
        return ""
    if not failures:
        return f"The run failed after update {last_update:,} without an exception in its journal. Look for the reason in the job's log."
    return f"{failure_sentence(failures[-1].data, failures[-1].axes.update + 1)}."


def failure_sentence(data: Mapping[str, Any], update: int) -> str:
    """Return a sentence without full stop: the update, the exception and the first non-finite tensor of a failure event."""
    message = next(iter(str(data.get("message", "")).strip().splitlines()), "").strip()
    if len(message) > MAX_MESSAGE_CHARACTERS:
        message = f"{message[:MAX_MESSAGE_CHARACTERS]}..."
    exception = ": ".join(part for part in (str(data.get("exception", "")), message) if part)
    tensor = first_tensor(data)
    place = f"; the first non-finite tensor is {tensor}" if tensor else ""
    return f"The run failed at update {update:,}: {exception.rstrip('.')}{place}"


def first_tensor(data: Mapping[str, Any]) -> str:
    """Return the first non-finite tensor of a failure event, as `observations (3 of 32 values, environments 2)`; empty if none is."""
    nonfinite = data.get("nonfinite")
    if not nonfinite:
        return str(data.get("first_nonfinite") or "")
    environments = list(map(str, nonfinite.get("environments", ())))
    more = ", ..." if len(environments) > MAX_NAMED_ENVIRONMENTS else ""
    where = f", environments {', '.join(environments[:MAX_NAMED_ENVIRONMENTS])}{more}" if environments else ""
    return f"{nonfinite['tensor']} ({nonfinite['count']:,} of {nonfinite['size']:,} values{where})"


def resumed(view: View) -> Iterator[Finding]:
    """End the alarm: a record after the failure means that the run was resumed."""
    yield Finding(0.0, FAILED_KEY)


SPAN_UPDATES: Final = 10  # updates with episodes that are compared with as many before them
STARTED_SHARE: Final = 0.1  # share of a run after which its returns are judged
STARTED_UPDATES: Final = 20  # the same in updates, if the length of the run is not known
PLATEAU_SPANS: Final = 5  # spans in a row whose means make a plateau
STILL_SHARE: Final = 0.15  # share of the range of returns so far within which these means lie
CHANGED_SHARE: Final = 0.1  # share of the range of returns so far that counts as a change
NOISE_ERRORS: Final = 4.0  # standard errors of the difference that a change must also exceed
MAX_RETURN: Final = 1e100  # larger returns are skipped: their squares overflow
Event = tuple[str, Mapping[str, Any]]


class TaskEvents:
    """Course of the return of one run."""

    def __init__(self) -> None:
        self._returns: deque[float] = deque(maxlen=2 * SPAN_UPDATES)
        self._range: tuple[float, float] | None = None
        self._state = ""
        self._means: deque[float] = deque(maxlen=PLATEAU_SPANS)
        self._since = 0

    def step(self, values: Mapping[str, float], update: int, progress: float | None) -> tuple[Event, ...]:
        """Add an update; returns an event if the course has changed."""
        value = values.get(EPISODE_RETURN)
        if value is None or abs(value) > MAX_RETURN:
            return ()
        self._returns.append(value)
        low, high = self._range or (value, value)
        self._range = (min(low, value), max(high, value))
        self._since += 1
        started = update > STARTED_UPDATES if progress is None else progress >= STARTED_SHARE
        if not started or len(self._returns) < 2 * SPAN_UPDATES or self._since < SPAN_UPDATES:
            return ()
        self._since = 0
        return self._event(update)

    def _event(self, update: int) -> tuple[Event, ...]:
        """Compare the last two spans."""
        returns = [*self._returns]
        before, now = returns[:SPAN_UPDATES], returns[SPAN_UPDATES:]
        (old, variance_before), (new, variance) = _moments(before), _moments(now)
        error = ((variance_before + variance) / SPAN_UPDATES) ** 0.5
        low, high = self._range or (old, new)
        change = new - old
        clear = abs(change) > CHANGED_SHARE * (high - low) and abs(change) > NOISE_ERRORS * error
        if clear:
            self._means.clear()
        self._means.append(new)
        is_still = len(self._means) == PLATEAU_SPANS and max(self._means) - min(self._means) <= STILL_SHARE * (high - low)
        state, level = "plateau" if is_still else "", sum(self._means) / len(self._means)
        if clear:
            state = "improvement" if change > 0 else "degradation"
        if not state or state == self._state:
            return ()
        self._state = state
        updates = PLATEAU_SPANS * SPAN_UPDATES if state == "plateau" else SPAN_UPDATES
        place = "" if high <= low else f", {percent((level - low) / (high - low))} of the way from its lowest to its highest"
        words = {
            "improvement": f"the mean return of {updates} updates has risen from {number(old)} to {number(new)}",
            "degradation": f"the mean return of {updates} updates has fallen from {number(old)} to {number(new)}",
            "plateau": f"the return has stayed at {number(level)} for about {updates} updates{place}",
        }
        return ((f"task/{state}", {"update": update, "return": new, "before": old, "updates": updates, "text": words[state]}),)


def _moments(values: list[float]) -> tuple[float, float]:
    """Return mean and variance."""
    mean = sum(values) / len(values)
    return mean, sum((value - mean) ** 2 for value in values) / len(values)


FIRST_ALARM: Final = "Look for the alarm that came first; "  # left out of the advice if no other alarm was raised

RULES = (
    alarm("task/no_episodes", COUNT, "episode/length_mean", rank=CAUSE_LAST_RANK, hard=True, n_off=1, debug_updates=2)
    .says(
        "Episodes have stopped ending.",
        "Set a time limit; check that the environment's terminations reach the trainer.",
        "20 updates, and five times as long as an episode takes",
    )
    .shows(COUNT, "lstm/reset_rate", "lstm/age/max")
    .judged(StateJudge(no_episodes, Gaps()), EPISODES_UPDATES, EPISODES_FACTOR),
    alarm("task/return_drop", rank=CAUSE_LAST_RANK, relative=True, warmup=10, n_on=10, debug_updates=5)
    .reads(RETURN, EPISODE_RETURN)
    .says(
        "The return has fallen well below its best.",
        f"{FIRST_ALARM}return to the best checkpoint with a lower learning rate.",
        "Returns differ in sign and size, so the share of the improvement counts; unstable runs lose a third of it and recover.",
    )
    .shows("episode/*", "policy/kl", "policy/entropy_norm", "value/r2")
    .judged(StateJudge(return_drop, ReturnLevels()), RETURN_DROP),
    alarm(RUN_FAILED, "alarm/{key}", rank=CAUSE_LAST_RANK, hard=True, certain=True, n_off=1)
    .needs(required=())
    .says(
        "An exception ended the run.",
        "Read the exception and its traceback; if a tensor is non-finite, look at the code that computes the first one.",
        "always an error: raised by the failure event, ended by the next complete record",
    )
    .judged(resumed),
)
