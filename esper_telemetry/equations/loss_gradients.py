"""Terms of the PPO loss, losses that known mistakes and published variants compute in place of a term, and the gradients of all of them.

Each loss takes the rows of a minibatch and returns the mean loss, 0-d; None where it does not apply to the minibatch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol, TypeAlias

from esper_telemetry.core.lazy import Tensor, no_grad, torch
from esper_telemetry.core.minibatch_objective import LossRows
from esper_telemetry.metrics.ratio import EXP_LIMIT

Loss: TypeAlias = Callable[[LossRows], "Tensor | None"]

ADVANTAGE_EPS: Final = 1e-8
"""Added to the standard deviation of advantages, as in Stable-Baselines3 and CleanRL."""

DUAL_CLIP: Final = 3.0
"""Bound of the surrogate at negative advantages, times the advantage (1912.09729)."""

ROUNDED_SHARE: Final = 1e-5
"""Share of the largest gradient at a value that is rounding."""

MOVED_WEIGHTS: Final = 0.1
"""Size of the noise that is added to weights to see what depends on them."""

MAX_BROADCAST_ROWS: Final = 4096
"""Rows up to which a loss over all pairs of rows is computed: 16 million pairs."""


def surrogate(ratio: Tensor, advantages: Tensor, clip: float, choose: str = "minimum") -> Tensor:
    """Return the clipped surrogate loss of each row."""
    smaller_or_larger: Callable[[Tensor, Tensor], Tensor] = getattr(torch, choose)
    return -smaller_or_larger(advantages * ratio, advantages * ratio.clamp(1 - clip, 1 + clip))


def policy_loss(rows: LossRows, advantages: Tensor | None = None, choose: str = "minimum") -> Tensor:
    """Return the clipped surrogate loss, or -A log π where there is no ratio."""
    used = rows.advantages if advantages is None else advantages
    if rows.clip is None:
        return -(used * rows.log_probs).mean()
    return surrogate(rows.log_ratio.exp(), used, rows.clip, choose).mean()


def clipped_errors(rows: LossRows, clip: float) -> tuple[Tensor, Tensor]:
    """Return the squared errors [N] of the values and of the values clipped to the old ones ± clip."""
    near = rows.old_values + (rows.values - rows.old_values).clamp(-clip, clip)
    return (rows.values - rows.returns).square(), (near - rows.returns).square()


def value_loss(rows: LossRows) -> Tensor:
    """Return half the mean squared error, of clipped values where they are clipped."""
    if rows.clip_value is None:
        return 0.5 * (rows.values - rows.returns).square().mean()
    error, near = clipped_errors(rows, rows.clip_value)
    return 0.5 * (torch.maximum(error, near) if rows.clip_maximum else near).mean()


TERM_LOSSES: Final[Mapping[str, Callable[[LossRows], Tensor]]] = {
    "policy": policy_loss,
    "value": value_loss,
    "entropy": lambda rows: -rows.entropy.mean(),
}
"""Terms of the loss by name: value loss with the factor ½, entropy with a minus."""


def _of_ratio(rows: LossRows, loss: Callable[[Tensor, float], Tensor]) -> Tensor | None:
    return None if rows.clip is None else loss(rows.log_ratio, rows.clip)


def _no_clip(rows: LossRows) -> Tensor | None:
    return _of_ratio(rows, lambda log_ratio, clip: -(rows.advantages * log_ratio.exp()).mean())


def _no_minimum(rows: LossRows) -> Tensor | None:
    return _of_ratio(
        rows, lambda log_ratio, clip: -(rows.advantages * log_ratio.exp().clamp(1 - clip, 1 + clip)).mean()
    )


def _ratio_inverted(rows: LossRows) -> Tensor | None:
    return _of_ratio(rows, lambda log_ratio, clip: surrogate((-log_ratio).exp(), rows.advantages, clip).mean())


def _no_ratio(rows: LossRows) -> Tensor | None:
    return _of_ratio(rows, lambda log_ratio, clip: -(rows.advantages * rows.log_probs).mean())


def _log_ratio(rows: LossRows) -> Tensor | None:
    return _of_ratio(rows, lambda log_ratio, clip: surrogate(log_ratio, rows.advantages, clip).mean())


def _normalized(rows: LossRows) -> bool:
    """Return True where the advantages were normalised over the minibatch."""
    return rows.raw_advantages is not None and not torch.equal(rows.raw_advantages, rows.advantages)


def standardized(advantages: Tensor) -> Tensor | None:
    """Return advantages less their mean, over their standard deviation; None for a single one."""
    if len(advantages) < 2:
        return None
    return (advantages - advantages.mean()) / (advantages.std() + ADVANTAGE_EPS)


def _advantages_raw(rows: LossRows) -> Tensor | None:
    return policy_loss(rows, rows.raw_advantages) if _normalized(rows) else None


def _advantages_centred(rows: LossRows) -> Tensor | None:
    raw = rows.raw_advantages
    return None if raw is None or not _normalized(rows) else policy_loss(rows, raw - raw.mean())


def _advantages_std_alone(rows: LossRows) -> Tensor | None:
    raw = rows.raw_advantages
    if raw is None or len(raw) < 2 or not _normalized(rows):
        return None
    return policy_loss(rows, raw / (raw.std() + ADVANTAGE_EPS))


def _advantages_normalized(rows: LossRows) -> Tensor | None:
    raw = rows.raw_advantages
    used = None if raw is None or _normalized(rows) else standardized(raw)
    return None if used is None else policy_loss(rows, used)


def _advantages_negated(rows: LossRows) -> Tensor | None:
    """The loss of advantages with the other sign, where some ratio is clipped: else it is the negative loss."""
    if rows.clip is None:
        return None
    clipped = (rows.log_ratio.exp() - 1).abs() > rows.clip
    return policy_loss(rows, -rows.advantages) if bool((clipped & (rows.advantages != 0)).any()) else None


def _advantages_attached(rows: LossRows) -> Tensor | None:
    attached = rows.returns - rows.values
    used = standardized(attached) if _normalized(rows) else attached
    return None if used is None else policy_loss(rows, used)


def _advantages_broadcast(rows: LossRows) -> Tensor | None:
    if not 1 < len(rows.advantages) <= MAX_BROADCAST_ROWS:
        return None
    if rows.clip is None:
        return -(rows.advantages.mean() * rows.log_probs.mean())
    return surrogate(rows.log_ratio.exp().unsqueeze(0), rows.advantages.unsqueeze(1), rows.clip).mean()


def _dual_clip(rows: LossRows) -> Tensor | None:
    def loss(log_ratio: Tensor, clip: float) -> Tensor:
        single = surrogate(log_ratio.exp(), rows.advantages, clip)
        bounded = torch.minimum(single, -DUAL_CLIP * rows.advantages)
        return torch.where(rows.advantages < 0, bounded, single).mean()

    return _of_ratio(rows, loss)


def _target(rows: LossRows, target: Tensor | None) -> Tensor | None:
    return None if target is None else 0.5 * (rows.values - target).square().mean()


def _target_normalized(rows: LossRows) -> Tensor | None:
    return _target(rows, None if rows.raw_advantages is None else standardized(rows.raw_advantages))


def _target_moving(rows: LossRows) -> Tensor | None:
    raw = rows.raw_advantages
    return _target(rows, None if raw is None else raw + rows.values.detach())


def _values_broadcast(rows: LossRows) -> Tensor | None:
    if not 1 < len(rows.values) <= MAX_BROADCAST_ROWS:
        return None
    return 0.5 * (rows.values.unsqueeze(1) - rows.returns.unsqueeze(0)).square().mean()


def _value_unclipped(rows: LossRows) -> Tensor | None:
    return None if rows.clip_value is None else 0.5 * (rows.values - rows.returns).square().mean()


def _value_clipped(rows: LossRows) -> Tensor | None:
    return _value_clip(rows, "maximum") if rows.clip_value is None else None


def _value_clip_maximum(rows: LossRows) -> Tensor | None:
    return None if rows.clip_value is None else _value_clip(rows, "maximum")


def _value_clip(rows: LossRows, choose: str) -> Tensor | None:
    """Clip values by their own range, or by that of the ratio where the settings have none."""
    clip = rows.clip if rows.clip_value is None else rows.clip_value
    if clip is None:
        return None
    error, near = clipped_errors(rows, clip)
    return 0.5 * {"maximum": torch.maximum, "minimum": torch.minimum}[choose](error, near).mean()


def _value_clip_no_maximum(rows: LossRows) -> Tensor | None:
    return None if rows.clip_value is None else 0.5 * clipped_errors(rows, rows.clip_value)[1].mean()


def _with_padding(term: str, rows: LossRows) -> Tensor | None:
    """Return the mean of a term over the rows that count and the padding."""
    if rows.padding is None:
        return None
    parts = [(len(part.values), TERM_LOSSES[term](part)) for part in (rows, rows.padding)]
    return torch.stack([count * loss for count, loss in parts]).sum() / sum(count for count, _ in parts)


def _kl_expectation(rows: LossRows) -> Tensor:
    log_ratio = rows.log_ratio.clamp(-EXP_LIMIT, EXP_LIMIT)
    return (log_ratio.expm1() - log_ratio).mean()


ALTERNATIVE_LOSSES: Final[Mapping[str, tuple[str, Loss]]] = {
    "no_clip": ("policy", _no_clip),
    "no_minimum": ("policy", _no_minimum),
    "maximum": ("policy", lambda rows: None if rows.clip is None else policy_loss(rows, choose="maximum")),
    "ratio_inverted": ("policy", _ratio_inverted),
    "no_ratio": ("policy", _no_ratio),
    "probability_difference": ("policy", _log_ratio),
    "advantages_raw": ("policy", _advantages_raw),
    "advantages_normalized": ("policy", _advantages_normalized),
    "advantages_centred": ("policy", _advantages_centred),
    "advantages_std_alone": ("policy", _advantages_std_alone),
    "advantages_negated": ("policy", _advantages_negated),
    "advantages_attached": ("policy", _advantages_attached),
    "advantages_broadcast": ("policy", _advantages_broadcast),
    "advantages_reversed": ("policy", lambda rows: policy_loss(rows, rows.advantages.flip(0))),
    "advantages_shifted": ("policy", lambda rows: policy_loss(rows, rows.advantages.roll(1))),
    "returns_for_advantages": ("policy", lambda rows: policy_loss(rows, rows.returns)),
    "dual_clip": ("policy", _dual_clip),
    "target_advantages": ("value", lambda rows: _target(rows, rows.raw_advantages)),
    "target_normalized": ("value", _target_normalized),
    "target_old_values": ("value", lambda rows: _target(rows, rows.old_values)),
    "target_moving": ("value", _target_moving),
    "target_shifted": ("value", lambda rows: _target(rows, rows.returns.roll(1))),
    "target_following": ("value", lambda rows: _target(rows, rows.returns.roll(-1))),
    "target_normalized_returns": ("value", lambda rows: _target(rows, standardized(rows.returns))),
    "value_absolute": ("value", lambda rows: 0.5 * (rows.values - rows.returns).abs().mean()),
    "value_root": ("value", lambda rows: 0.5 * (rows.values - rows.returns).square().mean().sqrt()),
    "values_broadcast": ("value", _values_broadcast),
    "value_unclipped": ("value", _value_unclipped),
    "value_clipped": ("value", _value_clipped),
    "value_clip_maximum": ("value", _value_clip_maximum),
    "value_clip_no_maximum": ("value", _value_clip_no_maximum),
    "value_clip_minimum": ("value", partial(_value_clip, choose="minimum")),
    "value_huber": (
        "value",
        lambda rows: torch.nn.functional.smooth_l1_loss(rows.values, rows.returns),
    ),
    **{f"{term}_padded": (term, partial(_with_padding, term)) for term in ("policy", "value", "entropy")},
    "entropy_of_sample": ("entropy", lambda rows: rows.log_probs.mean()),
    "entropy_unmasked": (
        "entropy",
        lambda rows: None if rows.unmasked_entropy is None else -rows.unmasked_entropy.mean(),
    ),
    "entropy_of_sample_sign": ("entropy", lambda rows: -rows.log_probs.mean()),
    "kl_difference": ("penalty", lambda rows: -rows.log_ratio.mean()),
    "kl_square": ("penalty", lambda rows: 0.5 * rows.log_ratio.square().mean()),
    "kl_expectation": ("penalty", _kl_expectation),
}
"""Losses by name, each with the term that it takes the place of; a penalty is added to the loss."""


def flat64(tensors: Iterable[Tensor]) -> Tensor:
    """Return the tensors one after the other, [d] float64."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).double()


