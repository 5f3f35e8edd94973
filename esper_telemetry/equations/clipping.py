"""Equation of the gradient that the optimizer reads: clipped by its global norm. Shapes: d entries of K parameters, concatenated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from esper_telemetry.core.arrays import as_floats
from esper_telemetry.core.lazy import Tensor, no_grad, torch
from esper_telemetry.core.requirements import checked_arguments
from esper_telemetry.equations.comparison import EquationCheck, compare, distinguished
from esper_telemetry.equations.equation import Equation, mistake
from esper_telemetry.equations.gradient import fitted, flat64, gradient_scale

Gradients: TypeAlias = "Mapping[str, Tensor] | Sequence[Tensor]"

NORM_EPS = 1e-6
"""Added to the norm before the limit is divided by it, as in torch."""


@dataclass(frozen=True, slots=True, eq=False)
class ClipInputs:
    """Inputs of a clipped gradient.

    Attributes:
        gradient: [d] before clipping, float64.
        numels: entries of each of the K parameters.
        scale: [d], divisor of the result.
        max_norm: limit of the global norm; None if nothing is clipped.
    """

    gradient: Tensor
    numels: tuple[int, ...]
    scale: Tensor
    max_norm: float | None

    def clipped(self) -> Tensor:
        """Return the gradient [d] with a norm of at most `max_norm`, divided by `scale`."""
        return self.gradient * _factor(self.gradient, self.max_norm) / self.scale


def _factor(gradient: Tensor, max_norm: float | None) -> Tensor:
    if max_norm is None:
        return gradient.new_ones(())
    norm: Tensor = torch.linalg.vector_norm(gradient)
    factor: Tensor = max_norm / (norm + NORM_EPS)
    return factor.clamp(max=1.0)


def _each_tensor(inputs: ClipInputs) -> Tensor:
    parts = inputs.gradient.split(list(inputs.numels))
    return torch.cat([part * _factor(part, inputs.max_norm) for part in parts]) / inputs.scale


def _fit_norm(inputs: ClipInputs, numbers: Tensor) -> tuple[float, Tensor] | None:
    result = fitted(torch.zeros_like(numbers), inputs.gradient / inputs.scale, numbers)
    return None if result is None else (result[0] * float(torch.linalg.vector_norm(inputs.gradient)), result[1])


def _fit_value(inputs: ClipInputs, numbers: Tensor) -> tuple[float, Tensor]:
    limit = float((numbers * inputs.scale).abs().max())
    return limit, inputs.gradient.clamp(-limit, limit) / inputs.scale


CLIPPING = Equation(
    name="clipping",
    rank=62,
    quantity="the gradients that the optimizer reads",
    equation="g min(1, c / ‖g‖)",
    source="1211.5063, section 3.2",
    inputs="the gradient after the backward pass and at the optimizer's step",
    check="check_clipping",
    shown_by="test_optimizer_step",
    compute=ClipInputs.clipped,
    tolerance=1.0,  # errors of healthy runs: 5e-7 and below
    advice="Something changes the gradient between the backward pass and the optimizer's step",
    hypotheses=(
        mistake("not_clipped", "gradients that are not clipped, or only after the step")
        .predicts("g", lambda inputs: inputs.gradient / inputs.scale)
        .advises("Clip between the backward pass and optimizer.step()"),
        mistake("by_value", "gradients with each entry clipped at the limit of the norm")
        .predicts("clip(g, ±c)", lambda inputs: inputs.gradient.clamp(-inputs.max_norm, inputs.max_norm) / inputs.scale)
        .given(needs="max_norm")
        .advises("Use clip_grad_norm_ instead of clip_grad_value_", source="torch.nn.utils.clip_grad_value_"),
        mistake("each_tensor", "gradients with each tensor clipped by its own norm")
        .predicts("g_k min(1, c / ‖g_k‖)", _each_tensor)
        .advises("Clip all parameters in one call, by their global norm"),
        mistake("cleared", "zero: they were cleared between the backward pass and the step")
        .predicts("0", lambda inputs: torch.zeros_like(inputs.gradient))
        .advises("Call zero_grad() before the backward pass, not between it and the step"),
        mistake("norm", "gradients with a norm that differs from the limit,")
        .fits("g c / ‖g‖", "norm", _fit_norm)
        .advises("Compare the limit with the setting"),
        mistake("value", "gradients with each entry clipped at")
        .fits("clip(g, ±c)", "c", _fit_value)
        .advises("Use clip_grad_norm_ instead of clip_grad_value_", source="torch.nn.utils.clip_grad_value_"),
    ),
)


def compare_clipping(
    gradient: Tensor,
    claimed: Tensor,
    numels: tuple[int, ...],
    max_norm: float | None,
    *,
    precision: str | None = None,
    tolerance: float | None = None,
) -> EquationCheck:
    """Return the comparison of the gradient that the optimizer reads, [d] float64, with the gradient after the backward pass."""
    scale = gradient_scale(claimed, [gradient], numels)
    inputs = ClipInputs(gradient, numels, scale, max_norm)
    return distinguished(compare(CLIPPING, inputs, claimed / scale, precision=precision, tolerance=tolerance))


@checked_arguments(tolerance=0)
@no_grad
def check_clipping(
    before: Gradients, after: Gradients, *, max_norm: float | None, precision: str | None = None, tolerance: float | None = None
) -> EquationCheck:
    """Return the comparison of gradients after clipping with the gradients before it.

    Args:
        before, after: gradients of the K parameters, a mapping by name or a sequence, in one order.
        max_norm: limit of their global norm; None if they must not be clipped.
        precision: of the trainer's arithmetic.
        tolerance: largest relative error; by precision if it is None.

    Raises:
        ValueError: if shapes differ, or there are no gradients.
    """
    old, new = (as_floats(x.values() if isinstance(x, Mapping) else x) for x in (before, after))
    shapes = [[list(x.shape) for x in tensors] for tensors in (old, new)]
    if not old or shapes[0] != shapes[1]:
        raise ValueError(f"before and after must have the same shapes, got {shapes[0]} and {shapes[1]}")
    numels = tuple([x.numel() for x in old])
    return compare_clipping(flat64(old), flat64(new), numels, max_norm, precision=precision, tolerance=tolerance)
