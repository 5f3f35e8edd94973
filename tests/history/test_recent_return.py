"""The return: the mean over the last hundred episodes, from updates that report their mean and count."""

import math

import pytest

from esper_telemetry.core.record import Level
from esper_telemetry.history.derive import RunHistory
from esper_telemetry.history.recent_return import RecentMean

KEY = "episode/return_mean_100"


def test_the_oldest_update_counts_with_as_many_episodes_as_are_needed() -> None:
    """90 episodes of 1, 60 of 2 and 30 of 3: the last hundred are 10 of the first update and all others, (10 + 120 + 90) / 100."""
    recent = RecentMean()
    for mean, episodes in ((1.0, 90), (2.0, 60), (3.0, 30)):
        recent.add(mean, episodes)

    assert (recent.mean, recent.episodes, recent.highest) == (2.2, 180, 2.2)


def test_an_update_of_more_episodes_is_the_return() -> None:
    recent = RecentMean()
    recent.add(1.0, 5)
    recent.add(7.0, 4096)

    assert recent.mean == 7.0


def test_few_episodes_are_no_best_return() -> None:
    """Nineteen episodes of 500 may be luck; with one more, the mean of all is (19 · 500 + 0) / 20."""
    recent = RecentMean()
    recent.add(500.0, 19)
    assert math.isnan(recent.highest)

    recent.add(0.0, 1)
    assert (recent.highest, recent.lowest) == (475.0, 475.0)


def test_a_loop_that_reports_its_episodes_has_the_return_in_every_later_record() -> None:
    history = RunHistory()
    updates = [{"episode/return_mean": 10.0, "episode/count": 2.0}, {"episode/count": 0.0}]
    updates += [{"episode/return_mean": 40.0, "episode/count": 1.0}, {"policy/kl": 0.01}]

    derived = [history.derive(values, Level.MINIMAL) for values in updates]

    assert [values.get(KEY) for values in derived] == [10.0, 10.0, 20.0, None]


def test_the_return_that_a_trainer_reports_is_kept_and_a_resumed_run_continues() -> None:
    """A journal also holds derived values, so a run that reads it has the earlier episodes."""
    history = RunHistory()
    first = {"episode/return_mean": 10.0, "episode/count": 50.0}
    first |= history.derive(first, Level.NORMAL)
    resumed = RunHistory()

    assert KEY not in resumed.derive(first, Level.NORMAL)
    assert resumed.derive({"episode/return_mean": 20.0, "episode/count": 50.0}, Level.NORMAL)[KEY] == 15.0


@pytest.mark.parametrize("episodes", [1e300, 5e-324, math.inf, math.nan, -1.0])
@pytest.mark.parametrize("mean", [1e308, -1e308, math.nan, math.inf, 0.0])
def test_no_value_makes_it_raise(mean: float, episodes: float) -> None:
    history = RunHistory()
    history.derive({"episode/return_mean": mean, "episode/count": episodes}, Level.MINIMAL)
    derived = history.derive({"episode/return_mean": 2.0, "episode/count": 200.0}, Level.MINIMAL)

    assert derived[KEY] == 2.0
