"""Masks, entropy, gradient norms and clipping, compared with torch's own and with numbers worked by hand."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from esper_telemetry.core import tensors as ops


def gradients(scale: float, dtype: torch.dtype) -> list[Tensor]:
    """Gradients of several shapes, one of them transposed and one with gaps in memory."""
    generator = torch.Generator().manual_seed(3)
    made = [(scale * torch.randn(*shape, generator=generator)).to(dtype) for shape in ((64, 4), (64,), (64, 64), (1,))]
    return [*made, made[0].t().contiguous().t(), torch.stack([made[2], made[2]], -1)[..., 0]]


def clipped_by_torch(tensors: list[Tensor], max_norm: float) -> list[Tensor]:
    parameters = [torch.nn.Parameter(torch.zeros_like(tensor)) for tensor in tensors]
    for parameter, tensor in zip(parameters, tensors, strict=True):
        parameter.grad = tensor.clone(memory_format=torch.preserve_format)
    torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def clipped_by_ops(tensors: list[Tensor], max_norm: float) -> list[Tensor]:
    tensors = [tensor.clone(memory_format=torch.preserve_format) for tensor in tensors]
    ops.clip_gradients(tensors, ops.gradient_norms(tensors), max_norm)
    return tensors


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [
        *((torch.float32, scale) for scale in (1e-12, 1e-3, 0.008, 1.0, 1e6)),
        *((dtype, scale) for dtype in (torch.float16, torch.bfloat16) for scale in (1e-3, 1.0)),
    ],
)
@pytest.mark.parametrize("zero", [False, True])
def test_clipping_equals_torch_bit_for_bit(scale: float, dtype: torch.dtype, zero: bool) -> None:
    """Below and above the limit of 0.5, and with one gradient that is exactly zero."""
    tensors = gradients(scale, dtype)
    if zero:
        tensors[1].zero_()

    ours, theirs = clipped_by_ops(tensors, 0.5), clipped_by_torch(tensors, 0.5)

    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_norm_at_the_limit_still_clips() -> None:
    """3-4-5: the coefficient is 5 / (5 + 1e-6), which float32 rounds to about 1 - 2.4e-7."""
    assert ops.clip_coefficient(torch.tensor(5.0), 5.0) < 1


@given(norm=st.floats(0, width=32), limit=st.floats(0, 1e300) | st.just(math.inf))
@example(norm=math.nan, limit=0.5)
@example(norm=math.inf, limit=math.inf)
def test_the_factor_on_the_host_is_that_of_torch_to_the_last_bit(norm: float, limit: float) -> None:
    result, expected = ops.clip_factor(norm, limit), ops.clip_coefficient(torch.tensor(norm), limit).item()

    assert result == expected or (math.isnan(result) and math.isnan(expected))


def test_gradients_that_overflow_float32_are_scaled_and_not_erased() -> None:
    clipped = clipped_by_ops([torch.tensor([3e20, 4e20])], 5.0)

    assert torch.allclose(clipped[0], torch.tensor([3.0, 4.0]))


def test_non_finite_entries_show_in_the_norm_of_their_tensor_alone() -> None:
    norms = ops.gradient_norms([torch.tensor([1.0, math.nan]), torch.tensor([3.0, 4.0]), torch.tensor([math.inf])])

    assert math.isnan(norms[0]) and norms[1] == 5 and math.isinf(norms[2])


def test_fused_norms_are_used_where_they_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    ops.choose_norms.cache_clear()
    assert ops.choose_norms(device) is ops.fused_norms

    ops.choose_norms.cache_clear()
    monkeypatch.setattr(torch, "_foreach_norm", lambda tensors, order, dtype: [torch.zeros(()) for _ in tensors])
    assert ops.choose_norms(device) is ops.public_norms
    ops.choose_norms.cache_clear()
