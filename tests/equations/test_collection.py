"""Passes of the policy over its rollout: inputs that explain a difference are named."""

import pytest
import torch
from explained import names
from torch import Tensor

from esper_telemetry.equations.replayed_outputs import VALUES, check_replayed_log_probs, check_values


def column(seed: int) -> Tensor:
    return torch.randn(32, 4, generator=torch.Generator().manual_seed(seed)).double()


def test_equal_numbers_match_and_ask_for_no_other_pass() -> None:
    def never() -> Tensor:
        raise AssertionError("the stored inputs explain the numbers")

    check = check_values(column(0), column(0) + 1e-7, alternatives={"other_mode": never})

    assert check.matches


@pytest.mark.parametrize("name", [one.name for one in VALUES.hypotheses if one.name != "random_passes"])
def test_the_pass_that_gives_the_numbers_is_named(seed: int, name: str) -> None:
    passes = {one.name: column(1000 + 100 * seed + place) for place, one in enumerate(VALUES.hypotheses)}
    del passes["random_passes"]  # the policy gives the same numbers in each pass

    check = check_values(
        passes[name],
        column(seed),
        alternatives={key: lambda x=x: x for key, x in passes.items()},  # type: ignore[misc]
    )

    assert not check.holds
    assert names(check) == {name}


@pytest.mark.parametrize(("name", "steps"), [("observation_before", 1), ("observation_after", -1)])
def test_values_of_another_step_are_named_without_another_pass(seed: int, name: str, steps: int) -> None:
    check = check_values(column(seed).roll(steps, 0), column(seed))

    assert names(check) == {name}


def test_passes_with_dropout_are_told_from_another_mode(seed: int) -> None:
    mean = column(seed)
    draws = [mean + 0.1 * column(50 * seed + place) for place in (1, 2, 3)]

    active = check_replayed_log_probs(draws[0], draws[1], alternatives={"random_passes": lambda: draws[2], "other_mode": lambda: mean})
    in_training_only = check_replayed_log_probs(mean, draws[1], alternatives={"other_mode": lambda: mean})

    assert names(active) == {"random_passes"}
    assert names(in_training_only) == {"other_mode"}


def test_what_no_pass_gives_is_unexplained() -> None:
    check = check_replayed_log_probs(column(1), column(2), alternatives={"mask_missing": lambda: column(3)})

    assert not check.holds
    assert names(check) == set()


def test_a_name_that_is_no_hypothesis_is_refused() -> None:
    with pytest.raises(ValueError, match=r"alternatives must be among other_observations, .*, got stale_weights"):
        check_replayed_log_probs(torch.zeros(4), torch.zeros(4), alternatives={"stale_weights": lambda: torch.zeros(4)})


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match="shapes must agree"):
        check_values(column(0), column(0)[:-1])
