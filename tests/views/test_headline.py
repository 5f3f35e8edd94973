"""The tone of a run in every view and text: a run that does not learn is never shown as clear."""

from collections.abc import Callable
from pathlib import Path

import pytest
from run_cli import run_cli

from esper_telemetry import Telemetry
from esper_telemetry.alarms.thresholds import Thresholds
from esper_telemetry.alarms.verdict.bounds import Tone, tone_of
from esper_telemetry.alarms.verdict.run_outcome import OutcomeKind
from esper_telemetry.core.record import AlarmLevel, RunStatus
from esper_telemetry.journal.read import alarms, last_outcome
from esper_telemetry.metrics import episode_stats
from esper_telemetry.sinks.end_block import RunEnd
from esper_telemetry.sinks.pages import IncidentCards, run_note
from esper_telemetry.views.report import report_html, report_markdown
from esper_telemetry.views.run_view import open_view
from esper_telemetry.views.watch.charts import WatchState
from esper_telemetry.views.watch.screens import header, overview, strip

COURSES: dict[str, Callable[[int], float]] = {
    "learning": lambda update: 10.0 * update,
    "flat": lambda update: 20.0 + update % 2,
    "declining": lambda update: 400.0 - 10 * update,
}


@pytest.mark.parametrize(
    ("kind", "lasting", "critical", "tone"),
    [
        (OutcomeKind.LEARNING, [], [], Tone.GOOD),
        (OutcomeKind.SOLVED, [AlarmLevel.INFO], [], Tone.GOOD),
        (OutcomeKind.CONVERGED, [], ["value/r2"], Tone.OPEN),
        (OutcomeKind.LEARNING, [AlarmLevel.WARN], [], Tone.WARN),
        (OutcomeKind.LEARNING, [AlarmLevel.WARN, AlarmLevel.CRITICAL], [], Tone.BAD),
        (OutcomeKind.TOO_SHORT, [], [], Tone.OPEN),
        (OutcomeKind.TOO_SHORT, [], ["value/r2"], Tone.WARN),
        (OutcomeKind.FLAT, [], [], Tone.WARN),
        (OutcomeKind.DECLINING, [], [], Tone.WARN),
        (OutcomeKind.FAILED, [], [], Tone.BAD),
        ("a kind of a later version", [], [], Tone.OPEN),
    ],
)
def test_the_tone_follows_from_outcome_alarms_and_critical_values(
    kind: OutcomeKind, lasting: list[AlarmLevel], critical: list[str], tone: Tone
) -> None:
    assert tone_of(kind, lasting, critical) is tone


def train(run_dir: Path, course: Callable[[int], float], *, explained: float = 0.9) -> Path:
    """Write a run of a user's loop with 12 episodes an update, so short that telemetry takes most of the time."""
    detect = Thresholds().without(["telemetry/overhead"])
    with Telemetry(["console"], run_dir=run_dir, detect=detect) as telemetry:
        for update in range(1, 41):
            telemetry.observe(episode_stats([course(update)] * 12, [20] * 12))
            telemetry.log({"value/explained_variance": explained})
            telemetry.flush(env_step=240 * update)
    return run_dir


@pytest.mark.parametrize("name", COURSES)
def test_only_a_run_that_has_learned_is_green_anywhere(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    run_dir = train(tmp_path / "run", COURSES[name])
    console = capsys.readouterr().out
    view, good = open_view(run_dir, judged=True), name == "learning"

    assert view.outcome.kind == name
    assert strip([view]).plain == ("ALL CLEAR ✓" if good else f"ANOMALIES: {name}")
    lines = [*header([view], 100), *overview([view], WatchState(), 100)]
    assert any("green" in str(span.style) for line in lines for span in line.text.spans) is good
    assert ("\x1b[32mfinished" in console) is good
    assert ('class="card banner good"' in report_html([view])) is good
    assert report_markdown([view]).startswith("## ✅" if good else "## ⚠️")

    cards = IncidentCards(list(alarms(run_dir)), last_outcome(run_dir))
    assert cards.verdict().startswith(f"{name} (no alarm{'s' if good else ' explains it'}): return ")
    assert ("No alarm was raised." in cards.page()) is good
    assert ("No alarm was raised." in run_note(cards, None, view.info)) is good
    block = list(RunEnd(view.info, run_dir, status=RunStatus.FINISHED).verdict())
    assert next(line.style for line in block) == ("green" if good else "yellow")
    assert ("no alarm was raised" in [line.text for line in block]) is good


@pytest.mark.parametrize(
    ("name", "codes"),
    [
        ("learning", {"critical": 0, "warn": 0, "flat": 0}),
        ("flat", {"critical": 0, "warn": 3, "flat": 3}),
        ("declining", {"critical": 0, "warn": 3, "flat": 3}),
    ],
)
def test_the_exit_code_of_a_run_that_does_not_learn(
    name: str, codes: dict[str, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = train(tmp_path / "run", COURSES[name])

    for level, code in codes.items():
        assert run_cli(["diagnose", run_dir, "--fail-on", level], capsys).code == code


def test_a_value_beyond_its_critical_bound_is_shown_though_no_alarm_is_about_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Healthy runs explain -0.3 and more."""
    view = open_view(train(tmp_path / "run", COURSES["learning"], explained=-0.6), judged=True)
    assert view.diagnosis.tone is not Tone.GOOD
    assert "critical value: value/explained_variance" in strip([view]).plain
    line = "value/explained_variance: -0.6 (critical: < 0 unless value/loss_norm < 0.1)"
    assert line in run_cli(["diagnose", view.run_dir], capsys).out
    assert "value/explained\\_variance: -0.6" in report_markdown([view])


def test_the_end_of_a_run_names_unusual_settings_and_says_repeated_incidents_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Telemetry([], run_dir=tmp_path / "run", facts={"gamma": 0.5}) as telemetry:
        for update in range(1, 61):
            telemetry.log({"policy/kl": 5.0 if update in (20, 40) else 0.01, "policy/clip_frac": 0.6})
            telemetry.flush(env_step=240 * update)
    view = open_view(tmp_path / "run")
    block = [line.text for line in RunEnd(view.info, tmp_path / "run", status=RunStatus.FINISHED).verdict()]
    diagnosed = run_cli(["diagnose", tmp_path / "run"], capsys).out

    assert "update 1: gamma is 0.5; published settings range from 0.8 to 0.9999" in block
    assert sum(line.startswith("    Since update ") for line in block) == 1
    assert any(line.startswith("    1 more time, the last one since update 40") for line in block)
    assert "incident 2, update 40: again policy/kl_spike (ended at update" in diagnosed
