"""Equation of the gradient: the PPO loss's gradient at the same minibatch and weights, and the mistakes that it reveals.

The mistakes' losses come from `policy_loss`, `value_loss` and `entropy_loss`, with the graph of a minibatch. Each parameter's entries are
divided by the largest entry that the parameter has in the trainer's gradient or in the terms of the loss. So a critic with a gradient a
thousand times larger does not hide the actor's gradient.

Shapes: N rows of the minibatch, d entries of K parameters, concatenated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

from esper_telemetry.core.arrays import as_floats
from esper_telemetry.core.lazy import Tensor, no_grad, torch
from esper_telemetry.core.minibatch_objective import LossRows
from esper_telemetry.core.requirements import checked_arguments
from esper_telemetry.equations.comparison import EquationCheck, compare, distinguished
from esper_telemetry.equations.entropy_loss import ENTROPY_LOSS, EntropyInputs, entropy_loss
from esper_telemetry.equations.equation import Equation, Hypothesis, mistake, variant
from esper_telemetry.equations.minibatch_losses import STD_EPS
from esper_telemetry.equations.policy_loss import KL_ESTIMATES, POLICY_LOSS, PolicyLossInputs, clipped_surrogate
from esper_telemetry.equations.value_loss import VALUE_LOSS, ValueLossInputs, clipped_at, value_loss

ROUNDED_SHARE: Final = 1e-5
"""Share of the largest gradient with respect to a value that counts as rounding."""

MOVED_WEIGHTS: Final = 0.1
"""Magnitude of the noise that is added to weights to find out what depends on them."""

VALUE_FACTORS: Final = (1.0, 0.5, 2.0)
"""Factors of a value loss in programs that place the ½ elsewhere."""

NEGLIGIBLE_SHARE: Final = 1e-3
"""Magnitude of a parameter's gradient, relative to the largest gradient of the same loss, that may be rounding. Example: a bias before a
normalising layer has a gradient of 0, except for rounding."""


class LossTerm(NamedTuple):
    """A term of the loss.

    Attributes:
        words: its name in sentences.
        weight: symbol of its coefficient.
        inputs: (rows of a minibatch) -> inputs of its equation.
        loss: (inputs) -> the loss, 0-d; the value loss has the factor ½, the entropy has a minus sign.
        equation: its hypotheses are other losses.
    """

    words: str
    weight: str
    inputs: Callable[[LossRows], Any]
    loss: Callable[[Any], Tensor]
    equation: Equation

    def of(self, rows: LossRows) -> Tensor:
        """Return the loss, 0-d."""
        return self.loss(self.inputs(rows))


TERMS: Final = {
    "policy": LossTerm("policy loss", "", PolicyLossInputs.of, clipped_surrogate, POLICY_LOSS),
    "value": LossTerm("value loss", "c_v ", ValueLossInputs.of, value_loss, VALUE_LOSS),
    "entropy": LossTerm("entropy bonus", "c_e ", EntropyInputs.of, entropy_loss, ENTROPY_LOSS),
}
"""Terms of the loss by name, in the order of addition."""

OTHER_POLICY_LOSSES = (
    mistake("advantages_normalized", "a policy loss with normalised advantages although the setting is off")
    .predicts(
        "L_policy of (A - mean A) / std A instead of A",
        lambda x: x.of_advantages(x.minibatches.normalized(x.advantages)) if x.raw is None else None,
    )
    .advises("Do not normalise the advantages, or switch the setting on")
    .cites("stable-baselines3, normalize_advantage"),
    mistake("advantages_centred", "a policy loss with advantages minus their mean, not divided by their standard deviation")
    .predicts("L_policy of A - mean A", lambda x: x.of_advantages(x.raw - x.raw.mean()))
    .given(needs="raw")
    .advises("Divide by the standard deviation", source="program: sb3_own_loops"),
    mistake("advantages_std_alone", "a policy loss with advantages divided by their standard deviation, without subtracting the mean")
    .predicts("L_policy of A / std A", lambda x: x.of_advantages(x.raw / (x.raw.std() + STD_EPS)))
    .given(needs="raw")
    .advises("Subtract the mean before you divide", source="program: subclass-norm_no_mean"),
    mistake("returns_for_advantages", "a policy loss with returns instead of advantages")
    .predicts("L_policy of R", lambda x: x.of_advantages(x.returns))
    .advises("Subtract the values from the returns", source="program: sb3_own_loops"),
    mistake("advantages_attached", "a policy loss whose gradient reaches the critic through the advantages")
    .predicts(
        "L_policy of A = R - V, with ∇V",
        lambda x: x.of_advantages(x.returns - x.values if x.raw is None else x.minibatches.normalized(x.returns - x.values)),
    )
    .advises("Detach the advantages, or compute them without gradients", source="program: sb3_own_loops"),
)
"""Mistakes in the policy loss that are compared only in its gradient."""

OTHER_VALUE_LOSSES = (
    mistake("targets_attached", "a value loss whose gradient also moves its targets")
    .predicts("L_value = ½ mean (V - R)², with ∇R")
    .advises("Detach the targets, or compute them without gradients")
    .cites("https://github.com/GeminiLight/pytorch-rl-minimal-implementations, ppo.py"),
    mistake("value_unclipped", "a value loss without clipping although the setting is on")
    .predicts("L_value = ½ mean (V - R)²", lambda x: clipped_at(x, None))
    .given(needs="clip")
    .advises("Clip the values to the old values ± clip_range_vf, or switch the setting off")
    .cites("2006.05990 (Andrychowicz et al.), 3.4: no clipping of values is better"),
    variant("value_clip_maximum", "a clipped value loss with the maximum")
    .predicts("L_value = ½ mean max((V - R)², (V_clip - R)²)", lambda x: clipped_at(x, x.clip))
    .given(needs="clip")
    .cites("2005.12729, section 3"),
    variant("value_clip_no_maximum", "a clipped value loss without the maximum")
    .predicts("L_value = ½ mean (V_clip - R)²", lambda x: x.half(x.near_error().square()))
    .given(needs="clip")
    .cites("stable-baselines3, clip_range_vf"),
)
"""Mistakes in the value loss that are compared only in its gradient, if the settings say how values are clipped."""


class OtherLoss(NamedTuple):
    """A mistaken loss that replaces a term."""

    term: str
    hypothesis: Hypothesis

    def of(self, rows: LossRows) -> Tensor | None:
        """Return the loss, 0-d; None if it does not apply."""
        inputs, one = TERMS[self.term].inputs(rows), self.hypothesis
        if one.compute is None or (one.needs and getattr(inputs, one.needs) is None):
            return None
        result: Tensor | tuple[Tensor, ...] | None = one.compute(inputs)
        return result[0] if isinstance(result, tuple) else result


def _other_losses() -> Iterator[tuple[str, OtherLoss]]:
    """Yield the mistakes of each term by their names in this equation."""
    own = {"policy": OTHER_POLICY_LOSSES, "value": OTHER_VALUE_LOSSES, "entropy": ()}
    for name, term in TERMS.items():
        yield from ((one.gradient, OtherLoss(name, one)) for one in term.equation.hypotheses if one.gradient)
        yield from ((one.name, OtherLoss(name, one)) for one in own[name])


OTHER_LOSSES: Final = dict(_other_losses())


def padded(term: str, rows: LossRows) -> Tensor | None:
    """Return the mean of a term over all rows, including padding, 0-d."""
    if rows.padding is None:
        return None
    parts = [(len(part.values), TERMS[term].of(part)) for part in (rows, rows.padding)]
    return torch.stack([count * loss for count, loss in parts]).sum() / sum(count for count, _ in parts)


LOSSES: Final[Mapping[str, Callable[[LossRows], Tensor | None]]] = {
    **{name: term.of for name, term in TERMS.items()},
    **{name: loss.of for name, loss in OTHER_LOSSES.items()},
    **{f"{term}_padded": partial(padded, term) for term in TERMS},
    **{
        name: lambda rows, estimate=estimate: estimate(PolicyLossInputs.of(rows))  # type: ignore[misc]
        for name, estimate in KL_ESTIMATES.items()
    },
}
"""Losses by name: terms, replacements of terms, and penalties, which are added to the loss."""


def flat64(tensors: Iterable[Tensor]) -> Tensor:
    """Return the concatenated tensors, [d] float64."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).double()


