"""Advantages compared with GAE: correct loops match, and a loop with one mistake is named."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from explained import names
from gae_programs import PROGRAMS, Array, Columns, cleanrl_style, gae, normalize, random_rollout, right, stored_rewards

from esper_telemetry.equations.comparison import EquationCheck
from esper_telemetry.equations.gae import GaeInputs, following_values
from esper_telemetry.equations.gae_advantages import ADVANTAGES, check_gae, compare_advantages

SHAPES = ((40, 4), (96, 1))
SEVERAL_ENVIRONMENTS = {
    *("ends_shared", "ends_of_others", "ends_swapped", "axes_swapped", "rewards_swapped", "returns_swapped"),
    *("along_environments", "chained", "environment_mean", "normalized_parts", "normalized_steps"),
}
WITHOUT_EFFECT = {"std_alone", "mean_alone", "scaled", "variance", "precedence"}
"""Hypotheses that a normalisation undoes."""
TOGETHER = {"both_gamma": {"both_gamma", "both_lambda"}}
"""Two hypotheses that form one explanation."""


def check(c: Columns, advantages: Array, **changes: Any) -> EquationCheck:
    columns: dict[str, Any] = {
        "gamma": c.gamma,
        "gae_lambda": c.lam,
        "terminated": c.terminated,
        "truncated": c.truncated,
        "next_values": np.where(c.done, c.final, c.following),
        "last_values": c.last,
    }
    return check_gae(c.rewards, c.values, advantages, **columns | changes)


@pytest.mark.parametrize(
    ("shape", "settings"),
    [((40, 4), (0.97, 0.9)), ((1, 1), (1.0, 1.0)), ((2, 3), (0.9, 0.0)), ((16, 16), (0.0, 0.95)), ((2048, 1), (1.0, 0.95))],
)
@pytest.mark.parametrize("loop", [right, lambda c: cleanrl_style(c, c.done)])
def test_a_right_loop_matches(settings: tuple[float, float], shape: tuple[int, int], loop: Callable[..., Array]) -> None:
    for seed, ends in enumerate((0.0, 0.02, 0.2, 1.0)):
        c = replace(random_rollout(seed, *shape, ends=ends), gamma=settings[0], lam=settings[1])

        result = check(c, loop(c))

        assert result.matches, result.text
        assert result.error is not None


def test_ends_of_an_unsaid_kind_may_be_time_limits() -> None:
    c = random_rollout(1, ends=0.1, time_limits=1.0)
    following = {"ended": c.done, "terminated": None, "truncated": None, "next_values": c.next_values}
    runs_on = gae(c, ends=np.zeros_like(c.done))

    assert check(c, right(c), **following).matches
    assert "time_limit_no_end" in names(check(c, runs_on, **following))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_mistake_is_named_exactly(name: str, shape: tuple[int, int]) -> None:
    """Only the hypothesis of a mistake explains the numbers that the mistake changes."""
    if shape[1] == 1 and name in SEVERAL_ENVIRONMENTS:
        pytest.skip("it needs several environments")
    for program in PROGRAMS[name]:
        named = 0
        for seed in range(3):
            c = random_rollout(seed, *shape, ends=0.24 if name == "time_limit_gamma" else 0.12)
            result = check(c, program(c))
            if not result.matches and (name != "other_last_value" or not c.done[-2:].any(0).all()):
                named += 1
                is_few = name == "no_last_bootstrap" and c.done[-5:].any(0).all()  # rows that depend on the value
                expected = "few_without_bootstrap" if is_few else name
                assert names(result) == TOGETHER.get(name, {expected}), result.text
                assert result.holds is ADVANTAGES[expected].variant
        assert named or name == "last_end_ignored"


@pytest.mark.parametrize(("end", "expected"), [(5, "few_without_bootstrap"), (10, "no_last_bootstrap")])
def test_a_missing_last_value_is_a_variant_if_few_rows_depend_on_it(end: int, expected: str) -> None:
    c = random_rollout(1, 100, 1, ends=0.0)
    c.terminated[-1 - end] = True

    for program in PROGRAMS["no_last_bootstrap"]:
        assert names(check(c, program(c))) == {expected}


@pytest.mark.parametrize(("noise", "expected"), [(3e-6, {"normalized"}), (3e-2, set())])
def test_normalised_advantages_that_hardly_vary_are_rounded_by_more(noise: float, expected: set[str]) -> None:
    """Single precision rounds values of 1 by more than a ten-thousandth of a spread of 0.001."""
    c = random_rollout(3, 64, 4, ends=0.0)
    c = replace(c, rewards=1e-3 * c.rewards, values=1 + 1e-3 * c.values, last=1 + 1e-3 * c.last, gamma=1.0)
    rounded = right(c) + noise * np.random.default_rng(1).standard_normal(c.rewards.shape)

    assert names(check(c, normalize(rounded))) == expected


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_mistake_is_named_where_only_normalised_advantages_are_kept(name: str) -> None:
    """Some fitted parameters are then unnamed, but none gets a wrong name."""
    named = set[str]()
    for program in PROGRAMS[name]:
        c = random_rollout(0, *SHAPES[0])
        if not check(c, program(c)).matches:
            named |= names(check(c, normalize(program(c))))

    fitted = any(one.name == name and one.compute is None for one in ADVANTAGES.hypotheses)
    if name in WITHOUT_EFFECT:
        assert named == {"normalized"}
        return
    together = TOGETHER.get(name, {name}) | ({"broadcast_mean"} if name == "returns_stored" else set())
    if (fitted and ADVANTAGES[name].normalized_fit is None) or name == "last_end_ignored":
        assert named <= {name}
    else:
        assert name in named <= together


@pytest.mark.parametrize("name", sorted(SEVERAL_ENVIRONMENTS | {"normalized", "broadcast_mean"}))
def test_a_mistake_between_environments_is_named_where_several_rollouts_stand_side_by_side(name: str) -> None:
    """The trainer made it in each rollout separately."""
    for program in PROGRAMS[name]:
        rollouts = [random_rollout(seed, 40, 4) for seed in range(3)]

        def side_by_side(column: Callable[[Columns], Array], rollouts: list[Columns] = rollouts) -> torch.Tensor:
            return torch.from_numpy(np.concatenate([column(c) for c in rollouts], -1))

        inputs = GaeInputs(
            rewards=side_by_side(lambda c: c.rewards).double(),
            values=side_by_side(lambda c: c.values).double(),
            next_values=side_by_side(lambda c: c.next_values).double(),
            ended=side_by_side(lambda c: c.done),
            terminated=side_by_side(lambda c: c.terminated),
            following=side_by_side(lambda c: c.next_values).double(),
            claimed=side_by_side(program).double(),
            gamma=rollouts[0].gamma,
            gae_lambda=rollouts[0].lam,
            rollouts=len(rollouts),
        )
        result = compare_advantages(following_values(inputs, side_by_side(lambda c: c.last).double()))

        assert names(result) == {name}, result.text


def test_every_hypothesis_has_a_program_or_a_test_of_its_own() -> None:
    """The hypotheses in `own` need more columns, and have tests below or in `test_script_targets`; those of sums of rewards have a file."""
    own = {
        "time_limits_end",
        "few_without_bootstrap",
        "fixed_length_bootstrapped",
        "uncleared",
        "other_units",
        "both_lambda",
        "raw_rewards",
        "stale",
        "normalized_returns",
        "normalized_returns_over_limits",
    }
    assert {one.name for one in ADVANTAGES.hypotheses if one.needs not in ("alone", "has_critic")} == {*PROGRAMS, *own}


@pytest.mark.parametrize("envs", [1, 4])
def test_a_value_after_ends_at_a_fixed_length_is_a_variant(envs: int) -> None:
    """An environment that has no flag for its time limit, and a program that knows of it."""
    rollout = random_rollout(0, 96, envs, time_limits=0.0)
    every_16_steps = np.broadcast_to(np.arange(96)[:, None] % 16 == 15, (96, envs))

    for terminated, name in ((every_16_steps, "fixed_length_bootstrapped"), (rollout.terminated, "termination_bootstrapped")):
        c = replace(rollout, terminated=terminated)
        assert names(check(c, gae(c, np.where(c.done, c.final, c.following)))) == {name}


@pytest.mark.parametrize(("name", "variant"), [("normalized_returns", True), ("normalized_returns_over_limits", False)])
def test_normalised_returns_to_go_less_values_are_a_variant_unless_they_run_across_limits(name: str, variant: bool) -> None:
    c = random_rollout(2, 96)
    sums, running = np.zeros_like(c.values), np.zeros(c.values.shape[1])
    for step in reversed(range(len(sums))):
        running = c.rewards[step] + c.gamma * running * ~(c.done if variant else c.terminated)[step]
        sums[step] = running

    result = check(c, (normalize(sums) - c.values).astype(np.float32))

    assert names(result) == {name} and result.holds == variant


def test_inverted_flags_are_named_whatever_the_values_after_the_ends_are() -> None:
    """A program that estimates the state after each step continues with the value of a terminal state."""
    c = random_rollout(1, 64)
    after = np.where(c.done, 3.0, 0.0)
    advantages, trace = np.zeros_like(c.values), np.zeros(c.values.shape[1])
    for t in reversed(range(len(c.values))):
        trace = c.rewards[t] + c.gamma * after[t] - c.values[t] + c.gamma * c.lam * c.done[t] * trace
        advantages[t] = trace

    assert names(check(c, advantages)) == {"ends_inverted"}


@pytest.mark.parametrize("seed", range(3))
def test_numbers_that_are_noise_have_no_explanation(seed: int) -> None:
    c = random_rollout(seed)
    noise = np.random.default_rng(seed + 100).normal(size=c.values.shape)

    for advantages in (noise, right(c) + 0.1 * noise, right(c) * c.values, np.where(c.rewards > 0, right(c), 0)):
        result = check(c, advantages.astype(np.float32))
        assert not result.matches
        assert not result.holds and not result.explanations


def test_episodes_that_are_cut_more_often_than_the_environments_end_them_have_no_name() -> None:
    """For example in games of several points, whose trace is deliberately cut at each point."""
    c = random_rollout(1, 96, ends=0.05)
    points = c.done | (np.random.default_rng(5).random(c.done.shape) < 0.2)

    assert names(check(c, cleanrl_style(c, points))) == set()


def test_the_number_of_steps_with_another_flag_is_fitted() -> None:
    c = random_rollout(3, 96)
    order = np.random.default_rng(2).permutation(len(c.done))
    (explanation,) = check(c, cleanrl_style(c, c.done[order])).explanations

    assert explanation.hypothesis.name == "other_ends"
    assert explanation.fitted == (c.done[order] ^ c.done).sum()


@pytest.mark.parametrize("place", [(0, 0), (17, 2), (39, 3)])
def test_one_wrong_row_has_no_explanation_that_changes_others(place: tuple[int, int]) -> None:
    """The rewards of steps -1 and T are not in the rollout, so only the first and the last row may have such an explanation."""
    c = random_rollout(2, ends=0.3)
    advantages = right(c)
    advantages[place] += 2.0

    assert names(check(c, advantages)) <= {"other_last_value"}


@pytest.mark.parametrize("step", [0, -1])
def test_constant_rewards_are_no_rewards_of_another_step(step: int) -> None:
    c = random_rollout(3, ends=0.3)
    c = replace(c, rewards=np.ones_like(c.rewards))
    rewards = c.rewards.copy()
    rewards[step] = 0.25

    assert not names(check(c, right(replace(c, rewards=rewards)))) & {"rewards_early", "rewards_late"}


def test_mistakes_that_a_batch_cannot_tell_apart_come_as_a_set(seed: int) -> None:
    """Every end here is a time limit, so bootstrapping ends equals bootstrapping time limits with the next episode's value."""
    c = random_rollout(seed, ends=0.15, time_limits=1.0)
    run_on = PROGRAMS["ends_ignored"][1](c)

    assert {"ends_ignored", "time_limit_no_end"} <= names(check(c, run_on))


