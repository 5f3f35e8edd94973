"""Advantages of programs without a critic: sums of rewards, as loops of such programs compute them."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from esper_telemetry.equations.comparison import EquationCheck
from esper_telemetry.equations.gae import GaeInputs
from esper_telemetry.equations.gae_advantages import ADVANTAGES, compare_advantages

GAMMA, STEPS = 0.9, 60
REWARDS = np.random.default_rng(5).normal(size=STEPS)
ENDS = np.isin(np.arange(STEPS), (7, 20, 21, 40, STEPS - 1))


def episodes() -> list[np.ndarray]:
    return np.split(REWARDS, np.flatnonzero(ENDS)[:-1] + 1)


def sums(rewards: np.ndarray, gamma: float = GAMMA) -> np.ndarray:
    result, total = np.zeros_like(rewards), 0.0
    for t in reversed(range(len(rewards))):
        total = rewards[t] + gamma * total
        result[t] = total
    return result


def late(rewards: np.ndarray) -> np.ndarray:
    """Sums that end one step late: the total is set to 0 in the step after the end of an episode."""
    result, total = np.zeros_like(rewards), 0.0
    for t in reversed(range(len(rewards))):
        total = rewards[t] + GAMMA * total * (t == 0 or not ENDS[t - 1])
        result[t] = total
    return result


def each(change: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    return np.concatenate([change(one) for one in episodes()])


LOOPS: dict[str, np.ndarray] = {
    "alone": each(sums),
    "alone_whole_episodes": each(lambda one: np.full_like(one, one.sum())),
    "alone_from_start": each(lambda one: GAMMA ** np.arange(len(one)) * sums(one)),
    "alone_zero": np.zeros(STEPS),
    "alone_immediate": REWARDS,
    "alone_across_ends": sums(REWARDS),
    "alone_ends_late": late(REWARDS),
    "alone_undiscounted": each(lambda one: sums(one, 1.0)),
    "alone_rewards_discounted": each(lambda one: sums(GAMMA * one, 1.0)),
    "alone_reversed": each(lambda one: sums(one)[::-1]),
    "alone_past": each(lambda one: sums(one[::-1])[::-1]),
    "alone_sign": -each(sums),
    "alone_gamma": each(lambda one: sums(one, 0.7)),
}
SUMMED = ("alone", "alone_immediate", "alone_across_ends", "alone_ends_late", "alone_reversed", "alone_past")
FORMS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "raw": lambda x: x,
    "centred": lambda x: x - x.mean(),
    "normalised": lambda x: (x - x.mean()) / (x.std(ddof=1) + 1e-8),
}


def check(
    advantages: np.ndarray,
    ends: np.ndarray = ENDS,
    rewards: np.ndarray = REWARDS,
    values: np.ndarray | None = None,
    gae_lambda: float = 1.0,
) -> EquationCheck:
    v = np.zeros(STEPS) if values is None else values
    r, over, own, following, claimed = (
        torch.tensor(one).unsqueeze(1) for one in (rewards, ends, v, np.where(ends, 0.0, np.roll(v, -1)), advantages)
    )
    return compare_advantages(GaeInputs(r, own, following, over, over, following, claimed, GAMMA, gae_lambda, alone=values is None))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", LOOPS)
def test_sums_of_rewards_are_named_as_they_are_and_normalised(name: str, form: str) -> None:
    """A discount is fitted to sums that are raw or normalised, and a factor of all sums shows only in raw ones."""
    result = check(FORMS[form](LOOPS[name]))

    expected = {("alone_gamma", "centred"): [], ("alone_rewards_discounted", "normalised"): ["alone_undiscounted"]}
    expected[("alone_rewards_discounted", "centred")] = []
    assert [one.name for one in result.hypotheses] == expected.get((name, form), [name])
    assert result.holds == (name in ("alone", "alone_whole_episodes", "alone_from_start"))


def test_equal_rewards_minus_their_mean_are_gone() -> None:
    assert [one.name for one in check(np.zeros(STEPS), rewards=np.ones(STEPS)).hypotheses] == ["alone_zero"]


def test_equal_sums_minus_their_mean_are_no_mistake() -> None:
    """Every episode has one step, and every step the same reward."""
    assert check(np.zeros(STEPS), ends=np.ones(STEPS, bool), rewards=np.ones(STEPS)).holds


@pytest.mark.parametrize("gae_lambda", [1.0, 0.95])
@pytest.mark.parametrize("name", SUMMED)
def test_normalised_sums_minus_the_values_of_a_critic_are_named(name: str, gae_lambda: float) -> None:
    values = np.random.default_rng(7).normal(size=STEPS)
    result = check(FORMS["normalised"](LOOPS[name]) - values, values=values, gae_lambda=gae_lambda)

    expected = "normalized_returns" if name == "alone" else name.replace("alone", "sums")
    assert [one.name for one in result.hypotheses] == [expected]
    assert result.holds == (name == "alone")


def test_each_hypothesis_of_programs_without_a_critic_has_a_loop() -> None:
    assert {one.name for one in ADVANTAGES.hypotheses if one.needs == "alone"} == set(LOOPS)


def test_noise_has_no_explanation() -> None:
    assert not check(np.random.default_rng(1).normal(size=STEPS)).explained


def test_equal_rewards_of_one_episode_do_not_separate_past_sums_from_reversed_ones() -> None:
    """A normalised immediate reward is 0 in each step, as is the normalised return of the only episode."""
    ones, ends = np.ones(STEPS), np.arange(STEPS) == STEPS - 1

    assert {one.name for one in check(sums(ones)[::-1].copy(), ends, ones).hypotheses} == {"alone_reversed", "alone_past"}