class LossGradients:
    """Gradients of the terms of a loss and of alternatives to them, each computed on first use.

    Args:
        rows: forward pass through a copy of the policy, as a context manager that keeps its graph valid.
        parameters: K tensors of the copy, which `detached` perturbs.
    """

    def __init__(self, rows: Callable[[], AbstractContextManager[LossRows]], parameters: Sequence[Tensor]) -> None:
        self._rows, self._parameters = rows, list(parameters)
        self._cache: dict[str, Tensor | None] = {}

    def __call__(self, name: str) -> Tensor | None:
        """Return the gradient [d], float64; None if this minibatch does not have the loss.

        The first call runs one forward pass for all losses; each loss runs its own backward pass.
        """
        if not self._cache:
            with torch.enable_grad(), self._rows() as rows:
                self._cache = {name: self._gradient(loss(rows)) for name, loss in LOSSES.items()}
        return self._cache.get(name)

    def total(self, coefficients: Mapping[str, float]) -> tuple[Tensor, int]:
        """Return the gradient [d] of the weighted sum, in one backward pass, and the number of rows."""
        with torch.enable_grad(), self._rows() as rows:
            losses = [weight * TERMS[name].of(rows) for name, weight in coefficients.items() if weight]
            gradient = self._gradient(torch.stack(losses).sum())
        assert gradient is not None
        return gradient, len(rows.log_ratio)

    def detached(self) -> list[bool]:
        """Return for each of the K parameters True if the actor or the critic, but not both, depends on it and it has no gradient.

        Parameters without a gradient that both depend on belong to an encoder that is frozen on purpose.
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
        """Return the gradient [d] of a value loss from its gradient at the values [N]; None unless this increases with V - R.

        Rows with clipped values may have a gradient of 0.
        """
        with torch.enable_grad(), self._rows() as rows:
            error = (rows.values - rows.returns).detach()
            if at_values.shape != error.shape or not at_values.any():
                return None
            counted = torch.ones_like(error, dtype=torch.bool) if rows.clip_value is None else at_values != 0
            slopes, order = at_values[counted], error[counted].argsort()
            rounding = ROUNDED_SHARE * slopes.abs().max()
            increasing = (slopes[order].diff() >= -rounding).all() and (slopes * error[counted].sign() >= -rounding).all()
            return self._gradient((rows.values * at_values).sum()) if increasing else None

    @no_grad
    def _changes(self, chosen: Sequence[bool]) -> tuple[bool, bool]:
        """Return whether log-probabilities, and whether values, change when these parameters are perturbed."""
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


GradientsByName: TypeAlias = "Callable[[str], Tensor | None]"
"""Returns the gradient [d] of a loss, or of an alternative to one, by name, float64; None if this minibatch does not have the loss."""


@dataclass(frozen=True, slots=True, eq=False)
class GradientInputs:
    """Inputs of a gradient. All vectors are [d], float64, divided by `scale`.

    Attributes:
        claimed: the trainer's gradient.
        terms: gradients of the terms without their coefficients.
        coefficients: by term.
        numels: entries of each of the K parameters.
        previous: gradient in `.grad` before the backward pass; None if there was no gradient.
        weights: of the parameters; None if they are not given.
        rows: N; None if it is not known.
        max_norm: limit of the global norm; None if nothing is clipped.
        alternatives: gradients of other losses by name, neither weighted nor scaled.
        scale: [d], largest magnitude among the entries of the same parameter.
    """

    claimed: Tensor
    terms: Mapping[str, Tensor]
    coefficients: Mapping[str, float]
    numels: tuple[int, ...]
    previous: Tensor | None = None
    weights: Tensor | None = None
    rows: int | None = None
    max_norm: float | None = None
    alternatives: GradientsByName = field(default=lambda name: None)
    scale: Tensor | float = 1.0

    def total(self, **coefficients: float) -> Tensor:
        """Return the gradient of the loss; `coefficients` replace the configured coefficients."""
        weights = {**self.coefficients, **coefficients}
        return torch.stack([weights[name] * gradient for name, gradient in self.terms.items()]).sum(0)

    def without(self, term: str) -> Tensor | None:
        """Return the gradient of the loss without a term; None if the loss does not have the term."""
        return self.total(**{term: 0.0}) if self.weight(term) else None

    def weight(self, term: str) -> float:
        """Coefficient of a term; 0 if it is missing."""
        return self.coefficients.get(term, 0.0) if term in self.terms else 0.0

    def replaced(self, name: str) -> Tensor | None:
        """Return the gradient of the loss with an alternative instead of its term; None if the alternative is missing.

        A value loss gets the factor that fits the trainer's gradient best: some programs omit the ½, and some include it in the weight too.
        """
        term = OTHER_LOSSES[name].term if name in OTHER_LOSSES else name.removesuffix("_padded")
        gradient = self.alternatives(name) if self.weight(term) else None
        if gradient is None:
            return None
        rest, own = self.total(**{term: 0.0}), self.weight(term) * gradient / self.scale
        is_another_value_loss = term == "value" and not torch.allclose(gradient / self.scale, self.terms[term])
        candidates = [rest + factor * own for factor in (VALUE_FACTORS if is_another_value_loss else (1.0,))]
        return min(candidates, key=lambda one: float((one - self.claimed).abs().max()))

    def active(self, vector: Tensor) -> Tensor:
        """Return [d], bool: the entry's parameter has a gradient in `vector`."""
        return spread(torch.stack([part.any() for part in vector.split(list(self.numels))]), self.numels)


