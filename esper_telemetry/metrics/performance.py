"""Where the time of an update goes, and what telemetry itself costs and keeps from being seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from esper_telemetry.core.derived import Array, Derived
from esper_telemetry.core.group import MetricGroup
from esper_telemetry.core.metric import Metric, label, reports
from esper_telemetry.core.record import Level, SinkLag
from esper_telemetry.core.reduction import Max


@dataclass(frozen=True, slots=True)
class UpdatePerformance(MetricGroup):
    """Speed of training and the time of its phases, in one update; of several ranks the slowest one's."""

    update: float | None = reports(
        Metric(
            key="train/update",
            number=950,
            unit="index",
            question="How many policy updates have there been?",
            low=1.0,
            level=Level.MINIMAL,
        )
    )
    env_steps_per_second: float | None = reports(
        Metric(
            key="train/env_steps_per_second",
            number=951,
            unit="1/s",
            question="How fast is training, in environment steps per second of wall time?",
            low=0.0,
            level=Level.MINIMAL,
            undefined="the update took no measurable time",
        )
    )
    environment_ms: Max | None = reports(
        Metric(
            key="perf/environment_ms",
            number=952,
            unit="ms",
            question="How long did stepping the environments take in this update?",
            low=0.0,
            undefined="the trainer does not time it",
        )
    )
    inference_ms: Max | None = reports(
        Metric(
            key="perf/inference_ms",
            number=953,
            unit="ms",
            question="How long did choosing actions take in this update, storing the rollout included?",
            low=0.0,
            undefined="the trainer does not time it",
        )
    )
    update_ms: Max | None = reports(
        Metric(
            key="perf/update_ms",
            number=954,
            unit="ms",
            question="How long did the optimization take in this update: advantages, losses, gradients, steps?",
            low=0.0,
            undefined="the trainer does not time it",
        )
    )
    rollout_cpu_ms: Max | None = reports(
        Metric(
            key="perf/rollout_cpu_ms",
            number=955,
            unit="ms",
            question="How much processor time did the rollout take, all threads of the process together?",
            low=0.0,
            undefined="the trainer does not time it",
        )
    )
    environment_cpu_ms: Max | None = reports(
        Metric(
            key="perf/environment_cpu_ms",
            number=958,
            unit="ms",
            question="How much processor time did the environments take, all threads of the process together? Every 16th step is timed.",
            low=0.0,
            undefined="the trainer does not time it, or the rollout is too short",
        )
    )
    inference_cpu_ms: Max | None = reports(
        Metric(
            key="perf/inference_cpu_ms",
            number=959,
            unit="ms",
            question="How much processor time did choosing actions take, all threads of the process together? What the environments left.",
            low=0.0,
            undefined="the trainer does not time it, or the rollout is too short",
        )
    )
    update_cpu_ms: Max | None = reports(
        Metric(
            key="perf/update_cpu_ms",
            number=956,
            unit="ms",
            question="How much processor time did the optimization take, all threads of the process together?",
            low=0.0,
            undefined="the trainer does not time it",
        )
    )
    cpu_frac: float | None = reports(
        Metric(
            key="perf/cpu_frac",
            number=957,
            unit="cores",
            question="How many processor cores did training keep busy? Well below 1 it waits: for a device, a disk, other programs.",
            low=0.0,
            undefined="the trainer does not time it",
        )
    )


@dataclass(frozen=True, slots=True)
class SamplingPeriod(MetricGroup):
    """How often an update is looked at closely."""

    replicated: ClassVar[bool] = True
    sample_every: float | None = reports(
        Metric(
            key="telemetry/sample_every",
            number=975,
            unit="updates",
            question="Every how many updates are the costly metrics measured? Telemetry raises it to stay within its budget.",
            low=1.0,
            undefined="at the level minimal",
        )
    )


