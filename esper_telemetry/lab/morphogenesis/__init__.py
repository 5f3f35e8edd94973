"""Morphogenesis: networks that are trained while a controller grows modules, called seeds, into them."""

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
