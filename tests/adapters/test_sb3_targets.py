"""Advantages and returns of Stable-Baselines3: correct ones match their equations, and mistakes in buffers are named."""

import inspect
import textwrap
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from adapter_runs import QUIET
from sb3_collection import ScaledRewards
from sb3_contrib import MaskablePPO, RecurrentPPO
from sb3_models import of_corpus
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.vec_env import VecNormalize

from esper_telemetry import Telemetry
from esper_telemetry.adapters.sb3 import TelemetryCallback
from esper_telemetry.core.record import Record
from esper_telemetry.equations.equation import EQUATION_KEY
from esper_telemetry.lab.faults.sb3_models import MaskedArms

pytestmark = pytest.mark.sb3

SETTINGS: dict[str, Any] = {"n_steps": 64, "device": "cpu", "seed": 3}
MINIBATCHES = {**SETTINGS, "batch_size": 64, "n_epochs": 2}


def run(model: Any, updates: int = 3) -> tuple[list[Record], dict[str, str]]:
    records: list[Record] = []
    sentences: dict[str, str] = {}
    with Telemetry([records.append], run_dir=None, level="debug", detect=QUIET) as telemetry:
        telemetry.on_alarm(lambda alarm: sentences.setdefault(alarm.type, alarm.text))
        model.learn(updates * model.n_steps * model.n_envs, callback=TelemetryCallback(telemetry))
    return records, sentences


def results(records: list[Record], equation: str) -> tuple[float, set[str]]:
    """The largest error of an equation, and the hypotheses that explain every record with a difference."""
    key = EQUATION_KEY + equation
    checked = [record.values for record in records if key in record.values]
    assert checked
    names = [{name.removeprefix(f"{key}_") for name in values if name.startswith(f"{key}_")} for values in checked if values[key] > 1e-4]
    return max(values[key] for values in checked), set.intersection(*names) if names else set()


class Limited(gym.Env[Any, Any]):
    """Random observations and rewards; a tenth of the steps terminate, and a time limit ends the other episodes after 9 steps."""

    observation_space = gym.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        ended = bool(self.np_random.random() < 0.1)
        return self._observation(), float(self.np_random.normal()), ended, self._steps >= 9, {}

    def _observation(self) -> Any:
        return self.np_random.uniform(-1, 1, 3).astype(np.float32)


def limited(envs: int = 4) -> Any:
    return make_vec_env(Limited, envs, seed=2)


class LastEndIgnored(RolloutBuffer):
    """The flag of the last step does not mask the value after it."""

    def compute_returns_and_advantage(self, last_values: Any, dones: Any) -> None:
        super().compute_returns_and_advantage(last_values, np.zeros_like(dones))


def changed(change: Callable[[Any], None]) -> type[RolloutBuffer]:
    """Return a buffer whose advantages or returns are changed after they were computed."""

    class Changed(RolloutBuffer):
        def compute_returns_and_advantage(self, last_values: Any, dones: Any) -> None:
            super().compute_returns_and_advantage(last_values, dones)
            change(self)

    return Changed


def normalize(buffer: Any, axis: int | None = None) -> None:
    buffer.advantages = (buffer.advantages - buffer.advantages.mean(axis)) / (buffer.advantages.std(axis) + 1e-8)


def returns_from_normalized(buffer: Any) -> None:
    normalize(buffer)
    buffer.returns = buffer.advantages + buffer.values


def centre(buffer: Any) -> None:
    buffer.advantages = buffer.advantages - buffer.advantages.mean()


class Stale(RolloutBuffer):
    previous: Any = None

    def compute_returns_and_advantage(self, last_values: Any, dones: Any) -> None:
        super().compute_returns_and_advantage(last_values, dones)
        now = self.advantages.copy()
        if self.previous is not None:
            self.advantages = self.previous
            self.returns = self.advantages + self.values
        self.previous = now


def edited(function: Any, line: str, other: str, *, count: int = 1) -> Callable[..., Any]:
    """Return a method in which a text that occurs the given number of times is replaced."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(line) == count
    names = dict(function.__globals__)
    exec(source.replace(line, other), names)
    method: Callable[..., Any] = names[function.__name__]
    return method


def source_count(text: str) -> int:
    return inspect.getsource(OnPolicyAlgorithm.collect_rollouts).count(text)


def with_line(line: str, other: str, *, count: int = 1) -> Callable[..., bool]:
    """Return Stable-Baselines3's collecting loop in which a text that occurs the given number of times is replaced."""
    return edited(OnPolicyAlgorithm.collect_rollouts, line, other, count=count)


class OtherCounter(PPO):
    collect_rollouts = with_line("n_steps", "taken", count=source_count("n_steps"))


class OtherInfos(PPO):
    """Uses another name for the key that distinguishes time limits from terminations."""

    collect_rollouts = with_line("infos", "details", count=source_count("infos"))


