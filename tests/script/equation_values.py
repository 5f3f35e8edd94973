"""Results of the equations of an update, for tests of scripts."""

from __future__ import annotations

from esper_telemetry.core.facts import Facts
from esper_telemetry.core.group import MetricGroup
from esper_telemetry.equations.equation import EQUATION_KEY
from esper_telemetry.updates.equation_checks import equation_checks
from esper_telemetry.updates.target_equations import Held
from esper_telemetry.updates.update import Update


def equation_values(update: Update, facts: Facts, held: Held | None = None) -> dict[str, float]:
    """Return the errors by the names of equations and of their explanations."""
    groups = [group for check in equation_checks(update, facts, held) for group in check()]  # type: ignore[union-attr]  # all return groups
    values = {key: value for group in groups if isinstance(group, MetricGroup) for key, value in group.values().items()}
    return {key.removeprefix(EQUATION_KEY): value for key, value in values.items()}
