"""From rows to records, with everything that can be derived from them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from esper_telemetry.core.record import Axes, Level, Record
from esper_telemetry.history.derive import RunHistory
from esper_telemetry.importers.rows import LoggedRow, Row, read_rows
from esper_telemetry.importers.trainers import ENTROPY, FIT, KL, STD, trainer_of

MOST_ACTIONS = 64
"""Choices of a policy whose number is guessed from its first entropy."""

UNIFORM = 0.03
"""How far, in nats, a policy that has hardly learned may be from choosing evenly."""

FACTS = {
    "learning_rate": ("learning_rate", "lr"),
    "total_steps": ("total_timesteps", "total_steps", "train_for_env_steps"),
    "clip": ("clip_coef", "clip_range", "clip_param", "e_clip", "ppo_clip_ratio"),
    "max_grad_norm": ("max_grad_norm", "grad_clip", "grad_norm"),
    "num_envs": ("num_envs", "n_envs", "num_actors"),
    "num_steps": ("num_steps", "n_steps", "horizon_length", "num_steps_per_env", "rollout"),
    "target_kl": ("target_kl",),
    "desired_kl": ("desired_kl",),
}
"""Settings that detectors read, by the names that trainers have for them."""


class Foreign(NamedTuple):
    """A run that somebody else has logged.

    Attributes:
        name: of the run.
        trainer: who wrote it.
        x: what its axis counts; `env_step` of the records is that.
        facts: what detectors need to know, as far as settings were logged.
        records: one per update.
        used: where the values of each key come from, in words.
        unused: tags that were not read.
    """

    name: str
    trainer: str
    x: str
    facts: Mapping[str, Any]
    records: tuple[Record, ...]
    used: Mapping[str, str]
    unused: tuple[str, ...]


def read_foreign(logged: LoggedRow) -> Foreign:
    """The run as records.

    Raises ValueError where the tags are those of no known trainer, or hold no update.
    """
    trainer = trainer_of(logged.points)
    read = read_rows(logged, trainer)
    if not read.rows:
        raise ValueError(f"{logged.name} holds no update of {trainer.name}")
    used = dict(read.used)
    facts = facts_of(logged.config)
    rows = [_completed(row, used) for row in read.rows]
    rows = _normalized(rows, used)
    series = RunHistory(facts)
    records = tuple(_record(place, row, series) for place, row in enumerate(rows, 1))
    unused = tuple(tag for tag in sorted(logged.points) if tag not in read.tags)
    return Foreign(logged.name, trainer.name, trainer.x, facts, records, used, unused)


def facts_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by our names; numbers that were logged as text are numbers."""
    known = {str(name).rpartition("/")[2]: value for name, value in config.items()}
    found = {}
    for fact, names in FACTS.items():
        values = [number for name in names if (number := _number(known.get(name))) is not None]
        if values:
            found[fact] = values[0]
    return found


def _number(value: object) -> float | int | None:
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int | float):
        return value
    try:
        return float(str(value))
    except ValueError:
        return None


def _completed(row: Row, used: dict[str, str]) -> Row:
    """What rules ask for and others log under a near name."""
    values = dict(row.values)
    stand_ins = {
        "policy/kl_max": (KL, "the mean in place of the largest"),
        "value/r2": (FIT, "blind to a constant error"),
    }
    for key, (source, what) in stand_ins.items():
        if source in values and key not in values:
            values[key] = values[source]
            used[key] = f"{used[source].partition(' (')[0]} ({what})"
    values["numerics/nonfinite"] = float(row.nonfinite)
    return row._replace(values=values)


def _normalized(rows: Sequence[Row], used: dict[str, str]) -> list[Row]:
    """With the entropy as a share of that of an even choice, where the first one tells of how many."""
    first = next((row.values[ENTROPY] for row in rows if ENTROPY in row.values), None)
    actions = None if first is None or STD in used else number_of_actions(first)
    if actions is None:
        return list(rows)
    most = math.log(actions)
    used["policy/entropy_norm"] = (
        f"{used[ENTROPY].partition(' (')[0]} over {most:.3f}, an even choice among {actions} actions"
    )
    return [
        row._replace(values={**row.values, "policy/entropy_norm": row.values[ENTROPY] / most})
        if ENTROPY in row.values
        else row
        for row in rows
    ]


def number_of_actions(entropy: float) -> int | None:
    """Of how many choices an even one has this entropy, in nats; None where that is no whole number."""
    if not 0.5 < entropy < math.log(MOST_ACTIONS):
        return None
    count = round(math.exp(entropy + UNIFORM / 2))
    return count if count > 1 and 0 <= math.log(count) - entropy + 1e-3 < min(UNIFORM, 0.5 / count) else None


def _record(place: int, row: Row, series: RunHistory) -> Record:
    values = {**row.values, **series.derive(row.values, Level.NORMAL)}
    axes = Axes(update=place, env_step=int(row.x), gradient_step=0, wall_time=0.0)
    return Record(seq=place, axes=axes, values=values)
