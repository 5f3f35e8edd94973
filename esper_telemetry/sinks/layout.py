"""A dashboard from the keys that were seen: sections by question, charts of numbers that share an axis, headlines first.

Families of metrics, by the first segment of their keys: what each is for, its x-axis, and who goes first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from esper_telemetry.core.record import MetricInfo, RunInfo, template_of


class Family(NamedTuple):
    """One family: the question it answers in a dashboard, and the axis its charts are drawn over."""

    question: str
    axis: str = "axis/update"


FAMILIES = {
    "alarm": Family("Is anything wrong?"),
    "episode": Family("Is it learning?", axis="axis/env_step"),
    "eval": Family("How good is it without exploring?", axis="axis/env_step"),
    "policy": Family("Is the policy moving too far?"),
    "value": Family("Is the critic useful?"),
    "grad": Family("Who owns the gradient?"),
    "integrity": Family("Does the update compute what it should?"),
    "adv": Family("Do the advantages carry a signal?"),
    "loss": Family("What is being minimised?"),
    "numerics": Family("Are all numbers finite?"),
    "lstm": Family("Does memory work?"),
    "opt": Family("Are the optimizer's steps the right size?"),
    "ret": Family("What must the critic predict?"),
    "reward": Family("What does the environment pay?", axis="axis/env_step"),
    "obs": Family("Does the policy see anything change?"),
    "repr": Family("Can the network still learn?"),
    "env": Family("What are the grown networks worth?", axis="axis/env_step"),
    "seed": Family("Do seeds take root?"),
    "host": Family("How well do the hosts learn?"),
    "norm": Family("Do the normalisers keep up?"),
    "buffer": Family("How old is the data?"),
    "task": Family("How does the task go?", axis="axis/env_step"),
    "train": Family("How fast is it?", axis="axis/env_step"),
    "perf": Family("Where does the time go?", axis="axis/env_step"),
    "telemetry": Family("How is telemetry itself?"),
}
"""The bundled families, most important first."""


def family_name(key: str) -> str:
    """The first segment of a key."""
    return key.partition("/")[0]


def family_of(key: str) -> Family:
    """The family of a key; one made for it where the name is not ours."""
    name = family_name(key)
    return FAMILIES.get(name) or Family(f"Your own: {name}")


def importance(key: str) -> int:
    """Rank of the key's family, 0 first; a family that is not ours was added on purpose, so it leads."""
    return RANKS.get(family_name(key), 0)


RANKS = {name: rank for rank, name in enumerate(FAMILIES, start=1)}


STATISTICS = frozenset(
    ["mean", "std", "min", "max", "first", "last", "absmax", "absmean", "median", "rms", "skew", "kurtosis"]
    + [f"p{percent:02d}" for percent in range(1, 100)]
)
"""Names that say which statistic of the thing before them a key is."""

PRIORITIES: Final = ("critical", "high", "normal", "", "detail")
"""How much a key matters, most first; what nobody has judged stands before details."""
UNDESCRIBED: Final = MetricInfo(unit="", question="")


class Chart(NamedTuple):
    """One chart: its title and the keys drawn in it, all in one unit."""

    title: str
    keys: tuple[str, ...]


class Section(NamedTuple):
    """The charts that answer one question, what one looks at first in front."""

    family: str
    question: str
    charts: tuple[Chart, ...]


class PanelPlace(NamedTuple):
    """Keys with the same one share a chart: what they are about, and what they must have in common to share an axis.

    Attributes:
        headline: the key itself where it is one, as it has a chart of its own.
        about: what the numbers are about; empty for leftovers.
        unit, low, high: how they are measured.
    """

    headline: str
    about: str
    unit: str
    low: float | None
    high: float | None


