"""From findings to alarms: raise, update and clear; incidents; no alarm is reported twice."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from healthy_run import FACTS, Spoil, Values, alarms, both, judged, later, multiplied, raised, record, run, set_to, values
from hypothesis import example, given, settings
from hypothesis import strategies as st

from esper_telemetry import Telemetry, read_run
from esper_telemetry.alarms import Detectors, Thresholds, Verdict, diagnose
from esper_telemetry.alarms.baselines import power
from esper_telemetry.core.record import AlarmEvent, AlarmLevel, Axes, Level, Record


def during(updates: range, changes: dict[str, float]) -> list[Record]:
    """Sixty records, spoiled in the given updates."""
    made = []
    for update in range(1, 61):
        metrics = values(update)
        if update in updates:
            metrics.update(changes)
        made.append(record(update, metrics))
    return made


def test_an_alarm_is_raised_once_and_cleared_with_its_duration() -> None:
    """KL is high in updates 30 to 34; two calm updates clear the alarm at 36."""
    reported = alarms(judged(during(range(30, 35), {"policy/kl": 2.0})))

    assert [(alarm.event, alarm.axes.update) for alarm in reported] == [(AlarmEvent.RAISE, 30), (AlarmEvent.CLEAR, 36)]
    assert reported[1].text == "Ended at update 36, after 6 updates: One update moved the policy much further than usual."
    assert reported[1].level is reported[0].level and reported[1].severity == 0
    assert (reported[0].since, reported[0].streak, reported[1].since) == (30, 1, 30)


def test_it_is_reported_again_when_it_is_a_quarter_worse() -> None:
    """0.35, 0.4 and 0.9 nats on a ramp from 0.1 to 1: severities 0.54, 0.6 and 0.95."""
    worse = set_to({"policy/kl": lambda ago: (0.35, 0.4, 0.9)[min(ago, 2)], "policy/clip_frac": 0.6})

    reported = [alarm for alarm in alarms(judged(run(34, worse))) if alarm.type == "policy/kl_spike"]

    assert [(alarm.event, alarm.axes.update) for alarm in reported] == [(AlarmEvent.RAISE, 30), (AlarmEvent.UPDATE, 31)]
    assert reported[1].text.startswith("Worse: since update 30, ")


def test_the_beginning_is_the_first_update_of_the_streak() -> None:
    (alarm,) = alarms(judged(run(40, set_to({"policy/kl_max": 0.0}))))

    assert (alarm.type, alarm.axes.update, alarm.since, alarm.streak) == ("policy/kl_stall", 32, 30, 3)


def test_missing_values_hold_an_alarm() -> None:
    """A missing KL is not a recovery: high in updates 30 and 31, absent for four, and calm from 36 on."""
    records = [
        replace(one, values={key: value for key, value in one.values.items() if key != "policy/kl" or one.seq not in range(32, 36)})
        for one in during(range(30, 32), {"policy/kl": 2.0})
    ]

    assert [(alarm.event, alarm.axes.update) for alarm in alarms(judged(records))] == [(AlarmEvent.RAISE, 30), (AlarmEvent.CLEAR, 37)]


def test_layers_that_fail_together_are_one_alarm() -> None:
    """Two layers without a gradient make one event, which names both."""
    dead = set_to({"grad/layer/encoder_weight/norm": 0.0, "grad/layer/core_weight/norm": 0.0})

    (alarm,) = [alarm for alarm in alarms(judged(run(40, dead))) if alarm.type == "grad/vanish"]

    assert "(and 1 more finding)" in alarm.text
    assert alarm.evidence["where"] == {"encoder_weight": 1.0, "core_weight": 1.0}


def first_large(metrics: Values, ago: int) -> None:
    metrics["policy/kl"] = 17.0 if ago == 0 else metrics["policy/kl"]


def test_a_gradient_that_vanishes_with_a_large_step_is_its_effect() -> None:
    """The step saturates the policy, so that its gradient is 0 from the same update on."""
    saturated = both(set_to({"grad/layer/encoder_weight/norm": 0.0, "policy/kl": 0.0, "policy/kl_max": 29.0}), first_large)

    reported = alarms(judged(run(32, saturated)))

    assert {alarm.cause for alarm in reported} == {"policy/kl_spike"}
    assert [alarm.axes.update for alarm in reported if alarm.type == "grad/vanish"] == [31]


def test_alarms_are_numbers_too() -> None:
    """The metric is the severity while the alarm is active, 0 in the update that clears it, and absent afterwards."""
    verdicts = judged(during(range(30, 35), {"policy/kl": 4.0}))
    shown = [(verdict.values["alarm/active"], verdict.values.get("alarm/policy/kl_spike")) for verdict in verdicts]

    assert shown[28] == (0.0, None)
    assert shown[29][0] == 1.0 and shown[29][1] == 1.0
    assert shown[35:37] == [(0.0, 0.0), (0.0, None)]


def test_what_comes_together_is_one_incident_with_one_cause() -> None:
    """Rewards ten thousand times as large spoil the critic in the same update, and the gradients for two updates."""
    large = multiplied(dict.fromkeys(("reward/absmax", "reward/mean", "ret/std", "loss/value", "grad/global/norm_preclip_max"), 10000.0))

    reported = alarms(judged(run(32, large)), AlarmEvent.RAISE)

    assert [alarm.type for alarm in reported] == ["value/scale_shift", "value/loss_jump", "reward/unscaled", "grad/explode"]
    assert {alarm.incident for alarm in reported} == {1}
    assert {alarm.cause for alarm in reported} == {"value/scale_shift"}


LARGE_STEP = set_to({"policy/kl": 1.0, "policy/clip_frac": 0.3})
MASK_BROKEN = set_to({"integrity/mask_violation": 1.0})
BROKEN = set_to({"integrity/gae_identity": 0.5})
SLOW = set_to({"perf/telemetry_frac": 0.5, "perf/telemetry_ms": 5000.0})


@pytest.mark.parametrize(
    ("spoil", "updates", "since", "reported"),
    [
        (both(LARGE_STEP, later(2, BROKEN)), 40, 30, [("policy/kl_spike", 1, None), ("integrity/gae_identity", 1, None)]),
        (both(LARGE_STEP, later(4, BROKEN)), 40, 30, [("policy/kl_spike", 1, None), ("integrity/gae_identity", 2, None)]),
        (
            both(set_to({"policy/kl_max": 0.0}), later(20, set_to({"policy/ratio/p01": 0.01})), later(30, MASK_BROKEN)),
            60,
            20,
            [("policy/kl_stall", 1, None), ("policy/ratio_collapse", 1, "policy/kl_stall"), ("integrity/mask_violation", 2, None)],
        ),
        (both(SLOW, later(26, set_to({"policy/kl": 2.0}))), 30, 1, [("telemetry/overhead", 1, None), ("policy/kl_spike", 1, None)]),
    ],
    ids=[
        "a mistake for certain is the cause, though it shows two updates later",
        "what comes more than three updates later is another incident",
        "an effect belongs to the cause that still lasts, and a broken mask is a separate mistake",
        "telemetry is never the cause",
    ],
)
def test_alarms_have_an_incident_and_a_cause(spoil: Spoil, updates: int, since: int, reported: list[tuple[str, int, str | None]]) -> None:
    """An alarm without a cause in the table is its own cause."""
    raised = alarms(judged(run(updates, spoil, since=since)), AlarmEvent.RAISE)

    assert [(alarm.type, alarm.incident, alarm.cause) for alarm in raised] == [
        (kind, place, cause or kind) for kind, place, cause in reported
    ]


@pytest.mark.parametrize(("lasting", "incidents"), [({"policy/ratio/p01": 0.01}, [1, 1]), ({}, [1, 2])])
def test_what_comes_back_while_its_incident_lasts_belongs_to_it(lasting: dict[str, float], incidents: list[int]) -> None:
    """KL is high in updates 30 to 32 and 45 to 47. With collapsed ratios from 30 on this is one incident, without them two."""
    records = during(range(30, 61), lasting)
    records = [replace(one, values={**one.values, "policy/kl": 2.0}) if one.seq in (30, 31, 32, 45, 46, 47) else one for one in records]

    assert [alarm.incident for alarm in alarms(judged(records), AlarmEvent.RAISE) if alarm.type == "policy/kl_spike"] == incidents


def flickering(count: int) -> list[Record]:
    """An identity that is broken in every second update, which raises an alarm each time."""
    return [record(update, {**values(update), "integrity/gae_identity": 0.5 * (update % 2)}) for update in range(1, count + 1)]


def test_too_many_alarms_are_one_alarm_instead() -> None:
    """The twenty-first alarm in a hundred updates is `telemetry/storm`; hidden alarms are not cleared either."""
    reported = alarms(judged(flickering(100)))
    beginnings = [alarm.type for alarm in reported if alarm.event is AlarmEvent.RAISE]

    assert beginnings == ["integrity/gae_identity"] * 20 + ["telemetry/storm"]
    assert reported[-1].type == "telemetry/storm"
    assert reported[-1].evidence["counts"] == {"integrity/gae_identity": 21}


@pytest.mark.system
def test_the_limit_on_alarms_ends_after_calm_updates() -> None:
    calm = [record(update, values(update)) for update in range(101, 260)]
    spoiled = [record(update, {**values(update), "integrity/gae_identity": 0.5}) for update in range(260, 263)]

    reported = alarms(judged([*flickering(100), *calm, *spoiled]))
    last = [(alarm.type, alarm.event) for alarm in reported[-2:]]

    reports = diagnose(FACTS, [*flickering(100), *calm, *spoiled]).incidents
    assert [report.ends().get("telemetry/storm", 0) for report in reports] == [*[0] * (len(reports) - 2), 178, 0]
    assert last == [("telemetry/storm", AlarmEvent.CLEAR), ("integrity/gae_identity", AlarmEvent.RAISE)]


@pytest.mark.parametrize(
    ("facts", "remaining"),
    [
        ({}, [0, *range(10, 0, -1), 0, 0]),
        ({"escalation": 3}, [0, 3, 2, 1, 0]),
        ({"escalation": 0}, [0, 0, 0]),
        ({"escalation": 30}, [0, *range(30, 0, -1), 0]),
    ],
)
def test_critical_alarms_raise_the_level_for_their_or_the_users_number_of_updates(facts: dict[str, int], remaining: list[int]) -> None:
    """Ten updates for an identity that is broken once. The user's number may exceed the limit of twenty for all alarms together."""
    verdicts = judged(during(range(30, 31), {"integrity/gae_identity": 0.5}), {**FACTS, **facts})[28 : 28 + len(remaining)]

    assert [verdict.remaining for verdict in verdicts] == remaining
    assert [verdict.values["telemetry/escalation_remaining"] for verdict in verdicts] == remaining


