"""Remarks on settings outside of all published values, and on data that may be correct."""

from collections.abc import Mapping
from typing import Any

import pytest
from healthy_run import FACTS, Values, alarms, judged, record, run, set_to, values

from esper_telemetry.adapters.sb3.sb3_facts import SETTING_NAMES
from esper_telemetry.alarms import diagnose
from esper_telemetry.alarms.verdict.published_settings import PUBLISHED, in_trainers_names, outside_settings, range_sentence, settings_of
from esper_telemetry.alarms.verdict.remarks import is_setting
from esper_telemetry.core.facts import Facts
from esper_telemetry.core.record import AlarmEvent
from esper_telemetry.ppo.config import PRESETS, PPOConfig

SB3 = {**FACTS, "setting_names": SETTING_NAMES, "value_coef_scale": 0.5}


def remarks(facts: Mapping[str, Any], changes: Mapping[str, float | None] | None = None, updates: int = 12) -> dict[str, str]:
    """Names and texts of the remarks on a run."""
    verdicts = judged(run(updates, set_to(changes or {}), since=1), facts)
    data = [data for verdict in verdicts for kind, data in verdict.events if kind == "remark"]
    assert len({item["name"] for item in data}) == len(data)
    return {item["name"]: item["text"] for item in data}


def test_a_range_has_its_quantiles_in_order() -> None:
    for item in PUBLISHED.values():
        assert item.lowest <= item.p10 <= item.median <= item.p90 <= item.highest and item.example


def test_published_settings_get_no_remark() -> None:
    """CleanRL's Atari, zoo's MountainCarContinuous, RSL-RL's ANYmal C, and every preset of the bundled trainer."""
    atari = {"learning_rate": 2.5e-4, "gamma": 0.99, "gae_lambda": 0.95, "clip": 0.1, "num_epochs": 4, "num_envs": 8}
    atari |= {"num_steps": 128, "num_minibatches": 4, "entropy_coef": 0.01, "value_coef": 0.5, "max_grad_norm": 0.5}
    car = {
        "learning_rate": 7.77e-5,
        "gamma": 0.9999,
        "num_steps": 8,
        "num_envs": 1,
        "num_minibatches": 1,
        "value_coef": 0.38,
    }
    anymal = {"learning_rate": 1e-3, "num_steps": 24, "num_envs": 4096, "num_minibatches": 4, "value_coef": 2.0}
    presets = [
        {name: getattr(PPOConfig(**{"policy": kind, **own}), name) for name in PUBLISHED if hasattr(PPOConfig(), name)}
        for (_, kind, _), (_, own) in PRESETS.items()
    ]

    assert [list(outside_settings(Facts.of(facts))) for facts in (atari, car, anymal, *presets)] == [[]] * (3 + len(presets))


@pytest.mark.parametrize(("correlation", "expected"), [(0.9, False), (0.3, True), (-1.0, True)])
def test_other_rewards_than_those_of_the_environment_are_told(correlation: float, expected: bool) -> None:
    found = remarks(FACTS, {"reward/trained_correlation": correlation})

    assert (f"their correlation is {correlation:g}, so what wrappers add" in found.get("other rewards", "")) is expected


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("learning_rate", 0.1, "learning_rate is 0.1; published settings range from 2.0e-5 to 0.003"),
        ("learning_rate", 1e-7, "learning_rate is 1.0e-7; published"),
        ("gamma", 0.0, "gamma is 0; published settings range from 0.8 to 0.9999"),
        ("clip", 5.0, "clip is 5; published settings range from 0.1 to 0.4"),
        ("max_grad_norm", 0.001, "max_grad_norm is 0.001; published"),
        ("num_epochs", 200, "num_epochs is 200; published settings range from 1 to 20"),
        ("entropy_coef", 1.0, "entropy_coef is 1; published settings range from 0 to 0.01"),
    ],
)
def test_a_setting_outside_of_all_published_ones_is_remarked_at_once(name: str, value: float, said: str) -> None:
    assert remarks({**FACTS, name: value}, updates=1)[name].startswith(said)


