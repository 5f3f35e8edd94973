"""The equations of a run as a table: they match, they differ with the mistake that explains it, or they could not be checked.

An equation is not traced if what it needs was sought in a program and not found there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from esper_telemetry.alarms.rules.equation_alarms import ACTIONS, EXCESS_KEYS, RATE_KEY, ActionSum, CalibrationJudge
from esper_telemetry.alarms.verdict.unusual import OBSERVE
from esper_telemetry.core.facts import Facts
from esper_telemetry.core.record import Record, RunInfo, judgeable
from esper_telemetry.equations.equation import EQUATION_KEY, Equation, EquationResult, Hypothesis, alternatives, equation_results, equations
from esper_telemetry.equations.schedules import RateHistory
from esper_telemetry.journal.record_columns import RecordTable
from esper_telemetry.views.document import Element, h, items, table

IN_USE: Final = "normalized_advantages"
TARGETS: Final = ("advantages", "returns")
FITTING_SHARE: Final = 0.5
"""Equation that is checked whenever a script's rollout is found, targets of that rollout, and the share of updates in which they fit."""

State = Literal["matches", "variant", "differs", "untraced", "unchecked"]

EQUATION_TEMPLATE: Final = "integrity/equation/{equation}"
"""Key that the run line of every journal describes whose updates could be checked."""

STATE_CLASSES: Final[Mapping[State, str]] = {"matches": "good", "variant": "good", "differs": "bad", "unchecked": "dim"}
WORDS: Final[Mapping[State, str]] = {
    "matches": "matches",
    "variant": "a variant",
    "differs": "differs",
    "untraced": "not traced",
    "unchecked": "could not be checked",
}

RECORDED_BEFORE: Final = "the run was recorded before equations were checked"


@dataclass(frozen=True, slots=True)
class EquationRow:
    """One equation over all updates of a run.

    Attributes:
        equation: the reference.
        state: `variant` if a published variant explains every difference.
        updates: number of updates in which it was checked.
        differing: number of updates in which it differs, in the way of the explanations if there are any.
        since: first differing update, if any.
        error: largest error, if it was checked.
        explanations: hypotheses that give the numbers in every differing update, otherwise in most of them.
        fitted: latest fitted parameters, by the name of the hypothesis.
        reason: why it could not be checked, or what was searched and found.
        over_run: how the sums over all updates differ, if no single update does.
        place: file and line of the script that computes the quantity; empty if unknown.
    """

    equation: Equation
    state: State
    updates: int = 0
    differing: int = 0
    since: int | None = None
    error: float | None = None
    explanations: tuple[Hypothesis, ...] = ()
    fitted: Mapping[str, float] | None = None
    reason: str = ""
    over_run: str = ""
    place: str = ""

    @property
    def phrases(self) -> list[str]:
        """The explanations as noun phrases."""
        return [one.phrase((self.fitted or {}).get(one.name)) for one in self.explanations]

    @property
    def advice(self) -> str:
        """What to change."""
        return next((one.advice for one in self.explanations if one.advice), self.equation.advice)

    @property
    def result(self) -> str:
        """The state in words, with the explanation or the reason."""
        if self.reason:
            return f"{WORDS[self.state]}: {self.reason}"
        if self.state == "matches":
            return "matches"
        if self.over_run:
            return f"{WORDS[self.state]}: {self.over_run}"
        words = f"equal {alternatives(self.phrases)}" if self.phrases else "no known mistake explains it"
        share = "" if self.differing == self.updates else f" (in {self.differing} of {self.updates} updates)"
        return f"{WORDS[self.state]}: {words}{share}"

    def values(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "equation": self.equation.name,
            "quantity": self.equation.quantity,
            "reference": self.equation.equation,
            "source": self.equation.source,
            "state": self.state,
            "updates": self.updates,
            "differing": self.differing,
            "since": self.since,
            "error": self.error,
            "explanations": [
                {
                    "hypothesis": one.name,
                    "text": text,
                    "equation": one.equation,
                    "source": one.citation,
                    "variant": one.variant,
                    "fitted": (self.fitted or {}).get(one.name),
                }
                for one, text in zip(self.explanations, self.phrases, strict=True)
            ],
            "advice": self.advice if self.state in ("variant", "differs") else "",
            "reason": self.reason,
            "over_run": self.over_run,
            "place": self.place,
        }


