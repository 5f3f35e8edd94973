"""The state of an environment as plain data: supported attributes are restored, and unsupported ones are refused."""

from collections import OrderedDict, deque, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from esper_telemetry.ppo.environments.environment_registry import make_env
from esper_telemetry.ppo.environments.gymnasium import GymnasiumEnvironment

Place = namedtuple("Place", "x y")  # as in real environments


class Number(int):
    """A user's type."""


class Noise:
    """A callable object that counts its calls."""

    calls = 0

    def __call__(self) -> int:
        self.calls += 1
        return self.calls


class Keeping(gymnasium.Env[Any, Any]):
    """Holds an attribute, and observes a number drawn from every generator in it."""

    observation_space = spaces.Box(-100, 100, (1,))
    action_space = spaces.Discrete(2)

    def __init__(self, make: Callable[[], Any]) -> None:
        self.attribute = make()

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        parts = self.attribute.values() if isinstance(self.attribute, dict) else self.attribute if isinstance(self.attribute, list) else ()
        samples = [part.normal() for part in parts if isinstance(part, np.random.Generator)]
        return np.full(1, sum(samples), np.float32), 0.0, False, False, {}


def holding(make: Callable[[], Any]) -> tuple[GymnasiumEnvironment, Keeping]:
    vector = SyncVectorEnv([lambda: Keeping(make)], autoreset_mode=AutoresetMode.SAME_STEP)
    env = GymnasiumEnvironment(vector, seed=1)
    env.reset()
    inner = vector.envs[0].unwrapped
    assert isinstance(inner, Keeping)
    return env, inner


def generator(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.MT19937(seed))


def through_a_file(state: Any, directory: Path) -> Any:
    """Save and load the state like a checkpoint."""
    torch.save(state, directory / "state.pt")
    return torch.load(directory / "state.pt", weights_only=True)


@pytest.mark.parametrize(
    "value",
    [
        [1, (2.5, "three", None), {"four": [True]}, b"five"],
        deque([1, 2], maxlen=3),
        {1, 2},
        {(0, 1): np.float64(2.0)},
        np.array([b"S", b"F"], dtype="c"),
        np.array(["left", "right"]),
        np.arange(3, dtype=">f4"),
        np.ones((2, 2), np.longdouble),
        np.arange(4, dtype=np.int16),
        [np.arange(3), np.bool_(True)],
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_an_attribute_holds_is_given_back(value: Any, tmp_path: Path) -> None:
    ahead, _ = holding(lambda: value)
    behind, inner = holding(lambda: None)

    behind.load_state_dict(through_a_file(ahead.state_dict(), tmp_path))

    np.testing.assert_equal(inner.attribute, value)
    assert type(inner.attribute) is type(value)
    if isinstance(value, np.ndarray):
        assert inner.attribute.dtype == value.dtype
    if isinstance(value, deque):
        assert inner.attribute.maxlen == value.maxlen


@pytest.mark.parametrize("collect", [list, lambda made: dict(enumerate(made))])
def test_generators_go_on_wherever_they_are(collect: Any, tmp_path: Path) -> None:
    """Two kinds of random generators; the state of one holds an array."""

    def make() -> Any:
        return collect([generator(1), np.random.default_rng(2)])

    ahead, _ = holding(make)
    ahead.step({"action": np.zeros(1, np.int64)})
    behind, _ = holding(make)
    behind.load_state_dict(through_a_file(ahead.state_dict(), tmp_path))

    for _ in range(3):
        left, right = (env.step({"action": np.zeros(1, np.int64)}).observations for env in (ahead, behind))
        assert left.any() and np.array_equal(left, right)


def itself() -> list[Any]:
    circle: list[Any] = []
    circle.append(circle)
    return circle


@pytest.mark.parametrize(
    "make", [lambda: Place(1, 2), lambda: Number(3), lambda: OrderedDict(a=1), Noise, object, itself, lambda: [Noise()]]
)
def test_what_might_come_back_as_something_else_is_refused(make: Callable[[], Any]) -> None:
    """A subclass of a plain type would be restored as the plain type, and a callable may have state."""
    assert holding(make)[0].state_dict() is None
    native: Any = make_env("CartPole-v1", num_envs=2)
    native._vector.attribute = make()
    assert native.state_dict() is None


@pytest.mark.parametrize("env_id", ["FrozenLake-v1", "Taxi-v4", "Blackjack-v1", "CliffWalking-v1", "MountainCar-v0"])
def test_environments_of_gymnasium_go_on(env_id: str, tmp_path: Path) -> None:
    ahead, behind = (make_env(env_id, num_envs=2) for _ in range(2))
    assert isinstance(ahead, GymnasiumEnvironment) and isinstance(behind, GymnasiumEnvironment)
    ahead.reset(1), behind.reset(2)
    choices = np.random.default_rng(0).integers(2, size=(20, 2))
    for choice in choices[:10]:
        ahead.step({"action": choice})

    behind.load_state_dict(through_a_file(ahead.state_dict(), tmp_path))

    for choice in choices[10:]:
        left, right = (env.step({"action": choice}) for env in (ahead, behind))
        assert np.array_equal(left.observations, right.observations) and np.array_equal(left.rewards, right.rewards)
