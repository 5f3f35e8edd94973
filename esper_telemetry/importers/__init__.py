"""Reads logs of other trainers as records, without torch and only from logged data."""

from typing import TYPE_CHECKING

from esper_telemetry.core.lazy import lazy_names as lazy_names

if TYPE_CHECKING:
    from esper_telemetry.importers.records import Foreign as Foreign
    from esper_telemetry.importers.records import read_foreign as read_foreign
    from esper_telemetry.importers.source import read_source as read_source

__all__, __getattr__, __dir__ = lazy_names(__name__)
