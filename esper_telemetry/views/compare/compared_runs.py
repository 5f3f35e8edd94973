"""Runs as a comparison reads them: a table of values per run, its settings without the seed, and the first difference of two journals."""

from __future__ import annotations

import json
import math
import re
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from esper_telemetry.alarms.alarm_state import ALARMS_FAMILY
from esper_telemetry.alarms.verdict.run_outcome import EVALUATION, OutcomeJudge, OutcomeKind
from esper_telemetry.core.facts import Facts
from esper_telemetry.core.messages import did_you_mean
from esper_telemetry.core.metric import Array, families, family_name
from esper_telemetry.core.record import AlarmEvent, MetricInfo, Record, RunInfo, RunStatus, judgeable, template_of
from esper_telemetry.history.derive import ALL_SUFFIXES
from esper_telemetry.history.recent_return import RECENT_RETURN, UPDATE_RETURN
from esper_telemetry.journal.file import damage_sentence, journal_path
from esper_telemetry.journal.lines import plain
from esper_telemetry.journal.read import Run, entries, read_run
from esper_telemetry.journal.record_columns import RecordTable, SegmentBuilder

MAX_DEPTH: Final = 3
"""Folders below the given one in which runs are looked for."""
SEED: Final = re.compile(r"(.*[_.])?seed")
"""Settings that two runs of one configuration may differ in: `seed`, `train.seed`, `env_seed`."""
OUTPUT_SETTING: Final = re.compile(
    r"(.*\.)?((run|exp|experiment|job|trial|group|wandb|project)_?(name|id|entity|project\w*)|(.*[_-])?(log|out|work)?(dir|directory|path|folder|file)s?"
    r"|out(put)?|tensorboard_log|sinks?|notify|track|verbose|capture_video|save_model|checkpoint_every|eval_every|eval_episodes|timestamp|start_time|host_?name"
    r"|(resume|restore|load)(_?from)?(_?(checkpoint|ckpt))?|checkpoint|ckpt)"
    r"|name"
)
"""Settings of where a run writes and what it reports, which do not change its training, and of the checkpoint from which it continues."""
TOTAL_LENGTH: Final = re.compile(
    r"(.*\.)?((?P<total>total|(max_)?train(ing)?)_(env_)?(time)?(steps|frames|updates|iterations|episodes)"
    r"|(num|n|max)_(env_steps|timesteps|frames|updates|iterations)|(time)?steps|frames|updates|iterations)"
)
"""Settings of how long a run trains: runs are compared up to the step that all have reached."""
PATH: Final = re.compile(r'"((/|~|\.\.?/|runs/|[A-Za-z]:\\\\|[\w.+:-]+://).*|.*[\\/].*\.(ckpt|npz|onnx|pkl|pth?|safetensors|zip))"')
"""Values of settings, as JSON, that are paths or addresses."""
TIME_UNITS: Final = frozenset({"ms", "s", "1/s", "seconds", "bytes", "MB", "GB", "MiB", "GiB"})
"""Units of time and memory, which differ between runs that are equal."""
TIME_NAME: Final = re.compile(
    r"(.*[/_])?(time|elapsed|duration|seconds|secs|ms|fps|sps|it_s|throughput|steps_per_sec(ond)?|memory|cpu|gpu)([/_].*)?"
)
"""Undeclared keys of time and memory, such as other loggers write: `sb3/time/fps`, `charts/sps`."""
SAMPLED_COSTS: Final = ("sampled", "debug")
"""Costs of metrics that are measured in some updates only, chosen by the time that they take."""
RETURN_KEYS: Final = (UPDATE_RETURN, RECENT_RETURN, EVALUATION)
"""Keys that may be the return of a run, the best one first."""


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """A run as a table.

    Attributes:
        place: directory of the run, as given.
        info: its description.
        seed: its seeds as text; empty if the run records no seed.
        settings: configuration and plain facts by dotted name, without seeds.
        status: how it ended; None for a run under way.
        outcome: what it does.
        outcome_text: in one sentence.
        alarms: types of alarm that were raised.
        damage: sentence on lines that could not be read; else empty.
        updates, env_steps: [records], of every update that ended.
        keys: columns of `values`.
        values: [records, keys], NaN if a key is absent.
        returns: [records] by key of `RETURN_KEYS`: the mean over the last hundred episodes, NaN before the first.
    """

    place: str
    info: RunInfo
    seed: str
    settings: Mapping[str, str]
    status: RunStatus | None
    outcome: OutcomeKind
    outcome_text: str
    alarms: frozenset[str]
    damage: str
    updates: npt.NDArray[np.int64]
    env_steps: Array
    keys: tuple[str, ...]
    values: Array
    returns: Mapping[str, Array]

    @property
    def last_step(self) -> float:
        """Environment steps of the last record; 0 without one."""
        return float(self.env_steps[-1]) if len(self.env_steps) else 0.0

    def column(self, key: str) -> Array:
        """Values of a key, [records], NaN if it is absent."""
        if key not in self.keys:
            return np.full(len(self.updates), math.nan)
        column: Array = self.values[:, self.keys.index(key)]
        return column

    def is_length(self, name: str, value: str) -> bool:
        """Return True for the setting of a total length, unless the learning rate follows it.

        Steps that are not called total, or of training, may be of one rollout: they are a length if an update has fewer.
        """
        match = TOTAL_LENGTH.fullmatch(name)
        schedule = Facts.of(self.info.facts).learning_rate_schedule or {}
        if match is None or schedule.get("initial") != schedule.get("final"):
            return False
        one_update = self.env_steps[0] if name.endswith(("steps", "frames")) and not match["total"] else 0
        return not (value.isdigit() and int(value) <= one_update)

    def final_return(self, key: str, reach: float) -> float:
        """Return the mean over the last hundred episodes before `reach` environment steps; NaN without any."""
        rows = np.flatnonzero(self.env_steps <= reach)
        return float(self.returns[key][rows[-1]]) if key in self.returns and len(rows) else math.nan


