"""Equations of PPO that the numbers of a run are compared with, and the alternatives that may explain a difference.

An `Equation` is a module constant in the file of the function that checks it. Alarms and views read its name and sentences without torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, Final, NamedTuple

from esper_telemetry.core.facts import Facts, require_precision
from esper_telemetry.core.metric import declaring_modules

EQUATION_KEY: Final = "integrity/equation/"
"""Prefix of the keys of equations and of the hypotheses that explain a difference."""

FITTED_KEY: Final = "integrity/fitted/"
"""Prefix of the keys of fitted parameters."""

TOLERANCE_KEY: Final = "integrity/equation_tolerance/"
"""Prefix of the keys of tolerances that differ from the tolerance for single precision."""

MAX_EXPLANATIONS: Final = 3
"""Number of hypotheses that a sentence names; a record has the keys of all of them."""

SMALLEST_FITTED: Final = 1e-6
"""Magnitude below which a fitted parameter is printed as 0, because fits to single precision round at this size."""

TOLERANCES: Final[Mapping[str, float]] = {"fp32": 1e-4, "tf32": 1e-2, "bf16": 5e-2, "fp16": 2e-2}
"""Largest relative error that rounding explains, by the precision of the trainer's arithmetic."""


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """An equation that a known mistake, or a published variant, computes instead of the reference.

    Attributes:
        name: segment of a key, unique within its equation.
        says: noun phrase that continues "the advantages equal ": "GAE that ignores the ends of episodes".
        equation: as in a paper.
        compute: (inputs of the check) -> the predicted values, or several candidates, of which the closest counts; None if it does not
            apply to these inputs.
        fit: (inputs of the check, numbers of the run) -> (fitted parameter, predicted values), or None. The fit uses every second row;
            the comparison uses the other rows. Tried only if no hypothesis without a parameter explains the numbers.
        parameter: name of the fitted parameter, such as "gamma".
        variant: published and correct; a record names it, but it does not raise an alarm.
        source: paper, code or bug report; "program: NAME" if one of our test programs shows it; empty if `Equation.shown_by` does.
        advice: what to change.
        normalized_fit: `fit` for advantages that are normalised over all rows.
        exact: the multiples of `Equation.multiples` are not tried.
        needs: attribute of the inputs; the hypothesis does not apply if it is None, 0 or empty.
        gradient: name of the same mistake in the equation of the gradient.
        doubtful_without: what the program must show in addition, because the same numbers may have another reason.
        of: subject that a check asks for: a setting, units, the memory, sums of rewards, or a part of the total loss that is included.
        hides: names of other hypotheses of the same equation that explain the same numbers by chance.
        unknown_row: the columns lack the number of one row.
    """

    name: str
    says: str
    equation: str = ""
    compute: Callable[[Any], Any] | None = None
    fit: Callable[[Any, Any], Any] | None = None
    parameter: str = ""
    variant: bool = False
    source: str = ""
    advice: str = ""
    normalized_fit: Callable[[Any, Any], Any] | None = None
    exact: bool = False
    needs: str = ""
    gradient: str = ""
    doubtful_without: str = ""
    of: str = ""
    hides: tuple[str, ...] = ()
    unknown_row: bool = False

    def predicts(self, equation: str, compute: Callable[[Any], Any] | None = None) -> Hypothesis:
        """Return the hypothesis with its equation and, if there is one, the function that computes it."""
        return replace(self, equation=equation, compute=compute)

    def fits(
        self, equation: str, parameter: str, fit: Callable[[Any, Any], Any], normalized: Callable[[Any, Any], Any] | None = None
    ) -> Hypothesis:
        """Return the hypothesis with an equation that has a fitted parameter."""
        return replace(self, equation=equation, parameter=parameter, fit=fit, normalized_fit=normalized)

    def given(self, **facts: Any) -> Hypothesis:
        """Return the hypothesis with other fields, such as `needs` and `gradient`."""
        return replace(self, **facts)

    def advises(self, advice: str, *, source: str = "") -> Hypothesis:
        """Return the hypothesis with advice on what to change."""
        return replace(self, advice=advice, source=source or self.source)

    def cites(self, source: str) -> Hypothesis:
        """Return the hypothesis with its source."""
        return replace(self, source=source)

    @property
    def citation(self) -> str:
        """The source; empty if it is one of our test programs."""
        return "" if self.source.startswith("program: ") else self.source

    def phrase(self, fitted: float | None = None) -> str:
        """Return the hypothesis as a noun phrase, with its fitted parameter."""
        if fitted is None:
            return self.says
        return f"{self.says} {self.parameter} = {0.0 if abs(fitted) < SMALLEST_FITTED else fitted:.6g}"


