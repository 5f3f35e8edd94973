"""Faults and scores as tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.table import Table

from esper_telemetry.lab.faults.catalogue import FAULTS

Result = Mapping[str, Any]


def fault_entries() -> list[dict[str, Any]]:
    """All faults as plain data."""
    return [
        {
            "name": fault.name,
            "family": fault.family or fault.name,
            "what": fault.what,
            "dose": fault.dose,
            "doses": list(fault.doses),
            "needs": [(need.__doc__ or "").rstrip(".") for need in fault.needs],
            "alarms": list(fault.accepts),
            "bound": fault.bound,
        }
        for fault in FAULTS
    ]


def fault_table() -> Table:
    """All faults."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("fault", "what it does", "dose", "needs", "alarms that name it", "within"):
        table.add_column(name, overflow="fold", no_wrap=name in ("fault", "dose"))
    for entry in fault_entries():
        low, high = entry["doses"]
        dose = f"{entry['dose']:g} ({low:g} to {high:g})" if low < high else ""
        table.add_row(
            entry["name"],
            entry["what"],
            dose,
            "; ".join(entry["needs"]),
            ", ".join(entry["alarms"]),
            str(entry["bound"]),
        )
    return table


def result_tables(result: Result, title: str) -> list[Table]:
    """A score: by fault, then as a whole beside the baselines."""
    tables = [judges_table(result, title)]
    if result["per_fault"]:
        tables.insert(0, per_fault_table(result))
    return tables


def per_fault_table(result: Result) -> Table:
    """Recall, lag and causes by fault."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in (
        "fault",
        "runs",
        "in time",
        "in 20",
        "any",
        "lag",
        "lead",
        "cause",
        "alarms that named it",
        "put down to",
    ):
        table.add_column(name, overflow="fold", justify="right" if name in NUMERIC else "left")
    for name, row in result["per_fault"].items():
        table.add_row(
            name,
            str(row["runs"]),
            *(percent(row[key]) for key in ("strict_recall", "recall", "lenient_recall")),
            number(row["median_lag"]),
            number(row["median_lead"]),
            percent(row["root_cause_accuracy"]),
            listed(row["hits"]),
            listed(row["causes"]),
        )
    return table


NUMERIC = ("runs", "in time", "in 20", "any", "lag", "lead", "cause")


def judges_table(result: Result, title: str) -> Table:
    """The detectors beside the baselines."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    heads = ("", "runs", "in time", "in 20", "any", "lag", "cause", "false", "healthy updates", "false per 100", "area")
    for name in heads:
        table.add_column(name, justify="left" if not name else "right")
    for name, row in {"detectors": result, **result["baselines"]}.items():
        table.add_row(
            name,
            str(row["runs"]),
            *(percent(row[key]) for key in ("strict_recall", "recall", "lenient_recall")),
            number(row["median_lag"]),
            percent(row["root_cause_accuracy"]),
            str(row["false_alarms"]),
            str(row["healthy_updates"]),
            number(row["false_alarms_per_100"]),
            number(row.get("partial_auc")),
        )
    table.caption = caption(result)
    table.caption_justify = "left"
    return table


def caption(result: Result) -> str:
    """What the intervals are, and which alarms were false."""
    names = {"strict_recall": "in time", "false_alarms_per_100": "false per 100"}
    parts = [f"{names[key]} {low:.3f} to {high:.3f} (95 %)" for key, (low, high) in result["intervals"].items()]
    if result["false_by_type"]:
        parts.append(f"false: {listed(result['false_by_type'])}")
    return "; ".join(parts)


def percent(value: float | None) -> str:
    """A share."""
    return "" if value is None else f"{100 * value:.0f} %"


def number(value: float | None) -> str:
    """A number with as many digits as matter."""
    return "" if value is None else f"{value:.3g}"


def listed(counts: Mapping[str, int]) -> str:
    """Types and how often."""
    return ", ".join(f"{kind or '?'} {count}" for kind, count in counts.items())


def fault_markdown() -> str:
    """All faults as a table for the documentation."""
    rows = ["| fault | what it does | dose | needs | alarms that name it | within |", "|---|---|---|---|---|---|"]
    for entry in fault_entries():
        low, high = entry["doses"]
        dose = f"{entry['dose']:g} ({low:g} to {high:g}, as `{entry['family']}`)" if low < high else ""
        alarms = ", ".join(f"`{alarm}`" for alarm in entry["alarms"])
        needs = "; ".join(entry["needs"])
        rows.append(f"| `{entry['name']}` | {entry['what']} | {dose} | {needs} | {alarms} | {entry['bound']} |")
    return "\n".join(rows) + "\n"
