"""Wrong settings, ends of episodes and observations, detected from the run itself."""

from dataclasses import replace
from typing import Any

import pytest
from healthy_run import FACTS, Values, alarms, both, judged, multiplied, raised, run, set_to

from esper_telemetry.core.record import Alarm, Record

SINCE = 30
LIMITED = {**FACTS, "horizon": 500}
STEP_LENGTH = 512


def first(spoil: Any, kind: str, facts: Any = FACTS) -> Alarm:
    return next(alarm for alarm in alarms(judged(run(60, spoil), facts)) if alarm.type == kind)


def test_entropy_that_stands_in_the_loss_as_it_is_has_the_wrong_sign() -> None:
    """An entropy loss is minus the entropy; the alarm follows in the second update, at the start of the run or late in it."""
    told = first(set_to({"loss/entropy": 0.8}), "policy/entropy_crash")

    assert (told.since, told.axes.update, told.key) == (SINCE, SINCE + 1, "loss/entropy")
    assert "the loss has penalised exploration instead of rewarding it" in told.text


def test_a_bonus_whose_weight_has_become_negative_is_none() -> None:
    assert "policy/entropy_crash" in raised(judged(run(40, set_to({"loss/entropy_coef": -0.01}))))
    on_purpose = {**FACTS, "entropy_coef": -0.01}
    assert raised(judged(run(40, set_to({"loss/entropy_coef": -0.01}), since=1), on_purpose)) == {}


def test_a_bonus_without_weight_may_have_any_sign() -> None:
    assert raised(judged(run(40, set_to({"loss/entropy": 0.8, "loss/entropy_coef": 0.0})))) == {}


def test_entropy_that_plunges_early_is_reported_within_three_updates() -> None:
    """The entropy falls to a third in every update, too fast for a slope over twenty updates."""

    def plunge(found: Values, ago: int) -> None:
        found["policy/entropy_norm"] = 0.6 / 3 ** min(ago + 1, 3)

    early = {**FACTS, "total_steps": 1000 * STEP_LENGTH}

    def solve(found: Values, ago: int) -> None:
        found["episode/return_mean"] *= 10.0 if ago >= 5 else 1.0
        if ago >= 20:
            plunge(found, ago - 20)

    assert raised(judged(run(40, plunge), early))["policy/entropy_crash"] == SINCE + 2
    assert "policy/entropy_crash" not in raised(judged(run(40, plunge)))
    assert "policy/entropy_crash" not in raised(judged(run(40, solve, since=1), early))


def test_a_memory_of_ten_steps_is_short_where_rewards_are_rare() -> None:
    """beta2 = 0.9 reaches back ten of an update's sixteen steps; every fourth update has a reward."""

    def rare(found: Values, ago: int) -> None:
        found["reward/zero_frac"] = 0.4 if ago % 4 == 3 else 1.0

    short = set_to({"opt/beta2": 0.9})

    assert raised(judged(run(60, both(short, rare), since=1))) == {"opt/rms_spike": 21}
    assert raised(judged(run(60, short, since=1))) == raised(judged(run(60, rare))) == {}


def test_a_memory_that_has_become_shorter_than_an_update_raises_an_alarm() -> None:
    """From a thousand steps to ten in mid-run; twenty, which is more than an update, raises no alarm."""
    assert raised(judged(run(40, set_to({"opt/beta2": 0.9})))) == {"opt/rms_spike": SINCE}
    assert raised(judged(run(40, set_to({"opt/beta2": 0.95})))) == {}


def test_more_passes_than_ever_are_reported_where_they_move_the_policy() -> None:
    """Five times as many optimizer steps, and three times the KL: 0.024, which alone raises no alarm."""
    records = run(40, multiplied({"policy/kl": 3}))
    steps = [16 * n if n < SINCE else 16 * (SINCE - 1) + 80 * (n - SINCE + 1) for n in range(1, 41)]
    for index, taken in enumerate(steps):
        records[index] = _with_steps(records[index], taken)

    assert raised(judged(records))["policy/kl_spike"] == SINCE + 1
    assert raised(judged(run(40, multiplied({"policy/kl": 3})))) == {}


def _with_steps(record: Any, steps: int) -> Any:
    return replace(record, axes=replace(record.axes, gradient_step=steps))