def mistake(name: str, says: str) -> Hypothesis:
    """Return a hypothesis that is a mistake. Its methods return copies with more fields set."""
    return Hypothesis(name, says)


def variant(name: str, says: str) -> Hypothesis:
    """Return a hypothesis that is published and correct."""
    return Hypothesis(name, says, variant=True)


@dataclass(frozen=True, slots=True, eq=False)
class Equation:
    """A quantity that PPO computes, its reference equation, and its hypotheses.

    Attributes:
        name: segment of a key.
        quantity: plural noun phrase, "the advantages".
        equation: as in a paper.
        compute: (inputs of the check) -> values, float64.
        hypotheses: most likely first.
        source: paper.
        inputs: what a trainer must show so that the equation can be checked, as a noun phrase.
        check: public function that checks numbers of the user's own loop; empty if there is none.
        shown_by: module in tests/ that names, and shows, each hypothesis without a source.
        tolerance: factor applied to `TOLERANCES`.
        advice: what to look at if no hypothesis explains a difference.
        multiples: (inputs) -> factors that programs may apply to the prediction of a hypothesis.
        over_run: compared over all updates so far, so that the last comparison has the most data.
        rank: order among causes. If several equations differ, the smallest rank is named first.
    """

    name: str
    quantity: str
    equation: str
    compute: Callable[[Any], Any]
    hypotheses: tuple[Hypothesis, ...]
    source: str
    inputs: str
    check: str = ""
    shown_by: str = ""
    tolerance: float = 1.0
    advice: str = ""
    rank: int = 50
    multiples: Callable[[Any], Sequence[float]] | None = None
    over_run: bool = False

    def __contains__(self, name: object) -> bool:
        return any(one.name == name for one in self.hypotheses)

    def __getitem__(self, name: str) -> Hypothesis:
        """Return the hypothesis of that name."""
        return next(one for one in self.hypotheses if one.name == name)

    def tolerance_at(self, precision: str | None) -> float:
        """Return the largest relative error that rounding explains, in single precision for None; raise ValueError for others."""
        return self.tolerance * TOLERANCES[require_precision("precision", precision or "fp32")]

    def healthy(self, precision: str | None) -> str:
        """Return the errors that rounding explains, in words."""
        return f"<= {self.tolerance_at(precision):.2g}"

    def size(self, error: float) -> str:
        """Return an error as a table of errors shows it."""
        return f"{error:.1e}"

    def label(self, hypothesis: Hypothesis | None = None) -> str:
        """Return the last segment of the key of this equation, or of one of its hypotheses."""
        return self.name if hypothesis is None else f"{self.name}_{hypothesis.name}"

    def sentence(self, error: float, explanations: Sequence[str] = ()) -> str:
        """Return a difference in one clause; `explanations` are noun phrases for the hypotheses that reproduce the numbers."""
        size = f"by {100 * error:.3g} % of the largest number"
        if not explanations:
            return f"{self.quantity} differ from their reference equation {size}, and no known mistake explains it"
        return f"{self.quantity} equal {alternatives(explanations)}, and differ from their reference equation {size}"

    def explanations(self, values: Mapping[str, float]) -> tuple[Hypothesis, ...]:
        """Return the hypotheses that explained the numbers of a record, given its values."""
        return tuple([one for one, key, _ in _keys_of(self).explanations if key in values])


@lru_cache(maxsize=1)
def equations() -> dict[str, Equation]:
    """Return all declared equations by name, in the order of their modules."""
    values = [value for module in declaring_modules() for value in vars(module).values() if isinstance(value, Equation)]
    return {equation.name: equation for equation in values}