class ShowsNothing(PPO):
    """Does not pass its local variables to the callback."""

    collect_rollouts = with_line("callback.update_locals(locals())", "pass", count=2)


def broken(buffer: type[RolloutBuffer], seed: int = 3) -> PPO:
    return PPO("MlpPolicy", limited(), rollout_buffer_class=buffer, **{**MINIBATCHES, "seed": seed})


def named(model: Any, equation: str, name: str) -> dict[str, str]:
    """The alarm sentences of a run in which only that hypothesis explains that equation, and in which returns otherwise hold."""
    records, sentences = run(model)
    error, names = results(records, equation)
    other = {"advantages": "returns", "returns": "advantages"}[equation]

    assert error > 1e-4
    assert names == {name}
    assert results(records, other)[0] < 1e-5
    return sentences


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(
    ("buffer", "equation", "name"),
    [
        (of_corpus("subclass-ends_late").Buffer, "advantages", "ends_late"),
        (of_corpus("subclass-ends_ignored").Buffer, "advantages", "ends_ignored"),
        (LastEndIgnored, "advantages", "last_end_ignored"),
        (of_corpus("subclass-no_bootstrap").Buffer, "advantages", "no_last_bootstrap"),
        (of_corpus("subclass-lambda").Buffer, "advantages", "other_lambda"),
        (Stale, "advantages", "stale"),
        (of_corpus("subclass-returns_normalized").Buffer, "returns", "normalized"),
        (changed(partial(normalize, axis=0)), "advantages", "normalized_parts"),
    ],
)
def test_a_buffer_with_a_mistake_is_named(buffer: type[RolloutBuffer], equation: str, name: str, seed: int) -> None:
    sentences = named(broken(buffer, seed), equation, name)

    assert f"the {equation} equal" in sentences["integrity/equation"]


class MonteCarloTargets(RolloutBuffer):
    def compute_returns_and_advantage(self, last_values: Any, dones: Any) -> None:
        super().compute_returns_and_advantage(last_values, dones)
        goes_on, total = np.append(1 - self.episode_starts[1:], [1.0 - dones], 0), 0.0
        for step in reversed(range(self.buffer_size)):
            total = self.rewards[step] + self.gamma * goes_on[step] * total
            self.returns[step] = total


@pytest.mark.parametrize(
    ("buffer", "equation", "name"),
    [
        (MonteCarloTargets, "returns", "monte_carlo_cut"),
        (of_corpus("subclass-returns_normalized").Buffer, "returns", "normalized"),
        (changed(returns_from_normalized), "returns", "normalized"),
        (changed(centre), "advantages", "mean_alone"),
    ],
)
def test_a_mistake_in_each_of_the_rollouts_of_a_record_is_named(buffer: type[RolloutBuffer], equation: str, name: str) -> None:
    model = A2C("MlpPolicy", limited(), rollout_buffer_class=buffer, **{**SETTINGS, "n_steps": 16})
    records, _ = run(model, updates=60)

    assert results(records, equation)[1] == {name}


@pytest.mark.parametrize(
    ("program", "name"),
    [
        ("timeouts_as_ends", "time_limit_as_termination"),
        ("timeout_next_episode", "time_limit_next_episode"),
        ("ends_as_timeouts", "termination_bootstrapped"),
        ("last_value_of_old_obs", "old_last_bootstrap"),
    ],
)
def test_a_collecting_loop_with_a_mistake_is_named(program: str, name: str) -> None:
    sentences = named(of_corpus(f"subclass-{program}").OwnPPO("MlpPolicy", limited(), **MINIBATCHES), "advantages", name)

    assert "the advantages equal" in sentences["integrity/equation"]


def test_rewards_of_the_step_before_are_named_and_advantages_follow_them() -> None:
    records, sentences = run(of_corpus("subclass-reward_before_obs").OwnPPO("MlpPolicy", limited(), **MINIBATCHES))

    assert results(records, "stored_rewards")[1] == {"step_before"}
    assert results(records, "advantages")[0] < 1e-5
    assert "the stored rewards equal" in sentences["integrity/equation"]


def test_a_published_bootstrap_of_time_limits_is_named_and_raises_nothing() -> None:
    model = of_corpus("subclass-timeout_old_value").OwnPPO("MlpPolicy", limited(), **MINIBATCHES)

    assert "integrity/equation" not in named(model, "advantages", "time_limit_current_value")


def test_advantages_that_are_normalised_once_over_the_batch_raise_nothing() -> None:
    """Neither the equations nor the older identity A + V = R, which holds before normalisation, is reported."""
    records, sentences = run(broken(changed(normalize)))

    assert results(records, "advantages")[1] == {"normalized"}
    assert results(records, "returns")[1] == {"normalized_after"}
    assert not {"integrity/equation", "integrity/gae_identity"} & sentences.keys()


