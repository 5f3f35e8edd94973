"""Numbers that differ from the equation that they are meant to follow, with the mistake that explains them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from esper_telemetry.alarms.rule import AlarmRule, Finding, View, above, count
from esper_telemetry.core.equations.equation import EQUATION_KEY, Equation, EquationResult, equation_results
from esper_telemetry.core.equations.schedule import SCHEDULES, RateHistory

EQUATION_FACTOR = above("equation_factor", 1.0, "times the tolerances of the compute precision, for integrity/equation")
UNEXPLAINED = count(
    "equation_unexplained", 2.0, "checks in a row that differ without an explanation, for integrity/equation"
)

RATE_KEY: Final = "opt/lr"

UNEXPLAINED_SEVERITY: Final = 0.5
"""Severity of a difference that no hypothesis explains: the trainer may compute a variant that is not known here."""

MAX_OTHERS: Final = 3
"""Other quantities that the sentence names."""


@dataclass(slots=True)
class EquationJudge:
    """Equations that do not hold, as one finding: the likeliest cause, with its advice, and the others by name.

    A published variant is no mistake. An equation that this update does not check stays as it was.

    Attributes:
        differences: latest results that differ, by the name of the equation.
        streaks: checks in a row that differ, likewise.
        rates: learning rates so far.
    """

    differences: dict[str, EquationResult] = field(default_factory=dict)
    streaks: dict[str, int] = field(default_factory=dict)
    rates: RateHistory | None = None

    def __call__(self, view: View) -> Iterator[Finding]:
        results = equation_results(view.values, view.facts, view.limits[EQUATION_FACTOR])
        self.rates = self.rates or RateHistory(view.facts)
        self.rates.add(view.env_step, view.get(RATE_KEY))
        schedules = self.rates.result()
        if schedules is not None:
            results.append(schedules)
        for result in results:
            name = result.equation.name
            self.streaks[name] = 0 if result.holds else self.streaks.get(name, 0) + 1
            if result.holds:
                self.differences.pop(name, None)
            else:
                self.differences[name] = result
        certain = [
            result
            for name, result in self.differences.items()
            if result.explanations or self.streaks[name] >= view.limits[UNEXPLAINED]
        ]
        # A difference that is explained says what to change: it comes before those that are not.
        ordered = sorted(certain, key=lambda result: (not result.explanations, result.equation.rank))
        if ordered:
            yield _finding(ordered)
        elif results:
            yield Finding(0.0, _key(results[0].equation))


def _finding(differences: Sequence[EquationResult]) -> Finding:
    cause, *others = differences
    explained = bool(cause.explanations)
    return Finding(
        1.0 if explained else UNEXPLAINED_SEVERITY,
        _key(cause.equation),
        cause.error,
        cause.tolerance,
        claim=explained,
        text=lambda: cause.sentence + _others(others),
        advice=(lambda: f"{cause.advice.rstrip('.')}.") if cause.advice else None,
    )


def _key(equation: Equation) -> str:
    """Return the key that shows an equation: schedules are compared by the rates of all records."""
    return RATE_KEY if equation.name == SCHEDULES else EQUATION_KEY + equation.name


def _others(others: Sequence[EquationResult]) -> str:
    """Return a clause about the equations that differ too."""
    names = [result.equation.quantity for result in others[:MAX_OTHERS]]
    if len(others) > MAX_OTHERS:
        names.append(f"{len(others) - MAX_OTHERS} more")
    *first, last = names or [""]
    return f"; {', '.join(first)}{' and ' if first else ''}{last} differ too" if names else ""


RULES = (
    AlarmRule(
        type="integrity/equation",
        inputs=(
            "integrity/equation/{equation}",
            "integrity/equation_tolerance/{equation}",
            "integrity/fitted/{equation}",
            RATE_KEY,
        ),
        meaning="Numbers of the trainer differ from the equation that they are meant to follow.",
        action="Compare the lines of the trainer that compute them with the reference; `esper-telemetry check RUN` shows all equations.",
        judge=EquationJudge(),
        bounds=(EQUATION_FACTOR, UNEXPLAINED),
        source="recomputed in float64; tolerances by precision, from healthy runs",
        rank=25,
        hard=True,
        n_off=1,
        certain=True,
        sampled=True,
        optional=True,
        evidence=("integrity/equation/*", "integrity/fitted/*"),
    ),
)
