"""Remarks on settings outside of all published values, and on data that may be correct."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
from healthy_run import FACTS, Number, alarms, both, judged, later, run, set_to

from esper_telemetry.adapters.sb3.sb3_facts import SETTING_NAMES
from esper_telemetry.alarms import diagnose
from esper_telemetry.alarms.verdict.published_settings import PUBLISHED, in_trainers_names, outside_settings, range_sentence, settings_of
from esper_telemetry.alarms.verdict.remarks import is_setting
from esper_telemetry.core.facts import Facts
from esper_telemetry.core.record import AlarmEvent
from esper_telemetry.ppo.config import PRESETS, PPOConfig

SB3 = {**FACTS, "setting_names": SETTING_NAMES, "value_coef_scale": 0.5}


def remarks(facts: Mapping[str, Any], changes: Mapping[str, Number], updates: int = 12) -> dict[str, str]:
    """Names and texts of the remarks on a run."""
    verdicts = judged(run(updates, set_to(changes), since=1), facts)
    data = [data for verdict in verdicts for kind, data in verdict.events if kind == "remark"]
    assert len({item["name"] for item in data}) == len(data)
    return {item["name"]: item["text"] for item in data}


class Remark(NamedTuple):
    """The name and a part of a remark on a run; the part is empty if the run does not get this remark."""

    name: str
    text: str
    changes: Mapping[str, Number] = {}
    facts: Mapping[str, Any] = {}
    updates: int = 12


LIMITED = {"episode/terminated_length_min": 200.0, "episode/terminated_length_max": 200.0}
TIME_LIMITS = {"episode/truncated_frac": 0.8, "integrity/equation/advantages_time_limits_end": 0.0}
NO_LENGTHS = dict.fromkeys(LIMITED)
AT_ONCE: Mapping[str, Number] = {
    **NO_LENGTHS,
    "episode/count": 20.0,
    "episode/truncated_frac": 1.0,
    "episode/truncated_length_max": lambda ago: 60.0 if ago == 0 else 1.0,
}
EQUAL = {"reward/absmax": 1.0, "reward/std": 0.0, "reward/mean": 1.0}
CUT_AT_50 = {"episode/truncated_length_min": 50.0, "episode/truncated_length_max": 50.0, "episode/truncated_frac": 1.0}
LOW_RATE = "learning_rate has been below a thousandth of its first value for 3 of 11 updates"
PLACES = {"equation_places": {"policy_loss": "ppo.py:63", "advantages": "ppo.py:31"}}
EPOCHS = {"num_epochs": 10, "num_minibatches": 40}
SPACE, CONTINUOUS = "Box(-1, 1, (3,), int8)", "Box(-1.0, 1.0, (1,), float32)"
REACHED = "policy/head/action/range_reached"
STD, OF_RANGE = "policy/head/op/std/mean", "policy/head/op/std_of_range"

ROWS_AGAIN = dict.fromkeys(("integrity/equation/minibatches", "integrity/equation/minibatches_overlapping"), 0.8)
UNCLEARED = ("integrity/equation/gradient", "integrity/equation/gradient_not_cleared")

REMARKS: Mapping[str, list[Remark]] = {
    "Rewards in training differ from those of the environment": [
        Remark("other rewards", "their correlation is 0.3, so what wrappers change", {"reward/trained_correlation": 0.3}),
        Remark("other rewards", "their correlation is -1, so what wrappers change", {"reward/trained_correlation": -1.0}),
        Remark("other rewards", "", {"reward/trained_correlation": 0.9}),
    ],
    "A setting is outside of all published ones": [
        Remark(name, f"{name} is {text}", facts={name: value}, updates=1)
        for name, value, text in (
            ("learning_rate", 0.1, "0.1; published settings range from 2.0e-5 to 0.003"),
            ("learning_rate", 1e-7, "1.0e-7; published"),
            ("gamma", 0.0, "0; published settings range from 0.8 to 0.9999"),
            ("clip", 5.0, "5; published settings range from 0.1 to 0.4"),
            ("max_grad_norm", 0.001, "0.001; published"),
            ("num_epochs", 200, "200; published settings range from 1 to 20"),
            ("entropy_coef", 1.0, "1; published settings range from 0 to 0.01"),
        )
    ],
    "A log without settings shows its learning rate, but a low one may be that of a schedule that warms up": [
        Remark("learning_rate", "learning_rate is 0.1", {"opt/lr": 0.1}, updates=1),
        Remark("learning_rate", "", {"opt/lr": 1e-7}, updates=1),
        Remark("learning_rate", "", {"opt/lr": 0.1}, {"learning_rate": 1e-3}, 1),
    ],
    "33 for bounds of ±100 is a third of half the range; 1 is usual, whatever the bounds": [
        Remark("initial std op", "50", {STD: 50.0, OF_RANGE: 50.0}, updates=1),
        Remark("initial std op", "", {STD: 3.9, "policy/head/op/std/min": 1.0}, updates=1),
        Remark("initial std op", "", {STD: 33.0, OF_RANGE: 0.33}, updates=1),
        Remark("initial std op", "33", {STD: 33.0, OF_RANGE: 3.3}, updates=1),
        Remark("initial std op", "", {STD: 0.01, OF_RANGE: 0.1}, updates=1),
        Remark("initial std op", "", {STD: 1.0, OF_RANGE: 0.01}, updates=1),
    ],
    "gamma 0.8 looks 5 steps ahead: 0.5 % of an episode of 1000 steps, 2.5 % of one of 200": [
        Remark("discount horizon", "5 steps ahead", {"episode/length_mean": 1000.0}, {"gamma": 0.8}),
        Remark("discount horizon", "", {"episode/length_mean": 200.0}, {"gamma": 0.8}),
    ],
    "Episodes all terminate after as many steps": [
        Remark("fixed length", "after exactly 200 steps", LIMITED),
        Remark("fixed length", "", {**LIMITED, "episode/terminated_length_min": 190.0}),
        Remark("fixed length", "", {**LIMITED, "episode/truncated_frac": 0.1}),
        Remark("fixed length", "", {name: lambda ago: 200.0 if ago else None for name in LIMITED}),  # after a mean of 10
    ],
    "Time limits are terminations, and most episodes end by one": [
        Remark("time limits", "80 % of the episodes, and the advantages (ppo.py:31)", TIME_LIMITS, PLACES),
        Remark("time limits", "", {**TIME_LIMITS, "episode/truncated_frac": 0.2}),
        Remark("time limits", "", {"episode/truncated_frac": 0.8}),
    ],
    "Episodes end at once after longer ones; a bandit has no longer ones": [
        Remark(
            "short episodes",
            "all episodes of an update have ended after 1 step, and earlier ones after up to 60: check that reset()",
            AT_ONCE,
            updates=6,
        ),
        Remark("short episodes", "", {**AT_ONCE, "episode/truncated_length_max": 1.0}),
    ],
    "A scheduler steps with each minibatch, and a rate falls to 0 in a line": [
        Remark("low learning rate", LOW_RATE, {"opt/lr": lambda ago: 3e-4 * 0.38**ago}, updates=20),
        Remark("low learning rate", "", {"opt/lr": lambda ago: 3e-4 * (1 - ago / 400)}, updates=400),
    ],
    "The first 5,120 steps have no, tiny or equal rewards": [
        Remark("no reward", "the first 5,120 steps have all had a reward of 0", dict.fromkeys(EQUAL, 0.0)),
        Remark("tiny rewards", "scale rewards to about 1", {"reward/absmax": 1e-5, "reward/std": 1e-6, "reward/mean": 1e-6}),
        Remark("equal rewards", "only the length", {**EQUAL, "episode/terminated_length_min": 8.0}),
        Remark(
            "equal rewards",
            "have lasted 50 steps, and none has terminated, so all returns are equal",
            {**EQUAL, "reward/mean": -1.0, **CUT_AT_50, **NO_LENGTHS},
        ),
    ],
    "An alarm about the rows is there before the gradient is found not to be cleared": [
        Remark(
            "also gradient",
            "the gradients before clipping equal the sum of this minibatch's gradient and the previous gradient",
            {**ROWS_AGAIN, **{key: lambda ago: 1.0 if ago > 3 else 0.0 for key in UNCLEARED}},
        ),
        Remark("also gradient", "", {**ROWS_AGAIN, **dict.fromkeys(UNCLEARED, 1.0)}),
    ],
    "The program takes a softmax of a softmax, ratios of all pairs, or no gradient through its memory": [
        Remark("detached state", "(ppo.py:63) no gradient flows from one step", facts={**PLACES, "detached_state": True}, updates=1),
        Remark(
            "softmax twice",
            "the policy (ppo.py:63) takes a softmax of the outputs of another softmax",
            facts={**PLACES, "softmax_twice": True},
            updates=1,
        ),
        Remark(
            "loss of pairs",
            "the policy's loss (ppo.py:63) has N² numbers for N rows",
            facts={**PLACES, "loss_pairs": True},
            updates=1,
        ),
        Remark("loss of pairs", "", updates=1),
    ],
    "The optimizer pulls the weights to 0": [
        Remark("weight decay", "weight_decay is 0.3 (published settings of PPO have 0)", facts={"weight_decay": 0.3}, updates=1),
        Remark("weight decay", "", facts={"weight_decay": 0.01}, updates=1),
    ],
    "Actions have bounds of their own: the largest of ten updates is near their mean, unlike those of a Gaussian": [
        Remark("own range action", "go at most 25 % of the way", {REACHED: lambda ago: 0.25 - 0.005 * (ago % 2)}),
        Remark("own range action", "", {REACHED: lambda ago: 0.25 - 0.005 * (ago % 2)}, updates=9),
        Remark("own range action", "", {REACHED: lambda ago: 0.25 + 0.02 * (ago == 5)}),
        Remark("own range action", "", {REACHED: lambda ago: 0.9 - 0.005 * (ago % 2)}),
    ],
    "Observations do not change with the actions in two or four updates of 512; fewer steps need a smaller effect": [
        Remark("ignored actions", "in 1,024 steps", {"policy/action_effect": 0.9}),
        Remark("ignored actions", "in 2,048 steps", {"policy/action_effect": 1.1}),
        Remark("ignored actions", "", {"policy/action_effect": 1.8}),
    ],
    "Features, gradients and observations explain a flat return": [
        Remark("low rank", "use only 1.3 dimensions", {"repr/effective_rank": 1.3}),
        Remark("low rank", ""),
        Remark("dominant critic", "25119 times", {"grad/interference/log_ratio": 4.4}),
        Remark("dominant critic", ""),
        Remark("small features", "is about 0.03: scale observations to about 1", {"obs/rms_max": 0.03}),
        Remark("small features", "", {"obs/rms_max": 0.1}),
    ],
    "A limit on the KL ends every update after 16 optimizer steps": [
        Remark(
            "early end",
            "every update has ended after at most 16 of 400 optimizer steps: target_kl is 1.0e-5",
            facts={**EPOCHS, "target_kl": 1e-5},
        ),
        Remark("early end", "of 400 optimizer steps", facts=EPOCHS),
        Remark("early end", "", facts={"num_epochs": 4, "num_minibatches": 4, "target_kl": 0.01}),
    ],
    "A space of few whole numbers is told in continuous tasks; a board is discrete": [
        Remark("whole numbers", text, facts={"observation_space": observations, "action_space": actions})
        for observations, actions, text in (
            (SPACE, CONTINUOUS, "whole numbers from -1 to 1 (int8)"),
            (SPACE, "Discrete(9)", ""),
            ("Box(-1.0, 1.0, (3,), float32)", CONTINUOUS, ""),
            ("Box(0, 255, (16,), uint8)", CONTINUOUS, ""),
        )
    ],
}


@pytest.mark.parametrize(
    "remark", [pytest.param(remark, id=f"{name} [{place}]") for name, rows in REMARKS.items() for place, remark in enumerate(rows)]
)
def test_a_run_has_a_remark(remark: Remark) -> None:
    told = remarks({**FACTS, **remark.facts}, remark.changes, remark.updates)

    assert remark.text in told[remark.name] if remark.text else remark.name not in told


def test_a_range_has_its_quantiles_in_order() -> None:
    for item in PUBLISHED.values():
        assert item.lowest <= item.p10 <= item.median <= item.p90 <= item.highest and item.example


def test_published_settings_get_no_remark() -> None:
    """CleanRL's Atari, zoo's MountainCarContinuous, RSL-RL's ANYmal C, and every preset of the bundled trainer."""
    atari = {"learning_rate": 2.5e-4, "gamma": 0.99, "gae_lambda": 0.95, "clip": 0.1, "num_epochs": 4, "num_envs": 8}
    atari |= {"num_steps": 128, "num_minibatches": 4, "entropy_coef": 0.01, "value_coef": 0.5, "max_grad_norm": 0.5}
    car = {"learning_rate": 7.77e-5, "gamma": 0.9999, "num_steps": 8, "num_envs": 1, "num_minibatches": 1, "value_coef": 0.38}
    anymal = {"learning_rate": 1e-3, "num_steps": 24, "num_envs": 4096, "num_minibatches": 4, "value_coef": 2.0}
    presets = [
        {name: getattr(PPOConfig(**{"policy": kind, **own}), name) for name in PUBLISHED if hasattr(PPOConfig(), name)}
        for (_, kind, _), (_, own) in PRESETS.items()
    ]

    assert [list(outside_settings(Facts.of(facts))) for facts in (atari, car, anymal, *presets)] == [[]] * (3 + len(presets))


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


