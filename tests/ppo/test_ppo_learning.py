"""Learning curves: the mean return of the last 100 episodes. Medians over five seeds take minutes.

The numbers of all seeds are printed; `make test-slow` shows them whether a test passes or not.
"""

import statistics
from typing import Any

import pytest
from short_trainings import mean_return

from esper_telemetry.ppo import PPO, preset
from esper_telemetry.ppo.environments.cue_recall import CueRecall
from esper_telemetry.ppo.environments.environment_registry import make_env

SEEDS = range(5)


def final_return(env_id: str, total_steps: int, seed: int, *, policy: str = "mlp", hidden: bool = False) -> float:
    """Return the final return of training with the preset alone."""
    tuned = preset(env_id, policy, mask_velocity=hidden)
    env = make_env(env_id, num_envs=tuned.num_envs, seed=seed, mask_velocity=hidden)
    trainer = PPO(env, tuned.config(seed=seed))
    return mean_return(trainer, total_steps)


def median_return(env_id: str, total_steps: int, **view: Any) -> float:
    """Return the median over the seeds, and print each seed's return."""
    returns = [final_return(env_id, total_steps, seed, **view) for seed in SEEDS]
    reached = statistics.median(returns)
    options = " ".join(f"{name}={value}" for name, value in view.items())
    numbers = " ".join(f"{value:.1f}" for value in returns)
    print(f"{env_id} {options or 'mlp'} at {total_steps:,}: median {reached:.1f}, seeds {numbers}")
    return reached


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env_id", "total_steps", "goal"),
    [("CartPole-v1", 110_000, 475), ("CartPole-v1", 200_000, 475), ("Acrobot-v1", 120_000, -100), ("Pendulum-v1", 100_000, -300)],
)
def test_presets_learn_classic_control(env_id: str, total_steps: int, goal: float) -> None:
    assert median_return(env_id, total_steps) >= goal


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env_id", "total_steps", "goal"), [("CartPole-v1", 100_000, 400), ("Acrobot-v1", 120_000, -100), ("Pendulum-v1", 100_000, -400)]
)
def test_memory_makes_up_for_hidden_velocities(env_id: str, total_steps: int, goal: float) -> None:
    assert median_return(env_id, total_steps, policy="lstm", hidden=True) >= goal


@pytest.mark.slow
def test_without_memory_hidden_velocities_are_too_much() -> None:
    assert median_return("CartPole-v1", 100_000, hidden=True) < 70


GUESSED = 5.25  # always the same op except 0, and the right arguments: 9 / 4 + 3


def recalled(*, stale_cue: bool = False, **changes: Any) -> float:
    tuned = preset("cue-recall", "lstm")
    env = CueRecall(tuned.num_envs, seed=1, stale_cue=stale_cue)
    return mean_return(PPO(env, tuned.config(seed=1, **changes)), 25_000)


@pytest.mark.system
def test_two_factored_heads_recall_the_cue_with_memory_alone() -> None:
    """The largest return is about 11."""
    assert recalled() > 9
    assert recalled(policy="mlp", hidden_sizes=(32,)) < GUESSED + 0.5


@pytest.mark.slow
def test_a_cue_of_the_episode_before_is_a_guess_because_memory_ends_with_the_episode() -> None:
    assert recalled(stale_cue=True) < GUESSED + 0.5
