"""Faulty environments under Stable-Baselines3: what the environment does is named live, and its correct twin raises nothing.

The task is a damped oscillator that is pushed to its resting point. Its episodes end after 40 steps, and begin at random places.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from esper_telemetry import Telemetry
from esper_telemetry.adapters.sb3 import TelemetryCallback
from esper_telemetry.journal.read import Run, read_run

pytestmark = pytest.mark.sb3

LENGTH = 40


class Oscillator(gym.Env[Any, Any]):
    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, seed: int = 0, reach: float = 1.0) -> None:
        self.rng, self.reach = np.random.default_rng(seed), reach

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.place, self.speed = self.rng.uniform(-3, 3, 2)
        self.count = 0
        return self.seen(), {}

    def seen(self) -> Any:
        return np.array([self.place, self.speed, self.place - self.speed], np.float32)

    def step(self, action: Any) -> Any:
        push = float(np.clip(action[0] / self.reach, -1, 1))
        self.speed += 0.1 * (push - self.place - 0.1 * self.speed)
        self.place += 0.1 * self.speed
        self.count += 1
        return self.seen(), -(self.place**2), False, self.count == LENGTH, {}


class Unmoved(Oscillator):
    """Returns the observation from before the action, in every step of an episode."""

    def seen(self) -> Any:
        return super().seen() if self.count == 0 else self.first

    def reset(self, **settings: Any) -> Any:
        self.first, infos = super().reset(**settings)
        return self.first, infos


class Late(Oscillator):
    def step(self, action: Any) -> Any:
        before = self.seen()
        return before, *super().step(action)[1:]


class Rounded(Oscillator):
    observation_space = gym.spaces.Box(-10, 10, (3,), np.int64)  # type: ignore[arg-type]


class TwoAgents(gym.Env[Any, Any]):
    """Steps two oscillators in turn, one far to the right, as if they were one."""

    observation_space, action_space = Oscillator.observation_space, Oscillator.action_space

    def __init__(self, seed: int = 0) -> None:
        self.agents, self.shifts = [Oscillator(seed), Oscillator(seed + 50)], (0.0, 20.0)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.turn = 0
        first, second = (agent.reset()[0] for agent in self.agents)
        self.waiting = second + self.shifts[1]
        return first, {}

    def step(self, action: Any) -> Any:
        observation, reward, _, ended, infos = self.agents[self.turn].step(action)
        shown, self.waiting = self.waiting, observation + np.float32(self.shifts[self.turn])
        over = ended and self.turn == 1
        self.turn = 1 - self.turn
        return shown, reward, False, over, infos


class Bounded(Oscillator):
    def __init__(self, seed: int, low: float, high: float) -> None:
        super().__init__(seed, high)
        self.action_space = gym.spaces.Box(low, high, (1,), np.float32)


def two(make: Callable[[int], Any]) -> DummyVecEnv:
    return DummyVecEnv([lambda index=index: make(index) for index in range(2)])  # type: ignore[misc]


def ppo(env: Any) -> Any:
    return PPO("MlpPolicy", env, n_steps=256, batch_size=128, n_epochs=2, device="cpu", seed=1)


def trained(model: Any, run_dir: Path, updates: int = 3) -> Run:
    with Telemetry([], run_dir=run_dir, offload=False) as telemetry:
        model.learn(updates * model.n_steps * model.n_envs, callback=TelemetryCallback(telemetry))
    return read_run(run_dir)


FAULTS: Mapping[str, tuple[Callable[[int], Any], str, str]] = {
    "a step that shows what it was given": (Unmoved, "integrity/equation", "returns the observation that it was given"),
    "the state of one step ago": (Late, "integrity/equation", "returns the state of one step ago"),
    "a dtype that rounds": (Rounded, "integrity/equation", "the dtype of the observation space changes"),
    "one seed": (lambda index: Oscillator(7), "integrity/equation", "have the same random numbers"),
    "two agents in turn": (TwoAgents, "integrity/equation", "belong to several streams in turn; streams = 2"),
    "no choice": (lambda index: Bounded(index, 1, 1), "policy/action_range", "low = high in 100 % of its dimensions"),
    "far bounds": (lambda index: Bounded(index, -100, 100), "policy/action_range", "uses 1 % of the range"),
}
"""Environments by what is wrong with them, with the type of the alarm and words of its text."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_environment_is_named(fault: str, tmp_path: Path) -> None:
    make, kind, words = FAULTS[fault]

    run = trained(ppo(two(make)), tmp_path)

    assert [alarm.text for alarm in run.alarms if alarm.type == kind and words in alarm.text]


TWINS: Mapping[str, Callable[[int], Any]] = {
    "the task": Oscillator,
    "bounds of 3": lambda index: Bounded(index, -3, 3),
    "float64": lambda index: gym.wrappers.TransformObservation(Oscillator(index), np.float64, None),
    "one start": lambda index: gym.wrappers.TimeLimit(gym.make("Pendulum-v1"), 30),
}


@pytest.mark.parametrize("twin", TWINS)
def test_a_correct_environment_raises_nothing(twin: str, tmp_path: Path) -> None:
    run = trained(ppo(two(TWINS[twin])), tmp_path)

    assert not [alarm.text for alarm in run.alarms]


@pytest.mark.parametrize("loaded", [False, True])
def test_a_fresh_normalizer_of_a_trained_policy_is_named(loaded: bool, tmp_path: Path) -> None:
    env = VecNormalize(two(Oscillator))
    model = ppo(env)
    model.learn(1024)
    model.save(tmp_path / "model.zip")
    env.save(str(tmp_path / "statistics.pkl"))

    later = two(lambda index: Oscillator(3 + index))
    scaled = VecNormalize.load(str(tmp_path / "statistics.pkl"), later) if loaded else VecNormalize(later)
    run = trained(PPO.load(tmp_path / "model.zip", scaled, device="cpu"), tmp_path / "run", 4)

    named = [alarm.text for alarm in run.alarms if "begins without any data" in alarm.text]
    assert bool(named) != loaded
