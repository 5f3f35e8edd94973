"""How episodes end: terminations that are time limits, and time limits that are terminations."""

from __future__ import annotations

from collections.abc import Iterator

from esper_telemetry.detectors.rule import Finding, View, hard, number

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