ENDS = {
    "over before": {"episode/truncated_frac": 0.0, "episode/terminated_length_min": 20.0, "episode/terminated_length_max": 300.0},
    "cut at": {"episode/truncated_frac": 1.0, "episode/truncated_length_min": 500.0, "episode/truncated_length_max": 500.0},
    "cut before": {"episode/truncated_frac": 1.0, "episode/truncated_length_min": 20.0, "episode/truncated_length_max": 300.0},
    "over at": {"episode/truncated_frac": 0.0, "episode/terminated_length_min": 500.0, "episode/terminated_length_max": 500.0},
}
LENGTHS = [f"episode/{kind}_length_{end}" for kind in ("truncated", "terminated") for end in ("min", "max")]


def ended(first: str, then: str) -> list[Any]:
    """A run whose episodes end in one way, and from update 30 on in another."""

    def spoil(found: Values, ago: int) -> None:
        for key in LENGTHS:
            found.pop(key, None)
        found.update(ENDS[first if ago < SINCE - 1 else then])

    return run(40, spoil, since=1)


@pytest.mark.parametrize(
    ("before", "after"), [("over before", "cut before"), ("cut at", "over at"), ("over at", "cut at"), ("cut at", "cut before")]
)
def test_ends_that_contradict_the_time_limit_are_reported_at_the_second_time(before: str, after: str) -> None:
    assert raised(judged(ended(before, after), LIMITED)) == {"value/bias": SINCE + 1}


@pytest.mark.parametrize(("before", "after"), [("over before", "cut at"), ("cut at", "over before"), ("cut before", "cut before")])
def test_a_policy_that_learns_to_last_or_to_finish_contradicts_nothing(before: str, after: str) -> None:
    assert alarms(judged(ended(before, after), LIMITED)) == []


def test_without_a_time_limit_nothing_is_said_of_ends() -> None:
    assert alarms(judged(ended("over before", "cut before"), {**FACTS, "horizon": None})) == []


def test_environments_that_never_changed_are_reported_beside_others_that_do() -> None:
    """Ten updates from the start, or four of 32 steps if none of them changes. A task of one step may have a single state."""
    assert raised(judged(run(40, set_to({"obs/constant_frac": 0.5}), since=1))) == {"obs/constant": 10}
    blind = {"obs/constant_frac": 1.0, "obs/still_frac": 1.0}
    assert raised(judged(run(40, set_to(blind), since=1))) == {"obs/constant": 4}
    assert alarms(judged(run(40, set_to({**blind, "episode/length_mean": 1.0}), since=1))) == []


def test_an_agent_that_waits_for_a_rollout_or_two_is_no_fault() -> None:
    def waits(found: Values, ago: int) -> None:
        found["obs/constant_frac"] = 0.25 if ago % 3 else 0.0

    assert alarms(judged(run(60, waits))) == []


def test_a_value_beyond_all_before_is_out_of_line_however_wide_its_history_is() -> None:
    """Gradients between 1 and 1000 have standard scores that no value exceeds; 100 times the largest, twice, still raises the alarm."""

    def wide(found: Values, ago: int) -> None:
        found["grad/global/norm_preclip_max"] = 10.0 ** (ago % 4) if ago < SINCE - 2 else 1e5

    assert raised(judged(run(32, wide, since=1)))["grad/explode"] == SINCE


def test_a_bonus_that_outweighs_the_task_is_named_without_the_length_of_the_run() -> None:
    """The entropy coefficient of 0.3 is 30 times the largest published one; the return falls with it."""
    unknown = {name: fact for name, fact in FACTS.items() if name != "total_steps"}

    def random(found: Values, ago: int) -> None:
        found.update({"policy/entropy_norm": 0.999, "loss/entropy_coef": 0.3, "episode/return_mean_100": 1.0})

    def rising(found: Values, ago: int) -> None:
        found["episode/return_mean_100"] = min(5.0, 1.0 + 0.5 * ago)

    told = {alarm.type: alarm.text for alarm in alarms(judged(both_from(rising, random), unknown))}

    assert "its entropy is 100 % of the maximum" in told["policy/entropy_explosion"]
    assert "Lower the entropy coefficient, which is 0.3" in told["policy/entropy_explosion"]
    assert "Lower the entropy coefficient, which is 0.3" in told["task/return_drop"]


def both_from(first: Any, second: Any) -> list[Record]:
    return [*run(SINCE - 1, first, since=1), *run(60, second)[SINCE - 1 :]]
