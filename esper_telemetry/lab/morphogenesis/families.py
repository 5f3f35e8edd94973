"""The families of morphogenesis in a dashboard; the entry point `esper_telemetry.families` names this module."""

from __future__ import annotations

from typing import Final

from esper_telemetry.sinks.layout import Family

FAMILIES: Final = {
    "env": Family("What are the grown networks worth?", axis="axis/env_step", place=170),
    "seed": Family("Do seeds take root?", place=180),
    "host": Family("How well do the hosts learn?", place=190),
}
