"""What environments do, by the observations that they return; the cases with real environments are in `test_environment_faults`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from explained import names
from torch import Tensor

from esper_telemetry.equations.comparison import EquationCheck
from esper_telemetry.equations.environment_steps import check_environments, stream_count
from esper_telemetry.equations.transitions import checksums

STEPS, ENVS, LENGTH = 240, 3, 20
ENDED = (torch.arange(STEPS) % LENGTH == LENGTH - 1).unsqueeze(1).expand(STEPS, ENVS)


def walks(seed: int = 0, envs: int = ENVS) -> Tensor:
    """Random walks [T, B, 3]; each episode begins at another place."""
    generator = torch.Generator().manual_seed(seed)
    steps = 0.1 * torch.randn(STEPS // LENGTH, LENGTH, envs, 3, generator=generator)
    starts = 3 * torch.randn(STEPS // LENGTH, 1, envs, 3, generator=generator)
    return (starts + steps.cumsum(1)).flatten(0, 1)


def check(stored: Tensor, returned: Tensor | None = None, **columns: Any) -> EquationCheck:
    following = stored.roll(-1, 0) if returned is None else returned
    return check_environments(
        checksums(stored),
        ended=ENDED[:, : stored.shape[1]],
        informative=True,
        outcomes=checksums(following),
        observations=stored,
        **columns,
    )


def test_independent_environments_match() -> None:
    assert check(walks()).matches


def test_each_fault_is_named() -> None:
    correct = walks()
    late = torch.where((torch.arange(STEPS) % LENGTH == 0).view(-1, 1, 1), correct, correct.roll(1, 0))
    alone = torch.stack([walks(seed, 1)[: STEPS // 2, 0] + 20 * seed for seed in range(2)], 1).reshape(STEPS, 1, 3)
    still = correct.unflatten(0, (-1, LENGTH))[:, :1].expand(-1, LENGTH, -1, -1).flatten(0, 1)

    assert names(check(late)) == {"late"}
    assert names(check(still, still)) == {"same_observation"}
    assert names(check(correct[-1:].expand_as(correct), correct)) == {"same_array"}
    assert check(correct[:1].expand_as(correct), correct).matches  # the program has stored the first one in each row
    assert names(check(correct[:, :1].expand_as(correct))) == {"one_seed"}
    assert names(check(correct, cast=0.5)) == {"cast"}
    assert stream_count(alone, torch.ones(STEPS - 1, 1, dtype=torch.bool)) == 2


@pytest.mark.parametrize("step", [0.0, 0.1])
def test_environments_that_always_begin_alike_have_no_common_seed(step: float) -> None:
    """Every episode begins at the same place, so equal starts are not evidence of a common seed."""
    stored = walks()
    stored[::LENGTH] = torch.tensor([1.0, 2.5, step])

    assert check(stored).matches


@pytest.mark.parametrize(
    ("wrapped", "is_wrong"), [(lambda raw: raw - 2.0, True), (lambda raw: raw / 3.0, False), (lambda raw: raw - 0.5 * (raw > 1.4), False)]
)
def test_wrappers_do_not_turn_the_signs_of_rewards(wrapped: Callable[[Tensor], Tensor], is_wrong: bool) -> None:
    raw = 1.0 + 0.5 * (torch.arange(STEPS * ENVS).reshape(STEPS, ENVS) % 2)

    result = check(walks(), rewards=wrapped(raw), raw_rewards=raw)
    both_signs = check(walks(), rewards=wrapped(raw - 1.25), raw_rewards=raw - 1.25)

    assert names(result) == ({"opposite_rewards"} if is_wrong else set())
    assert both_signs.matches


@pytest.mark.parametrize(("ends", "is_wrong"), [(None, True), (ENDED, True), (torch.zeros_like(ENDED), False)])
def test_a_shift_of_all_rewards_changes_nothing_without_terminations(ends: Tensor | None, is_wrong: bool) -> None:
    """The pendulum's episodes end by a time limit only, and (r + 8) / 8 is a usual scale for its rewards of -16 to 0."""
    raw = -3.0 - torch.rand(STEPS, ENVS, generator=torch.Generator().manual_seed(0))

    result = check(walks(), rewards=(raw + 8.0) / 8.0, raw_rewards=raw, terminated=ends)

    assert names(result) == ({"opposite_rewards"} if is_wrong else set())


COSTS = -8.0 * torch.rand(STEPS, ENVS, generator=torch.Generator().manual_seed(0)) ** 0.5
RARE = -COSTS.round() * (torch.arange(ENVS) == 0)
"""Most steps pay nothing, as in Atari."""


@pytest.mark.parametrize(
    ("raw", "trained", "is_wrong"),
    [
        (COSTS, COSTS.clip(-1.0, 1.0), True),
        (COSTS, torch.tanh(COSTS), True),
        (-COSTS, -COSTS.clip(-1.0, 1.0), True),
        (COSTS, (COSTS / 8.0).clip(-1.0, 1.0), False),
        (COSTS, COSTS + 1.0, False),
        (RARE, RARE.sign(), False),
        (COSTS, COSTS * torch.nan, False),
    ],
)
def test_most_rewards_are_cut_off_at_a_limit(raw: Tensor, trained: Tensor, is_wrong: bool) -> None:
    assert names(check(walks(), rewards=raw, trained=trained)) == ({"cut_rewards"} if is_wrong else set())


def test_rounding_of_pictures_and_short_rollouts_are_no_fault() -> None:
    short = walks()[:LENGTH]

    assert check(walks(), cast=0.004).matches
    assert check_environments(checksums(short), ended=ENDED[:LENGTH], informative=True).reason
    assert check_environments(checksums(walks()), ended=ENDED, informative=False).reason


@pytest.mark.parametrize("kind", ["choices", "real numbers"])
@pytest.mark.parametrize("behind", ["observation_behind", "reward_behind", ""])
def test_rewards_belong_to_the_observation_and_the_action_of_their_step(kind: str, behind: str) -> None:
    """A signal is drawn in each step, and the reward depends on it and on the action."""
    generator = torch.Generator().manual_seed(0)
    signal = torch.randn(STEPS, ENVS, 3, generator=generator)
    drawn = torch.randint(3, (STEPS, ENVS), generator=generator)
    actions = drawn if kind == "choices" else drawn.unsqueeze(-1) - 1.0
    rewards = (drawn - 1) * torch.tanh(signal[..., 0] - signal[..., 1])

    result = check_environments(
        checksums(signal),
        ended=ENDED,
        informative=True,
        observations=signal.roll(1, 0) if behind == "observation_behind" else signal,
        actions=actions,
        rewards=rewards.roll(1, 0) if behind == "reward_behind" else rewards,
    )

    assert names(result) == ({behind} - {""})


@pytest.mark.parametrize("shown", ["outcome", "nothing"])
def test_rewards_that_are_shown_afterwards_or_drawn_by_chance_are_no_fault(shown: str) -> None:
    generator = torch.Generator().manual_seed(0)
    rewards, actions = (torch.randn(STEPS, ENVS, generator=generator), torch.randint(3, (STEPS, ENVS), generator=generator))
    seen = torch.randn(STEPS, ENVS, 2, generator=generator)
    if shown == "outcome":
        seen[1:, :, 0] = rewards[:-1]

    assert check_environments(checksums(seen), ended=ENDED, informative=True, observations=seen, actions=actions, rewards=rewards).matches
