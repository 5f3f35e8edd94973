"""Log-ratios as programs compute them, correctly and with mistakes."""

from collections.abc import Callable

import pytest
import torch
from explained import names
from torch import Tensor

from esper_telemetry.equations.comparison import EquationCheck
from esper_telemetry.equations.minibatch_rows import check_log_ratios
from esper_telemetry.equations.replayed_outputs import check_replayed_log_probs

STEPS, ENVS = 16, 4


def other_actions(new: Tensor) -> Tensor:
    """New log-probabilities of other actions."""
    return new.flip(0) - 0.3


PROGRAMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "inverted": lambda new, old, rows: old[rows] - new,
    "recomputed": lambda new, old, rows: new - new.detach(),
    "no_old": lambda new, old, rows: new,
    "quotient": lambda new, old, rows: (new / old[rows]).log(),
    "mixed_quotient": lambda new, old, rows: (new.exp() / old[rows]).abs().log(),
    "no_exponential": lambda new, old, rows: (new - old[rows]).abs().log(),
    "mean_over_dimensions": lambda new, old, rows: new / 3 - old[rows],
    "clamped": lambda new, old, rows: (new - old[rows]).clamp(-0.04, 0.2),
    "linear": lambda new, old, rows: (1 + new - old[rows]).log(),
    "rows_in_order": lambda new, old, rows: new - old,
    "axes_swapped": lambda new, old, rows: new - old.view(STEPS, ENVS).T.flatten()[rows],
    "actions_swapped": lambda new, old, rows: other_actions(new) - old[rows],
    "shifted_rows": lambda new, old, rows: new - old[rows].roll(1),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_mistake_in_the_ratio_is_named_and_no_other(name: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(STEPS * ENVS, generator=generator) - 0.1
    rows = torch.randperm(STEPS * ENVS, generator=generator)
    new = old[rows] - 0.1 * torch.rand(STEPS * ENVS, generator=generator)

    def check(log_ratio: Tensor) -> EquationCheck:
        swapped = old.view(STEPS, ENVS).T.flatten()[rows]
        return check_log_ratios(log_ratio, new, old[rows], in_order=old, swapped=swapped, now_swapped=other_actions(new), dimensions=3)

    assert names(check(PROGRAMS[name](new, old, rows))) == {name}
    assert check(new - old[rows]).matches
    assert check((new - old[rows]).exp().log()).matches


def test_log_probabilities_of_certain_actions_are_rounded_at_one() -> None:
    """A certain policy: in single precision log(1 - 1e-12) is 0, so all log-ratios are 0; in double they are 1e-12."""
    now, stored = torch.full((8,), -1e-12), torch.full((8,), -2e-12)
    assert check_log_ratios(torch.zeros(8), now, stored).matches
    assert not check_log_ratios(torch.zeros(8), torch.full((8,), -0.001), torch.full((8,), -0.002)).matches


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="shapes must agree"):
        check_log_ratios(torch.zeros(4), torch.zeros(4, 1), torch.zeros(4))


def test_ratios_without_digits_are_left_out() -> None:
    """The exponential of -200 is 0 in single precision, whose logarithm a program cannot give back."""
    new, old = torch.tensor([-1.0, -2.0, -201.0]), torch.tensor([-1.5, -1.0, -1.0])

    assert check_log_ratios(torch.tensor([0.5, -1.0, -103.0]), new, old).matches
    assert not check_log_ratios(torch.tensor([0.5, 1.0, -103.0]), new, old).matches
    assert "0 or infinite" in check_log_ratios(torch.tensor([-103.0]), new[2:], old[2:]).reason


def test_a_clamp_of_log_ratios_is_named_with_its_bound() -> None:
    new, old = torch.tensor([-1.0, -2.0, -3.0, -1.0, -2.0]), torch.tensor([-1.1, -1.0, -2.0, -2.0, -1.0])

    check = check_log_ratios((new - old).clamp(-0.5, 0.5), new, old)

    assert check.sentence.startswith("the log-ratios equal log-ratios that are clamped before the surrogate, c = 0.5")


@pytest.mark.parametrize("name", ["mean_in_loss", "mean_at_collection"])
def test_means_over_dimensions_on_one_side_are_named(name: str) -> None:
    total = -torch.rand(8) - 0.5
    stored, replayed = (total, total / 3) if name == "mean_in_loss" else (total / 3, total)
    alternatives = {"mean_in_loss": lambda: replayed * 3, "mean_at_collection": lambda: replayed / 3}

    check = check_replayed_log_probs(stored, replayed, alternatives=alternatives)

    assert names(check) == {name}
