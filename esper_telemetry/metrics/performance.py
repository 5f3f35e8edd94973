"""Time of an update by phase, and cost, losses and delivery of telemetry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from esper_telemetry.core.group import MetricGroup
from esper_telemetry.core.metric import Array, Derived, Metric, MetricFamily, label, reports
from esper_telemetry.core.process_memory import MIB, MemoryUsage
from esper_telemetry.core.record import Level, SinkBacklog, SinkLag
from esper_telemetry.core.reduction import Max

BACKEND_BEHIND = (
    "The backend is slower than the run, or unreachable: send fewer keys (max_keys), or let `esper-telemetry replay` send the rest later."
)
"""Advice that several metrics share."""

PROGRESS_FAMILY = MetricFamily(
    "train",
    "Progress",
    "Progress and speed of training.",
    place=220,
    question="How fast is it?",
    axis="axis/env_step",
    first=("train/env_steps_per_second",),
)
TIME_FAMILY = MetricFamily(
    "perf",
    "Time",
    "Time of an update by phase, and the part of it that telemetry takes.",
    place=230,
    question="Where does the time go?",
    axis="axis/env_step",
    first=("perf/telemetry_frac",),
    reproducible=False,
)
TELEMETRY_FAMILY = MetricFamily(
    "telemetry",
    "Telemetry",
    "Health of the measuring itself.",
    place=240,
    question="How is telemetry itself?",
    first=("telemetry/errors", "telemetry/dropped"),
    reproducible=False,
)


@dataclass(frozen=True, slots=True)
class UpdatePerformance(MetricGroup, absent="the trainer does not time it"):
    """Speed of training and the time of its phases, in one update; the slowest rank's if there are several."""

    update: float | None = reports(
        Metric.quantity("train/update", 950, "updates", unit="index", low=1.0, level=Level.MINIMAL)
        .asks("How many policy updates have been made?")
        .absent("")
    )
    env_steps_per_second: float | None = reports(
        Metric.magnitude("train/env_steps_per_second", 951, "environment steps per second", unit="1/s", level=Level.MINIMAL)
        .asks("How fast is training, in environment steps per second of wall time?")
        .absent("the update took no measurable time")
    )
    environment_ms: Max | None = reports(
        Metric.milliseconds("perf/environment_ms", 952, "time in the environments").asks(
            "How long did stepping the environments take in this update?"
        )
    )
    inference_ms: Max | None = reports(
        Metric.milliseconds("perf/inference_ms", 953, "time choosing actions").asks(
            "How long did choosing actions take in this update, including storing the rollout?"
        )
    )
    update_ms: Max | None = reports(
        Metric.milliseconds("perf/update_ms", 954, "time learning").asks(
            "How long did the optimization take in this update: advantages, losses, gradients, steps?"
        )
    )
    rollout_cpu_ms: Max | None = reports(
        Metric.milliseconds("perf/rollout_cpu_ms", 955, "processor time of the rollout").asks(
            "How much processor time did the rollout take, for all threads of the process?"
        )
    )
    environment_cpu_ms: Max | None = reports(
        Metric.milliseconds("perf/environment_cpu_ms", 958, "processor time of the environments")
        .asks("How much processor time did the environments take, for all threads of the process? Every 16th step is timed.")
        .absent("the trainer does not time it, or the rollout is too short")
    )
    inference_cpu_ms: Max | None = reports(
        Metric.milliseconds("perf/inference_cpu_ms", 959, "processor time of choosing actions")
        .asks("How much processor time did choosing actions take, for all threads of the process? It is the rest of the rollout's.")
        .absent("the trainer does not time it, or the rollout is too short")
    )
    update_cpu_ms: Max | None = reports(
        Metric.milliseconds("perf/update_cpu_ms", 956, "processor time of learning").asks(
            "How much processor time did the optimization take, for all threads of the process?"
        )
    )
    cpu_frac: float | None = reports(
        Metric.magnitude("perf/cpu_frac", 957, "busy processor cores", unit="cores").asks(
            "How many processor cores did training keep busy? Well below 1 it waits: for a device, a disk, other programs."
        )
    )