def test_a_setting_has_the_name_and_the_unit_of_its_trainer() -> None:
    """Their value loss lacks the factor of 1/2, so their vf_coef of 10 is our 20."""
    assert range_sentence("clip", 5.0, Facts.of(SB3)).startswith("clip_range is 5")
    assert range_sentence("value_coef", 20.0, Facts.of(SB3)) == "vf_coef is 10; published settings range from 0.19 to 2.5"
    advice = "Raise entropy_coef from 0.001; clip gradients."
    assert in_trainers_names(advice, Facts.of(SB3)) == "Raise ent_coef from 0.001; clip gradients."
    assert in_trainers_names(advice, Facts.of(FACTS)) == advice


def test_minibatches_are_counted_in_rows() -> None:
    """Eight environments of 128 steps in 512 minibatches: two rows each."""
    facts = Facts(num_envs=8, num_steps=128, num_minibatches=512)

    assert settings_of(facts) == {"rollout_size": 1024.0, "minibatch_size": 2.0}
    assert [item.name for item in outside_settings(facts)] == ["minibatch_size"]


def test_a_remark_is_no_alarm_and_diagnose_lists_it() -> None:
    facts = {**FACTS, "learning_rate": 0.1}
    verdict = diagnose(facts, run(10))

    assert verdict.incidents == ()
    assert [data["text"] for kind, data in verdict.events if kind == "remark"] == [remarks(facts)["learning_rate"]]
    assert verdict.remarks[0]["value"] == 0.1


def test_a_log_without_settings_tells_its_learning_rate_by_what_it_logged() -> None:
    """A low rate raises no remark, because a schedule may warm up."""
    unknown = {name: value for name, value in FACTS.items() if name != "learning_rate"}

    assert "learning_rate is 0.1" in remarks(unknown, {"opt/lr": 0.1}, 1)["learning_rate"]
    assert "learning_rate" not in remarks(unknown, {"opt/lr": 1e-7}, 1)
    assert "learning_rate" not in remarks({**FACTS, "learning_rate": 1e-3}, {"opt/lr": 0.1}, 1)


def test_an_initial_standard_deviation_of_50_is_remarked() -> None:
    wide = {"policy/head/op/std/mean": 50.0, "policy/head/op/std_of_range": 50.0}
    assert "50" in remarks(FACTS, wide, 1)["initial std op"]
    by_state = {"policy/head/op/std/mean": 3.9, "policy/head/op/std/min": 1.0}
    assert "initial std op" not in remarks(FACTS, by_state, 1)


@pytest.mark.parametrize(("std", "of_range", "remarked"), [(33.0, 0.33, False), (33.0, 3.3, True), (0.01, 0.1, False), (1.0, 0.01, False)])
def test_an_initial_standard_deviation_is_judged_by_the_range_of_actions(std: float, of_range: float, remarked: bool) -> None:
    """33 for bounds of +-100 is a third of half the range; 1 is usual, whatever the bounds."""
    values = {"policy/head/op/std/mean": std, "policy/head/op/std_of_range": of_range}
    assert ("initial std op" in remarks(FACTS, values, 1)) is remarked


def test_a_discount_that_sees_a_hundredth_of_an_episode() -> None:
    """gamma 0.8 looks 5 steps ahead: 0.5 % of an episode of 1000 steps, 2.5 % of one of 200."""
    facts = {**FACTS, "gamma": 0.8}

    assert "5 steps ahead" in remarks(facts, {"episode/length_mean": 1000.0})["discount horizon"]
    assert "discount horizon" not in remarks(facts, {"episode/length_mean": 200.0})


def test_episodes_that_all_terminate_after_as_many_steps() -> None:
    limited = {"episode/terminated_length_min": 200.0, "episode/terminated_length_max": 200.0}

    assert "after exactly 200 steps" in remarks(FACTS, limited)["fixed length"]
    assert "fixed length" not in remarks(FACTS, {**limited, "episode/terminated_length_min": 190.0})
    assert "fixed length" not in remarks(FACTS, {**limited, "episode/truncated_frac": 0.1})


