"""Results of the equations of an update, for tests of scripts."""

from __future__ import annotations

from typing import Any

import torch

from esper_telemetry.core.facts import Facts
from esper_telemetry.core.group import MetricGroup
from esper_telemetry.equations.equation import EQUATION_KEY
from esper_telemetry.events import RolloutEnd
from esper_telemetry.updates.equation_checks import equation_checks
from esper_telemetry.updates.target_equations import Held
from esper_telemetry.updates.update import Update


def equation_values(update: Update, facts: Facts, held: Held | None = None) -> dict[str, float]:
    """Return the errors by the names of equations and of their explanations."""
    groups = [group for check in equation_checks(update, facts, held) for group in check()]  # type: ignore[union-attr]  # all return groups
    values = {key: value for group in groups if isinstance(group, MetricGroup) for key, value in group.values().items()}
    return {key.removeprefix(EQUATION_KEY): value for key, value in values.items()}


def rollout_end(shape: tuple[int, ...], **columns: Any) -> RolloutEnd:
    """Return a rollout whose columns are zeros unless they are given; its log-probabilities are -1, and no episode ends."""
    zeros, never = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
    plain: dict[str, Any] = dict.fromkeys(("rewards", "values", "advantages", "returns", "next_values"), zeros)
    others = {"log_probs": zeros - 1, "ended": never, "terminated": never, "actions": {}, "gamma": 0.9}
    return RolloutEnd(update=1, env_step=1, **plain | others | columns)