def spread(column: Tensor, numels: Sequence[int]) -> Tensor:
    """Expand one number per parameter, [K], to [d]."""
    return column.repeat_interleave(torch.tensor(numels, device=column.device), output_size=sum(numels))


def largest_entries(vector: Tensor, numels: Sequence[int]) -> Tensor:
    """Return the largest magnitude of each of the K parameters, [K]; 0 for a parameter without entries."""
    return torch.stack([part.abs().max() if len(part) else part.sum() for part in vector.split(list(numels))])


def gradient_scale(claimed: Tensor, terms: Iterable[Tensor], numels: Sequence[int]) -> Tensor:
    """Return [d], the largest magnitude of each parameter's entries, at least `NEGLIGIBLE_SHARE` of the largest in its terms."""
    scale, floor = (largest_entries(claimed, numels), torch.zeros(len(numels), dtype=torch.float64, device=claimed.device))
    for term in terms:
        magnitudes = largest_entries(term, numels)
        scale = torch.maximum(scale, magnitudes)
        floor = torch.maximum(floor, torch.where(magnitudes > 0, NEGLIGIBLE_SHARE * magnitudes.max(), 0.0))
    scale = torch.maximum(scale, floor)
    return spread(torch.where(scale > 0, scale, 1.0), numels)


def _sum_with_previous(inputs: GradientInputs) -> Tensor | None:
    """Return the sum of the gradient and the previous gradient; None if there is no previous gradient."""
    return None if inputs.previous is None or not inputs.previous.any() else inputs.total() + inputs.previous


