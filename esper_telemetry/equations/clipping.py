"""Comparison of a gradient with that of the PPO loss.

Entries of each parameter are divided by the largest one that its parameter has in the trainer's gradient or in the terms of the loss, so
that a critic whose gradient is a thousand times the actor's hides nothing of the actor's. Shapes: N rows of the minibatch, d entries of K
parameters, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from esper_telemetry.core.arrays import as_floats
from esper_telemetry.core.borders import checked_arguments
from esper_telemetry.core.lazy import Tensor, no_grad, torch
from esper_telemetry.equations.comparison import EquationCheck, compare, distinguished
from esper_telemetry.equations.equation import Equation, Hypothesis
from esper_telemetry.equations.gradient_equation import GRADIENT
from esper_telemetry.equations.loss_gradients import (
    ALTERNATIVE_LOSSES,
    TERMS,
    GradientInputs,
    GradientsByName,
    fitted,
    flat64,
    gradient_scale,
)

Tensors: TypeAlias = "Mapping[str, Tensor | None] | Sequence[Tensor | None]"


@checked_arguments(rows=0, tolerance=0)
@no_grad
def check_gradient(
    gradients: Tensors,
    terms: Mapping[str, Tensors],
    *,
    coefficients: Mapping[str, float],
    previous: Tensors | None = None,
    weights: Tensors | None = None,
    rows: int | None = None,
    max_norm: float | None = None,
    alternatives: Mapping[str, Tensors] | None = None,
    precision: str | None = None,
    tolerance: float | None = None,
) -> EquationCheck:
    """Return the comparison of a gradient, before clipping, with that of the PPO loss.

    Tensors of the K parameters are a mapping by name or a sequence, in one order everywhere; None is a gradient of zeros. A parameter with
    `requires_grad` stands for its `.grad`.

    Args:
        gradients: the trainer's, after the backward pass.
        terms: gradients of the terms at the same minibatch and weights, without coefficients: `policy`, `value` (half the mean squared
            error), `entropy` (the negative mean entropy); any of them.
        coefficients: weights of the terms; 1 for `policy` where it is not given.
        previous: gradients of the minibatch before, as they were last in `.grad`.
        weights: of the parameters, to recognise a penalty on them.
        rows: of the minibatch, to recognise a sum in place of a mean.
        max_norm: limit of the global norm.
        alternatives: gradients of other losses by the name of their hypothesis, unweighted: `no_clip`, `ratio_inverted`,
            `entropy_of_sample` and so on (an unknown name lists all), or `critic_leaks`: that of the value loss where nothing is stopped.
        precision: of the trainer's arithmetic.
        tolerance: largest relative error; by precision where it is None.

    Raises:
        ValueError: where terms are missing or unknown, or shapes differ.
    """
    _check_names(terms, coefficients, alternatives or {})
    given = _entries(gradients)
    by_term = {name: _entries(terms[name]) for name in TERMS if name in terms}
    models = _models(given, by_term)
    expected = [list(model.shape) for model in models]

    def joined(name: str, tensors: Tensors) -> Tensor:
        entries = _entries(tensors)
        shapes = [None if entry is None else list(entry.shape) for entry in entries]
        if len(shapes) != len(expected) or any(one not in (None, e) for one, e in zip(shapes, expected, strict=True)):
            raise ValueError(f"{name} must have the shapes {expected}, got {shapes}")
        filled = zip(entries, models, strict=True)
        return flat64([torch.zeros_like(model) if entry is None else entry.to(model.device) for entry, model in filled])

    return compare_gradient(
        joined("gradients", gradients),
        {name: joined(name, entries) for name, entries in by_term.items()},
        {"policy": 1.0, **coefficients},
        tuple([model.numel() for model in models]),
        previous=None if previous is None else joined("previous", previous),
        weights=None if weights is None else flat64([w for w in _values(weights) if w is not None]),
        rows=rows,
        max_norm=max_norm,
        alternatives={name: joined(name, entries) for name, entries in (alternatives or {}).items()}.get,
        precision=precision,
        tolerance=tolerance,
    )


def _check_names(terms: Iterable[str], coefficients: Iterable[str], alternatives: Iterable[str]) -> None:
    """Raise ValueError where there is no term, a term has no weight, or a name is not known."""
    unknown = sorted({*terms, *coefficients} - set(TERMS))
    if unknown or not [*terms]:
        raise ValueError(f"terms of the loss are {', '.join(TERMS)}, got {', '.join(unknown) or 'none'}")
    unweighted = [name for name in terms if name != "policy" and name not in coefficients]
    if unweighted:
        raise ValueError(f"coefficients must have a weight for {', '.join(unweighted)}")
    known = [*ALTERNATIVE_LOSSES, "critic_leaks"]
    unknown = sorted(set(alternatives) - set(known))
    if unknown:
        raise ValueError(f"alternatives are of {', '.join(known)}, got {', '.join(unknown)}")


def _models(given: Sequence[Tensor | None], by_term: Mapping[str, Sequence[Tensor | None]]) -> list[Tensor]:
    """Return a gradient of each parameter, the trainer's or of a term. Raises ValueError where numbers differ or one has none."""
    counts = {"gradients": len(given)} | {name: len(entries) for name, entries in by_term.items()}
    if not given or len(set(counts.values())) > 1:
        raise ValueError(f"gradients and terms must have equally many tensors, got {counts}")
    models = []
    for place, column in enumerate(zip(given, *by_term.values(), strict=True)):
        present = [entry for entry in column if entry is not None]
        if not present:
            raise ValueError(
                f"each parameter needs a gradient, the trainer's or of a term, and number {place} has none"
            )
        models.append(present[0])
    return models


