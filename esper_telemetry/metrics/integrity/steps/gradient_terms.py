"""Terms of a gradient, and what known mistakes make of them without another pass through the network.

Shapes: N rows of a minibatch, d entries of K parameters, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from esper_telemetry.core.lazy import Tensor, torch
from esper_telemetry.metrics.integrity.steps.loss_gradients import ALTERNATIVE_LOSSES

TERMS: Final = ("policy", "value", "entropy")
"""Terms of the loss, in the order in which they are added."""

NEGLIGIBLE_SHARE: Final = 1e-3
"""Size of a parameter's gradient, next to the largest one of the same loss, that is not told from rounding: that of a bias before a
normalising layer is 0 but for rounding."""


class TermGradients(Protocol):
    """Gradients of a loss, or of an alternative to one, by name."""

    def __call__(self, name: str, /) -> Tensor | None:
        """Return the gradient [d], float64; None where this minibatch has no such loss."""


@dataclass(frozen=True, slots=True, eq=False)
class GradientInputs:
    """What a gradient is computed from. All vectors are [d], float64, divided by `scale`.

    Attributes:
        terms: gradients of the terms without their coefficients.
        coefficients: by term.
        numels: entries of each of the K parameters.
        scale: [d], largest magnitude of the parameter that an entry belongs to.
        claimed: the trainer's gradient.
        previous: gradient that stood in `.grad` before the backward pass; None where there was none.
        weights: of the parameters; None where they are not given.
        rows: N; None where it is not known.
        max_norm: limit of the global norm; None where nothing is clipped.
        alternatives: gradients of other losses by name, neither weighted nor scaled.
    """

    terms: Mapping[str, Tensor]
    coefficients: Mapping[str, float]
    numels: tuple[int, ...]
    scale: Tensor
    claimed: Tensor
    previous: Tensor | None = None
    weights: Tensor | None = None
    rows: int | None = None
    max_norm: float | None = None
    alternatives: TermGradients = field(default=lambda name: None)

    def total(self, **coefficients: float) -> Tensor:
        """Return the gradient of the loss; `coefficients` replace those that are set."""
        weights = {**self.coefficients, **coefficients}
        return torch.stack([weights[name] * gradient for name, gradient in self.terms.items()]).sum(0)

    def without(self, term: str) -> Tensor | None:
        """Return the gradient of the loss without a term; None where it has no such term."""
        return self.total(**{term: 0.0}) if self.weight(term) else None

    def weight(self, term: str) -> float:
        """Coefficient of a term; 0 where there is none."""
        return self.coefficients.get(term, 0.0) if term in self.terms else 0.0

    def replaced(self, name: str) -> Tensor | None:
        """Return the gradient of the loss with an alternative in place of its term; None where there is no such alternative."""
        term = ALTERNATIVE_LOSSES[name][0]
        gradient = self.alternatives(name) if self.weight(term) else None
        return None if gradient is None else self.total(**{term: 0.0}) + self.weight(term) * gradient / self.scale

    def active(self, vector: Tensor) -> Tensor:
        """Return [d], bool: the entry's parameter has a gradient in `vector`."""
        return spread([part.any() for part in vector.split(list(self.numels))], self.numels)


def spread(values: Iterable[Tensor], numels: Sequence[int]) -> Tensor:
    """Return [d] from one number of each parameter."""
    column = torch.stack(list(values))
    return column.repeat_interleave(torch.tensor(numels, device=column.device), output_size=sum(numels))


def gradient_scale(claimed: Tensor, terms: Iterable[Tensor], numels: Sequence[int]) -> Tensor:
    """Return [d], the largest magnitude of each parameter's entries, and at least `NEGLIGIBLE_SHARE` of the largest one in its terms."""

    def largest(vector: Tensor) -> Tensor:
        return torch.stack([part.abs().max() if len(part) else part.sum() for part in vector.split(list(numels))])

    scale, floor = largest(claimed), torch.zeros(len(numels), dtype=torch.float64, device=claimed.device)
    for term in terms:
        magnitudes = largest(term)
        scale = torch.maximum(scale, magnitudes)
        floor = torch.maximum(floor, torch.where(magnitudes > 0, NEGLIGIBLE_SHARE * magnitudes.max(), 0.0))
    scale = torch.maximum(scale, floor)
    return spread(torch.where(scale > 0, scale, 1.0), numels)


def sum_with_previous(inputs: GradientInputs) -> Tensor | None:
    """Return the sum of the gradient and of the one that stood there before; None where none did."""
    return None if inputs.previous is None or not inputs.previous.any() else inputs.total() + inputs.previous