def alternatives(phrases: Sequence[str]) -> str:
    """Return phrases joined by "or"; if there are many, the first ones and a count of the rest."""
    named, others = phrases[:MAX_EXPLANATIONS], len(phrases) - MAX_EXPLANATIONS
    return " or ".join([*named, f"{others} other{'s' * (others > 1)}"] if others > 0 else named)


class Explanation(NamedTuple):
    """A hypothesis that reproduces the trainer's numbers, with its relative error and its fitted parameter."""

    hypothesis: Hypothesis
    error: float = math.nan
    fitted: float | None = None

    @property
    def text(self) -> str:
        """The hypothesis in words, with its parameter."""
        return self.hypothesis.phrase(self.fitted)


@dataclass(frozen=True, slots=True)
class EquationResult:
    """The comparison of some numbers with their reference equation, measured or read from a record.

    Attributes:
        equation: the reference.
        error: relative; None if the equation could not be checked.
        tolerance: largest error that rounding explains.
        explanations: hypotheses that reproduce the numbers, if the reference does not.
        reason: why the equation could not be checked, as a clause.
    """

    equation: Equation
    error: float | None
    tolerance: float
    explanations: tuple[Explanation, ...] = ()
    reason: str = ""

    @property
    def hypotheses(self) -> tuple[Hypothesis, ...]:
        """The hypotheses of the explanations."""
        return tuple([one.hypothesis for one in self.explanations])

    @property
    def fitted(self) -> Mapping[str, float]:
        """Fitted parameters by the names of hypotheses."""
        return {one.hypothesis.name: one.fitted for one in self.explanations if one.fitted is not None}

    @property
    def matches(self) -> bool:
        """True if the numbers equal the reference, or nothing could be checked."""
        return self.error is None or self.error <= self.tolerance

    @property
    def explained(self) -> bool:
        """True if the numbers equal the reference, or a hypothesis reproduces them."""
        return self.matches or bool(self.explanations)

    @property
    def holds(self) -> bool:
        """True if the numbers equal the reference or a published variant, or nothing could be checked."""
        return self.matches or any(one.variant for one in self.hypotheses)

    @property
    def sentence(self) -> str:
        """The difference in one clause."""
        return self.equation.sentence(self.error or 0.0, [one.text for one in self.explanations])

    @property
    def advice(self) -> str:
        """Advice of the first hypothesis that has any."""
        return next((one.advice for one in self.hypotheses if one.advice), self.equation.advice)


class EquationKeys(NamedTuple):
    """Keys of an equation in a record: its error and tolerance, and the error and the parameter of each hypothesis."""

    error: str
    tolerance: str
    explanations: tuple[tuple[Hypothesis, str, str], ...]


@cache
def _keys_of(equation: Equation) -> EquationKeys:
    """Return the keys of an equation. Cached, because building them for each record took half of the time of a report."""
    labels = [(one, equation.label(one)) for one in equation.hypotheses]
    return EquationKeys(
        EQUATION_KEY + equation.name,
        TOLERANCE_KEY + equation.name,
        tuple([(one, EQUATION_KEY + label, FITTED_KEY + label) for one, label in labels]),
    )


@cache
def _ranked(declared: tuple[Equation, ...], precision: str | None) -> tuple[tuple[Equation, EquationKeys, float], ...]:
    """Return the equations, causes before effects, with their keys and tolerances."""
    ordered = sorted(declared, key=lambda equation: equation.rank)
    return tuple([(equation, _keys_of(equation), equation.tolerance_at(precision)) for equation in ordered])


def equation_results(values: Mapping[str, float], facts: Facts, factor: float = 1.0) -> list[EquationResult]:
    """Return the results of the equations that a record has, causes before effects.

    Args:
        values: of the record.
        facts: of the run.
        factor: applied to the tolerances.
    """
    results = []
    for equation, keys, tolerance in _ranked((*equations().values(),), facts.precision):
        error = values.get(keys.error)
        if error is not None:
            explained = [Explanation(one, values[key], values.get(fitted)) for one, key, fitted in keys.explanations if key in values]
            allowed = factor * max(tolerance, values.get(keys.tolerance, 0.0))
            results.append(EquationResult(equation, error, allowed, tuple(explained)))
    return results
