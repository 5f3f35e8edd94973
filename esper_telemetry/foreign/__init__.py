"""Logs that other trainers have left, read as records: without torch, and with nothing known but what was logged."""

from esper_telemetry.foreign.records import Foreign, read_foreign
from esper_telemetry.foreign.source import read_source

__all__ = ["Foreign", "read_foreign", "read_source"]
