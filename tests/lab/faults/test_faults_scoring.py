"""The definitions of the score, on constructed runs with figures worked by hand."""

from __future__ import annotations

import pytest

from esper_telemetry.core.record import Alarm, Axes, Record
from esper_telemetry.lab.faults.runs import FaultRun
from esper_telemetry.lab.faults.score import (
    BrokenRun,
    CurvePoint,
    bootstrap_intervals,
    broken_runs,
    figures_by,
    healthy_updates,
    independent_runs,
    partial_area,
    quantile,
    score,
)
from esper_telemetry.lab.faults.verdicts import (
    EQUATION_ALARM,
    BaselineDetector,
    JournaledRun,
    RaisedAlarm,
    ReturnDropCheck,
    RunVerdict,
    detect,
    nonfinite_check,
    symptom_update,
    threshold_check,
)


def broken(fault: str, *raised: tuple[int, str], cause: str = "", dose: float = 100, **settings: object) -> RunVerdict:
    """A run that breaks at update 25 and ends at 45, with alarms (update, type) in one incident."""
    run = FaultRun("cue-recall", settings.pop("seed", 1), fault, dose)  # type: ignore[arg-type]
    alarms = tuple(RaisedAlarm(update, kind, 1) for update, kind in raised)
    return RunVerdict(run, alarms, {1: cause or (raised[0][1] if raised else "")}, updates=45, **settings)  # type: ignore[arg-type]


def healthy(*raised: tuple[int, str], updates: int = 60, seed: int = 1) -> RunVerdict:
    run = FaultRun("cartpole", seed, last=updates)
    return RunVerdict(run, tuple(RaisedAlarm(update, kind, 1) for update, kind in raised), {}, updates)


KL, LARGE, OTHER = "policy/kl_spike", "opt/update_too_large", "value/loss_jump"


def test_an_accepted_alarm_within_the_bound_is_in_time() -> None:
    """lr_x100 must be reported in update 25 or 26."""
    assert BrokenRun.of(broken("lr_x100", (26, KL))).strict
    late = BrokenRun.of(broken("lr_x100", (27, KL)))
    assert (late.strict, late.lag) == (False, 2)


@pytest.mark.parametrize(("update", "hit"), [(24, False), (25, True), (45, True), (46, False)])
def test_the_window_is_that_of_the_broken_update_and_twenty_more(update: int, hit: bool) -> None:
    assert (BrokenRun.of(broken("lr_x100", (update, KL))).hit is not None) == hit


def test_another_alarm_counts_only_where_any_does() -> None:
    outcome = BrokenRun.of(broken("lr_x100", (25, OTHER), (30, LARGE)))

    assert (outcome.lenient, outcome.strict, outcome.lag, outcome.others) == (True, False, 5, (OTHER,))


def test_a_cause_is_correct_where_the_incident_of_the_hit_has_an_accepted_cause() -> None:
    assert BrokenRun.of(broken("lr_x100", (25, KL), cause=LARGE)).correct_cause is True
    assert BrokenRun.of(broken("lr_x100", (25, KL), cause=OTHER)).correct_cause is False
    assert BrokenRun.of(broken("lr_x100", (25, OTHER), cause=LARGE)).correct_cause is None


@pytest.mark.parametrize(("hypothesis", "named"), [("optimizer_step_learning_rate", True), ("schedules", True), ("advantages_sign", False)])
def test_an_equation_counts_where_its_hypothesis_names_the_fault(hypothesis: str, named: bool) -> None:
    """The equation's alarm is the cause of the incident, three updates before a type that the fault accepts."""
    verdict = RunVerdict(
        FaultRun("cue-recall", 1, "lr_x100", 100),
        (RaisedAlarm(25, EQUATION_ALARM, 1, frozenset({hypothesis})), RaisedAlarm(28, KL, 1)),
        {1: EQUATION_ALARM},
        updates=45,
    )

    outcome = BrokenRun.of(verdict)

    assert (outcome.strict, outcome.lag, outcome.correct_cause) == ((True, 0, True) if named else (False, 3, False))
    assert outcome.others == (() if named else (EQUATION_ALARM,))


def test_figures_of_four_broken_runs() -> None:
    """Lags 0, 1, 5 and none: two in time, three in twenty updates, four with any alarm. Two of three causes; leads 4 and -2."""
    runs = [
        broken("lr_x100", (25, KL), symptom=29),
        broken("lr_x100", (26, LARGE), cause=OTHER),
        broken("lr_x100", (30, KL), symptom=28),
        broken("lr_x100", (25, OTHER)),
    ]

    figures = score(runs)

    assert [figures[name] for name in ("runs", "strict_recall", "recall", "lenient_recall")] == [4, 0.5, 0.75, 1.0]
    assert (figures["median_lag"], figures["p90_lag"]) == (1, 5)
    assert figures["root_cause_accuracy"] == pytest.approx(2 / 3)
    assert (figures["median_lead"], figures["ahead"], figures["never_symptomatic"]) == (1, 0.5, 0.5)


def test_updates_shared_before_a_fault_count_once() -> None:
    """Two faults of one seed share 24 updates with one alarm. With a healthy run of 60 updates, that is 1 + 2 alarms in 84."""
    runs = [broken("lr_x100", (10, OTHER), (25, KL)), broken("vf_x1000", (10, OTHER), dose=1000), healthy((5, OTHER), (50, KL))]

    sound = healthy_updates(runs)

    assert (sound.updates, len(sound.false_alarms), sound.runs, sound.alarmed_runs) == (84, 3, 1, 1)
    assert sound.false_per_100 == pytest.approx(300 / 84)
    assert [run.run.env for run in independent_runs(runs)] == ["cartpole", "cue-recall"]


