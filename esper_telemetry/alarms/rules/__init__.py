"""Every rule there is, one file per family, causes before effects."""

from __future__ import annotations

from esper_telemetry.alarms.rule import Rule as Rule
from esper_telemetry.alarms.rules import balance as balance
from esper_telemetry.alarms.rules import course as course
from esper_telemetry.alarms.rules import data as data
from esper_telemetry.alarms.rules import endings as ending
from esper_telemetry.alarms.rules import exploration as exploration
from esper_telemetry.alarms.rules import gradients as gradients
from esper_telemetry.alarms.rules import growth as growth
from esper_telemetry.alarms.rules import integrity as integrity
from esper_telemetry.alarms.rules import memory as memory
from esper_telemetry.alarms.rules import numerics as numerics
from esper_telemetry.alarms.rules import observations as observations
from esper_telemetry.alarms.rules import optimizer as optimizer
from esper_telemetry.alarms.rules import policy as policy
from esper_telemetry.alarms.rules import representation as representation
from esper_telemetry.alarms.rules import task as task
from esper_telemetry.alarms.rules import telemetry as telemetry
from esper_telemetry.alarms.rules import trust_region as trust_region
from esper_telemetry.alarms.rules import value as value

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
