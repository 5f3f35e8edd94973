"""Losses as programs compute them, correctly and with mistakes: exactly the mistake is named.

Programs are written here as people write them, in single precision; the package recomputes in float64 with its own equations.
"""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from explained import names
from torch import Tensor

from esper_telemetry.equations.comparison import EquationCheck
from esper_telemetry.equations.policy_loss import POLICY_LOSS, check_policy_loss
from esper_telemetry.equations.value_loss import VALUE_LOSS, check_value_loss

MINIBATCHES, ROWS = 8, 64
CLIP = 0.2


class Batch(NamedTuple):
    """Columns [N] of a minibatch, as a program has them."""

    log_ratio: Tensor
    advantages: Tensor
    raw: Tensor
    log_probs: Tensor
    values: Tensor
    old_values: Tensor
    returns: Tensor
    valid: Tensor


def batches(seed: int, spread: float = 0.3) -> list[Batch]:
    """Minibatches whose ratios move away from 1; the first starts with ratios of 1, as in PPO."""
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float = 1.0, mean: float = 0.0) -> Tensor:
        return torch.randn(ROWS, generator=generator) * scale + mean

    found = []
    for place in range(MINIBATCHES):
        raw, old = normal(2.0, 0.3), normal(3.0, 5.0)
        found.append(
            Batch(
                log_ratio=normal(spread * place / MINIBATCHES),
                advantages=(raw - raw.mean()) / (raw.std() + 1e-8),
                raw=raw,
                log_probs=-normal().abs(),
                values=old + normal(0.3),
                old_values=old,
                returns=raw + old,
                valid=torch.rand(ROWS, generator=generator) > 0.3,
            )
        )
    return found


def stacked(found: list[Batch]) -> Batch:
    return Batch(*[torch.stack(column) for column in zip(*found, strict=True)])


def surrogate(b: Batch, low: float = 1 - CLIP, high: float = 1 + CLIP) -> Tensor:
    ratio = b.log_ratio.exp()
    return torch.max(-b.advantages * ratio, -b.advantages * torch.clamp(ratio, low, high)).mean()


def terms(b: Batch) -> tuple[Tensor, Tensor]:
    ratio = b.log_ratio.exp()
    return ratio * b.advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * b.advantages


def dual(b: Batch, bound: float) -> Tensor:
    first, second = terms(b)
    gain = torch.min(first, second)
    return -torch.where(b.advantages < 0, torch.max(gain, bound * b.advantages), gain).mean()


POLICY_PROGRAMS: dict[str, Callable[[Batch], Tensor]] = {
    "sign": lambda b: -surrogate(b),
    "negated_advantages": lambda b: torch.max(*terms(b)).mean(),
    "optimistic": lambda b: torch.min(-terms(b)[0], -terms(b)[1]).mean(),
    "no_minimum": lambda b: -terms(b)[1].mean(),
    "no_clip": lambda b: -(b.log_ratio.exp() * b.advantages).mean(),
    "minimum_of_ratios": lambda b: -(torch.min(b.log_ratio.exp(), b.log_ratio.exp().clamp(1 - CLIP, 1 + CLIP)) * b.advantages).mean(),
    "inverted_ratio": lambda b: surrogate(b._replace(log_ratio=-b.log_ratio)),
    "no_exponential": lambda b: -torch.min(b.log_ratio * b.advantages, b.log_ratio.clamp(1 - CLIP, 1 + CLIP) * b.advantages).mean(),
    "log_ratio_as_clip": lambda b: (
        -torch.min(b.log_ratio.exp() * b.advantages, b.log_ratio.clamp(1 - CLIP, 1 + CLIP) * b.advantages).mean()
    ),
    "log_prob": lambda b: -(b.log_probs * b.advantages).mean(),
    "clip_around_zero": lambda b: surrogate(b, -CLIP, CLIP),
    "upper_clip_only": lambda b: surrogate(b, -torch.inf, 1 + CLIP),
    "lower_clip_only": lambda b: surrogate(b, 1 - CLIP, torch.inf),
    "clipped_product": lambda b: -torch.min(terms(b)[0], terms(b)[0].clamp(1 - CLIP, 1 + CLIP)).mean(),
    "clipped_log_ratio": lambda b: surrogate(b, torch.tensor(-CLIP).exp().item(), torch.tensor(CLIP).exp().item()),
    "broadcast": lambda b: -torch.min(*terms(b._replace(log_ratio=b.log_ratio[:, None]))).mean(),
    "sum": lambda b: -torch.min(*terms(b)).sum(),
    "unnormalized": lambda b: surrogate(b._replace(advantages=b.raw)),
    "shifted_rows": lambda b: surrogate(b._replace(advantages=b.advantages.roll(1))),
    "following_rows": lambda b: surrogate(b._replace(advantages=b.advantages.roll(-1))),
    "reversed_rows": lambda b: surrogate(b._replace(advantages=b.advantages.flip(0))),
    "dual_clip": lambda b: dual(b, 3.0),
    "truncated": lambda b: -(b.log_ratio.exp().clamp(max=1.0) * b.advantages).mean(),
    "accumulated": lambda b: surrogate(b) / 4,
    "scaled": lambda b: 0.7 * surrogate(b),
    "annealed_clip": lambda b: surrogate(b, 0.9, 1.1),
    "clip_range": lambda b: surrogate(b, 0.7, 1.3),
    "decoupled_clip": lambda b: surrogate(b, 1 - CLIP, 1.28),
    "other_dual_clip": lambda b: dual(b, 1.4),
    "kl_penalty": lambda b: surrogate(b) + 0.5 * (b.log_ratio.exp() - 1 - b.log_ratio).mean(),
    "kl_penalty_alone": lambda b: -terms(b)[0].mean() - 0.5 * b.log_ratio.mean(),
}
NEED_WIDE_RATIOS = {"dual_clip": 1.5, "other_dual_clip": 0.6}
"""Spread of the log-ratios at which the bound of dual clipping is reached."""


