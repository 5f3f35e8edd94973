"""A run view is the same from a journal at once, line by line, and judged again."""

from pathlib import Path
from typing import Any

import pytest
from healthy_run import FACTS
from hypothesis import given
from hypothesis import strategies as st
from journaled import SPOILED, learning, lines_of, write

from esper_telemetry.alarms.diagnosis import diagnose
from esper_telemetry.core.record import Axes, MetricInfo, Record, RunStatus
from esper_telemetry.journal.file import JOURNAL_NAME
from esper_telemetry.journal.lines import encode_record, to_json
from esper_telemetry.views.run_parts import MIN_POINTS, HealthyRange, SeriesBuffer, judge
from esper_telemetry.views.run_view import RunView, open_view


@given(st.lists(st.floats(allow_nan=True), max_size=300), st.integers(MIN_POINTS, 40))
def test_a_thinned_series_keeps_its_extremes_and_both_ends(values: list[float], max_points: int) -> None:
    buffer = SeriesBuffer(max_points)
    for update, value in enumerate(values, 1):
        buffer.add(update, 10 * update, value)
    finite = {update: value for update, value in enumerate(values, 1) if abs(value) < float("inf")}

    series = buffer.series

    assert len(series.values) <= max_points
    assert list(series.updates) == sorted(set(series.updates))
    assert all(finite[update] == value for update, value in zip(series.updates, series.values, strict=True))
    assert series.env_steps == tuple(10 * update for update in series.updates)
    if finite:
        assert (min(series.values), max(series.values)) == (min(finite.values()), max(finite.values()))
        assert (series.updates[0], series.updates[-1]) == (min(finite), max(finite))


@pytest.mark.parametrize(
    ("text", "low", "high", "condition"),
    [
        ("0.002 to 0.02", 0.002, 0.02, ""),
        ("-1 to 1; about 1.6 at the start is normal", -1.0, 1.0, "about 1.6 at the start is normal"),
        ("> 0.5 late in training", 0.5, None, "late in training"),
        ("|mean| < 0.01", -0.01, 0.01, ""),
        ("< 2", None, 2.0, ""),
    ],
)
def test_a_healthy_range_is_read_from_its_declaration(text: str, low: float | None, high: float | None, condition: str) -> None:
    assert HealthyRange.parse(text) == HealthyRange(low, high, condition)


@pytest.mark.parametrize("text", ["", "absent", "near its own history", "|mean| < 0.5 std", "> 1e-3 of ret/std"])
def test_bounds_in_units_of_another_value_make_no_range(text: str) -> None:
    assert HealthyRange.parse(text) is None


def test_a_value_is_judged_by_the_worst_bound_that_it_leaves() -> None:
    plain = MetricInfo("nats", "", healthy="0.002 to 0.02", warn="> 0.03", critical="> 0.1")
    conditional = MetricInfo("1", "", healthy="> 0.5 late in training")

    assert [judge(plain, value) for value in (0.01, 0.025, 0.05, 0.5)] == ["", "outside", "warn", "critical"]
    assert judge(conditional, 0.1) == ""


def test_a_bound_with_a_condition_counts_where_the_other_metric_meets_it() -> None:
    info = MetricInfo("fraction", "", critical="< 0.1 with policy/mix < 0.5")

    assert judge(info, 0.05, {"policy/mix": 0.2}.get) == "critical"
    assert judge(info, 0.05, {"policy/mix": 0.9}.get) == ""
    assert judge(info, 0.3, {"policy/mix": 0.2}.get) == ""
    assert judge(info, 0.05) == ""


def shown(view: RunView) -> Any:
    """Return everything in a view except times."""
    return view.status, view.axes, view.diagnosis, view.incidents, view.panels(), view.strip(), view.alarms


@pytest.mark.system
@pytest.mark.parametrize("judged", [False, True])
def test_a_growing_journal_is_read_on_from_its_last_complete_line(tmp_path: Path, judged: bool) -> None:
    lines = lines_of(learning(40, SPOILED))
    whole = open_view(write(tmp_path / "whole", lines), judged=judged)
    path = write(tmp_path / "growing", lines[:1])
    view = open_view(path, judged=judged)
    before = view.updates, view.status, view.outcome.text

    content = b"".join(map(to_json, lines[1:]))
    for start in range(0, len(content), 7919):  # cuts lines anywhere
        with (path / JOURNAL_NAME).open("ab") as file:
            file.write(content[start : start + 7919])
        view.refresh()

    assert before == (0, None, "too short to tell: no update has been recorded")
    assert shown(view) == shown(whole)
    assert view.refresh() == 0


