"""The page that says what a run is: settings, facts, and where everything lies; Markdown."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping

from esper_telemetry.core.record import MetricInfo, RunInfo, template_of
from esper_telemetry.sinks.layout import FAMILIES, family_name, family_of
from esper_telemetry.sinks.text import flattened


def run_readme(run: RunInfo) -> str:
    """What a run is, for a person who opens its dashboard."""
    parts = [f"# {safe(run.name)}", _head(run), safe(run.notes)]
    parts += [_table("Settings", flattened(run.config)), _table("Facts", flattened(run.facts))]
    parts += [_table("Versions", run.versions), _questions(run)]
    return "\n\n".join(part for part in parts if part)


def metric_description(info: MetricInfo) -> str:
    """One metric for a tooltip: its name, what it answers, its unit, what is healthy, and what to try when it is not."""
    levels = {"Healthy": info.healthy, "Warning": info.warn, "Critical": info.critical}
    bounds = "; ".join(f"{name}: {safe(text)}" for name, text in levels.items() if text)
    parts = (
        f"**{safe(info.name[:1].upper() + info.name[1:])}.**" if info.name else "",
        safe(info.question),
        f"Unit: {safe(info.unit)}." if info.unit else "",
        f"{bounds}." if bounds else "",
        f"Not healthy? {safe(info.action)}" if info.action and bounds else "",
        safe(info.id),
    )
    return " ".join(part for part in parts if part)


def guide(keys: Iterable[str], run: RunInfo) -> str:
    """What these metrics answer, what is healthy and what to try otherwise, as a table; empty without any."""
    known = {template_of(key, run.metrics): run.describe(key) for key in keys}
    rows = [_guide_row(key, info) for key, info in known.items() if info is not None]
    head = ["| metric | what it answers | healthy | if not |", "|---|---|---|---|"]
    return "\n".join([*head, *rows]) if rows else ""


def _guide_row(key: str, info: MetricInfo) -> str:
    tried = info.action if info.healthy else ""
    return f"| **{safe(info.name or key)}** `{key}` | {safe(info.question)} | {safe(info.healthy)} | {safe(tried)} |"


def glossary(run: RunInfo) -> dict[str, str]:
    """By family, every metric that the run declares: what it answers and what is healthy; plain text, a line each."""
    families: dict[str, list[str]] = {}
    for key, info in run.metrics.items():
        healthy = f" Healthy: {info.healthy}." if info.healthy else ""
        line = f"{key} [{info.unit}]: {info.question}{healthy}"
        families.setdefault(re.sub(r"\W", "", family_name(key)), []).append(" ".join(line.split()))
    return {name: "\n".join(lines) for name, lines in families.items()}


def _head(run: RunInfo) -> str:
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.started))
    lines = [f"- run id: {safe(run.run_id)}", f"- started: {started}"]
    if run.tags:
        lines.append(f"- tags: {safe(', '.join(run.tags))}")
    if run.run_dir is not None:
        lines.append(f"- directory: `{run.run_dir}`; `journal.jsonl` in it holds every number of the run")
    lines.append("- x-axis: environment steps; `axis/update` and `axis/gradient_step` say where each lies")
    return "\n".join(lines)


def _table(title: str, rows: Mapping[str, object]) -> str:
    if not rows:
        return ""
    lines = [f"| {safe(name)} | {safe(str(value))} |" for name, value in rows.items()]
    return "\n".join([f"## {title}", "", "| name | value |", "|---|---|", *lines])


def _questions(run: RunInfo) -> str:
    """The families that the run declares, with the question that each answers."""
    declared = {family_name(key) for key in run.metrics}
    rows = {name: family_of(name).question for name in FAMILIES if name in declared}
    return _table("What the charts answer", rows)


def safe(text: str) -> str:
    """Text that cannot break out of a Markdown table or become HTML."""
    escaped = re.sub(r"([\\`*_|\[\]])", r"\\\1", " ".join(text.split()))
    return escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
