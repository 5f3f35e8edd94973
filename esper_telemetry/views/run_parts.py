"""What a view of a run consists of, as plain values: charts with their lines, panels, and incidents with their evidence.

Its position and speed are the progress, the remaining time, the shares of an update's time, and the age of the last record. The values of
one key are a `Series`, in bounded memory.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter
from statistics import median
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from esper_telemetry.alarms.diagnosis import IncidentReport
from esper_telemetry.alarms.verdict.bounds import HealthyRange as HealthyRange
from esper_telemetry.alarms.verdict.bounds import Judgement as Judgement
from esper_telemetry.alarms.verdict.bounds import judge as judge
from esper_telemetry.core.facts import Facts
from esper_telemetry.core.messages import end_text
from esper_telemetry.core.metric import Array
from esper_telemetry.core.record import Alarm, AlarmEvent, AlarmLevel, Axes, MetricInfo, RunInfo
from esper_telemetry.sinks.layout import flattened

DEFAULT_POINTS: Final = 600
"""Points of a series: about one for each pixel of a narrow chart."""
MIN_POINTS: Final = 6
MAX_PENDING: Final = 32
MAX_DRAWN: Final = 1e150
"""Size of a value in a chart: the ends of an axis, and their distance, are finite."""
VALUE: Final = itemgetter(2)

Point = tuple[float, float, float]
"""Update, environment steps, value."""


class Series(NamedTuple):
    """Finite values of one key, in the order of updates.

    Attributes:
        updates: index of the update of each value.
        env_steps: environment steps at which its data was collected.
        values: as recorded.
    """

    updates: tuple[int, ...] = ()
    env_steps: tuple[int, ...] = ()
    values: tuple[float, ...] = ()


def drawable(value: float) -> float:
    """Return the value as a chart shows it: at most `MAX_DRAWN` in size."""
    return min(max(value, -MAX_DRAWN), MAX_DRAWN)


class SeriesBuffer:
    """Collects the values of one key, and keeps the smallest and the largest of each group of updates.

    Groups are equally long and grow with the run, so that memory is bounded and no extreme is lost. The latest value is always kept.

    Args:
        max_points: most values that `series` returns, at least `MIN_POINTS`; 0 for all of them.
    """

    __slots__ = ("_columns", "_count", "_first", "_group", "_last", "_max_groups", "_pending", "_room")

    def __init__(self, max_points: int = DEFAULT_POINTS) -> None:
        if max_points != 0 and max_points < MIN_POINTS:
            raise ValueError(f"max_points must be 0 or at least {MIN_POINTS}, got {max_points}")
        self._max_groups = (max_points - 2) // 4 * 2  # even, so that groups merge in pairs
        self._group, self._count = 1, 0
        # (update, step, value) of the smallest and of the largest value of each group
        self._columns = array("d")
        self._first = self._last = (0.0, 0.0, 0.0)
        # values that are not in a group yet, at most as many as the last group has room for: one by one takes three times as long
        self._pending: list[tuple[float, float, float]] = []
        self._room = 1

    def add(self, update: int, env_step: int, value: float) -> None:
        """Add a value; values that are not finite are ignored."""
        if math.isfinite(value):
            self._pending.append((update, env_step, value))
            if len(self._pending) >= self._room:
                self._settle()

    def extend(self, updates: npt.NDArray[np.int64], env_steps: npt.NDArray[np.int64], values: Array) -> None:
        """Add arrays of values; those that are not finite are ignored."""
        if self._pending:
            self._settle()
        finite = np.isfinite(values)
        rows, done = np.stack([updates[finite], env_steps[finite], values[finite]], axis=1), 0
        while done < len(rows):
            begun = self._count % self._group
            groups = 0 if begun else min((len(rows) - done) // self._group, self._max_groups - self._count // self._group)
            if groups <= 1:
                part = rows[done : done + self._group - begun]
                low, high, first, last = (tuple(part[place].tolist()) for place in (part[:, 2].argmin(), part[:, 2].argmax(), 0, -1))
                self._join(low, high, first, last, len(part))
                done += len(part)
                continue
            whole = rows[done : done + groups * self._group].reshape(groups, self._group, 3)
            each = np.arange(groups)
            lowest, highest = (whole[each, places] for places in (whole[:, :, 2].argmin(axis=1), whole[:, :, 2].argmax(axis=1)))
            self._first = self._first if self._count else tuple(whole[0, 0].tolist())
            self._last = tuple(whole[-1, -1].tolist())
            self._columns.frombytes(np.concatenate([lowest, highest], axis=1).tobytes())
            done += groups * self._group
            self._advance(groups * self._group)

    def _settle(self) -> None:
        """Put the pending values into the last group."""
        pending = self._pending
        self._join(min(pending, key=VALUE), max(pending, key=VALUE), pending[0], pending[-1], len(pending))
        pending.clear()

    def _join(self, low: Point, high: Point, first: Point, last: Point, count: int) -> None:
        """Put so many values into the last group, or a new one, of which these are the smallest, the largest, the first and the last."""
        columns = self._columns
        if not self._count:
            self._first = first
        self._last = last
        if self._count % self._group == 0:
            columns.extend(low + high)
        else:
            if low[2] < columns[-4]:
                columns[-6:-3] = array("d", low)
            if high[2] > columns[-1]:
                columns[-3:] = array("d", high)
        self._advance(count)

    def _advance(self, count: int) -> None:
        self._count += count
        if self._max_groups and self._count == self._group * self._max_groups:
            self._merge()
        self._room = min(MAX_PENDING, self._group - self._count % self._group)

    def _merge(self) -> None:
        """Merge each group with the next one; their number is even."""
        low, high, next_low, next_high = np.array(self._columns).reshape(-1, 4, 3).swapaxes(0, 1)
        lowest = np.where(next_low[:, 2:] < low[:, 2:], next_low, low)
        highest = np.where(next_high[:, 2:] > high[:, 2:], next_high, high)
        self._columns = array("d", np.concatenate([lowest, highest], axis=1).tobytes())
        self._group *= 2

    @property
    def series(self) -> Series:
        """The values that are kept, in order."""
        if self._pending:
            self._settle()
        columns = self._columns
        points = set(zip(columns[::3], columns[1::3], columns[2::3], strict=True))
        points |= {self._first, self._last} if self._count else set()
        ordered = sorted(points)
        return Series(
            tuple(int(point[0]) for point in ordered), tuple(int(point[1]) for point in ordered), tuple(point[2] for point in ordered)
        )


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
    others = {name: data for name, data in alarm.evidence.items() if name not in ("values", "usual") and name not in lists}
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

TIME_PARTS: Final = {"environment": "perf/environment_ms", "inference": "perf/inference_ms", "update": "perf/update_ms"}
Staleness = Literal["ok", "warn", "bad", "ended"]


@dataclass(frozen=True, slots=True)
class RunProgress:
    """Position and speed of a run; None if unknown.

    Attributes:
        update, env_step: of the last record.
        total_steps: environment steps that were asked for, or those so far if they are more: the last rollout may go beyond.
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
    total = total and max(total, steps)
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
        fraction=None if total is None else steps / total,
        eta_seconds=(total - steps) / speed if total and speed and staleness in ("ok", "warn") else None,
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
