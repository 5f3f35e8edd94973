"""What an alarm says: a sentence with numbers, what to try, and the values that show it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from esper_telemetry.alarms.alarm_state import AlarmState
from esper_telemetry.alarms.kinds import ALARMS, AlarmType
from esper_telemetry.alarms.rule import Finding, View
from esper_telemetry.core.record import RUN_FAILED, AlarmEvent

MOST = 24
"""Values of a record that are attached to an alarm, at most."""

EXPLAIN = ("policy", "value", "loss", "adv", "ret", "integrity")
"""Families of keys, of which at least one is needed to tell why gradients or steps of the optimizer are as they are."""
SYMPTOMS = ("grad/", "opt/")
GRADIENTS_ALONE = (
    "Only gradients were seen, so the cause is not known: report ratios, losses, values and advantages too, by an adapter's callback or "
    "with the functions of docs/own_loop.md"
)

INSTANCES = 8
"""Heads, groups or layers that are named, at most."""

KINDS: Mapping[str, AlarmType] = {alarm.type: alarm for alarm in ALARMS}


def text_of(standing: AlarmState, finding: Finding, event: AlarmEvent, update: int, *, explained: bool = True) -> str:
    """What has happened, since when, and what to try; only the symptom where nothing was seen that could explain it."""
    kind = KINDS[standing.rule.type]
    clause = finding.text() if finding.text else kind.meaning.rstrip(".")
    since = standing.since or update
    if event is AlarmEvent.CLEAR:
        return f"Over since update {update}, after {update - since} updates: {kind.meaning}"
    if standing.rule.type == RUN_FAILED:  # its sentence says by itself when it happened
        return f"{clause}. Try: {kind.action}"
    more = len(standing.instances) - 1
    others = f" (and {more} more)" if more > 0 else ""
    worse = "Worse: since" if event is AlarmEvent.UPDATE else "Since"
    advice = f"Try: {kind.action}" if explained or not kind.type.startswith(SYMPTOMS) else f"{GRADIENTS_ALONE}."
    return f"{worse} update {since}, {clause}{others}. {advice}"


def evidence_of(standing: AlarmState, finding: Finding, view: View) -> dict[str, Any]:
    """Values that show it, what they usually are, and where it is seen; bounded in size."""
    values = dict(_chosen((finding.key, *standing.rule.evidence), view.values))
    usual = {key: [*found] for key in values if (found := view.baselines.usual(key))}
    evidence: dict[str, Any] = {"values": values}
    if usual:
        evidence["usual"] = usual
    named = {name: found.severity for name, found in standing.instances.items() if name}
    if named:
        worst = sorted(named, key=lambda name: -named[name])[:INSTANCES]
        evidence["where"] = {name: named[name] for name in worst}
    return evidence


def _chosen(patterns: Iterable[str], values: Mapping[str, float]) -> Iterable[tuple[str, float]]:
    left = MOST
    taken: set[str] = set()
    for pattern in patterns:
        for key in [pattern] if pattern in values else _matching(pattern, values):
            if left and key not in taken:
                taken.add(key)
                left -= 1
                yield key, values[key]


def _matching(pattern: str, values: Mapping[str, float]) -> list[str]:
    if "*" not in pattern:
        return []
    match = matcher(pattern)
    return [key for key in values if match(key)]


@lru_cache(maxsize=512)
def matcher(pattern: str) -> Any:
    """A test for keys that a pattern matches, `*` being part of one segment."""
    return re.compile(re.escape(pattern).replace(r"\*", "[a-z0-9_]*")).fullmatch
