"""Assertions about equations, as a trainer's unit tests use them."""

import inspect
from typing import Any

import pytest
import torch

import esper_telemetry
from esper_telemetry import check_gae, testing
from esper_telemetry.equations.equation import equations
from esper_telemetry.testing import assert_gae
from esper_telemetry.testing import equation_asserts as assertions

REWARDS = torch.ones(3, 1)
ENDED = torch.tensor([[False], [True], [False]])
VALUES, NEXT_VALUES = torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([[2.0], [0.0], [4.0]])


def gae_arguments(advantages: torch.Tensor) -> dict[str, Any]:
    """γ = λ = 1, so that δ = (1 + 2 - 1, 1 - 2, 1 + 4 - 4) = (2, -1, 1), and A = (2 - 1, -1, 1)."""
    return {
        "rewards": REWARDS,
        "values": VALUES,
        "advantages": advantages,
        "ended": ENDED,
        "next_values": NEXT_VALUES,
        "gamma": 1.0,
        "gae_lambda": 1.0,
    }


def test_an_equation_that_holds_passes() -> None:
    assert_gae(**gae_arguments(torch.tensor([[1.0], [-1.0], [1.0]])))


def test_a_mistake_is_named_with_its_equation_and_what_to_change() -> None:
    """The trace continues across ends, in a rollout with enough ends to rule out other mistakes."""
    generator = torch.Generator().manual_seed(1)
    rewards, values, last = (torch.randn(size, 4, generator=generator) for size in (64, 64, 1))
    ended = torch.rand(64, 4, generator=generator) < 0.1
    next_values = torch.cat([values[1:], last]) * ~ended
    advantages, following = torch.empty(64, 4), torch.zeros(4)
    for t in reversed(range(64)):
        following = rewards[t] + 0.9 * next_values[t] - values[t] + 0.9 * 0.8 * following
        advantages[t] = following

    with pytest.raises(AssertionError) as raised:
        assert_gae(rewards, values, advantages, ended=ended, next_values=next_values, gamma=0.9, gae_lambda=0.8)

    message, reference, equal, advice = str(raised.value).splitlines()
    assert message.startswith("the advantages equal GAE that continues over the ends of episodes, and differ from their")
    assert reference.startswith("reference: A_t = ")
    assert equal.startswith("equal to: A_t = ")
    assert advice


def test_mistakes_that_these_numbers_cannot_tell_apart_are_all_named() -> None:
    """A = (2 + 0, -1 + 1, 1) if ends are ignored; in three rows other mistakes give the same numbers."""
    with pytest.raises(AssertionError, match=r"continues over the ends of episodes.* or .*, and differ from their") as raised:
        assert_gae(**gae_arguments(torch.tensor([[2.0], [0.0], [1.0]])))

    assert str(raised.value).count("equal to: ") > 1


def test_numbers_that_cannot_be_checked_do_not_pass() -> None:
    with pytest.raises(AssertionError, match="could not be checked: some of the numbers are NaN or infinite"):
        assert_gae(**gae_arguments(torch.full((3, 1), torch.nan)))


@pytest.mark.parametrize("name", [name for name in testing.__all__ if name.startswith("assert_")])
def test_an_assertion_has_the_arguments_and_the_words_of_its_check(name: str) -> None:
    assertion, check = getattr(testing, name), getattr(esper_telemetry, name.replace("assert_", "check_"))

    assert inspect.signature(assertion).parameters == inspect.signature(check).parameters
    assert inspect.signature(assertion).return_annotation in (None, "None")
    assert (inspect.getdoc(check) or "no words") in (inspect.getdoc(assertion) or "")
    assert assertion.__name__ == name


def test_there_is_an_assertion_for_every_check_of_an_equation() -> None:
    checks = {name for name in esper_telemetry.__all__ if name.startswith("check_")}

    assert check_gae.__name__ in checks
    assert {name.replace("assert_", "check_") for name in testing.__all__ if name.startswith("assert_")} == checks
    assert {name for name in vars(assertions) if name.startswith("check_")} == checks
    # only adapters make the checksums by which environments are compared
    assert len(checks) == len(equations().keys() - {"environments"})