@dataclass(frozen=True, slots=True)
class SamplingPeriod(MetricGroup):
    """Number of updates between two sampled ones."""

    replicated: ClassVar[bool] = True
    sample_every: float | None = reports(
        Metric.quantity("telemetry/sample_every", 975, "updates between two sampled ones", unit="updates", low=1.0)
        .asks("How many updates are between two measurements of the costly metrics? Telemetry raises it to stay within its budget.")
        .absent("at the level minimal")
    )


@dataclass(frozen=True, slots=True)
class TelemetryHealth(Derived):
    """Cost and losses of telemetry."""

    telemetry_ms: float | None = reports(
        Metric.milliseconds("perf/telemetry_ms", 960, "time in telemetry", level=Level.MINIMAL).asks(
            "How long did telemetry hold up the training thread in this update?"
        )
    )
    telemetry_cpu_ms: float | None = reports(
        Metric.milliseconds("perf/telemetry_cpu_ms", 963, "processor time of telemetry", level=Level.MINIMAL)
        .asks(
            "How much processor time did telemetry take on the training thread in this update? If it is less than the wall time, it waited."
        )
        .absent("it was not measured")
    )
    telemetry_frac: float | None = reports(
        Metric.fraction("perf/telemetry_frac", 961, "telemetry's share of the time", level=Level.MINIMAL)
        .asks("What share of the wall time did telemetry take on the training thread?")
        .bounds(healthy="< 0.02", warn="> 0.1", source="budget of this project")
        .absent("no time has passed since the last record")
    )
    d2h_copies: float | None = reports(
        Metric.count("perf/d2h_copies", 962, "copies from the device", level=Level.MINIMAL)
        .asks("How many copies from the device to the host did telemetry make in this update?")
        .bounds(
            healthy="at most 50: one for each column of an update; 0 if training is on the CPU", source="training waits for none of them"
        )
    )
    level: float | None = reports(
        Metric.quantity("telemetry/level", 970, "level of measurement", unit="level", low=0.0, high=3.0, level=Level.MINIMAL).asks(
            "How much is measured? 0 off, 1 minimal, 2 normal, 3 debug."
        )
    )
    undefined: float | None = reports(
        Metric.count("telemetry/undefined", 971, "metrics without a value", level=Level.MINIMAL).asks(
            "How many declared metrics were undefined in this update?"
        )
    )
    queue_depth: float | None = reports(
        Metric.count("telemetry/queue_depth", 972, "records still to be delivered", level=Level.MINIMAL)
        .asks("How many records has the slowest backend not taken yet?")
        .bounds(healthy="a few", warn="growing: a backend is slow or unreachable")
    )
    dropped: float | None = reports(
        Metric.count("telemetry/dropped", 973, "records lost on the way to a backend", level=Level.MINIMAL)
        .asks("How many records were permanently lost on the way to a backend? The journal has them all.")
        .bounds(healthy="0", warn="> 0")
    )
    errors: float | None = reports(
        Metric.count("telemetry/errors", 974, "failures of backends", level=Level.MINIMAL)
        .asks("How many times did a backend fail so far?")
        .bounds(healthy="0", warn="> 0: see the warning in the console")
    )
    metric_errors: float | None = reports(
        Metric.count("telemetry/metric_errors", 976, "metrics that could not be measured", level=Level.MINIMAL, when_positive=True)
        .asks("How many metrics could not be measured in this update, because of a bug?")
        .bounds(healthy="absent", warn="> 0: the warning in the console names them")
        .absent("none")
        .advises("A bug of this package: please report the warning in the console, which names the metric function.")
    )
    unmeasured: float | None = reports(
        Metric.count("telemetry/unmeasured", 986, "updates that were not measured", level=Level.MINIMAL, when_positive=True)
        .asks("Was this update not measured, because the worker was too far behind, or because a script's update was only counted?")
        .bounds(healthy="absent, or in the updates of a script that were only counted")
        .absent("the update was measured")
    )
    minibatch_stride: float | None = reports(
        Metric.count("telemetry/minibatch_stride", 987, "minibatches for each one that was measured", when_positive=True)
        .asks(
            "How many minibatches are there per measured one, because the update has too many rows for one core? Sums, counts and "
            "extremes over minibatches include only the measured ones."
        )
        .absent("every minibatch was measured")
    )


