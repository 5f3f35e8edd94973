"""Models of Stable-Baselines3 for the fault bench, and two ways to change one: attributes of objects, and the steps of environments."""

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


class VecEnvStep(NamedTuple):
    """The result of `VecEnv.step`."""

    observations: Any
    rewards: Any
    dones: Any
    infos: list[dict[str, Any]]


VecEnvChange: TypeAlias = Callable[[VecEnvStep, Any], VecEnvStep]
"""From a step and its actions to the changed step."""


class BreakableVecEnv(VecEnvWrapper):
    """Environments whose steps are changed while `change` is set."""

    change: VecEnvChange | None = None

    def step_async(self, actions: Any) -> None:
        """Step, and store the actions for the change."""
        self._actions = actions
        self.venv.step_async(actions)

    def step_wait(self) -> Any:
        """Return the changed step."""
        step = VecEnvStep(*self.venv.step_wait())
        return step if self.change is None else self.change(step, self._actions)

    def reset(self) -> Any:
        """Return the first observations, unchanged."""
        return self.venv.reset()


class WithoutVelocities(gym.ObservationWrapper[Any, Any, Any]):
    """CartPole-v1 with positions only."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.observation_space = spaces.Box(-5, 5, (2,), np.float32)

    def observation(self, observation: Any) -> Any:
        """Return the positions."""
        return observation[::2]


class ArmTask(gym.Env[Any, Any]):
    """An episode of 16 steps in which every observation names one of four arms."""

    observation_space = spaces.Box(0, 1, (4,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed)
        self._steps = 0
        return self._next(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Return the reward and the next arm."""
        reward = self.reward(action)
        self._steps += 1
        return self._next(), reward, self._steps >= 16, False, {}

    def reward(self, action: Any) -> float:
        """Return the reward of an action."""
        raise NotImplementedError

    def _next(self) -> Any:
        self._arm = int(self.np_random.integers(4))
        return np.eye(4, dtype=np.float32)[self._arm]


class MaskedArms(ArmTask):
    """The observed arm is forbidden, and the arm after it pays 1."""

    action_space = spaces.Discrete(4)

    def reward(self, action: Any) -> float:
        """Return 1 for the arm after the forbidden one."""
        return float(action == (self._arm + 1) % 4)

    def action_masks(self) -> Any:
        """Return the mask of the arms that may be chosen, [4]."""
        return np.arange(4) != self._arm


class TwoChoices(ArmTask):
    """The observed arm pays 0.5 in the first of two choices, the arm after it in the second."""

    action_space = spaces.MultiDiscrete([4, 4])

    def reward(self, action: Any) -> float:
        """Return half the number of correct choices."""
        return ((int(action[0]) == self._arm) + (int(action[1]) == (self._arm + 1) % 4)) / 2


def cartpole(seed: int) -> Any:
    """PPO with ReLU on CartPole-v1."""
    return PPO("MlpPolicy", _envs("CartPole-v1", seed), seed=seed, policy_kwargs={"activation_fn": nn.ReLU}, **SETTINGS)


def pendulum(seed: int) -> Any:
    """PPO on Pendulum-v1, observations normalised."""
    env = VecNormalize(make_vec_env("Pendulum-v1", NUM_ENVS, seed=seed), norm_reward=False)
    return PPO("MlpPolicy", BreakableVecEnv(env), seed=seed, learning_rate=1e-3, gamma=0.9, **SETTINGS)


def cartpole_lstm(seed: int) -> Any:
    """RecurrentPPO on CartPole-v1 without velocities."""
    from sb3_contrib import RecurrentPPO

    env = _envs(lambda: WithoutVelocities(gym.make("CartPole-v1")), seed)
    kwargs = {"lstm_hidden_size": 32}
    return RecurrentPPO("MlpLstmPolicy", env, seed=seed, policy_kwargs=kwargs, **SETTINGS)


def masked_arms(seed: int) -> Any:
    """MaskablePPO with one of four arms forbidden."""
    from sb3_contrib import MaskablePPO

    return MaskablePPO("MlpPolicy", _envs(MaskedArms, seed), seed=seed, **SETTINGS)


def two_choices(seed: int) -> Any:
    """PPO with an action of two parts."""
    return PPO("MlpPolicy", _envs(TwoChoices, seed), seed=seed, **SETTINGS)


def _envs(env: Any, seed: int) -> BreakableVecEnv:
    return BreakableVecEnv(make_vec_env(env, NUM_ENVS, seed=seed))


MODELS: Mapping[str, Callable[[int], Any]] = {
    "sb3-cartpole": cartpole,
    "sb3-pendulum": pendulum,
    "sb3-cartpole-lstm": cartpole_lstm,
    "sb3-masked-arms": masked_arms,
    "sb3-two-choices": two_choices,
}
"""Models by name, from a seed."""


class ModelNotApplicableError(ValueError):
    """A fault needs something that this model lacks; the message names it."""


def require(condition: bool, message: str) -> None:
    """Raise ModelNotApplicableError unless the condition holds."""
    if not condition:
        raise ModelNotApplicableError(message)


def replace_attributes(owner: Any, **values: Any) -> Undo:
    """Replace attributes of one object, but not of its class."""
    before = {name: vars(owner)[name] for name in values if name in vars(owner)}
    vars(owner).update(values)

    def undo() -> None:
        for name in values:
            vars(owner).pop(name, None)
        vars(owner).update(before)

    return undo


def change_env_steps(model: Any, change: VecEnvChange) -> Undo:
    """Change the steps of the model's environments."""
    env: Any = model.env
    while not isinstance(env, BreakableVecEnv):
        env = env.venv
    return replace_attributes(env, change=change)
