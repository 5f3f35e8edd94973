"""Four runs with a fault: the callback names the cause during training, and raises nothing where nothing is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import sb3_broken

from esper_telemetry import Alarm, Telemetry
from esper_telemetry.adapters.sb3 import TelemetryCallback
from esper_telemetry.alarms import Thresholds

pytestmark = pytest.mark.sb3

QUIET = Thresholds(off=frozenset({"telemetry/overhead"}))
"""Tests share their cores: what telemetry costs is judged by the benchmark."""

CAUSES = {
    "learning_rate_x100": {"opt/update_too_large", "policy/kl_spike"},
    "reward_1e4": {"reward/unscaled"},
    "other_observations": {"integrity/ratio_init"},
    "dead_relu": {"repr/dormant"},
}


def alarms_of(model: Any, updates: int) -> list[Alarm]:
    """Alarms that `on_alarm` receives during training."""
    received: list[Alarm] = []
    with Telemetry([], run_dir=None, detect=QUIET) as telemetry:
        telemetry.on_alarm(received.append)
        model.learn(updates * sb3_broken.ROLLOUT, callback=TelemetryCallback(telemetry))
        live = list(received)
    return [alarm for alarm in live if alarm.event == "raise"]


@pytest.mark.parametrize("name", CAUSES)
def test_the_first_incident_names_the_fault(name: str) -> None:
    first = alarms_of(getattr(sb3_broken, name)(), updates=8)[0]

    assert first.type in CAUSES[name]
    assert first.cause in CAUSES[name]
    assert first.axes.update <= 5


def test_a_healthy_run_raises_nothing() -> None:
    assert [alarm.type for alarm in alarms_of(sb3_broken.healthy(), updates=12)] == []
