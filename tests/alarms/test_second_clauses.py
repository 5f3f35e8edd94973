"""Second signs of a fault if its first sign is missing, and healthy cases that resemble them."""

from __future__ import annotations

import pytest
from healthy_run import FACTS, Values, alarms, both, judged, multiplied, raised, run, set_to

from esper_telemetry.alarms import Detectors
from esper_telemetry.core.record import AlarmEvent

SINCE = 30


def test_returns_of_another_scale_show_what_rewards_do_not() -> None:
    """A factor is applied after rewards are measured."""
    behind = multiplied({"ret/mean": 1e4, "ret/std": 1e4})

    assert raised(judged(run(40, behind))) == {"value/scale_shift": SINCE}


def test_a_spread_of_returns_alone_is_no_change_of_scale() -> None:
    """If a policy that rarely fails fails again, returns spread at almost the same mean."""
    assert "value/scale_shift" not in raised(judged(run(40, multiplied({"ret/std": 1e3}))))


def test_rewards_that_shrink_because_the_worst_are_avoided_are_no_change_of_scale() -> None:
    assert "value/scale_shift" not in raised(judged(run(40, multiplied({"reward/absmax": 0.2, "reward/mean": 0.1}))))


@pytest.mark.parametrize("small", [3, 6], ids=["few", "most"])
def test_rewards_of_the_same_part_of_each_episode_are_no_change_of_scale(small: int) -> None:
    """All environments start together. A balanced pole costs almost no reward in the last updates of each episode of eight."""

    def in_phase(metrics: Values, ago: int) -> None:
        part = ago % 8
        metrics["episode/count"] = 50.0 if part == 7 else 0.0
        if part >= 8 - small and ago >= 24:
            metrics.update({"reward/absmax": 1.3e-3, "reward/mean": 5e-4, "reward/std": 4e-4})

    assert "value/scale_shift" not in raised(judged(run(200, in_phase, since=1)))


def test_rewards_that_stay_small_when_the_next_episode_begins_are_a_change_of_scale() -> None:
    def fallen(metrics: Values, ago: int) -> None:
        metrics["episode/count"] = 50.0 if ago % 8 == 7 else 0.0
        if ago >= 50:
            metrics.update({"reward/absmax": 1.3e-3, "reward/mean": 5e-4, "reward/std": 4e-4})

    assert raised(judged(run(80, fallen, since=1)))["value/scale_shift"] == 1 + 56


def test_a_cell_that_grows_with_age_does_so_in_two_updates() -> None:
    """If all environments reset together, one update in eight holds only the first and the last ages."""

    def in_phase(metrics: Values, ago: int) -> None:
        metrics["lstm/c_growth"] = 13.0 if ago % 8 == 0 else 0.5

    assert "lstm/cell_drift" not in raised(judged(run(80, in_phase)))
    assert raised(judged(run(40, set_to({"lstm/c_growth": 13.0}))))["lstm/cell_drift"] == SINCE + 1


def test_a_cell_that_fills_once_has_not_drifted() -> None:
    """A single step can write a state of this size, so the memory does not accumulate."""
    assert "lstm/cell_drift" not in raised(judged(run(40, set_to({"lstm/c_growth": 13.0, "lstm/c/rms": 0.6}))))


def test_an_update_without_tokens_has_no_gradient_and_that_is_named_as_truncation() -> None:
    """All completions are truncated, and the loss leaves truncated ones out: in one update, or from then on."""
    layers = dict.fromkeys(("grad/layer/heads_op_weight/norm", "grad/layer/core_weight/norm"), 0.0)
    empty = {**layers, "lm/tokens": 0.0, "lm/truncated_frac": 1.0}

    def once(metrics: Values, ago: int) -> None:
        metrics.update(empty if ago == 0 else {"lm/tokens": 80.0, "lm/truncated_frac": 0.9})

    assert "grad/vanish" in raised(judged(run(40, set_to(layers))))
    assert not {"grad/vanish", "lm/truncation"} & raised(judged(run(40, once))).keys()
    assert raised(judged(run(40, set_to(empty))))["lm/truncation"] == SINCE + 2
    assert "grad/vanish" not in raised(judged(run(40, set_to(empty))))


def test_a_normaliser_that_cuts_is_reported_at_once() -> None:
    assert raised(judged(run(40, set_to({"norm/obs/clip_frac": 0.15})))) == {"norm/drift": SINCE}


