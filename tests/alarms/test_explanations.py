"""What is shown with a bad outcome, and which advice is given: causes before consequences, and nothing that the equations refute."""

from dataclasses import replace

import pytest
import recorded_runs
from healthy_run import FACTS, alarms, both, judged, later, run, set_to

from esper_telemetry.alarms import Diagnosis, diagnose
from esper_telemetry.alarms.rules.equation_alarms import sensible_advice
from esper_telemetry.views.document import text_lines
from esper_telemetry.views.verdict_text import verdict_document

UNSCALED = {**FACTS, "normalize_observations": False}


def text_of(verdict: Diagnosis) -> str:
    return " ".join(" ".join(text_lines(verdict_document("run", verdict))).split())


def test_a_warning_does_not_hide_the_explanation_of_a_flat_run() -> None:
    """Large observations may be harmless. Advantages with little spread explain a flat return, and no rule reads them here."""
    facts = {**UNSCALED, "normalize_advantages": None}
    verdict = diagnose(facts, run(60, set_to({"obs/rms_max": 5000.0, "adv/norm/std": 0.001}), since=1))
    text = text_of(verdict)

    assert [incident.cause for incident in verdict.incidents] == ["obs/unscaled"]
    assert verdict.unexplained and verdict.unusual[0].key == "adv/norm/std"
    assert "(1 value, median of the last 10 updates)" in text
    assert text.index("obs/unscaled") < text.index("Unexplained: the run is flat") < text.rindex("adv/norm/std: 0.001 (")


def test_values_beyond_critical_bounds_come_first_heads_included() -> None:
    """The action range is known from no healthy run; entropy is far from healthy runs, but within its bounds."""
    changes = {"policy/head/op/kl": 0.5, "policy/entropy_norm": 0.05, "repr/excess_ratio/high": 1.5, "repr/dead_frac": 0.5}
    unusual = diagnose(FACTS, run(60, set_to(changes), since=1)).unusual

    assert {entry.key for entry in unusual[:2]} == {"policy/head/op/kl", "repr/excess_ratio/high"}
    assert [entry.is_critical for entry in unusual] == sorted((entry.is_critical for entry in unusual), reverse=True)


def test_episodes_of_one_length_are_the_last_explanation_unless_the_critic_is_surprised_by_their_ends() -> None:
    """Nothing is rewarded, and all episodes terminate after 200 steps."""
    limited = {"episode/terminated_length_min": 200.0, "episode/terminated_length_max": 200.0, "reward/absmax": 0.0}
    limited |= {"reward/std": 0.0, "reward/mean": 0.0}
    surprised = limited | {"value/bias_terminated": -8.0, "value/bias": 0.0, "ret/std": 2.0}

    names = [[data["name"] for data in diagnose(FACTS, run(12, set_to(one), since=1)).shown_remarks] for one in (limited, surprised)]

    assert names == [["no reward", "fixed length"], ["fixed length", "no reward"]]


def test_a_setting_outside_all_published_ranges_comes_before_the_incident_that_it_may_explain() -> None:
    spoiled = run(40, set_to({"policy/surrogate_gain": -0.03}))
    certain = run(40, set_to({"integrity/gae_identity": 0.5}))

    text, mistaken = (text_of(diagnose({**FACTS, "learning_rate": 0.1}, records)) for records in (spoiled, certain))

    assert text.index("learning_rate is 0.1") < text.index("policy/wrong_direction")
    assert mistaken.index("integrity/gae_identity") < mistaken.index("learning_rate is 0.1")


@pytest.mark.parametrize("kl", [0.008, 0.18])
def test_a_large_step_is_named_before_what_may_follow_from_it(kl: float) -> None:
    """A KL divergence of 0.18 in one update, and from the next one on updates against their own objective."""
    large = set_to({"policy/kl": lambda ago: 0.008 if ago else kl, "policy/surrogate_gain": lambda ago: -0.02 if ago else 0.03})

    (alarm,) = alarms(judged(run(36, large)))

    assert alarm.type == "policy/wrong_direction"
    assert alarm.text.startswith("In update 30 the policy moved by a KL divergence of 0.18 nats") is (kl > 0.1)
    assert ("sign" in alarm.text) is (kl < 0.1)


def test_a_real_collapse_names_the_step_that_came_first() -> None:
    """Acrobot at a hundred times its learning rate from update 25 on."""
    recorded = recorded_runs.load("acrobot-lr_x100-100-s3")
    found = {alarm.type: alarm.text for alarm in alarms(judged(recorded.records, recorded.facts))}

    assert found["policy/entropy_collapse"].startswith(("In update 29 the policy moved", "Worse: since", "Ended"))


def test_advice_leaves_out_what_the_equations_have_found_right() -> None:
    (alarm,) = alarms(judged(run(36, set_to({"policy/surrogate_gain": -0.02, "integrity/equation/policy_loss": 0.0}))))
    advice = "Check the sign of the policy loss; lower the learning rate."

    assert "sign" not in alarm.text and alarm.text.endswith("The policy losses match their equation.")
    assert sensible_advice(advice, {"policy_loss"}) == "Lower the learning rate. The policy losses match their equation."
    assert sensible_advice(advice, {"value_loss"}) == advice


def test_a_biased_critic_is_not_sent_to_targets_that_are_right() -> None:
    """The values are off by half of the returns from update 30 on; the last alarm has equations that were checked."""
    off = {"value/bias": 6.0, "value/bias_over_std": 3.0}
    right = {"integrity/equation/advantages": 0.0, "integrity/equation/returns": 0.0}
    unchecked, checked = (alarms(judged(run(45, set_to(one))))[0].text for one in (off, off | right))

    assert "how returns are bootstrapped at time limits" in unchecked
    assert checked.endswith("Try: Train the critic for more epochs. The advantages and the returns match their equations.")


def test_a_drop_without_another_alarm_does_not_point_to_an_earlier_one() -> None:
    """The return rises to 3 and falls to -4; the second time the entropy has collapsed before."""

    dropped = set_to({"episode/return_mean_100": lambda ago: 0.1 * ago if ago < 29 else -4.0})
    collapsed = later(29, set_to({"policy/entropy_norm": 0.03, "policy/entropy_marginal_norm": 0.05}))

    alone, after = (
        next(one.text for one in alarms(judged(run(60, spoil, since=1))) if one.type == "task/return_drop")
        for spoil in (dropped, both(dropped, collapsed))
    )

    assert alone.endswith("Try: Return to the best checkpoint with a lower learning rate.")
    assert "Look for the alarm that came first; return to" in after


def test_a_return_that_was_higher_is_not_explained_by_a_task_that_is_too_hard() -> None:
    """A flat and a falling run without an alarm, a remark or an unusual value."""

    def text(slope: float) -> str:
        course = set_to({"episode/return_mean": lambda ago: 5.0 - slope * ago + 0.01 * (ago % 3)})
        return text_of(replace(diagnose(FACTS, run(60, course, since=1)), unusual=()))

    flat, falling = text(0.0), text(0.06)

    assert "Flat: " in flat and "the task may be too hard for this policy" in flat
    assert "Declining: " in falling and "too hard" not in falling
