"""Records made from what another trainer logged.

Logged points become one row of this package's keys per update; rows become records with the histories that can be derived from them.
Signs, factors and rollouts that are logged late are corrected here, so that no alarm needs to know other trainers. A value that
stands in for another one is named; what was not logged stays missing.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from sys import float_info
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from esper_telemetry.core.record import MAX_COUNT, Axes, Level, Record
from esper_telemetry.history.derive import RunHistory
from esper_telemetry.importers.trainers import (
    DEAD_GROUPS,
    ENTROPY,
    FIT,
    KL,
    RETURN,
    RETURN_100,
    STD,
    VALUE_LOSS,
    Alias,
    Trainer,
    trainer_of,
)
from esper_telemetry.journal.schema import wrong_facts

RECENT_EPISODES: Final = 100
"""Episodes over which `episode/return_mean_100` is the mean."""

MAY_BE_UNDEFINED: Final = {"value/explained_variance"}
"""Keys that trainers log as NaN where they are undefined."""

MAX_ACTIONS: Final = 64
"""Largest number of actions that is inferred from a policy's first entropy."""
UNIFORM_NATS: Final = 0.03
"""Entropy by which a policy that has hardly learned may fall short of the uniform one."""

FACTS: Final = {
    "learning_rate": ("learning_rate", "lr"),
    "total_steps": ("total_timesteps", "total_steps", "train_for_env_steps"),
    "clip": ("clip_coef", "clip_range", "clip_param", "e_clip", "ppo_clip_ratio"),
    "max_grad_norm": ("max_grad_norm", "grad_clip", "grad_norm"),
    "num_envs": ("num_envs", "n_envs", "num_actors"),
    "num_steps": ("num_steps", "n_steps", "horizon_length", "num_steps_per_env", "rollout"),
    "target_kl": ("target_kl",),
    "desired_kl": ("desired_kl",),
}
"""Settings that detectors read, with the names that trainers have for them; those of `Trainer.settings` come in place of these."""

SUBSTITUTES: Final = {
    "policy/kl_max": (KL, "the mean in place of the largest"),
    "value/r2": (FIT, "blind to a constant error"),
}
"""Keys that detectors read, with a related key that trainers log and what it misses."""


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
    if isinstance(value, int) and abs(value) > float_info.max:
        return math.inf if value > 0 else -math.inf
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
        if alias.zero_if_off and not any(value for tag in tags for _, value in logged.points[tag]):
            tags = []
        if tags:
            tags_by_alias[alias] = tags
    positions = _positions(logged, tags_by_alias)
    table: dict[float, dict[str, float]] = {x: {} for x in positions}
    nonfinite: dict[float, set[str]] = {x: set() for x in positions}
    for alias, tags in tags_by_alias.items():
        if alias.episodes:
            continue
        for x, value in _values_at([logged.points[tag] for tag in tags], positions, late=alias.late):
            scaled = value * alias.factor
            if math.isfinite(scaled):
                table[x][alias.key] = scaled
            elif alias.key not in MAY_BE_UNDEFINED:
                nonfinite[x].add(tags[0])
    for alias, tags in tags_by_alias.items():
        if alias.episodes:
            _add_episodes(table, positions, alias, [point for tag in tags for point in logged.points[tag]])
    sources = {}
    for alias, tags in tags_by_alias.items():
        several = f" and {len(tags) - 1} more" if len(tags) > 1 else ""
        scaling = "" if alias.factor == 1 else f" times {alias.factor:g}"
        sources[alias.key] = f"{tags[0]}{several}{scaling}" + (f" ({alias.note})" if alias.note else "")
    read = {tag for tags in tags_by_alias.values() for tag in tags}
    if trainer.idle and all(tag in logged.points for tag in trainer.idle):
        read |= set(trainer.idle)
        sources[DEAD_GROUPS] = f"{trainer.idle[0]} (1 where it is 0, else a lower bound)"
        spread = [[LoggedPoint(x, abs(value)) for x, value in logged.points[tag]] for tag in trainer.idle]
        for x, value in _values_at(spread, positions, late=False):
            table[x][DEAD_GROUPS] = 1.0 if value == 0 else table[x].get(DEAD_GROUPS, 0.0)
    rows = [UpdateRow(x, table[x], len(nonfinite[x])) for x in positions if table[x] or nonfinite[x]]
    return UpdateTable(rows, sources, frozenset(read))


def _of_batches(points: Mapping[str, Sequence[LoggedPoint]], batch_tag: str) -> Mapping[str, Sequence[LoggedPoint]]:
    """Return the points with those of later passes over a batch of completions averaged into that of its first pass."""
    starts = sorted({point.x for tag, own in points.items() if re.fullmatch(batch_tag, tag) for point in own})
    if not starts:
        return points
    batches: dict[str, Sequence[LoggedPoint]] = {}
    for tag, own in points.items():
        values: dict[float, list[float]] = {}
        for x, value in dict(own).items():  # a resumed run writes some steps again
            values.setdefault(starts[max(0, bisect_right(starts, x) - 1)], []).append(value)
        batches[tag] = [LoggedPoint(x, sum(each) / len(each)) for x, each in values.items()]
    return batches


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
    return sorted({point.x for tag in tags for point in logged.points[tag] if abs(point.x) <= MAX_COUNT})


