"""What a view of a run consists of, as plain values: charts with their lines, panels, and incidents with their evidence.

Its position and speed are the progress, the remaining time, the shares of an update's time, and the age of the last record.
"""

from __future__ import annotations

import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any, Final, Literal, NamedTuple

from esper_telemetry.alarms.diagnosis import IncidentReport
from esper_telemetry.core.facts import Facts
from esper_telemetry.core.messages import end_text
from esper_telemetry.core.record import Alarm, AlarmEvent, AlarmLevel, Axes, MetricInfo, RunInfo
from esper_telemetry.sinks.layout import flattened
from esper_telemetry.views.series import HealthyRange, Judgement, Series, judge

MAX_LINES: Final = 8
"""Lines of a chart: heads, groups or layers; the others are left to the journal."""


class LineView(NamedTuple):
    """One key in a chart.

    Attributes:
        key: of the metric.
        label: short name: the head, group or layer, else the metric's name.
        series: the values.
        value: the latest one; None without any.
        judgement: state of the latest value with respect to the metric's bounds.
        healthy: the metric's healthy range; None if it is not given in plain numbers.
        since: update from which on the values shown are outside of the range up to the end; None if the latest is inside.
    """

    key: str
    label: str
    series: Series
    value: float | None
    judgement: Judgement
    healthy: HealthyRange | None
    since: int | None


@dataclass(frozen=True, slots=True)
class ChartView:
    """Keys that share an axis.

    Attributes:
        title: heading.
        unit: of the values.
        lines: the keys, the most important one first.
        healthy: range of the first line, which the chart shows as a band.
        info: description of the first line.
        log: True for a logarithmic axis, as declared; all values are positive then.
        stacked: True for parts of a whole.
        hidden: number of keys beyond `MAX_LINES` that are left out.
    """

    title: str
    unit: str
    lines: tuple[LineView, ...]
    healthy: HealthyRange | None
    info: MetricInfo | None
    log: bool = False
    stacked: bool = False
    hidden: int = 0

    @property
    def question(self) -> str:
        """The question that the first metric answers."""
        return self.info.question if self.info else ""


@dataclass(frozen=True, slots=True)
class PanelView:
    """Charts that answer one question."""

    name: str
    question: str
    charts: tuple[ChartView, ...]


class EvidenceRow(NamedTuple):
    """One value that shows an alarm: the key, the metric's name, the value, the run's usual range, the healthy range, its state."""

    key: str
    name: str
    value: str
    usual: str
    healthy: str
    judgement: Judgement


@dataclass(frozen=True, slots=True)
class IncidentView:
    """One incident.

    Attributes:
        number: from 1.
        cause: type of alarm that explains it.
        text: what happened, in sentences.
        advice: what to try; empty if nothing is known.
        level: the highest of its alarms.
        since: update in which its cause began.
        until: update in which its last alarm was over; None if one lasts.
        ends: types of its alarms, with the update in which each was over; None for alarms that last.
        evidence: rows of the cause's evidence, without its lists.
        lists: lists of minibatches, layers or the like in the cause's evidence, by name.
        keys: of metrics to look at: the alarm's metric, its evidence, and the metrics of the alarms that came with it.
        report: its alarms.
    """

    number: int
    cause: str
    text: str
    advice: str
    level: AlarmLevel
    since: int
    until: int | None
    ends: Mapping[str, int | None]
    evidence: tuple[EvidenceRow, ...]
    lists: Mapping[str, Sequence[Mapping[str, Any]]]
    keys: tuple[str, ...]
    report: IncidentReport = field(repr=False)

    @property
    def state(self) -> str:
        """First update, and the update in which it ended."""
        return f"since update {self.since:,}, {end_text(self.until)}"


def incident_view(report: IncidentReport, info: RunInfo, measured: Container[str]) -> IncidentView:
    """Return an incident with its sentence, advice and evidence; `measured` are the keys of the run that have had a value."""
    main, ends = report.main, report.ends()
    text, _, advice = " ".join(main.text.split()).partition(" Try: ")
    lasting = any(end is None for end in ends.values())
    values = main.evidence.get("values", {})
    others = [alarm.key for alarm in report.alarms if alarm.event is AlarmEvent.RAISE]
    lists = {
        name: data
        for name, data in main.evidence.items()
        if isinstance(data, list) and data and all(isinstance(item, Mapping) for item in data)
    }
    keys = dict.fromkeys(key for key in (main.key, *values, *others) if key in measured)
    return IncidentView(
        number=report.number,
        cause=report.cause or main.type,
        text=text or f"{main.type}: {main.key} is {main.value}",
        advice=advice,
        level=AlarmLevel.of(max(alarm.severity for alarm in report.alarms)),
        since=report.since,
        until=None if lasting else max(end for end in ends.values() if end is not None),
        ends=ends,
        evidence=tuple(_evidence(main, info, lists)),
        lists=lists,
        keys=tuple(keys),
        report=report,
    )


def _evidence(alarm: Alarm, run: RunInfo, lists: Container[str]) -> list[EvidenceRow]:
    usual = alarm.evidence.get("usual", {})
    values = dict(alarm.evidence.get("values", {}))
    if alarm.value is not None:
        values = {alarm.key: alarm.value, **values}
    rows = []
    for key, value in values.items():
        info = run.describe(key)
        ends = usual.get(key, ())
        rows.append(
            EvidenceRow(
                key,
                info.name if info else "",
                number_text(value),
                " to ".join(map(number_text, ends)),
                info.healthy if info else "",
                judge(info, value) if isinstance(value, int | float) else "",
            )
        )
    others = {
        name: data for name, data in alarm.evidence.items() if name not in ("values", "usual") and name not in lists
    }
    rows += [EvidenceRow(name, "", number_text(value), "", "", "") for name, value in flattened(others).items()]
    return rows


def number_text(value: object) -> str:
    """Return a number in up to four digits; other values as text."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def duration(seconds: float) -> str:
    """Return `12 s`, `3 m 20 s`, `2 h 05 m` or `3 d 4 h`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, days = minutes // 60, minutes // 1440
    if days:
        return f"{days} d {hours % 24} h"
    return f"{hours} h {minutes % 60:02} m" if hours else f"{minutes} m {rest:02} s" if minutes else f"{rest} s"


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
