"""Numbers that differ from the equation that they are meant to follow, with the mistake that explains them."""

from __future__ import annotations

from collections.abc import Iterator

from esper_telemetry.alarms.rule import AlarmRule, Finding, View, above, number
from esper_telemetry.core.equation import EQUATION_KEY, FITTED_KEY, equations

EQUATION_FACTOR = above("equation_factor", 1.0, "times the tolerances of the compute precision, for integrity/equation")


def equation_errors(view: View) -> Iterator[Finding]:
    """Equations that do not hold. A published variant is no mistake."""
    declared = equations()
    for name, key, error in view.labelled(EQUATION_KEY, ""):
        equation = declared.get(name)
        if equation is None:  # a hypothesis
            continue
        bound = view.limits[EQUATION_FACTOR] * equation.tolerance_at(view.facts.get("precision"))
        explanations = equation.explanations(view.values)
        wrong = error > bound and not any(one.variant for one in explanations)
        severity = (1.0 if explanations else 0.5) if wrong else 0.0
        phrases = [one.says + _fitted(view, equation.label(one), one.parameter) for one in explanations]
        advice = next((f". {one.advice.rstrip('.')}" for one in explanations if one.advice), "")
        clause = equation.sentence(error, phrases) + advice
        yield Finding(severity, key, error, bound, instance=name).with_text(clause.__str__)


def _fitted(view: View, label: str, parameter: str) -> str:
    value = view.get(FITTED_KEY + label)
    return "" if value is None else f" {parameter} = {number(value)}"


RULES = (
    AlarmRule(
        type="integrity/equation",
        inputs=("integrity/equation/{equation}", "integrity/fitted/{equation}"),
        meaning="Numbers of the trainer differ from the equation that they are meant to follow.",
        action="Compare the named lines of the trainer with the equation; `esper-telemetry check RUN` lists all equations.",
        judge=equation_errors,
        bounds=(EQUATION_FACTOR,),
        source="recomputed in float64; tolerances by precision, from healthy runs",
        rank=25,
        hard=True,
        claim=True,
        n_off=1,
        certain=True,
        sampled=True,
        optional=True,
        evidence=("integrity/equation/*", "integrity/fitted/*"),
    ),
)