@pytest.mark.parametrize(("rate", "names"), [(0.01, []), (0.03, ["learning_rate"])])
def test_a_policy_gradient_without_a_clip_range_may_have_a_larger_rate(rate: float, names: list[str]) -> None:
    facts = {"learning_rate": rate}

    for epochs in ({}, {"num_epochs": 1}):
        assert [item.name for item in outside_settings(Facts.of({**facts, **epochs}))] == names
    assert [item.name for item in outside_settings(Facts.of({**facts, "clip": 0.2}))] == ["learning_rate"]


def test_a_remark_is_no_alarm_and_diagnose_lists_it() -> None:
    facts = {**FACTS, "learning_rate": 0.1}
    verdict = diagnose(facts, run(10))

    assert verdict.incidents == ()
    assert [data["text"] for kind, data in verdict.events if kind == "remark"] == [remarks(facts, {})["learning_rate"]]
    assert verdict.remarks[0]["value"] == 0.1


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
    random = set_to({"policy/entropy_norm": 0.999, "loss/entropy_coef": 0.0})
    explosion = next(a for a in alarms(judged(run(60, random), late)) if a.type == "policy/entropy_explosion")
    stall = next(a for a in alarms(judged(run(40, set_to({"policy/kl_max": 0.0, "opt/lr": 0.1})))) if a.type == "policy/kl_stall")

    assert "entropy_coef" not in explosion.text and "entropy coefficient" not in explosion.text
    assert "above 0" not in stall.text


