"""Equations of PPO that the numbers of a run are compared with, and the alternatives that may explain a difference.

An `Equation` is a module constant beside the function that checks it (`metrics.integrity`). Alarms and views read names and sentences from
here, without torch, as they do of metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from esper_telemetry.core.catalogue import declaring_modules

EQUATION_KEY: Final = "integrity/equation/"
"""Beginning of the keys of equations and of the hypotheses that explain a difference."""

FITTED_KEY: Final = "integrity/fitted/"
"""Beginning of the keys of fitted parameters."""

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


@dataclass(frozen=True, slots=True)
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

    def tolerance_at(self, precision: str | None) -> float:
        """Return the largest relative error that rounding explains; that of single precision where the precision is unknown."""
        return self.tolerance * TOLERANCES.get(precision or "fp32", TOLERANCES["fp32"])

    def label(self, hypothesis: Hypothesis | None = None) -> str:
        """Return the last segment of the key of this equation, or of one of its hypotheses."""
        return self.name if hypothesis is None else f"{self.name}_{hypothesis.name}"

    def sentence(self, error: float, explanations: Sequence[str] = ()) -> str:
        """Return a difference in one clause; `explanations` are noun phrases of the hypotheses that give the numbers."""
        if not explanations:
            return f"{self.quantity} differ from {self.equation} by {error:.2g} of the largest number, and no known mistake explains it"
        return f"{self.quantity} equal {' or '.join(explanations)}, and differ from {self.equation} by {error:.2g} of the largest number"

    def explanations(self, values: Mapping[str, float]) -> tuple[Hypothesis, ...]:
        """Return the hypotheses that explained the numbers of a record, by its values."""
        return tuple([one for one in self.hypotheses if EQUATION_KEY + self.label(one) in values])


@lru_cache(maxsize=1)
def equations() -> dict[str, Equation]:
    """Return all declared equations by name, in the order of their modules."""
    values = [value for module in declaring_modules() for value in vars(module).values() if isinstance(value, Equation)]
    return {equation.name: equation for equation in values}
