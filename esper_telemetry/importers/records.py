"""Records made from another trainer's log.

Logged points become one row of this package's keys per update; rows become records with the histories that can be derived from them.
Signs, factors and rollouts that are logged late are corrected here, so that no alarm needs to know other trainers. A value that
replaces another one is named; values that were not logged stay missing.
"""

from __future__ import annotations

import math
import re
import shlex
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from itertools import pairwise
from statistics import fmean
from sys import float_info
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from esper_telemetry.core.metric import catalogue
from esper_telemetry.core.record import MAX_COUNT, Axes, Level, Record
from esper_telemetry.history.derive import RunHistory
from esper_telemetry.importers.log_conditions import Remark, adaptive_rate, correct, remarks_on, unused_divergence
from esper_telemetry.importers.trainers import (
    ADVANTAGES,
    COUNT,
    DEAD_GROUPS,
    ENTROPY,
    EVALUATION,
    FIT,
    KL,
    LENGTH,
    LONGEST,
    LOSS,
    OFF_POLICY,
    ON_POLICY,
    POLICY_LOSS,
    RATE,
    RATIO_MAX,
    RATIO_MIN,
    RETURN,
    RETURN_100,
    SPEED,
    STD,
    STEP_REWARD,
    VALUE_LOSS,
    Alias,
    Trainer,
    likely_columns,
    trainer_of,
)
from esper_telemetry.journal.schema import wrong_facts

RECENT_EPISODES: Final = 100
"""Episodes over which `episode/return_mean_100` is the mean."""

MAY_BE_UNDEFINED: Final = {"value/explained_variance"}
"""Keys that trainers log as NaN if they are undefined."""

MAX_UPDATES: Final = 600
"""Rows that are judged; each takes 1.5 ms."""
SETTLING_SHARE: Final = 0.2
"""Share of the run within which the first episodes end."""
FEW_RETURNS: Final = 20
"""Rows with returns below which the outcome follows the reward per step, if more rows have it."""
MUCH_DENSER: Final = 4
"""Number of returns per loss above which returns give the positions of updates."""
MAX_EPISODE_GROUPS: Final = 200
"""Rows of a log of single episodes."""

LOSSES: Final = (VALUE_LOSS, POLICY_LOSS, LOSS)
RETURNS: Final = (RETURN, RETURN_100, STEP_REWARD)
STEPS: Final = ("environment steps", "collected frames")
"""Units of positions from which the number of episodes can be estimated."""
OUTCOME_KEYS: Final = frozenset({*RETURNS, COUNT, LENGTH, EVALUATION, SPEED})
BREAKING: Final = ("loss/", "grad/", "policy/kl", "policy/ratio/", "lm/kl", "policy/head/")
"""Prefixes of keys whose values are finite in every update of a working run."""
EXTREMES: Final[Mapping[str, Callable[[Sequence[float]], float]]] = {RATIO_MIN: min, RATIO_MAX: max, LONGEST: max, COUNT: sum}
"""Keys of which several values are not merged to their mean."""

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
    "desired_kl": ("desired_kl", "kl_threshold"),
}
"""Settings that detectors read, with the names that trainers have for them; `Trainer.settings` replaces them."""

SUBSTITUTES: Final = {
    "policy/kl_max": (KL, "the mean instead of the largest"),
    "value/r2": (FIT, "blind to a constant error"),
    RETURN_100: (RETURN, "of one update"),
}
"""Keys that detectors read, with a related key that trainers log and a note on the difference."""


class LoggedPoint(NamedTuple):
    """A value and its position on the x-axis that it was logged against."""

    x: float
    value: float