def test_the_view_of_the_journal_says_what_judging_it_again_says(tmp_path: Path) -> None:
    path = write(tmp_path / "run", lines_of(learning(40, SPOILED)))

    recorded, judged = open_view(path), open_view(path, judged=True)

    assert [incident.cause for incident in recorded.incidents] == [incident.cause for incident in judged.incidents]
    assert recorded.incidents == judged.incidents != []
    assert recorded.outcome.kind is judged.outcome.kind
    first = recorded.incidents[0]
    assert "Try:" not in first.text and first.advice
    assert first.evidence[0].key == first.keys[0] == first.report.main.key
    assert [item.text.rpartition(" ")[2] for item in recorded.strip()][:2] == ["flat", first.cause]


@pytest.mark.parametrize("has_alarms", [True, False])
def test_a_judged_view_says_what_diagnose_says_also_of_a_run_without_alarms(tmp_path: Path, has_alarms: bool) -> None:
    records = learning(40, SPOILED)
    lines = lines_of(records)
    if not has_alarms:
        lines = [lines[0], *map(encode_record, records), lines[-1]]

    view = open_view(write(tmp_path / "run", lines), judged=True)

    assert view.diagnosis == diagnose(FACTS, records, status=RunStatus.FINISHED)
    assert view.diagnosis.incidents and view.diagnosis.checks


def test_a_run_without_records_and_one_that_was_killed_are_shown(tmp_path: Path) -> None:
    empty = open_view(write(tmp_path / "empty", lines_of([], None)))
    killed = open_view(write(tmp_path / "killed", lines_of(learning(1), RunStatus.KILLED)))

    assert (empty.updates, empty.panels(), empty.incidents, empty.progress().update) == (0, [], [], 0)
    assert empty.progress(now=1e9 + 3600).staleness == "bad"
    assert (killed.outcome.kind, killed.progress().staleness) == ("failed", "ended")
    assert killed.ending.startswith("The run was killed after update 1")
    assert killed.outcome.before == ""  # a single update cannot tell
    assert killed.chart("policy/kl") is not None


def test_progress_is_that_of_the_latest_updates(tmp_path: Path) -> None:
    """An update of 100 steps takes 2 s, with one interruption: 50 steps a second, 600 of 1000 steps remain."""
    times = [0.0, 2.0, 4.0, 1000.0]
    records = [
        Record(n, Axes(n, 100 * n, n, 2e9 + now), {"perf/environment_ms": 500.0, "perf/update_ms": 1000.0})
        for n, now in enumerate(times, 1)
    ]
    view = open_view(write(tmp_path / "run", lines_of(records, None, {"total_steps": 1000})))

    progress = view.progress(now=2e9 + 1003)

    assert (progress.fraction, progress.eta_seconds, progress.steps_per_second) == (0.4, 12.0, 50.0)
    assert progress.time_split == {"environment": 0.25, "update": 0.5, "other": 0.25}
    assert [view.progress(now=2e9 + 1000 + age).staleness for age in (4, 30, 90)] == ["ok", "warn", "bad"]

    beyond = open_view(write(tmp_path / "beyond", lines_of(records, None, {"total_steps": 390}))).progress(now=2e9 + 1003)
    assert (beyond.total_steps, beyond.fraction, beyond.eta_seconds) == (400, 1.0, 0.0)


def test_a_resumed_run_goes_on_and_its_first_record_of_an_update_stands(tmp_path: Path) -> None:
    first, second = ({"policy/kl": kl} for kl in (0.01, 0.02))
    axes = [Axes(n, 100 * n, n, 1e9) for n in (1, 2)]
    lines = lines_of([Record(1, axes[0], first)], RunStatus.INTERRUPTED)
    path = write(tmp_path / "run", [*lines, lines[0], encode_record(Record(2, axes[0], second))])
    view = open_view(path)

    assert (view.status, view.updates, view.last["policy/kl"]) == (None, 1, 0.01)
