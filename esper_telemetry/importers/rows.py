"""From points to one row of our own keys per update.

What a backend holds of a run, whoever trained it.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from esper_telemetry.importers.trainers import RETURN, RETURN_100, VALUE_LOSS, Alias, Trainer


class LoggedPoint(NamedTuple):
    """A value and where it stands on the x-axis that it was logged against."""

    x: float
    value: float


class LoggedRow(NamedTuple):
    """A run as it was logged.

    Attributes:
        name: of the run.
        points: by tag, in the order in which they were written; values may be NaN.
        config: settings, as far as the backend knows them.
    """

    name: str
    points: Mapping[str, Sequence[LoggedPoint]]
    config: Mapping[str, Any] = {}


RECENT = 100
"""Episodes over which `episode/return_mean_100` is the mean."""

MAY_BE_UNDEFINED = {"value/explained_variance"}
"""Keys that trainers log as NaN where there is nothing to say."""


class Row(NamedTuple):
    """An update: where it stands, its values, and how many logged numbers were not finite."""

    x: float
    values: dict[str, float]
    nonfinite: int


class Read(NamedTuple):
    """Everything that was understood of a run.

    Attributes:
        rows: in order.
        used: by key, which tag it is, with what is to be known of it.
        tags: all that were read.
    """

    rows: list[Row]
    used: dict[str, str]
    tags: frozenset[str]


def read_rows(logged: LoggedRow, trainer: Trainer) -> Read:
    """The updates of a run. What every episode logs belongs to the update that comes next; what is logged late, to the one before."""
    found = {alias: _matching(logged.points, alias) for alias in trainer.aliases}
    found = {alias: tags for alias, tags in found.items() if tags}
    places = _places(logged, found)
    table: dict[float, dict[str, float]] = {x: {} for x in places}
    bad: dict[float, int] = dict.fromkeys(places, 0)
    for alias, tags in found.items():
        if not alias.episodes:
            for x, value in _placed(alias, [logged.points[tag] for tag in tags], places):
                _enter(table[x], bad, x, alias.key, value * alias.factor)
    for alias, tags in found.items():
        if alias.episodes:
            _enter_episodes(table, places, alias, [point for tag in tags for point in logged.points[tag]])
    used = {alias.key: _described(alias, tags) for alias, tags in found.items()}
    rows = [Row(x, table[x], bad[x]) for x in places if table[x] or bad[x]]
    return Read(rows, used, frozenset(tag for tags in found.values() for tag in tags))


def _matching(tags: Iterable[str], alias: Alias) -> list[str]:
    pattern = re.compile(alias.tag)
    return sorted(tag for tag in tags if pattern.fullmatch(tag))


def _described(alias: Alias, tags: Sequence[str]) -> str:
    scaled = "" if alias.factor == 1 else f" times {alias.factor:g}"
    several = f" and {len(tags) - 1} more" if len(tags) > 1 else ""
    return f"{tags[0]}{several}{scaled}" + (f" ({alias.note})" if alias.note else "")


def _places(logged: LoggedRow, found: Mapping[Alias, Sequence[str]]) -> list[float]:
    """Where updates stand: where losses, or whatever is logged once per update, were logged."""
    once = [tag for alias, tags in found.items() if not alias.episodes for tag in tags]
    main = max(once, key=lambda tag: (_is_main(found, tag), len(logged.points[tag])), default=None)
    if main is None:
        return []
    late = any(alias.late for alias in found)
    tags = once if late else [main]
    return sorted({point.x for tag in tags for point in logged.points[tag] if math.isfinite(point.x)})


def _is_main(found: Mapping[Alias, Sequence[str]], tag: str) -> bool:
    return any(tag in tags and alias.key in (VALUE_LOSS, "loss/policy") for alias, tags in found.items())


def _placed(
    alias: Alias, series: Sequence[Sequence[LoggedPoint]], places: Sequence[float]
) -> Iterable[tuple[float, float]]:
    """Values at the places of updates. Those on another axis, with as many points, are taken in order; several tags are averaged."""
    sums: dict[float, list[float]] = {}
    known = set(places)
    for points in series:
        own = dict(points) if {x for x, _ in points} & known else _in_order(points, places)
        for x, value in own.items():
            if x in known:
                sums.setdefault(x, []).append(value)
    if not alias.late:
        return [(x, sum(values) / len(values)) for x, values in sums.items()]
    before = dict(zip(places[1:], places, strict=False))
    return [(before[x], sum(values) / len(values)) for x, values in sums.items() if x in before]


def _in_order(points: Sequence[LoggedPoint], places: Sequence[float]) -> dict[float, float]:
    return dict(zip(places, (point.value for point in points), strict=False)) if len(points) == len(places) else {}


def _enter(values: dict[str, float], bad: dict[float, int], x: float, key: str, value: float) -> None:
    if math.isfinite(value):
        values[key] = value
    elif key not in MAY_BE_UNDEFINED:
        bad[x] += 1


def _enter_episodes(
    table: dict[float, dict[str, float]], places: Sequence[float], alias: Alias, points: Sequence[LoggedPoint]
) -> None:
    """Means over the episodes of each update, their number, and the mean of the last hundred."""
    by_place: dict[float, list[float]] = {}
    for point in sorted(points):
        place = bisect_left(places, point.x)
        if place < len(places) and math.isfinite(point.value):
            by_place.setdefault(places[place], []).append(point.value)
    recent: deque[float] = deque(maxlen=RECENT)
    for x in places:
        episodes = by_place.get(x, [])
        recent.extend(episodes)
        if episodes:
            table[x][alias.key] = sum(episodes) / len(episodes)
        if alias.key == RETURN:
            table[x]["episode/count"] = float(len(episodes))
            if recent:
                table[x][RETURN_100] = sum(recent) / len(recent)
