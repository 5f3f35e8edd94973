"""The tone of a run, which all views and backends use for its header, colour and summary.

It depends on the outcome, on active alarms and on values beyond their critical bounds, so that no view calls a run healthy that does not
learn.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from enum import StrEnum
from typing import Final

from esper_telemetry.alarms.verdict.run_outcome import BAD, GOOD, OutcomeKind
from esper_telemetry.core.record import AlarmLevel


class Tone(StrEnum):
    """State of a run in one word.

    `good`: has learned something without active alarms or critical values. `open`: not known to be good or bad. `warn`: is flat or
    declines, has an active warning, or has critical values before it has learned. `bad`: failed or has an active critical alarm.
    """

    GOOD = "good"
    OPEN = "open"
    WARN = "warn"
    BAD = "bad"


COLOURS: Final = {Tone.GOOD: "green", Tone.OPEN: "cyan", Tone.WARN: "yellow", Tone.BAD: "red"}  # colours of a terminal


def tone_of(outcome: OutcomeKind | str, lasting: Iterable[AlarmLevel] = (), critical: Collection[str] = ()) -> Tone:
    """Return the tone of a run.

    Args:
        outcome: kind of the outcome; an unknown kind counts as neither good nor bad.
        lasting: levels of the active alarms.
        critical: keys of values beyond their critical bounds.
    """
    levels = set(lasting)
    if outcome == OutcomeKind.FAILED or AlarmLevel.CRITICAL in levels:
        return Tone.BAD
    if outcome in BAD or AlarmLevel.WARN in levels or (critical and outcome not in GOOD):
        return Tone.WARN
    return Tone.GOOD if outcome in GOOD and not critical else Tone.OPEN