def compare_gradient(
    claimed: Tensor,
    terms: Mapping[str, Tensor],
    coefficients: Mapping[str, float],
    numels: tuple[int, ...],
    *,
    previous: Tensor | None = None,
    weights: Tensor | None = None,
    rows: int | None = None,
    max_norm: float | None = None,
    alternatives: GradientsByName = lambda name: None,
    precision: str | None = None,
    tolerance: float | None = None,
) -> EquationCheck:
    """Return the comparison of a gradient [d], float64, with the weighted terms [d]; arguments are those of `GradientInputs`, unscaled."""
    weighted = [coefficients.get(name, 0.0) * gradient for name, gradient in terms.items()]
    scale = gradient_scale(claimed, weighted, numels)
    inputs = GradientInputs(
        terms={name: gradient / scale for name, gradient in terms.items()},
        coefficients={name: float(weight) for name, weight in coefficients.items()},
        numels=numels,
        scale=scale,
        claimed=claimed / scale,
        previous=None if previous is None else previous / scale,
        weights=None if weights is None else weights / scale,
        rows=rows,
        max_norm=max_norm,
        alternatives=alternatives,
    )
    return distinguished(compare(GRADIENT, inputs, inputs.claimed, precision=precision, tolerance=tolerance))


def same_gradient(claimed: Tensor, total: Tensor, numels: Sequence[int]) -> float:
    """Return the largest error [d] of a gradient next to the largest entry of its parameter."""
    if torch.equal(claimed, total):
        return 0.0
    scale = gradient_scale(claimed, [total], numels)
    return float(((claimed - total) / scale).abs().max())


def _values(tensors: Tensors) -> list[Tensor | None]:
    return list(tensors.values()) if isinstance(tensors, Mapping) else list(tensors)


def _entries(tensors: Tensors) -> list[Tensor | None]:
    """The gradients: those of parameters in place of parameters."""
    entries = [entry.grad if isinstance(entry, torch.nn.Parameter) else entry for entry in _values(tensors)]
    return [None if entry is None else as_floats([entry])[0] for entry in entries]


Gradients: TypeAlias = "Mapping[str, Tensor] | Sequence[Tensor]"

