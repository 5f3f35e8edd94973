"""Presets: the settings of tuned tasks, and the precedence of explicit options."""

import pytest

from esper_telemetry.cli.main import Train, parse
from esper_telemetry.ppo import PPOConfig, preset
from esper_telemetry.ppo.config import PRESETS
from esper_telemetry.ppo.environments.environment_registry import make_env


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
