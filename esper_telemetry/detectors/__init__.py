"""Is anything wrong with this run? Records in, alarms out; no torch.

A rule (`rules/`, one file per family) tells from an update's values, and from what they usually are in this run, how severe one way
of going wrong is. `Standing` turns severities into alarms that begin, get worse and end; `Incidents` puts together what came
together and names the cause; `Thresholds` holds all bounds. What cannot be answered is said, never guessed.
"""

from esper_telemetry.detectors.detectors import Detectors, Verdict
from esper_telemetry.detectors.diagnosis import Diagnosis, Story, diagnose
from esper_telemetry.detectors.rules.ending import Failure, bad_ending
from esper_telemetry.detectors.thresholds import Thresholds

__all__ = ["Detectors", "Diagnosis", "Failure", "Story", "Thresholds", "Verdict", "bad_ending", "diagnose"]
