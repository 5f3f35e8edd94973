"""Environments for the bundled trainer: the protocol they follow, and the bridge to Gymnasium."""

from esper_telemetry.environments.gymnasium import GymnasiumEnvironment, make_env
from esper_telemetry.environments.protocol import ActionSpec, Step, VectorEnvironment

__all__ = ["ActionSpec", "GymnasiumEnvironment", "Step", "VectorEnvironment", "make_env"]
