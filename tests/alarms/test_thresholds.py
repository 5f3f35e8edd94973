"""Bounds are data: each can be named, changed and scaled; a wrong name is an error."""

import re
from pathlib import Path

import pytest
from healthy_run import FACTS, alarms, judged, raised, run, set_to

from esper_telemetry import Telemetry, read_run
from esper_telemetry.alarms import AlarmRule, OnRamp, Ramp, Thresholds, diagnose
from esper_telemetry.alarms.thresholds import bounds
from esper_telemetry.telemetry import session_of


def test_a_bound_is_changed_by_name() -> None:
    changed = Thresholds.parse(["kl_spike_high=0.5", "storm = 3"])

    assert (changed.kl_spike_high, changed.storm) == (0.5, 3.0)
    assert changed.kl_spike_low == Thresholds().kl_spike_low


def test_changed_bounds_decide() -> None:
    records = run(40, set_to({"policy/kl": 0.05, "policy/clip_frac": 0.3}))

    assert alarms(judged(records)) == []
    assert raised(judged(records, thresholds=Thresholds.parse(["kl_spike_high=0.05"]))) == {"policy/kl_spike": 31}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("kl_spke_high=1", "unknown threshold 'kl_spke_high'; did you mean kl_spike_high"),
        ("kl_spike_high", "a threshold must have the form NAME=VALUE, got 'kl_spike_high'"),
        ("kl_spike_high=much", "threshold kl_spike_high must be a finite number, got 'much'"),
        ("kl_spike_high=nan", "threshold kl_spike_high must be a finite number, got 'nan'"),
        ("policy/kl_spike=1", "alarm policy/kl_spike must be on or off, got '1'"),
        ("zzz=1", "unknown threshold 'zzz'"),
    ],
)
def test_a_mistake_is_one_sentence_with_the_offending_text(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        Thresholds.parse([text])


def test_a_multiplier_makes_all_bounds_more_lenient_or_stricter() -> None:
    """Twice as lenient: upper bounds double, lower bounds halve, counts stay."""
    lenient = Thresholds().scaled(2.0)

    assert (lenient.kl_spike_low, lenient.entropy_collapse, lenient.storm) == (0.06, 0.05, 20)
    assert lenient.scaled(0.5) == Thresholds()


@pytest.mark.parametrize("kappa", [0.0, -1.0, float("nan"), float("inf")])
def test_a_multiplier_is_positive(kappa: float) -> None:
    with pytest.raises(ValueError, match=f"kappa must be positive and finite, got {kappa}"):
        Thresholds().scaled(kappa)


def test_the_multiplier_moves_detectors_between_silence_and_alarm() -> None:
    records = run(40, set_to({"policy/kl": 0.2, "policy/clip_frac": 0.4}))
    found = [len(raised(judged(records, thresholds=Thresholds().scaled(kappa)))) for kappa in (4.0, 1.0, 0.25)]

    assert found[0] == 0 and found[0] < found[1] <= found[2]


def test_every_bound_has_a_meaning() -> None:
    assert len(bounds()) > 100
    assert all(bound.meaning for bound in bounds().values())


def test_a_run_has_its_own_thresholds_and_is_judged_by_them() -> None:
    """Differences are stored as plain data; names of other versions are ignored."""
    strict = Thresholds.parse(["kl_spike_high=0.05", "grad/noise_dominated=on", "policy/kl_stall=off"])
    told = {"thresholds": {**strict.changes(), "of_another_version": 3.0, "storm": "many"}}

    assert strict.changes() == {"kl_spike_high": 0.05, "grad/noise_dominated": "on", "policy/kl_stall": "off"}
    assert Thresholds.of(told) == strict
    assert Thresholds.of({}) == Thresholds.of({"thresholds": 7}) == Thresholds()
    assert Thresholds.parse(["storm=3"], strict).kl_spike_high == 0.05


def test_diagnosis_says_what_was_said_live_under_thresholds_of_the_run(tmp_path: Path) -> None:
    """The journal stores the bound; with the default bound, a KL of 0.05 raises no alarm."""
    strict = Thresholds.parse(["kl_spike_low=1e-9", "kl_spike_high=1e-8"])
    records = run(40, set_to({"policy/kl": 0.05}))
    with Telemetry(run_dir=tmp_path / "run", detect=strict, offload=False) as telemetry:
        session_of(telemetry).start(facts=FACTS)
        telemetry.flush(env_step=1)
    facts = read_run(tmp_path / "run").info.facts

    assert facts["thresholds"] == {"kl_spike_low": 1e-9, "kl_spike_high": 1e-8}
    assert {story.cause for story in diagnose(facts, records).incidents} == {"policy/kl_spike"}
    assert diagnose(FACTS, records).incidents == ()


def test_usual_thresholds_need_no_fact(tmp_path: Path) -> None:
    with Telemetry(run_dir=tmp_path / "run", offload=False) as telemetry:
        telemetry.flush(env_step=1)

    assert "thresholds" not in read_run(tmp_path / "run").info.facts


COVERAGE = Ramp("coverage", 0.5, 0.1, "share of the map that the agents have seen")
LOST = AlarmRule(
    type="explore/coverage_lost",
    inputs=("explore/coverage",),
    meaning="The agents see less of the map than they should.",
    action="Raise entropy_coef.",
    judge=OnRamp("explore/coverage", COVERAGE, "the agents see {percent} of the map"),
    bounds=(COVERAGE,),
)


@pytest.mark.parametrize(
    ("changes", "updates"), [([], [4]), (["coverage_low=0.9", "coverage_high=0.5"], [2, 3, 4]), (["explore/coverage_lost=off"], [])]
)
def test_bounds_of_the_users_own_alarms_are_changed_like_built_in_ones(tmp_path: Path, changes: list[str], updates: list[int]) -> None:
    """Coverages of 0.8, 0.6, 0.31 and 0.2; the middle of the ramp is 0.3 by default and 0.7 with the changes."""
    detect = Thresholds.parse(changes, alarms=LOST)
    with Telemetry(run_dir=tmp_path / "run", alarms=LOST, detect=detect, offload=False) as telemetry:
        for update, coverage in enumerate((0.8, 0.6, 0.31, 0.2), start=1):
            telemetry.log({"explore/coverage": coverage})
            telemetry.flush(env_step=update)

    recorded = read_run(tmp_path / "run")
    severe = [record.axes.update for record in recorded.records if "alarm/explore/coverage_lost" in record.values]
    assert severe == updates
    assert recorded.info.facts["thresholds"] == detect.changes()


def test_own_alarms_are_arguments_of_thresholds() -> None:
    changed = Thresholds(alarms=LOST, coverage_low=0.4, kl_spike_high=0.5)

    assert (changed.coverage_low, changed.coverage_high, changed.kl_spike_high) == (0.4, 0.1, 0.5)
    assert changed.scaled(2.0).coverage_low == 0.2
    assert changed.without(["explore/coverage_lost"]).coverage_low == 0.4
    assert Thresholds.of({"thresholds": changed.changes()}, (LOST,)) == changed
    with pytest.raises(ValueError, match=r"threshold coverage_low must be larger than coverage_high, got 0\.05 and 0\.1"):
        Thresholds.parse(["coverage_low=0.05"], changed)


def test_a_bound_of_an_alarm_that_the_run_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown threshold 'coverage_low'"):
        Telemetry(run_dir=None, detect=Thresholds(alarms=LOST, coverage_low=0.4))