def parts_missing(inputs: GradientInputs) -> Tensor | None:
    """Return the gradient of the loss, 0 in the parameters where the trainer has none; None where that is all or nothing of a term."""
    total = inputs.total()
    values = torch.where(inputs.active(inputs.claimed), total, 0.0)
    whole_terms = [inputs.without(term) for term in TERMS]
    parts = [stopped(inputs, ("value",)), stopped(inputs, ("policy", "entropy"))]
    named = [total, torch.zeros_like(total), *whole_terms, *parts]
    return None if any(other is not None and torch.equal(values, other) for other in named) else values


def stopped(inputs: GradientInputs, terms: Sequence[str]) -> Tensor | None:
    """Return the gradient of the loss without that of some terms in the parameters that they share with the others."""
    ended = [inputs.weight(term) * inputs.terms[term] for term in terms if inputs.weight(term)]
    if not ended:
        return None
    part = torch.stack(ended).sum(0)
    rest = inputs.total() - part
    shared = inputs.active(part) & inputs.active(rest)
    return torch.where(shared, rest, inputs.total()) if shared.any() else None


def summed(inputs: GradientInputs, terms: Sequence[str]) -> Tensor | None:
    """Return the gradient with a sum over the rows in place of the mean in some terms; None without the first of them."""
    if inputs.rows is None or inputs.rows < 2 or not all(inputs.weight(term) for term in terms[:1]):
        return None
    return inputs.total(**{term: inputs.rows * inputs.weight(term) for term in terms})


def factor(inputs: GradientInputs, term: str, times: float) -> Tensor | None:
    """Return the gradient with another weight of a term, in multiples of its own; None where there is no such term."""
    return inputs.total(**{term: times * inputs.weight(term)}) if inputs.weight(term) else None


def by_norm(inputs: GradientInputs) -> Tensor | None:
    """Return the gradient clipped by its global norm; None where it is below the limit."""
    norm = torch.linalg.vector_norm(inputs.total() * inputs.scale)
    clipped = inputs.max_norm is not None and norm > inputs.max_norm
    return inputs.total() * (inputs.max_norm / (norm + 1e-6)) if clipped else None


def leaks(inputs: GradientInputs) -> Tensor | None:
    """Return the gradient of the loss with that of the whole critic, where the reference stops it."""
    leak = inputs.alternatives("critic_leaks")
    return None if leak is None else inputs.total(value=0.0) + inputs.weight("value") * leak / inputs.scale


def fitted(base: Tensor, direction: Tensor, numbers: Tensor) -> tuple[float, Tensor] | None:
    """Return the factor c, by least squares over every second entry, and base + c direction; None where nothing depends on c."""
    direction_part = direction[::2]
    square = direction_part @ direction_part
    if not square > 0:
        return None
    factor = float(((numbers - base)[::2] @ direction_part) / square)
    return factor, base + factor * direction


def fit_weight(term: str, inputs: GradientInputs, numbers: Tensor) -> tuple[float, Tensor] | None:
    """Fit the weight of a term."""
    return fitted(inputs.total(**{term: 0.0}), inputs.terms[term], numbers) if term in inputs.terms else None


def fit_scale(inputs: GradientInputs, numbers: Tensor) -> tuple[float, Tensor] | None:
    """Fit a factor of the whole gradient."""
    return fitted(torch.zeros_like(numbers), inputs.total(), numbers)


def fit_limit(inputs: GradientInputs, numbers: Tensor) -> tuple[float, Tensor]:
    """Fit the limit of a clip by value: the largest entry."""
    limit = float((numbers * inputs.scale).abs().max())
    return limit, (inputs.total() * inputs.scale).clamp(-limit, limit) / inputs.scale


def fit_penalty(inputs: GradientInputs, numbers: Tensor) -> tuple[float, Tensor] | None:
    """Fit the weight of a penalty of half the squared weights."""
    return None if inputs.weights is None else fitted(inputs.total(), inputs.weights, numbers)


def fit_kl(inputs: GradientInputs, numbers: Tensor) -> tuple[float, Tensor] | None:
    """Fit the weight of the estimate of the KL divergence that explains the numbers best, beside the clipped or the plain surrogate."""
    bases = [inputs.total(), inputs.replaced("no_clip")]
    names = ("kl_difference", "kl_square", "kl_expectation")
    penalties = [gradient / inputs.scale for name in names if (gradient := inputs.alternatives(name)) is not None]
    fits = [
        fit
        for base in bases
        if base is not None
        for penalty in penalties
        if (fit := fitted(base, penalty, numbers)) is not None
    ]
    return min(fits, key=lambda fit: float((fit[1] - numbers).abs().max()), default=None)