def parts_with_previous(inputs: GradientInputs) -> Tensor | None:
    """Return the sum with the previous gradient in the parameters in which it fits better; None if these are all or no parameters."""
    total, whole = inputs.total(), _sum_with_previous(inputs)
    if whole is None:
        return None

    errors = [largest_entries(vector - inputs.claimed, inputs.numels) for vector in (whole, total)]
    nearer = errors[0] < errors[1]
    return torch.where(spread(nearer, inputs.numels), whole, total) if 0 < int(nearer.sum()) < len(nearer) else None


def parts_missing(inputs: GradientInputs) -> Tensor | None:
    """Return the gradient with 0 in parameters in which the trainer has no gradient; None if that is all or nothing of a term."""
    total = inputs.total()
    values = torch.where(inputs.active(inputs.claimed), total, 0.0)
    whole_terms = [inputs.without(term) for term in TERMS]
    parts = [stopped(inputs, ("value",)), stopped(inputs, ("policy", "entropy"))]
    named = [total, torch.zeros_like(total), *whole_terms, *parts]
    return None if any(other is not None and torch.equal(values, other) for other in named) else values


def stopped(inputs: GradientInputs, terms: Sequence[str]) -> Tensor | None:
    """Return the gradient of the loss without some terms in the parameters that they share with other terms."""
    ended = [inputs.weight(term) * inputs.terms[term] for term in terms if inputs.weight(term)]
    if not ended:
        return None
    part = torch.stack(ended).sum(0)
    rest = inputs.total() - part
    shared = inputs.active(part) & inputs.active(rest)
    return torch.where(shared, rest, inputs.total()) if shared.any() else None


def summed(inputs: GradientInputs, terms: Sequence[str]) -> Tensor | None:
    """Return the gradient with a sum over the rows instead of the mean in some terms; None without the first of them."""
    if inputs.rows is None or inputs.rows < 2 or not all(inputs.weight(term) for term in terms[:1]):
        return None
    return inputs.total(**{term: inputs.rows * inputs.weight(term) for term in terms})


