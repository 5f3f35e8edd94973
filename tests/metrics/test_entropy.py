"""Entropy and divergence against torch.distributions, with masks, heads and minibatches."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Categorical, Independent, Normal, kl_divergence

from esper_telemetry.metrics.actions import gaussian_stats
from esper_telemetry.metrics.entropy import entropy_stats
from esper_telemetry.metrics.gradients.actor_critic import bonus_gradient
from esper_telemetry.metrics.kl import categorical_kl, exact_kl, gaussian_kl, head_exact_kl
from esper_telemetry.metrics.losses import entropy_gradient, entropy_gradients


def logits(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_mask(*shape: int, seed: int = 0) -> Tensor:
    """Return a random action mask that allows the first action."""
    mask = torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) > 0.4
    mask[..., 0] = True
    return mask


def test_gaussian_entropy_is_that_of_torch_distributions_and_has_no_perplexity() -> None:
    log_std = torch.tensor([-1.0, 0.5], dtype=torch.float64)
    expected = float(Independent(Normal(torch.zeros(2), log_std.exp()), 1).entropy())

    values = entropy_stats({}, log_std={"action": log_std}).values()

    assert values == {"policy/entropy": pytest.approx(expected, rel=1e-6)}


def test_minibatches_of_different_size_merge_to_what_all_rows_give() -> None:
    x, mask = logits(3, 8, 4), random_mask(3, 8, 4)
    valid = torch.ones(3, 8, dtype=torch.bool)
    valid[2, 3:] = False

    by_row = entropy_stats({"a": x}, {"a": mask}, valid=valid, dim=-1).values()
    at_once = entropy_stats({"a": x[valid]}, {"a": mask[valid]}).values()

    assert by_row == pytest.approx(at_once, rel=1e-12)


def test_rows_that_are_not_finite_are_counted_and_left_out() -> None:
    x = logits(4, 3)
    x[1, 0] = math.nan

    values = entropy_stats({"a": x}).values()

    assert values["policy/entropy_nonfinite"] == 1.0
    rest = entropy_stats({"a": x[[0, 2, 3]]}).values()
    assert {key: values[key] for key in rest} == pytest.approx(rest, rel=1e-12)


def test_a_policy_without_heads_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one head"):
        entropy_stats({})


@given(st.floats(-50, 50), st.floats(-1e6, 1e6))
def test_normalised_entropy_ignores_offsets_and_masked_logits(offset: float, arbitrary: float) -> None:
    x, mask = logits(20, 4), random_mask(20, 4)
    moved = torch.where(mask, x + offset, arbitrary)

    before, after = (entropy_stats({"a": y}, {"a": mask}).values()["policy/entropy_norm"] for y in (x, moved))

    assert after == pytest.approx(before, rel=1e-9)


@given(st.integers(0, 1000))
def test_uniform_logits_have_normalised_entropy_one_under_every_mask(seed: int) -> None:
    mask = random_mask(20, 4, seed=seed)

    values = entropy_stats({"a": torch.full((20, 4), 3.0)}, {"a": mask}).values()

    assert values["policy/entropy_norm"] == pytest.approx(1.0, abs=1e-6)
    assert values["policy/entropy_norm"] <= 1.0


def test_exact_kl_is_that_of_torch_distributions() -> None:
    old, new = logits(50, 4), logits(50, 4, seed=1)
    mean, log_std = logits(50, 3, seed=2), logits(50, 3, seed=3) / 4
    other, other_std = logits(50, 3, seed=4), logits(50, 3, seed=5) / 4

    categorical = kl_divergence(Categorical(logits=old), Categorical(logits=new))
    gaussian = kl_divergence(Normal(mean, log_std.exp()), Normal(other, other_std.exp())).sum(-1)

    assert categorical_kl(old, new) == pytest.approx(categorical.numpy(), rel=1e-9)
    assert gaussian_kl(mean, log_std, other, other_std) == pytest.approx(gaussian.numpy(), rel=1e-9)


def test_exact_kl_adds_over_heads_that_take_part() -> None:
    """Rows 1 and 3 of head a, and row 2 of head b only if it is relevant."""
    rows = {"a": torch.tensor([1.0, 3.0]), "b": torch.tensor([math.nan, 2.0])}
    relevant = {"b": torch.tensor([False, True])}

    assert exact_kl(rows, relevant=relevant).values()["policy/kl_exact"] == 3.0
    assert head_exact_kl(rows, relevant=relevant).values() == {"policy/head/a/kl_exact": 2.0, "policy/head/b/kl_exact": 2.0}


def test_without_a_policy_gradient_the_ratio_is_absent() -> None:
    assert entropy_gradient(logits(3, 2), torch.zeros(3, 2), entropy_coef=0.01).values() == {}


def test_saturated_actions_are_those_at_or_beyond_the_bounds() -> None:
    """Two of the four components, 1 and -1.5, are at or beyond ±1."""
    actions = torch.tensor([[1.0, 0.0], [-1.5, 0.5]])

    values = gaussian_stats("move", torch.tensor([0.0, math.log(3.0)]), actions=actions, low=-1.0, high=1.0).values()

    assert values["policy/head/move/bound_frac"] == 0.5
    assert values["policy/head/move/std/mean"] == pytest.approx(2.0)
    assert values["policy/head/move/std/min"] == pytest.approx(1.0)
    assert values["policy/head/move/dimensions"] == 2


def test_the_part_of_the_range_that_actions_use() -> None:
    """Deviations of 1 and 2 over half ranges of 10 and 4: 0.1 and 0.5. The third dimension has no choice, the fourth no bounds."""
    actions = torch.tensor([[1.0, 2.0, 5.0, 0.0], [-1.0, -2.0, 5.0, 9.0], [math.nan, 0.0, 0.0, 0.0]])
    low, high = torch.tensor([-10.0, -4.0, 5.0, -math.inf]), torch.tensor([10.0, 4.0, 5.0, math.inf])

    values = gaussian_stats("move", actions=actions, low=low, high=high).values()

    assert values["policy/head/move/range_used"] == pytest.approx(0.3)
    assert values["policy/head/move/range_reached"] == pytest.approx(0.5)
    assert values["policy/head/move/empty_range_frac"] == 0.25


def test_entropy_gradient_of_all_heads_is_what_autograd_finds() -> None:
    """Two minibatches and two heads. One head is not always relevant, and ratios are on both sides of the clip range."""
    heads = {"a": logits(2, 50, 4), "b": logits(2, 50, 3, seed=1)}
    generator = torch.Generator().manual_seed(2)
    actions = {head: torch.randint(x.shape[-1], (2, 50), generator=generator) for head, x in heads.items()}
    relevant = {"b": torch.rand(2, 50, generator=generator) > 0.3}
    valid = torch.rand(2, 50, generator=generator) > 0.2
    old = torch.randn(2, 50, generator=generator, dtype=torch.float64) * 0.3
    advantages = torch.randn(2, 50, generator=generator, dtype=torch.float64)
    advantages[0, 0], valid[0, 0] = math.nan, False

    def joint(heads: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the log-ratio and entropy of each row, [2, 50]."""
        result = {head: Categorical(logits=x) for head, x in heads.items()}
        zero = torch.zeros(2, 50, dtype=torch.float64)
        log_prob = result["a"].log_prob(actions["a"]) + result["b"].log_prob(actions["b"]).where(relevant["b"], zero)
        return log_prob, result["a"].entropy() + result["b"].entropy().where(relevant["b"], zero)

    ratios = []
    start = joint(heads)[0].detach() + old
    for m in range(2):
        leaves = {head: x.clone().requires_grad_() for head, x in heads.items()}
        log_prob, entropy = joint(leaves)
        ratio, a = (log_prob - start)[m].exp()[valid[m]], advantages[m][valid[m]]
        loss = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a).mean()
        pull = torch.autograd.grad(loss, list(leaves.values()), retain_graph=True)
        bonus = torch.autograd.grad(0.01 * entropy[m][valid[m]].mean(), list(leaves.values()))
        ratios.append(torch.cat([x.flatten() for x in bonus]).norm() / torch.cat([x.flatten() for x in pull]).norm())

    stats = entropy_gradients(
        heads, actions, joint(heads)[0] - start, advantages, clip=0.2, entropy_coef=0.01, relevant=relevant, valid=valid
    )

    assert stats.values() == {"policy/entropy_grad_ratio": pytest.approx(float(torch.stack(ratios).mean()))}