@pytest.mark.parametrize(("updates", "raised_levels"), [(None, 10), (2, 2), (0, 0)])
def test_a_run_is_measured_at_debug_as_its_user_asks(updates: int | None, raised_levels: int, tmp_path: Path) -> None:
    """An identity broken in the third of 20 updates raises the level of the updates after its record."""
    with Telemetry(run_dir=tmp_path, escalation=updates, offload=False) as telemetry:
        for update in range(1, 21):
            telemetry.log({"integrity/gae_identity": 0.5 if update == 3 else 1e-8})
            telemetry.flush(env_step=update)

    run = read_run(tmp_path)
    levels = [record.values["telemetry/level"] for record in run.records]
    assert levels.count(Level.DEBUG) == raised_levels
    assert run.info.facts.get("escalation") == updates
    verdicts = judged(run.records, run.info.facts)
    assert [verdict.remaining for verdict in verdicts] == [record.values["telemetry/escalation_remaining"] for record in run.records]


@pytest.mark.parametrize(("updates", "error"), [(-1, ValueError), (2.5, ValueError), ("many", TypeError)])
def test_a_wrong_number_of_updates_is_refused(updates: Any, error: type[Exception], tmp_path: Path) -> None:
    with pytest.raises(error, match="escalation must be"):
        Telemetry(run_dir=tmp_path / "run", escalation=updates)

    assert not (tmp_path / "run").exists()


