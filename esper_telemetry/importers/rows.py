"""Points that a trainer logged, arranged as one row of this package's keys per update."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from esper_telemetry.importers.trainers import RETURN, RETURN_100, VALUE_LOSS, Alias, Trainer

RECENT_EPISODES: Final = 100
"""Episodes over which `episode/return_mean_100` is the mean."""

MAY_BE_UNDEFINED: Final = {"value/explained_variance"}
"""Keys that trainers log as NaN where they are undefined."""


class LoggedPoint(NamedTuple):
    """A value and its position on the x-axis that it was logged against."""

    x: float
    value: float


class LoggedRun(NamedTuple):
    """A run as a backend holds it.

    Attributes:
        name: of the run.
        points: by tag, in the order in which they were written; values may be NaN.
        config: settings, as far as the backend has them.
    """

    name: str
    points: Mapping[str, Sequence[LoggedPoint]]
    config: Mapping[str, Any] = {}


class UpdateRow(NamedTuple):
    """An update: its position, its values, and the number of logged values that were not finite."""

    x: float
    values: dict[str, float]
    nonfinite: int


class UpdateTable(NamedTuple):
    """The updates of a run.

    Attributes:
        rows: in order.
        sources: by key, the tag it comes from, with notes.
        tags: all that were read.
    """

    rows: list[UpdateRow]
    sources: dict[str, str]
    tags: frozenset[str]


def parse_number(value: object) -> float | int | None:
    """Return the value, or its text, as a number; None where it is none, as empty cells and switches are."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int | float):
        return value
    try:
        return float(str(value))
    except ValueError:
        return None


def read_rows(logged: LoggedRun, trainer: Trainer) -> UpdateTable:
    """Return the updates of a run. Values of episodes belong to the next update; values logged late belong to the one before."""
    tags_by_alias: dict[Alias, list[str]] = {}
    for alias in trainer.aliases:
        pattern = re.compile(alias.tag)
        tags = sorted(tag for tag in logged.points if pattern.fullmatch(tag))
        if tags:
            tags_by_alias[alias] = tags
    positions = _positions(logged, tags_by_alias)
    table: dict[float, dict[str, float]] = {x: {} for x in positions}
    nonfinite: dict[float, int] = dict.fromkeys(positions, 0)
    for alias, tags in tags_by_alias.items():
        if alias.episodes:
            continue
        for x, value in _values_at(alias, [logged.points[tag] for tag in tags], positions):
            scaled = value * alias.factor
            if math.isfinite(scaled):
                table[x][alias.key] = scaled
            elif alias.key not in MAY_BE_UNDEFINED:
                nonfinite[x] += 1
    for alias, tags in tags_by_alias.items():
        if alias.episodes:
            _add_episodes(table, positions, alias, [point for tag in tags for point in logged.points[tag]])
    sources = {}
    for alias, tags in tags_by_alias.items():
        several = f" and {len(tags) - 1} more" if len(tags) > 1 else ""
        scaling = "" if alias.factor == 1 else f" times {alias.factor:g}"
        sources[alias.key] = f"{tags[0]}{several}{scaling}" + (f" ({alias.note})" if alias.note else "")
    rows = [UpdateRow(x, table[x], nonfinite[x]) for x in positions if table[x] or nonfinite[x]]
    return UpdateTable(rows, sources, frozenset(tag for tags in tags_by_alias.values() for tag in tags))


def _positions(logged: LoggedRun, tags_by_alias: Mapping[Alias, Sequence[str]]) -> list[float]:
    """Return the positions of updates: those at which losses, or other values of whole updates, were logged."""
    main_tags = {
        tag for alias, tags in tags_by_alias.items() if alias.key in (VALUE_LOSS, "loss/policy") for tag in tags
    }
    per_update = [tag for alias, tags in tags_by_alias.items() if not alias.episodes for tag in tags]
    if not per_update:
        return []
    main = max(per_update, key=lambda tag: (tag in main_tags, len(logged.points[tag])))
    is_late = any(alias.late for alias in tags_by_alias)
    tags = per_update if is_late else [main]
    return sorted({point.x for tag in tags for point in logged.points[tag] if math.isfinite(point.x)})


def _values_at(
    alias: Alias, histories: Sequence[Sequence[LoggedPoint]], positions: Sequence[float]
) -> Iterable[tuple[float, float]]:
    """Return values at the positions of updates, averaged over several tags; equally many points on another axis are taken in order."""
    by_position: dict[float, list[float]] = {}
    updates = set(positions)
    for points in histories:
        if {x for x, _ in points} & updates:
            own = dict(points)
        elif len(points) == len(positions):
            own = dict(zip(positions, (point.value for point in points), strict=True))
        else:
            own = {}
        for x, value in own.items():
            if x in updates:
                by_position.setdefault(x, []).append(value)
    if not alias.late:
        return [(x, sum(values) / len(values)) for x, values in by_position.items()]
    before = dict(zip(positions[1:], positions, strict=False))
    return [(before[x], sum(values) / len(values)) for x, values in by_position.items() if x in before]


def _add_episodes(
    table: dict[float, dict[str, float]], positions: Sequence[float], alias: Alias, points: Sequence[LoggedPoint]
) -> None:
    """Add, per update, the mean over its episodes; for returns also their number and the mean of the last hundred."""
    by_position: dict[float, list[float]] = {}
    for point in sorted(points):
        place = bisect_left(positions, point.x)
        if place < len(positions) and math.isfinite(point.value):
            by_position.setdefault(positions[place], []).append(point.value)
    recent: deque[float] = deque(maxlen=RECENT_EPISODES)
    for x in positions:
        episodes = by_position.get(x, [])
        recent.extend(episodes)
        if episodes:
            table[x][alias.key] = sum(episodes) / len(episodes)
        if alias.key == RETURN:
            table[x]["episode/count"] = float(len(episodes))
            if recent:
                table[x][RETURN_100] = sum(recent) / len(recent)