def test_ends_that_all_environments_share_are_no_ends_of_others() -> None:
    """Time limits at the same steps everywhere, as in Pendulum: other environments have the same flags."""
    c = random_rollout(0)
    together = np.broadcast_to(np.arange(len(c.values))[:, None] % 9 == 8, c.values.shape)
    c = replace(c, terminated=np.zeros_like(together), truncated=together)

    assert names(check(c, PROGRAMS["time_limit_as_termination"][0](c))) == {"time_limit_as_termination"}


@pytest.mark.parametrize(
    ("name", "settings", "parameter", "value"),
    [
        ("other_gamma", {"gamma": 0.5}, "other_gamma", 0.5),
        ("other_gamma", {"gamma": 1.0}, "other_gamma", 1.0),
        ("other_lambda", {"lam": 0.95}, "other_lambda", 0.95),
        ("both", {"gamma": 0.99, "lam": 0.8}, "both_gamma", 0.99),
        ("both", {"gamma": 0.99, "lam": 0.8}, "both_lambda", 0.8),
    ],
)
def test_other_settings_are_fitted(name: str, settings: dict[str, Any], parameter: str, value: float) -> None:
    c = random_rollout(4)
    result = check(c, right(replace(c, **settings)))

    fitted = {one.hypothesis.name: one.fitted for one in result.explanations}
    assert {key.partition("_")[0] for key in fitted} == {name.partition("_")[0]}
    assert fitted[parameter] == pytest.approx(value, abs=1e-4)
    assert not result.holds
    assert result.values()[f"integrity/fitted/advantages_{parameter}"] == pytest.approx(value, abs=1e-4)