MEMORY_SOURCE = "when memory runs out, a process is killed, or an allocation fails"


@dataclass(frozen=True, slots=True)
class ProcessMemory(Derived, absent="training is on the CPU"):
    """Memory of the training process, on rank 0. It is sampled at most once per second, in the process that makes the records."""

    process: float | None = reports(
        Metric.magnitude("perf/memory/process_mib", 981, "memory of the process", unit="MiB", level=Level.MINIMAL)
        .asks("How much resident memory does the training process have? A steady rise is a leak.")
        .absent("the system lacks /proc")
    )
    children: float | None = reports(
        Metric.magnitude("perf/memory/children_mib", 982, "memory of child processes", unit="MiB")
        .asks("How much memory do the child processes take: environments, data loaders, telemetry's worker and sinks?")
        .absent("the system does not list the children of a process")
    )
    process_frac: float | None = reports(
        Metric.magnitude("perf/memory/process_frac", 983, "share of the memory", unit="fraction")
        .asks("What share of the memory of the machine or its control group do training and its children take?")
        .bounds(healthy="< 0.85", warn="> 0.85", critical="> 0.95", source=MEMORY_SOURCE)
        .absent("neither a limit nor the machine's memory is known")
        .advises("Use fewer or smaller environments, or shorter rollouts; if it rises all the time, look for objects that are kept alive.")
    )
    device: float | None = reports(
        Metric.magnitude("perf/memory/device_mib", 984, "memory on devices", unit="MiB").asks(
            "How much memory has the process reserved on its devices?"
        )
    )
    device_frac: float | None = reports(
        Metric.fraction("perf/memory/device_frac", 985, "share of a device's memory")
        .asks("What share of the fullest device's memory is taken, by any process?")
        .bounds(healthy="< 0.85", warn="> 0.85", critical="> 0.95", source=MEMORY_SOURCE)
        .advises("Use smaller minibatches or rollouts, or a device that other programs do not use.")
    )


@dataclass(frozen=True, slots=True)
class SinkHealth(Derived):
    """State of the delivery to each backend."""

    sink: tuple[str, ...] = label()
    lag_records: Array | None = reports(
        Metric.count("telemetry/{sink}/lag_records", 977, "records still to be delivered to a backend")
        .asks("How many records has this backend not taken yet?")
        .bounds(healthy="a few", warn="growing: the backend is slow or unreachable")
        .advises(BACKEND_BEHIND)
    )
    lag_seconds: Array | None = reports(
        Metric.magnitude("telemetry/{sink}/lag_seconds", 978, "age of what a backend has", unit="s")
        .asks("How old is the last record that this backend has taken, if others are waiting?")
        .bounds(healthy="a few", warn="growing: the backend is slow or unreachable")
        .advises(BACKEND_BEHIND)
    )
    errors: Array | None = reports(
        Metric.count("telemetry/{sink}/errors", 980, "failures of a backend", when_positive=True)
        .asks("How many times has this backend failed so far?")
        .bounds(healthy="absent", warn="> 0: status.json says what was wrong")
        .absent("none")
        .advises("`status.json` in the run directory has the backend's answer; `esper-telemetry doctor` lists what the backend lacks.")
    )


