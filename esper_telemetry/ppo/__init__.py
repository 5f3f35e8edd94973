"""The bundled trainer: proximal policy optimisation that tells what happens in it through `hooks`."""

from esper_telemetry.ppo.checkpoint import Checkpoints
from esper_telemetry.ppo.config import PPOConfig
from esper_telemetry.ppo.presets import Preset, preset
from esper_telemetry.ppo.steps import UpdateSteps
from esper_telemetry.ppo.trainer import PPO

__all__ = ["PPO", "Checkpoints", "PPOConfig", "Preset", "UpdateSteps", "preset"]
