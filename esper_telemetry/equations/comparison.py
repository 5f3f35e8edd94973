"""Compare a trainer's numbers with a reference equation, and search for the hypothesis that explains a difference.

Everything is recomputed in float64 on the device of the numbers. An error is the largest difference divided by the largest magnitude among
the numbers and their inputs. So rounding of values around 1000 does not fail a check of advantages around 0.01.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from esper_telemetry.core.group import MetricGroup, Postponed
from esper_telemetry.core.lazy import Tensor, torch
from esper_telemetry.core.metric import Metric, label, reports
from esper_telemetry.core.reduction import Last, Max
from esper_telemetry.equations.equation import Equation, EquationResult, Explanation, Hypothesis

TINY_SCALE = 1e-30
"""Smallest magnitude that an error is divided by, so that numbers that are all 0 compare as equal."""


MAX_EXPLAINED_SHARE = 0.2
"""Largest error of an explanation, relative to the reference's error: an unknown mistake with a small effect is close to both."""

MAX_ERROR_RATIO = 30.0
"""Largest error of an explanation, relative to the best one: if two hypotheses differ by more, the batch separates them."""

ROUNDING_ERROR = 2e-6
"""Error below which explanations count as equal, because single precision rounds at this size."""


@dataclass(frozen=True, slots=True)
class EquationErrors(MetricGroup):
    """Errors of an equation and of the hypotheses that explain it. Only rank 0 reports, because hypotheses may differ between ranks."""

    replicated = True

    equation: tuple[str, ...] = label()
    error: Max = reports(
        Metric.magnitude("integrity/equation/{equation}", 809, "error of an equation", unit="relative error", cost="sampled")
        .asks(
            "Do the trainer's numbers equal their reference equation? The names of an equation and of a mistake: that mistake explains "
            "the numbers."
        )
        .bounds(healthy="< 1e-4 in fp32", critical="above, unless a published variant explains it", source="recomputed in float64")
        .absent("the trainer does not show what the equation needs, or the update was not sampled")
    )


@dataclass(frozen=True, slots=True)
class FittedParameters(MetricGroup):
    """Parameters that were fitted to explain an equation."""

    replicated = True

    equation: tuple[str, ...] = label()
    value: Last = reports(
        Metric.quantity("integrity/fitted/{equation}", 810, "fitted parameter of an equation", unit="parameter", cost="sampled")
        .asks("With which value of the parameter does the equation give the trainer's numbers?")
        .absent("no equation needed a fit")
    )


@dataclass(frozen=True, slots=True)
class EquationTolerances(MetricGroup):
    """Tolerances that differ from the tolerance for single precision."""

    replicated = True

    equation: tuple[str, ...] = label()
    tolerance: Max = reports(
        Metric.magnitude("integrity/equation_tolerance/{equation}", 850, "tolerance of an equation", unit="relative error", cost="sampled")
        .asks("Up to which error do the trainer's numbers count as equal to the equation?")
        .absent("the tolerance for single precision applies")
    )


@dataclass(frozen=True, slots=True, eq=False)
class EquationCheck(EquationResult, Postponed):
    """The comparison of some numbers with their reference equation, as metrics of an update."""

    @property
    def text(self) -> str:
        """The result in one sentence."""
        if self.error is None:
            return f"{self.equation.quantity} could not be checked: {self.reason}"
        equal = f"{self.equation.quantity} equal their reference equation, to {self.error:.0e}"
        return equal if self.matches else self.sentence

    @property
    def details(self) -> str:
        """The result, the equations and the advice, each on its own line."""
        lines = [self.text, f"reference: {self.equation.equation} ({self.equation.source})"]
        if not self.matches:
            cited = [(one.equation, f" ({one.citation})" if one.citation else "") for one in self.hypotheses]
            lines += [f"equal to: {equation}{source}" for equation, source in cited]
        return "\n".join(lines if self.matches or not self.advice else [*lines, self.advice])

    def values(self) -> dict[str, float]:
        """Return this check's values, for tests and notebooks."""
        return {key: value for group in self for key, value in group.values().items()}

    @property
    def kind(self) -> Hashable:
        """The equation; all its checks in an update are joined."""
        return type(self), self.equation.name

    @classmethod
    def together(cls, measurements: Sequence[Self]) -> Iterable[MetricGroup]:
        """Return the errors of all checks of an equation, and of the hypotheses that explain each check that fails."""
        equation = measurements[0].equation
        failing = [check for check in measurements if not check.matches]
        common = _common(failing) or _common([check for check in failing if not check.holds])
        if all(check.error is None for check in measurements):
            return
        errors = [{one.hypothesis.name: one.error for one in check.explanations} for check in measurements]
        rows = [
            [torch.nan if check.error is None else check.error, *(own.get(one.name, torch.nan) for one in common)]
            for check, own in zip(measurements, errors, strict=True)
        ]
        labels = (equation.label(), *map(equation.label, common))
        yield EquationErrors(labels, Max(torch.tensor(rows, dtype=torch.float64)))
        if any(check.tolerance != equation.tolerance_at(None) for check in measurements):
            tolerances = [[check.tolerance] for check in measurements]
            yield EquationTolerances((equation.name,), Max(torch.tensor(tolerances, dtype=torch.float64)))
        last = failing[-1].explanations if failing else ()
        fitted = [one for one in last if one.fitted is not None and one.hypothesis in common]
        if fitted:
            numbers = torch.tensor([[one.fitted for one in fitted]] * len(measurements), dtype=torch.float64)
            yield FittedParameters(tuple(equation.label(one.hypothesis) for one in fitted), Last(numbers))