def factor(inputs: GradientInputs, term: str, times: float) -> Tensor | None:
    """Return the gradient with a term's weight multiplied by `times`; None if there is no such term."""
    return inputs.total(**{term: times * inputs.weight(term)}) if inputs.weight(term) else None


def last_pass(inputs: GradientInputs) -> Tensor | None:
    """Return the gradient of the last backward pass of the step; None unless the gradients of the others were cleared."""
    last = inputs.alternatives("last_pass")
    return None if last is None else last / inputs.scale


def by_norm(inputs: GradientInputs) -> Tensor | None:
    """Return the gradient clipped by its global norm; None if it is below the limit."""
    norm = torch.linalg.vector_norm(inputs.total() * inputs.scale)
    clipped = inputs.max_norm is not None and norm > inputs.max_norm
    return inputs.total() * (inputs.max_norm / (norm + 1e-6)) if clipped else None


def leaks(inputs: GradientInputs) -> Tensor | None:
    """Return the gradient of the loss without the stop of the critic's gradient."""
    leak = inputs.alternatives("critic_leaks")
    return None if leak is None else inputs.total(value=0.0) + inputs.weight("value") * leak / inputs.scale


def fitted(base: Tensor, direction: Tensor, numbers: Tensor) -> tuple[float, Tensor] | None:
    """Return the factor c, by least squares over every second entry that depends on it, and base + c · direction.

    None if fewer than two entries depend on c, because some factor always fits a single entry.
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


def fit_limit(inputs: GradientInputs, numbers: Tensor) -> tuple[float, Tensor]:
    """Fit the limit of clipping by value: the largest entry."""
    limit = float((numbers * inputs.scale).abs().max())
    return limit, (inputs.total() * inputs.scale).clamp(-limit, limit) / inputs.scale


def fit_kl(inputs: GradientInputs, numbers: Tensor, *, sign: int) -> tuple[float, Tensor] | None:
    """Fit the weight of the KL estimator that explains the numbers best, with the clipped or the plain surrogate; None for a weight of
    the other sign.
    """
    bases = [inputs.total(), inputs.replaced("no_clip")]
    penalties = [one / inputs.scale for name in (*KL_ESTIMATES, "kl_penalty") if (one := inputs.alternatives(name)) is not None]
    fits = [fit for base in bases if base is not None for penalty in penalties if (fit := fitted(base, penalty, numbers)) is not None]
    best = min(fits, key=lambda fit: float((fit[1] - numbers).abs().max()), default=None)
    return best if best is not None and best[0] * sign > 0 else None


def _of_each_term(name: str, says: str, equation: str, advice: str, compute: Callable[..., Any]) -> Iterator[Hypothesis]:
    """Yield a mistake for each term: its texts contain the term's name, words, symbol and weight; `compute(inputs, term)` predicts it."""
    for term, loss in TERMS.items():
        fill = partial(str.format, term=term, words=loss.words, symbol=f"L_{term}", weighted=f"{loss.weight}L_{term}")
        yield (mistake(fill(name), fill(says)).predicts(f"g = ∇({fill(equation)})", partial(compute, term=term)).advises(fill(advice)))


def _of_losses(term: str) -> Iterator[Hypothesis]:
    """Yield the mistakes of a term as mistakes of its gradient."""
    for name, (place, one) in OTHER_LOSSES.items():
        if place == term:
            compute, source = partial(GradientInputs.replaced, name=name), one.source or f"program: {TERMS[term].equation.shown_by}"
            yield replace(one, name=name, says=f"the gradient of {one.says}", compute=compute, source=source, needs="", doubtful_without="")