def equation_rows(run: RunInfo, records: Iterable[Record]) -> list[EquationRow]:
    """Return a row for each declared equation, causes before effects.

    Args:
        run: head of the journal, whose facts say what the trainer does not show.
        records: all of the run.
    """
    history = EquationHistory(Facts.of(run.facts))
    for record in records.without_histograms() if isinstance(records, RecordTable) else records:
        history.add(record)
    return history.rows(run)


class EquationHistory:
    """Results of the equations of a run, record by record.

    Args:
        facts: of the run.
    """

    def __init__(self, facts: Facts) -> None:
        self._facts, self._rates = facts, RateHistory(facts)
        self._results: dict[str, list[tuple[int, EquationResult]]] = {}
        # keys that only sampled updates have
        self._checked = frozenset([*(EQUATION_KEY + name for name in equations()), *EXCESS_KEYS])
        self._calibration, self._sum_since = CalibrationJudge(), 0
        self._sum: ActionSum | None = None

    def add(self, record: Record) -> None:
        """Add a record; records of unfinished updates do not count."""
        if record.partial:
            return
        if not record.values.keys().isdisjoint(self._checked):
            self._add_checks(record.axes.update, judgeable(record.values))
        rate = record.values.get(RATE_KEY)
        self._rates.add(record.axes.env_step, None if rate is None else judgeable({RATE_KEY: rate}).get(RATE_KEY))
        schedules = self._rates.result()
        if schedules is not None:
            self._results.setdefault(schedules.equation.name, []).append((record.axes.update, schedules))

    def _add_checks(self, update: int, values: Mapping[str, float]) -> None:
        for result in equation_results(values, self._facts):
            self._results.setdefault(result.equation.name, []).append((update, result))
        action_sum = self._calibration.add(values)
        if action_sum is not None:
            self._sum = action_sum
            self._sum_since = (self._sum_since or update) if action_sum.exceeds else 0

    def rows(self, run: RunInfo) -> list[EquationRow]:
        """Return a row for each declared equation, causes before effects; the facts of `run` name what the trainer does not show."""
        ordered = sorted(equations().values(), key=lambda equation: equation.rank)
        rollouts = len(self._results.get(IN_USE, ()))
        rows = [_row(equation, self._results.get(equation.name, ()), run, rollouts) for equation in ordered]
        return [self._with_sum(row) if row.equation.name == ACTIONS else row for row in rows]

    def _with_sum(self, row: EquationRow) -> EquationRow:
        """The row of the actions, including differences that appear only over several rollouts."""
        if row.state != "matches" or self._sum is None or not self._sum.exceeds:
            return row
        error = abs(self._sum.total) / self._sum.bound
        return replace(row, state="differs", over_run=str(self._sum), since=self._sum_since, differing=row.updates, error=error)


def _row(equation: Equation, results: Sequence[tuple[int, EquationResult]], run: RunInfo, rollouts: int) -> EquationRow:
    facts = Facts.of(run.facts)
    place = facts.equation_places.get(equation.name, "")
    can_fit = facts.columns_by_name and equation.name in TARGETS and equation.name not in facts.unchecked_equations
    differing = [(update, result) for update, result in results if not result.matches]
    wrong = [(update, result) for update, result in differing if not result.holds]
    if can_fit and len(results) < FITTING_SHARE * rollouts and not wrong:
        reason = (
            f"the variables that were found fit it in {len(results)} of {rollouts} updates: check which rewards, values and ends go into it"
        )
        return EquationRow(equation, "untraced", reason=reason + (place and f", in {place}"), place=place)
    if not results:
        reason, sought = _reason(equation, run), facts.untraced_equations.get(equation.name)
        return EquationRow(equation, "untraced" if sought == reason else "unchecked", reason=reason, place=place)
    shown = wrong or differing
    latest = shown[-1:] if equation.over_run else shown
    explanations = _common([result.hypotheses for _, result in latest])
    if explanations and not equation.over_run:
        shown = [(update, result) for update, result in shown if set(explanations) & set(result.hypotheses)]
    fitted = {name: value for _, result in shown for name, value in result.fitted.items()}
    return EquationRow(
        equation,
        state="differs" if wrong else "variant" if differing else "matches",
        updates=len(results),
        differing=len(shown),
        since=shown[0][0] if shown else None,
        error=max(result.error or 0.0 for _, result in shown or results),
        explanations=explanations,
        fitted=fitted,
        place=place,
    )