@dataclass(frozen=True, slots=True)
class TelemetryHealth(Derived):
    """What telemetry costs and whether anything that it measures gets lost."""

    telemetry_ms: float | None = reports(
        Metric(
            key="perf/telemetry_ms",
            number=960,
            unit="ms",
            question="How long did telemetry hold up the training thread in this update?",
            low=0.0,
            level=Level.MINIMAL,
        )
    )
    telemetry_cpu_ms: float | None = reports(
        Metric(
            key="perf/telemetry_cpu_ms",
            number=963,
            unit="ms",
            question="How much processor time did telemetry take on the training thread in this update? Less than its time: it waited.",
            low=0.0,
            level=Level.MINIMAL,
            undefined="nobody took it",
        )
    )
    telemetry_frac: float | None = reports(
        Metric(
            key="perf/telemetry_frac",
            number=961,
            unit="fraction",
            question="What share of the wall time did telemetry take on the training thread?",
            low=0.0,
            high=1.0,
            level=Level.MINIMAL,
            healthy="< 0.02",
            warn="> 0.1",
            source="budget of this project",
            undefined="no time has passed since the last record",
        )
    )
    d2h_copies: float | None = reports(
        Metric(
            key="perf/d2h_copies",
            number=962,
            unit="count",
            question="How many copies from the device to the host did telemetry make in this update?",
            low=0.0,
            level=Level.MINIMAL,
            healthy="1; 0 where training is on the CPU",
            warn="> 1",
            source="one packed vector per record",
        )
    )
    level: float | None = reports(
        Metric(
            key="telemetry/level",
            number=970,
            unit="level",
            question="How much is measured? 0 off, 1 minimal, 2 normal, 3 debug.",
            low=0.0,
            high=3.0,
            level=Level.MINIMAL,
        )
    )
    undefined: float | None = reports(
        Metric(
            key="telemetry/undefined",
            number=971,
            unit="count",
            question="How many declared metrics had no value in this update?",
            low=0.0,
            level=Level.MINIMAL,
        )
    )
    queue_depth: float | None = reports(
        Metric(
            key="telemetry/queue_depth",
            number=972,
            unit="count",
            question="How many records has the slowest backend still to take?",
            low=0.0,
            level=Level.MINIMAL,
            healthy="a few",
            warn="growing: a backend is slow or unreachable",
        )
    )
    dropped: float | None = reports(
        Metric(
            key="telemetry/dropped",
            number=973,
            unit="count",
            question="How many records were lost for good on the way to a backend? The journal has them all.",
            low=0.0,
            level=Level.MINIMAL,
            healthy="0",
            warn="> 0",
        )
    )
    errors: float | None = reports(
        Metric(
            key="telemetry/errors",
            number=974,
            unit="count",
            question="How many times did a backend fail so far?",
            low=0.0,
            level=Level.MINIMAL,
            healthy="0",
            warn="> 0: see the warning in the console",
        )
    )
    metric_errors: float | None = reports(
        Metric(
            key="telemetry/metric_errors",
            number=976,
            unit="count",
            question="How many metrics could not be measured in this update, because of a bug?",
            low=0.0,
            level=Level.MINIMAL,
            healthy="absent",
            warn="> 0: the warning in the console names them",
            undefined="none",
            when_positive=True,
        )
    )


@dataclass(frozen=True, slots=True)
class SinkHealth(Derived):
    """How the delivery to each backend goes."""

    sink: tuple[str, ...] = label()
    lag_records: Array | None = reports(
        Metric(
            key="telemetry/{sink}/lag_records",
            number=977,
            unit="count",
            question="How many records has this backend still to take?",
            low=0.0,
            healthy="a few",
            warn="growing: the backend is slow or unreachable",
        )
    )
    lag_seconds: Array | None = reports(
        Metric(
            key="telemetry/{sink}/lag_seconds",
            number=978,
            unit="s",
            question="How old is the last record that this backend has taken, while there are others that it has not?",
            low=0.0,
            healthy="a few",
            warn="growing: the backend is slow or unreachable",
        )
    )
    errors: Array | None = reports(
        Metric(
            key="telemetry/{sink}/errors",
            number=980,
            unit="count",
            question="How many times has this backend failed so far?",
            low=0.0,
            healthy="absent",
            warn="> 0: status.json says what was wrong",
            undefined="none",
            when_positive=True,
        )
    )


