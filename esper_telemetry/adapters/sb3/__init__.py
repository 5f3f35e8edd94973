"""Stable-Baselines3: `TelemetryCallback` for PPO and A2C, and for RecurrentPPO and MaskablePPO of sb3-contrib."""

from __future__ import annotations

try:
    import stable_baselines3  # noqa: F401  # so that the sentence below comes before any other import error
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "TelemetryCallback needs stable-baselines3: pip install 'esper-telemetry[sb3]'", name=missing.name
    ) from missing

from esper_telemetry.adapters.sb3.callback import TelemetryCallback as TelemetryCallback

__all__ = ["TelemetryCallback"]
