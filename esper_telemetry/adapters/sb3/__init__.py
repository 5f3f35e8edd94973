"""Stable-Baselines3: `TelemetryCallback` for PPO and A2C, and for RecurrentPPO and MaskablePPO of sb3-contrib."""

from __future__ import annotations

from typing import TYPE_CHECKING

from esper_telemetry.core.lazy import lazy_names as lazy_names

if TYPE_CHECKING:
    from esper_telemetry.adapters.sb3.callback import TelemetryCallback as TelemetryCallback

__all__, __getattr__, __dir__ = lazy_names(__name__)