class LoggedRun(NamedTuple):
    """A run as a backend holds it.

    Attributes:
        name: of the run.
        points: by tag, in the order in which they were written; values may be NaN.
        config: settings that the backend has.
        x: unit of the positions, if the log has it.
        axis: column that holds the positions, if there is one.
        notes: on the choice among several runs and files.
        address: it was read from.
    """

    name: str
    points: Mapping[str, Sequence[LoggedPoint]]
    config: Mapping[str, Any] = {}
    x: str = ""
    axis: str = ""
    notes: tuple[str, ...] = ()
    address: str = ""


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
        unread: tags that were not read, with the reason if they are the trainer's.
        note: on rows that were merged.
    """

    rows: list[UpdateRow]
    sources: dict[str, str]
    unread: tuple[str, ...]
    note: str = ""


def parse_number(value: object) -> float | int | None:
    """Return the value, or its text, as a number; None for an empty cell or a switch."""
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
    """Return the updates of a run: each takes the values up to its position; values that are logged late belong to the previous one.

    Losses give the positions, or returns if nothing else was logged. A long log is merged to `MAX_UPDATES` rows.
    """
    series: dict[Alias, dict[str, list[LoggedPoint]]] = {}
    for alias in trainer.aliases:
        tags = sorted(tag for tag in logged.points if re.fullmatch(alias.tag, tag))
        if tags and (not alias.zero_if_off or any(value for tag in tags for _, value in logged.points[tag])):
            series[alias] = {tag: sorted(point for point in logged.points[tag] if abs(point.x) <= MAX_COUNT) for tag in tags}
    updates = _positions(series)
    stride = math.ceil(len(updates) / (MAX_EPISODE_GROUPS if all(alias.episodes for alias in series) else MAX_UPDATES))
    positions = [*updates[stride - 1 :: stride], *(updates[-1:] if len(updates) % max(stride, 1) else [])]
    table: list[dict[str, float]] = [{} for _ in positions]
    nonfinite: list[set[str]] = [set() for _ in positions]
    sources: dict[str, str] = {}
    unread = dict.fromkeys(logged.points, "")
    for alias, own in series.items():
        dropped = _read_series(alias, own, updates, positions, table, nonfinite)
        unread = {tag: reason for tag, reason in unread.items() if tag not in own} | dropped
        if len(dropped) < len(own):
            several = f" and {len(own) - 1} more" if len(own) > 1 else ""
            scaling = "" if alias.factor == 1 else f" times {alias.factor:g}"
            sources[alias.key] = f"{min(own)}{several}{scaling}" + (f" ({alias.note})" if alias.note else "")
    if trainer.idle and all(tag in logged.points for tag in trainer.idle):
        unread = {tag: reason for tag, reason in unread.items() if tag not in trainer.idle}
        sources[DEAD_GROUPS] = f"{trainer.idle[0]} (1 if it is 0, else a lower bound)"
        spread = [LoggedPoint(x, abs(value)) for tag in trainer.idle for x, value in logged.points[tag]]
        for place, values in _grouped(spread, positions).items():
            table[place][DEAD_GROUPS] = sum(not value for value in values) / len(values) or table[place].get(DEAD_GROUPS, 0.0)
    rows = [UpdateRow(x, table[place], len(nonfinite[place])) for place, x in enumerate(positions) if table[place] or nonfinite[place]]
    note = f"An update is the mean of {stride} of {len(updates):,} logged rows." if stride > 1 else ""
    return UpdateTable(rows, sources, tuple(tag + (f" ({why})" if why else "") for tag, why in sorted(unread.items())), note)


def _read_series(
    alias: Alias,
    points_by_tag: Mapping[str, Sequence[LoggedPoint]],
    updates: Sequence[float],
    positions: Sequence[float],
    table: Sequence[dict[str, float]],
    nonfinite: Sequence[set[str]],
) -> dict[str, str]:
    """Put the values of an alias into the rows; return the tags that count in another unit, with this reason.

    A mean of no episodes is NaN, like values logged before the first update. `numerics/nonfinite` counts values that were finite
    before, and losses, divergences and gradients that never are.
    """
    places: dict[int, list[float]] = {}
    dropped = {}
    for tag, points in points_by_tag.items():
        inside = sum(updates[0] <= x <= updates[-1] for x, _ in points)
        if 2 * inside < len(points) and len(points) == len(updates):
            points = [LoggedPoint(x, point.value) for x, point in zip(updates, points, strict=True)]
        elif 2 * inside < len(points):
            dropped[tag] = f"on another axis: {points[0].x:,.0f} to {points[-1].x:,.0f}"
            continue
        if alias.late:
            before = [(bisect_left(updates, x) - 1, value) for x, value in dict(points).items()]
            points = [LoggedPoint(updates[place], value) for place, value in before if place >= 0]
        for place, values in _grouped(points, positions).items():
            places.setdefault(place, []).extend(values)
    was_finite, is_bad = False, alias.key.startswith(BREAKING)
    last = max((place for place, values in places.items() if any(map(math.isfinite, values))), default=-1)
    recent: deque[float] = deque(maxlen=RECENT_EPISODES)
    for place, row in enumerate(table):
        values = [alias.factor * value for value in places.get(place, ())]
        finite = [value for value in values if math.isfinite(value)]
        if len(finite) < len(values) and alias.key not in MAY_BE_UNDEFINED:
            infinite = any(math.isinf(value) for value in values)
            stopped = was_finite and place > last and not alias.key.startswith(("episode/", "eval/"))
            if infinite or stopped or (is_bad and (was_finite or last < 0)):
                nonfinite[place].add(min(points_by_tag))
        was_finite |= bool(finite)
        if finite and math.isfinite(mean := EXTREMES.get(alias.key, fmean)(finite)):
            row[alias.key] = mean
        if alias.episodes and alias.key == RETURN:
            recent.extend(finite)
            row[COUNT] = float(len(finite))
            if recent and math.isfinite(mean := fmean(recent)):
                row[RETURN_100] = mean
    return dropped


def _grouped(points: Iterable[LoggedPoint], positions: Sequence[float]) -> dict[int, list[float]]:
    """Return the values by the first position that is not before them; later values belong to the last position."""
    places: dict[int, list[float]] = {}
    for x, value in points:
        places.setdefault(min(bisect_left(positions, x), len(positions) - 1), []).append(value)
    return places


def _of_batches(points: Mapping[str, Sequence[LoggedPoint]], batch_tag: str) -> Mapping[str, Sequence[LoggedPoint]]:
    """Return the points, with one mean for all passes over a batch of completions."""
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


def _positions(series: Mapping[Alias, Mapping[str, Sequence[LoggedPoint]]]) -> list[float]:
    """Return the positions of updates, by losses, else by other values of training, else by returns."""
    whole = [alias for alias in series if not alias.episodes and alias.key != EVALUATION] or list(series)
    main = [alias for alias in whole if alias.key in LOSSES] or [alias for alias in whole if alias.key in ON_POLICY]
    if any(alias.late for alias in main):  # values of training are logged with any row that follows, such as one of an evaluation
        whole = [alias for alias in whole if not alias.late] or whole
        return sorted({point.x for alias in whole for points in series[alias].values() for point in points})
    returns = [alias for alias in whole if alias.key in RETURNS]

    def densest(aliases: Iterable[Alias]) -> Sequence[LoggedPoint]:
        return max((points for alias in aliases for points in series[alias].values()), key=len, default=())

    points, often = densest(main or returns or whole), densest(returns)
    return sorted({point.x for point in (often if len(often) >= MUCH_DENSER * len(points) else points)})


class ImportedRun(NamedTuple):
    """A run that another trainer logged.

    Attributes:
        name: of the run.
        trainer: that logged it.
        x: unit of its x-axis; `env_step` of the records counts it.
        facts: logged settings that detectors read.
        records: one per update.
        used: the source of each key's values, in words.
        unused: tags that were not read, with the reason if the trainer is known to write them.
        notes: on the data that were read and their limits, a sentence each.
        unit: meaning of a row of the log: an update, an episode, or a row if it is not known.
        hints: how to make the trainer log missing values, by the prefix of the key.
        missing: tags of the trainer that this log does not have, by key.
        off_policy: PPO's checks do not hold for the algorithm.
        remarks: on problems that no rule can detect in a log.
    """

    name: str
    trainer: str
    x: str
    facts: Mapping[str, Any]
    records: tuple[Record, ...]
    used: Mapping[str, str]
    unused: tuple[str, ...]
    notes: tuple[str, ...] = ()
    unit: str = "update"
    hints: Mapping[str, str] = {}
    missing: Mapping[str, str] = {}
    off_policy: bool = False
    remarks: tuple[Remark, ...] = ()

    def hint(self, key: str) -> str:
        """Return how the trainer logs a key; empty if it is not known to."""
        return next((hint for known, hint in self.hints.items() if known and key.startswith(known)), "")


Foreign = ImportedRun
"""The name of `ImportedRun` in earlier releases."""


def read_foreign(logged: LoggedRun, columns: Mapping[str, str] | None = None) -> ImportedRun:
    """Return the run as records.

    Args:
        logged: the run.
        columns: the column of a key's values, instead of the trainer's known tag; `env_step` is the position.

    Raises ValueError for columns of an unknown trainer, with a command that maps them; for a wrong key or column; and without updates.
    """
    known = trainer_of(logged.points)
    trainer = known or Trainer("an unknown trainer", (), (), x=logged.x or "steps")
    if columns:
        trainer, logged = _mapped(trainer, logged, columns)
    elif known is None:
        raise ValueError(_proposal(logged))
    tag = next((tag for tag in sorted(logged.points) if OFF_POLICY.fullmatch(tag)), "")
    keys = {alias.key for alias in trainer.aliases if any(re.fullmatch(alias.tag, tag) for tag in logged.points)}
    off_policy = bool(tag) and not keys & ON_POLICY
    if off_policy:
        aliases = tuple(alias for alias in trainer.aliases if alias.key in OUTCOME_KEYS)
        trainer = replace(trainer, aliases=aliases, facts={}, settings=dict.fromkeys(FACTS, ()))
    elif not keys:
        raise ValueError(_proposal(logged))
    logged = logged._replace(points=_of_batches(logged.points, trainer.batch_tag))
    table = read_rows(logged, trainer)
    if not table.rows:
        raise ValueError(f"{logged.name} lacks updates of {trainer.name}")
    sources = dict(table.sources)
    x = logged.x or trainer.x
    facts = {**trainer.facts, **facts_of(logged.config, trainer.settings), **({} if x in STEPS else {"step_unit": x})}
    facts = {name: value for name, value in facts.items() if name not in wrong_facts(facts)}
    if adaptive_rate([value for _, value in logged.points.get(sources.get(RATE, ""), ())]):
        facts["adaptive_rate"] = True
    updates = [(place, row.values) for place, row in enumerate(table.rows, 1)]
    was_zero = unused_divergence(updates)
    correct(updates, sources)
    means = {what: [value for _, value in logged.points.get(tag, ())] for what, tag in ADVANTAGES.items()}
    followed, few = _with_enough_returns(table.rows)
    rows, early = _settled(_with_normalized_entropy([_with_substitutes(row, sources) for row in followed], sources))
    history = RunHistory(facts)
    records = tuple(
        Record(
            seq=place,
            axes=Axes(update=place, env_step=int(row.x), gradient_step=0, wall_time=0.0),
            values={**row.values, **history.derive(row.values, Level.NORMAL)},
        )
        for place, row in enumerate(rows, 1)
    )
    about = f"This is the log of an off-policy algorithm ({tag}): the outcome holds for it, PPO's checks do not." if off_policy else ""
    unit = "update" if keys & ON_POLICY or keys.intersection(LOSSES) or table.note else "row"
    if all(alias.episodes for alias in trainer.aliases if alias.key in sources) and not table.note:
        unit = "episode"
    unit = "row" if x == "rows" else unit
    plain = [alias for alias in trainer.aliases if alias.key not in sources and not re.search(r"[][()|?*+\\]", alias.tag)]
    return ImportedRun(
        logged.name,
        trainer.name,
        x,
        facts,
        records,
        sources,
        table.unread,
        notes=tuple(filter(None, (*logged.notes, about or trainer.hints.get("", ""), table.note, few, early))),
        unit=unit,
        hints=trainer.hints,
        missing={alias.key: alias.tag for alias in plain},
        off_policy=off_policy,
        remarks=tuple(remarks_on(updates, means, was_zero)),
    )


def _with_enough_returns(rows: Sequence[UpdateRow]) -> tuple[Sequence[UpdateRow], str]:
    """Return the rows without returns if few rows have one and more have the reward per step, and a note on it."""
    returns, rewards = (sum(key in row.values for row in rows) for key in (RETURN_100, STEP_REWARD))
    if not 0 < returns < min(FEW_RETURNS, rewards):
        return rows, ""
    kept = [row._replace(values={key: value for key, value in row.values.items() if key != RETURN_100}) for row in rows]
    return kept, f"The outcome follows the reward per step, because only {returns} rows have the return of an episode."


def _settled(rows: Sequence[UpdateRow]) -> tuple[list[UpdateRow], str]:
    """Return the rows without the returns of the first ones if only short episodes had ended there, and a note on them.

    If episodes are cut off at one length, the shorter ones end first. Their returns are biased, and the number of environments is
        not known. Returns that rise with the length are kept: longer episodes are then learned.
    """
    lengths = [(place, row.values[LENGTH]) for place, row in enumerate(rows) if LENGTH in row.values]
    longest = max((length for _, length in lengths), default=0.0)
    full = [place for place, length in lengths if length >= 0.99 * longest]
    if not full or 2 * len(full) < len(lengths) or not 0 < rows[full[0]].x <= SETTLING_SHARE * rows[-1].x:
        return list(rows), ""
    keys = [key for key in RETURNS if key in rows[full[0]].values]
    early = [row for row in rows[: full[0]] if any(key in row.values for key in keys)]
    if not any(row.values.get(key, -math.inf) > rows[full[0]].values[key] for row in early[:1] for key in keys):
        return list(rows), ""
    kept = [row._replace(values={key: value for key, value in row.values.items() if key not in RETURNS}) for row in rows[: full[0]]]
    return [*kept, *rows[full[0] :]], f"Returns of the first {full[0]} rows are left out, in which only short episodes had ended."


def _mapped(trainer: Trainer, logged: LoggedRun, columns: Mapping[str, str]) -> tuple[Trainer, LoggedRun]:
    """Return the trainer with other columns for some keys, and the run on the axis of `env_step`."""
    keys = {metric.key for metric in catalogue()} | {"env_step"}
    for key, column in columns.items():
        for name, names, what in ((key, keys, "metric"), (column, {*logged.points, logged.axis}, "column")):
            if name not in names:
                near = ", ".join(get_close_matches(name, names, 4, 0.4)) or ", ".join(sorted(names)[:8])
                raise ValueError(f"--map {key}={column}: unknown {what} {name}; known ones include {near}")
    own = {key: column for key, column in columns.items() if key != "env_step"}
    kept = [alias for alias in trainer.aliases if alias.key not in own]
    aliases = (*kept, *(Alias(re.escape(column), key) for key, column in own.items()))
    axis = columns.get("env_step", logged.axis)
    if axis != logged.axis:
        ticks = sorted(logged.points[axis])
        places = [tick.x for tick in ticks]
        points = {
            tag: [LoggedPoint(ticks[max(0, bisect_right(places, x) - 1)].value, value) for x, value in points]
            for tag, points in logged.points.items()
            if tag != axis
        }
        logged = logged._replace(points=points, x="environment steps", axis=axis)
    return replace(trainer, aliases=aliases), logged


def _proposal(logged: LoggedRun) -> str:
    """Return the sentence on columns of an unknown trainer, with the command that is likely to read them."""
    ordered = sorted(logged.points)
    named = f"{', '.join(ordered[:8])}{f' and {len(ordered) - 8} others' if len(ordered) > 8 else ''}"
    likely = likely_columns(filter(None, (*ordered, logged.axis)))
    counted = [point.value for point in logged.points.get(likely.get("env_step", ""), ())]
    if any(other < one for one, other in pairwise(counted)):  # the steps of one update
        del likely["env_step"]
    guess = {key: column for key, column in likely.items() if column != logged.axis or key == "env_step"}
    mapped = [part for key, column in guess.items() for part in ("--map", f"{key}={column}")]
    command = shlex.join(["esper-telemetry", "diagnose", "--from", logged.address or "LOGS", *mapped])
    if RETURN not in guess:
        return f"these are the columns of no known trainer: {named}; name what they hold: {command} --map {RETURN}=COLUMN"
    return f"these are the columns of no known trainer: {named}; if their names say what they hold: {command}"


def facts_of(config: Mapping[str, Any], names: Mapping[str, Sequence[str]] = MappingProxyType({})) -> dict[str, Any]:
    """Return the settings under this package's names; numbers that were logged as text become numbers.

    `names` are the trainer's own for some facts: a name of the outermost group that has it, or a path with dots.
    """
    settings: dict[str, Any] = {}
    depths: dict[str, int] = {}
    for path, value in _leaves(config):
        name = path[-1]
        settings[".".join(path)] = value
        if len(path) < depths.get(name, len(path) + 1):  # the outermost group wins
            settings[name], depths[name] = value, len(path)
    facts = {}
    for fact, candidates in {**FACTS, **names}.items():
        numbers = [parse_number(settings.get(name)) for name in candidates]
        values = [number for number in numbers if number is not None and number >= 0]  # -1 means that it is missing
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
    """Return the rows with the entropy as a share of the largest one, if the first entropy shows the number of actions."""
    first = next((row.values[ENTROPY] for row in rows if ENTROPY in row.values), None)
    actions = None if first is None or STD in sources else number_of_actions(first)
    if actions is None:
        return list(rows)
    largest = math.log(actions)
    source = sources[ENTROPY].partition(" (")[0]
    sources["policy/entropy_norm"] = f"{source} over {largest:.3f}, an even choice among {actions} actions"
    return [
        row._replace(values={**row.values, "policy/entropy_norm": row.values[ENTROPY] / largest}) if ENTROPY in row.values else row
        for row in rows
    ]


def number_of_actions(entropy: float) -> int | None:
    """Return the number of actions whose uniform policy has this entropy, in nats; None if that is not a whole number."""
    if not 0.5 < entropy < math.log(MAX_ACTIONS):
        return None
    count = round(math.exp(entropy + UNIFORM_NATS / 2))
    is_whole = count > 1 and 0 <= math.log(count) - entropy + 1e-3 < min(UNIFORM_NATS, 0.5 / count)
    return count if is_whole else None