def test_warnings_raise_no_level_until_they_are_critical() -> None:
    """A loss 17 times the usual is 8 scores away: a warning in its second update. A hundred times is critical in its second update."""
    verdicts = judged(run(40, multiplied({"loss/value": lambda ago: 17 if ago < 4 else 100})))

    assert [verdict.remaining for verdict in verdicts[29:35]] == [0, 0, 0, 0, 0, 5]


def announced(records: list[Record], update: int) -> list[Verdict]:
    """Verdicts of a run in which a change is announced before that update."""
    detectors, verdicts = Detectors(FACTS), list[Verdict]()
    for entry in records:
        if entry.axes.update == update:
            detectors.intervention()
        verdicts.append(detectors.step(entry))
    return verdicts


@pytest.mark.system
def test_after_an_intervention_what_is_new_becomes_the_rule() -> None:
    """Rewards scaled by a thousand after `intervention` raise no alarm; without it they do."""
    large = multiplied(dict.fromkeys(("reward/absmax", "reward/mean", "ret/std", "loss/value"), 1000.0))
    records = run(120, large, since=50)

    assert alarms(announced(records, 50)) == []
    assert set(raised(judged(records))) == {"value/scale_shift", "value/loss_jump"}


def test_an_intervention_ends_what_was_raised_by_history() -> None:
    reported = alarms(announced(run(40, multiplied({"loss/value": 1e4})), 35))

    assert [(alarm.event, alarm.axes.update) for alarm in reported] == [(AlarmEvent.RAISE, 30), (AlarmEvent.CLEAR, 35)]


