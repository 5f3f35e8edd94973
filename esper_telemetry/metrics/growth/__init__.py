"""Networks that grow: hosts, the seeds in them, and the environments that pay for it."""

from esper_telemetry.metrics.growth.each import each_stats
from esper_telemetry.metrics.growth.environments import environment_stats
from esper_telemetry.metrics.growth.hosts import host_stats
from esper_telemetry.metrics.growth.seeds import gate_stats, seed_stats

__all__ = ["each_stats", "environment_stats", "gate_stats", "host_stats", "seed_stats"]