def test_returns_that_are_made_of_stored_normalised_advantages_are_named() -> None:
    """The returns equal the stored A + V, but the stored advantages no longer equal GAE."""
    records, sentences = run(broken(changed(returns_from_normalized)))

    assert results(records, "advantages")[1] == {"normalized"}
    assert results(records, "returns")[1] == {"normalized"}
    assert "the returns equal" in sentences["integrity/equation"]


def cliff(envs: int) -> Any:
    return make_vec_env("CliffWalking-v1" if "CliffWalking-v1" in gym.registry else "CliffWalking-v0", envs, seed=4)


def scaled() -> Any:
    return VecNormalize(make_vec_env("Pendulum-v1", 2, seed=1))


HEALTHY: dict[str, Callable[[], Any]] = {
    "own loop": lambda: broken(of_corpus("subclass-lambda", correct=True).Buffer),
    "another name of the counter": lambda: OtherCounter("MlpPolicy", limited(), **MINIBATCHES),
    "rewards scaled when they are stored": lambda: broken(ScaledRewards),
    "cartpole": lambda: PPO("MlpPolicy", make_vec_env("CartPole-v1", 1, seed=1), **MINIBATCHES),
    "undiscounted": lambda: PPO("MlpPolicy", make_vec_env("FrozenLake-v1", 4, seed=1), gamma=1.0, gae_lambda=1.0, **MINIBATCHES),
    "one step": lambda: PPO("MlpPolicy", limited(), gae_lambda=0.0, **MINIBATCHES),
    "scaled": lambda: PPO("MlpPolicy", scaled(), **MINIBATCHES),
    "cliff": lambda: PPO("MlpPolicy", cliff(2), **{**MINIBATCHES, "n_steps": 256}),
    "a2c": lambda: A2C("MlpPolicy", limited(), **{**SETTINGS, "n_steps": 5}),
    "a2c alone": lambda: A2C("MlpPolicy", limited(1), gae_lambda=0.9, **{**SETTINGS, "n_steps": 8}),
    "recurrent": lambda: RecurrentPPO("MlpLstmPolicy", limited(), **MINIBATCHES),
    "masked": lambda: MaskablePPO("MlpPolicy", make_vec_env(MaskedArms, 4, seed=1), **MINIBATCHES),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_follows_its_equations(name: str) -> None:
    """Up to rounding: the float32 errors of these runs are 1e-8 to 3e-7."""
    model = HEALTHY[name]()
    records, sentences = run(model, updates=300 if isinstance(model, A2C) else 3)

    for equation in ("advantages", "returns"):
        error, names = results(records, equation)
        assert error < 1e-5
        assert names == set()
    assert not {"integrity/equation", "integrity/gae_identity"} & sentences.keys()


@pytest.mark.parametrize("algorithm", [OtherInfos, ShowsNothing])
def test_advantages_are_not_checked_where_the_loop_hides_the_ends(algorithm: type[PPO], capfd: Any) -> None:
    records, sentences = run(algorithm("MlpPolicy", limited(), **MINIBATCHES))

    assert not any(key.startswith(EQUATION_KEY + "advantages") for record in records for key in record.values)
    assert results(records, "returns")[0] < 1e-5
    assert not {"integrity/equation", "integrity/gae_identity"} & sentences.keys()
    assert "failed" not in capfd.readouterr().err


NORMALISATION = "(advantages - advantages.mean()) / (advantages.std() + 1e-8)"


class OverTheRollout(PPO):
    train = edited(
        PPO.train, NORMALISATION, "(advantages - self.rollout_buffer.advantages.mean()) / (self.rollout_buffer.advantages.std() + 1e-8)"
    )


class OtherRows(PPO):
    train = edited(PPO.train, NORMALISATION, f"({NORMALISATION})[th.randperm(len(advantages))]")


class FirstRows(RolloutBuffer):
    """Returns the advantages of the first rows with every minibatch."""

    def _get_samples(self, batch_inds: Any, env: Any = None) -> Any:
        first = self.to_torch(self.advantages[: len(batch_inds)].flatten())
        return super()._get_samples(batch_inds, env)._replace(advantages=first)


class OverPadding(RecurrentPPO):  # type: ignore[misc]  # sb3-contrib has no types
    train = edited(RecurrentPPO.train, "(advantages - advantages[mask].mean()) / (advantages[mask].std() + 1e-8)", NORMALISATION)


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (lambda: broken(FirstRows), "in_order"),
        (lambda: OverTheRollout("MlpPolicy", limited(), **MINIBATCHES), "over_rollout"),
        (lambda: OtherRows("MlpPolicy", limited(), **MINIBATCHES), "other_rows"),
        (lambda: OverPadding("MlpLstmPolicy", limited(), **MINIBATCHES), "over_padding"),
    ],
)
def test_the_rows_that_advantages_are_normalised_over_are_named(build: Callable[[], Any], name: str) -> None:
    records, sentences = run(build())

    assert results(records, "normalized_advantages")[1] == {name}
    assert "the advantages in use equal" in sentences["integrity/equation"]
