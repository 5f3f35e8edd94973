"""Environments for the bundled trainer: their protocols, the bridge to Gymnasium, and bundled tasks."""

from typing import TYPE_CHECKING

from esper_telemetry.core.lazy import lazy_names as lazy_names

if TYPE_CHECKING:
    from esper_telemetry.ppo.environments.cue_recall import CueRecall as CueRecall
    from esper_telemetry.ppo.environments.environment_protocol import ActionSpec as ActionSpec
    from esper_telemetry.ppo.environments.environment_protocol import Environment as Environment
    from esper_telemetry.ppo.environments.environment_protocol import Image as Image
    from esper_telemetry.ppo.environments.environment_protocol import Layout as Layout
    from esper_telemetry.ppo.environments.environment_protocol import Masked as Masked
    from esper_telemetry.ppo.environments.environment_protocol import ObservationLayout as ObservationLayout
    from esper_telemetry.ppo.environments.environment_protocol import Step as Step
    from esper_telemetry.ppo.environments.environment_protocol import Structured as Structured
    from esper_telemetry.ppo.environments.environment_protocol import TensorEnvironment as TensorEnvironment
    from esper_telemetry.ppo.environments.environment_protocol import TensorStep as TensorStep
    from esper_telemetry.ppo.environments.environment_protocol import VectorEnvironment as VectorEnvironment
    from esper_telemetry.ppo.environments.environment_registry import RegisteredEnvironment as RegisteredEnvironment
    from esper_telemetry.ppo.environments.environment_registry import make_env as make_env
    from esper_telemetry.ppo.environments.gymnasium import GymnasiumEnvironment as GymnasiumEnvironment

__all__, __getattr__, __dir__ = lazy_names(
    __name__,
    {
        "esper_telemetry.ppo.environments.cue_recall": ("CueRecall",),
        "esper_telemetry.ppo.environments.gymnasium": ("GymnasiumEnvironment",),
        "esper_telemetry.ppo.environments.environment_registry": ("RegisteredEnvironment", "make_env"),
        "esper_telemetry.ppo.environments.environment_protocol": (
            "ActionSpec",
            "Environment",
            "Image",
            "Layout",
            "Masked",
            "ObservationLayout",
            "Step",
            "Structured",
            "TensorEnvironment",
            "TensorStep",
            "VectorEnvironment",
        ),
    },
)
