"""Evaluation: the most likely actions, one whole episode per environment, and no effect on training."""

from typing import Any

import pytest
import torch
from ppo_builders import cartpole, equal, weights
from short_trainings import learned
from test_ppo_masks import Restricted, restricted
from test_ppo_trainer import Forever

from esper_telemetry.events import EvaluationEnd
from esper_telemetry.ppo import PPO, PPOConfig
from esper_telemetry.ppo.environments.cue_recall import CueRecall
from esper_telemetry.ppo.environments.environment_registry import make_env
from esper_telemetry.ppo.normalizer import Normalizers
from esper_telemetry.ppo.trainer import evaluate, first_episode


def test_steps_of_the_first_episode_include_its_end() -> None:
    """Environment 0 ends at t = 1, environment 1 never; environment 2 had ended before."""
    ended = torch.tensor([[0, 0, 0], [1, 0, 0], [1, 0, 1]], dtype=torch.bool)

    assert first_episode(ended, torch.tensor([True, True, False])).int().tolist() == [[1, 1, 0], [1, 1, 0], [0, 1, 0]]


@pytest.mark.parametrize("settings", [{}, {"policy": "lstm", "num_minibatches": 2, "normalize_observations": True}])
def test_evaluating_leaves_training_as_it_is(settings: dict[str, Any]) -> None:
    watched, alone = cartpole(**settings), cartpole(**settings)
    for trainer in (watched, alone):
        trainer.learn(200)
        if trainer is watched:
            trainer.evaluate(make_env("CartPole-v1", num_envs=5))
        trainer.learn(600)

    assert equal(weights(watched), weights(alone))


def test_actions_are_the_likeliest_so_the_same_seed_gives_the_same_episodes() -> None:
    trainer = cartpole()
    emitted = learned(trainer, 400, EvaluationEnd)

    first, second = (trainer.evaluate(make_env("CartPole-v1", num_envs=5), seed=7) for _ in range(2))

    assert first == second and len(set(first.lengths)) > 1
    assert first.returns == [float(length) for length in first.lengths]
    assert [event.returns for event in emitted.events] == [first.returns] * 2
    assert trainer.env_steps < 600


def test_an_episode_that_does_not_end_is_given_up() -> None:
    trainer = PPO(Forever(), PPOConfig(hidden_sizes=(4,)))
    env: Any = Forever()
    env.step = lambda actions: Forever.step(env, actions)._replace(truncated=torch.zeros(2).bool().numpy())

    assert trainer.evaluate(env).lengths == [10_112] * 2


def test_masks_and_tensors_are_evaluated_too() -> None:
    restricted().evaluate(Restricted())
    trainer = PPO(CueRecall(4, seed=0), PPOConfig(policy="lstm"))

    evaluation = evaluate(trainer.policy, CueRecall(6, seed=0), Normalizers())

    assert len(evaluation.returns) == 6 and max(evaluation.lengths) <= 10
