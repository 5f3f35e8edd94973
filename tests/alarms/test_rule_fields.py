"""Wrong declarations of alarms are refused at once, and a judge that raises disables only its own alarm."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from healthy_run import FACTS, judged, raised, run, set_to

from esper_telemetry import Telemetry, read_run
from esper_telemetry.alarms import AboveBound, AlarmRule, Detectors, Finding, OnRamp, Ramp, Thresholds, View
from esper_telemetry.alarms.alarm_bounds import Bound
from esper_telemetry.alarms.baselines import History
from esper_telemetry.alarms.thresholds import bounds

RULE = AlarmRule(
    type="my/alarm", inputs=("my/x",), meaning="x is large.", action="Lower it.", judge=AboveBound("my/x", 1.0, "x is {number}")
)

TEXTS = (None, 3, b"x")
FLAGS = ("no", 1, None)
WRONG: dict[str, tuple[object, ...]] = {
    "type": (None, "", "x y", 3, "A/b", "a/b\0", "a/b/", "é/b"),
    "inputs": ((), None, "my/x", (3,), ("",), ("My X",)),
    "meaning": (*TEXTS, "", " \n"),
    "action": (*TEXTS, ""),
    "source": TEXTS,
    "judge": (3, "x"),
    "applies": (3, None),
    "rank": ("x", None, math.nan, math.inf, 1j, True),
    "warmup": (-1, "x", 1.5, None, math.nan),
    "n_on": (0, -1, "x", 1.5, None, True),
    "n_off": (0, "x"),
    "debug_updates": (-1, "x"),
    "bounds": (3, (3,), ("my_x",), Ramp("end", 0.0, 1.0, "b")),
    "pieces": (("nothing",), "layers", 3),
    "histories": (3, "my/x", (3,)),
    "changes": (3, "gamma", (3,), (("gamma", 0),), (("gamma", 0.5, 1),)),
    **dict.fromkeys(("required", "evidence", "histograms", "facts", "settings"), (3, "my/x", (3,), ("",))),
    **dict.fromkeys(("hard", "claim", "effect", "relative", "certain", "sampled", "optional", "partial", "default_off"), FLAGS),
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in WRONG.items() for value in values])
def test_a_wrong_field_of_a_rule_is_refused_with_its_value(field: str, value: object) -> None:
    with pytest.raises((TypeError, ValueError)) as refusal:
        replace(RULE, **{field: value})  # type: ignore[arg-type]

    text = str(refusal.value)
    quoted = value[0] if isinstance(value, tuple) and value else value
    assert field in text or field == "type"
    assert repr(quoted)[:12] in text
    assert "\n" not in text


@pytest.mark.parametrize(
    "make",
    [
        lambda: Bound("x", "1", "x"),  # type: ignore[arg-type]
        lambda: Bound("x", math.nan, "x"),
        lambda: Bound("", 1.0, "x"),
        lambda: Bound("x", 1.0, "x", 2),
        lambda: Ramp("x", None, 1.0, "x"),  # type: ignore[arg-type]
        lambda: Ramp("x", 0.0, math.inf, "x"),
        lambda: History(3),  # type: ignore[arg-type]
        lambda: History("my/x", scale_min=0.0),
        lambda: AboveBound("My X", 1.0, "x"),
        lambda: AboveBound("my/x", "1", "x"),  # type: ignore[arg-type]
        lambda: AboveBound("my/x", 1.0, "x is {value}"),
        lambda: AboveBound("my/x", 1.0, "x is {0}"),
        lambda: AboveBound("my/x", 1.0, "x is {"),
        lambda: OnRamp("my/x", 1.0, "x"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_part_of_a_rule_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises((TypeError, ValueError), match="got"):
        make()


def test_a_run_with_a_wrong_rule_creates_nothing(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"^alarm 'my/alarm': rank must be one number, got 'x'$"):
        Telemetry(run_dir=tmp_path / "run", alarms=replace(RULE, rank="x"))  # type: ignore[arg-type]

    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kl_spike_high=-1", "threshold kl_spike_high must be at least 0, got '-1'"),
        ("kl_spike_high=0.01", "threshold kl_spike_high must be larger than kl_spike_low, got 0.01 and 0.03"),
        ("ratio_collapse_low=0.001", "threshold ratio_collapse_low must be larger than ratio_collapse_high, got 0.001 and 0.02"),
        ("storm=-1", "threshold storm must be at least 0, got '-1'"),
        ("storm=1e999", "threshold storm must be a finite number, got '1e999'"),
    ],
)
def test_a_threshold_that_no_judge_can_use_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        Thresholds.parse([text])


@pytest.mark.parametrize("value", [0.0, -1.0, 1e308, 1e-320])
def test_rules_judge_by_any_threshold_that_is_accepted(value: float, caplog: pytest.LogCaptureFixture) -> None:
    """All values of the run become a thousand times as large; the ends of ramps keep their order."""
    accepted = Thresholds()
    for name in bounds():
        try:
            accepted = accepted.with_changes({name: value})
        except ValueError:
            continue
    records = run(30)
    records += [replace(one, values={key: 1000 * number for key, number in one.values.items()}) for one in run(40)[30:]]

    verdicts = judged(records, thresholds=accepted)

    assert caplog.messages == []
    numbers = [number for verdict in verdicts for alarm in verdict.alarms for number in (alarm.value, alarm.threshold)]
    assert all(number is None or math.isfinite(number) for number in numbers)


# --- judges


def raises(view: View) -> Iterator[Finding]:
    yield Finding(0.9, "my/x", 1.0)
    raise KeyError("lost")


JUDGES: dict[str, Callable[[View], Any]] = {
    "raises": raises,
    "no findings": lambda view: None,
    "a tuple": lambda view: [(0.9, "my/x")],
    "a severity in words": lambda view: [Finding("high", "my/x")],  # type: ignore[arg-type]
    "a number as key": lambda view: [Finding(1.0, 3)],  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", JUDGES)
def test_a_judge_that_fails_costs_its_own_alarm(name: str, caplog: pytest.LogCaptureFixture) -> None:
    detectors = Detectors(FACTS, Thresholds(), alarms=[replace(RULE, judge=JUDGES[name])])

    verdicts = [detectors.step(record) for record in run(40, set_to({"policy/kl": 1.0}))]

    assert raised(verdicts) == {"policy/kl_spike": 30}
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("alarm my/alarm failed (")


@pytest.mark.parametrize("part", ["text", "advice"])
def test_words_that_fail_leave_those_of_the_rule(tmp_path: Path, part: str, caplog: pytest.LogCaptureFixture) -> None:
    words: dict[str, Any] = {part: lambda: 1 / 0}

    def judge(view: View) -> list[Finding]:
        return [Finding(1.0, "my/x", math.nan, math.inf, **words)]

    with Telemetry([], run_dir=tmp_path, offload=False, alarms=replace(RULE, judge=judge)) as telemetry:
        telemetry.log({"my/x": 2.0})
        telemetry.flush(env_step=1)

    (alarm,) = read_run(tmp_path).alarms
    assert alarm.text.startswith("Since update 1, x is large") and alarm.text.endswith("Try: Lower it.")
    assert (alarm.value, alarm.threshold) == (None, None)
    assert "ZeroDivisionError" in caplog.text


class OwnDetector:
    """Raises no alarm."""

    def __init__(self, facts: object, **verdict: Any) -> None:
        self._verdict = SimpleNamespace(**{"alarms": (), "remaining": 0, "values": {}, "events": (), **verdict})

    def step(self, record: object) -> Any:
        return self._verdict

    def rule(self, kind: str) -> None:
        return None

    def intervention(self) -> None:
        raise KeyError("intervention")

    def failure(self, *_: object) -> Any:
        return None


DETECTORS: dict[str, Callable[[Any], Any]] = {
    "raises": lambda facts: facts["no such fact"],
    "no detector": lambda facts: 3,
    "verdict with NaN": lambda facts: OwnDetector(facts, values={"alarm/x": math.nan}),
    "verdict with a key that backends refuse": lambda facts: OwnDetector(facts, values={"Alarm X": 1.0}),
    "verdict with other alarms": lambda facts: OwnDetector(facts, alarms=(3,)),
    "verdict with a level in words": lambda facts: OwnDetector(facts, remaining="x"),
}


@pytest.mark.parametrize("name", DETECTORS)
def test_a_detector_that_fails_costs_verdicts_and_no_record(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ArithmeticError), Telemetry([], run_dir=tmp_path, offload=False, detect=DETECTORS[name]) as telemetry:
        for update in range(3):
            telemetry.log({"my/x": 2.0})
            telemetry.notify_intervention("a change")
            telemetry.flush(env_step=update)
        raise ArithmeticError

    assert [record.values["my/x"] for record in read_run(tmp_path).records] == [2.0, 2.0, 2.0]
    assert "training continues" in caplog.text
