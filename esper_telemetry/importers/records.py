"""Records made from what another trainer logged, with the histories that can be derived from them.

Signs, factors and rollouts that are logged late are corrected here, so that no alarm needs to know other trainers. A value that
stands in for another one is named; what was not logged stays missing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from esper_telemetry.core.record import Axes, Level, Record
from esper_telemetry.history.derive import RunHistory
from esper_telemetry.importers.rows import LoggedRun, UpdateRow, parse_number, read_rows
from esper_telemetry.importers.trainers import ENTROPY, FIT, KL, STD, trainer_of

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
"""Settings that detectors read, with the names that trainers have for them."""

STAND_INS: Final = {
    "policy/kl_max": (KL, "the mean in place of the largest"),
    "value/r2": (FIT, "blind to a constant error"),
}
"""Keys that detectors read, with a related key that trainers log and what it misses."""


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
    table = read_rows(logged, trainer)
    if not table.rows:
        raise ValueError(f"{logged.name} holds no update of {trainer.name}")
    sources = dict(table.sources)
    facts = facts_of(logged.config)
    rows = _with_normalized_entropy([_with_stand_ins(row, sources) for row in table.rows], sources)
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


def facts_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings under this package's names; numbers that were logged as text become numbers."""
    settings = {str(name).rpartition("/")[2]: value for name, value in config.items()}
    facts = {}
    for fact, names in FACTS.items():
        values = [number for name in names if (number := parse_number(settings.get(name))) is not None]
        if values:
            facts[fact] = values[0]
    return facts


def _with_stand_ins(row: UpdateRow, sources: dict[str, str]) -> UpdateRow:
    values = dict(row.values)
    for key, (source, note) in STAND_INS.items():
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
