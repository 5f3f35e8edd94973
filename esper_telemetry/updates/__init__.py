"""Events of one update become `Update`, and that becomes metric groups and evidence: pure, so that any process can do it."""

from typing import TYPE_CHECKING

from esper_telemetry.core.lazy import lazy_names as lazy_names

if TYPE_CHECKING:
    from esper_telemetry.updates.evidence import evidence_of as evidence_of
    from esper_telemetry.updates.extensions import Capture as Capture
    from esper_telemetry.updates.extensions import UpdateExtension as UpdateExtension
    from esper_telemetry.updates.groups import Measurements as Measurements
    from esper_telemetry.updates.groups import measure as measure
    from esper_telemetry.updates.update import Update as Update

__all__, __getattr__, __dir__ = lazy_names(
    __name__,
    {
        "esper_telemetry.updates.update": ("Update",),
        "esper_telemetry.updates.evidence": ("evidence_of",),
        "esper_telemetry.updates.extensions": ("Capture", "UpdateExtension"),
        "esper_telemetry.updates.groups": ("Measurements", "measure"),
    },
)