def update_performance(
    update: int, *, env_steps: int, elapsed: float, seconds: Mapping[str, float], cpu_seconds: Mapping[str, float] | None = None
) -> UpdatePerformance:
    """Return speed and phase times of one update.

    Args:
        update: its index, from 1.
        env_steps: environment steps collected for it, over all environments.
        elapsed: wall time of the whole update in seconds, rollout included.
        seconds: wall time by phase, such as `environment`, `inference`, `update`; other phases are ignored.
        cpu_seconds: processor time by phase: `rollout`, its parts `environment` and `inference`, `update`.
    """
    processor = cpu_seconds or {}
    busy = [1000.0 * processor[name] for name in ("rollout", "update") if name in processor]
    phases = {f"{name}_ms": seconds.get(name) for name in ("environment", "inference", "update")}
    phases |= {f"{name}_cpu_ms": processor.get(name) for name in ("rollout", "environment", "inference", "update")}
    return UpdatePerformance(
        update=float(update),
        env_steps_per_second=env_steps / elapsed if elapsed > 0 else None,
        cpu_frac=sum(busy) / (1000.0 * elapsed) if busy and elapsed > 0 else None,
        **{name: Max(1000.0 * phase) for name, phase in phases.items() if phase is not None},
    )


def telemetry_health(
    *,
    seconds: float,
    elapsed: float,
    undefined: int,
    copies: int,
    level: Level,
    stats: SinkBacklog,
    metric_errors: int = 0,
    unmeasured: bool = False,
    minibatch_stride: int = 1,
    cpu_seconds: float | None = None,
    memory: MemoryUsage | None = None,
) -> dict[str, float]:
    """Return the values of telemetry's own health, and of the memory of training, by key.

    Args:
        seconds: time that telemetry took on the training thread since the last record.
        elapsed: wall time since the last record.
        undefined: number of declared metrics without a value.
        copies: number of vectors that were copied from the device for this record.
        level: level of this record.
        stats: how far the sinks are behind, and their errors.
        metric_errors: metric functions that raised.
        unmeasured: the update was not measured: the worker was too far behind, or a script's update was only counted.
        minibatch_stride: one in this many minibatches was measured.
        cpu_seconds: processor time of telemetry on the training thread since the last record.
        memory: memory of the training process.
    """
    health = TelemetryHealth(
        telemetry_ms=1000.0 * seconds,
        telemetry_cpu_ms=None if cpu_seconds is None else 1000.0 * cpu_seconds,
        telemetry_frac=min(seconds / elapsed, 1.0) if elapsed > 0 else None,
        d2h_copies=float(copies),
        level=float(level),
        undefined=float(undefined),
        queue_depth=float(stats.queue_depth),
        dropped=0.0,
        errors=float(stats.errors),
        metric_errors=float(metric_errors),
        unmeasured=float(unmeasured),
        minibatch_stride=float(minibatch_stride) if minibatch_stride > 1 else 0.0,
    )
    return {**health.values(level), **sink_health(stats.sinks).values(level), **process_memory(memory or MemoryUsage()).values(level)}


def process_memory(usage: MemoryUsage) -> ProcessMemory:
    """Return a sample of the memory as metrics."""

    def mebibytes(count: int | None) -> float | None:
        return None if count is None else count / MIB

    return ProcessMemory(
        process=mebibytes(usage.process),
        children=mebibytes(usage.children),
        process_frac=(usage.process + (usage.children or 0)) / usage.limit if usage.process and usage.limit else None,
        device=mebibytes(usage.device),
        device_frac=usage.device_frac,
    )


def sink_health(lags: Sequence[SinkLag]) -> SinkHealth:
    """Return the state of each delivery; empty without any."""
    if not lags:
        return SinkHealth(())
    records, seconds, errors = (np.array([lag[place] for lag in lags], dtype=np.float64) for place in (1, 2, 3))
    return SinkHealth(tuple(lag.sink for lag in lags), lag_records=records, lag_seconds=seconds, errors=errors)
