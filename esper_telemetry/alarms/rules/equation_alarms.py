"""Alarms about numbers that differ from their equation, and about actions that were not drawn from the policy.

The equation `actions` tests the actions of one rollout. For small rollouts, and for policies that are almost uniform, a second alarm adds
up many of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from esper_telemetry.alarms.alarm_bounds import above, count
from esper_telemetry.alarms.rule import WARNING, Finding, View, alarm
from esper_telemetry.core.messages import capitalized, number
from esper_telemetry.equations.equation import EQUATION_KEY, Equation, EquationResult, equation_results, equations
from esper_telemetry.equations.schedules import RateHistory

EQUATION_FACTOR = above("equation_factor", 1.0, "times the tolerances of the compute precision, for integrity/equation")
UNEXPLAINED = count("equation_unexplained", 2.0, "checks in a row that differ without an explanation, for integrity/equation")
EQUATION: Final = "integrity/equation"  # type of the alarm
RATE_KEY: Final = "opt/lr"
MAX_OTHERS: Final = 3  # other quantities that the sentence names


@dataclass(slots=True)
class EquationJudge:
    """Equations that do not hold, as one finding: the most likely cause with its advice, and the names of the others.

    A published variant is not a mistake. An equation that this update does not check keeps its state.

    Attributes:
        differences: latest results that differ, by the name of the equation.
        streaks: checks in a row that differ, by the name of the equation.
        rates: learning rates so far.
    """

    differences: dict[str, EquationResult] = field(default_factory=dict)
    streaks: dict[str, int] = field(default_factory=dict)
    rates: RateHistory | None = None

    @property
    def holding(self) -> frozenset[str]:
        """Names of the equations that held in their last check."""
        return frozenset(name for name, differences in self.streaks.items() if differences == 0)

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
        enough = view.limits[UNEXPLAINED]
        certain = [one for name, one in self.differences.items() if one.explanations or self.streaks[name] >= enough]
        # an explained difference says what to change, so it comes first
        ordered = sorted(certain, key=lambda result: (not result.explanations, result.equation.rank))
        if ordered:
            cause, *others = ordered
            severity, key = 1.0 if cause.explanations else WARNING, _key(cause.equation)
            finding = Finding(severity, key, cause.error, cause.tolerance, claim=bool(cause.explanations))
            advice = (lambda: f"{cause.advice.rstrip('.')}.") if cause.advice else None
            yield finding.with_advice(advice).with_text(lambda: cause.sentence + _others(others))
        elif results:
            yield Finding(0.0, _key(results[0].equation))


def _key(equation: Equation) -> str:
    """Return the key that shows an equation; schedules are shown by the learning rate."""
    return RATE_KEY if equation.over_run else EQUATION_KEY + equation.name


def _others(others: Sequence[EquationResult]) -> str:
    """Return a clause about the other equations that differ."""
    names = [result.equation.quantity for result in others[:MAX_OTHERS]]
    if len(others) > MAX_OTHERS:
        names.append(f"{len(others) - MAX_OTHERS} more")
    *first, last = names or [""]
    return f"; {', '.join(first)}{' and ' if first else ''}{last} differ too" if names else ""


REFUTED_BY: Final[Mapping[str, tuple[str, ...]]] = {
    "the sign of the policy loss": ("policy_loss",),
    "that each advantage belongs to its action": ("minibatches", "normalized_advantages"),
    "the sign and the order of advantages": ("advantages", "normalized_advantages"),
    "the shape of the ratios": ("policy_loss",),
    "the sign and the targets of the critic's loss": ("value_loss",),
    "the order in which returns are computed": ("returns",),
    "how returns are bootstrapped": ("advantages", "returns"),
    "that the log-probabilities require gradients": ("gradient",),
}
"""Checks that advice recommends, and the equations that make each of them pointless if all of them hold."""


def sensible_advice(advice: str, holding: Set[str]) -> str:
    """Return advice without the clauses that `holding`, the names of the equations that hold, refute."""
    kept, refuting = list[str](), dict[str, None]()
    for clause in advice.rstrip(".").split("; "):
        names = next((names for check, names in REFUTED_BY.items() if check in clause and holding >= set(names)), ())
        refuting.update(dict.fromkeys(names))
        kept += [] if names else [clause]
    if not refuting:
        return advice
    *first, last = (equations()[name].quantity for name in refuting)
    match = f"{', '.join(first)}{' and ' if first else ''}{last} match their equation{'s' if first else ''}"
    return f"{capitalized('; '.join(kept))}. {capitalized(match)}." if kept else f"{capitalized(match)}: look elsewhere."


EXCESS: Final = "integrity/actions/"
VARIANCE: Final = "integrity/actions_variance/"
FALSE_ALARM_RATE: Final = 1e-7  # probability that a test ever raises an alarm in a correct run of any length
FACTOR = above("actions_factor", 1.0, "times the bound on the sums of integrity/actions over a run")

PHRASES: Final = {
    "likelihood": ("more likely than samples of the policy", "less likely than samples of the policy"),
    "mode": ("the policy's likeliest choice too often", "the policy's likeliest choice too rarely"),
    "spread": tuple(f"{far} the mean than the standard deviation implies" for far in ("farther from", "closer to")),
    "repeat": ("too often equal to the previous step's", "too rarely equal to the previous step's"),
    "neighbours": ("too often equal to the next environment's", "too rarely equal to the next environment's"),
}
"""Excess of each test in words, above and below 0."""
EXCESS_KEYS: Final = tuple(EXCESS + test for test in PHRASES)

ACTIONS: Final = "actions"  # name of the equation of the actions of one rollout
ON_PURPOSE: Final = ("repeat",)  # tests that intentionally correlated noise fails, if actions are continuous


def sum_bound(variance: float) -> float:
    """Return the bound that the sum of a martingale ever exceeds with probability at most `FALSE_ALARM_RATE`.

    Freedman's inequality holds while the variance is below a limit. Limits double, and each gets a share of the rate.
    """
    epoch = max(0, math.ceil(math.log2(variance))) if variance > 0 else 0
    chance = math.log(2 * (epoch + 1) * (epoch + 2) / FALSE_ALARM_RATE)
    # x² = 2 (v + x / 3) chance
    third = chance / 3
    return third + math.sqrt(third**2 + 2 * 2.0**epoch * chance)


class ActionSum(NamedTuple):
    """The excess of a test, summed over the sampled updates, and the bound that chance explains."""

    test: str
    total: float
    bound: float

    @property
    def exceeds(self) -> bool:
        """True if chance does not explain the excess."""
        return abs(self.total) > self.bound

    def __str__(self) -> str:
        phrase = PHRASES[self.test][self.total < 0]
        return (
            f"{phrase} (excess, summed over the sampled updates: {number(abs(self.total))}; chance explains at most {number(self.bound)})"
        )


@dataclass(slots=True)
class CalibrationJudge:
    """Sums of each test over the run.

    Attributes:
        sums: excess and variance so far, by test.
    """

    sums: dict[str, tuple[float, float]] = field(default_factory=dict)

    def __call__(self, view: View) -> Iterator[Finding]:
        worst = self.add(view.values, factor=view.limits[FACTOR])
        if worst is not None:
            finding = Finding(1.0 if worst.exceeds else 0.0, EXCESS + worst.test, abs(worst.total), worst.bound)
            yield finding.says("the actions are not samples of the policy: they have been {}", worst.__str__)

    def add(self, values: Mapping[str, float], *, factor: float = FACTOR.default) -> ActionSum | None:
        """Add the values of a record; return the largest sum relative to its bound, if any."""
        if values.get(EQUATION_KEY + ACTIONS, 0.0) > 1:  # then that equation explains these actions
            return None
        continuous, worst = EXCESS + "spread" in values, list[ActionSum]()
        for test in PHRASES:
            excess = values.get(EXCESS + test)
            if excess is None or (continuous and test in ON_PURPOSE):
                continue
            before, variance = self.sums.get(test, (0.0, 0.0))
            total, spread = before + excess, variance + max(0.0, values.get(VARIANCE + test, 0.0))
            self.sums[test] = total, spread
            worst.append(ActionSum(test, total, factor * sum_bound(spread)))
        return max(worst, key=lambda one: abs(one.total) / one.bound, default=None)


RULES = (
    alarm(EQUATION, rank=25, hard=True, certain=True, sampled=True, optional=True, n_off=1)
    .reads("integrity/equation/{equation}", "integrity/equation_tolerance/{equation}", "integrity/fitted/{equation}")
    .reads(RATE_KEY)
    .says(
        "Numbers of the trainer differ from the equation that defines them.",
        "Compare the trainer's code for these numbers with the reference; `esper-telemetry check RUN` shows all equations.",
        "recomputed in float64; tolerances by precision, from healthy runs",
    )
    .shows("integrity/equation/*", "integrity/fitted/*")
    .judged(EquationJudge(), EQUATION_FACTOR, UNEXPLAINED),
    alarm("integrity/actions", rank=26, hard=True, certain=True, sampled=True, optional=True, n_off=1)
    .reads("integrity/actions/{test}", "integrity/actions_variance/{test}")
    .needs(required=())
    .says(
        "The actions were not drawn from the stored distributions.",
        "Execute the actions that the policy samples, in the same step and environment, and store them unchanged.",
        "Freedman 1975, theorem 1.6, at a rate of 1e-7 over a whole run",
    )
    .shows("integrity/actions/*", "integrity/actions_variance/*", "integrity/equation/actions*")
    .judged(CalibrationJudge(), FACTOR),
)
