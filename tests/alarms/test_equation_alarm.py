"""The alarm `integrity/equation`: its sentence, its severity, and its choice among several equations."""

from collections.abc import Mapping

import pytest

from esper_telemetry.alarms import Detectors
from esper_telemetry.core.rate_schedule import SCHEDULE_FACT, RateSchedule
from esper_telemetry.core.record import Alarm, AlarmEvent, AlarmLevel, Axes, Record
from esper_telemetry.equations import equation as declarations
from esper_telemetry.equations.equation import Equation, Hypothesis


def declare(name: str, rank: int, *hypotheses: Hypothesis, advice: str = "") -> Equation:
    return Equation(
        name=name,
        quantity=f"the {name}",
        equation="x = a long formula",
        compute=lambda inputs: None,
        hypotheses=hypotheses,
        source="a book",
        inputs="x",
        rank=rank,
        advice=advice,
    )


SUMS = declare(
    "sums",
    1,
    Hypothesis("minus", "differences", "s = a - b", advice="Add them."),
    Hypothesis("times", "products", "s = a b", advice="Do not multiply"),
    Hypothesis("mean", "means", "s = (a + b) / 2", variant=True),
    *[Hypothesis(f"h{place}", f"h{place}", "s") for place in range(3)],
)
MEANS = declare("means", 2, Hypothesis("half", "halves", "m = s / 2"), advice="Look at the means.")
LOSSES = declare("losses", 3)
RATES = declarations.equations()["schedules"]


@pytest.fixture(autouse=True)
def declared(monkeypatch: pytest.MonkeyPatch) -> None:
    by_name = {one.name: one for one in (LOSSES, SUMS, MEANS, RATES)}
    monkeypatch.setattr("esper_telemetry.equations.equation.equations", lambda: by_name)


def judged(*updates: Mapping[str, float], **facts: object) -> list[Alarm]:
    """Alarms about equations for records with these values."""
    detectors = Detectors({"level": "normal", **facts})
    found: list[Alarm] = []
    for update, values in enumerate(updates, 1):
        named = {key if "/" in key else f"integrity/equation/{key}": value for key, value in values.items()}
        found += detectors.step(Record(update, Axes(update, 100 * update, update, 0.0), named)).alarms
    return [alarm for alarm in found if alarm.type == "integrity/equation"]


def test_a_mistake_is_named_at_once_with_its_own_advice() -> None:
    (alarm,) = judged({"sums": 0.25, "sums_minus": 1e-7})

    assert alarm.text == (
        "Since update 1, the sums equal differences, and differ from their reference equation by 25 % of the largest number. Try: Add them."
    )
    assert (alarm.level, alarm.key, alarm.value) == (AlarmLevel.CRITICAL, "integrity/equation/sums", 0.25)


def test_a_sentence_ends_with_one_period_whether_its_advice_has_one_or_not() -> None:
    (alarm,) = judged({"sums": 0.25, "sums_times": 1e-7})

    assert alarm.text.endswith(" Try: Do not multiply.")


def test_mistakes_that_cannot_be_told_apart_are_a_set() -> None:
    (two,) = judged({"sums": 0.25, "sums_minus": 0.0, "sums_times": 0.0})
    many = {f"sums_{name}": 0.0 for name in ("minus", "times", "h0", "h1", "h2")}
    (several,) = judged({"sums": 0.25, **many})

    assert "the sums equal differences or products, and differ" in two.text
    assert "the sums equal differences or products or h0 or 2 others, and differ" in several.text


def test_the_cause_is_named_first_and_the_others_in_a_clause() -> None:
    (alarm,) = judged({"losses": 0.5, "means": 0.1, "means_half": 0.0, "sums": 0.25, "sums_minus": 0.0}, {"losses": 0.5})
    (both,) = judged({"means": 0.1, "means_half": 0.0, "sums": 0.25, "sums_minus": 0.0})

    assert alarm.text.startswith("Since update 1, the sums equal differences, ")
    assert both.text.startswith("Since update 1, the sums equal differences, ")
    assert "largest number; the means differ too. Try: Add them." in both.text


def test_a_difference_that_is_explained_comes_before_one_that_is_not() -> None:
    (alarm,) = judged({"sums": 0.1}, {"sums": 0.1, "means": 0.1, "means_half": 0.0})

    assert "the means equal halves, and differ" in alarm.text
    assert alarm.text.endswith("; the sums differ too. Try: Look at the means.")


def test_a_difference_without_an_explanation_is_a_warning_once_it_repeats() -> None:
    assert judged({"losses": 0.5}) == []
    assert judged({"losses": 0.5}, {"losses": 0.0}, {"losses": 0.5}) == []
    (alarm,) = judged({"losses": 0.5}, {}, {"losses": 0.5})

    assert alarm.level is AlarmLevel.WARN
    assert alarm.text.startswith(
        "Since update 3, the losses differ from their reference equation by 50 % of the largest number, and no known mistake explains it. "
        "Try: Compare the trainer's code"
    )


def test_a_warning_becomes_critical_where_a_mistake_explains_it() -> None:
    alarms = judged({"sums": 0.5}, {"sums": 0.5}, {"sums": 0.5, "sums_minus": 0.0})

    assert [(alarm.event, alarm.level) for alarm in alarms] == [
        (AlarmEvent.RAISE, AlarmLevel.WARN),
        (AlarmEvent.UPDATE, AlarmLevel.CRITICAL),
    ]


def test_a_variant_raises_nothing_alone_or_among_mistakes() -> None:
    assert judged(*[{"sums": 0.5, "sums_mean": 0.0}] * 3) == []
    assert judged(*[{"sums": 0.5, "sums_mean": 0.0, "sums_minus": 0.0}] * 3) == []


def test_an_update_that_does_not_check_leaves_the_alarm_on() -> None:
    alarms = judged({"sums": 0.25, "sums_minus": 0.0}, {}, {"means": 0.0}, {"sums": 0.0})

    assert [(alarm.event, alarm.axes.update) for alarm in alarms] == [(AlarmEvent.RAISE, 1), (AlarmEvent.CLEAR, 4)]


def test_the_tolerance_is_that_of_the_precision_of_the_check_and_of_the_thresholds() -> None:
    small = {"sums": 0.01, "sums_minus": 0.0}

    assert len(judged(small)) == 1
    assert judged(small, precision="bf16") == []
    assert judged({**small, "integrity/equation_tolerance/sums": 0.02}) == []
    assert judged(small, thresholds={"equation_factor": 200.0}) == []


def test_a_schedule_that_was_never_set_is_named() -> None:
    """A line from 1 to 0 in ten updates: the third update distinguishes it from a constant rate."""
    line = RateSchedule(initial=1.0, final=0.0, total_steps=1000).fact()
    right = judged(*({"opt/lr": 1 - update / 10} for update in range(10)), **{SCHEDULE_FACT: line})
    (alarm,) = judged(*[{"opt/lr": 1.0}] * 10, **{SCHEDULE_FACT: line})

    assert right == []
    assert (alarm.key, alarm.since) == ("opt/lr", 3)
    assert "the learning rates equal the first learning rate throughout, although a schedule is configured, and differ" in alarm.text