def _common(checks: Sequence[EquationCheck]) -> list[Hypothesis]:
    """Return the hypotheses that explain all of these checks."""
    names = [{one.name for one in check.hypotheses} for check in checks]
    common = set.intersection(*names) if names else set()
    return [one for one in checks[0].equation.hypotheses if one.name in common] if common else []


def explained(equation: Equation, name: str, *, error: float = 1.0, fitted: float | None = None) -> EquationCheck:
    """Return a failed check of an equation, explained by a named hypothesis that other evidence shows."""
    return EquationCheck(equation, error, equation.tolerance_at(None), (Explanation(equation[name], 0.0, fitted),))


def unchecked(equation: Equation, reason: str) -> EquationCheck:
    """Return the check of an equation whose inputs are missing; `reason` continues "could not be checked: "."""
    return EquationCheck(equation, None, equation.tolerance_at(None), reason=reason)


def compare(
    equation: Equation,
    inputs: Any,
    claimed: Tensor,
    *,
    magnitudes: Iterable[Tensor] = (),
    valid: Tensor | None = None,
    precision: str | None = None,
    tolerance: float | None = None,
) -> EquationCheck:
    """Compare numbers with the reference equation; if they differ, compare them with published variants, then with mistakes.

    Args:
        equation: its `compute`, and the `compute` of its hypotheses, take `inputs` and return values of the shape of `claimed`.
        inputs: a dataclass of the numbers that the equation reads.
        claimed: the trainer's numbers, any shape.
        magnitudes: input tensors whose magnitude determines the rounding of the result.
        valid: bool, of the shape of `claimed`; None if every entry counts.
        precision: of the trainer's arithmetic: fp32, tf32, bf16 or fp16.
        tolerance: largest relative error; by precision if it is None.
    """
    bound = equation.tolerance_at(precision) if tolerance is None else tolerance
    claimed = claimed.detach().double()
    scale = max([_largest(claimed, valid), *(_largest(x.detach().double(), None) for x in magnitudes)])

    def error_of(values: Tensor, counted: Tensor | None = valid) -> float:
        difference = (claimed - values).abs()
        error = _largest(difference, counted) / max(scale, _largest(values, counted), TINY_SCALE)
        return math.inf if math.isnan(error) else error

    if not math.isfinite(scale):
        return unchecked(equation, "some of the numbers are NaN or infinite")
    error = error_of(equation.compute(inputs))
    if not math.isfinite(error):
        return unchecked(equation, "the reference equation gives NaN or infinite numbers")
    if error <= bound:
        return EquationCheck(equation, error, bound)

    def applies(one: Hypothesis) -> bool:
        needed = getattr(inputs, one.needs) if one.needs else True
        return needed is not None and (isinstance(needed, Tensor) or bool(needed))

    def error_of_nearest(one: Hypothesis) -> float:
        """Error of the hypothesis, with its closest multiple; infinite if the hypothesis does not apply."""
        values = None if one.compute is None or not applies(one) else one.compute(inputs)
        if values is None:
            return math.inf
        candidates = [candidate for candidate in ([values] if isinstance(values, Tensor) else values) if candidate is not None]
        factors = (1.0,) if equation.multiples is None or one.exact else equation.multiples(inputs)
        return min([error_of(candidate if f == 1 else f * candidate) for candidate in candidates for f in factors], default=math.inf)

    def explanations_of(hypotheses: Iterable[Hypothesis]) -> list[Explanation]:
        errors = [Explanation(one, error_of_nearest(one)) for one in hypotheses]
        return [one for one in errors if one.error <= bound]

    explanations = explanations_of(one for one in equation.hypotheses if one.variant)
    if min([one.error for one in explanations], default=math.inf) > ROUNDING_ERROR:
        places = {one.name: place for place, one in enumerate(equation.hypotheses)}
        explanations += explanations_of(one for one in equation.hypotheses if not one.variant)
        explanations.sort(key=lambda one: places[one.hypothesis.name])
    if not explanations:
        for one in equation.hypotheses:
            result = None if one.fit is None or not applies(one) else one.fit(inputs, claimed)
            if result is not None and (candidate := error_of(result[1])) <= bound:
                explanations.append(Explanation(one, candidate, result[0]))
    return EquationCheck(equation, error, bound, tuple(explanations))


def distinguished(check: EquationCheck) -> EquationCheck:
    """Return the check with the closest explanations, provided that they are much closer to the numbers than the reference is."""
    best = min([one.error for one in check.explanations], default=0.0)
    if check.error is None or best > MAX_EXPLAINED_SHARE * check.error:
        return replace(check, explanations=())
    limit = max(ROUNDING_ERROR, MAX_ERROR_RATIO * best)
    return replace(check, explanations=tuple([one for one in check.explanations if one.error <= limit]))


def ranked(claimed: Tensor, numbers: Tensor) -> Tensor:
    """Return the numbers [N] in the order of the claimed numbers, which are returned if both hold the same numbers."""
    ranked = torch.empty_like(numbers)
    ranked[claimed.argsort()] = numbers.sort().values
    return ranked


def other_readings(shape: Sequence[int]) -> tuple[Callable[[Tensor], Tensor], ...]:
    """Return functions that read a column [T, B] of this shape as [B, T], and the reverse; none for one step or one environment."""
    steps, envs = shape
    return () if 1 in (steps, envs) else (lambda x: x.t().reshape(steps, envs), lambda x: x.reshape(envs, steps).t())


def _largest(values: Tensor, valid: Tensor | None) -> float:
    """Return the largest magnitude of the entries that count; infinity if one is not finite, 0 if none counts."""
    counted = values if valid is None else values[valid.expand_as(values)]
    largest = float(counted.abs().max()) if counted.numel() else 0.0
    return math.inf if math.isnan(largest) else largest