def test_time_limits_as_terminations_are_a_remark_if_most_episodes_end_by_one() -> None:
    limited = {"episode/truncated_frac": 0.8, "integrity/equation/advantages_time_limits_end": 0.0}
    facts = {**FACTS, "equation_places": {"advantages": "ppo.py:31"}}

    assert "80 % of the episodes, and the advantages (ppo.py:31)" in remarks(facts, limited)["time limits"]
    assert "time limits" not in remarks(FACTS, {**limited, "episode/truncated_frac": 0.2})
    assert "time limits" not in remarks(FACTS, {"episode/truncated_frac": 0.8})


def test_episodes_that_end_at_once_after_longer_ones() -> None:
    """A bandit has no longer ones."""
    own = {"episode/terminated_length_min": None, "episode/terminated_length_max": None, "episode/count": 20.0}
    short = {**own, "episode/truncated_frac": 1.0, "episode/truncated_length_max": 1.0}

    def spoil(metrics: Values, update: int) -> None:
        set_to({**short, "episode/truncated_length_max": 60.0} if update == 1 else short)(metrics, update)

    events = [data for verdict in judged(run(6, spoil, since=1), FACTS) for kind, data in verdict.events if kind == "remark"]

    (text,) = [data["text"] for data in events if data["name"] == "short episodes"]
    assert text.startswith("all episodes of an update have ended after 1 step, and earlier ones after up to 60: check that reset()")
    assert "short episodes" not in remarks(FACTS, short)


@pytest.mark.parametrize(("factor", "updates", "said"), [(0.38, 20, True), (None, 400, False)])
def test_a_schedule_that_ends_long_before_the_run_is_remarked(factor: float | None, updates: int, said: bool) -> None:
    """A factor per update, as of a scheduler that steps with each minibatch; and a rate that falls to 0 in a line."""

    def falls(metrics: Values, update: int) -> None:
        metrics["opt/lr"] = 3e-4 * (1 - update / updates if factor is None else factor**update)

    events = [data for verdict in judged(run(updates, falls, since=1), FACTS) for kind, data in verdict.events if kind == "remark"]
    texts = [data["text"] for data in events if data["name"] == "low learning rate"]

    assert bool(texts) is said
    assert all(text.startswith("learning_rate has been below a thousandth of its first value for 3 of 11 updates") for text in texts)


def test_equal_rewards_in_episodes_of_one_length_show_nothing_to_learn_from() -> None:
    lengths = {"episode/truncated_length_min": 50.0, "episode/truncated_length_max": 50.0, "episode/truncated_frac": 1.0}
    none = {"episode/terminated_length_min": None, "episode/terminated_length_max": None}
    text = remarks(FACTS, {"reward/absmax": 1.0, "reward/std": 0.0, "reward/mean": -1.0, **lengths, **none})["equal rewards"]

    assert "have lasted 50 steps, and none has terminated, so all returns are equal" in text


def test_a_softmax_of_a_softmax_is_said_at_once_with_its_place() -> None:
    facts = {**FACTS, "softmax_twice": True, "equation_places": {"policy_loss": "ppo.py:63"}}

    assert "the policy (ppo.py:63) takes a softmax of the outputs of another softmax" in remarks(facts, updates=1)["softmax twice"]


def test_ratios_of_all_pairs_are_told_with_their_place() -> None:
    facts = {**FACTS, "ratio_pairs": True, "equation_places": {"policy_loss": "ppo.py:63"}}

    assert "the probability ratios (ppo.py:63) are those of each new log-probability to all" in remarks(facts, updates=1)["ratio of pairs"]
    assert "ratio of pairs" not in remarks(FACTS, updates=1)
    (raised,) = alarms(judged(run(3, set_to({"integrity/ratio_init": 0.5}), since=1), facts), AlarmEvent.RAISE)
    assert "Give new and old log-probabilities the same shape" in raised.text


