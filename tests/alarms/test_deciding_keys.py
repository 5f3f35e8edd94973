"""The key that an alarm names is one that its rule declares, and the first that a rule declares is one that decides."""

from __future__ import annotations

import re
from functools import cache

import pytest
from test_rules import CASES, case_records

from esper_telemetry.alarms import Detectors
from esper_telemetry.alarms.registry import alarm_rules
from esper_telemetry.alarms.rule import AlarmRule
from esper_telemetry.core.record import RUN_FAILED

RULES = {rule.type: rule for rule in alarm_rules()}


def is_instance(key: str, template: str) -> bool:
    """True for a key that the template, or one of its histories, stands for: `{key}` is any key, another label a part of one."""
    pattern = re.escape(template).replace(re.escape("{key}"), ".+")
    return re.fullmatch(re.sub(r"\\\{[a-z_]+\\\}", "[a-z0-9_]+", pattern), key) is not None


@cache
def deciding_keys(kind: str) -> frozenset[str]:
    """Keys of all findings of a rule in the records of its case, of those that speak for an alarm and of the others."""
    case = CASES[kind]
    detectors = Detectors(case.facts, case.thresholds)
    judge, keys = detectors._judges[kind], set[str]()

    def recorded(view):  # type: ignore[no-untyped-def]
        findings = list(judge(view))
        keys.update(finding.key for finding in findings)
        return findings

    detectors._judges[kind] = recorded
    for record in case_records(kind):
        detectors.step(record)
    return frozenset(keys)


@pytest.mark.parametrize("kind", CASES)
def test_what_decides_is_declared(kind: str) -> None:
    undeclared = {
        key for key in deciding_keys(kind) if not any(is_instance(key, template) for template in RULES[kind].inputs)
    }

    assert undeclared == set()


@pytest.mark.parametrize("rule", [rule for rule in alarm_rules() if rule.type in CASES], ids=lambda rule: rule.type)
def test_the_first_input_decides(rule: AlarmRule) -> None:
    """So that the page of a metric says under `decides` what its value really raises."""
    assert rule.type != RUN_FAILED
    assert any(is_instance(key, rule.inputs[0]) for key in deciding_keys(rule.type))
