"""RSL-RL 5: telemetry for PPO of `OnPolicyRunner`, by `attach_runner` or as the class path of RSL-RL's logger, `TelemetryWriter`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from esper_telemetry.core.lazy import lazy_names as lazy_names

if TYPE_CHECKING:
    from esper_telemetry.adapters.rsl_rl.runner import attach_runner as attach_runner
    from esper_telemetry.adapters.rsl_rl.writer import TelemetryWriter as TelemetryWriter

__all__, __getattr__, __dir__ = lazy_names(
    __name__,
    {
        "esper_telemetry.adapters.rsl_rl.runner": ("attach_runner",),
        "esper_telemetry.adapters.rsl_rl.writer": ("TelemetryWriter",),
    },
)
