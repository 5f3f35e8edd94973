"""The log-ratio family against Stable-Baselines3's formulas, its bounds and its invariances."""

import math
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from esper_telemetry.core.group import pack
from esper_telemetry.metrics.ratio import RatioDiagnostics, head_ratio_diagnostics, joint_log_ratio, ratio_diagnostics

log_ratios = st.lists(st.floats(-5, 5, allow_nan=False), min_size=1, max_size=40).map(lambda x: torch.tensor(x, dtype=torch.float64))


def after_a_step(group: RatioDiagnostics) -> dict[str, float]:
    """Return the values of a minibatch after the first optimizer step."""
    packed = pack(group)
    steps = np.arange(1, packed.rows + 1)
    return packed.layout.finish(packed.table(), steps, np.zeros_like(steps)).values


def minibatches() -> tuple[Tensor, Tensor, Tensor]:
    """Log-ratios, advantages and validity of 5 minibatches of 30 rows, some invalid and not finite."""
    generator = torch.Generator().manual_seed(0)
    log_ratio, advantages = (torch.randn(5, 30, generator=generator, dtype=torch.float64) / 5 for _ in range(2))
    valid = torch.rand(5, 30, generator=generator) > 0.2
    return log_ratio.masked_fill(~valid, math.nan), advantages.masked_fill(~valid, math.inf), valid


def test_before_the_first_step_clip_fractions_and_gain_are_absent() -> None:
    values = ratio_diagnostics(torch.zeros(4), torch.ones(4), clip=0.2).values()

    assert values["integrity/ratio_init"] == 0.0
    assert not {"policy/clip_frac", "policy/kl_max", "policy/surrogate_gain"} & values.keys()


def test_the_identity_of_the_first_minibatch_reads_only_that_minibatch() -> None:
    log_ratio = torch.tensor([[0.0, 1e-3], [0.5, -0.7]], dtype=torch.float64)

    values = ratio_diagnostics(log_ratio, dim=-1).values()

    assert (values["integrity/ratio_init"], values["policy/logratio/absmax"]) == (1e-3, 0.7)


def test_one_pass_over_all_minibatches_is_one_call_per_minibatch() -> None:
    log_ratio, advantages, valid = minibatches()
    batched = pack(ratio_diagnostics(log_ratio, advantages, clip=0.2, valid=valid, dim=-1))
    singles = [pack(ratio_diagnostics(row, a, clip=0.2, valid=v)).table() for row, a, v in zip(log_ratio, advantages, valid, strict=True)]
    steps, epochs = np.arange(5), np.array([0, 0, 1, 1, 2])

    together = batched.layout.finish(batched.table(), steps, epochs).values
    apart = batched.layout.finish(np.concatenate(singles), steps, epochs).values

    assert _but_quantiles(together) == pytest.approx(_but_quantiles(apart), rel=1e-12)


def _but_quantiles(values: dict[str, float]) -> dict[str, float]:
    """Drop the quantiles: one pass computes them over all rows, but several calls only average them."""
    return {key: value for key, value in values.items() if key not in ("policy/ratio/p01", "policy/ratio/p99")}


def test_invalid_rows_have_no_influence_even_when_they_are_not_finite() -> None:
    log_ratio, advantages, valid = minibatches()

    masked = after_a_step(ratio_diagnostics(log_ratio, advantages, clip=0.2, valid=valid))
    without = after_a_step(ratio_diagnostics(log_ratio[valid], advantages[valid], clip=0.2))

    assert masked == pytest.approx(without, rel=1e-12)


def test_nothing_valid_means_nothing_reported() -> None:
    nothing = torch.zeros(3, dtype=torch.bool)

    assert after_a_step(ratio_diagnostics(torch.ones(3), torch.ones(3), clip=0.2, valid=nothing)) == {}
    assert after_a_step(ratio_diagnostics(torch.ones(0), torch.ones(0), clip=0.2)) == {}