class LossGradients:
    """Gradients of the terms of a loss and of alternatives to them, each computed when it is first asked for.

    Args:
        rows: forward pass through a copy of the policy, as a context in which its graph is valid.
        parameters: K tensors of the copy, which `detached` moves.
    """

    def __init__(self, rows: Callable[[], AbstractContextManager[LossRows]], parameters: Sequence[Tensor]) -> None:
        self._rows, self._parameters = rows, list(parameters)
        self._cache: dict[str, Tensor | None] = {}

    def __call__(self, name: str) -> Tensor | None:
        """Return the gradient [d], float64; None where this minibatch has no such loss.

        The first call takes a forward pass for all losses, and each loss a backward pass.
        """
        if not self._cache:
            losses: dict[str, Loss] = {**TERM_LOSSES, **{name: loss for name, (_, loss) in ALTERNATIVE_LOSSES.items()}}
            with torch.enable_grad(), self._rows() as rows:
                self._cache = {name: self._gradient(loss(rows)) for name, loss in losses.items()}
        return self._cache.get(name)

    def total(self, coefficients: Mapping[str, float]) -> tuple[Tensor, int]:
        """Return the gradient [d] of the weighted sum, in one backward pass, and the number of rows."""
        with torch.enable_grad(), self._rows() as rows:
            losses = [weight * TERM_LOSSES[name](rows) for name, weight in coefficients.items() if weight]
            gradient = self._gradient(torch.stack(losses).sum())
        assert gradient is not None
        return gradient, len(rows.log_ratio)

    def detached(self) -> list[bool]:
        """Return for each of the K parameters True where either the actor or the critic depends on it, and no gradient reaches it.

        Parameters without a gradient that serve both are an encoder that is frozen on purpose.
        """
        with torch.enable_grad(), self._rows() as rows:
            outputs = [rows.values.sum(), rows.log_probs.sum(), rows.entropy.sum()]
            reachable = torch.stack([one for one in outputs if one.requires_grad]).sum()
            trained = [parameter for parameter in self._parameters if parameter.requires_grad]
            gradients = iter(torch.autograd.grad(reachable, trained, allow_unused=True))
        silent = [parameter.requires_grad and next(gradients) is None for parameter in self._parameters]
        actor, critic = self._changes(silent) if any(silent) else (False, False)
        return silent if actor != critic else [False] * len(silent)

    def of_errors(self, at_values: Tensor) -> Tensor | None:
        """Return the gradient [d] of a value loss from that at the values [N]; None unless this is an increasing function of V - R.

        Rows whose values are clipped may have none.
        """
        with torch.enable_grad(), self._rows() as rows:
            error = (rows.values - rows.returns).detach()
            if at_values.shape != error.shape or not at_values.any():
                return None
            counted = torch.ones_like(error, dtype=torch.bool) if rows.clip_value is None else at_values != 0
            slopes, order = at_values[counted], error[counted].argsort()
            rounding = ROUNDED_SHARE * slopes.abs().max()
            increasing = (slopes[order].diff() >= -rounding).all() and (
                slopes * error[counted].sign() >= -rounding
            ).all()
            return self._gradient((rows.values * at_values).sum()) if increasing else None

    @no_grad
    def _changes(self, chosen: Sequence[bool]) -> tuple[bool, bool]:
        """Return whether log-probabilities, and whether values, are others when these parameters are moved."""
        moved = [parameter for parameter, one in zip(self._parameters, chosen, strict=True) if one]
        weights = [parameter.data for parameter in moved]
        with self._rows() as rows:
            log_probs, values = rows.log_probs.clone(), rows.values.clone()
        generator = torch.Generator().manual_seed(0)
        try:
            for parameter in moved:
                noise = torch.rand(parameter.shape, generator=generator).to(parameter)
                parameter.data = parameter.data + MOVED_WEIGHTS * noise
            with self._rows() as rows:
                return not torch.allclose(rows.log_probs, log_probs), not torch.allclose(rows.values, values)
        finally:
            for parameter, own in zip(moved, weights, strict=True):
                parameter.data = own

    def _gradient(self, loss: Tensor | None) -> Tensor | None:
        if loss is None:
            return None
        if not loss.requires_grad:
            return torch.cat([torch.zeros_like(p).flatten() for p in self._parameters]).double()
        options: dict[str, Any] = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
        trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        gradients = iter(torch.autograd.grad(loss, trained, **options))
        return flat64(next(gradients) if p.requires_grad else torch.zeros_like(p) for p in self._parameters)


