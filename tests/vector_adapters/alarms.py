"""Compute the state machines of alarms from the inputs of a reference case."""

from collections.abc import Mapping
from typing import Any

from esper_telemetry.alarms.alarm_state import Escalation, Hysteresis, Patience

Inputs = Mapping[str, Any]
Values = dict[str, Any]

PATIENCE = ("on", "off", "n_on", "n_off", "warmup")


def hysteresis(inputs: Inputs) -> Values:
    """E1."""
    state = Hysteresis(Patience(**{name: inputs[name] for name in PATIENCE}))
    active, events = [], []
    for update, severity in enumerate(inputs["severity"], 1):
        state, change = state.step(None if severity is None else float(severity))
        active.append(state.active)
        events += [[change, update]] if change else []
    return {"aux:active": active, "aux:events": events}


def escalation(inputs: Inputs) -> Values:
    """E2."""
    state = Escalation(inputs["durations"], inputs["cap"], inputs["cooldown_factor"])
    remaining = []
    for update in range(1, inputs["updates"] + 1):
        state, left = state.step(inputs["raises"].get(str(update), ()))
        remaining.append(left)
    return {"telemetry/escalation_remaining": remaining}


ADAPTERS = {"telemetry/escalation_remaining": escalation}
FORMULA_ADAPTERS = {"E1": hysteresis}
