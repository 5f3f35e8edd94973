"""Programs that are wrong from the start, trained for a few updates together with their correct twins; and each check worked by hand."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from healthy_run import FACTS, Values, alarms, both, judged, raised, run, set_to

from esper_telemetry import PPO, PPOConfig, Telemetry, attach, make_env, read_run
from esper_telemetry.alarms import Detectors
from esper_telemetry.core.record import AlarmLevel
from esper_telemetry.lab.faults.data import StepFilter
from esper_telemetry.lab.faults.fault import wrap_environment
from esper_telemetry.ppo.environments.environment_protocol import Step

UPDATES = 6
Change = Callable[[Step, Any], Step]


def trainer(env: str, **settings: Any) -> PPO:
    """Four environments of 64 steps, and a small network."""
    common: dict[str, Any] = {"num_steps": 64, "num_epochs": 2, "num_minibatches": 4, "hidden_sizes": (8,), "seed": 1}
    return PPO(make_env(env, num_envs=4, seed=1), PPOConfig(**{**common, **settings}))


def types(run_dir: Path, ppo: PPO, change: Change | None = None) -> dict[str, int]:
    """Types of alarm, with their first updates, of a run whose steps are altered from the first one on."""
    if change is not None:
        wrap_environment(ppo, partial(StepFilter, change))
    with Telemetry(run_dir=run_dir, offload=False) as telemetry:
        attach(telemetry, ppo)
        ppo.learn(64 * 4 * UPDATES)
    journal = read_run(run_dir)
    detectors = Detectors(journal.info.facts)
    return raised([detectors.step(record) for record in journal.records])


def observed(function: Callable[[Any], Any]) -> Change:
    return lambda step, _: step._replace(observations=function(np.array(step.observations)).astype(np.float32))


def rewarded(function: Callable[[Any], Any]) -> Change:
    return lambda step, _: step._replace(rewards=function(np.array(step.rewards, dtype=np.float64)))


ENDS = ("episode/terminated_length_min", "episode/terminated_length_max")
LARGE = np.array([5000.0, 1.0, 1.0, 1.0])
WRONG: Mapping[str, tuple[str, str, Change | None, Mapping[str, Any]]] = {
    "observations constant": ("obs/constant", "CartPole-v1", observed(np.zeros_like), {}),
    "observations of one environment for all": ("obs/copies", "CartPole-v1", observed(lambda x: x[:1].repeat(4, 0)), {}),
    "one feature times 5000": ("obs/unscaled", "CartPole-v1", observed(lambda x: x * LARGE), {}),
    "observations far from 0": ("obs/unscaled", "Pendulum-v1", observed(lambda x: x + 2000), {}),
    "rewards of 100,000": ("reward/unscaled", "Pendulum-v1", rewarded(lambda x: x * 1e5), {}),
    "sigma far outside of the bounds": ("policy/actions_cut", "Pendulum-v1", None, {"log_std": 4.5}),
    "discount of 0": ("ret/short_sighted", "CartPole-v1", None, {"gamma": 0.0}),
    "minibatches of two rows": ("adv/signs", "CartPole-v1", None, {"num_minibatches": 128, "num_epochs": 1, "normalize_minibatches": True}),
}


@pytest.mark.system
@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_from_the_first_line_is_named_in_the_first_updates(name: str, tmp_path: Path) -> None:
    kind, env, change, settings = WRONG[name]

    assert types(tmp_path / "run", trainer(env, **settings), change)[kind] <= UPDATES


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1", "Acrobot-v1", "cue-recall"])
def test_a_correct_program_is_silent(env: str, tmp_path: Path) -> None:
    assert types(tmp_path / "run", trainer(env)) == {}


def test_a_constant_reward_of_episodes_that_all_last_as_long_is_named() -> None:
    """Pendulum lasts 200 steps: with 1 per step, every policy gets 200. A cost per step may belong to a goal not reached yet."""

    def equal(metrics: Values, ago: int) -> None:
        metrics.update({"reward/std": 0.0, "reward/mean": 1.0, "reward/absmax": 1.0})
        metrics.update(dict.fromkeys(("episode/length_mean", *ENDS), 200.0))
        metrics["episode/count"] = 4.0

    def lengths_vary(metrics: Values, ago: int) -> None:
        equal(metrics, ago)
        metrics["episode/length_mean"] = 200.0 + ago % 3

    def costs(metrics: Values, ago: int) -> None:
        equal(metrics, ago)
        metrics["reward/mean"] = -1.0

    assert raised(judged(run(20, equal, since=1)))["reward/constant"] == 3
    assert "reward/constant" not in raised(judged(run(80, lengths_vary, since=1)))
    assert "reward/constant" not in raised(judged(run(80, costs, since=1)))


@pytest.mark.parametrize(("threshold", "cut", "told"), [(475.0, 0.0, True), (-110.0, 0.0, False), (475.0, 1.0, False)])
def test_a_penalty_per_step_contradicts_a_threshold_above_0(threshold: float, cut: float, told: bool) -> None:
    """CartPole with the opposite reward sign. MountainCar is solved at -110; truncated episodes may have missed the goal."""

    def penalty(metrics: Values, ago: int) -> None:
        metrics.update({"reward/std": 0.0, "reward/mean": -1.0, "reward/absmax": 1.0, "episode/count": 4.0})
        metrics.update({"episode/length_mean": 20.0 + ago % 3, "episode/truncated_frac": cut})

    facts = {**FACTS, "reward_threshold": threshold}
    said = [alarm for alarm in alarms(judged(run(20, penalty, since=1), facts)) if alarm.type == "reward/constant"]

    assert bool(said) is told
    assert not told or "Flip the sign of the reward" in said[0].text


def test_observations_that_change_at_resets_alone_are_constant() -> None:
    """Every environment starts elsewhere and never sees its own changes, in four updates of 32 steps."""
    blind = set_to({"obs/constant_frac": 0.0, "obs/still_frac": 1.0})
    (alarm,) = [alarm for alarm in alarms(judged(run(6, blind, since=1))) if alarm.type == "obs/constant"]

    assert (alarm.axes.update, alarm.key) == (4, "obs/still_frac")
    assert "only at the starts of episodes" in alarm.text


def test_environments_in_step_are_no_copies_where_the_policy_has_made_up_its_mind() -> None:
    same = {"obs/identical_frac": 1.0}

    assert "obs/copies" in raised(judged(run(10, set_to(same), since=1)))
    assert "obs/copies" not in raised(judged(run(10, set_to({**same, "policy/entropy_norm": 0.1}), since=1)))


def test_scaled_features_may_have_any_size_before_their_normaliser() -> None:
    large = set_to({"obs/rms_max": 4000.0})

    assert "obs/unscaled" not in raised(judged(run(10, large, since=1)))
    assert "obs/unscaled" in raised(judged(run(10, large, since=1), {**FACTS, "normalize_observations": False}))


@pytest.mark.parametrize(("size", "told"), [(0.001, True), (0.4, False), (2.5, False), (8.0, True)])
def test_a_normaliser_makes_features_about_one(size: float, told: bool) -> None:
    assert ("norm/off" in raised(judged(run(5, set_to({"obs/rms_median": size}), since=1)))) is told


def test_a_normaliser_that_cuts_most_entries_is_named_in_the_first_updates() -> None:
    assert raised(judged(run(5, set_to({"norm/obs/clip_frac": 0.8}), since=1)))["norm/off"] == 3


@pytest.mark.parametrize(("ratio", "share", "told"), [(2.5, 0.69, False), (0.5, 0.97, True), (12.0, 0.93, True)])
def test_actions_cut_at_their_bounds(ratio: float, share: float, told: bool) -> None:
    """A standard deviation of 1 between bounds of ±0.4 clips 69 % and still learns, as in Humanoid."""
    cut = set_to({"policy/head/op/std_of_range": ratio, "policy/head/op/bound_frac": share})

    assert ("policy/actions_cut" in raised(judged(run(8, cut, since=1)))) is told


@pytest.mark.parametrize(("used", "since", "told"), [(0.01, 1, True), (0.04, 1, False), (0.01, 20, False)])
def test_a_policy_that_uses_little_of_its_range_from_the_start(used: float, since: int, told: bool) -> None:
    """The smallest published part is 0.037; later a policy may have learned to act in a narrow part of the range."""
    small = set_to({"policy/head/op/range_used": used})

    assert ("policy/action_range" in raised(judged(run(40, small, since=since)))) is told


def test_a_policy_may_learn_to_use_its_bounds_alone() -> None:
    assert "policy/actions_cut" not in raised(judged(run(60, set_to({"policy/head/op/bound_frac": 0.97}))))


def test_rewards_that_a_normaliser_scales_may_be_large() -> None:
    large = set_to({"reward/absmax": 1e5, "reward/mean": 5e4, "reward/std": 1e4})

    (alarm,) = [alarm for alarm in alarms(judged(run(5, large, since=1))) if alarm.type == "reward/unscaled"]
    assert alarm.level is AlarmLevel.WARN and "divide them by 50990" in alarm.text
    assert "reward/unscaled" not in raised(judged(run(5, large, since=1), {**FACTS, "normalize_rewards": True}))


@pytest.mark.parametrize(("gamma", "length", "told"), [(0.0, 200.0, True), (0.0, 1.0, False), (0.9, 200.0, False)])
def test_a_discount_is_short_sighted_in_long_episodes(gamma: float, length: float, told: bool) -> None:
    """It is no mistake in a task that is learned with it, as one without memory may be."""
    long = set_to({"episode/length_mean": length})
    learned = both(long, lambda metrics, ago: metrics.update({"episode/return_mean": 5.0 + 10.0 * (ago > 4)}))

    assert ("ret/short_sighted" in raised(judged(run(8, long, since=1), {**FACTS, "gamma": gamma}))) is told
    assert "ret/short_sighted" not in raised(judged(run(20, learned, since=1), {**FACTS, "gamma": gamma}))


def test_a_learning_rate_below_0_is_named_at_once_and_an_overrun_schedule_is_not() -> None:
    """A linear schedule whose last rollout exceeds the planned steps ends slightly below 0."""
    below = judged(run(3, set_to({"opt/lr": -3e-4}), since=1))
    overrun = judged(run(40, set_to({"opt/lr": -1e-5}), since=40))

    assert raised(below)["opt/negative_rate"] == 1
    assert "opt/negative_rate" not in raised(overrun)