def test_an_intervention_silences_no_identity() -> None:
    assert raised(announced(run(30, set_to({"integrity/gae_identity": 1.0})), 30)) == {"integrity/gae_identity": 30}


def test_anomalies_do_not_train_their_own_baseline() -> None:
    """The loss is a thousand times as large for forty updates, and the alarm lasts as long."""
    reported = alarms(judged(run(80, set_to({"loss/value": lambda ago: 500.0 if ago < 40 else 0.5}))))

    assert [(alarm.event, alarm.axes.update) for alarm in reported] == [(AlarmEvent.RAISE, 30), (AlarmEvent.CLEAR, 72)]


def test_what_lasts_for_fifty_updates_becomes_the_rule() -> None:
    reported = alarms(judged(run(140, multiplied({"loss/value": 1e3}))))

    assert [alarm.event for alarm in reported] == [AlarmEvent.RAISE, AlarmEvent.CLEAR]
    assert reported[1].axes.update > 30 + 50


def test_a_record_that_was_cut_short_is_judged_by_what_is_wrong_for_certain_only() -> None:
    """Half an update has other numbers, but a NaN in it is still a NaN."""
    cut = record(30, {"numerics/nonfinite": 2.0, "policy/kl": 3.0, "loss/value": 1e9}, partial=True)

    assert set(raised(judged([*run(29), cut]))) == {"numerics/nonfinite"}


def test_the_same_records_give_the_same_alarms() -> None:
    records = run(80, multiplied({"loss/value": 1e4, "grad/global/norm_preclip_max": 1e3}))

    assert judged(records) == judged(records)


def test_without_facts_questions_stay_open_instead_of_being_guessed() -> None:
    """Without the precision, rounding and a bug look the same."""
    verdicts = judged(run(40, set_to({"integrity/ratio_init": 0.4})), facts={})
    events = [event for verdict in verdicts for event in verdict.events if event[0] == "detectors/unanswered"]

    assert alarms(verdicts) == []
    ((_, data),) = events
    assert data["questions"]["integrity/ratio_init"] == "the facts of the run lack precision"
    assert data["questions"]["policy/entropy_crash"] == "the facts of the run lack total_steps"


def test_without_values_questions_stay_open_once() -> None:
    bare = [record(update, {"policy/kl": 0.5}) for update in range(1, 60)]
    detectors = Detectors(FACTS)
    events = [event for entry in bare for event in detectors.step(entry).events]

    assert [name for name, _ in events] == ["detectors/unanswered"]
    assert events[0][1]["questions"]["value/loss_jump"] == "no record has loss/value"
    assert detectors.coverage.unanswered()["lstm/forget_open"] == "no record has lstm/gate/f/sat_hi"
    assert "policy/kl_spike" not in detectors.coverage.unanswered()


def test_a_policy_without_memory_is_not_asked_about_it() -> None:
    detectors = Detectors({**FACTS, "policy": "mlp"})
    detectors.step(record(1, values(1)))

    assert not {rule.type for rule in detectors.rules} & {"lstm/forget_open", "lstm/reset_missing"}
    assert detectors.coverage.unanswered() == {}


@pytest.mark.system
def test_evidence_is_bounded() -> None:
    many = {f"grad/layer/layer_{i}/norm": 0.1 for i in range(500)}
    records = [record(update, {**values(update), **many}) for update in range(1, 31)]
    dead = record(31, {**values(31), **dict.fromkeys(many, 0.0)})

    (alarm,) = [alarm for alarm in alarms(judged([*records, dead])) if alarm.type == "grad/vanish"]

    assert len(alarm.evidence["values"]) == 24
    assert len(alarm.evidence["where"]) == 8


