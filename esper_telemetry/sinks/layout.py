"""A dashboard from the keys that were seen: sections by question, charts of numbers that share an axis."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from esper_telemetry.record import RunInfo, template_of
from esper_telemetry.sinks.families import FAMILIES, family_name, family_of, importance

STATISTICS = frozenset(
    ["mean", "std", "min", "max", "first", "last", "absmax", "absmean", "median", "rms", "skew", "kurtosis"]
    + [f"p{percent:02d}" for percent in range(1, 100)]
)
"""Names that say which statistic of the thing before them a key is."""


class Chart(NamedTuple):
    """One chart: its title and the keys drawn in it, all in one unit."""

    title: str
    keys: tuple[str, ...]


class Section(NamedTuple):
    """The charts that answer one question."""

    question: str
    charts: tuple[Chart, ...]


def sections(keys: Iterable[str], run: RunInfo) -> list[Section]:
    """The dashboard: a section per family, ours by importance and then yours; each key stands in exactly one chart."""
    families: dict[str, list[str]] = defaultdict(list)
    for key in sorted(keys):
        families[family_name(key)].append(key)
    ordered = sorted(families, key=lambda name: (name not in FAMILIES, importance(name), name))
    return [Section(family_of(name).question, tuple(charts(families[name], run))) for name in ordered]


def charts(keys: Sequence[str], run: RunInfo) -> list[Chart]:
    """The charts of one family: keys about the same thing together, leftovers of one unit together."""
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for key in keys:
        groups[subject(key, run.metrics), unit(key, run)].append(key)
    return [
        Chart(f"{about} [{measured}]" if measured else about, tuple(members))
        for (about, measured), members in sorted(_gathered(groups).items())
    ]


def subject(key: str, templates: Mapping[str, object]) -> str:
    """What a key is about: `policy/kl` of `policy/kl_max`, `ret` of `ret/std`, the template of a labelled key."""
    template = template_of(key, templates)
    if template != key:
        return template
    path, _, last = key.rpartition("/")
    stem = last.split("_")[0]
    return path if path and (stem in STATISTICS or path.count("/")) else f"{path}/{stem}".lstrip("/")


def unit(key: str, run: RunInfo) -> str:
    """The declared unit of a key, empty where it is not declared."""
    described = run.describe(key)
    return described.unit if described else ""


def _gathered(groups: Mapping[tuple[str, str], list[str]]) -> dict[tuple[str, str], list[str]]:
    """The groups, with those of a single key joined when they have the same unit."""
    gathered: dict[tuple[str, str], list[str]] = defaultdict(list)
    for (about, measured), members in groups.items():
        family = family_name(about)
        alone = len(members) == 1 and measured
        gathered[f"{family}: others" if alone else about, measured].extend(members)
    return {_named(place, members): members for place, members in gathered.items()}


def _named(place: tuple[str, str], members: Sequence[str]) -> tuple[str, str]:
    """A chart of a single key is called by that key."""
    return (members[0], place[1]) if len(members) == 1 else place
