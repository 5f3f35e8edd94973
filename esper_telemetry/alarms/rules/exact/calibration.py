"""Actions that were not drawn from the policy, by the sums of their tests over a run.

A test of one rollout is part of the equation `actions`. Small rollouts, and policies that are nearly indifferent, need the sum of many.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from esper_telemetry.alarms.rule import AlarmRule, Finding, View, above, number
from esper_telemetry.core.equations.equation import EQUATION_KEY

EXCESS: Final = "integrity/actions/"
VARIANCE: Final = "integrity/actions_variance/"

FALSE_ALARM_RATE: Final = 1e-7
"""Probability that a test ever raises an alarm in a correct run, however long."""

FACTOR = above("actions_factor", 1.0, "times the bound on the sums of integrity/actions over a run")

PHRASES: Final = {
    "likelihood": ("likelier than draws of the policy", "unlikelier than draws of the policy"),
    "mode": ("the policy's likeliest choice too often", "the policy's likeliest choice too rarely"),
    "spread": (
        "farther from the mean than the standard deviation says",
        "closer to the mean than the standard deviation says",
    ),
    "repeat": ("too often like those of the step before", "too rarely like those of the step before"),
    "neighbours": ("too often like those of the next environment", "too rarely like those of the next environment"),
}
"""Excess of each test in words, above and below 0."""

ON_PURPOSE: Final = ("repeat",)
"""Tests that noise which is correlated on purpose fails, where actions are real numbers."""


def sum_bound(variance: float) -> float:
    """Return the size that the sum of a martingale exceeds with probability `FALSE_ALARM_RATE` at most, at any time of a run.

    Freedman's inequality holds for all times at which the variance is below a limit; limits double, and each has its share of the rate.
    """
    epoch = max(0, math.ceil(math.log2(variance))) if variance > 0 else 0
    chance = math.log(2 * (epoch + 1) * (epoch + 2) / FALSE_ALARM_RATE)
    # x² = 2 (v + x / 3) chance
    third = chance / 3
    return third + math.sqrt(third**2 + 2 * 2.0**epoch * chance)


@dataclass(slots=True)
class CalibrationJudge:
    """Sums of each test over the run.

    Attributes:
        sums: excess and variance so far, by test.
    """

    sums: dict[str, tuple[float, float]] = field(default_factory=dict)

    def __call__(self, view: View) -> Iterator[Finding]:
        worst: tuple[float, str, float, float] | None = None
        continuous = view.get(EXCESS + "spread") is not None
        if (view.get(EQUATION_KEY + "actions") or 0.0) > 1:  # then that equation says what these actions are
            return
        for test, _, excess in view.labelled(EXCESS, ""):
            if test not in PHRASES or (continuous and test in ON_PURPOSE):
                continue
            before, variance = self.sums.get(test, (0.0, 0.0))
            total, spread = before + excess, variance + max(0.0, view.get(VARIANCE + test) or 0.0)
            self.sums[test] = total, spread
            bound = view.limits[FACTOR] * sum_bound(spread)
            if worst is None or abs(total) / bound > worst[0]:
                worst = abs(total) / bound, test, total, bound
        if worst is not None:
            yield _finding(*worst)


def _finding(size: float, test: str, total: float, bound: float) -> Finding:
    phrase = PHRASES[test][total < 0]
    return Finding(
        1.0 if size > 1 else 0.0,
        EXCESS + test,
        abs(total),
        bound,
        text=lambda: (
            f"the actions are {phrase}: their excess, summed over the sampled updates, is {number(abs(total))} "
            f"where chance explains {number(bound)}"
        ),
    )


RULES = (
    AlarmRule(
        type="integrity/actions",
        inputs=("integrity/actions/{test}", "integrity/actions_variance/{test}"),
        meaning="The actions were not drawn from the distributions that are stored beside them.",
        action="Take the actions from the policy's own draws, in the same step and environment, and store them as they were drawn.",
        judge=CalibrationJudge(),
        bounds=(FACTOR,),
        source="Freedman 1975, theorem 1.6, at a rate of 1e-7 over a whole run",
        rank=26,
        required=(),
        hard=True,
        n_off=1,
        certain=True,
        sampled=True,
        optional=True,
        evidence=("integrity/actions/*", "integrity/actions_variance/*", "integrity/equation/actions*"),
    ),
)
