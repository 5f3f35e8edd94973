"""Metrics of morphogenesis: hosts, the seeds in them, and their environments."""

from typing import TYPE_CHECKING

from esper_telemetry.core.lazy import lazy_names as lazy_names

if TYPE_CHECKING:
    from esper_telemetry.lab.morphogenesis.metrics.environment_metrics import environment_stats as environment_stats
    from esper_telemetry.lab.morphogenesis.metrics.hosts import each_stats as each_stats
    from esper_telemetry.lab.morphogenesis.metrics.hosts import host_stats as host_stats
    from esper_telemetry.lab.morphogenesis.metrics.seeds import gate_stats as gate_stats
    from esper_telemetry.lab.morphogenesis.metrics.seeds import seed_stats as seed_stats

__all__, __getattr__, __dir__ = lazy_names(
    __name__,
    {
        "esper_telemetry.lab.morphogenesis.metrics.hosts": ("each_stats", "host_stats"),
        "esper_telemetry.lab.morphogenesis.metrics.environment_metrics": ("environment_stats",),
        "esper_telemetry.lab.morphogenesis.metrics.seeds": ("gate_stats", "seed_stats"),
    },
)