TERMS: Final = ("policy", "value", "entropy")
"""Terms of the loss, in the order in which they are added."""

VALUE_FACTORS: Final = (1.0, 0.5, 2.0)
"""Factors of a value loss in programs that place the ½ elsewhere."""

NEGLIGIBLE_SHARE: Final = 1e-3
"""Size of a parameter's gradient, next to the largest one of the same loss, that may be rounding: that of a bias before a
normalising layer is 0 but for rounding."""


class GradientsByName(Protocol):
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
    alternatives: GradientsByName = field(default=lambda name: None)

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
        """Return the gradient of the loss with an alternative in place of its term; None where there is no such alternative.

        A value loss has the factor that is nearest to the trainer's: some programs leave the ½ out, and some have it in the weight too.
        """
        term = ALTERNATIVE_LOSSES[name][0]
        gradient = self.alternatives(name) if self.weight(term) else None
        if gradient is None:
            return None
        rest, own = self.total(**{term: 0.0}), self.weight(term) * gradient / self.scale
        is_another_value_loss = term == "value" and not torch.allclose(gradient / self.scale, self.terms[term])
        candidates = [rest + factor * own for factor in (VALUE_FACTORS if is_another_value_loss else (1.0,))]
        return min(candidates, key=lambda one: float((one - self.claimed).abs().max()))

    def active(self, vector: Tensor) -> Tensor:
        """Return [d], bool: the entry's parameter has a gradient in `vector`."""
        return spread([part.any() for part in vector.split(list(self.numels))], self.numels)


