"""The bundled trainer: proximal policy optimisation that emits events for telemetry.

Names are imported when they are first used: the command line reads `PPOConfig` and the presets without torch.
"""

from typing import TYPE_CHECKING

from esper_telemetry.core.lazy import lazy_names as lazy_names

if TYPE_CHECKING:
    from esper_telemetry.ppo.checkpoint import Checkpoints as Checkpoints
    from esper_telemetry.ppo.config import PPOConfig as PPOConfig
    from esper_telemetry.ppo.config import Preset as Preset
    from esper_telemetry.ppo.config import preset as preset
    from esper_telemetry.ppo.ppo_objective import UpdateSteps as UpdateSteps
    from esper_telemetry.ppo.trainer import PPO as PPO

__all__, __getattr__, __dir__ = lazy_names(__name__)
