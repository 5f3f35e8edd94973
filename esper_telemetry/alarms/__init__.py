"""Alarms and verdicts from records; works without torch.

An `AlarmRule` declares one way in which a run goes wrong. Its judge yields severities from an update's values and from their history in
this run (`Baselines`). `AlarmState` turns severities into alarms that begin, get worse and end. `Incidents` groups alarms that come
together and names the cause. `Thresholds` holds the values of all bounds. `RuleCoverage` reports rules whose inputs are missing.
"""

from typing import TYPE_CHECKING

from esper_telemetry.core.lazy import lazy_names as lazy_names

if TYPE_CHECKING:
    from esper_telemetry.alarms.alarm_bounds import Bound as Bound
    from esper_telemetry.alarms.alarm_bounds import Ramp as Ramp
    from esper_telemetry.alarms.detectors import Detectors as Detectors
    from esper_telemetry.alarms.detectors import Verdict as Verdict
    from esper_telemetry.alarms.diagnosis import Diagnosis as Diagnosis
    from esper_telemetry.alarms.diagnosis import IncidentReport as IncidentReport
    from esper_telemetry.alarms.diagnosis import diagnose as diagnose
    from esper_telemetry.alarms.judges import AboveBound as AboveBound
    from esper_telemetry.alarms.judges import OnRamp as OnRamp
    from esper_telemetry.alarms.rule import AlarmRule as AlarmRule
    from esper_telemetry.alarms.rule import Finding as Finding
    from esper_telemetry.alarms.rule import View as View
    from esper_telemetry.alarms.rules.task_alarms import Failure as Failure
    from esper_telemetry.alarms.rules.task_alarms import bad_ending as bad_ending
    from esper_telemetry.alarms.thresholds import Thresholds as Thresholds
    from esper_telemetry.alarms.thresholds import alarm_rules as alarm_rules

__all__, __getattr__, __dir__ = lazy_names(__name__)
