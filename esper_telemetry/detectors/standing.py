"""Where each alarm stands: from the findings of its rule to raised, worse and over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from esper_telemetry.detectors.incidents import Incident
from esper_telemetry.detectors.rule import Finding, Rule
from esper_telemetry.record import AlarmEvent
from esper_telemetry.series.hysteresis import Hysteresis, Patience

WORSE = 0.25
"""Severity that an alarm has to gain before it is told again."""


class News(NamedTuple):
    """What has become of an alarm in one update."""

    event: AlarmEvent
    finding: Finding
    streak: int


class Standing:
    """One type of alarm: a state machine per head, group or layer that its rule judges; the alarm is on while any of them is.

    Attributes:
        rule: what it is about.
        since: update in which the updates began that spoke for it; None while it is off.
        severity: the latest of those that are on, at their worst.
        told: severity that was last told.
        silent: whether it was raised in a storm, so that nobody was told.
        incident: that it belongs to.
        instances: those that are on, with their latest findings.
    """

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.since: int | None = None
        self.severity = self.told = 0.0
        self.silent = False
        self.incident: Incident | None = None
        self.instances: dict[str, Finding] = {}
        self._patience = Patience(n_on=rule.n_on, n_off=rule.n_off, warmup=rule.warmup)
        self._states: dict[str, Hysteresis] = {}

    def step(self, findings: Sequence[Finding], update: int) -> News | None:
        """Takes the findings of an update; several of one type are one event, with the worst of them."""
        if not self._states and max(finding.severity for finding in findings) < self._patience.on:
            return None  # nothing is on, and nothing speaks for a change: the usual case
        was = bool(self.instances)
        spoke = 0
        last = None
        for finding in findings:
            streak = self._judge(finding, update)
            if finding.instance in self.instances:
                spoke = max(spoke, streak)
            last = finding
        worst = max(self.instances.values(), key=lambda finding: finding.severity, default=None)
        self.severity = worst.severity if worst else 0.0
        if worst is not None and not was:
            self.since = update - spoke + 1
            self.told = self.severity
            return News(AlarmEvent.RAISE, worst, spoke)
        if worst is not None and self.severity >= self.told + WORSE:
            self.told = self.severity
            return News(AlarmEvent.UPDATE, worst, spoke)
        if was and worst is None and last is not None:
            return News(AlarmEvent.CLEAR, last, self.rule.n_off)
        return None

    def stop(self) -> Finding | None:
        """Ends the alarm, whatever the values say, and forgets its streaks; its last finding, if it was on."""
        worst = max(self.instances.values(), key=lambda finding: finding.severity, default=None)
        self.instances.clear()
        self._states.clear()
        self.severity = 0.0
        return worst

    def _judge(self, finding: Finding, update: int) -> int:
        """Steps the state machine of one instance; returns for how many updates it has spoken for the change."""
        name, severity = finding.instance, finding.severity
        state = self._states.get(name)
        if state is None:
            if severity < self._patience.on:
                return 0
            state = Hysteresis(self._patience)
        before = state.streak
        state, change = replace(state, updates=update - 1).step(severity)
        if state.active:
            self.instances[name] = finding
        else:
            self.instances.pop(name, None)
        if state.active or state.streak:
            self._states[name] = state
        else:  # as good as new: most instances are, and cost nothing
            self._states.pop(name, None)
        return before + 1 if change else 0
