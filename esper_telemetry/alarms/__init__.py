"""The known ways in which a PPO run goes wrong: which metrics show each, what it means and what to try. Plain data.

The bounds behind them stand with the metrics that they read; `reads` names keys or templates of the catalogue, the deciding one first.
"""

from __future__ import annotations

from esper_telemetry.alarms.growth import SEEDS
from esper_telemetry.alarms.kind import AlarmType
from esper_telemetry.alarms.learning import ADVANTAGES, INTEGRITY, NUMERICS, POLICY, RUN, TASK, TELEMETRY, VALUE
from esper_telemetry.alarms.network import GRADIENTS, MEMORY, OPTIMIZER, REPRESENTATION

__all__ = ["ALARMS", "NONFINITE", "AlarmType", "alarms_reading"]

ALARMS = (
    *NUMERICS,
    *INTEGRITY,
    *POLICY,
    *VALUE,
    *ADVANTAGES,
    *GRADIENTS,
    *OPTIMIZER,
    *REPRESENTATION,
    *MEMORY,
    *SEEDS,
    *TASK,
    *RUN,
    *TELEMETRY,
)
"""In causal order: what comes first tends to be the cause of what comes after."""


NONFINITE = "_nonfinite"
"""How the keys end that count what was left out of a metric because it was not finite."""


def alarms_reading(key: str) -> tuple[AlarmType, ...]:
    """Those that read a key or template, the ones that it decides first."""
    if key.endswith(NONFINITE):
        return NUMERICS
    deciding = [alarm for alarm in ALARMS if alarm.reads[0] == key]
    return (*deciding, *(alarm for alarm in ALARMS if key in alarm.reads[1:]))
