"""Four runs with a fault from their first update on: the callback names the cause, and a healthy run raises no alarm."""

from typing import Any

import pytest

from esper_telemetry import Alarm, Telemetry
from esper_telemetry.adapters.sb3 import TelemetryCallback
from esper_telemetry.alarms import Thresholds
from esper_telemetry.lab.faults.fault_catalogue import find
from esper_telemetry.lab.faults.sb3_models import MODELS
from esper_telemetry.lab.faults.sb3_runs import BREAKS

pytestmark = pytest.mark.sb3

QUIET = Thresholds(off=frozenset({"telemetry/overhead"}))
"""Tests share their cores, so only the benchmark judges the cost of telemetry."""

CAUSES = {
    "lr_x100": {"opt/update_too_large", "policy/kl_spike"},
    "reward_1e4": {"reward/unscaled"},
    "obs_mismatch": {"integrity/ratio_init"},
    "dead_relu": {"repr/dormant"},
}


def alarms_of(model: Any, updates: int) -> list[Alarm]:
    """Alarms that `on_alarm` receives during training."""
    received: list[Alarm] = []
    with Telemetry([], run_dir=None, detect=QUIET) as telemetry:
        telemetry.on_alarm(received.append)
        model.learn(updates * model.n_steps * model.n_envs, callback=TelemetryCallback(telemetry))
        live = list(received)
    return [alarm for alarm in live if alarm.event == "raise"]


@pytest.mark.parametrize("name", CAUSES)
def test_the_first_incident_names_the_fault(name: str) -> None:
    model = MODELS["sb3-cartpole"](1)
    BREAKS[name](model, find(name).dose)
    first = alarms_of(model, updates=8)[0]

    assert first.type in CAUSES[name]
    assert first.cause in CAUSES[name]
    assert first.axes.update <= 5


def test_a_healthy_run_raises_nothing() -> None:
    assert [alarm.type for alarm in alarms_of(MODELS["sb3-cartpole"](1), updates=12)] == []