def configurations(runs: Sequence[ComparedRun], *, ignore: Collection[str] = (), by: Collection[str] = ()) -> list[dict[str, str]]:
    """Return the settings of each run that tell configurations apart.

    Args:
        runs: all runs.
        ignore: settings that do not count, in addition to names, paths and what is reported.
        by: settings that count alone.

    A setting is meant by its dotted name or by the end of it. Raises ValueError for a setting that no run has.
    """
    names = dict.fromkeys(name for run in runs for name in run.settings)
    for key in (*ignore, *by):
        if not any(_is_named(name, [key]) for name in names):
            ends = [name.rpartition(".")[2] for name in names]
            raise ValueError(f"no run has a setting {key!r}{did_you_mean(key, [*names, *ends])}")

    def counts(run: ComparedRun, name: str, value: str) -> bool:
        if by:
            return _is_named(name, by)
        is_neutral = OUTPUT_SETTING.fullmatch(name) or PATH.fullmatch(value) or run.is_length(name, value)
        return not (is_neutral or _is_named(name, ignore))

    return [{name: value for name, value in run.settings.items() if counts(run, name, value)} for run in runs]


def _is_named(name: str, keys: Collection[str]) -> bool:
    return any(name == key or name.endswith(f".{key}") for key in keys)


def find_runs(places: Iterable[str]) -> list[str]:
    """Return the run directories among `places` and in the folders there, each once, in order.

    Raises FileNotFoundError for a place that is not a directory or does not contain a run.
    """
    runs: dict[Path, str] = {}
    for place in places:
        directory = Path(place).expanduser()
        if not directory.is_dir():
            raise FileNotFoundError(f"there is no run directory {place}")
        here = list(_runs_in(directory, MAX_DEPTH))
        if not here:
            raise FileNotFoundError(f"{place} does not contain a run: neither a journal.jsonl nor folders with one")
        for path in here:
            runs.setdefault(path.resolve(), str(path))
    return list(runs.values())


def _runs_in(directory: Path, depth: int) -> Iterator[Path]:
    try:
        journal_path(directory)
    except FileNotFoundError:
        if depth:
            for folder in sorted(path for path in directory.iterdir() if path.is_dir()):
                yield from _runs_in(folder, depth - 1)
        return
    yield directory


def read_compared(place: str) -> ComparedRun:
    """Read a run as it is now; raises ValueError for a journal that does not say which run it is."""
    run = read_run(place)
    stored = run.records
    judge, returns, table = OutcomeJudge(run.info.facts), array("d"), SegmentBuilder(0)
    for record in stored.without_histograms() if isinstance(stored, RecordTable) else stored:
        if not record.partial:
            judge.add(record)
            returns.extend(judge.recent(key) for key in RETURN_KEYS)
            table.add(0, b"", replace(record, values=judgeable(record.values)))
    rows = table.segment(0)
    outcome = judge.end(run.status)
    settings = _flat(run)
    seeds = [value for name, value in settings.items() if SEED.fullmatch(name) and value != "null"]
    return ComparedRun(
        place,
        run.info,
        ", ".join(dict.fromkeys(seeds)),
        {name: value for name, value in settings.items() if not SEED.fullmatch(name)},
        run.status,
        outcome.kind,
        outcome.text,
        frozenset(alarm.type for alarm in run.alarms if alarm.event is AlarmEvent.RAISE),
        damage_sentence(journal_path(place), run.damaged) if run.damaged else "",
        rows.counts[:, 1],
        rows.counts[:, 2].astype(float),
        rows.keys,
        rows.values,
        dict(zip(RETURN_KEYS, np.array(returns).reshape(-1, len(RETURN_KEYS)).T, strict=True)),
    )


