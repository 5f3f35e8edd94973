"""Seconds of an update by phase."""

import pytest

from esper_telemetry.core.clock import PhaseTimes


class Clocks:
    """Wall and processor clocks that only tests advance; the processor works half of the time."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def process_time(self) -> float:
        return self.now / 2


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    clocks = Clocks()
    monkeypatch.setattr("esper_telemetry.core.clock.time", clocks)
    return clocks


def test_a_phase_begins_where_the_one_before_it_ends(clocks: Clocks) -> None:
    """Two seconds before the first phase are left out; then three of a rollout, one of them in the environment, and four of an update."""
    times = PhaseTimes()
    clocks.now = 2.0
    times.begin()
    clocks.now = 5.0
    times.end("rollout", environment=1.0)
    clocks.now = 7.0
    times.end("update")
    clocks.now = 9.0
    times.end("update")

    assert times.take() == ({"environment": 1.0, "inference": 2.0, "update": 4.0}, {"rollout": 1.5, "update": 2.0})
    assert times.take() == ({}, {})


def test_a_rollout_whose_parts_are_not_known_is_of_the_environment(clocks: Clocks) -> None:
    times = PhaseTimes()
    clocks.now = 2.0
    times.end("rollout")

    assert times.take() == ({"environment": 2.0}, {"rollout": 1.0})