def test_the_gradient_of_the_bonus_is_that_of_autograd_for_any_mixture_of_heads() -> None:
    """c ‖∂H/∂z‖ of a masked categorical head and a Gaussian head. The latter is relevant in two of four rows, one of them invalid."""
    mask, relevant = random_mask(4, 3), torch.tensor([True, False, True, False])
    valid = torch.tensor([True, True, False, True])
    z, log_std = logits(4, 3).requires_grad_(), logits(4, 2, seed=1).requires_grad_()
    categorical = Categorical(logits=z.masked_fill(~mask, -1e30)).entropy()
    gaussian = Independent(Normal(torch.zeros(4, 2), log_std.exp()), 1).entropy()
    (0.3 * (categorical + gaussian * relevant)[valid].mean()).backward()
    expected = torch.cat([torch.as_tensor(z.grad).flatten(), torch.as_tensor(log_std.grad).flatten()]).norm()

    group = bonus_gradient(
        {"a": z.detach()},
        log_std={"b": log_std.detach()},
        entropy_coef=0.3,
        action_masks={"a": mask},
        relevant={"b": relevant},
        valid=valid,
    )

    assert group.values() == {"grad/entropy/norm": pytest.approx(float(expected), rel=1e-9)}


def test_the_gradient_of_a_gaussian_bonus_does_not_depend_on_the_policy() -> None:
    """Each of 3 log standard deviations in each of 12 rows has the gradient c / 12: c √(36) / 12 = c / 2."""
    values = bonus_gradient({}, log_std={"action": logits(12, 3)}, entropy_coef=0.02).values()

    assert values == {"grad/entropy/norm": pytest.approx(0.01)}
    assert bonus_gradient({}, log_std={"action": logits(12, 3)}, entropy_coef=0.0).values() == {}