def _flat(run: Run) -> dict[str, str]:
    """Return settings as JSON text by dotted name: the configuration, and facts of one value that it does not name."""
    flat: dict[str, str] = {}

    def add(values: Mapping[str, Any], prefix: str = "") -> None:
        for name, value in values.items():
            if isinstance(value, Mapping):
                add(value, f"{prefix}{name}.")
            else:
                flat[f"{prefix}{name}"] = json.dumps(value, sort_keys=True)

    add(plain(run.info.config))
    names, facts = {name.rpartition(".")[2] for name in flat}, plain(run.info.facts)
    names |= {ours for ours, theirs in Facts.of(facts).setting_names.items() if theirs in names}
    names |= {"level", "thresholds", "escalation"}  # of telemetry
    add({name: value for name, value in facts.items() if name not in names and not isinstance(value, dict | list)})
    return flat


@lru_cache(maxsize=100_000)
def is_reproducible(key: str, info: MetricInfo | None) -> bool:
    """Return False for keys of time, memory and cost, and of telemetry itself: by their declaration, else by their name."""
    family = families().get(family_name(key))
    is_time = TIME_NAME.fullmatch(key) is not None if info is None else info.unit in TIME_UNITS
    return not is_time and (family is None or family.reproducible)


def base_key(key: str) -> str:
    """Return the key whose history a key is: `policy/kl` for `policy/kl/ema`; else the key itself."""
    return next((key.removesuffix(f"/{suffix}") for suffix in ALL_SUFFIXES if key.endswith(f"/{suffix}")), key)


def is_sampled(key: str, info: RunInfo) -> bool:
    """Return True if a key is measured in some updates only, or is the history of such a key."""
    described = info.metrics.get(template_of(base_key(key), info.metrics))
    return described is not None and described.cost in SAMPLED_COSTS


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """Comparison of two runs of one configuration and seed.

    Attributes:
        first, second: their directories.
        seed: of both.
        equal_updates: number of updates before the difference, or of all that both have.
        update, env_step: position of the difference; None without a difference.
        key: the first key of that record that differs; `axes/...` for an axis, `histogram/...` for a histogram.
        values: of both runs; None if the key, or the record, is absent.
        keys: all keys of that record that differ.
        updates: records of each run.
    """

    first: str
    second: str
    seed: str
    equal_updates: int
    update: int | None
    env_step: int | None
    key: str
    values: tuple[Any, Any]
    keys: tuple[str, ...]
    updates: tuple[int, int]


def first_difference(first: ComparedRun, second: ComparedRun) -> FirstDifference:
    """Return the first record and key in which two journals differ, by exact values.

    Keys of time, memory and cost are left out. Sampled metrics and alarms are compared as long as both runs sampled the same updates: the
    time that sampling takes decides which. If levels or versions of telemetry differ, keys of only one run are left out.
    """
    places, updates = (first.place, second.place, first.seed), (len(first.updates), len(second.updates))
    recorders = [(Facts.of(run.info.facts).level, run.info.versions.get("esper-telemetry")) for run in (first, second)]
    keep_absent, sampled_alike, equal = recorders[0] == recorders[1], True, 0

    @cache
    def is_sampled_key(key: str) -> bool:
        return is_sampled(key, first.info) or is_sampled(key, second.info)

    def comparable(key: str) -> bool:
        key = key.removeprefix("histogram/")
        depends_on_samples = is_sampled_key(key) or family_name(key) == ALARMS_FAMILY.name
        described = first.info.describe(key) or second.info.describe(key)
        return is_reproducible(key, described) and (sampled_alike or not depends_on_samples)

    for left, right in zip(_records(first.place), _records(second.place), strict=False):
        if sampled_alike:
            sampled_alike = any(map(is_sampled_key, left.values)) == any(map(is_sampled_key, right.values))
        mine, other = _plain_values(left), _plain_values(right)
        differing = tuple(
            key
            for key in {**mine, **other}
            if not _same(mine.get(key), other.get(key)) and (keep_absent or (key in mine and key in other)) and comparable(key)
        )
        if differing:
            key, axes = differing[0], left.axes
            values = (mine.get(key), other.get(key))
            return FirstDifference(*places, equal, axes.update, axes.env_step, key, values, differing, updates)
        equal += 1
    return FirstDifference(*places, equal, None, None, "", (None, None), (), updates)


def _records(place: str) -> Iterator[Record]:
    """Yield the records of updates that ended, of two for one update the first."""
    last = -1
    for entry in entries(place):
        if isinstance(entry, Record) and not entry.partial and entry.axes.update > last:
            last = entry.axes.update
            yield entry


def _plain_values(record: Record) -> dict[str, Any]:
    axes = {name: getattr(record.axes, name) for name in ("update", "env_step", "gradient_step")}
    return {
        **{f"axes/{name}": value for name, value in axes.items()},
        **record.values,
        **{f"histogram/{key}": (*shape.edges, *shape.counts) for key, shape in record.histograms.items()},
    }


def _same(left: Any, right: Any) -> bool:
    """Return whether two numbers, or rows of numbers, are bit-equal: 0 and -0 are not."""
    if isinstance(left, tuple) and isinstance(right, tuple):
        return len(left) == len(right) and all(map(_same, left, right))
    if left is None or right is None or isinstance(left, tuple) or isinstance(right, tuple):
        return left is right
    return bool(left == right) and math.copysign(1, left) == math.copysign(1, right)
