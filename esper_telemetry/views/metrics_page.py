"""The registry as a page for people: `docs/metrics.md`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from esper_telemetry.alarms.registry import alarm_rules
from esper_telemetry.alarms.rule import AlarmRule
from esper_telemetry.core.catalogue import PRIORITIES, MetricEntry, registry
from esper_telemetry.core.families import CHAPTERS, chapter_of
from esper_telemetry.history.derive import ALL_SUFFIXES

INTRODUCTION = """\
# What every number means

This page is written by `python docs/glossary.py` from the declarations in the code; `esper-telemetry metrics KEY` prints one entry.

**From a chart to an answer.** A chart's title is the metric's key, the same in TensorBoard, W&B, MLflow and the journal. Find it here
(search for the key), read what it answers, what is normal, and which fault it shows when it is not, with *what to try*. Or begin with [the
symptoms](#from-a-symptom-to-a-cause) below.

**How to read a key.** The first part is the family, the last the statistic. `_max`, `_min`: over the minibatches of an update;
`_first`: before the first optimizer step; `_last`: over the last epoch; `/max`, `/min`, `/absmax`: over single samples; `_nonfinite`:
how many inputs were NaN or infinite and left out. What stands in braces is replaced: `{head}` by a part of the action, `{group}` by a
part of the network, `{layer}` by a parameter.

**A missing value is not a fault.** A number that is undefined (no episode ended, nothing varied, nobody sampled it) is absent, never 0.
Each entry says when.

**What is normal** is given as bounds with their source. Published bounds name the paper; *measured* ones come from healthy and broken
runs; a *heuristic* is our judgement. Where no bounds are given, compare with the run's own history or with another run.

**Words.** An *update* learns from one *rollout*: some steps of all environments, played by one policy. It goes through these rows a few
times (*epochs*), each time in *minibatches*; every minibatch ends in one step of the *optimizer*. The *actor* is the part of the network
that chooses actions, by one *head* for each part of an action; the *critic* predicts the *return*, the discounted sum of rewards to come.
Entropies and divergences are in *nats*, natural logarithms; a *decade* is a factor of ten.

**An entry, line by line.** First the bounds; then what it means when they are left, and *what to try*, the likeliest first; alarms are
named in `code`. Then comes small print: the number of the metric (`TELE-101`), its unit and range, how an update's minibatches
become one number, and how much it matters: `critical` decides whether a run is wrong for certain, `high` is a headline, `detail` is read
beside others. The last line names tests of this project that check the number.

**Levels**: `minimal` has one headline per family and everything that tells a broken run for certain; `normal` is the default; `debug`
adds every layer, histograms of gradients and evidence. **Costs**: *free* is in every record; *sampled* is measured in one update of
several, as many as the budget allows (2 % of the wall time; `Telemetry(budget=...)`, `--telemetry-budget`).
"""

UNBOUNDED = "no fixed bounds: compare with its own history"
COSTS = {
    "free": "every update",
    "update": "one pass per update",
    "sampled": "sampled updates",
    "debug": "debug only",
}


def page() -> str:
    """The whole page, Markdown."""
    found = registry()
    parts = [INTRODUCTION, _contents(found), _symptoms(), *_chapters(found)]
    return "\n".join(parts).rstrip() + "\n"


def entry_text(entry: MetricEntry) -> str:
    """One entry, Markdown."""
    metric = entry.metric
    lines = [f"### `{metric.key}`", "", f"**{_sentence(entry.name)}.** {metric.question}", ""]
    lines += [f"- {line}" for line in _facts(entry)]
    return "\n".join(lines) + "\n"


def _facts(entry: MetricEntry) -> Iterator[str]:
    metric = entry.metric
    bounds = {"normal": metric.healthy, "warning": metric.warn, "critical": metric.critical}
    said = "; ".join(f"**{name}** {text}" for name, text in bounds.items() if text) or UNBOUNDED
    yield said + (f" ({metric.source})" if metric.source else "")
    yield from _when_not(entry)
    if metric.undefined:
        yield f"absent when: {metric.undefined}"
    if entry.series:
        names = (
            "every ending"
            if len(entry.series) >= len(ALL_SUFFIXES)
            else ", ".join(f"`/{name}`" for name in entry.series)
        )
        yield f"its [history](#histories), under the same key with: {names}"
    yield _small(entry)
    if entry.verified:
        yield "verified by: " + ", ".join(f"`{test}`" for test in entry.verified)


def _when_not(entry: MetricEntry) -> Iterator[str]:
    """What it shows when it is not normal, and what to try; of alarms that other metrics decide the names alone."""
    deciding = [alarm for alarm in entry.alarms if alarm.inputs[0] == entry.metric.key] or list(entry.alarms[:1])
    for alarm in deciding:
        yield f"when it is not (`{alarm.type}`): {alarm.meaning} **What to try:** {alarm.action}"
    if not entry.alarms and entry.action:
        yield f"when it is not: **what to try:** {entry.action}"
    others = [alarm for alarm in entry.alarms if alarm not in deciding]
    if others:
        yield "also a sign of: " + "; ".join(f"`{alarm.type}` ({alarm.meaning.rstrip('.')})" for alarm in others)


def _small(entry: MetricEntry) -> str:
    """What a reader seldom needs, in one line."""
    metric = entry.metric
    parts = [metric.id, f"unit: {metric.unit}", _range(entry), entry.reduction, f"level {metric.level.name.lower()}"]
    parts += [COSTS[metric.cost], f"priority {entry.priority}"]
    if form := _unusual(entry.sinks):
        parts.append(form)
    return " · ".join(part for part in parts if part)


def _range(entry: MetricEntry) -> str:
    low, high = entry.metric.low, entry.metric.high
    if low is None and high is None:
        return ""
    if high is None:
        return f"at least {low:g}"
    return f"{low:g} to {high:g}" if low is not None else f"at most {high:g}"


def _unusual(sinks: dict[str, str]) -> str:
    """Where a backend carries something other than a scalar, or not always."""
    forms = {form for sink, form in sinks.items() if sink not in ("journal", "console")}
    return "" if forms == {"scalar"} else "in dashboards: " + ", ".join(sorted(forms))


def _contents(found: Sequence[MetricEntry]) -> str:
    counts = {chapter_of(key).title: sum(_family(e) == key for e in found) for key in CHAPTERS}
    rows = [f"- [{title}](#{_anchor(title)}), {count}" for title, count in counts.items() if count]
    return "\n".join(["## Contents", "", *rows, ""])


def _symptoms() -> str:
    """Every known way to go wrong, in causal order."""
    head = [
        "## From a symptom to a cause",
        "",
        "The first of these that applies tends to be the cause of the others.",
        "",
    ]
    table = ["| what has happened | look at | what to try |", "|---|---|---|"]
    return "\n".join([*head, *table, *map(_symptom, alarm_rules()), ""])


def _symptom(alarm: AlarmRule) -> str:
    keys = ", ".join(f"[`{key}`](#{_anchor(key)})" for key in alarm.inputs[:3])
    return f"| **{alarm.type}**: {_cell(alarm.meaning)} | {keys} | {_cell(alarm.action)} |"


def _chapters(found: Sequence[MetricEntry]) -> Iterator[str]:
    for family, chapter in CHAPTERS.items():
        members = sorted((entry for entry in found if _family(entry) == family), key=_rank)
        if members:
            yield _chapter(chapter.title, chapter.about, chapter.first, members)
    others = [entry for entry in found if _family(entry) not in CHAPTERS]
    if others:
        yield _chapter("Others", "", (), others)


def _chapter(title: str, about: str, first: Iterable[str], members: Iterable[MetricEntry]) -> str:
    look = ", ".join(f"[`{key}`](#{_anchor(key)})" for key in first)
    head = [f"## {title}", "", about, *(["", f"Look at these first: {look}."] if look else []), ""]
    return "\n".join([*head, *map(entry_text, members)])


def _rank(entry: MetricEntry) -> tuple[int, int]:
    return PRIORITIES.index(entry.priority), entry.metric.number


def _family(entry: MetricEntry) -> str:
    return entry.metric.key.partition("/")[0]


def _sentence(name: str) -> str:
    return name[:1].upper() + name[1:]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _anchor(heading: str) -> str:
    """As GitHub makes them: lower case, punctuation dropped, blanks to hyphens."""
    kept = "".join(c for c in heading.lower() if c.isalnum() or c in " -_")
    return kept.replace(" ", "-")