def test_rewards_before_normalisation_are_told_from_scaled_ones() -> None:
    c = random_rollout(1)
    raw = np.random.default_rng(9).normal(size=c.rewards.shape).astype(np.float32)

    result = check(c, right(replace(c, rewards=raw)), raw_rewards=raw)

    assert names(result) == {"raw_rewards"}


def test_rewards_are_clipped_with_the_value_of_a_time_limit_in_them() -> None:
    c = random_rollout(5)

    result = check(c, cleanrl_style(c, c.done, stored_rewards(c).clip(-1, 1)))

    assert names(result) == {"rewards_clipped"}


def test_rows_that_do_not_count_are_left_out() -> None:
    """An invalid row may hold any number, and the trace stops before it."""
    c = random_rollout(6, ends=0.2)
    valid = np.ones_like(c.done)
    valid[1:] = ~c.done[:-1]  # the step after an end is a reset
    delta = np.where(valid, c.rewards + c.gamma * c.next_values - c.values, 0)
    advantages = np.zeros_like(delta)
    for t in reversed(range(len(delta))):
        ahead = advantages[t + 1] * valid[t + 1] if t + 1 < len(delta) else 0
        advantages[t] = delta[t] + c.gamma * c.lam * ~c.done[t] * ahead
    advantages[~valid] = 77.0

    assert check(c, advantages, valid=valid).matches
    assert not check(c, advantages + valid, valid=valid).matches
    assert check(c, advantages, valid=np.zeros_like(valid)).reason == "no row counts"


