"""Wrong settings raise one sentence with the offending value; presets set what explicit options do not."""

from typing import Any

import numpy as np
import pytest
import torch
from short_trainings import learned

from esper_telemetry.cli.main import Train, parse
from esper_telemetry.events import UpdateEnd
from esper_telemetry.ppo import PPO, PPOConfig, preset
from esper_telemetry.ppo.config import PRESETS
from esper_telemetry.ppo.environments.environment_registry import make_env


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"num_steps": 0}, "num_steps must be at least 1, got 0"),
        ({"num_epochs": -1}, "num_epochs must be at least 1, got -1"),
        ({"num_minibatches": 0}, "num_minibatches must be at least 1, got 0"),
        ({"learning_rate": 0.0}, "learning_rate must be positive and at most 1,000,000, got 0.0"),
        ({"clip": -0.1}, "clip must be positive and at most 1,000,000, got -0.1"),
        ({"gamma": 1.1}, "gamma must be between 0 and 1, got 1.1"),
        ({"gae_lambda": float("nan")}, "gae_lambda must be between 0 and 1, got nan"),
        ({"entropy_coef": -1}, "entropy_coef must be between 0 and 1,000,000, got -1"),
        ({"max_grad_norm": 0}, "max_grad_norm must be positive, got 0"),
        ({"hidden_sizes": ()}, r"hidden_sizes must name at least one layer, got \(\)"),
        ({"hidden_sizes": (64, 0)}, r"hidden_sizes must be from 1 to 65,536 each, got \(64, 0\)"),
        ({"learning_rate": 1e20}, r"learning_rate must be positive and at most 1,000,000, got 1e\+20"),
        ({"desired_kl": float("inf")}, "desired_kl must be positive and at most 1,000,000, got inf"),
        ({"target_kl": float("inf")}, "target_kl must be positive and at most 1,000,000, got inf"),
        ({"clip_value": float("nan")}, "clip_value must be positive and at most 1,000,000, got nan"),
        ({"final_entropy_coef": float("inf")}, "final_entropy_coef must be between 0 and 1,000,000, got inf"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm must be positive, got nan"),
        ({"log_std": float("-inf")}, "log_std must be between -20 and 20, got -inf"),
        ({"num_steps": 10**10}, "num_steps must be at most 1,073,741,824, got 10000000000"),
        ({"lstm_size": 10**9}, "lstm_size must be at most 65,536, got 1000000000"),
        ({"activation": "swish"}, "activation must be one of tanh, relu, got 'swish'"),
        ({"seed": -1}, "seed must be between 0 and 4294967295, got -1"),
        ({"precision": "fp8"}, "precision must be one of fp32, bf16, got 'fp8'"),
        ({"state_dependent_std": True, "log_std": 3.0}, "log_std that depends on the state must be between -5.0 and 2.0, got 3.0"),
        ({"watchdog": True, "stop_on_nonfinite": True}, "watchdog repairs what stop_on_nonfinite stops at: choose one of them"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        PPOConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"num_steps": "8"}, "num_steps must be a whole number, got '8'"),
        ({"num_steps": 8.0}, "num_steps must be a whole number, got 8.0"),
        ({"num_epochs": True}, "num_epochs must be a whole number, got True"),
        ({"clip": "0.2"}, "clip must be one number, got '0.2'"),
        ({"gamma": 1j}, "gamma must be one number, got 1j"),
        ({"clip": torch.ones(3)}, r"clip must be one number, got a tensor of shape \[3\]"),
        ({"normalize_rewards": "no"}, "normalize_rewards must be True or False, got 'no'"),
        ({"hidden_sizes": 64}, "hidden_sizes must be a tuple, got 64"),
        ({"hidden_sizes": ("64",)}, "each of hidden_sizes must be a whole number, got '64'"),
        ({"policy": None}, "policy must be a text, got None"),
    ],
)
def test_a_setting_of_another_type_is_named(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(TypeError, match=f"^{sentence}$"):
        PPOConfig(**settings)


def test_settings_may_be_numbers_of_numpy() -> None:
    config = PPOConfig(num_steps=np.int64(8), clip=np.float32(0.5), hidden_sizes=[np.int32(4)], compile=np.bool_(False))  # type: ignore[arg-type]

    assert (config.num_steps, config.clip) == (8, 0.5)


def test_a_rollout_of_any_size_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r"num_steps x 8 environments must be at most 1,073,741,824, got 8589934592"):
        PPOConfig(num_steps=1 << 30).check_rollout(8)
    with pytest.raises(ValueError, match="the nearest divisors are 1, 2, 4, 8"):
        PPOConfig(num_steps=1 << 30, num_minibatches=3).check_rollout(1)


