"""Morphogenesis: an environment in which a controller adds modules, called seeds, to networks while these are trained."""

from typing import TYPE_CHECKING

from esper_telemetry.core.lazy import lazy_names as lazy_names

if TYPE_CHECKING:
    from esper_telemetry.lab.morphogenesis.controllers import SCRIPTS as SCRIPTS
    from esper_telemetry.lab.morphogenesis.environment import Morphogenesis as Morphogenesis

__all__, __getattr__, __dir__ = lazy_names(
    __name__,
    {
        "esper_telemetry.lab.morphogenesis.environment": ("Morphogenesis",),
        "esper_telemetry.lab.morphogenesis.controllers": ("SCRIPTS",),
    },
)
