"""Which values of a record belong into histories."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from esper_telemetry.detectors.rule import Rule
from esper_telemetry.detectors.telling import matcher


class Watches:
    """Which values of a record belong into histories; patterns are resolved once per set of keys."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        patterns = {pattern for rule in rules for pattern in rule.watches}
        self._plain = sorted(pattern for pattern in patterns if "*" not in pattern)
        self._matchers = [matcher(pattern) for pattern in sorted(patterns) if "*" in pattern]
        self._known: dict[str, bool] = {}

    def of(self, values: Mapping[str, float]) -> dict[str, float]:
        """Those that are watched."""
        found = {key: values[key] for key in self._plain if key in values}
        known = self._known
        for key in values:
            if key not in known:
                known[key] = any(match(key) for match in self._matchers)
            if known[key]:
                found[key] = values[key]
        return found
