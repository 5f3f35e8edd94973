"""Which updates are sampled: as many as the budget allows, and at least some."""

import pytest

from esper_telemetry.core.record import Level
from esper_telemetry.pipeline.sampling import INITIAL_PERIOD, MAX_PERIOD, Sampling


def sampled_updates(sampling: Sampling, updates: int, *, plain: float = 0.0, close: float = 0.0) -> list[int]:
    """Return the sampled updates, counted from 1. Each update takes a second, and telemetry takes `plain` or `close` seconds of it."""
    updates_sampled = []
    for update in range(1, updates + 1):
        sampled = sampling.begin()
        sampling.learn(close if sampled else plain, 1.0)
        sampling.adopt(sampling.proposed)
        if sampled:
            updates_sampled.append(update)
    return updates_sampled


def test_normal_samples_the_first_update_and_the_ninth_and_then_as_its_costs_allow() -> None:
    assert sampled_updates(Sampling(Level.NORMAL), 12) == [1, 9, 10, 11, 12]
    assert sampled_updates(Sampling(Level.NORMAL), 100, plain=0.015, close=0.5) == [1, 9, 25, 41, 57, 73, 89]


def test_debug_samples_every_update_and_minimal_none() -> None:
    assert sampled_updates(Sampling(Level.DEBUG), 5, plain=9.0, close=9.0) == [1, 2, 3, 4, 5]
    assert sampled_updates(Sampling(Level.MINIMAL), 50) == []
    assert Sampling(Level.MINIMAL).period is None


@pytest.mark.parametrize(
    ("plain", "close", "every"),
    [
        (0.005, 0.015, 1),  # 5 ms count twice; 10 ms more each time: exactly the allowed 2 %
        (0.005, 0.045, 4),  # 40 ms more every 4th time are 10 ms
        (0.005, 0.055, 8),  # 50 ms more need every 5th; powers of two make it 8
        (0.005, 0.900, MAX_PERIOD),  # 895 ms more would need every 90th
        (0.015, 0.175, 32),  # over the budget already: a quarter of it is for samples, 160 ms every 32nd time
        (0.015, 0.016, 1),
        (0.001, 0.001, 1),
    ],
)
def test_the_period_is_the_shortest_that_the_budget_allows(plain: float, close: float, every: int) -> None:
    sampling = Sampling(Level.NORMAL, 0.02)

    sampled_updates(sampling, 1000, plain=plain, close=close)

    assert sampling.every == every


def test_a_larger_budget_samples_more_often() -> None:
    narrow, wide = Sampling(Level.NORMAL, 0.02), Sampling(Level.NORMAL, 0.1)
    for sampling in (narrow, wide):
        sampled_updates(sampling, 400, plain=0.005, close=0.09)

    assert (narrow.every, wide.every) == (16, 1)


def test_the_first_update_warms_up_and_does_not_count() -> None:
    """Telemetry takes ten seconds in the first update, which says nothing about later updates."""
    sampling = Sampling(Level.NORMAL)
    sampling.begin()
    sampling.learn(10.0, 20.0)
    for _ in range(100):
        sampled = sampling.begin()
        sampling.learn(0.015 if sampled else 0.005, 1.0)

    assert sampling.every == INITIAL_PERIOD
    assert sampling.proposed == 1
    assert INITIAL_PERIOD == 8


def test_a_worker_that_is_behind_makes_samples_rarer_at_debug_too_until_it_keeps_up() -> None:
    """The period is 1, 2, 4 and 8 while the worker is late in updates 1 to 3, then halves again."""
    sampling, periods = Sampling(Level.DEBUG), []
    for update in range(1, 8):
        sampling.begin()
        periods.append(sampling.period)
        sampling.adopt(sampling.proposed, late=update <= 3)

    assert periods == [1, 2, 4, 8, 4, 2, 1]


def test_an_alarm_does_not_make_a_late_worker_later() -> None:
    sampling = Sampling(Level.NORMAL)
    sampling.adopt(8, late=True)
    sampling.begin()

    assert not sampling.begin(raised=True)
    sampling.adopt(8)
    assert sampling.begin(raised=True)
