"""Learning rates compared with the configured schedule: one program for each hypothesis."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from explained import names

from esper_telemetry import check_schedule
from esper_telemetry.core.facts import Facts
from esper_telemetry.core.rate_schedule import Array, RateSchedule
from esper_telemetry.equations.comparison import EquationCheck
from esper_telemetry.equations.equation import EquationResult
from esper_telemetry.equations.schedules import SCHEDULES, RateHistory

EPOCHS, MINIBATCHES, ENVS = 3, 4, 8

PROGRAMS: dict[str, Callable[[Array], Array]] = {
    "constant": np.ones_like,
    "per_epoch": lambda p: np.maximum(0, 1 - EPOCHS * p),
    "per_minibatch": lambda p: np.maximum(0, 1 - EPOCHS * MINIBATCHES * p),
    "per_epoch_negative": lambda p: 1 - EPOCHS * p,
    "per_env": lambda p: 1 - p / ENVS,
    "per_env_step": lambda p: np.maximum(0, 1 - ENVS * p),
    "rising": lambda p: p,
    "cosine": lambda p: (1 + np.cos(np.pi * p)) / 2,
    "restarting": lambda p: 1 - (4 * p + 1e-9) % 1,
    "ending_early": lambda p: np.maximum(0, 1 - p / 0.7),
    "starting_late": lambda p: np.where(p <= 0.5, 1.0, 1 - p),
    "negative": lambda p: 1 - p / 0.7,
    "unfinished": lambda p: 1 - 0.6 * p,
    "warm_up": lambda p: np.where(p < 0.2, p / 0.2, 1 - (p - 0.2) / 0.8),
    "exponential": lambda p: 0.05**p,
    "stepped": lambda p: 0.5 ** np.floor(4 * p + 1e-9),
    "adaptive": lambda p: 1.5 ** np.round(3 * np.sin(7 * p)),
}
"""Rates by the name of the hypothesis, over the finished fraction of the run; the configured schedule is a line from 1 to 0."""


def recorded(rates: Iterable[float], facts: Facts, *, every: int = 1) -> EquationResult:
    """The result of a run whose update n, of `every` steps, has the n-th rate."""
    history = RateHistory(facts)
    for update, rate in enumerate(rates, 1):
        history.add(every * update, rate)
    result = history.result()
    assert result is not None
    return result


def annealed(total_steps: int, **settings: Any) -> Facts:
    """Facts of a run with a line from 1 to 0."""
    return Facts(learning_rate_schedule=RateSchedule(initial=1.0, final=0.0, total_steps=total_steps, **settings).fact())


def tabulated(rate: Callable[[float], float], total_steps: int) -> Facts:
    return Facts(learning_rate_schedule=RateSchedule.tabulated(rate, total_steps=total_steps).fact())


def check(rates: Array, *, final: float = 0.0) -> EquationCheck:
    progress = np.arange(1, len(rates) + 1) / len(rates)
    return check_schedule(
        list(3e-4 * rates), list(progress), initial=3e-4, final=3e-4 * final, num_epochs=EPOCHS, num_minibatches=MINIBATCHES, num_envs=ENVS
    )


@pytest.mark.parametrize("begin", [0, 1])
def test_a_line_matches_before_and_after_the_update_is_counted(begin: int) -> None:
    assert check(1 - (np.arange(40) + begin) / 40).matches


def test_a_constant_rate_matches() -> None:
    assert check(np.ones(20), final=1.0).matches


@pytest.mark.parametrize("begin", [0, 1])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_wrong_schedule_is_named(name: str, begin: int) -> None:
    result = check(PROGRAMS[name]((np.arange(40) + begin) / 40))

    assert names(result) == {name}
    assert result.holds == (name in {"cosine", "warm_up", "exponential", "stepped", "adaptive"})


def test_a_rate_that_is_annealed_although_a_constant_one_is_set() -> None:
    result = check(1 - np.arange(40) / 40, final=1.0)

    assert names(result) == {"annealed"}


@pytest.mark.parametrize(("name", "speed"), [("ending_early", 2.0), ("per_epoch", EPOCHS), ("per_env_step", ENVS)])
def test_a_schedule_that_ends_too_soon_may_have_a_floor(name: str, speed: float) -> None:
    result = check(np.maximum(0.1, 1 - speed * np.arange(40) / 40))

    assert names(result) == {name}


@pytest.mark.parametrize(
    ("rates", "name"),
    [
        ([3e-4, 2e-4, 1e-4, 0.0, -1e-4, -2e-4], "negative"),
        ([3e-4, 0.0, 0.0, 0.0], "ending_early"),
        ([3e-4, 2e-4, 1e-4, -1e-12], None),
        ([3e-4] * 6, None),
        ([0.0] * 6, None),
    ],
)
def test_without_a_schedule_only_rates_that_train_nothing_or_climb_the_loss_differ(rates: list[float], name: str | None) -> None:
    history = RateHistory(Facts())
    for update, rate in enumerate(rates):
        history.add(update + 1, rate)
    result = history.result()

    assert (None if result is None else [one.name for one in result.hypotheses]) == (None if name is None else [name])


def test_a_rate_that_falls_once_and_stays_there_is_no_schedule_that_ends_too_soon() -> None:
    assert not check(np.where(np.arange(40) < 2, 1.0, 0.3)).explanations


def test_every_hypothesis_but_those_of_other_settings_has_a_program() -> None:
    assert {one.name for one in SCHEDULES.hypotheses} == {*PROGRAMS, "annealed", "other_end"}


@pytest.mark.parametrize(
    ("updates", "expected"),
    [(8, {"restarting", "ending_early", "negative"}), (12, {"restarting", "ending_early", "negative"}), (24, {"restarting"})],
)
def test_before_the_end_of_a_line_that_is_too_fast_it_may_restart(updates: int, expected: set[str]) -> None:
    rates = PROGRAMS["restarting"](np.arange(60) / 60)[:updates]
    result = check_schedule(list(rates), list(np.arange(updates) / 60), initial=1.0, final=0.0)

    assert names(result) == expected
    assert all(one.fitted == pytest.approx(0.25) for one in result.explanations)


def test_where_the_settings_do_not_say_the_end_another_one_is_a_variant() -> None:
    result = recorded((1 - 0.6 * update / 40 for update in range(40)), annealed(40, final_is_set=False))

    assert not result.matches
    assert result.holds
    assert result.fitted["other_end"] == pytest.approx(0.4)


def test_a_number_that_is_not_known_is_none_that_a_schedule_counts() -> None:
    rates = PROGRAMS["per_epoch"](np.arange(40) / 40)
    result = check_schedule(list(rates), list(np.arange(40) / 40), initial=1.0, num_epochs=EPOCHS)

    assert names(result) == {"per_epoch"}


def test_the_fitted_share_is_that_of_the_program() -> None:
    assert check(PROGRAMS["ending_early"](np.arange(40) / 40)).explanations[0].fitted == pytest.approx(0.7)
    assert check(PROGRAMS["restarting"](np.arange(40) / 40)).explanations[0].fitted == pytest.approx(0.25)


@pytest.mark.parametrize("updates", [3, 5, 6])
def test_a_line_that_begins_anew_every_second_update_is_not_called_constant(updates: int) -> None:
    """Five updates: 1, 0.8, 1, 0.8, 1 stay within one and a half updates of a constant rate, but are not constant."""
    result = check(1 - np.arange(updates) % 2 / updates)

    assert names(result) == {"restarting"}


def test_a_curve_that_is_set_matches_and_a_line_in_its_place_does_not() -> None:
    def cosine(share: float) -> float:
        return 0.5 + 0.5 * float(np.cos(np.pi * share))

    rates = [cosine(update / 50) for update in range(50)]

    assert recorded(rates, tabulated(cosine, 50)).matches
    assert [one.name for one in recorded(rates, tabulated(lambda share: 1 - share, 50)).hypotheses] == ["cosine"]


DEFECTS: dict[str, tuple[Callable[[float], float], float]] = {
    "negative": (lambda over: 1 - 2.5 * over, 0.4),
    "ending_early": (lambda over: max(0.0, 1 - 2 * over), 0.5),
    "restarting": (lambda over: 0.1 + (-4 * over) % 1, 0.25),
}
"""Functions that a user configures, and the fraction of the run in which they are correct."""


def followed(rate: Callable[[float], float], updates: int) -> EquationResult:
    """The result of a run that follows its schedule exactly."""
    return recorded((rate(update / updates) for update in range(1, updates + 1)), tabulated(rate, updates))


@pytest.mark.parametrize("updates", [6, 40])
@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_of_the_configured_function_is_named_though_the_run_follows_it(name: str, updates: int) -> None:
    rate, share = DEFECTS[name]
    result = followed(rate, updates)

    assert [one.name for one in result.hypotheses] == [name]
    assert result.fitted[name] == pytest.approx(share, abs=0.01)
    assert not result.holds


def test_a_schedule_that_starts_late_and_goes_all_its_way_is_named() -> None:
    result = check(np.minimum(1.0, 2 - 2 * np.arange(1, 41) / 40))

    assert names(result) == {"starting_late"}
    assert result.explanations[0].fitted == pytest.approx(0.5)


@pytest.mark.parametrize("updates", [6, 40])
def test_a_configured_rise_from_nothing_to_the_end_is_a_fall_turned_round(updates: int) -> None:
    """`lambda left: 1 - left`, although Stable-Baselines3 passes the remaining fraction of the run."""
    result = followed(lambda over: over, updates)

    assert [one.name for one in result.hypotheses] == ["rising"]


PUBLISHED: dict[str, Callable[[float], float]] = {
    "line": lambda over: 1 - over,
    "rise to the end": lambda over: 0.1 + 0.9 * over,
    "nearly": lambda over: max(0.0, 1 - 1.02 * over),
    "plateau": lambda over: max(0.1, 1 - 2 * over),
    "warm_restarts": lambda over: 0.5 + 0.5 * math.cos(math.pi * ((3 * over) % 1)),
    "warm_up": lambda over: min(1.0, 10 * over) * (1 - over),
    "step": lambda over: 1.0 if over < 0.3 else 0.1,
    "rise": lambda over: 0.1 if over < 0.1 else 1.0,
    "triangles": lambda over: 1 - abs((4 * over) % 2 - 1),
    "exponential": lambda over: 0.01**over,
    "constant": lambda over: 1.0,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_schedules_that_are_configured_have_no_defect(name: str) -> None:
    assert followed(PUBLISHED[name], 40).matches


def test_a_last_rollout_beyond_the_planned_end_is_left_out() -> None:
    result = recorded((1 - step / 100 for step in (30, 60, 90, 120)), tabulated(lambda over: 1 - over, 100), every=30)

    assert result.error == pytest.approx(0.0, abs=1e-9)


def test_random_rates_are_explained_by_nothing(seed: int) -> None:
    result = check(np.random.default_rng(seed).random(40))

    assert not result.holds and not result.explanations


@pytest.mark.parametrize(("updates", "restarts"), [(80, False), (100, True), (200, True)])
def test_a_model_may_learn_again_but_not_in_parts_that_restart_its_schedule(updates: int, restarts: bool) -> None:
    result = recorded((1 - update % 40 / 40 for update in range(updates)), annealed(40))

    assert result.matches != restarts
    assert result.fitted == ({"restarting": pytest.approx(40 / updates)} if restarts else {})


def test_a_resumed_run_is_compared_from_where_it_went_on() -> None:
    """The run was planned for 40 steps and resumed after 20 with 100 planned: the rate becomes 1 - 20 / 100 at once."""
    result = recorded((1 - step / (40 if step < 20 else 100) for step in range(100)), annealed(100, begin=20))

    assert result.matches
    assert result.tolerance == pytest.approx(0.015)


def test_long_runs_are_compared_at_some_of_their_updates() -> None:
    result = recorded((1 - step / 10_000 for step in range(10_000)), annealed(10_000))

    assert result.matches
    assert result.tolerance < 1e-2


def test_rates_without_a_schedule_are_not_compared() -> None:
    history = RateHistory(Facts())
    history.add(1, 1.0)

    assert history.result() is None


@pytest.mark.parametrize(("rates", "progress"), [([], []), ([1.0], [0.1, 0.2])])
def test_wrong_numbers_of_updates_are_refused(rates: list[float], progress: list[float]) -> None:
    with pytest.raises(ValueError, match="one number for each update"):
        check_schedule(rates, progress, initial=1.0)