def _common(explanations: Sequence[tuple[Hypothesis, ...]]) -> tuple[Hypothesis, ...]:
    """Return the hypotheses that explain the differences in every update; if there are none, the most frequent ones."""
    counts = Counter(one.name for each in explanations for one in each)
    most = max(counts.values(), default=0)
    by_name = {one.name: one for each in explanations for one in each}
    return tuple([one for name, one in by_name.items() if counts[name] == most])


def _reason(equation: Equation, run: RunInfo) -> str:
    if EQUATION_TEMPLATE not in run.metrics:
        return RECORDED_BEFORE
    facts = Facts.of(run.facts)
    if facts.level == "minimal":
        return "no update is sampled at level minimal"
    reasons = {**facts.untraced_equations, **facts.unchecked_equations}
    if facts.own_loop and equation.check:
        call = f"{OBSERVE}(esper_telemetry.{equation.check}(...))"
        return reasons.get(equation.name) or f"{call} was not called; it needs {equation.inputs}"
    return reasons.get(equation.name) or f"the trainer does not show {equation.inputs}"


def equation_document(head: str, rows: Sequence[EquationRow]) -> Iterator[Element]:
    """Yield the table, the formulas and the advice of what differs, and what could not be checked, by reason."""
    yield h("p", head)
    checked = [row for row in rows if not row.reason]
    untraced, unchecked = by_reason(rows, "untraced"), by_reason(rows, "unchecked")
    if not checked and not untraced and len(unchecked) == 1:
        yield h("p", f"Nothing was checked: {next(iter(unchecked))}.", css="note")
        return
    cells = [
        (
            row.equation.quantity.removeprefix("the "),
            h("span", row.result, css=STATE_CLASSES[row.state]),
            str(row.updates),
            "" if row.error is None else row.equation.size(row.error),
        )
        for row in checked
    ]
    columns = ("quantity", "result", "updates", "largest error")
    yield table(columns, cells, numbers_from=2) if cells else h("p", "Nothing was checked.", css="note")
    for row in checked:
        if row.state == "differs":
            yield h("br")
            yield h("h3", f"{equation_title(row.equation)}, since update {row.since}")
            yield items(_details(row))
    for title, reasons, css in (("Not traced:", untraced, "note"), ("Could not be checked:", unchecked, "dim")):
        if reasons:
            yield h("br")
            yield h("p", title)
        yield items((f"{', '.join(names)}: {reason}" for reason, names in reasons.items()), css=css)
    counts = Counter(row.state for row in rows)
    words = [f"{counts[state]} {names[counts[state] > 1]}" for state, names in SUMMARY.items() if counts[state]]
    yield h("br")
    yield h("p", f"{', '.join(words)}.")


def by_reason(rows: Iterable[EquationRow], state: State) -> dict[str, list[str]]:
    """Return the quantities in that state, by reason."""
    names: dict[str, list[str]] = {}
    for row in rows:
        if row.state == state:
            names.setdefault(row.reason, []).append(row.equation.quantity.removeprefix("the "))
    return names


SUMMARY: Final[Mapping[State, tuple[str, str]]] = {
    "matches": ("matches", "match"),
    "variant": ("equals a published variant", "equal published variants"),
    "differs": ("differs", "differ"),
    "untraced": ("was not traced", "were not traced"),
    "unchecked": ("could not be checked", "could not be checked"),
}


def _details(row: EquationRow) -> Iterator[str]:
    """Yield the reference, the equations that give the numbers, and the advice."""
    equation = row.equation
    yield f"reference: {equation.equation}" + (f" ({equation.source})" if equation.source else "")
    for one, text in zip(row.explanations, row.phrases, strict=True):
        cited = f"{text}{one.citation and f'; {one.citation}'}"
        yield f"equal to: {one.equation} ({cited})" if one.equation else f"equal to: {cited}"
    if row.place:
        yield f"computed in {row.place}"
    if row.advice:
        yield f"try: {row.advice}"


def equation_title(equation: Equation) -> str:
    """Return the heading of an equation."""
    return equation.quantity.removeprefix("the ").capitalize()