def test_an_actor_that_epsilon_swallows_is_starved_from_the_start() -> None:
    """Its clipped gradient is below Adam's epsilon from the start, so no history differs."""
    starved = {"grad/interference/actor_effective": 1e-6, "grad/interference/critic_share": 0.9999}

    assert raised(judged(run(5, set_to(starved), since=1)))["grad/actor_starved"] == 2
    assert raised(judged(run(5, set_to({**starved, "grad/interference/actor_effective": 1e-4}), since=1))) == {}


def test_a_learning_rate_that_swings_is_an_oscillation() -> None:
    """Between a tenth and ten times its value, every six updates: raised at the third swing."""

    def swing(metrics: Values, ago: int) -> None:
        metrics["opt/lr"] *= (10, 10, 1, 0.1, 0.1, 1)[ago % 6]

    assert SINCE + 6 <= raised(judged(run(60, swing)))["grad/oscillation"] <= SINCE + 10


def test_a_learning_rate_that_restarts_is_a_schedule() -> None:
    """A cosine of twenty updates, repeated."""

    def restart(metrics: Values, ago: int) -> None:
        metrics["opt/lr"] *= 0.05 + 0.95 * (1 - ago % 20 / 20)

    assert alarms(judged(run(150, restart, since=1))) == []


def test_a_learning_rate_that_creeps_up_is_a_drift() -> None:
    """It grows by 3 % per update from the configured rate: 1.16 times as large after five updates."""

    def creep(metrics: Values, ago: int) -> None:
        metrics["opt/lr"] *= 1.03 ** (ago + 1)

    verdicts = judged(run(60, creep), {**FACTS, "learning_rate": 2.5e-3})

    assert raised(verdicts) == {"grad/drift": SINCE + 8}
    assert raised(judged(run(60, creep), {**FACTS, "learning_rate": 2.5e-3, "desired_kl": 0.01})) == {}


def test_a_learning_rate_that_swings_is_an_oscillation_unless_it_follows_the_kl() -> None:
    def swing(metrics: Values, ago: int) -> None:
        metrics["opt/lr"] *= 5 if ago % 4 < 2 else 1

    assert "grad/oscillation" in raised(judged(run(60, swing)))
    assert "grad/oscillation" not in raised(judged(run(60, swing), {**FACTS, "desired_kl": 0.01}))


def test_a_critic_that_learned_fast_is_judged_by_its_last_losses_when_rewards_grow() -> None:
    """A loss of 40 is usual in a history of three decades, but recent losses are 0.1, and rewards are four times as large."""

    def fast(metrics: Values, ago: int) -> None:
        metrics["loss/value"] = max(0.1, 100 * 0.7**ago)
        if ago >= 29:
            metrics.update({"loss/value": 40.0, "reward/absmax": 5.2})

    assert raised(judged(run(40, fast, since=1))) == {"value/loss_jump": 30}


def test_a_policy_that_a_dominant_critic_carries_along_goes_in_no_direction_of_its_own() -> None:
    carried = set_to({"policy/surrogate_gain": -0.02, "grad/interference/critic_share": 0.9999})

    assert "policy/wrong_direction" not in raised(judged(run(40, carried)))


def test_a_schedule_may_begin_at_nothing() -> None:
    """The first update of a linear warm-up has rate 0; a rate that stays 0 is a mistake."""

    def warm(metrics: Values, ago: int) -> None:
        metrics["opt/lr"] *= min(1.0, ago / 10)

    assert alarms(judged(run(40, warm, since=1))) == []
    assert raised(judged(run(20, set_to({"opt/lr": 0.0, "policy/kl_max": 1e-6}), since=1))) == {
        "opt/stalled_weights": 6
    }


def test_what_is_not_finite_is_named_where_it_came_from() -> None:
    spoiled = set_to({"numerics/nonfinite": 9.0, "grad/global/norm_preclip_nonfinite": 4.0, "reward/nonfinite": 1.0})

    (alarm,) = alarms(judged(run(30, spoiled)))

    assert alarm.text.startswith(
        "Since update 30, 9 numbers have been NaN or infinite, for example in reward, grad/global"
    )


def test_unlikely_actions_round_more() -> None:
    """At a log-probability of -20, a rounding error of 4e-5 is to be expected."""
    unlikely = set_to({"integrity/ratio_init": 3e-5, "policy/logp/min": -20.0})

    assert alarms(judged(run(40, unlikely))) == []


def test_advantages_that_are_a_little_off_for_long_raise_an_alarm() -> None:
    """0.03 for five updates, as when rows are left out of the update; rounding leaves 0.0005."""
    off = set_to({"integrity/adv_norm": 0.03})

    assert raised(judged(run(40, off), {**FACTS, "normalize_minibatches": False})) == {"integrity/adv_norm": SINCE + 1}
    assert raised(judged(run(40, off), {**FACTS, "normalize_minibatches": True})) == {}