def test_an_alarm_says_what_the_return_does() -> None:
    """The return rises from 5 to 50 within thirty updates, or does not change."""
    rising = set_to({"episode/return_mean": lambda ago: 6.5 + 1.5 * ago, "episode/return_mean_100": lambda ago: ago + 1.0})

    (risen,) = alarms(judged(run(31, both(rising, later(29, set_to({"policy/kl": 5.0}))), since=1)))
    flat = alarms(judged(run(31, set_to({"policy/kl": 5.0}))))[0]

    assert " the return has risen to 30." in risen.text  # the mean of a hundred episodes, as in the outcome
    assert " the return has not clearly risen" in flat.text


def test_a_consequence_joins_the_incident_of_its_cause() -> None:
    """The learning rate is 0.1 from the first update on: the entropy is 0 from the second, and judged from the eleventh."""
    lost = {"policy/entropy_norm": 0.0, "policy/entropy_marginal_norm": 0.0, "opt/update_to_weight": 0.5}
    spoiled = run(19, both(set_to({"episode/return_mean": 5.0}), later(1, set_to(lost))), since=1)

    (incident,) = diagnose({**FACTS, "learning_rate": 0.1}, spoiled).incidents

    assert {alarm.type: alarm.since for alarm in incident.alarms}["policy/entropy_collapse"] == 2


