"""Long journals: the verdict comes from their lines and a sample of their records, charts from columns."""

from pathlib import Path

import numpy as np
import pytest
from healthy_run import FACTS
from hypothesis import given
from hypothesis import strategies as st
from journaled import SPOILED, learning, lines_of, write

from esper_telemetry import RunInfo, RunStatus
from esper_telemetry.alarms.verdict import run_outcome
from esper_telemetry.cli.diagnose import run_answer
from esper_telemetry.core.record import Axes, Record
from esper_telemetry.journal import record_columns
from esper_telemetry.journal.lines import encode_record, encode_run
from esper_telemetry.views import run_view
from esper_telemetry.views.run_parts import SeriesBuffer
from esper_telemetry.views.run_view import RunView, judged_again, open_sample, open_verdict, open_view

UPDATES = 120
HEAD = encode_run(RunInfo("r1", "run", None, 1e9, facts=FACTS))


@pytest.fixture(autouse=True)
def every_run_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_columns, "SEGMENT_RECORDS", 25)
    monkeypatch.setattr(run_view, "MAX_WHOLE_BYTES", 0)
    monkeypatch.setattr(run_view, "VERDICT_RECORDS", 10)


@pytest.fixture
def spoiled(tmp_path: Path) -> Path:
    return write(tmp_path / "run", lines_of(learning(UPDATES, SPOILED)))


@pytest.mark.system
def test_the_verdict_by_a_sample_is_that_by_all_records(spoiled: Path) -> None:
    sampled, again = open_verdict(spoiled), judged_again(spoiled)

    assert sampled.sampled and not again.sampled
    one, other = sampled.diagnosis, again.diagnosis
    assert one.incidents == other.incidents and one.incidents
    assert (one.outcome, one.updates, one.checks) == (other.outcome, UPDATES, other.checks)
    assert (one.unanswered, one.remarks, one.events) == (other.unanswered, other.remarks, other.events)


@pytest.mark.system
def test_the_answer_for_programs_is_that_by_all_records(spoiled: Path) -> None:
    by_sample, again = open_verdict(spoiled), judged_again(spoiled)

    assert by_sample.sampled and run_answer(by_sample, str(spoiled)) == run_answer(again, str(spoiled))


@pytest.mark.system
def test_a_key_of_one_record_is_known_to_a_sample(tmp_path: Path) -> None:
    records = learning(UPDATES, SPOILED)
    records[77] = Record(78, records[77].axes, {**records[77].values, "lstm/forget/saturated_frac": 0.1, "lstm/h/dead_frac": 0.0})
    run_dir = write(tmp_path / "run", lines_of(records))

    assert open_verdict(run_dir).diagnosis.unanswered == judged_again(run_dir).diagnosis.unanswered


@pytest.mark.system
@pytest.mark.parametrize("missing", ["the alarms", "the outcome"])
def test_a_journal_without_a_verdict_is_judged(tmp_path: Path, missing: str) -> None:
    records = learning(UPDATES, SPOILED)
    lines = lines_of(records)
    kept = [line for line in lines if line.get("type") != "outcome"]
    run_dir = write(tmp_path / "run", kept if missing == "the outcome" else [lines[0], *map(encode_record, records), lines[-1]])

    view = open_verdict(run_dir)

    assert not view.sampled
    assert view.diagnosis.outcome == judged_again(run_dir).diagnosis.outcome and view.diagnosis.incidents


@pytest.mark.system
def test_a_run_under_way_is_judged_by_its_records_until_its_last_outcome_is_recent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = write(tmp_path / "run", lines_of(learning(UPDATES), None))
    monkeypatch.setattr("esper_telemetry.alarms.diagnosis.OUTCOME_UPDATES", 5)
    old = open_verdict(run_dir)
    monkeypatch.setattr("esper_telemetry.alarms.diagnosis.OUTCOME_UPDATES", 1000)
    recent = open_verdict(run_dir)

    assert (old.sampled, recent.sampled) == (False, True)
    assert old.outcome.kind is recent.outcome.kind and recent.diagnosis.updates == UPDATES


def test_the_outcome_is_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_outcome, "OUTCOME_UPDATES", 30)
    outcomes = [line["data"] for line in lines_of(learning(UPDATES), None) if line.get("type") == "outcome"]
    updates = [data["updates"] for data in outcomes]

    assert len(outcomes) >= 3 and max(np.diff([*updates, UPDATES])) <= 30
    assert outcomes[-1]["outcome"] == outcomes[-2]["outcome"] == "learning"


def shown(view: RunView) -> tuple[object, ...]:
    series = {key: view.series(key) for key in sorted(view.keys)}
    return series, view.alarms, [*view.events], view.last, view.axes, view.updates, view.status, view.diagnosis.outcome


@pytest.mark.system
@pytest.mark.parametrize("judged", [True, False])
def test_columns_show_what_the_lines_show(spoiled: Path, judged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    by_columns = [open_view(str(spoiled), judged=judged) for _ in ("parsed", "from the cache")]
    by_lines = RunView(by_columns[0].info, str(spoiled), judged=judged)
    while by_lines.refresh(limit=7):
        pass

    assert shown(by_columns[0]) == shown(by_columns[1]) == shown(by_lines)
    assert len(list((spoiled / record_columns.COLUMNS_NAME).iterdir())) >= 2


def test_a_run_that_is_resumed_after_its_end_has_no_status(tmp_path: Path) -> None:
    records = learning(UPDATES)
    run_dir = write(tmp_path / "run", [*lines_of(records[:60], RunStatus.KILLED), HEAD, encode_record(records[60])])

    for view in (open_view(str(run_dir)), open_view(str(run_dir), judged=True), open_sample(run_dir, 4)):
        assert (view.status, view.updates, view.ending) == (None, 61, "")


@given(
    st.lists(st.floats(-1e9, 1e9) | st.just(float("nan")), max_size=300),
    st.lists(st.integers(1, 60), min_size=1, max_size=20),
    st.sampled_from([0, 6, 10, 40]),
)
def test_arrays_make_the_series_that_single_values_make(values: list[float], parts: list[int], max_points: int) -> None:
    singly, at_once, begin = SeriesBuffer(max_points), SeriesBuffer(max_points), 0
    for update, value in enumerate(values):
        singly.add(update, 2 * update, value)
    while begin < len(values):
        part = np.arange(begin, min(len(values), begin + parts[begin % len(parts)]))
        at_once.extend(part, 2 * part, np.array(values)[part])
        begin += len(part)

    assert at_once.series == singly.series


def test_the_axes_of_a_long_run_are_exact(tmp_path: Path) -> None:
    steps = [2**60 + update for update in range(UPDATES)]
    records = [Record(place, Axes(place, step, 0, 1.5), {"my/value": 1.0}) for place, step in enumerate(steps)]
    run_dir = write(tmp_path / "run", [HEAD, *map(encode_record, records)])

    assert open_view(str(run_dir)).axes == records[-1].axes