def test_non_finite_advantages_are_left_out_of_the_gain_and_counted() -> None:
    """One of two rows counts: A (r - 1) = 1 · (2 - 1)."""
    log_ratio = torch.full((2,), 2.0, dtype=torch.float64).log()

    values = after_a_step(ratio_diagnostics(log_ratio, torch.tensor([1.0, math.nan]), clip=0.2))

    assert values["policy/surrogate_gain"] == pytest.approx(1.0)
    assert values["policy/surrogate_gain_nonfinite"] == 1.0


@given(log_ratios)
def test_divergences_are_not_negative_and_zero_only_without_movement(log_ratio: Tensor) -> None:
    values = ratio_diagnostics(log_ratio).values()

    for key in ("policy/kl", "policy/kl_k2", "policy/kl_rev"):
        assert values[key] >= -1e-15
    if log_ratio.abs().max() > 1e-6:
        assert values["policy/kl"] > 0


@given(log_ratios, st.randoms(use_true_random=False))
def test_neither_the_order_of_rows_nor_masked_ones_matter(log_ratio: Tensor, random: Random) -> None:
    """Masked rows hold NaN."""
    order = list(range(len(log_ratio)))
    random.shuffle(order)
    masked = torch.cat([log_ratio[order], torch.full((3,), math.nan, dtype=torch.float64)])
    valid = torch.arange(len(masked)) < len(log_ratio)
    keys = ("policy/kl", "policy/kl_k1", "policy/kl_k2", "policy/kl_rev", "policy/ess_frac", "policy/logratio/absmax")

    plain, other = ratio_diagnostics(log_ratio).values(), ratio_diagnostics(masked, valid=valid).values()

    assert {key: other[key] for key in keys} == pytest.approx({key: plain[key] for key in keys}, rel=1e-12, abs=1e-15)
    assert not [key for key in other if key.endswith("_nonfinite")]


@given(log_ratios, st.floats(-100, 100))
def test_effective_sample_size_is_a_fraction_that_ignores_a_common_factor(log_ratio: Tensor, shift: float) -> None:
    share = ratio_diagnostics(log_ratio).values()["policy/ess_frac"]

    assert 1 / len(log_ratio) - 1e-12 <= share <= 1 + 1e-12
    assert ratio_diagnostics(log_ratio + shift).values()["policy/ess_frac"] == pytest.approx(share, rel=1e-6)


@given(log_ratios)
def test_clipped_samples_of_both_signs_add_up(log_ratio: Tensor) -> None:
    advantages = torch.tensor([(-1.0, 0.0, 1.0)[i % 3] for i in range(len(log_ratio))])
    values = after_a_step(ratio_diagnostics(log_ratio, advantages, clip=0.2))
    up, down, zero = (advantages > 0).sum(), (advantages < 0).sum(), advantages == 0
    clipped_zero = ((log_ratio.expm1().abs() > 0.2) & zero).sum()

    both = values.get("policy/clip_frac_pos", 0.0) * up + values.get("policy/clip_frac_neg", 0.0) * down
    assert float(both + clipped_zero) == pytest.approx(values["policy/clip_frac"] * len(log_ratio))
    assert values["policy/clip_frac_active"] <= values["policy/clip_frac"]


def test_blame_adds_up_to_one_although_a_head_is_idle_in_a_minibatch() -> None:
    """Squares: head a 1 + 1 + 4, head b 9 in the second minibatch only; 6/15 and 9/15."""
    log_ratios = {"a": torch.tensor([[1.0, 1.0], [2.0, 0.0]]), "b": torch.tensor([[5.0, 5.0], [3.0, 0.0]])}
    relevant = {"b": torch.tensor([[False, False], [True, True]])}

    values = head_ratio_diagnostics(log_ratios, relevant=relevant, dim=-1).values()

    assert values["policy/head/a/blame"] == pytest.approx(6 / 15)
    assert values["policy/head/b/blame"] == pytest.approx(9 / 15)


def test_the_joint_log_ratio_is_the_sum_over_heads_that_take_part() -> None:
    log_ratios = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([10.0, math.nan])}

    joint = joint_log_ratio(log_ratios, {"b": torch.tensor([True, False])})

    assert joint.tolist() == [11.0, 2.0]