def test_one_environment_needs_no_second_axis_and_the_last_value_is_enough() -> None:
    """By hand: gamma 0.5, lambda 1. delta = [1 + 0.5*4 - 2, 0 - 4, 2 + 0.5*6 - 3] = [1, -4, 2]; the second step terminates."""
    result = check_gae([1.0, 0.0, 2.0], [2.0, 4.0, 3.0], [-1.0, -4.0, 2.0], gamma=0.5, gae_lambda=1, ended=[0, 1, 0], last_values=6.0)

    assert result.matches
    assert result.error == 0.0


def test_without_values_after_time_limits_their_episodes_are_left_out() -> None:
    c = random_rollout(8, ends=0.2)
    advantages = right(c)

    result = check(c, advantages, next_values=None)
    assert result.matches
    assert result.error is not None

    limited = random_rollout(8, 10, 1, ends=0.0)
    limited.truncated[-1] = True
    assert check(limited, right(limited), next_values=None).reason == "the values after time limits are not known"


def test_tensors_of_every_kind_are_taken_and_left_alone() -> None:
    c = random_rollout(0)
    rewards = torch.from_numpy(c.rewards).requires_grad_()
    before = rewards.detach().clone()

    result = check_gae(
        *(rewards, torch.from_numpy(c.values).bfloat16().float(), right(c)),
        gamma=float(np.float32(0.97)),
        gae_lambda=0.9,
        ended=c.done,
        next_values=c.next_values,
        tolerance=0.1,
    )

    assert result.error is not None
    assert torch.equal(rewards, before)
    assert rewards.grad is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gamma": 1.5}, "gamma must be between 0 and 1, got 1.5"),
        ({"gae_lambda": -0.1}, "gae_lambda must be between 0 and 1"),
        ({"next_values": None, "last_values": None}, "give next_values"),
        ({"terminated": None, "truncated": None}, "give ended"),
        ({"last_values": np.zeros(3)}, "last_values must have 4 entries, one for each environment, got 3"),
        ({"terminated": np.zeros((40, 3), bool)}, "shapes must agree"),
        ({"next_values": np.zeros((39, 4))}, "shapes must agree"),
        ({"next_values": np.zeros((40, 4, 1))}, "next_values must have shape"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    c = random_rollout(0)

    with pytest.raises(ValueError, match=message):
        check(c, right(c), **changes)