def test_usual_ranges_are_reported() -> None:
    (alarm,) = alarms(judged(run(35, multiplied({"loss/value": 1e4}))))

    low, high = alarm.evidence["usual"]["loss/value"]
    assert 0.46 < low < high < 0.54
    assert "(usually 0.4" in alarm.text or "(usually 0.5" in alarm.text


def test_a_usual_value_may_be_the_largest_number_there_is() -> None:
    assert power(308.3) == power(1e300) == 1e308
    assert power(-1e300) == 0.0
    assert power(2.0) == 100.0


@pytest.mark.system
@given(
    st.lists(
        st.dictionaries(
            st.sampled_from([*values(1), "policy/kl/period/p", "policy/kl/period/length", "my/number", "loss/value_nonfinite"]),
            st.one_of(
                st.floats(allow_nan=True, allow_infinity=True),
                st.sampled_from([0.0, -1.0, 1e300, -1e300, 1e-320, float("nan"), float("inf")]),
            ),
        ),
        max_size=8,
    ),
    st.booleans(),
)
@example([{"opt/lr": 1e-320}], False)
@example([*[{"grad/layer/core_weight/norm": 1e-320}] * 4, {"grad/layer/core_weight/norm": 1e117}], False)
@example([{"episode/return_mean": 1e300, "episode/return_std": 1e300, "episode/count": 0.0}], False)
@settings(max_examples=50, deadline=None)
def test_no_value_makes_it_raise(spoiled: list[dict[str, float]], known: bool) -> None:
    """Any values may be extreme or missing, before and after an intervention."""
    detectors = Detectors(FACTS if known else {})
    for entry in run(25):
        detectors.step(entry)
    for update, changes in enumerate(spoiled, 26):
        verdict = detectors.step(record(update, {**values(update), **changes}))
        assert verdict.remaining >= 0
        detectors.step(record(update, dict(changes)))
        if update == 28:
            detectors.intervention()


def test_odd_facts_make_it_raise_nothing() -> None:
    odd: dict[str, Any] = dict.fromkeys(("heads", "horizon", "max_grad_norm")) | dict.fromkeys(("total_steps", "num_steps"), 0)

    assert alarms(judged(run(60), {**odd, "groups": {}, "precision": "fp8"})) == []


def test_records_out_of_order_and_twice_make_it_raise_nothing() -> None:
    records = run(40)
    again = [replace(entry, axes=Axes(1, 0, 0, 0.0)) for entry in records[:20]]

    assert alarms(judged([*records, *again, *records])) == []


def test_levels_follow_severities() -> None:
    assert [AlarmLevel.of(x) for x in (0.2, 0.25, 0.74, 0.75)] == ["info", "warn", "warn", "critical"]


def test_too_many_alarms_without_a_reported_one_are_a_report_too() -> None:
    """Of three simultaneous alarms one may be reported: the first, followed by `telemetry/storm`."""
    at_once = run(35, set_to({"integrity/gae_identity": 1.0, "integrity/mask_violation": 1.0, "buffer/age_updates": 9.0}))

    limits = Thresholds().with_changes({"storm": 1})
    (report,) = diagnose(FACTS, at_once, thresholds=limits).incidents

    assert [alarm.type for alarm in report.alarms] == ["integrity/mask_violation", "telemetry/storm"]
    assert report.cause == "integrity/mask_violation"

    (nothing_else,) = diagnose(FACTS, at_once, thresholds=limits.with_changes({"storm": 0})).incidents
    assert [alarm.type for alarm in nothing_else.alarms] == ["telemetry/storm"]
    assert nothing_else.main.text.startswith("Since update 30, more than 0 alarms")


def test_of_two_mistakes_that_show_together_the_cause_comes_first_though_its_rule_waits() -> None:
    """With constant observations weights do not move: `obs/constant` takes two updates, `opt/stalled_weights` shows at once."""
    blind = {"obs/constant_frac": 1.0, "obs/still_frac": 1.0, "opt/update_to_weight/encoder_weight": 0.0}

    reported = alarms(judged(run(10, set_to(blind), since=1)), AlarmEvent.RAISE)

    order = {alarm.type: alarm.axes.update for alarm in reported}
    assert order["opt/stalled_weights"] < order["obs/constant"]
    assert {alarm.cause for alarm in reported if alarm.axes.update >= order["obs/constant"]} == {"obs/constant"}