def spread(values: Iterable[Tensor], numels: Sequence[int]) -> Tensor:
    """Return [d] from one number of each parameter."""
    column = torch.stack(list(values))
    return column.repeat_interleave(torch.tensor(numels, device=column.device), output_size=sum(numels))


def largest_entries(vector: Tensor, numels: Sequence[int]) -> Tensor:
    """Return the largest magnitude of each of the K parameters, [K]; 0 of one without entries."""
    return torch.stack([part.abs().max() if len(part) else part.sum() for part in vector.split(list(numels))])


def gradient_scale(claimed: Tensor, terms: Iterable[Tensor], numels: Sequence[int]) -> Tensor:
    """Return [d], the largest magnitude of each parameter's entries, and at least `NEGLIGIBLE_SHARE` of the largest one in its terms."""
    scale, floor = (
        largest_entries(claimed, numels),
        torch.zeros(len(numels), dtype=torch.float64, device=claimed.device),
    )
    for term in terms:
        magnitudes = largest_entries(term, numels)
        scale = torch.maximum(scale, magnitudes)
        floor = torch.maximum(floor, torch.where(magnitudes > 0, NEGLIGIBLE_SHARE * magnitudes.max(), 0.0))
    scale = torch.maximum(scale, floor)
    return spread(torch.where(scale > 0, scale, 1.0), numels)


def sum_with_previous(inputs: GradientInputs) -> Tensor | None:
    """Return the sum of the gradient and of the one that stood there before; None where none did."""
    return None if inputs.previous is None or not inputs.previous.any() else inputs.total() + inputs.previous


def parts_with_previous(inputs: GradientInputs) -> Tensor | None:
    """Return the sum with the gradient before in the parameters where it is nearer to the trainer's; None where that is all or nothing."""
    total, whole = inputs.total(), sum_with_previous(inputs)
    if whole is None:
        return None

    errors = [largest_entries(vector - inputs.claimed, inputs.numels) for vector in (whole, total)]
    nearer = errors[0] < errors[1]
    return torch.where(spread(nearer, inputs.numels), whole, total) if 0 < int(nearer.sum()) < len(nearer) else None


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
    """Return the factor c, by least squares over every second entry that depends on it, and base + c direction.

    None where fewer than two entries depend on c: any number fits one.
    """
    entries = direction.nonzero().flatten()
    if len(entries) < 2:
        return None
    part = direction[entries[::2]]
    factor = float((numbers - base)[entries[::2]] @ part / (part @ part))
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
