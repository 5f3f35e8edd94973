"""The bundled trainer: proximal policy optimisation that tells what happens in it through `hooks`.

Names are imported when they are first used: the command line reads `PPOConfig` and the presets without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from esper_telemetry.ppo.checkpoint import Checkpoints as Checkpoints
    from esper_telemetry.ppo.config import PPOConfig as PPOConfig
    from esper_telemetry.ppo.presets import Preset as Preset
    from esper_telemetry.ppo.presets import preset as preset
    from esper_telemetry.ppo.steps import UpdateSteps as UpdateSteps
    from esper_telemetry.ppo.trainer import PPO as PPO

_MODULE_OF = {
    "PPO": "trainer",
    "Checkpoints": "checkpoint",
    "PPOConfig": "config",
    "Preset": "presets",
    "UpdateSteps": "steps",
    "preset": "presets",
}

__all__ = ["PPO", "Checkpoints", "PPOConfig", "Preset", "UpdateSteps", "preset"]


def __getattr__(name: str) -> Any:
    """Return the public name from the module that defines it."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
