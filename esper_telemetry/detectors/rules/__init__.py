"""Every rule there is, one file per family, causes before effects."""

from __future__ import annotations

from esper_telemetry.detectors.rule import Rule
from esper_telemetry.detectors.rules import (
    balance,
    course,
    data,
    ending,
    exploration,
    gradients,
    growth,
    integrity,
    memory,
    numerics,
    observations,
    optimizer,
    policy,
    representation,
    task,
    telemetry,
    trust_region,
    value,
)

RULES: tuple[Rule, ...] = (
    *numerics.RULES,
    *integrity.RULES,
    *observations.RULES,
    *data.RULES,
    *optimizer.RULES,
    *gradients.RULES,
    *balance.RULES,
    *course.RULES,
    *representation.RULES,
    *memory.RULES,
    *policy.RULES,
    *trust_region.RULES,
    *exploration.RULES,
    *value.RULES,
    *growth.RULES,
    *task.RULES,
    *ending.RULES,
    *telemetry.RULES,
)
"""In the order in which they are asked."""
