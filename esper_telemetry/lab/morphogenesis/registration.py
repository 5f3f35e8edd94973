"""The entry point that registers the environment `morphogenesis`; imports torch only when an environment is made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from esper_telemetry.ppo.environments.environment_registry import PresetSettings, RegisteredEnvironment

if TYPE_CHECKING:
    from esper_telemetry.lab.morphogenesis.controllers import ScriptedRun
    from esper_telemetry.lab.morphogenesis.environment import Morphogenesis
    from esper_telemetry.ppo.config import PPOConfig

CONTROLLERS: Final = ("heuristic", "oracle", "random")
NUM_ENVS, NUM_STEPS = 16, 32

LSTM_PRESET: Final[PresetSettings] = (
    NUM_ENVS,
    {
        "num_steps": NUM_STEPS,
        "num_epochs": 4,
        "num_minibatches": 4,
        "learning_rate": 3e-3,
        "gamma": 0.99,
        "entropy_coef": 0.01,
        "hidden_sizes": (64,),
        "encoder_sizes": (64,),
        "lstm_size": 64,
        "normalize_rewards": True,
    },
)
"""Measured over five seeds by `tests/lab/morphogenesis/test_growing_learning.py`."""


def make(num_envs: int = NUM_ENVS, **arguments: Any) -> Morphogenesis:
    """Return `num_envs` environments; takes the arguments of `Morphogenesis`."""
    from esper_telemetry.lab.morphogenesis.environment import Morphogenesis

    return Morphogenesis(num_envs, **arguments)


def control(env: Morphogenesis, config: PPOConfig) -> ScriptedRun:
    """Return a run of the controller that `config.policy` names."""
    from esper_telemetry.lab.morphogenesis.controllers import ScriptedRun

    return ScriptedRun(env, config)


MORPHOGENESIS: Final = RegisteredEnvironment(
    make,
    train_options=("task", "gamma", "device"),
    presets={"lstm": LSTM_PRESET, **dict.fromkeys(CONTROLLERS, (NUM_ENVS, {"num_steps": NUM_STEPS}))},
    controllers=CONTROLLERS,
    control=control,
)
