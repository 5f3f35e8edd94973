"""Equations of PPO that the numbers of a run are compared with, and the alternatives that may explain a difference.

An `Equation` is a module constant beside the function that checks it (`metrics.integrity`). Alarms and views read names and sentences from
here, without torch, as they do of metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Final, NamedTuple

from esper_telemetry.core.catalogue import declaring_modules
from esper_telemetry.core.facts import Facts

EQUATION_KEY: Final = "integrity/equation/"
"""Beginning of the keys of equations and of the hypotheses that explain a difference."""

FITTED_KEY: Final = "integrity/fitted/"
"""Beginning of the keys of fitted parameters."""

TOLERANCE_KEY: Final = "integrity/equation_tolerance/"
"""Beginning of the keys of tolerances that are not those of single precision."""

MAX_EXPLANATIONS: Final = 3
"""Hypotheses that a sentence names; the keys of a record have all."""

TOLERANCES: Final[Mapping[str, float]] = {"fp32": 1e-4, "tf32": 1e-2, "bf16": 5e-2, "fp16": 2e-2}
"""Largest relative error that rounding explains, by the precision of the trainer's arithmetic."""


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """An equation that a known mistake, or a published variant, computes in place of the reference.

    Attributes:
        name: segment of a key, unique in its equation.
        says: noun phrase that continues "the advantages equal ": "GAE that ignores the ends of episodes".
        equation: as in a paper.
        compute: (inputs of the check) -> the values that it predicts; None where it does not apply to these inputs.
        fit: (inputs of the check, numbers of the run) -> (fitted parameter, predicted values), or None. It uses every second row, and the
            comparison takes the others. Tried only where no hypothesis without a parameter explains the numbers.
        parameter: the fitted one, such as "gamma".
        variant: published and correct: it is named and raises no alarm.
        source: paper, code or bug report.
        advice: what to change.
    """

    name: str
    says: str
    equation: str
    compute: Callable[[Any], Any] | None = None
    fit: Callable[[Any, Any], Any] | None = None
    parameter: str = ""
    variant: bool = False
    source: str = ""
    advice: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Equation:
    """A quantity that PPO computes, its reference equation, and its hypotheses.

    Attributes:
        name: segment of a key.
        quantity: plural noun phrase, "the advantages".
        equation: as in a paper.
        compute: (inputs of the check) -> values, float64.
        hypotheses: the likeliest first.
        source: paper.
        inputs: what a trainer must show so that the equation can be checked, as a noun phrase.
        tolerance: factor of `TOLERANCES`.
        advice: what to look at where no hypothesis explains a difference.
        rank: place among causes, small first: of several equations that differ, the one with the smallest rank is named first.
    """

    name: str
    quantity: str
    equation: str
    compute: Callable[[Any], Any]
    hypotheses: tuple[Hypothesis, ...]
    source: str
    inputs: str
    tolerance: float = 1.0
    advice: str = ""
    rank: int = 50

    def tolerance_at(self, precision: str | None) -> float:
        """Return the largest relative error that rounding explains; that of single precision where the precision is unknown."""
        return self.tolerance * TOLERANCES.get(precision or "fp32", TOLERANCES["fp32"])

    def label(self, hypothesis: Hypothesis | None = None) -> str:
        """Return the last segment of the key of this equation, or of one of its hypotheses."""
        return self.name if hypothesis is None else f"{self.name}_{hypothesis.name}"

    def sentence(self, error: float, explanations: Sequence[str] = ()) -> str:
        """Return a difference in one clause; `explanations` are noun phrases of the hypotheses that give the numbers."""
        size = f"by {100 * error:.3g} % of the largest number"
        if not explanations:
            return f"{self.quantity} differ from their reference equation {size}, and no known mistake explains it"
        return f"{self.quantity} equal {alternatives(explanations)}, and differ from their reference equation {size}"

    def explanations(self, values: Mapping[str, float]) -> tuple[Hypothesis, ...]:
        """Return the hypotheses that explained the numbers of a record, by its values."""
        return tuple([one for one, key in _keys_of(self).explanations if key in values])


@lru_cache(maxsize=1)
def equations() -> dict[str, Equation]:
    """Return all declared equations by name, in the order of their modules."""
    values = [value for module in declaring_modules() for value in vars(module).values() if isinstance(value, Equation)]
    return {equation.name: equation for equation in values}


def alternatives(phrases: Sequence[str]) -> str:
    """Return phrases joined by "or"; the first ones and the number of the others where there are many."""
    named, others = phrases[:MAX_EXPLANATIONS], len(phrases) - MAX_EXPLANATIONS
    return " or ".join([*named, f"{others} other{'s' * (others > 1)}"] if others > 0 else named)


class EquationResult(NamedTuple):
    """An equation in a record.

    Attributes:
        equation: the reference.
        error: relative.
        tolerance: largest error that counts as rounding.
        explanations: hypotheses that gave the numbers.
        fitted: parameters that were fitted, by the names of hypotheses.
    """

    equation: Equation
    error: float
    tolerance: float
    explanations: tuple[Hypothesis, ...]
    fitted: Mapping[str, float]

    @property
    def matches(self) -> bool:
        """True where the numbers equal the reference."""
        return self.error <= self.tolerance

    @property
    def holds(self) -> bool:
        """True where the numbers equal the reference, or a published variant."""
        return self.matches or any(one.variant for one in self.explanations)

    @property
    def sentence(self) -> str:
        """The difference in one clause."""
        phrases = [phrase(one, self.fitted.get(one.name)) for one in self.explanations]
        return self.equation.sentence(self.error, phrases)

    @property
    def advice(self) -> str:
        """Advice of the first hypothesis that gives any."""
        return next((one.advice for one in self.explanations if one.advice), self.equation.advice)


def phrase(hypothesis: Hypothesis, fitted: float | None) -> str:
    """Return a hypothesis as a noun phrase, with its fitted parameter."""
    return hypothesis.says if fitted is None else f"{hypothesis.says} {hypothesis.parameter} = {fitted:.6g}"


class EquationKeys(NamedTuple):
    """Keys of an equation in a record, and of its hypotheses."""

    error: str
    tolerance: str
    explanations: tuple[tuple[Hypothesis, str], ...]
    fitted: tuple[tuple[Hypothesis, str], ...]


@cache
def _keys_of(equation: Equation) -> EquationKeys:
    """Return the keys of an equation: to spell them for each record took half of the time of a report."""
    return EquationKeys(
        EQUATION_KEY + equation.name,
        TOLERANCE_KEY + equation.name,
        tuple([(one, EQUATION_KEY + equation.label(one)) for one in equation.hypotheses]),
        tuple([(one, FITTED_KEY + equation.label(one)) for one in equation.hypotheses]),
    )


def equation_results(values: Mapping[str, float], facts: Facts, factor: float = 1.0) -> list[EquationResult]:
    """Return the equations that a record has, causes before effects.

    Args:
        values: of the record.
        facts: of the run.
        factor: of the tolerances.
    """
    results = []
    for equation in equations().values():
        keys = _keys_of(equation)
        error = values.get(keys.error)
        if error is None:
            continue
        usual = equation.tolerance_at(facts.precision)
        results.append(
            EquationResult(
                equation,
                error,
                factor * max(usual, values.get(keys.tolerance, 0.0)),
                equation.explanations(values),
                {one.name: values[key] for one, key in keys.fitted if key in values},
            )
        )
    return sorted(results, key=lambda result: result.equation.rank)
