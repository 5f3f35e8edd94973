"""Gradient norms at the limits of number formats and layouts, and groups without gradients."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from worked_cases import values_of, with_gradient

from esper_telemetry import PPO, PPOConfig, Telemetry, attach, make_env, read_run
from esper_telemetry.metrics.gradients.gradient_health import gradient_health
from esper_telemetry.metrics.gradients.norms import gradient_norms


def exact_norm(gradients: list[Tensor]) -> float:
    """Return the norm from Python's `math.hypot`, which does not overflow."""
    return math.hypot(*(entry for gradient in gradients for entry in gradient.double().flatten().tolist()))


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [
        *((dtype, scale) for dtype in (torch.bfloat16, torch.float32) for scale in (1e-30, 1e-12, 1.0, 1e12, 1e30)),
        (torch.float16, 1e4),
        (torch.float16, 6e-8),
    ],
)
def test_norms_are_exact_at_every_scale_that_a_type_can_hold(dtype: torch.dtype, scale: float) -> None:
    """The squares of 1e30 and 1e-30 are outside the range of float32, as the norm at 1e4 and most numbers at 6e-8 are of float16."""
    generator = torch.Generator().manual_seed(7)
    gradients = [(torch.randn(shape, generator=generator) * scale).to(dtype) for shape in ((33, 7), (5,), (1,))]

    result = values_of(gradient_health([with_gradient(g) for g in gradients], max_norm=0.5))

    norm = exact_norm(gradients)
    assert result["grad/global/norm_preclip"] == pytest.approx(norm, rel=1e-6)
    assert result["grad/clip/coef"] == pytest.approx(min(1.0, 0.5 / (norm + 1e-6)), rel=1e-6)
    assert result["grad/global/rms"] == pytest.approx(norm / math.sqrt(33 * 7 + 6), rel=1e-6)


def test_half_precision_that_overflowed_is_counted_and_what_underflowed_is_zero() -> None:
    """In half precision 1e30 is infinite and 1e-30 is zero."""
    infinite, zero = (torch.full((3,), scale).to(torch.float16) for scale in (1e30, 1e-30))

    result = values_of(gradient_health({"infinite": with_gradient(infinite), "zero": with_gradient(zero)}))

    assert result["grad/global/norm_preclip_nonfinite"] == 3.0
    assert result["grad/layer/zero/norm"] == 0.0


def test_sparse_rows_count_like_dense_ones_at_every_scale() -> None:
    for scale in (1e-30, 1.0, 1e30):
        rows, entries = torch.tensor([[1, 1, 4]]), torch.tensor([[3.0, 0.0], [0.0, 4.0], [0.0, 12.0]])
        sparse = torch.sparse_coo_tensor(rows, entries * scale, (9, 2), check_invariants=True)
        parameter = nn.Parameter(torch.zeros(9, 2))
        parameter.grad = sparse

        assert values_of(gradient_health([parameter]))["grad/global/norm_preclip"] == pytest.approx(13 * scale, rel=1e-6)


def test_groups_of_many_sizes_make_up_the_whole() -> None:
    generator = torch.Generator().manual_seed(5)
    norms = 10 ** (torch.rand(9, 12, generator=generator, dtype=torch.float64) * 40 - 20)
    names = [f"layer{index}" for index in range(12)]
    result = gradient_norms(norms, names, {"low": names[:5], "high": names[5:]})

    parts, whole = result.groups.norm_preclip, result.total.norm_preclip
    assert parts is not None and whole is not None
    squares = torch.as_tensor(parts.total).square().sum(1)
    torch.testing.assert_close(squares, torch.as_tensor(whole.total).square(), rtol=1e-12, atol=0)


def without_critic(values: Tensor, returns: Tensor, old: Tensor) -> Tensor:
    """Return a loss whose value term was detached by mistake."""
    return (values.detach() - returns).square().mean()


def first_record(run_dir: Path, source: PPO, level: str) -> dict[str, float]:
    with Telemetry(run_dir=run_dir, offload=False, level=level) as telemetry:
        attach(telemetry, source)
        source.learn(1)
    return dict(read_run(run_dir).records[0].values)


@pytest.mark.parametrize("level", ["normal", "debug"])
def test_a_critic_that_nothing_reaches_is_no_healthy_one(tmp_path: Path, level: str) -> None:
    """The head has no gradient, so its norm is missing. The trunk gets exact zeros, the worst case of vanishing."""
    source = PPO(make_env("CartPole-v1", num_envs=4), PPOConfig(num_steps=32, num_epochs=1, num_minibatches=2))
    source.steps = replace(source.steps, value_loss=without_critic)

    result = first_record(tmp_path, source, level)

    assert not [key for key in result if key.startswith(("grad/value/", "grad/layer/value_"))]
    assert result["grad/critic/norm_preclip"] == 0.0
    assert result["grad/critic/severity_vanish"] == 1.0
    assert result["grad/health"] < 0.75
    assert "grad/interference/log_ratio" not in result


@pytest.mark.parametrize("level", ["normal", "debug"])
def test_a_declared_group_without_gradients_is_missing_and_not_healthy(tmp_path: Path, level: str) -> None:
    """The policy's head is frozen by mistake; its trunk still learns through it."""
    source = PPO(make_env("CartPole-v1", num_envs=4), PPOConfig(num_steps=32, num_epochs=1, num_minibatches=2))
    source.policy.heads["action"].requires_grad_(False)

    result = first_record(tmp_path, source, level)

    assert read_run(tmp_path).info.facts["groups"]["head:action"]
    assert not [key for key in result if key.startswith(("grad/head_action/", "grad/head/action/"))]
    assert {"grad/actor/norm_preclip", "grad/critic/severity_vanish"} <= set(result)
