"""The table of equations, from a run's facts and records alone."""

import time
from collections.abc import Mapping
from typing import Any

import pytest

from esper_telemetry.core.rate_schedule import SCHEDULE_FACT, RateSchedule
from esper_telemetry.core.record import Axes, MetricInfo, Record, RunInfo
from esper_telemetry.equations import equation as declarations
from esper_telemetry.equations.drawn_actions import ACTIONS
from esper_telemetry.equations.equation import Equation, Hypothesis
from esper_telemetry.views.document import print_document
from esper_telemetry.views.equation_table import EquationRow, equation_document, equation_rows

SUM = Equation(
    name="sums",
    quantity="the sums",
    equation="s = a + b",
    compute=lambda inputs: None,
    hypotheses=(
        Hypothesis("minus", "differences", "s = a - b", source="a schoolbook", advice="Add."),
        Hypothesis("times", "products", "s = a b"),
        Hypothesis("mean", "means", "s = (a + b) / 2", variant=True),
        Hypothesis("scaled", "sums times", "s = c (a + b)", parameter="c"),
    ),
    source="arithmetic",
    inputs="two numbers",
    rank=2,
)
CAUSE = Equation(
    name="terms",
    quantity="the terms",
    equation="a = 1",
    compute=lambda inputs: None,
    hypotheses=(),
    source="arithmetic",
    inputs="terms",
    rank=1,
)
RATES = declarations.equations()["schedules"]


@pytest.fixture(autouse=True)
def declared(monkeypatch: pytest.MonkeyPatch) -> None:
    by_name = {one.name: one for one in (SUM, CAUSE, RATES)}
    for module in ("equations.equation", "views.equation_table"):
        monkeypatch.setattr(f"esper_telemetry.{module}.equations", lambda: by_name)


def run(**facts: Any) -> RunInfo:
    template = {"integrity/equation/{equation}": MetricInfo("relative error", "?")}
    return RunInfo("id", "name", None, time.time(), facts=facts, metrics=template)


def records(*updates: Mapping[str, float], partial: bool = False) -> list[Record]:
    """Return records with these values; keys omit the prefix of equations."""
    return [
        Record(
            update,
            Axes(update, 100 * update, update, 0.0),
            {key if "/" in key else f"integrity/equation/{key}": value for key, value in values.items()},
            partial=partial,
        )
        for update, values in enumerate(updates, 1)
    ]


def rows(run_info: RunInfo, entries: list[Record]) -> dict[str, EquationRow]:
    return {row.equation.name: row for row in equation_rows(run_info, entries)}


MINUS = {"sums": 0.2, "sums_minus": 0.0}
MINUS_OR_TIMES = {"sums": 0.2, "sums_minus": 0.0, "sums_times": 0.0}


@pytest.mark.parametrize(
    ("updates", "since", "error", "result"),
    [
        ([{"sums": 1e-7}, {}, {"sums": 3e-7}], None, 3e-7, "matches"),
        ([MINUS_OR_TIMES], 1, 0.2, "differs: equal differences or products"),
        ([MINUS_OR_TIMES, {"sums": 0.3, "sums_minus": 0.0}], 1, 0.3, "differs: equal differences"),
        ([{"sums": 0.0}, {"sums": 0.2}, {"sums": 0.1}], 2, 0.2, "differs: no known mistake explains it (in 2 of 3 updates)"),
        ([{"sums": 0.3, "sums_times": 0.0}, MINUS, MINUS, {"sums": 0.0}], 2, 0.2, "differs: equal differences (in 2 of 4 updates)"),
        ([{"sums": 0.2, "sums_mean": 0.0}], 1, 0.2, "a variant: equal means"),
        ([{"sums": 0.2, "sums_scaled": 0.0, "integrity/fitted/sums_scaled": 1.25}], 1, 0.2, "differs: equal sums times c = 1.25"),
    ],
    ids=["matches", "a set", "told apart by an update", "some updates", "most differences", "variant", "fitted"],
)
def test_the_result_of_an_equation(updates: list[dict[str, float]], since: int | None, error: float, result: str) -> None:
    row = rows(run(), records(*updates))["sums"]

    assert (row.result, row.since, row.error) == (result, since, error)
    assert row.state == result.removeprefix("a ").partition(":")[0]
    assert row.values()["explanations"] == [] or "fitted" in row.values()["explanations"][0]


