"""Returns and normalised advantages: correct code matches, and code with one mistake is named."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from explained import names
from gae_programs import Array, Columns, normalize, random_rollout, rewards_to_go, right, settings

from esper_telemetry.equations.comparison import EquationCheck
from esper_telemetry.equations.normalization import NORMALIZED_ADVANTAGES, check_normalized_advantages
from esper_telemetry.equations.returns import RETURNS, check_returns


def new_values(c: Columns) -> Array:
    noise: Array = np.random.default_rng(7).normal(size=c.values.shape).astype(np.float32)
    return np.add(c.values, 0.1 * noise)


def shuffled(values: Array) -> Array:
    return np.random.default_rng(3).permutation(values.reshape(-1)).reshape(values.shape)


def check(c: Columns, returns: Array, advantages: Array | None = None) -> EquationCheck:
    return check_returns(
        *(right(c) if advantages is None else advantages, c.values, returns),
        rewards=c.rewards,
        next_values=c.next_values,
        ended=c.done,
        gamma=c.gamma,
        new_values=new_values(c),
    )


RETURN_PROGRAMS: dict[str, list[Callable[[Columns], Array]]] = {
    "normalized": [lambda c: normalize(right(c)) + c.values, lambda c: normalize(right(c), ddof=1) + c.values],
    "values_missing": [right],
    "values_alone": [lambda c: c.values],
    "values_subtracted": [lambda c: right(c) - c.values, lambda c: c.values - right(c)],
    "next_values": [lambda c: right(c) + c.next_values],
    "new_values": [lambda c: right(c) + new_values(c)],
    "rewards": [lambda c: c.rewards],
    "monte_carlo_cut": [rewards_to_go],
    "monte_carlo": [lambda c: settings(c, c.gamma, 1.0) + c.values],
    "td_targets": [lambda c: c.rewards + c.gamma * c.next_values],
    "axes_swapped": [lambda c: right(c) + c.values.T.reshape(c.values.shape)],
    "mean_value": [lambda c: right(c) + c.values.mean()],
    "other_rows": [lambda c: shuffled(right(c) + c.values)],
    "normalized_returns": [lambda c: normalize(right(c) + c.values)],
}


def test_advantages_plus_values_match(seed: int) -> None:
    c = random_rollout(seed)

    assert check(c, right(c) + c.values).matches


@pytest.mark.parametrize("name", RETURN_PROGRAMS)
def test_a_mistake_in_returns_is_named_exactly(name: str, seed: int) -> None:
    for program in RETURN_PROGRAMS[name]:
        c = random_rollout(seed)
        result = check(c, program(c))

        assert names(result) == {name}, result.text
        assert result.holds is next(one.variant for one in RETURNS.hypotheses if one.name == name)


def test_targets_of_a_critic_whose_outputs_are_normalised_by_running_statistics_are_a_variant(seed: int) -> None:
    c = random_rollout(seed)

    def scaled(values: Array) -> Array:
        return (values + 40) / 7

    returns = scaled(right(c) + c.values)
    result, mistake = (
        check_returns(right(c), c.values, returns, new_values=one)
        for one in (scaled(new_values(c)), new_values(c))  # the second critic estimates returns themselves
    )
    outputs = check_returns(right(c), (c.values + 30) / 8, returns)  # of the statistics before these returns

    assert names(result) == {"rescaled"} and result.holds
    assert names(mistake) == {"other_units"} and not mistake.holds
    assert names(outputs) == {"outputs_rescaled"} and outputs.holds


def test_a_line_through_two_points_shows_no_other_units() -> None:
    """Returns and sums that are constant except in the last row."""
    sums, returns = np.full((64, 1), 0.01), np.full((64, 1), 0.02)
    sums[-1], returns[-1] = 0.9, 0.5
    values = np.random.default_rng(2).normal(size=(64, 1))

    assert not names(check_returns(sums - values, values, returns, new_values=values + 0.01))


def test_rewards_in_place_of_returns_are_named_beside_advantages_that_are_made_of_them(seed: int) -> None:
    c = random_rollout(seed)
    alone = replace(c, terminated=np.ones_like(c.terminated))  # bandits: a reward is the whole return
    result, right_result = (check(one, c.rewards, c.rewards - c.values) for one in (c, alone))

    assert names(result) == {"rewards"} and not result.holds
    assert right_result.matches


@pytest.mark.parametrize("ddof", [0, 1])
def test_advantages_that_were_normalised_over_the_batch_after_the_returns_are_a_variant(ddof: int) -> None:
    c = random_rollout(1)
    result = check(c, right(c) + c.values, normalize(right(c), ddof=ddof))

    assert names(result) == {"normalized_after"}
    assert result.holds


def test_returns_that_are_the_values_are_named_beside_normalised_advantages() -> None:
    c = random_rollout(1)

    assert names(check(c, c.values, normalize(right(c)))) == {"values_alone"}


def test_every_hypothesis_of_returns_is_tested() -> None:
    others = {"normalized_after", "rescaled", "other_units", "outputs_rescaled", "unrelated"}

    assert {one.name for one in RETURNS.hypotheses} == {*RETURN_PROGRAMS, *others}


def test_noise_in_place_of_many_targets_is_named(seed: int) -> None:
    c = random_rollout(seed, 128)
    noise = 3 * np.random.default_rng(seed).normal(size=c.values.shape).astype(np.float32)

    assert names(check(c, noise)) == {"unrelated"}
    assert names(check(c, shuffled(right(c) + c.values))) == {"other_rows"}


WRONG_ADVANTAGES: dict[str, Callable[[Columns], Array]] = {
    "the opposite sign": lambda c: -right(c),
    "returns": lambda c: right(c) + c.values,
    "zeros": lambda c: np.zeros_like(c.values),
    "axes exchanged": lambda c: right(c).reshape(c.values.T.shape).T,
    "another order": lambda c: shuffled(right(c)),
    "noise": lambda c: np.random.default_rng(1).normal(size=c.values.shape),
}


@pytest.mark.parametrize("gae_lambda", [0.1, 0.9, 1.0])
@pytest.mark.parametrize("name", WRONG_ADVANTAGES)
def test_no_mistake_of_returns_is_named_where_the_advantages_are_wrong(name: str, gae_lambda: float, seed: int) -> None:
    c = replace(random_rollout(seed, 128), lam=gae_lambda)
    returns, advantages = right(c) + c.values, WRONG_ADVANTAGES[name](c).astype(np.float32)
    result = check(c, returns, advantages)

    assert not result.matches
    assert names(result) <= {"monte_carlo"}, result.text
    without_rewards = check_returns(advantages, c.values, returns)
    assert "unrelated" not in names(without_rewards)


def test_padding_does_not_hide_that_returns_are_right(seed: int) -> None:
    """Padding rows hold arbitrary numbers; they follow the end of an episode."""
    c = random_rollout(seed, 64)
    valid = np.arange(64)[:, None] < np.array([64, 40, 50, 30])
    c = replace(c, terminated=c.terminated | (valid & ~np.roll(valid, -1, 0)), truncated=c.truncated & valid)
    returns = np.where(valid, right(c) + c.values, 1e4)
    columns: dict[str, Any] = {"next_values": c.next_values, "ended": c.done, "gamma": c.gamma, "valid": valid}
    result = check_returns(c.values - returns, c.values, returns, rewards=c.rewards, **columns)

    assert not result.matches and not result.explanations


@pytest.mark.parametrize("steps", [40, 128])
def test_targets_with_noise_and_other_numbers_have_no_explanation(steps: int, seed: int) -> None:
    """Noise that has replaced all targets is named where there are many."""
    c = random_rollout(seed, steps)
    noise = np.random.default_rng(seed).normal(size=c.values.shape).astype(np.float32)
    returns = right(c) + c.values
    others = [returns + 3 * noise, returns + 0.05 * noise, np.full_like(c.values, 2.0), np.exp(right(c) / 4)]

    for wrong in others if steps == 128 else [noise, *others]:
        result = check(c, wrong)
        assert not result.holds and not result.explanations
    assert not check(c, returns + 0.05 * noise, normalize(right(c))).holds


def test_rows_without_order_need_three_columns() -> None:
    """By hand: 1 + 2 = 3, -1 + 4 = 3."""
    assert check_returns([1.0, -1.0], [2.0, 4.0], [3.0, 3.0]).error == 0.0
    assert not check_returns([1.0, -1.0], [2.0, 4.0], [3.0, 4.0]).holds
    assert check_returns([1.0, -1.0], [2.0, 4.0], [3.0, 9.0], valid=[True, False]).matches
    with pytest.raises(ValueError, match="shapes must agree"):
        check_returns([1.0, -1.0], [2.0, 4.0], [3.0])


MINIBATCHES = 4


def rows_of(c: Columns, seed: int = 0) -> Array:
    """Numbers of the transitions of each minibatch, [M, N]."""
    return np.random.default_rng(seed).permutation(c.values.size).reshape(MINIBATCHES, -1)


def of_minibatches(rows: Array) -> Array:
    """Normalise each minibatch as PPO in torch does."""
    return np.stack([normalize(row, ddof=1) for row in rows])


def check_use(c: Columns, used: Callable[[Array, Array], Array], seed: int = 0, **changes: Any) -> EquationCheck:
    advantages = right(c)
    rows = rows_of(c, seed)
    columns: dict[str, Any] = {
        "rollout": advantages,
        "environments": rows % advantages.shape[1],
        "in_order": advantages.reshape(rows.shape),
    }
    raw = advantages.reshape(-1)[rows]
    return check_normalized_advantages(raw, used(advantages, rows).astype(np.float32), **columns | changes)


def within(change: Callable[[Array], Array]) -> Callable[[Array, Array], Array]:
    """Change each minibatch."""
    return lambda advantages, rows: np.stack([change(row) for row in advantages.reshape(-1)[rows]])


def before(change: Callable[[Array], Array]) -> Callable[[Array, Array], Array]:
    """Change the whole rollout [T, B] before it is split."""
    return lambda advantages, rows: change(advantages).reshape(-1)[rows]


USE_PROGRAMS: dict[str, list[Callable[[Array, Array], Array]]] = {
    "over_rollout": [before(lambda a: normalize(a, ddof=1))],
    "over_environments": [before(lambda a: normalize(a, 0)), before(lambda a: normalize(a, 0, 1))],
    "not_normalized": [before(lambda a: a)],
    "std_alone": [within(lambda a: a / (a.std(ddof=1) + 1e-8)), before(lambda a: a / a.std())],
    "mean_alone": [within(lambda a: a - a.mean()), before(lambda a: a - a.mean())],
    "variance": [within(lambda a: (a - a.mean()) / a.var())],
    "precedence": [within(lambda a: a - a.mean() / a.std(ddof=1))],
    "sign": [within(lambda a: -normalize(a, ddof=1))],
    "absolute": [
        within(lambda a: np.abs(normalize(a, ddof=1))),
        within(lambda a: normalize(np.abs(a), ddof=1)),
        before(lambda a: normalize(np.abs(a))),
        before(lambda a: normalize(a).clip(0)),
        before(lambda a: a**2),
    ],
    "other_rows": [within(lambda a: normalize(a, ddof=1)[::-1])],
    "in_order": [lambda advantages, rows: of_minibatches(advantages.reshape(rows.shape))],
    "other_std": [within(lambda a: normalize(a))],
    "rms": [within(lambda a: a / np.sqrt((a**2).mean()))],
    "clipped": [within(lambda a: normalize(a, ddof=1).clip(-1.5, 1.5))],
}


def test_normalised_minibatches_match_and_to_do_it_twice_changes_nothing(seed: int) -> None:
    c = random_rollout(seed)

    assert check_use(c, within(lambda a: normalize(a, ddof=1)), seed).matches
    assert check_use(c, within(lambda a: normalize(normalize(a, ddof=1), ddof=1)), seed).matches
    assert check_use(c, within(normalize), seed, correction=0).matches
    assert check_use(c, before(lambda a: normalize(a, ddof=1)), seed, over="rollout").matches
    assert check_use(c, before(lambda a: a), seed, over="nothing").matches
    assert check_use(c, within(lambda a: (a - a.mean()) / max(float(a.std(ddof=1)), 50.0)), seed, floor=50.0).matches


@pytest.mark.parametrize("name", USE_PROGRAMS)
def test_a_mistake_in_normalised_advantages_is_named_exactly(name: str, seed: int) -> None:
    for program in USE_PROGRAMS[name]:
        result = check_use(random_rollout(seed), program, seed)

        assert names(result) == {name}, result.text
        assert result.holds is next(one.variant for one in NORMALIZED_ADVANTAGES.hypotheses if one.name == name)


def test_minibatches_that_are_normalised_against_the_settings_are_named(seed: int) -> None:
    c, normal = random_rollout(seed), within(lambda a: normalize(a, ddof=1))

    assert names(check_use(c, normal, seed, over="rollout")) == {"over_minibatch"}
    assert names(check_use(c, normal, seed, over="nothing")) == {"over_minibatch"}
    assert names(check_use(c, before(lambda a: normalize(a, ddof=1)), seed, over="nothing")) == {"over_rollout"}


def in_environments(advantages: Array, index: Array, rows: Array, groups: Array, ddof: int) -> Array:
    """Advantages less the mean of their environment's rows, divided by the standard deviation of these rows."""
    moments = [(rows[groups == b].mean(), rows[groups == b].std(ddof=ddof)) for b in range(int(index.max()) + 1)]
    return np.array([(a - moments[b][0]) / (moments[b][1] + 1e-8) for a, b in zip(advantages, index, strict=True)])


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("over", ["minibatch", "rollout", None])
@pytest.mark.parametrize("form", ["[T, B]", "step after step", "environment after environment"])
def test_one_minibatch_or_several_that_are_normalised_over_each_environment_are_named(form: str, over: Any, ddof: int) -> None:
    """Rewards differ between environments, so their own means are far from the mean of all rows."""
    advantages = right(random_rollout(3)) + np.array([9, 0, 0, -2], np.float32)
    steps, envs = advantages.shape
    flat, environments = advantages.reshape(-1), np.tile(np.arange(envs), steps)
    rollout = {"[T, B]": advantages, "step after step": flat}.get(form, advantages.T.reshape(-1))
    several = np.random.default_rng(0).permutation(len(flat)).reshape(4, -1)
    for rows in (several[0], several[:2], several):
        own = [in_environments(flat[r], environments[r], flat[r], environments[r], ddof) for r in np.atleast_2d(rows)]
        whole = [in_environments(flat[r], environments[r], flat, environments, ddof) for r in np.atleast_2d(rows)]
        for used in (own, whole):
            result = check_normalized_advantages(
                flat[rows],
                np.stack(used).reshape(rows.shape).astype(np.float32),
                over=over,
                rollout=rollout,
                environments=environments[rows],
            )
            assert names(result) == {"over_environments"}, result.text


