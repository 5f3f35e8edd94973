"""Transitions: observations, rewards and actions arrive in the row, step and environment that they belong to."""

from typing import Any, NamedTuple

import pytest
import torch
from explained import names
from torch import Tensor

from esper_telemetry.equations.comparison import EquationCheck
from esper_telemetry.equations.transitions import check_executed, check_rewards, check_transitions, checksums

STEPS, ENVS, LENGTH = 96, 4, 12


class Rollout(NamedTuple):
    """A rollout whose episodes last twelve steps and end at another step in each environment; observations [T, B, 3]."""

    observations: Tensor
    returned: Tensor
    final: Tensor
    ended: Tensor


def rollout(seed: int) -> Rollout:
    generator = torch.Generator().manual_seed(seed)
    observed = torch.randn(STEPS + 1, ENVS, 3, generator=generator)
    ended = (torch.arange(STEPS).view(-1, 1) + torch.arange(ENVS)) % LENGTH == LENGTH - 1
    final = torch.randn(STEPS, ENVS, 3, generator=generator)
    return Rollout(observed[:-1], observed[1:], final, ended)


def check(data: Rollout, observations: Tensor) -> EquationCheck:
    return check_transitions(observations, data.returned, ended=data.ended, final_observations=data.final)


def delayed(column: Tensor) -> Tensor:
    return torch.cat([column[:1], column[:-1]])


def test_observations_that_follow_one_another_match(seed: int) -> None:
    data = rollout(seed)

    assert check(data, data.observations).matches


@pytest.mark.parametrize(
    "mistake", ["whole_numbers", "sometimes_updated", "never_updated", "stale", "next_stored", "final_observation", "other_environment"]
)
def test_a_mistake_is_named(seed: int, mistake: str) -> None:
    data = rollout(seed)
    before = data.ended.unsqueeze(-1).roll(1, 0)
    kept = torch.arange(STEPS).view(-1, 1, 1) % 3 == 2
    stored = {
        "whole_numbers": data.observations.trunc(),
        "sometimes_updated": torch.where(kept, delayed(data.observations), data.observations),
        "never_updated": data.observations[:1].expand_as(data.observations),
        "stale": delayed(data.observations),
        "next_stored": data.returned,
        "final_observation": torch.where(before, data.final.roll(1, 0), data.observations),
        "other_environment": data.observations.roll(1, 1),
    }[mistake]

    result = check(data, stored)

    assert not result.holds
    assert names(result) == {mistake}


@pytest.mark.parametrize("of_rollout", [True, False])
def test_an_array_that_later_steps_change_is_named(of_rollout: bool) -> None:
    """The environment keeps one array, or makes one at each reset."""
    data = rollout(1)
    stored = data.returned[-1:].repeat(STEPS, 1, 1)
    for step in () if of_rollout else reversed(range(STEPS)):
        kept = stored[step + 1] if step + 1 < STEPS else stored[step]
        stored[step] = torch.where(data.ended[step].unsqueeze(-1), data.final[step], kept)

    assert names(check(data, stored)) == {"in_place"}


def test_observations_that_are_processed_on_their_way_are_unexplained() -> None:
    data = rollout(0)

    assert names(check(data, 2 * data.observations)) == set()


def test_an_environment_that_never_updates_its_observation_is_named_without_what_it_returned() -> None:
    data = rollout(0)
    first = torch.randn(1, ENVS, 3)
    frozen = first.expand(STEPS, ENVS, 3)

    assert names(check_transitions(frozen, ended=data.ended)) == {"never_updated"}
    assert names(check_transitions(frozen, frozen, ended=data.ended)) == {"never_updated"}


@pytest.mark.parametrize(
    "observations",
    [
        torch.zeros(STEPS, ENVS, 3),  # a bandit without observations
        torch.full((STEPS, ENVS), 5),  # a state of a small grid in which the agent runs into walls
        torch.ones(STEPS, ENVS, 4, dtype=torch.uint8),  # a picture of a waiting game
    ],
)
def test_observations_that_may_well_stay_the_same_are_no_mistake(observations: Tensor) -> None:
    assert check_transitions(observations, observations, ended=torch.zeros(STEPS, ENVS, dtype=torch.bool)).matches


def test_a_contextual_bandit_is_no_mistake() -> None:
    contexts = torch.randn(STEPS + 1, ENVS, 3)

    assert check_transitions(contexts[:-1], contexts[1:], ended=torch.ones(STEPS, ENVS, dtype=torch.bool)).matches


def test_rewards_that_a_program_makes_itself_have_no_name() -> None:
    paid = torch.randn(STEPS, ENVS, generator=torch.Generator().manual_seed(1))

    assert names(check_rewards(paid.square() / 3, paid)) == set()


@pytest.mark.parametrize(
    ("mistake", "scale"),
    [(name, 1) for name in ("", "step_before", "step_after", "other_environment", "axes_swapped")]
    + [(name, 1 / 8) for name in ("step_before", "step_after", "axes_swapped")],
)
def test_rewards_of_another_row_are_named_although_they_are_scaled(seed: int, mistake: str, scale: float) -> None:
    paid = torch.randn(STEPS, ENVS, generator=torch.Generator().manual_seed(seed))
    stored = {
        "": paid,
        "step_before": paid.roll(1, 0),
        "step_after": paid.roll(-1, 0),
        "other_environment": paid.roll(1, 1),
        "axes_swapped": paid.reshape(ENVS, STEPS).t(),
    }[mistake]

    result = check_rewards(scale * stored, paid)

    assert result.matches == (not mistake)
    assert names(result) == ({mistake} - {""})