GRADIENT = Equation(
    name="gradient",
    rank=60,
    quantity="the gradients before clipping",
    equation="∇(L_policy + c_v L_value - c_e H) of the minibatch",
    source="1707.06347, eq. 7 and 9",
    inputs="the live policy at a minibatch, its rows, and the gradient before clipping",
    check="check_gradient",
    shown_by="test_gradients",
    compute=GradientInputs.total,
    tolerance=1.0,  # errors of the bundled trainer and of Stable-Baselines3 on a CPU: 0, because both passes run the same kernels
    advice="Compare the terms of the loss in the update with the equation, one at a time",
    hypotheses=(
        mistake("not_cleared", "the sum of this minibatch's gradient and the previous gradient")
        .predicts("g_k = ∇L_k + g_{k-1}", _sum_with_previous)
        .advises("Call optimizer.zero_grad() before each backward pass", source="torch.optim.Optimizer.zero_grad"),
        mistake("parts_not_cleared", "the gradient of the loss, added to the previous gradient in some parameters")
        .predicts("g_k = ∇L_k in some parameters, ∇L_k + g_{k-1} in others", parts_with_previous)
        .advises("Clear the gradients of all parameters: optimizer.zero_grad() clears only the optimizer's own parameters")
        .cites("torch.optim.Optimizer.zero_grad"),
        mistake("last_pass", "the gradient of the last of several backward passes: the others were cleared before the step")
        .predicts("g = ∇L_K instead of ∇(L_1 + ... + L_K)", last_pass)
        .advises("Call optimizer.zero_grad() once per optimizer step, before its first backward pass")
        .cites("program: parts-cleared"),
        mistake("zero", "zero")
        .predicts("g = 0", lambda inputs: torch.zeros_like(inputs.claimed))
        .advises("The loss is detached, or the gradient is cleared after the backward pass"),
        mistake("sign", "the gradient with the opposite sign")
        .predicts("g = -∇L", lambda inputs: -inputs.total())
        .advises("The optimizer maximises the loss: remove the minus sign"),
        *_of_each_term(
            "{term}_sign",
            "the gradient of a loss with the wrong sign of its {words}",
            "L - 2 {weighted}",
            "Minimise the policy loss, which is the negative surrogate, and the value loss; subtract the entropy",
            partial(factor, times=-1.0),
        ),
        *_of_each_term(
            "{term}_missing",
            "the gradient of the loss without its {words}",
            "L - {weighted}",
            "The {words} is missing from the total, or computed from detached numbers",
            GradientInputs.without,
        ),
        mistake("value_halved", "the gradient of a loss with half the weight of its value term")
        .predicts("g = ∇(L_policy + ½ c_v L_value - c_e H)", partial(factor, term="value", times=0.5))
        .advises("The factor ½ of the squared error is applied twice, or the coefficient is for a loss without it")
        .cites("program: subclass-v_half"),
        mistake("value_doubled", "the gradient of a loss with twice the weight of its value term")
        .predicts("g = ∇(L_policy + 2 c_v L_value - c_e H)", partial(factor, term="value", times=2.0))
        .advises("The factor ½ of the squared error is missing, or the coefficient includes it already"),
        mistake("summed", "the gradient of the sum over the rows instead of their mean")
        .predicts("g = N ∇L", partial(summed, terms=tuple(TERMS)))
        .advises("Take the mean over the minibatch"),
        *_of_each_term(
            "{term}_summed",
            "the gradient of a loss whose {words} is a sum over the rows",
            "L + (N - 1) {weighted}",
            "Take the mean of the {words} over the minibatch",
            lambda inputs, term: summed(inputs, (term,)),
        ),
        *(
            one.cites("https://github.com/Stable-Baselines-Team/stable-baselines3-contrib/issues/75")
            for one in _of_each_term(
                "{term}_padded",
                "the gradient of a loss whose {words} is a mean that includes padding",
                "L with {symbol} of rows and padding",
                "Use the mask of the minibatch to leave padding out of the {words}",
                lambda inputs, term: inputs.replaced(f"{term}_padded"),
            )
        ),
        mistake("critic_stopped", "the gradient of a loss whose value term does not reach the shared parameters")
        .predicts("g = ∇L without c_v ∇L_value in shared parameters", partial(stopped, terms=("value",)))
        .advises("The critic's input is detached from the trunk that it shares with the actor"),
        mistake("actor_stopped", "the gradient of a loss whose policy term does not reach the shared parameters")
        .predicts("g = ∇L without ∇(L_policy - c_e H) in shared parameters", partial(stopped, terms=("policy", "entropy")))
        .advises("The actor's input is detached from the trunk that it shares with the critic"),
        mistake("critic_leaks", "the gradient of a loss whose value term reaches the trunk although it should stop there")
        .predicts("g = ∇L + c_v ∇L_value in the trunk", leaks)
        .advises("Detach the trunk's output before the critic reads it"),
        mistake("parts_missing", "the gradient of the loss, but 0 in some parameters")
        .predicts("g = ∇L in some parameters, 0 in others", parts_missing)
        .advises("Some parameters lack a gradient although the loss depends on them: look for detach() and no_grad()"),
        *_of_losses("policy"),
        *_of_losses("value"),
        *_of_losses("entropy"),
        variant("other_errors", "the gradient of a loss whose value term is another increasing function of the absolute error")
        .predicts("L_value = mean f(|V - R|), f increasing and convex")
        .cites("2006.05990 (Andrychowicz et al.), 3.4: the Huber loss"),
        variant("clipped_already", "the gradient of the loss, clipped by its norm")
        .predicts("g = ∇L min(1, c / ‖∇L‖)", by_norm)
        .cites("torch.nn.utils.clip_grad_norm_"),
        mistake("value_weight", "the gradient of a loss with a different weight of the value term,")
        .fits("g = ∇(L_policy + c L_value - c_e H)", "value_coef", partial(fit_weight, "value"))
        .advises("Compare the weight of the value loss with the setting; it multiplies half the squared error"),
        mistake("entropy_weight", "the gradient of a loss with a different weight of the entropy bonus,")
        .fits("g = ∇(L_policy + c_v L_value - c H)", "entropy_coef", partial(fit_weight, "entropy"))
        .advises("Compare the weight of the entropy bonus with the setting")
        .cites("program: subclass-entropy_weight"),
        mistake("policy_weight", "the gradient of a loss with a weighted policy term,")
        .fits("g = ∇(c L_policy + c_v L_value - c_e H)", "weight", partial(fit_weight, "policy"))
        .advises("The policy loss has the weight 1", source="program: script-pg_sum"),
        mistake("scaled", "the gradient of the loss multiplied by a")
        .fits("g = c ∇L", "factor", lambda inputs, numbers: fitted(torch.zeros_like(numbers), inputs.total(), numbers))
        .advises("Look for a division of the loss, such as one for gradient accumulation")
        .cites("program: subclass-gradient_scaled"),
        mistake("clipped_by_value", "the gradient of the loss with each entry clipped at")
        .fits("g = clip(∇L, ±c)", "limit", fit_limit)
        .advises("PPO clips the global norm of the gradient", source="torch.nn.utils.clip_grad_value_"),
        mistake("weight_penalty", "the gradient of the loss with a penalty on the weights,")
        .fits("g = ∇L + c w", "weight", lambda inputs, numbers: fitted(inputs.total(), inputs.weights, numbers))
        .given(needs="weights")
        .advises("Remove the penalty, or use the optimizer's weight_decay instead"),
        variant("kl_penalty", "the gradient of the loss with a penalty on the KL divergence,")
        .fits("g = ∇(L + β KL)", "β", partial(fit_kl, sign=1))
        .cites("1707.06347, eq. 8"),
        mistake("kl_reward", "the gradient of the loss with a penalty of the wrong sign on the KL divergence,")
        .fits("g = ∇(L - β KL)", "-β", partial(fit_kl, sign=-1))
        .advises("Add the divergence to the loss: subtracting it drives the policy away from the policy at collection")
        .cites("program: script-kl_rewarded"),
    ),
)