def sections(keys: Iterable[str], run: RunInfo) -> list[Section]:
    """The dashboard: a section per family, ours by importance and then yours; each key stands in exactly one chart."""
    families: dict[str, list[str]] = defaultdict(list)
    for key in sorted(keys):
        families[family_name(key)].append(key)
    ordered = sorted(families, key=lambda name: (name not in FAMILIES, importance(name), name))
    return [Section(name, family_of(name).question, tuple(charts(families[name], run))) for name in ordered]


def charts(keys: Sequence[str], run: RunInfo) -> list[Chart]:
    """The charts of one family: each headline by itself, keys about the same thing together, leftovers of one bounded scale together."""
    groups: dict[PanelPlace, list[str]] = defaultdict(list)
    for key in keys:
        groups[_place(key, run)].append(key)
    ranks = {key: rank for rank, key in enumerate(run.metrics)}
    drawn = [(min(_rank(key, run, ranks) for key in members), place, members) for place, members in _gathered(groups)]
    return [Chart(_title(place, members, run), tuple(members)) for _, place, members in sorted(drawn, key=_order)]


def _order(drawn: tuple[tuple[int, int, int], PanelPlace, list[str]]) -> tuple[tuple[int, int, int], list[str]]:
    return drawn[0], drawn[2]


def _place(key: str, run: RunInfo) -> PanelPlace:
    info = described(key, run)
    headline = template_of(key, run.metrics) if info.headline else ""
    return PanelPlace(headline, headline or subject(key, run.metrics), info.unit, info.low, info.high)


def described(key: str, run: RunInfo) -> MetricInfo:
    """What the run says of a key; nothing where it does not know it."""
    return run.describe(key) or UNDESCRIBED


def subject(key: str, templates: Mapping[str, object]) -> str:
    """What a key is about: `policy/kl` of `policy/kl_max`, `ret` of `ret/std`, the template of a labelled key."""
    template = template_of(key, templates)
    if template != key:
        return template
    path, _, last = key.rpartition("/")
    stem = last.split("_")[0]
    return path if path and (stem in STATISTICS or path.count("/")) else f"{path}/{stem}".lstrip("/")


def _rank(key: str, run: RunInfo, ranks: Mapping[str, int]) -> tuple[int, int, int]:
    """Headlines in their order, then by priority, then as the registry has them."""
    info = described(key, run)
    priority = PRIORITIES.index(info.priority) if info.priority in PRIORITIES else PRIORITIES.index("")
    place = ranks.get(template_of(key, run.metrics), len(ranks))
    return info.headline or len(ranks) + 1, priority, place


def _gathered(groups: Mapping[PanelPlace, list[str]]) -> Iterator[tuple[PanelPlace, list[str]]]:
    """The groups, with those of a single key joined when they have the same scale from one bound to another; headlines stay alone."""
    leftovers: dict[PanelPlace, list[str]] = defaultdict(list)
    for place, members in groups.items():
        if len(members) == 1 and not place.headline and None not in (place.low, place.high):
            leftovers[place._replace(about="")].extend(members)
        else:
            yield place, members
    yield from leftovers.items()


def _title(place: PanelPlace, keys: Sequence[str], run: RunInfo) -> str:
    """What is drawn, in words where they are short, and the unit."""
    words = _words(place.about, keys, run)
    return f"{words} [{place.unit}]" if place.unit.strip("1") else words


def _words(about: str, keys: Sequence[str], run: RunInfo) -> str:
    """One metric by name and key, labelled ones by the name of their template, others by what they are about or by all their keys."""
    names = {described(key, run).name for key in keys}
    if len(keys) == 1:
        return f"{_capital(*names)} ({keys[0]})" if names != {""} else keys[0]
    if about in run.metrics and len(names) == 1 and names != {""}:
        return f"{_capital(*names)} ({about})"
    if about:
        left_over = about in run.metrics and about not in keys and "{" not in about
        return f"More of {about}" if left_over else about
    return f"{family_name(keys[0])}: {', '.join(key.partition('/')[2] for key in keys)}"


def _capital(name: str) -> str:
    return name[:1].upper() + name[1:]