def test_a_setting_that_a_schedule_takes_far_outside_is_remarked_when_it_is() -> None:
    growing = set_to({"loss/entropy_coef": lambda ago: 0.001 * 2**ago, "opt/lr": 3e-4})

    (data,) = diagnose({**FACTS, "entropy_coef": 0.001}, run(12, growing, since=1)).remarks

    assert (data["update"], data["text"]) == (8, "entropy_coef is 0.13; published settings range from 0 to 0.01")
    assert is_setting(data["name"]) and is_setting("gamma") and not is_setting("no reward")


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


@pytest.mark.parametrize(
    ("norms", "is_told"),
    [
        (dict.fromkeys(("0_weight", "0_bias", "2_weight"), 0.0), True),
        ({"0_weight": 0.0}, False),
        (dict.fromkeys(("0_weight", "0_bias", "2_weight", "2_bias"), 0.0), False),  # nothing to learn from
        ({"0_weight": lambda ago: 0.1 * (ago > 1), "0_bias": lambda ago: 0.1 * (ago > 1)}, False),  # the last layer begins at 0
    ],
)
def test_layers_whose_units_do_not_react_are_told(norms: Mapping[str, Number], is_told: bool) -> None:
    names = ("0_weight", "0_bias", "2_weight", "2_bias")
    facts = {**FACTS, "groups": {"actor": [f"pi.{name.replace('_', '.')}" for name in names]}}
    changes = {f"grad/layer/pi_{name}/norm": norms.get(name, 0.1) for name in names}

    raised = alarms(judged(run(8, set_to(changes), since=1), facts), AlarmEvent.RAISE)

    told = [alarm.text for alarm in raised if alarm.type == "grad/vanish"]
    assert bool(told) is is_told
    assert all("pi.0.weight, pi.0.bias, pi.2.weight have had a gradient of exactly 0" in text for text in told)


