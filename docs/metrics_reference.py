"""The page docs/metrics.md, from the declarations in the code."""

from __future__ import annotations

from collections.abc import Sequence

from esper_telemetry.alarms.metric_entries import PRIORITIES, MetricEntry, metric_entries
from esper_telemetry.alarms.thresholds import alarm_rules
from esper_telemetry.core.metric import families, family_name
from esper_telemetry.views.metrics_page import entry_text

INTRODUCTION = """\
# What every number means

This page is written by `python docs/glossary.py` from the declarations in the code; `esper-telemetry metrics KEY` prints one entry.

**From a chart to an answer.** A chart's title is the metric's key, the same in TensorBoard, W&B, MLflow and the journal. Find it here
(search for the key), read what it answers, what is normal, and which fault it shows when it is not, with *what to try*. Or begin with [the
symptoms](#from-a-symptom-to-a-cause) below.

**How to read a key.** The first part is the family, the last the statistic. `_max`, `_min`: over the minibatches of an update;
`_first`: before the first optimizer step; `_last`: over the last epoch; `/max`, `/min`, `/absmax`: over single samples; `_nonfinite`:
how many inputs were NaN or infinite and left out. Names in braces are replaced: `{head}` by a part of the action, `{group}` by a
part of the network, `{layer}` by a parameter.

**A missing value is not a fault.** A number that is undefined (no episode ended, nothing varied, it was not sampled) is absent, never 0.
Each entry says when.

**What is normal** is given as bounds with their source. Published bounds name the paper; *measured* ones come from healthy and broken
runs; a *heuristic* is our judgement. Without bounds, compare with the run's own history or with another run.

**Words.** An *update* learns from one *rollout*: some steps of all environments, played by one policy. It goes through these rows a few
times (*epochs*), each time in *minibatches*; every minibatch ends in one step of the *optimizer*. The *actor* is the part of the network
that chooses actions, by one *head* for each part of an action; the *critic* predicts the *return*, the discounted sum of rewards to come.
Entropies and divergences are in *nats*, natural logarithms; a *decade* is a factor of ten.

**An entry, line by line.** First the bounds; then what it means when they are left, and *what to try*, the likeliest first; alarms are
named in `code`. *Made by* names the function, the field of its group, the arguments or keys that it is computed from, and the modules
that call the function, all below `esper_telemetry`. *For* names who needs the metric and where it is shown. Small print follows: the
number of the metric (`TELE-101`), its unit and range, how an update's minibatches become one number, when it is measured, how much it
matters, and the release that added it. `critical` alone shows a run to be broken, `high` is a headline, `detail` supports other metrics.

**Who needs it** follows from what reads it. The *operator* of a run sees it in a view, or it is a headline. *Automation* reads it for
alarms and verdicts. A *developer* finds faults by its bounds and alarms, or at level debug. A *researcher* compares runs by every metric
that does not depend on the machine.

**Numbers** of metrics are public and never change. Values are float64 from the reduction to the journal and the backends; TensorBoard
stores float32. Values do not have defaults: an undefined value is absent.

**Levels**: `minimal` has one headline per family and everything that alone shows a run to be broken; `normal` is the default; `debug`
adds every layer, histograms of gradients and evidence. **Costs**: *free* is in every record; *sampled* is measured in one update of
several, as many as the budget allows (2 % of the wall time; `Telemetry(budget=...)`, `--telemetry-budget`).
"""


def page() -> str:
    """Return the whole page, Markdown."""
    entries = metric_entries()
    names = [*families(), *sorted({_family(entry) for entry in entries} - families().keys())]
    ranked = sorted(entries, key=lambda entry: (PRIORITIES.index(entry.priority), entry.metric.number))
    chapters = [(name, [entry for entry in ranked if _family(entry) == name]) for name in names]
    parts = [INTRODUCTION, _contents(chapters), _symptoms(), *(_chapter(*chapter) for chapter in chapters if chapter[1])]
    return "\n".join(parts).rstrip() + "\n"


def _contents(chapters: Sequence[tuple[str, Sequence[MetricEntry]]]) -> str:
    rows = [f"- [{entries[0].category}](#{_anchor(entries[0].category)}), {len(entries)}" for _, entries in chapters if entries]
    return "\n".join(["## Contents", "", *rows, ""])


def _symptoms() -> str:
    """Return the table of all alarms in causal order."""
    head = [
        "## From a symptom to a cause",
        "",
        "The first one that applies is usually the cause of the others.",
        "",
        "| what has happened | look at | what to try |",
        "|---|---|---|",
    ]
    rows = []
    for alarm in alarm_rules():
        keys = ", ".join(f"[`{key}`](#{_anchor(key)})" for key in alarm.inputs[:3])
        meaning, action = (text.replace("|", "\\|") for text in (alarm.meaning, alarm.action))
        rows.append(f"| **{alarm.type}**: {meaning} | {keys} | {action} |")
    return "\n".join([*head, *rows, ""])


def _chapter(name: str, entries: Sequence[MetricEntry]) -> str:
    family = families().get(name)
    head = [f"## {entries[0].category}", ""]
    if family:
        head += [family.about, ""]
    if family and family.first:
        head[-1:] = ["", "Look at these first: " + ", ".join(f"[`{key}`](#{_anchor(key)})" for key in family.first) + ".", ""]
    return "\n".join([*head, *map(entry_text, entries)])


def _family(entry: MetricEntry) -> str:
    return family_name(entry.metric.key)


def _anchor(heading: str) -> str:
    """Return GitHub's anchor of a heading: lower case, punctuation dropped, blanks to hyphens."""
    return "".join(c for c in heading.lower() if c.isalnum() or c in " -_").replace(" ", "-")
