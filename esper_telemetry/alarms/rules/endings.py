"""The exception that ends a run.

How episodes end: terminations that are time limits, and time limits that are terminations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from esper_telemetry.alarms.rule import Finding, Rule, View, hard, number
from esper_telemetry.alarms.rules.numerics import KEY as NONFINITE
from esper_telemetry.core.record import RUN_FAILED, Axes, RunStatus

ALARM_KEY = f"alarm/{RUN_FAILED}"
MESSAGE_CHARACTERS = 240
"""Of the exception's message; the journal's event has a thousand."""
NAMED_ENVIRONMENTS = 8


def failure_findings(data: Mapping[str, Any], update: int) -> dict[str, Finding]:
    """The findings of a failure event by type of alarm, causes first."""
    sentence = failure_sentence(data, update)
    findings = {RUN_FAILED: Finding(1.0, ALARM_KEY, text=lambda: sentence)}
    tensor = first_tensor(data)
    if tensor:
        count = float(data.get("nonfinite", {}).get("count", 1))
        nonfinite = Finding(1.0, NONFINITE, count, 0.0, text=lambda: f"the first tensor that is not finite: {tensor}")
        findings = {NONFINITE: nonfinite, **findings}
    return findings


class Failure(NamedTuple):
    """A `failure` event of a journal."""

    seq: int
    axes: Axes
    data: Mapping[str, Any]


def bad_ending(status: RunStatus | None, last_update: int, failures: Sequence[Failure]) -> str:
    """The sentence on a run that failed or was killed; empty for one that ended otherwise, or goes on."""
    if status is RunStatus.KILLED:
        return (
            f"The run was killed after update {last_update:,}: its process ended without an exception (out of memory, a signal, "
            "a lost machine); the log of the job or of the system says why."
        )
    if status is not RunStatus.FAILED:
        return ""
    if not failures:
        return f"The run ended as failed after update {last_update:,}, and its journal names no exception: the log of the job says why."
    return f"{failure_sentence(failures[-1].data, failures[-1].axes.update + 1)}."


def failure_sentence(data: Mapping[str, Any], update: int) -> str:
    """The update, the exception and the first non-finite tensor of a failure event, in a sentence without its full stop."""
    message = next(iter(str(data.get("message", "")).strip().splitlines()), "").strip()
    if len(message) > MESSAGE_CHARACTERS:
        message = f"{message[:MESSAGE_CHARACTERS]}..."
    exception = ": ".join(part for part in (str(data.get("exception", "")), message) if part)
    tensor = first_tensor(data)
    named = f"; the first tensor that is not finite: {tensor}" if tensor else ""
    return f"The run failed at update {update:,}: {exception.rstrip('.')}{named}"


def first_tensor(data: Mapping[str, Any]) -> str:
    """The first non-finite tensor of a failure event: `observations (3 of 32 values, environments 2)`; empty where all are finite."""
    found = data.get("nonfinite")
    if not found:
        return str(data.get("first_nonfinite") or "")
    environments = list(map(str, found.get("environments", ())))
    more = ", ..." if len(environments) > NAMED_ENVIRONMENTS else ""
    where = f", environments {', '.join(environments[:NAMED_ENVIRONMENTS])}{more}" if environments else ""
    return f"{found['tensor']} ({found['count']:,} of {found['size']:,} values{where})"


def goes_on(view: View) -> Iterator[Finding]:
    """A record follows: a run that had failed was resumed."""
    yield Finding(0.0, ALARM_KEY)


RULES = (
    Rule(
        type=RUN_FAILED,
        judge=goes_on,
        inputs=(),
        n_off=1,
        certain=True,
        source="always an error: raised by the failure event, over with the next whole record",
    ),
)


CUT_AT, CUT_BEFORE, OVER_AT, OVER_BEFORE = "cut at", "cut before", "over at", "over before"
"""Ends of episodes: cut off or over by themselves, at the time limit or before it."""

ERROR, CUT = "value/terminal_err", "episode/truncated_frac"
LENGTHS = {
    "episode/truncated_length_max": (CUT_AT, None),
    "episode/truncated_length_min": (None, CUT_BEFORE),
    "episode/terminated_length_max": (OVER_AT, None),
    "episode/terminated_length_min": (None, OVER_BEFORE),
}
"""What the end at the limit, and the end before it, of the episode with that length is called."""

SETTLES = 5
"""Updates with ends after which it is known which ends a task has."""

AT_LIMIT = 2
"""Updates in which episodes must have reached the limit, for the way in which they end there to be known."""

REPEATS = 2
"""Updates with ends that the task does not have, before they are told."""

FORGOTTEN = 5
"""Updates in a row without such an end, after which an earlier one was an accident."""


def confused_ends(view: View) -> Iterator[Finding]:
    """Episodes end in a way that this task has not had so far, and that contradicts its time limit."""
    limit, cut = view.facts.get("horizon"), view.get(CUT)
    if not isinstance(limit, int | float) or cut is None:
        return
    ends = ends_of(view, float(limit))
    if not ends:
        return
    memory = view.memory
    seen: dict[str, int] = memory.setdefault("ends", {})
    strange = contradiction(ends, seen) if memory.get("updates", 0) >= SETTLES else None
    if strange is not None:
        memory.update(again=memory.get("again", 0) + 1, since=0, strange=strange)
    else:
        memory["since"] = memory.get("since", 0) + 1
        if memory["since"] >= FORGOTTEN:
            memory["again"] = 0
        memory["updates"] = memory.get("updates", 0) + 1
        for end in ends if not memory.get("again") else ends & seen.keys():
            seen[end] = seen.get(end, 0) + 1
    error = view.get(ERROR)
    yield Finding(
        hard(memory.get("again", 0) >= REPEATS),
        ERROR if error is not None else CUT,
        error if error is not None else cut,
        instance="ends",
        text=lambda: _told(memory["strange"], float(limit), error),
    )


def ends_of(view: View, limit: float) -> set[str]:
    """The kinds of ends of one update."""
    found = set()
    for key, (at, before) in LENGTHS.items():
        length = view.get(key)
        if length is not None and length >= limit and at is not None:
            found.add(at)
        if length is not None and length < limit and before is not None:
            found.add(before)
    return found


def contradiction(ends: set[str], seen: dict[str, int]) -> str | None:
    """The end that contradicts those that the task has had; None where there is no such end.

    A limit cuts nothing off before it, and what lasts as long as the limit ends in one of the two ways, always.
    """
    if CUT_BEFORE in ends and CUT_BEFORE not in seen:
        return CUT_BEFORE
    if OVER_AT in ends and OVER_AT not in seen and seen.get(CUT_AT, 0) >= AT_LIMIT and CUT_AT not in ends:
        return OVER_AT
    if CUT_AT in ends and CUT_AT not in seen and seen.get(OVER_AT, 0) >= SETTLES and OVER_AT not in ends:
        return CUT_AT
    return None


def _told(strange: str, limit: float, error: float | None) -> str:
    """What the confusion does."""
    steps = number(limit)
    if strange == OVER_AT:
        off = "" if error is None else f", which the critic is told by mistake: it is off by {number(error)} there"
        return f"episodes that reach their time limit of {steps} steps have been taken for terminated{off}"
    what = (
        f"before their time limit of {steps} steps"
        if strange == CUT_BEFORE
        else f"after {steps} steps, where they used to end"
    )
    return f"episodes have been cut off {what}: a termination is taken for a time limit, and the critic goes on counting behind it"
