"""Training speed, and telemetry's numbers about itself."""

import pytest

from esper_telemetry.core.clock import Clock
from esper_telemetry.core.record import Level, SinkBacklog, SinkLag
from esper_telemetry.metrics.performance import telemetry_health, update_performance
from esper_telemetry.ppo.collectors.base import RolloutClock


def test_speed_and_phases_of_an_update() -> None:
    """1024 steps in 2 s; phases in milliseconds. A phase that the trainer does not time is absent."""
    values = update_performance(7, env_steps=1024, elapsed=2.0, seconds={"environment": 0.5, "update": 1.25}).values()

    assert values == {"train/update": 7.0, "train/env_steps_per_second": 512.0, "perf/environment_ms": 500.0, "perf/update_ms": 1250.0}


def test_processor_time_has_phases() -> None:
    """0.6 s of rollout and 0.9 s of update in 2 s of wall time: three quarters of a core."""
    cpu = {"rollout": 0.6, "environment": 0.2, "inference": 0.4, "update": 0.9}
    values = update_performance(7, env_steps=1, elapsed=2.0, seconds={}, cpu_seconds=cpu).values()

    assert {key: value for key, value in values.items() if "cpu" in key} == {
        "perf/rollout_cpu_ms": 600.0,
        "perf/environment_cpu_ms": 200.0,
        "perf/inference_cpu_ms": 400.0,
        "perf/update_cpu_ms": 900.0,
        "perf/cpu_frac": 0.75,
    }


class FakeTime:
    """The `time` module of a program, whose time passes only on request."""

    def __init__(self) -> None:
        self.wall = self.processor = 0.0

    def perf_counter(self) -> float:
        return self.wall

    def process_time(self) -> float:
        return self.processor

    thread_time = process_time

    def work(self, seconds: float) -> float:
        """Let time pass while the processor is busy."""
        self.wall += seconds
        self.processor += seconds
        return seconds

    def wait(self, seconds: float) -> None:
        """Let time pass while the processor is idle."""
        self.wall += seconds


@pytest.fixture
def fake_time(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    """Replace the time of both clocks."""
    fake = FakeTime()
    for module in ("esper_telemetry.core.clock", "esper_telemetry.ppo.collectors.base"):
        monkeypatch.setattr(f"{module}.time", fake)
    return fake


def test_the_environments_share_is_that_of_the_steps_that_are_timed(fake_time: FakeTime) -> None:
    """16 steps of 4 ms, one of them timed, and 20 ms of inference."""
    clock = RolloutClock()
    for _ in range(16):
        assert clock.step(fake_time.work, 0.004) == 0.004
    fake_time.work(0.02)
    cpu_seconds = clock.cpu_seconds()

    assert cpu_seconds["environment"] == pytest.approx(0.064)
    assert cpu_seconds["inference"] == pytest.approx(0.02)
    assert cpu_seconds["rollout"] == pytest.approx(0.084)


def test_a_rollout_too_short_to_time_a_step_has_one_phase() -> None:
    assert RolloutClock().cpu_seconds().keys() == {"rollout"}


def test_waiting_takes_time_and_no_processor_time(fake_time: FakeTime) -> None:
    clock = Clock()
    with clock:
        fake_time.wait(0.05)
        fake_time.work(0.01)

    assert clock.take() == pytest.approx((0.06, 0.01))
    assert clock.take() == (0.0, 0.0)


def test_an_interruption_of_a_call_that_stands_for_many_counts_once(fake_time: FakeTime) -> None:
    """Seventeen calls of 1 ms, one of them timed, while another program uses the processor for 50 ms."""
    clock = Clock()
    with clock.weighing(17):
        fake_time.wait(0.05)
        fake_time.work(0.001)

    assert clock.take() == pytest.approx((0.067, 0.017))


def test_no_time_means_no_speed() -> None:
    assert "train/env_steps_per_second" not in update_performance(1, env_steps=1, elapsed=0.0, seconds={}).values()


def test_every_sink_has_its_lag_and_the_errors_that_it_had() -> None:
    stats = SinkBacklog(3, 1, (SinkLag("tensorboard", 0, 0.0, 0), SinkLag("wandb_walker", 12, 3.5, 2)))
    result = telemetry_health(seconds=0.0, elapsed=1.0, undefined=0, copies=0, level=Level.NORMAL, stats=stats)

    assert {key: value for key, value in result.items() if key.count("/") == 2} == {
        "telemetry/tensorboard/lag_records": 0.0,
        "telemetry/wandb_walker/lag_records": 12.0,
        "telemetry/tensorboard/lag_seconds": 0.0,
        "telemetry/wandb_walker/lag_seconds": 3.5,
        "telemetry/wandb_walker/errors": 2.0,
    }


def test_telemetry_reports_on_itself_at_every_level() -> None:
    """2 ms of 100 ms are 2 %."""
    stats = SinkBacklog(3, 1)
    result = telemetry_health(seconds=0.002, cpu_seconds=0.001, elapsed=0.1, undefined=5, copies=1, level=Level.MINIMAL, stats=stats)

    assert result == {
        "perf/telemetry_ms": 2.0,
        "perf/telemetry_cpu_ms": 1.0,
        "perf/telemetry_frac": 0.02,
        "perf/d2h_copies": 1.0,
        "telemetry/level": 1.0,
        "telemetry/undefined": 5.0,
        "telemetry/queue_depth": 3.0,
        "telemetry/dropped": 0.0,
        "telemetry/errors": 1.0,
    }