def _values_at(
    histories: Sequence[Sequence[LoggedPoint]], positions: Sequence[float], *, late: bool
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
    if not late:
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
        means = {alias.key: episodes, RETURN_100: recent} if alias.key == RETURN else {alias.key: episodes}
        for key, returns in means.items():
            if returns and math.isfinite(mean := sum(returns) / len(returns)):
                table[x][key] = mean
        if alias.key == RETURN:
            table[x]["episode/count"] = float(len(episodes))


class ImportedRun(NamedTuple):
    """A run that another trainer logged.

    Attributes:
        name: of the run.
        trainer: that logged it.
        x: unit of its x-axis; `env_step` of the records counts it.
        facts: settings that detectors read, as far as they were logged.
        records: one per update.
        used: the source of each key's values, in words.
        unused: tags that were not read.
    """

    name: str
    trainer: str
    x: str
    facts: Mapping[str, Any]
    records: tuple[Record, ...]
    used: Mapping[str, str]
    unused: tuple[str, ...]


Foreign = ImportedRun
"""The name of `ImportedRun` in earlier releases."""


def read_foreign(logged: LoggedRun) -> ImportedRun:
    """Return the run as records.

    Raises ValueError where the tags are those of no known trainer, or hold no update.
    """
    trainer = trainer_of(logged.points)
    logged = logged._replace(points=_of_batches(logged.points, trainer.batch_tag))
    table = read_rows(logged, trainer)
    if not table.rows:
        raise ValueError(f"{logged.name} holds no update of {trainer.name}")
    sources = dict(table.sources)
    facts = {**trainer.facts, **facts_of(logged.config, trainer.settings)}
    facts = {name: value for name, value in facts.items() if name not in wrong_facts(facts)}
    rows = _with_normalized_entropy([_with_substitutes(row, sources) for row in table.rows], sources)
    history = RunHistory(facts)
    records = tuple(
        Record(
            seq=place,
            axes=Axes(update=place, env_step=int(row.x), gradient_step=0, wall_time=0.0),
            values={**row.values, **history.derive(row.values, Level.NORMAL)},
        )
        for place, row in enumerate(rows, 1)
    )
    unused = tuple(tag for tag in sorted(logged.points) if tag not in table.tags)
    return ImportedRun(logged.name, trainer.name, trainer.x, facts, records, sources, unused)


def facts_of(config: Mapping[str, Any], names: Mapping[str, Sequence[str]] = MappingProxyType({})) -> dict[str, Any]:
    """Return the settings under this package's names; numbers that were logged as text become numbers.

    `names` are the trainer's own for some facts: a name of the outermost group that has it, or a path with dots.
    """
    settings: dict[str, Any] = {}
    depths: dict[str, int] = {}
    for path, value in _leaves(config):
        name = path[-1]
        settings[".".join(path)] = value
        if len(path) < depths.get(name, len(path) + 1):  # of settings with one name, that of the outermost group
            settings[name], depths[name] = value, len(path)
    facts = {}
    for fact, candidates in {**FACTS, **names}.items():
        numbers = [parse_number(settings.get(name)) for name in candidates]
        values = [number for number in numbers if number is not None and number >= 0]  # -1 stands for none
        if values:
            facts[fact] = values[0]
    return facts


def _leaves(config: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the settings with their paths; groups are dictionaries, or parts of a name before `/` or `.`."""
    for name, value in config.items():
        own = (*path, *re.split(r"[/.]", str(name)))
        if isinstance(value, Mapping):
            yield from _leaves(value, own)
        else:
            yield own, value


def _with_substitutes(row: UpdateRow, sources: dict[str, str]) -> UpdateRow:
    values = dict(row.values)
    for key, (source, note) in SUBSTITUTES.items():
        if source in values and key not in values:
            values[key] = values[source]
            sources[key] = f"{sources[source].partition(' (')[0]} ({note})"
    values["numerics/nonfinite"] = float(row.nonfinite)
    return row._replace(values=values)


def _with_normalized_entropy(rows: Sequence[UpdateRow], sources: dict[str, str]) -> list[UpdateRow]:
    """Return the rows with entropy over that of a uniform policy, if the first entropy shows the number of actions."""
    first = next((row.values[ENTROPY] for row in rows if ENTROPY in row.values), None)
    actions = None if first is None or STD in sources else number_of_actions(first)
    if actions is None:
        return list(rows)
    largest = math.log(actions)
    source = sources[ENTROPY].partition(" (")[0]
    sources["policy/entropy_norm"] = f"{source} over {largest:.3f}, an even choice among {actions} actions"
    return [
        row._replace(values={**row.values, "policy/entropy_norm": row.values[ENTROPY] / largest})
        if ENTROPY in row.values
        else row
        for row in rows
    ]


def number_of_actions(entropy: float) -> int | None:
    """Return the number of actions whose uniform policy has this entropy, in nats; None where that is no whole number."""
    if not 0.5 < entropy < math.log(MAX_ACTIONS):
        return None
    count = round(math.exp(entropy + UNIFORM_NATS / 2))
    is_whole = count > 1 and 0 <= math.log(count) - entropy + 1e-3 < min(UNIFORM_NATS, 0.5 / count)
    return count if is_whole else None
