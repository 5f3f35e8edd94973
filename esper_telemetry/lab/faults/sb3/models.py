"""Models of Stable-Baselines3 on which faults are tried; what comes from their environments can be changed on its way.

What is replaced to break a model of Stable-Baselines3: attributes of single objects, and what environments answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecEnvWrapper, VecNormalize
from torch import nn

from esper_telemetry.lab.faults.fault import Undo

NUM_ENVS = 8
SETTINGS: Mapping[str, Any] = {"n_steps": 128, "batch_size": 128, "n_epochs": 4, "device": "cpu"}


class TrainingOutcome(NamedTuple):
    """What environments answer; see `VecEnv.step`."""

    observations: Any
    rewards: Any
    dones: Any
    infos: list[dict[str, Any]]


Change: TypeAlias = Callable[[TrainingOutcome, Any], TrainingOutcome]
"""From an outcome and the actions that led to it."""


class Breakable(VecEnvWrapper):
    """Environments whose answers are changed while `change` is there."""

    change: Change | None = None

    def step_async(self, actions: Any) -> None:
        """Keeps the actions for the change."""
        self._actions = actions
        self.venv.step_async(actions)

    def step_wait(self) -> Any:
        """The outcome, changed."""
        outcome = TrainingOutcome(*self.venv.step_wait())
        return outcome if self.change is None else self.change(outcome, self._actions)

    def reset(self) -> Any:
        """As it is."""
        return self.venv.reset()


class WithoutVelocities(gym.ObservationWrapper[Any, Any, Any]):
    """CartPole-v1 that shows positions alone."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.observation_space = spaces.Box(-5, 5, (2,), np.float32)

    def observation(self, observation: Any) -> Any:
        """Every other number."""
        return observation[::2]


class MaskedArms(gym.Env[Any, Any]):
    """Four arms; the observation names one that is forbidden, and the one after it pays 1. Ends after 16 steps."""

    observation_space = spaces.Box(0, 1, (4,), np.float32)
    action_space = spaces.Discrete(4)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """A new episode."""
        super().reset(seed=seed)
        self._steps = 0
        return self._next(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Pays and goes on to the next forbidden arm."""
        reward = float(action == (self._forbidden + 1) % 4)
        self._steps += 1
        return self._next(), reward, self._steps >= 16, False, {}

    def action_masks(self) -> Any:
        """Which arms may be chosen."""
        return np.arange(4) != self._forbidden

    def _next(self) -> Any:
        self._forbidden = int(self.np_random.integers(4))
        return np.eye(4, dtype=np.float32)[self._forbidden]


class TwoChoices(gym.Env[Any, Any]):
    """Two choices of four arms each; the observation names one, which pays a half in the first choice, and the one after it in the
    second. Ends after 16 steps.
    """

    observation_space = spaces.Box(0, 1, (4,), np.float32)
    action_space = spaces.MultiDiscrete([4, 4])

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """A new episode."""
        super().reset(seed=seed)
        self._steps = 0
        return self._next(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Pays and goes on to the next arm that is named."""
        right = (int(action[0]) == self._named) + (int(action[1]) == (self._named + 1) % 4)
        self._steps += 1
        return self._next(), right / 2, self._steps >= 16, False, {}

    def _next(self) -> Any:
        self._named = int(self.np_random.integers(4))
        return np.eye(4, dtype=np.float32)[self._named]


def cartpole(seed: int) -> Any:
    """PPO with ReLU on CartPole-v1."""
    return PPO("MlpPolicy", _envs("CartPole-v1", seed), seed=seed, policy_kwargs={"activation_fn": nn.ReLU}, **SETTINGS)


def pendulum(seed: int) -> Any:
    """PPO on Pendulum-v1, observations normalised."""
    env = VecNormalize(make_vec_env("Pendulum-v1", NUM_ENVS, seed=seed), norm_reward=False)
    return PPO("MlpPolicy", Breakable(env), seed=seed, learning_rate=1e-3, gamma=0.9, **SETTINGS)


def cartpole_lstm(seed: int) -> Any:
    """RecurrentPPO on CartPole-v1 without velocities."""
    from sb3_contrib import RecurrentPPO

    env = _envs(lambda: WithoutVelocities(gym.make("CartPole-v1")), seed)
    kwargs = {"lstm_hidden_size": 32}
    return RecurrentPPO("MlpLstmPolicy", env, seed=seed, policy_kwargs=kwargs, **SETTINGS)


def masked_arms(seed: int) -> Any:
    """MaskablePPO where one of four arms is forbidden."""
    from sb3_contrib import MaskablePPO

    return MaskablePPO("MlpPolicy", _envs(MaskedArms, seed), seed=seed, **SETTINGS)


def two_choices(seed: int) -> Any:
    """PPO with an action of two parts."""
    return PPO("MlpPolicy", _envs(TwoChoices, seed), seed=seed, **SETTINGS)


def _envs(env: Any, seed: int) -> Breakable:
    return Breakable(make_vec_env(env, NUM_ENVS, seed=seed))


BEDS: Mapping[str, Callable[[int], Any]] = {
    "sb3-cartpole": cartpole,
    "sb3-pendulum": pendulum,
    "sb3-cartpole-lstm": cartpole_lstm,
    "sb3-masked-arms": masked_arms,
    "sb3-two-choices": two_choices,
}
"""Models by name, from a seed."""


def bed(name: str) -> Callable[[int], Any]:
    """That bed, with or without `sb3-` before its name; raises ValueError for one that does not exist."""
    found = BEDS.get(name) or BEDS.get(f"sb3-{name}")
    if found is None:
        raise ValueError(f"there is no environment {name!r} for sb3; there are {', '.join(BEDS)}")
    return found


class NotForThisModelError(ValueError):
    """A fault needs what this model does not have; the message says what."""


def require(there: bool, lacks: str) -> None:
    """Raises NotForThisModelError with what is lacking."""
    if not there:
        raise NotForThisModelError(lacks)


def attribute(owner: Any, **values: Any) -> Undo:
    """Replaces attributes of one object, not those of its class."""
    before = {name: vars(owner)[name] for name in values if name in vars(owner)}
    vars(owner).update(values)

    def undo() -> None:
        for name in values:
            vars(owner).pop(name, None)
        vars(owner).update(before)

    return undo


def answers(model: Any, change: Change) -> Undo:
    """Changes what the environments answer."""
    env: Any = model.env
    while not isinstance(env, Breakable):
        env = env.venv
    return attribute(env, change=change)
