"""Is anything wrong with this run? Records in, alarms out; no torch.

A rule (`rules/`, one file per family) tells from an update's values, and from what they usually are in this run, how severe one way
of going wrong is. `Standing` turns severities into alarms that begin, get worse and end; `Incidents` puts together what came
together and names the cause; `Thresholds` holds all bounds. What cannot be answered is said, never guessed.
"""

from typing import TYPE_CHECKING

from esper_telemetry.core.lazy import lazy_names as lazy_names

if TYPE_CHECKING:
    from esper_telemetry.alarms.detectors import Detectors as Detectors
    from esper_telemetry.alarms.detectors import Verdict as Verdict
    from esper_telemetry.alarms.diagnosis import Diagnosis as Diagnosis
    from esper_telemetry.alarms.diagnosis import Story as Story
    from esper_telemetry.alarms.diagnosis import diagnose as diagnose
    from esper_telemetry.alarms.rules.endings import Failure as Failure
    from esper_telemetry.alarms.rules.endings import bad_ending as bad_ending
    from esper_telemetry.alarms.thresholds import Thresholds as Thresholds

__all__, __getattr__, __dir__ = lazy_names(
    __name__,
    {
        "esper_telemetry.alarms.detectors": ("Detectors", "Verdict"),
        "esper_telemetry.alarms.diagnosis": ("Diagnosis", "Story", "diagnose"),
        "esper_telemetry.alarms.rules.endings": ("Failure", "bad_ending"),
        "esper_telemetry.alarms.thresholds": ("Thresholds",),
    },
)
