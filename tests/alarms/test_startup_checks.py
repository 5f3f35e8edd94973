"""Programs that are wrong from the start, trained for a few updates together with their correct twins; and each check worked by hand."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from courses import Course, check, parameters, whole
from healthy_run import FACTS, Number, both, judged, later, raised, set_to

from esper_telemetry import PPO, PPOConfig, Telemetry, attach, make_env, read_run
from esper_telemetry.core.record import AlarmLevel
from esper_telemetry.lab.faults.fault import change_env_steps
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
        change_env_steps(ppo, change)
    with Telemetry(run_dir=run_dir, offload=False) as telemetry:
        attach(telemetry, ppo)
        ppo.learn(64 * 4 * UPDATES)
    journal = read_run(run_dir)
    return raised(judged(journal.records, journal.info.facts))


def observed(function: Callable[[Any], Any]) -> Change:
    return lambda step, _: step._replace(observations=function(np.array(step.observations)).astype(np.float32))


def rewarded(function: Callable[[Any], Any]) -> Change:
    return lambda step, _: step._replace(rewards=function(np.array(step.rewards, dtype=np.float64)))


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


PENDULUM = dict.fromkeys(("episode/length_mean", "episode/terminated_length_min", "episode/terminated_length_max"), 200.0)
EQUAL: Mapping[str, Number] = {"reward/std": 0.0, "reward/mean": 1.0, "reward/absmax": 1.0, "episode/count": 4.0, **PENDULUM}
PENALTY: Mapping[str, Number] = {"reward/std": 0.0, "reward/mean": -1.0, "reward/absmax": 1.0, "episode/count": 4.0}
REWARDS = {"reward/absmax": 1e5, "reward/mean": 5e4, "reward/std": 1e4}
LEARNED = both(set_to({"episode/length_mean": 200.0, "episode/return_mean": 5.0}), later(5, set_to({"episode/return_mean": 15.0})))

COURSES: Mapping[str, list[Course]] = {
    "Pendulum lasts 200 steps: with 1 per step, every policy gets 200. A cost per step may belong to a goal not reached yet": [
        whole("reward/constant", 3, EQUAL, 20),
        whole("reward/constant", False, {**EQUAL, "episode/length_mean": lambda ago: 200.0 + ago % 3}, 80),
        whole("reward/constant", False, {**EQUAL, "reward/mean": -1.0}, 80),
    ],
    "CartPole with the opposite reward sign. MountainCar is solved at -110; truncated episodes may have missed the goal": [
        whole(
            "reward/constant",
            told,
            {**PENALTY, "episode/length_mean": lambda ago: 20.0 + ago % 3, "episode/truncated_frac": cut},
            20,
            facts={**FACTS, "reward_threshold": threshold},
            text=("Flip the sign of the reward",),
        )
        for threshold, cut, told in ((475.0, 0.0, True), (-110.0, 0.0, False), (475.0, 1.0, False))
    ],
    "Every environment starts elsewhere and never sees its own changes, in four updates of 32 steps": [
        whole("obs/constant", 4, {"obs/constant_frac": 0.0, "obs/still_frac": 1.0}, 6, text=("only at the starts of episodes",))
    ],
    "Environments in step are no copies where the policy has made up its mind": [
        whole("obs/copies", told, {"obs/identical_frac": 1.0, "policy/entropy_norm": entropy}, 10)
        for entropy, told in ((0.6, True), (0.1, False))
    ],
    "Scaled features may have any size before their normaliser": [
        whole("obs/unscaled", not scaled, {"obs/rms_max": 4000.0}, 10, facts={**FACTS, "normalize_observations": scaled})
        for scaled in (True, False)
    ],
    "A normaliser makes features about one, and does not cut most entries": [
        *(whole("norm/off", told, {"obs/rms_median": size}, 5) for size, told in ((0.001, True), (0.4, False), (2.5, False), (8.0, True))),
        whole("norm/off", 3, {"norm/obs/clip_frac": 0.8}, 5),
    ],
    "A standard deviation of 1 between bounds of ±0.4 clips 69 % and still learns, as in Humanoid": [
        whole("policy/actions_cut", told, {"policy/head/op/std_of_range": ratio, "policy/head/op/bound_frac": share}, 8)
        for ratio, share, told in ((2.5, 0.69, False), (0.5, 0.97, True), (12.0, 0.93, True))
    ],
    "A policy may learn to use its bounds alone": [Course("policy/actions_cut", False, {"policy/head/op/bound_frac": 0.97}, 60)],
    "The smallest published part of a range is 0.037; later a policy may have learned to act in a narrow part": [
        Course("policy/action_range", told, {"policy/head/op/range_used": used}, since=since)
        for used, since, told in ((0.01, 1, True), (0.04, 1, False), (0.01, 20, False))
    ],
    "Rewards that a normaliser scales may be large": [
        whole("reward/unscaled", True, REWARDS, 5, level=AlarmLevel.WARN, text=("divide them by 50990",)),
        whole("reward/unscaled", False, REWARDS, 5, facts={**FACTS, "normalize_rewards": True}),
    ],
    "A discount is short-sighted in long episodes, unless the task is learned with it, as one without memory may be": [
        *(
            whole("ret/short_sighted", told, {"episode/length_mean": length}, 8, facts={**FACTS, "gamma": gamma})
            for gamma, length, told in ((0.0, 200.0, True), (0.0, 1.0, False), (0.9, 200.0, False))
        ),
        whole("ret/short_sighted", False, LEARNED, 20, facts={**FACTS, "gamma": 0.0}),
    ],
    "A learning rate is below 0 at once, or slightly, as a linear schedule whose last rollout exceeds the planned steps": [
        whole("opt/negative_rate", 1, {"opt/lr": -3e-4}, 3),
        Course("opt/negative_rate", False, {"opt/lr": -1e-5}, since=40),
    ],
}


@pytest.mark.parametrize("course", parameters(COURSES))
def test_alarms_of(course: Course) -> None:
    check(course)