def test_zeros_in_place_of_advantages_are_not_those_of_each_environment() -> None:
    """Each environment has one row in the minibatch, so subtracting its own mean would give 0."""
    result = check_normalized_advantages([1.0, -2.0, 3.0], [0.0, 0.0, 0.0], environments=[0, 1, 2])

    assert not result.holds and not result.explanations


def test_without_a_setting_every_published_way_matches(seed: int) -> None:
    c = random_rollout(seed)

    for program in (within(lambda a: normalize(a, ddof=1)), before(lambda a: normalize(a, ddof=1)), before(lambda a: a)):
        assert check_use(c, program, seed, over=None).matches
        mixed = check_use(c, lambda advantages, rows, used=program: used(advantages, rows)[:, ::-1], seed, over=None)  # type: ignore[misc]
        assert names(mixed) == {"other_rows"}
    assert not check_use(c, within(lambda a: a - a.mean()), seed, over=None).holds


def test_padding_in_mean_and_deviation_is_named(seed: int) -> None:
    rng = np.random.default_rng(seed)
    advantages = rng.normal(1.0, 2.0, (3, 20)).astype(np.float32)
    valid = rng.random((3, 20)) < 0.7
    filled = np.where(valid, advantages, 0)
    padded = np.stack([normalize(row, ddof=1) for row in filled])
    masked = np.stack([(row - row[own].mean()) / row[own].std(ddof=1) for row, own in zip(advantages, valid, strict=True)])

    assert check_normalized_advantages(advantages, masked, valid=valid).matches
    assert names(check_normalized_advantages(filled, padded, valid=valid)) == {"over_padding"}


def test_advantages_that_are_all_alike_are_judged_by_their_rounding() -> None:
    """Advantages of 100 that differ in the last bit: only rounding is left after normalisation."""
    advantages = torch.full((1, 64), 100.0)
    advantages[0, ::2] += 1e-5
    used = (advantages - advantages.mean()) / (advantages.std() + 1e-8)

    assert check_normalized_advantages(advantages, used).matches
    assert check_normalized_advantages(torch.ones(1, 8), torch.zeros(1, 8)).matches
    assert check_normalized_advantages([3.0], [3.0]).matches


def test_arguments_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="over must be"):
        check_normalized_advantages([1.0], [1.0], over="epoch")  # type: ignore[arg-type]  # what is tested
    with pytest.raises(ValueError, match="needs rollout"):
        check_normalized_advantages([1.0], [1.0], over="rollout")
    with pytest.raises(ValueError, match="shapes must agree"):
        check_normalized_advantages([1.0, 2.0], [1.0])


def test_every_hypothesis_of_normalised_advantages_is_tested() -> None:
    declared = {one.name for one in NORMALIZED_ADVANTAGES.hypotheses}
    assert declared == {*USE_PROGRAMS, "over_minibatch", "over_padding"}
