"""Evaluations of Stable-Baselines3 models, in separate environments or in the training environments, which an evaluation resets."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from sb3_collection import SETTINGS, ppo, vec_env
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecNormalize

from esper_telemetry import Telemetry
from esper_telemetry.adapters.sb3 import TelemetryCallback
from esper_telemetry.equations.equation import EQUATION_KEY
from esper_telemetry.journal.read import Run, read_run

pytestmark = pytest.mark.sb3

STEPS = 3 * 64 * 4
RESETS = EQUATION_KEY + "transitions_reset_elsewhere"


class AfterRollout(BaseCallback):
    def __init__(self, action: Callable[[Any], object]) -> None:
        super().__init__()
        self._action = action

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        self._action(self.model)


class TwoLives(gym.Wrapper[Any, Any, Any, Any]):
    """Starts a second episode itself in the step that ends the first."""

    def reset(self, **settings: Any) -> Any:
        self._lives = 2
        return self.env.reset(**settings)

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = self.env.step(action)
        if terminated and self._lives > 1:
            self._lives, terminated = 1, False
            observation, info = self.env.reset()
        return observation, reward, terminated, truncated, info


def trained(model: Any, run_dir: Path, callback: BaseCallback | None, *, first: bool = True) -> Run:
    with Telemetry([], level="debug", run_dir=run_dir, offload=False) as telemetry:
        ours = TelemetryCallback(telemetry)
        both = [] if callback is None else [ours, callback] if first else [callback, ours]
        model.learn(STEPS, callback=both or ours)
    return read_run(run_dir)


def evaluated(model: Any) -> None:
    evaluate_policy(model, model.get_env(), n_eval_episodes=2, warn=False)


def reset_on_purpose(model: Any) -> None:
    model._last_obs = model.get_env().reset()


def shared_gym_env(seed: int) -> tuple[Any, BaseCallback]:
    env = gym.make("CartPole-v1")
    model = PPO("MlpPolicy", env, **{**SETTINGS, "n_steps": 256}, seed=seed)
    return model, EvalCallback(env, eval_freq=100, n_eval_episodes=1, verbose=0, warn=False)


def shared_vec_env(env: Any, seed: int) -> tuple[Any, BaseCallback]:
    model = ppo(env, seed=seed)
    environments = model.get_env()
    assert environments is not None
    return model, EvalCallback(environments, eval_freq=50, n_eval_episodes=2, verbose=0, warn=False)


SHARED: dict[str, Callable[[int], tuple[Any, BaseCallback]]] = {
    "after each rollout": lambda seed: (ppo(vec_env(seed=seed), seed=seed), AfterRollout(evaluated)),
    "within the rollout": lambda seed: shared_vec_env(vec_env(seed=seed), seed),
    "beneath a normaliser": lambda seed: shared_vec_env(VecNormalize(vec_env("Pendulum-v1", seed=seed)), seed),
    "the same gymnasium environment": shared_gym_env,
    "in other processes": lambda seed: shared_vec_env(vec_env(seed=seed, vec_env_cls=SubprocVecEnv), seed),
    "a reset alone": lambda seed: (ppo(vec_env(seed=seed), seed=seed), AfterRollout(lambda model: model.get_env().reset())),
}

OWN: dict[str, Callable[[int], tuple[Any, BaseCallback | None]]] = {
    "separate environments": lambda seed: (
        ppo(vec_env(seed=seed), seed=seed),
        EvalCallback(Monitor(gym.make("CartPole-v1")), eval_freq=50, n_eval_episodes=1, verbose=0),
    ),
    "a reset on purpose": lambda seed: (ppo(vec_env(seed=seed), seed=seed), AfterRollout(reset_on_purpose)),
    "a wrapper that begins episodes itself": lambda seed: (ppo(vec_env(seed=seed, wrapper_class=TwoLives), seed=seed), None),
}


@pytest.mark.parametrize("first", [True, False], ids=["telemetry first", "telemetry last"])
@pytest.mark.parametrize("name", SHARED)
def test_an_evaluation_in_the_training_environments_is_named(name: str, first: bool, tmp_path: Path) -> None:
    model, callback = SHARED[name](1)

    run = trained(model, tmp_path, callback, first=first)
    model.get_env().close()

    assert any(RESETS in record.values for record in run.records)
    (alarm,) = (alarm for alarm in run.alarms if alarm.type == "integrity/equation")
    assert "something else uses its environments; resets = " in alarm.text


@pytest.mark.parametrize("name", OWN)
def test_resets_that_the_trainer_knows_of_are_right(name: str, tmp_path: Path) -> None:
    model, callback = OWN[name](1)

    run = trained(model, tmp_path, callback)

    assert not any(RESETS in record.values for record in run.records)
    assert "integrity/equation" not in {alarm.type for alarm in run.alarms}


def test_a_second_call_of_learn_resets_its_environments_by_right(tmp_path: Path) -> None:
    model = ppo(vec_env(), seed=1)
    with Telemetry([], level="debug", run_dir=tmp_path, offload=False) as telemetry:
        callback = TelemetryCallback(telemetry)
        for _ in range(2):
            model.learn(STEPS // 3, callback=callback)

    assert not any(RESETS in record.values for record in read_run(tmp_path).records)


def test_environments_are_left_without_taps(tmp_path: Path) -> None:
    model = ppo(vec_env(), seed=1)
    trained(model, tmp_path, None)

    environments = model.get_env()
    assert isinstance(environments, DummyVecEnv)
    assert all("reset" not in vars(env.unwrapped) for env in environments.envs)