class DeliveryStats(Protocol):
    """What telemetry's health needs to know of the sinks."""

    @property
    def queue_depth(self) -> int:
        """Records that the slowest sink has still to take."""

    @property
    def errors(self) -> int:
        """Exceptions of all sinks so far."""

    @property
    def sinks(self) -> Sequence[SinkLag]:
        """Each delivery."""


def update_performance(
    update: int,
    *,
    env_steps: int,
    elapsed: float,
    seconds: Mapping[str, float],
    cpu_seconds: Mapping[str, float] | None = None,
) -> UpdatePerformance:
    """Speed and phase times of one update.

    Args:
        update: its index, from 1.
        env_steps: environment steps collected for it, over all environments.
        elapsed: wall time of the whole update in seconds, rollout included.
        seconds: wall time by phase, such as `environment`, `inference`, `update`; other phases are passed over.
        cpu_seconds: processor time by phase: `rollout`, its parts `environment` and `inference`, `update`.
    """
    processor = {name: 1000.0 * value for name, value in (cpu_seconds or {}).items()}
    phases = {name: 1000.0 * value for name, value in seconds.items()}
    return UpdatePerformance(
        update=float(update),
        env_steps_per_second=env_steps / elapsed if elapsed > 0 else None,
        environment_ms=_slowest(phases.get("environment")),
        inference_ms=_slowest(phases.get("inference")),
        update_ms=_slowest(phases.get("update")),
        rollout_cpu_ms=_slowest(processor.get("rollout")),
        environment_cpu_ms=_slowest(processor.get("environment")),
        inference_cpu_ms=_slowest(processor.get("inference")),
        update_cpu_ms=_slowest(processor.get("update")),
        cpu_frac=_cores(processor, elapsed),
    )


def _cores(milliseconds: Mapping[str, float], elapsed: float) -> float | None:
    """Cores that rollout and update kept busy, of processor times by phase."""
    phases = [milliseconds[name] for name in ("rollout", "update") if name in milliseconds]
    return sum(phases) / (1000.0 * elapsed) if phases and elapsed > 0 else None


def _slowest(milliseconds: float | None) -> Max | None:
    return None if milliseconds is None else Max(milliseconds)


def telemetry_health(
    *,
    seconds: float,
    elapsed: float,
    undefined: int,
    copies: int,
    level: Level,
    stats: DeliveryStats,
    dropped: int = 0,
    metric_errors: int = 0,
    cpu_seconds: float | None = None,
) -> dict[str, float]:
    """Telemetry's numbers about itself, by key.

    Args:
        seconds: what telemetry took on the training thread since the last record.
        elapsed: wall time since the last record.
        undefined: declared metrics without a value.
        copies: vectors of numbers that were copied from the device for this record.
        level: at which this record was measured.
        stats: how far the sinks are behind, and their errors.
        dropped: records that no sink will get any more.
        metric_errors: metric functions that raised.
        cpu_seconds: processor time of telemetry on the training thread since the last record.
    """
    return TelemetryHealth(
        telemetry_ms=1000.0 * seconds,
        telemetry_cpu_ms=None if cpu_seconds is None else 1000.0 * cpu_seconds,
        telemetry_frac=min(seconds / elapsed, 1.0) if elapsed > 0 else None,
        d2h_copies=float(copies),
        level=float(level),
        undefined=float(undefined),
        queue_depth=float(stats.queue_depth),
        dropped=float(dropped),
        errors=float(stats.errors),
        metric_errors=float(metric_errors),
    ).values(level) | sink_health(stats.sinks).values(level)


def sink_health(lags: Sequence[SinkLag]) -> SinkHealth:
    """The numbers of each delivery; none where there is none."""
    if not lags:
        return SinkHealth(())
    records, seconds, errors = (np.array([lag[place] for lag in lags], dtype=np.float64) for place in (1, 2, 3))
    return SinkHealth(tuple(lag.sink for lag in lags), lag_records=records, lag_seconds=seconds, errors=errors)