def test_gates_that_were_open_count_as_open_until_they_are_measured_again() -> None:
    """Gates are measured in every tenth update: open in the first measurement, as usual in the second."""

    def sometimes(metrics: Values, ago: int) -> None:
        metrics["lstm/gate/f/sat_hi"] = 0.99 if ago < 10 else 0.2
        if ago % 10:
            del metrics["lstm/gate/f/sat_hi"]

    changes = [(alarm.event, alarm.axes.update) for alarm in alarms(judged(run(60, sometimes)))]

    assert changes == [(AlarmEvent.RAISE, SINCE), (AlarmEvent.CLEAR, SINCE + 12)]


def test_a_small_cell_state_is_no_shut_gate_where_gates_were_just_seen_open() -> None:
    """Cell states stay below what one step can write: they raise the alarm only if the gates were not measured."""

    def small(metrics: Values, ago: int) -> None:
        metrics.update(
            {"lstm/c/absmax": 0.9, "lstm/c/rms": 0.8, "lstm/gate/f/sat_lo": 0.0, "lstm/timescale/median": 4.0}
        )

    def unseen(metrics: Values, ago: int) -> None:
        small(metrics, ago)
        del metrics["lstm/gate/f/sat_lo"], metrics["lstm/timescale/median"]

    def never(metrics: Values, _: int) -> None:
        metrics.pop("lstm/gate/f/sat_lo", None)

    assert "lstm/forget_closed" not in raised(judged(run(40, small)))
    blind = [*run(SINCE - 1, never, since=1), *run(40, unseen)[SINCE - 1 :]]
    assert raised(judged(blind))["lstm/forget_closed"] == SINCE + 1


def test_a_forget_gate_that_stays_open_shows_in_the_cell_state_before_gates_are_looked_at() -> None:
    """The cell state doubles within an update and grows with age; reaching the same size slowly is learning."""
    opened = both(multiplied({"lstm/c/rms": 2}), set_to({"lstm/c_growth": 1.6, "lstm/gate/f/sat_hi": None}))

    def slowly(metrics: Values, ago: int) -> None:
        metrics["lstm/c/rms"] *= min(2.0, 1.05**ago)
        metrics["lstm/c_growth"] = 1.6
        metrics.pop("lstm/gate/f/sat_hi")

    assert raised(judged(run(40, opened)))["lstm/forget_open"] == SINCE
    assert "lstm/forget_open" not in raised(judged(run(60, slowly)))


def test_what_a_look_at_the_gates_has_refuted_is_not_inferred_again() -> None:
    """Cell states double occasionally over long episodes, while every tenth update measures gates that are in use."""

    def bursts(metrics: Values, ago: int) -> None:
        if ago % 10:
            del metrics["lstm/gate/f/sat_hi"]
        if ago % 10 in (5, 6):
            metrics["lstm/c/rms"] *= 2 + ago / 10
            metrics["lstm/c_growth"] = 1.6

    told = [alarm for alarm in alarms(judged(run(90, bursts))) if alarm.type == "lstm/forget_open"]

    assert [(alarm.event, alarm.axes.update) for alarm in told if alarm.event is AlarmEvent.RAISE] == [
        (AlarmEvent.RAISE, SINCE + 5)
    ]


def test_a_cell_state_about_its_bound_is_one_alarm() -> None:
    """It varies between 40 and 60 around the bound of 50: the alarm stays active until the state is much smaller."""

    def swing(metrics: Values, ago: int) -> None:
        metrics["lstm/c/absmax"] = 40.0 + 20.0 * (ago % 2)

    told = [alarm for alarm in alarms(judged(run(60, swing))) if alarm.type == "lstm/cell_drift"]

    assert [alarm.event for alarm in told] == [AlarmEvent.RAISE]


def test_a_normaliser_settles_again_after_what_was_changed_on_purpose() -> None:
    """Rewards rescaled at update 50 move their normaliser for thirty more updates."""
    detectors = Detectors({**FACTS, "total_steps": None})
    verdicts = []
    for record in run(85, set_to({"norm/ret/drift": 1.0}), since=51):
        if record.seq == 51:
            detectors.intervention()
        verdicts.append(detectors.step(record))

    assert "norm/drift" not in raised(verdicts)
    assert raised(judged(run(85, set_to({"norm/ret/drift": 1.0}), since=51)))["norm/drift"] == 60
