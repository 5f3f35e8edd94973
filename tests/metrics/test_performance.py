"""Speed of training and telemetry's numbers about itself."""

from __future__ import annotations

from dataclasses import dataclass

from esper_telemetry.metrics.performance import telemetry_health, update_performance
from esper_telemetry.record import Level


@dataclass
class Stats:
    queue_depth: int = 3
    errors: int = 1


def test_speed_and_phases_of_an_update() -> None:
    """1024 steps in 2 s; phases in milliseconds; what the trainer does not time is absent."""
    found = update_performance(7, env_steps=1024, elapsed=2.0, seconds={"environment": 0.5, "update": 1.25}).values()

    assert found == {
        "train/update": 7.0,
        "train/env_steps_per_second": 512.0,
        "perf/environment_ms": 500.0,
        "perf/update_ms": 1250.0,
    }


def test_no_time_means_no_speed() -> None:
    assert "train/env_steps_per_second" not in update_performance(1, env_steps=1, elapsed=0.0, seconds={}).values()


def test_telemetry_reports_on_itself_at_every_level() -> None:
    """2 ms of 100 ms are 2 %."""
    found = telemetry_health(seconds=0.002, elapsed=0.1, undefined=5, level=Level.MINIMAL, stats=Stats())

    assert found == {
        "perf/telemetry_ms": 2.0,
        "perf/telemetry_frac": 0.02,
        "perf/d2h_copies": 1.0,
        "telemetry/level": 1.0,
        "telemetry/undefined": 5.0,
        "telemetry/queue_depth": 3.0,
        "telemetry/dropped": 0.0,
        "telemetry/errors": 1.0,
    }