def policy_check(program: Callable[[Batch], Tensor], found: list[Batch], **options: object) -> EquationCheck:
    rows = stacked(found)
    losses = torch.stack([program(b) for b in found])
    given = {"raw_advantages": rows.raw, "log_probs": rows.log_probs} | options
    return check_policy_loss(losses, rows.log_ratio, rows.advantages, clip=CLIP, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", POLICY_PROGRAMS)
def test_a_mistake_in_the_policy_loss_is_named_and_no_other(name: str, seed: int) -> None:
    result = policy_check(POLICY_PROGRAMS[name], batches(seed, NEED_WIDE_RATIOS.get(name, 0.3)))

    assert names(result) == {name}


@pytest.mark.parametrize("spread", [0.0, 0.01, 0.3, 3.0])
def test_a_right_policy_loss_matches(spread: float, seed: int) -> None:
    assert policy_check(surrogate, batches(seed, spread)).matches


def test_ratios_of_one_do_not_tell_whether_the_loss_is_clipped() -> None:
    """With ratios of 1 every form of the surrogate is -mean A."""
    for name in ("no_clip", "no_minimum", "optimistic", "inverted_ratio"):
        assert policy_check(POLICY_PROGRAMS[name], batches(0, 0.0)).matches


def test_a_difference_that_no_hypothesis_gives_has_no_name(seed: int) -> None:
    """A random permutation of the rows, a weight for each row, and an offset."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(ROWS, generator=generator)
    weights = torch.rand(ROWS, generator=generator)
    for program in (
        lambda b: surrogate(b._replace(advantages=b.advantages[order])),
        lambda b: surrogate(b._replace(advantages=b.advantages * weights)),
        lambda b: surrogate(b) + 0.01,
    ):
        result = policy_check(program, batches(seed))
        assert not result.matches
        assert names(result) == set()


def test_advantages_that_are_normalised_in_the_loss_are_a_variant(seed: int) -> None:
    found = batches(seed)
    rows = stacked(found)
    losses = torch.stack([surrogate(b._replace(advantages=(b.raw - b.raw.mean()) / (b.raw.std() + 1e-8))) for b in found])

    result = check_policy_loss(losses, rows.log_ratio, rows.raw, clip=CLIP)

    assert names(result) == {"normalized_again"}
    assert result.holds


def test_a_bonus_within_the_policy_loss_is_a_variant(seed: int) -> None:
    bonus = -0.01 * torch.rand(MINIBATCHES, generator=torch.Generator().manual_seed(seed))
    found = batches(seed)
    rows = stacked(found)
    losses = torch.stack([surrogate(b) for b in found]) + bonus

    result = check_policy_loss(losses, rows.log_ratio, rows.advantages, clip=CLIP, bonus=bonus)

    assert names(result) == {"with_entropy"}
    assert result.holds


def test_the_sum_over_heads_with_their_own_ratios_is_a_variant_and_the_mean_a_mistake(seed: int) -> None:
    found = batches(seed)
    rows = stacked(found)
    parts = (rows.log_ratio * 0.3, rows.log_ratio * 0.7)
    losses = torch.stack([surrogate(b._replace(log_ratio=b.log_ratio * share)) for share in (0.3, 0.7) for b in found])

    def check(losses: Tensor) -> EquationCheck:
        return check_policy_loss(losses, rows.log_ratio, rows.advantages, clip=CLIP, head_log_ratios=parts)

    assert names(check(losses.view(2, -1).sum(0))) == {"per_head"}
    assert names(check(losses.view(2, -1).mean(0))) == {"per_dimension"}


def test_padding_in_a_mean_is_named(seed: int) -> None:
    found = batches(seed)
    rows = stacked(found)

    def masked(b: Batch) -> Tensor:
        return torch.max(-terms(b)[0], -terms(b)[1])[b.valid]

    def check(program: Callable[[Batch], Tensor]) -> EquationCheck:
        losses = torch.stack([program(b) for b in found])
        return check_policy_loss(losses, rows.log_ratio, rows.advantages, clip=CLIP, valid=rows.valid)

    assert check(lambda b: masked(b).mean()).matches
    assert names(check(surrogate)) == {"padding_included"}
    assert names(check(lambda b: masked(b).sum() / ROWS)) == {"padding_counted"}


def test_minibatches_of_several_sizes_are_given_as_rows() -> None:
    found = batches(0)
    counts = [ROWS] * (MINIBATCHES - 1) + [10]
    found[-1] = Batch(*[column[:10] for column in found[-1]])
    rows = Batch(*[torch.cat(column) for column in zip(*found, strict=True)])
    losses = torch.stack([surrogate(b) for b in found])

    assert check_policy_loss(losses, rows.log_ratio, rows.advantages, clip=CLIP, counts=counts).matches
    wrong = check_policy_loss(-losses, rows.log_ratio, rows.advantages, clip=CLIP, counts=counts)
    assert names(wrong) == {"sign"}


def test_one_minibatch_is_checked_by_itself() -> None:
    b = batches(3)[-1]

    assert check_policy_loss(surrogate(b), b.log_ratio, b.advantages, clip=CLIP).matches
    assert names(check_policy_loss(-surrogate(b), b.log_ratio, b.advantages, clip=CLIP)) == {"sign"}


def test_losses_and_columns_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"3 losses need log_ratio of shape \[3, N\]"):
        check_policy_loss(torch.zeros(3), torch.zeros(4, 5), torch.zeros(4, 5), clip=0.2)
    with pytest.raises(ValueError, match="shapes must agree"):
        check_policy_loss(torch.zeros(()), torch.zeros(4), torch.zeros(4, 1), clip=0.2)
    with pytest.raises(ValueError, match="clip must be above 0"):
        check_policy_loss(torch.zeros(()), torch.zeros(4), torch.zeros(4), clip=0.0)
    with pytest.raises(ValueError, match="clipped values need old_values"):
        check_value_loss(torch.zeros(()), torch.zeros(4), torch.zeros(4), clip_value=0.2)


def squared(b: Batch, target: Tensor | None = None) -> Tensor:
    return 0.5 * ((b.values - (b.returns if target is None else target)) ** 2).mean()


def errors(b: Batch) -> tuple[Tensor, Tensor]:
    near = b.old_values + torch.clamp(b.values - b.old_values, -CLIP, CLIP)
    return (b.values - b.returns) ** 2, (near - b.returns) ** 2


def clipped(b: Batch) -> Tensor:
    return 0.5 * torch.max(*errors(b)).mean()


VALUE_PROGRAMS: dict[str, Callable[[Batch], Tensor]] = {
    "mean_square": lambda b: torch.nn.functional.mse_loss(b.values, b.returns),
    "weighted": lambda b: 0.25 * ((b.values - b.returns) ** 2).mean() * 0.6,
    "clipped": clipped,
    "huber": lambda b: torch.nn.functional.smooth_l1_loss(b.values, b.returns),
    "sign": lambda b: -squared(b),
    "sum": lambda b: ((b.values - b.returns) ** 2).sum(),
    "advantage_target": lambda b: squared(b, b.raw),
    "normalized_advantage_target": lambda b: torch.nn.functional.mse_loss(b.values, b.advantages),
    "normalized_advantages_in_target": lambda b: squared(b, b.advantages + b.old_values),
    "moving_target": lambda b: squared(b, b.raw + b.values),
    "old_value_target": lambda b: squared(b, b.old_values),
    "old_values": lambda b: squared(b._replace(values=b.old_values)),
    "broadcast": lambda b: ((b.values[:, None] - b.returns) ** 2).mean(),
    "absolute": lambda b: torch.nn.functional.l1_loss(b.values, b.returns),
    "root": lambda b: torch.nn.functional.mse_loss(b.values, b.returns).sqrt(),
    "squared_mean": lambda b: (b.values - b.returns).mean() ** 2,
    "normalized_returns": lambda b: squared(b, (b.returns - b.returns.mean()) / (b.returns.std() + 1e-8)),
    "shifted_rows": lambda b: squared(b, b.returns.roll(1)),
    "following_rows": lambda b: squared(b, b.returns.roll(-1)),
    "accumulated": lambda b: squared(b) / 8,
    "scaled": lambda b: 0.35 * squared(b),
}
SAME_NUMBERS = {"moving_target", "old_values"}
"""With returns of A + V_old both are A²."""

CLIPPED_PROGRAMS: dict[str, Callable[[Batch], Tensor]] = {
    "mean_square": lambda b: torch.max(*errors(b)).mean(),
    "unclipped": squared,
    "no_maximum": lambda b: 0.5 * errors(b)[1].mean(),
    "minimum": lambda b: 0.5 * torch.min(*errors(b)).mean(),
    "sign": lambda b: -clipped(b),
    "sum": lambda b: 0.5 * torch.max(*errors(b)).sum(),
    "advantage_target": lambda b: clipped(b._replace(returns=b.raw)),
    "clip_range": lambda b: (
        0.5 * torch.max(errors(b)[0], (b.old_values + (b.values - b.old_values).clamp(-0.1, 0.1) - b.returns) ** 2)
    ).mean(),
}


def value_check(program: Callable[[Batch], Tensor], found: list[Batch], **options: object) -> EquationCheck:
    rows = stacked(found)
    losses = torch.stack([program(b) for b in found])
    columns = {"old_values": rows.old_values, "advantages": rows.advantages, "raw_advantages": rows.raw}
    given = {**columns, "weight": 0.3, "clip": CLIP, **options}
    return check_value_loss(losses, rows.values, rows.returns, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", VALUE_PROGRAMS)
def test_a_mistake_in_the_value_loss_is_named_and_no_other(name: str, seed: int) -> None:
    expected = SAME_NUMBERS if name in SAME_NUMBERS else {name}

    assert names(value_check(VALUE_PROGRAMS[name], batches(seed))) == expected


@pytest.mark.parametrize("name", CLIPPED_PROGRAMS)
def test_a_mistake_in_the_clipped_value_loss_is_named_and_no_other(name: str, seed: int) -> None:
    assert names(value_check(CLIPPED_PROGRAMS[name], batches(seed), clip_value=CLIP)) == {name}


@pytest.mark.parametrize("across", [True, False])
def test_a_clipped_value_loss_over_all_pairs_is_named(across: bool, seed: int) -> None:
    def program(b: Batch) -> Tensor:
        values, old = b.values[:, None], b.old_values if across else b.old_values[:, None]
        near = old + torch.clamp(values - old, -CLIP, CLIP)
        return 0.5 * torch.max((values - b.returns) ** 2, (near - b.returns) ** 2).mean()

    assert names(value_check(program, batches(seed), clip_value=CLIP)) == {"broadcast"}


@pytest.mark.parametrize("scale", [0.01, 1.0, 1000.0])
def test_a_right_value_loss_matches(scale: float, seed: int) -> None:
    """This includes values in the thousands with small errors."""
    found = [b._replace(values=b.values * scale, old_values=b.old_values * scale) for b in batches(seed)]
    found = [b._replace(returns=b.values + 0.1 * b.raw) for b in found]

    assert value_check(squared, found).matches
    assert value_check(clipped, found, clip_value=CLIP).matches


def test_padding_in_a_mean_of_errors_is_named(seed: int) -> None:
    found = batches(seed)
    valid = stacked(found).valid

    def masked(b: Batch) -> Tensor:
        return errors(b)[0][b.valid]

    assert value_check(lambda b: 0.5 * masked(b).mean(), found, valid=valid).matches
    assert names(value_check(squared, found, valid=valid)) == {"padding_included"}
    assert names(value_check(lambda b: 0.5 * masked(b).sum() / ROWS, found, valid=valid)) == {"padding_counted"}


@pytest.mark.parametrize("equation", [POLICY_LOSS, VALUE_LOSS])
def test_hypotheses_are_mistakes_unless_they_are_published(equation: object) -> None:
    variants = {one.name for one in equation.hypotheses if one.variant}  # type: ignore[attr-defined]

    assert not variants & {"sign", "no_clip", "broadcast", "sum", "no_maximum", "advantage_target"}
