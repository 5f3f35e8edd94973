"""Position and speed of a run: progress, remaining time, shares of an update's time, age of the last record."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Final, Literal

from esper_telemetry.core.facts import Facts
from esper_telemetry.core.record import Axes, RunInfo

RATE_UPDATES: Final = 30
"""Latest updates from which speed and remaining time are estimated."""
OK_UPDATES, WARN_UPDATES = 2.0, 10.0
"""Update times since the last record up to which a run is not late, or only late."""
MIN_OK_SECONDS, MIN_WARN_SECONDS = 5.0, 60.0
START_SECONDS: Final = 60.0
"""Time of an update that is assumed before two records show it."""

TIME_PARTS: Final = {
    "environment": "perf/environment_ms",
    "inference": "perf/inference_ms",
    "update": "perf/update_ms",
}
Staleness = Literal["ok", "warn", "bad", "ended"]


@dataclass(frozen=True, slots=True)
class RunProgress:
    """Position and speed of a run; None if unknown.

    Attributes:
        update, env_step: of the last record.
        total_steps: environment steps that were asked for.
        fraction: share that is done.
        eta_seconds: time that remains at the present speed; None for a run that has ended, or has stopped.
        steps_per_second: environment steps per second of wall time, the median of the latest updates.
        update_seconds: time of an update, the median of the latest ones.
        time_split: shares of the last update's time by part: environment, inference, update and other.
        age_seconds: since the last record, or since the start.
        staleness: `ok` up to two update times, `warn` up to ten, else `bad`; `ended` for a run that has ended.
    """

    update: int
    env_step: int
    total_steps: int | None
    fraction: float | None
    eta_seconds: float | None
    steps_per_second: float | None
    update_seconds: float | None
    time_split: Mapping[str, float]
    age_seconds: float | None
    staleness: Staleness


def run_progress(
    info: RunInfo,
    axes: Axes | None,
    clock: Sequence[tuple[int, float]],
    last: Mapping[str, float],
    *,
    ended: bool,
    now: float | None = None,
) -> RunProgress:
    """Return position and speed of a run.

    Args:
        info: description of the run.
        axes: of the last record; None before the first.
        clock: environment steps and wall time of the latest records, `RATE_UPDATES` and one more at most.
        last: the latest value of each key.
        ended: no record will follow.
        now: seconds since the epoch, by default the present.
    """
    total = max(0, Facts.of(info.facts).total_steps or 0) or None
    update, steps, since = (axes.update, axes.env_step, axes.wall_time) if axes else (0, 0, info.started)
    # medians: an interruption does not count
    spans = [(later[0] - earlier[0], later[1] - earlier[1]) for earlier, later in pairwise(clock)]
    typical = median(span for _, span in spans) if spans else 0.0
    seconds, speed = None, None
    if typical > 0:
        seconds, speed = typical, median(count / span for count, span in spans if span > 0)
    age = max(0.0, (time.time() if now is None else now) - since) if since > 0 else None
    own = seconds or START_SECONDS
    staleness: Staleness = "bad"
    if ended:
        staleness = "ended"
    elif age is None or age <= max(MIN_OK_SECONDS, OK_UPDATES * own):
        staleness = "ok"
    elif age <= max(MIN_WARN_SECONDS, WARN_UPDATES * own):
        staleness = "warn"
    return RunProgress(
        update=update,
        env_step=steps,
        total_steps=total,
        fraction=None if total is None else min(1.0, steps / total),
        eta_seconds=max(0.0, (total - steps) / speed) if total and speed and staleness in ("ok", "warn") else None,
        steps_per_second=speed,
        update_seconds=seconds,
        time_split=_time_split(last, seconds),
        age_seconds=age,
        staleness=staleness,
    )


def _time_split(last: Mapping[str, float], seconds: float | None) -> dict[str, float]:
    parts = {name: last[key] for name, key in TIME_PARTS.items() if last.get(key, -1.0) >= 0}
    if not parts:
        return {}
    whole = max(sum(parts.values()), 1000 * (seconds or 0.0)) or 1.0
    shares = {name: value / whole for name, value in parts.items()}
    return {**shares, "other": max(0.0, 1.0 - sum(shares.values()))}