def test_rewards_that_are_missing_tiny_or_equal() -> None:
    """Ten updates of 512 steps are 5,120 steps."""
    none = {"reward/absmax": 0.0, "reward/std": 0.0, "reward/mean": 0.0}
    tiny = {"reward/absmax": 1e-5, "reward/std": 1e-6, "reward/mean": 1e-6}
    equal = {"reward/absmax": 1.0, "reward/std": 0.0, "reward/mean": 1.0, "episode/terminated_length_min": 8.0}

    assert "the first 5,120 steps have all had a reward of 0" in remarks(FACTS, none)["no reward"]
    assert "scale rewards to about 1" in remarks(FACTS, tiny)["tiny rewards"]
    assert "only the length" in remarks(FACTS, equal)["equal rewards"]


def test_observations_that_do_not_change_with_the_actions() -> None:
    """Two thousand steps are four updates of 512, one thousand are two; a shorter run needs a smaller measured effect."""
    assert "in 1,024 steps" in remarks(FACTS, {"policy/action_effect": 0.9})["ignored actions"]
    assert "in 2,048 steps" in remarks(FACTS, {"policy/action_effect": 1.1})["ignored actions"]
    assert "ignored actions" not in remarks(FACTS, {"policy/action_effect": 1.8})


def test_features_and_gradients_that_explain_a_flat_return() -> None:
    """A rank of 1.3, and a critic's gradient 25,000 times the actor's."""
    told = remarks(FACTS, {"repr/effective_rank": 1.3, "grad/interference/log_ratio": 4.4})

    assert "use only 1.3 dimensions" in told["low rank"] and "25119 times" in told["dominant critic"]
    assert not {"low rank", "dominant critic"} & remarks(FACTS).keys()


def test_small_observations_that_explain_a_flat_return() -> None:
    assert "is about 0.03: scale observations to about 1" in remarks(FACTS, {"obs/rms_max": 0.03})["small features"]
    assert "small features" not in remarks(FACTS, {"obs/rms_max": 0.1})


def test_a_remark_that_holds_of_many_correct_runs_is_not_listed_without_need() -> None:
    equal = set_to({"reward/absmax": 1.0, "reward/std": 0.0, "reward/mean": 1.0})
    verdict = diagnose(FACTS, run(12, equal, since=1))

    assert [data["name"] for data in verdict.remarks] == ["equal rewards"]
    assert not [kind for kind, _ in verdict.events if kind == "remark"]


def test_advice_names_the_setting_its_value_and_the_usual_one() -> None:
    facts = {**SB3, "learning_rate": 0.1}
    (alarm,) = alarms(judged(run(31, set_to({"policy/kl": 5.0})), facts))

    assert "learning_rate is 0.1; published settings range from 2.0e-5 to 0.003." in alarm.text
    assert "published" not in alarms(judged(run(31, set_to({"policy/kl": 5.0}))))[0].text


def test_advice_that_cannot_apply_is_not_given() -> None:
    """A bonus of zero cannot be lowered, and a learning rate of 0.1 is not 0."""
    late = {**FACTS, "total_steps": 60 * 512, "entropy_coef": 0.0}

    def random(metrics: Values, ago: int) -> None:
        metrics.update({"policy/entropy_norm": 0.999, "loss/entropy_coef": 0.0})

    explosion = next(a for a in alarms(judged(run(60, random), late)) if a.type == "policy/entropy_explosion")
    stall = next(a for a in alarms(judged(run(40, set_to({"policy/kl_max": 0.0, "opt/lr": 0.1})))) if a.type == "policy/kl_stall")

    assert "entropy_coef" not in explosion.text and "entropy coefficient" not in explosion.text
    assert "above 0" not in stall.text


def test_an_alarm_says_what_the_return_does() -> None:
    """The return rises from 5 to 50 within thirty updates, or does not change."""

    def rising(metrics: Values, update: int) -> None:
        metrics |= {"episode/return_mean": 5.0 + 1.5 * update, "episode/return_mean_100": float(update)}
        if update >= 29:
            metrics["policy/kl"] = 5.0

    (risen,) = alarms(judged(run(31, rising, since=1)))
    flat = alarms(judged(run(31, set_to({"policy/kl": 5.0}))))[0]

    assert " the return has risen to 29." in risen.text  # the mean of a hundred episodes, as in the outcome
    assert " the return has not clearly risen" in flat.text