BOOTSTRAPS = {
    "terminations": ("bootstrapped_terminations", [3, 9, 12, 20, 24, 29], []),
    "time limits": ("bootstrapped_limits", [3, 9, 12, 20, 24, 29], [3, 9, 12, 20, 24, 29]),
    "time limits without a flag of their own": ("bootstrapped_limits", [4, 9, 14, 19, 24, 29], []),
}


@pytest.mark.parametrize("kind", BOOTSTRAPS)
def test_a_bootstrap_in_the_rewards_belongs_to_time_limits(kind: str) -> None:
    name, ends, limits = BOOTSTRAPS[kind]
    paid, values = torch.ones(30, 1), torch.linspace(2.0, 5.0, 30).unsqueeze(1)
    ended, limited = torch.zeros(30, 1, dtype=torch.bool), torch.zeros(30, 1, dtype=torch.bool)
    ended[ends], limited[limits] = True, True
    facts = {"values": values, "ended": ended, "time_limits": limited}

    assert names(check_rewards(paid + 0.9 * values * ended, paid, **facts)) == {name}
    assert names(check_rewards(paid - 3.0 * ended, paid, **facts)) == set()  # a penalty


def test_rewards_that_a_program_clips_or_scales_are_variants() -> None:
    paid = 2 * torch.randn(STEPS, ENVS)

    clipped, scaled = check_rewards(paid.clamp(-1, 1), paid), check_rewards(0.1 * paid, paid)

    assert names(clipped) == {"clipped"} and names(scaled) == {"scaled"}
    assert all(one.hypothesis.variant for result in (clipped, scaled) for one in result.explanations)
    assert clipped.explanations[0].fitted == 1


@pytest.mark.parametrize("choices", [2, 4])
@pytest.mark.parametrize("kind", ["replaced", "sticky", "renamed"])
def test_actions_that_are_replaced_by_chance_are_told_from_renamed_ones(kind: str, choices: int) -> None:
    draw = torch.Generator().manual_seed(choices)
    sent = torch.randint(choices, (400, 4), generator=draw)
    some = torch.rand(400, 4, generator=draw) < 0.2
    arrived = torch.where(some, (sent + torch.randint(1, choices, sent.shape, generator=draw)) % choices, sent)
    if kind == "sticky":
        for step in range(400):
            arrived[step] = torch.where(some[step], arrived[step - 1], sent[step]) if step else sent[step]
    if kind == "renamed":
        arrived = sent.clamp(max=choices - 2)

    result = check_executed(sent, arrived)

    assert names(result) == ({kind} - {"renamed"})
    assert result.holds == (kind == "sticky")


@pytest.mark.parametrize("mistake", ["", "other_environment", "step_before"])
def test_actions_that_arrive_elsewhere_are_named(seed: int, mistake: str) -> None:
    torch.manual_seed(seed)
    sent = torch.randint(0, 3, (STEPS, ENVS))
    received = {"": sent, "other_environment": sent.roll(1, 1), "step_before": sent.roll(1, 0)}[mistake]

    result = check_executed(sent, received)

    assert result.matches == (not mistake)
    assert names(result) == ({mistake} - {""})


@pytest.mark.parametrize("delay", [2, 6])
def test_actions_that_arrive_some_steps_late_are_named_with_their_delay(delay: int) -> None:
    sent = torch.randn(STEPS, ENVS)
    received = torch.cat([torch.zeros(delay, ENVS), sent[:-delay]])

    (explanation,) = check_executed(sent, received).explanations

    assert (explanation.hypothesis.name, explanation.fitted) == ("late", delay)


def test_a_few_actions_agree_with_earlier_ones_by_chance() -> None:
    sent = torch.tensor([1, 0, 0, 1, 1, 0, 1, 0]).unsqueeze(1)

    assert names(check_executed(sent, sent.roll(4, 0))) == names(check_executed(sent, sent.roll(1, 0))) == set()


def test_actions_that_do_not_depend_on_those_sent_are_named_and_other_numbers_for_them_are_not() -> None:
    torch.manual_seed(0)
    sent = torch.randint(0, 3, (64, 4))

    assert names(check_executed(sent, torch.randint(0, 3, (64, 4)))) == {"unrelated"}
    assert names(check_executed(sent, 2 - sent)) == set()


def test_actions_in_other_units_are_a_variant() -> None:
    sent = torch.randn(STEPS, ENVS)
    result = check_executed(sent, 0.05 * sent)

    assert names(result) == {"scaled"}
    assert result.holds
    assert result.explanations[0].fitted == pytest.approx(0.05)


def test_checksums_tell_observations_apart_and_read_a_part_of_large_ones() -> None:
    pictures = torch.randint(0, 256, (2, 3, 4, 84, 84), dtype=torch.uint8)
    swapped = torch.tensor([[[1.0, 2.0]], [[2.0, 1.0]]])

    assert checksums(pictures).shape == (2, 3)
    assert len(checksums(pictures).unique()) == 6
    assert len(checksums(swapped).unique()) == 2


def test_wrong_shapes_are_refused() -> None:
    data = rollout(0)
    settings: Any = {"ended": data.ended}

    with pytest.raises(ValueError, match=r"\[T, B, \.\.\.\]"):
        check_transitions(torch.zeros(5), **settings)
    with pytest.raises(ValueError, match="shapes must agree"):
        check_transitions(data.observations, data.returned[:-1], **settings)
    with pytest.raises(ValueError, match="shapes must agree"):
        check_transitions(data.observations[:-1], **settings)


def test_observations_below_one_that_an_integer_array_cuts_to_zero_are_named() -> None:
    data = rollout(0)
    small = data._replace(returned=data.returned.sigmoid(), final=data.final.sigmoid())

    assert names(check(small, torch.zeros_like(data.observations))) == {"whole_numbers"}