NORM_EPS = 1e-6
"""Added to the norm that a limit is divided by, as in torch."""


@dataclass(frozen=True, slots=True, eq=False)
class ClipInputs:
    """What a clipped gradient is computed from.

    Attributes:
        gradient: [d] before clipping, float64.
        numels: entries of each of the K parameters.
        scale: [d], that the result is divided by.
        max_norm: limit of the global norm; None where nothing is clipped.
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


def _by_value(inputs: ClipInputs) -> Tensor | None:
    limit = inputs.max_norm
    return None if limit is None else inputs.gradient.clamp(-limit, limit) / inputs.scale


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
    compute=ClipInputs.clipped,
    tolerance=1.0,  # errors of healthy runs: 5e-7 and below
    advice="Something changes the gradient between the backward pass and the optimizer's step",
    hypotheses=(
        Hypothesis(
            name="not_clipped",
            says="gradients that are not clipped, or only after the step",
            equation="g",
            compute=lambda inputs: inputs.gradient / inputs.scale,
            advice="Clip between the backward pass and optimizer.step()",
        ),
        Hypothesis(
            name="by_value",
            says="gradients with each entry cut at the limit of the norm",
            equation="clip(g, ±c)",
            compute=_by_value,
            source="torch.nn.utils.clip_grad_value_",
            advice="Use clip_grad_norm_ in place of clip_grad_value_",
        ),
        Hypothesis(
            name="each_tensor",
            says="gradients of which each tensor is clipped by its own norm",
            equation="g_k min(1, c / ‖g_k‖)",
            compute=_each_tensor,
            advice="Clip all parameters in one call, by their global norm",
        ),
        Hypothesis(
            name="cleared",
            says="zero",
            equation="0",
            compute=lambda inputs: torch.zeros_like(inputs.gradient),
            advice="Call zero_grad() before the backward pass, not between it and the step",
        ),
        Hypothesis(
            name="norm",
            says="gradients of another norm than the limit allows,",
            equation="g c / ‖g‖",
            fit=_fit_norm,
            parameter="norm",
            advice="Compare the limit with the setting",
        ),
        Hypothesis(
            name="value",
            says="gradients with each entry cut at",
            equation="clip(g, ±c)",
            fit=_fit_value,
            parameter="c",
            source="torch.nn.utils.clip_grad_value_",
            advice="Use clip_grad_norm_ in place of clip_grad_value_",
        ),
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
    """Return the comparison of the gradient that the optimizer reads, [d] float64, with the one after the backward pass."""
    scale = gradient_scale(claimed, [gradient], numels)
    inputs = ClipInputs(gradient, numels, scale, max_norm)
    return distinguished(compare(CLIPPING, inputs, claimed / scale, precision=precision, tolerance=tolerance))


@checked_arguments(tolerance=0)
@no_grad
def check_clipping(
    before: Gradients,
    after: Gradients,
    *,
    max_norm: float | None,
    precision: str | None = None,
    tolerance: float | None = None,
) -> EquationCheck:
    """Return the comparison of gradients after clipping with those before.

    Args:
        before, after: gradients of the K parameters, a mapping by name or a sequence, in one order.
        max_norm: limit of their global norm; None where they are not to be clipped.
        precision: of the trainer's arithmetic.
        tolerance: largest relative error; by precision where it is None.

    Raises:
        ValueError: where shapes differ, or there are none.
    """
    old, new = (as_floats(x.values() if isinstance(x, Mapping) else x) for x in (before, after))
    shapes = [[list(x.shape) for x in tensors] for tensors in (old, new)]
    if not old or shapes[0] != shapes[1]:
        raise ValueError(f"before and after must have the same shapes, got {shapes[0]} and {shapes[1]}")
    numels = tuple([x.numel() for x in old])
    return compare_clipping(flat64(old), flat64(new), numels, max_norm, precision=precision, tolerance=tolerance)
