"""Compute the state machines of alarms from the inputs of a reference case."""

from esper_telemetry.alarms.alarm_state import COOLDOWN_FACTOR, Escalation, Hysteresis, Patience
from vector_adapters.inputs import Inputs, Values, of_formula, of_keys

PATIENCE = ("on", "off", "n_on", "n_off", "warmup")


@of_formula("E1")
def hysteresis(inputs: Inputs) -> Values:
    state = Hysteresis(Patience(**{name: inputs[name] for name in PATIENCE}))
    active, events = [], []
    for update, severity in enumerate(inputs["severity"], 1):
        change = state.step(None if severity is None else float(severity))
        active.append(state.active)
        events += [[change, update]] if change else []
    return {"aux:active": active, "aux:events": events}


@of_keys("telemetry/escalation_remaining")
def escalation(inputs: Inputs) -> Values:
    assert inputs["cooldown_factor"] == COOLDOWN_FACTOR
    state = Escalation(inputs["durations"], inputs["cap"])
    remaining = [state.step(inputs["raises"].get(str(update), ())) for update in range(1, inputs["updates"] + 1)]
    return {"telemetry/escalation_remaining": remaining}
