"""Which questions a run's records cannot answer, and what they lack."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from esper_telemetry.detectors.rule import Rule


class Questions:
    """Notes which inputs of the rules a run has had.

    Args:
        rules: those that apply to it.
        facts: of the run.
    """

    def __init__(self, rules: Iterable[Rule], facts: Mapping[str, Any]) -> None:
        self._rules = tuple(rules)
        self._lacking = {rule.type: [name for name in rule.facts if facts.get(name) is None] for rule in self._rules}
        self._unseen = {key for rule in self._rules if not rule.optional for key in rule.inputs}

    def see(self, values: Mapping[str, float]) -> None:
        """Takes in the keys of a record."""
        if self._unseen:
            self._unseen -= values.keys()

    def open(self, *, sampled: bool = True) -> dict[str, str]:
        """By type of alarm, why it cannot be told.

        Args:
            sampled: also of values that are measured in some updates only, and may still come.
        """
        found = {}
        for rule in self._rules:
            facts = self._lacking[rule.type]
            keys = (
                [] if rule.optional or (rule.sampled and not sampled) else [k for k in rule.inputs if k in self._unseen]
            )
            if facts:
                found[rule.type] = f"the run does not say its {', '.join(facts)}"
            elif keys:
                found[rule.type] = f"no record has {', '.join(keys)}"
        return found
