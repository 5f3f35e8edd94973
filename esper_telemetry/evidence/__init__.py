"""What an alarm points at: the rows, steps and tensors behind the numbers of a record, as plain values for the journal."""

from esper_telemetry.evidence.attached import Scene, evidence_of, weak
from esper_telemetry.evidence.captures import Capture, captures
from esper_telemetry.evidence.flight import flight_of
from esper_telemetry.evidence.layers import layer_table, norm_table
from esper_telemetry.evidence.stability import stability_report

__all__ = [
    "Capture",
    "Scene",
    "captures",
    "evidence_of",
    "flight_of",
    "layer_table",
    "norm_table",
    "stability_report",
    "weak",
]