def test_a_layer_whose_gradient_is_not_finite_is_not_without_one() -> None:
    gone = dict.fromkeys(("grad/actor/norm_preclip", "grad/layer/heads_op_weight/norm", "grad/head/op/norm"))

    def missing(changes: Mapping[str, Number]) -> bool:
        return "grad/missing_group" in {alarm.type for alarm in alarms(judged(run(12, set_to(changes), since=1)))}

    assert missing(gone) and not missing({**gone, "grad/actor/norm_preclip_nonfinite": 2.0})


@pytest.mark.parametrize(
    ("first", "later", "std", "words"),
    [(2e-7, 0.3, 1.0, "weights of a separate policy"), (103.0, 103.0, None, "nearly impossible"), (0.3, 0.3, 1.0, "keep the rows")],
)
def test_a_difference_of_log_probabilities_says_where_to_look(first: float, later: float, std: float | None, words: str) -> None:
    changes: Mapping[str, Number] = {"integrity/ratio_init": lambda ago: later if ago else first, "policy/head/op/std/min": std}
    texts = [alarm.text for alarm in alarms(judged(run(6, set_to(changes), since=1)), AlarmEvent.RAISE) if "nats" in alarm.text]

    assert len(texts) == 1 and words in texts[0]


def test_ratios_of_all_pairs_are_to_be_given_one_shape() -> None:
    facts = {**FACTS, "loss_pairs": True}
    (raised,) = alarms(judged(run(3, set_to({"integrity/ratio_init": 0.5}), since=1), facts), AlarmEvent.RAISE)

    assert "Give new and old log-probabilities the shape [N]" in raised.text
