"""Tensor arithmetic that the trainer and the metric functions share: masks, gradient norms, clipping, scales of observations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from ctypes import c_float
from functools import cache, partial

import torch
from torch import Tensor, nn

TINY_NORM, HUGE_NORM = 1e-18, 1e18  # beyond these, squares leave float32, and the norm is computed again in float64
CLIP_EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_ divides by norm + 1e-6

AFFINE_CORRELATION = 0.95
"""Minimum correlation, over the entries of an observation, at which one is the other with another mean and scale."""

MIN_SPREAD = 1e-12
"""Maximum product of an entry's deviations in both, summed over rows, at which it is constant."""

Norms = Callable[[Sequence[Tensor], torch.dtype], Tensor]


def mask_logits(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Return logits with the most negative finite number for forbidden actions. Shapes: [..., A] both, mask bool."""
    return logits if mask is None else logits.masked_fill(~mask, torch.finfo(logits.dtype).min)


def public_norms(gradients: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the L2 norm of each tensor, [K], accumulated in `dtype`, by public torch calls."""
    return torch.stack([torch.linalg.vector_norm(gradient, dtype=dtype) for gradient in gradients])


def fused_norms(gradients: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the same in one fused call that is private to torch: see `choose_norms`."""
    return torch.stack(torch._foreach_norm(list(gradients), 2.0, dtype=dtype))


@cache
def choose_norms(device: torch.device) -> Norms:
    """Return `fused_norms` if this torch has it and it agrees with `public_norms` on a probe, else `public_norms`."""
    probe = [torch.tensor(entries, device=device) for entries in ([3.0, 4.0], [[0.0]], [1e20, 1e20], [1e-25])]
    try:
        agree = all(
            torch.allclose(fused_norms(probe[:count], dtype).double(), public_norms(probe[:count], dtype).double(), rtol=1e-6, atol=0)
            for count, dtype in ((2, torch.float32), (4, torch.float64))
        )
    except (AttributeError, TypeError, RuntimeError):
        agree = False
    return fused_norms if agree else public_norms


def allow_recurrent_gradients(copy: nn.Module) -> None:
    """Put recurrent layers of a copy in training mode, without dropout: cuDNN refuses to compute gradients otherwise.

    Switching cuDNN off instead would change the kernels of every thread.
    """
    for module in copy.modules():
        if isinstance(module, nn.RNNBase):
            module.dropout, module.training = 0.0, True


def gradient_norms(gradients: Sequence[Tensor]) -> Tensor:
    """Return the L2 norm of each gradient, [K], without overflow or underflow; non-finite if an entry is.

    On CUDA the norms are float64, accumulated in float64 and without synchronisation. On the CPU they are float32 with the rounding of
    `clip_grad_norm_`, or float64 if a norm leaves the range that float32 can square.
    """
    if gradients[0].is_cuda:
        return choose_norms(gradients[0].device)(gradients, torch.float64)
    return checked_norms(gradients, raw_norms(gradients))


def raw_norms(gradients: Sequence[Tensor]) -> Tensor:
    """Return the L2 norm of each gradient on the CPU, [K], with the rounding and the overflows of `clip_grad_norm_`."""
    norms = choose_norms(gradients[0].device)
    return norms(gradients, torch.promote_types(gradients[0].dtype, torch.float32))


def checked_norms(gradients: Sequence[Tensor], raw: Tensor) -> Tensor:
    """Return the norms without overflows and underflows, from the `raw_norms`."""
    doubtful = doubtful_norms(raw)
    return repair_norms(raw, gradients, doubtful) if doubtful else raw


def doubtful_norms(raw: Tensor) -> list[int]:
    """Return the positions of the `raw_norms` whose squares float32 cannot hold."""
    return [place for place, norm in enumerate(raw.tolist()) if not TINY_NORM < norm < HUGE_NORM]


def repair_norms(norms: Tensor, gradients: Sequence[Tensor], doubtful: Sequence[int]) -> Tensor:
    """Return the norms with the doubtful ones computed again in float64; all float64 if one is too large for float32."""
    exact = norms.double()
    exact[list(doubtful)] = choose_norms(norms.device)([gradients[index] for index in doubtful], torch.float64)
    return exact.to(norms.dtype) if float(exact.max()) < HUGE_NORM else exact


def total_norm(norms: Tensor) -> Tensor:
    """Return the L2 norm of all gradients together, 0-d, from the norms [K] of each."""
    norm: Tensor = torch.linalg.vector_norm(norms)
    return norm


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor min(1, max_norm / (norm + 1e-6)) of `clip_grad_norm_`, of the shape of `norm`."""
    return torch.clamp(max_norm / (norm + CLIP_EPSILON), max=1.0)


def clip_factor(norm: float, max_norm: float) -> float:
    """Return the factor of a float32 norm on the host, rounded as torch rounds it: ten times faster than torch's four operators."""
    factor = _float32(_float32(1.0 / _float32(norm + _float32(CLIP_EPSILON))) * _float32(max_norm))
    return 1.0 if factor > 1.0 else factor


def _float32(number: float) -> float:
    """Return the nearest float32 number; for a sum, product or quotient of two float32 numbers it equals float32 arithmetic."""
    return c_float(number).value


def clip_by_norms(gradients: Sequence[Tensor], raw: Tensor, max_norm: float) -> Tensor:
    """Clip float32 gradients on the CPU from their `raw_norms` and return the norm, 0-d: bit for bit as `clip_grad_norm_` does."""
    norm = total_norm(raw)
    _scale(gradients, norm, max_norm)
    return norm


def clip_gradients(gradients: Sequence[Tensor], norms: Tensor, max_norm: float) -> None:
    """Scale the gradients in place to a global norm of at most `max_norm`, bit for bit as `clip_grad_norm_` does.

    Non-finite gradients stay non-finite. Norms that the gradients' type cannot hold are not rounded to it: torch erases such gradients.

    Args:
        gradients: K tensors of one dtype on one device.
        norms: [K], from `gradient_norms`.
        max_norm: limit of the global L2 norm.
    """
    if norms.is_cpu and gradients[0].dtype.itemsize < norms.dtype.itemsize < torch.float64.itemsize:
        rounded = norms.to(gradients[0].dtype)  # as torch computes them, unless their sum leaves its range
        norms = rounded if torch.isfinite(total_norm(rounded)) else norms
    _scale(gradients, total_norm(norms), max_norm)


def _scale(gradients: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale gradients with this global norm, 0-d.

    On the CPU nothing is multiplied below the limit; on CUDA everything is, because comparing would synchronise. The last gradients are
    scaled first, because the cache still has them.
    """
    if norm.is_cpu and norm.dtype is torch.float32:
        factor = clip_factor(float(norm), max_norm)
        if factor == 1.0:
            return
        coefficient = norm.new_tensor(factor)
    else:
        coefficient = clip_coefficient(norm, max_norm)
        if norm.is_cpu and float(coefficient) == 1.0:
            return
    torch._foreach_mul_(list(reversed(gradients)), coefficient.to(gradients[0].dtype))


def are_rescaled(stored: Tensor, received: Tensor) -> bool:
    """Return True if the observations [N, ...] are approximately the others with another mean and scale, entry by entry."""
    own = stored.double().flatten(1)
    others = received.to(own).reshape(own.shape)
    one, other = own - own.mean(0), others - others.mean(0)
    size = (one.square().sum(0) * other.square().sum(0)).sqrt()
    varies = size > MIN_SPREAD
    correlation = ((one * other).sum(0) / size.clamp(min=MIN_SPREAD))[varies]
    return bool(varies.any()) and bool(correlation.median() > AFFINE_CORRELATION)


def stop_at_nonfinite(parameters: Mapping[str, Tensor]) -> Callable[[], None]:
    """Make backward passes raise FloatingPointError at the first gradient that is not finite; return a function that ends this.

    A gradient is checked when it is added to `.grad`, in the order of the pass, so `torch.autograd.grad` is not affected. On a GPU each
    check synchronises.
    """
    handles = [
        parameter.register_post_accumulate_grad_hook(partial(_check_gradient, name))
        for name, parameter in parameters.items()
        if parameter.requires_grad
    ]

    def remove() -> None:
        while handles:
            handles.pop().remove()

    return remove


def _check_gradient(name: str, parameter: Tensor) -> None:
    """Raise FloatingPointError for a gradient that is not finite."""
    gradient = parameter.grad
    if gradient is None:
        return
    entries = gradient.coalesce().values() if gradient.layout is torch.sparse_coo else gradient
    finite = torch.isfinite(entries)
    if not bool(finite.all()):
        count = entries.numel() - int(finite.sum())
        raise FloatingPointError(
            f"the gradient of {name} is the first that is not finite in this backward pass ({count} of {gradient.numel()} entries): the "
            "loss or a layer after it returns NaN or infinity; check rewards, returns, advantages and ratios. "
            "stop_on_nonfinite=True ends training here"
        )
