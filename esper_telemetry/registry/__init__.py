"""The registry: every metric with its name, its meaning, what is normal, which alarms read it and what to try then."""

from esper_telemetry.registry.entry import PRIORITIES, Entry, registry
from esper_telemetry.registry.families import CHAPTERS, Chapter, chapter_of
from esper_telemetry.registry.page import entry_text, page

__all__ = ["CHAPTERS", "PRIORITIES", "Chapter", "Entry", "chapter_of", "entry_text", "page", "registry"]