def test_minibatches_must_divide_the_rollout() -> None:
    with pytest.raises(ValueError, match="rollout of 3 x 128 = 384 rows, got 5; the nearest divisors are 2, 3, 4, 6"):
        PPO(make_env("CartPole-v1", num_envs=3), PPOConfig(num_minibatches=5))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"num_steps": 1}, "num_steps of several ranks must be at least 2, got 1"),
        ({"num_steps": 3}, "num_minibatches of 2 ranks with 3 environments each must not exceed 3, got 4"),
        ({"policy": "lstm"}, "num_minibatches of 2 ranks with 3 environments each must not exceed 3, got 4"),
    ],
)
def test_ranks_need_rows_for_every_minibatch(settings: dict[str, Any], sentence: str) -> None:
    """Every second row may be a reset, so of 3 x 3 rows only 3 are certain to be transitions."""
    config = PPOConfig(**settings)

    with pytest.raises(ValueError, match=sentence):
        config.check_ranks(3, 2)
    config.check_ranks(3, 1)
    PPOConfig(num_minibatches=3, num_steps=2).check_ranks(3, 2)


@pytest.mark.system
@pytest.mark.parametrize("policy", ["mlp", "lstm"])
def test_a_rollout_without_a_transition_trains_nothing(policy: str) -> None:
    """One environment and one step: the step after an episode's end is a reset."""
    trainer = PPO(make_env("CartPole-v1", num_envs=1, seed=0), PPOConfig(num_steps=1, num_minibatches=1, policy=policy))
    emitted = learned(trainer, 60, UpdateEnd)

    assert {event.epochs for event in emitted.events} == {0, 8}
    assert trainer.gradient_steps == 8 * 60 == 8 * trainer.env_steps < 8 * trainer.updates


def test_steps_that_are_collected_already_are_no_goal() -> None:
    trainer = PPO(make_env("CartPole-v1", num_envs=2, seed=0), PPOConfig(num_steps=8, hidden_sizes=(4,)))
    trainer.learn(16)

    with pytest.raises(ValueError, match="total_steps must exceed the 16 steps already collected, got 16"):
        trainer.learn(16)


def train(*options: str) -> Train:
    command = parse(["train", *options])
    assert isinstance(command, Train)
    return command


@pytest.mark.parametrize("key", list(PRESETS), ids=str)
def test_every_preset_fits_its_task(key: tuple[str, str, bool]) -> None:
    env_id, policy, hidden = key
    tuned = preset(env_id, policy, mask_velocity=hidden)

    config = tuned.config(seed=3)

    assert (config.policy, config.seed) == (policy, 3)
    config.check_rollout(tuned.num_envs)
    make_env(env_id, num_envs=tuned.num_envs, mask_velocity=hidden).close()


def test_an_unknown_task_gets_the_defaults() -> None:
    defaults = preset("Somewhere-v0")

    assert (defaults.name, defaults.num_envs, defaults.config()) == ("none", 8, PPOConfig())


def test_an_unknown_task_with_memory_is_normalised() -> None:
    """Rewards and observations may have any scale. Without normalisation, an LSTM that must see small differences does not learn."""
    defaults = preset("Somewhere-v0", "gru")

    assert (defaults.name, defaults.config().policy) == ("memory", "gru")
    assert defaults.config().normalize_observations and defaults.config().normalize_rewards


def test_the_command_line_starts_from_the_preset_and_explicit_options_win() -> None:
    command = train("--env", "Pendulum-v1", "--gae-lambda", "0.5")

    assert command.preset_name == "Pendulum-v1 mlp"
    assert (command.ppo.gamma, command.ppo.gae_lambda) == (0.9, 0.5)
    assert train("--env", "Pendulum-v1", "--gamma", "0.99").ppo.gamma == 0.99


def test_the_preset_depends_on_policy_and_view() -> None:
    command = train("--env", "cue-recall", "--policy", "lstm", "--num-envs", "32")

    assert (command.preset_name, command.num_envs, command.ppo.lstm_size) == ("cue-recall lstm", 32, 32)
    assert train("--env", "CartPole-v1", "--mask-velocity").preset_name != "CartPole-v1 mlp"


def test_without_a_preset_the_defaults_stay() -> None:
    command = train("--env", "Pendulum-v1", "--preset", "none")

    assert (command.preset_name, command.ppo, command.num_envs) == ("none", PPOConfig(), 8)