def test_a_consequence_joins_the_incident_of_its_cause() -> None:
    """The learning rate is 0.1 from the first update on: the entropy is 0 from the second, and judged from the eleventh."""
    facts = {**FACTS, "learning_rate": 0.1}
    spoiled = []
    for update in range(1, 20):
        metrics = values(update)
        if update >= 2:
            metrics.update({"policy/entropy_norm": 0.0, "policy/entropy_marginal_norm": 0.0, "opt/update_to_weight": 0.5})
        metrics["episode/return_mean"] = 5.0
        spoiled.append(record(update, metrics))

    verdict = diagnose(facts, spoiled)
    by_type = {alarm.type: alarm for incident in verdict.incidents for alarm in incident.alarms}

    assert by_type["policy/entropy_collapse"].since == 2
    assert len(verdict.incidents) == 1


def test_a_setting_that_a_schedule_takes_far_outside_is_remarked_when_it_is() -> None:
    def growing(metrics: Values, ago: int) -> None:
        metrics.update({"loss/entropy_coef": 0.001 * 2**ago, "opt/lr": 3e-4})

    verdict = diagnose({**FACTS, "entropy_coef": 0.001}, run(12, growing, since=1))
    (data,) = verdict.remarks

    assert (data["update"], data["text"]) == (8, "entropy_coef is 0.13; published settings range from 0 to 0.01")
    assert is_setting(data["name"]) and is_setting("gamma") and not is_setting("no reward")


def test_updates_that_a_limit_on_the_kl_ends_after_their_first_steps() -> None:
    """Every update of the run has 16 optimizer steps."""
    planned = {**FACTS, "num_epochs": 10, "num_minibatches": 40}

    text = remarks({**planned, "target_kl": 1e-5})["early end"]
    assert text == "every update has ended after at most 16 of 400 optimizer steps: target_kl is 1.0e-5"
    assert remarks(planned)["early end"].endswith("of 400 optimizer steps")
    assert "early end" not in remarks({**FACTS, "num_epochs": 4, "num_minibatches": 4, "target_kl": 0.01})


def test_advantages_that_are_all_equal_in_the_loss_are_named_without_those_of_the_rollout() -> None:
    spoil = set_to({"adv/norm/std": 0.0, "adv/participation": None, "adv/raw/absmax_over_std": None})
    found = [alarm for alarm in alarms(judged(run(12, spoil, since=1), FACTS)) if alarm.type == "adv/degenerate"]

    assert "have all been equal" in found[0].text and "over one entry each becomes 0" in found[0].text


def test_an_actor_without_a_gradient_may_have_decided_by_steps_that_were_too_large() -> None:
    """The actor's gradient vanishes with the entropy, at a learning rate of 0.2 from the start."""
    gone = {"grad/interference/actor_effective": 1e-9, "grad/interference/critic_share": 0.99999, "grad/clip/coef": 1.0}
    facts = {**FACTS, "learning_rate": 0.2}

    def text(entropy: float) -> str:
        verdicts = judged(run(5, set_to({**gone, "policy/entropy_norm": entropy}), since=1), facts)
        return next(alarm.text for alarm in alarms(verdicts) if alarm.type == "grad/actor_starved")

    assert "learning_rate is 0.2; published settings range from 2.0e-5 to 0.003." in text(0.001)
    assert "become deterministic" in text(0.001) and "Check that advantages vary" in text(0.6)


SPACE = "Box(-1, 1, (3,), int8)"


@pytest.mark.parametrize(
    ("observations", "actions", "expected"),
    [
        (SPACE, "Box(-1.0, 1.0, (1,), float32)", True),
        (SPACE, "Discrete(9)", False),  # a board
        ("Box(-1.0, 1.0, (3,), float32)", "Box(-1.0, 1.0, (1,), float32)", False),
        ("Box(0, 255, (16,), uint8)", "Box(-1.0, 1.0, (1,), float32)", False),
    ],
)
def test_a_space_of_few_whole_numbers_is_told_in_continuous_tasks(observations: str, actions: str, expected: bool) -> None:
    found = remarks({**FACTS, "observation_space": observations, "action_space": actions})

    assert ("whole numbers from -1 to 1 (int8)" in found.get("whole numbers", "")) is expected