OTHER_GRADIENTS: Final = ("critic_leaks", "last_pass", "kl_penalty")
"""Alternatives that are gradients of a part of the trainer's own loss."""

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
    """Return the comparison of a gradient, before clipping, with the gradient of the PPO loss.

    Tensors of the K parameters are a mapping by name or a sequence, always in the same order. None is a gradient of zeros. If a parameter
    with `requires_grad` is passed, its `.grad` is used.

    Args:
        gradients: the trainer's, after the backward pass.
        terms: gradients of one or more terms at the same minibatch and weights, without coefficients: `policy`, `value` (half the mean
                squared error), `entropy` (the negative mean entropy).
            coefficients: weights of the terms; `policy` defaults to 1.
            previous: gradients of the previous minibatch, as they were last in `.grad`.
            weights: of the parameters, to recognise a penalty on them.
            rows: of the minibatch, to recognise a sum instead of a mean.
        max_norm: limit of the global norm.
        alternatives: gradients of other losses by the name of their hypothesis, unweighted: `no_clip`, `ratio_inverted`,
            `entropy_of_sample` and so on (an unknown name lists all). Or gradients of parts of the loss: `critic_leaks`, the value loss
            if it is not stopped; `last_pass`, the last of several backward passes; `kl_penalty`, the divergence that the loss adds.
        precision: of the trainer's arithmetic.
        tolerance: largest relative error; by precision if it is None.

    Raises:
        ValueError: if terms are missing or unknown, or shapes differ.
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

    inputs = GradientInputs(
        joined("gradients", gradients),
        {name: joined(name, entries) for name, entries in by_term.items()},
        {"policy": 1.0, **{name: float(weight) for name, weight in coefficients.items()}},
        tuple([model.numel() for model in models]),
        previous=None if previous is None else joined("previous", previous),
        weights=None if weights is None else flat64([w for w in _values(weights) if w is not None]),
        rows=rows,
        max_norm=max_norm,
        alternatives={name: joined(name, entries) for name, entries in (alternatives or {}).items()}.get,
    )
    return compare_gradient(inputs, precision=precision, tolerance=tolerance)


def _check_names(terms: Iterable[str], coefficients: Iterable[str], alternatives: Iterable[str]) -> None:
    """Raise ValueError if there are no terms, a term does not have a weight, or a name is unknown."""
    unknown = sorted({*terms, *coefficients} - set(TERMS))
    if unknown or not [*terms]:
        raise ValueError(f"terms of the loss must be among {', '.join(TERMS)}, got {', '.join(unknown) or 'none'}")
    unweighted = [name for name in terms if name != "policy" and name not in coefficients]
    if unweighted:
        raise ValueError(f"coefficients must have a weight for {', '.join(unweighted)}")
    known = [*(name for name in LOSSES if name not in TERMS), *OTHER_GRADIENTS]
    unknown = sorted(set(alternatives) - set(known))
    if unknown:
        raise ValueError(f"alternatives must be among {', '.join(known)}, got {', '.join(unknown)}")


def _models(given: Sequence[Tensor | None], by_term: Mapping[str, Sequence[Tensor | None]]) -> list[Tensor]:
    """Return one gradient for each parameter, from the trainer or from a term.

    Raises ValueError if the numbers of tensors differ, or a parameter does not have a gradient.
    """
    counts = {"gradients": len(given)} | {name: len(entries) for name, entries in by_term.items()}
    if not given or len(set(counts.values())) > 1:
        raise ValueError(f"gradients and terms must have the same number of tensors, got {counts}")
    models = []
    for place, column in enumerate(zip(given, *by_term.values(), strict=True)):
        present = [entry for entry in column if entry is not None]
        if not present:
            raise ValueError(f"each parameter needs a gradient, from the trainer or from a term, but parameter {place} does not have one")
        models.append(present[0])
    return models


def compare_gradient(inputs: GradientInputs, *, precision: str | None = None, tolerance: float | None = None) -> EquationCheck:
    """Return the comparison of a gradient with its weighted terms; `inputs` are not divided by a scale yet."""
    weighted = [inputs.weight(name) * gradient for name, gradient in inputs.terms.items()]
    scale = gradient_scale(inputs.claimed, weighted, inputs.numels)
    scaled = replace(
        inputs,
        claimed=inputs.claimed / scale,
        terms={name: gradient / scale for name, gradient in inputs.terms.items()},
        previous=None if inputs.previous is None else inputs.previous / scale,
        weights=None if inputs.weights is None else inputs.weights / scale,
        scale=scale,
    )
    return distinguished(compare(GRADIENT, scaled, scaled.claimed, precision=precision, tolerance=tolerance))


def same_gradient(claimed: Tensor, total: Tensor, numels: Sequence[int]) -> float:
    """Return the largest error of a gradient [d], relative to the largest entry of the same parameter."""
    if torch.equal(claimed, total):
        return 0.0
    scale = gradient_scale(claimed, [total], numels)
    return float(((claimed - total) / scale).abs().max())


def _values(tensors: Tensors) -> list[Tensor | None]:
    return list(tensors.values()) if isinstance(tensors, Mapping) else list(tensors)


def _entries(tensors: Tensors) -> list[Tensor | None]:
    """The gradients; the `.grad` of each parameter that was passed."""
    entries = [entry.grad if isinstance(entry, torch.nn.Parameter) else entry for entry in _values(tensors)]
    return [None if entry is None else as_floats([entry])[0] for entry in entries]