def test_actions_that_differ_over_the_run_alone_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    update = {"actions": 0.5, "integrity/actions/mode": 16.0, "integrity/actions_variance/mode": 8.0}
    chance = update | {"integrity/actions/mode": 0.5}

    row, healthy = (rows(run(), records(*[one] * 20))["actions"] for one in (update, chance))

    assert (row.state, row.since) == ("differs", 3)
    assert row.result.startswith("differs: the policy's likeliest choice too often (excess, summed over")
    assert healthy.state == "matches"


def test_causes_come_before_effects() -> None:
    assert list(rows(run(), records({"sums": 0.0, "terms": 0.0}))) == ["terms", "sums", "schedules"]


def test_the_tolerance_is_that_of_the_precision_or_of_the_check() -> None:
    """5e-2 in bf16. A tolerance that the check was given is in the record."""
    own = {"sums": 0.01, "integrity/equation_tolerance/sums": 0.02}

    assert rows(run(), records({"sums": 0.01}))["sums"].state == "differs"
    assert rows(run(precision="bf16"), records({"sums": 0.01}))["sums"].state == "matches"
    assert rows(run(), records(own))["sums"].state == "matches"


def test_an_update_that_did_not_end_does_not_count() -> None:
    assert rows(run(), records({"sums": 0.5}, partial=True))["sums"].state == "unchecked"


def test_what_could_not_be_checked_has_a_reason() -> None:
    """The trainer's reason, if it gives one. Another equation shows that the update was sampled."""
    given = rows(run(unchecked_equations={"sums": "the trainer keeps its sums to itself"}), records({"terms": 0.0}))

    assert given["sums"].result == "could not be checked: the trainer keeps its sums to itself"
    assert rows(run(), records({}))["sums"].reason == "the trainer does not show two numbers"
    call = "telemetry.observe(esper_telemetry.check_schedule(...)) was not called; it needs settings with"
    assert rows(run(), records({}))["schedules"].reason.startswith(call)
    theirs = rows(run(trainer="theirs"), records({}))["schedules"].reason
    assert theirs.startswith("the trainer does not show settings with")
    assert rows(run(level="minimal"), records({}))["sums"].reason == "no update is sampled at level minimal"


def test_a_journal_from_before_the_checks_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    old = RunInfo("id", "name", None, time.time(), metrics={"policy/kl": MetricInfo("nats", "?")})

    print_document(equation_document("head", equation_rows(old, records({"policy/kl": 0.1}))))

    assert capsys.readouterr().out == "head\nNothing was checked: the run was recorded before equations were checked.\n"


def test_rates_are_compared_with_the_schedule_of_the_facts() -> None:
    """From 1 to 0 in ten updates of 100 steps. A constant rate differs from the line by the third update."""
    line = RateSchedule(initial=1.0, final=0.0, total_steps=1000)
    facts = run(**{SCHEDULE_FACT: line.fact()})
    right = rows(facts, records(*({"opt/lr": 1 - update / 10} for update in range(10))))["schedules"]
    constant = rows(facts, records(*[{"opt/lr": 1.0}] * 10))["schedules"]

    assert (right.state, right.updates) == ("matches", 10)
    assert constant.state == "differs"
    assert constant.result.startswith("differs: equal the first learning rate throughout, although a schedule is configured")
    assert constant.since == 3


def test_the_page_has_the_formulas_and_the_advice_of_what_differs(capsys: pytest.CaptureFixture[str]) -> None:
    rows = equation_rows(run(), records({"sums": 0.2, "sums_minus": 0, "terms": 0}))
    print_document(equation_document("head", rows))

    text = capsys.readouterr().out
    assert "Sums, since update 1\n" in text
    assert "  reference: s = a + b (arithmetic)\n" in text
    assert "  equal to: s = a - b (differences; a schoolbook)\n" in text
    assert "  try: Add.\n" in text
    assert text.endswith("\n1 matches, 1 differs, 1 could not be checked.\n")


def test_a_test_of_the_actions_shows_its_score_and_its_bound(capsys: pytest.CaptureFixture[str]) -> None:
    """The journal has the score over its bound, which is 7."""
    print_document(equation_document("head", [EquationRow(ACTIONS, "matches", 1, error=0.29)]))

    assert "score 2.0 (<= 7)" in capsys.readouterr().out
