"""Runs and records for the tests of the sinks."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from esper_telemetry.alarms.metric_entries import metric_entries
from esper_telemetry.core.record import Axes, Histogram, MetricInfo, Record, RunInfo

METRICS = {
    "episode/return_mean": MetricInfo(unit="return", question="How much is earned?", level="minimal"),
    "policy/kl": MetricInfo(
        unit="nats", question="How far did the policy move?", level="minimal", healthy="0.002 to 0.02", critical="> 0.1"
    ),
    "policy/kl_max": MetricInfo(unit="nats", question="How far did it move at most?"),
    "policy/head/{head}/kl": MetricInfo(unit="nats", question="Which head moved?"),
    "grad/layer/{layer}/norm": MetricInfo(unit="gradient norm", question="Which layer?"),
}

EVERY = {entry.metric.key: entry.info() for entry in metric_entries()}
"""All metrics of the package."""

HISTOGRAM = Histogram(edges=(0.0, 1.0, 2.0, 3.0), counts=(1.0, 2.0, 1.0))


def run_info(run_dir: Path | None = None, **changes: Any) -> RunInfo:
    settings: dict[str, Any] = {
        "run_id": "abc123",
        "name": "cartpole",
        "run_dir": run_dir,
        "started": 1_700_000_000.0,
        "config": {"env": "CartPole-v1", "ppo": {"clip": 0.2, "sizes": [64, 64], "anneal": True}},
        "tags": ("demo",),
        "notes": "first try",
        "metrics": dict(METRICS),
    }
    return RunInfo(**(settings | changes))


def record(update: int, values: Mapping[str, float] | None = None, histograms: Mapping[str, Histogram] | None = None) -> Record:
    axes = Axes(update, update * 1000, update * 16, 1_700_000_000.0 + update)
    if values is None:
        values = {"policy/kl": 0.01 * update, "episode/return_mean": 10.0 * update}
    return Record(update, axes, values, histograms or {})
