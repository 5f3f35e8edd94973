"""Environments for the bundled trainer: the protocols they follow, the bridge to Gymnasium, and tasks of our own."""

from esper_telemetry.environments.cue_recall import CueRecall
from esper_telemetry.environments.gymnasium import GymnasiumEnvironment
from esper_telemetry.environments.make import make_env
from esper_telemetry.environments.morphogenesis import Morphogenesis
from esper_telemetry.environments.observations import Image, Layout, Structured
from esper_telemetry.environments.protocol import (
    ActionSpec,
    Environment,
    Masked,
    Step,
    TensorEnvironment,
    TensorStep,
    VectorEnvironment,
)

__all__ = [
    "ActionSpec",
    "CueRecall",
    "Environment",
    "GymnasiumEnvironment",
    "Image",
    "Layout",
    "Masked",
    "Morphogenesis",
    "Step",
    "Structured",
    "TensorEnvironment",
    "TensorStep",
    "VectorEnvironment",
    "make_env",
]
