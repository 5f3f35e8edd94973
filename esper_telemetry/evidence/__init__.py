"""What an alarm points at: the rows, steps and tensors behind the numbers of a record, as plain values for the journal."""

from esper_telemetry.evidence.captures import Captures
from esper_telemetry.evidence.flight import flight_of
from esper_telemetry.evidence.layers import layer_table
from esper_telemetry.evidence.stability import stability_report

__all__ = ["Captures", "flight_of", "layer_table", "stability_report"]
