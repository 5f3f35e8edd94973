"""Morphogenesis: networks that are trained while a controller grows modules, called seeds, into them."""

from esper_telemetry.environments.morphogenesis.environment import Morphogenesis
from esper_telemetry.environments.morphogenesis.policies import SCRIPTS, Script

__all__ = ["SCRIPTS", "Morphogenesis", "Script"]