def test_other_seeds_are_other_updates() -> None:
    runs = [broken("lr_x100", seed=1), broken("lr_x100", seed=2)]

    assert healthy_updates(runs).updates == 48


def test_figures_without_runs_are_none() -> None:
    empty = score([])

    assert (empty["strict_recall"], empty["false_alarms_per_100"], empty["median_lag"]) == (None, None, None)
    assert bootstrap_intervals([]) == {}
    assert partial_area([]) is None


def test_a_quantile_is_one_of_the_values() -> None:
    assert quantile([3, 1, 2, 10], 0.5) == 2
    assert quantile([3, 1, 2, 10], 0.9) == 10


def test_the_area_takes_the_best_recall_that_costs_no_more() -> None:
    """Recall is 0 up to a rate of 0.2, 0.5 up to 0.6 and 0.9 above. Rates above 1 do not count: 0.2 + 0.36."""
    points = [CurvePoint(4, 0.2, 0.5), CurvePoint(2, 0.6, 0.9), CurvePoint(1.5, 0.8, 0.7), CurvePoint(1, 3.0, 1.0)]

    assert partial_area(points) == pytest.approx(0.4 * 0.5 + 0.4 * 0.9)


def test_an_interval_contains_the_figure_and_without_spread_is_a_point() -> None:
    half = [broken("lr_x100", (25, KL), seed=seed) for seed in range(10)]
    none = [broken("lr_x100", seed=seed) for seed in range(10, 20)]

    low, high = bootstrap_intervals([*half, *none])["strict_recall"]

    assert 0.2 < low < 0.5 < high < 0.8
    assert bootstrap_intervals(half)["strict_recall"] == [1.0, 1.0]
    assert bootstrap_intervals(half) == bootstrap_intervals(half)


def test_doses_are_listed_apart() -> None:
    cases = broken_runs([broken("lr_x100", dose=100), broken("lr_x10", dose=10), broken("lr_x10", (25, KL), dose=3)])

    groups = figures_by(cases, lambda run: run.label)

    assert list(groups) == ["lr_x100", "lr_x10", "lr=3"]
    assert groups["lr=3"]["strict_recall"] == 1
    assert groups["lr_x10"]["missed"] == ["cue-recall-lr_x10-10-s1"]


def record(update: int, **values: float) -> Record:
    """Return a record; `__` in a keyword stands for `/`."""
    return Record(update, Axes(update, update, update, 0.0), {key.replace("__", "/"): v for key, v in values.items()})


def returns(*values: float, fault: str | None = "lr_x100", status: str = "done") -> JournaledRun:
    """A run that breaks at update 3."""
    run = FaultRun("cue-recall", 1, fault, 100, at_update=3, status=status)
    return JournaledRun(run, {}, [record(at, episode__return_mean=value) for at, value in enumerate(values, 1)])


def test_a_symptom_is_the_first_of_three_updates_with_a_fifth_less() -> None:
    """Before: 10. The return is below 8 in updates 4, 6, 7 and 8, so the streak begins with 6."""
    assert symptom_update(returns(10, 10, 9, 7, 9, 7, 7, 7, 9)) == 6


def test_a_negative_return_drops_too() -> None:
    """Before: -10. A fifth less is -12."""
    assert symptom_update(returns(-10, -10, -11, -13, -13, -13)) == 4


def test_a_run_that_ended_by_an_exception_is_broken_there() -> None:
    assert symptom_update(returns(10, 10, 10, 10, status="FloatingPointError: nan")) == 4
    assert symptom_update(returns(10, 10, 10, 10)) is None
    assert symptom_update(returns(10, 10, 1, 1, 1, fault=None)) is None


def test_a_baseline_raises_once_until_its_check_stops() -> None:
    detector = BaselineDetector(nonfinite_check)
    counts = [0, 1, 2, 0, 1]

    raised = [[alarm.type for alarm in detector.step(record(at, numerics__nonfinite=n))] for at, n in enumerate(counts, 1)]

    assert raised == [[], ["numerics/nonfinite"], [], [], ["numerics/nonfinite"]]


def test_fixed_thresholds_have_alarm_types() -> None:
    early, late = (record(at, value__explained_variance=-1.0, policy__ratio__max=6.0) for at in (5, 15))

    assert set(threshold_check(early)) == {"policy/ratio_explosion"}
    assert set(threshold_check(late)) == {"policy/ratio_explosion", "value/fit_collapse"}


def test_a_return_that_falls_by_a_third_for_three_updates_is_a_drop() -> None:
    run = returns(10, 10, 6, 6, 6, 6)

    verdict = detect(run, BaselineDetector(ReturnDropCheck(), streak=3).step)

    assert [(alarm.update, alarm.type) for alarm in verdict.alarms] == [(5, "task/return_drop")]


def test_an_intervention_reaches_the_detector_before_its_update() -> None:
    calls: list[object] = []

    def step(record: Record) -> list[Alarm]:
        calls.append(record.axes.update)
        return []

    run = FaultRun("cue-recall", 1, interventions=(2,))
    detect(JournaledRun(run, {}, [record(1), record(2)]), step, lambda: calls.append("intervention"))

    assert calls == [1, "intervention", 2]
