"""The results file docs/benchmarks.json, and the page made from it: `python benchmarks/results.py` writes the page.

Every benchmark replaces the rows of its tables with `save`. A table names the machine, date and command of its rows.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from operator import itemgetter
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "docs" / "benchmarks.json"
PAGE = FILE.with_suffix(".md")


@dataclass(frozen=True)
class Row:
    """One line of a table."""

    what: str
    ours: str
    others: str = ""
    goal: str = ""


def save(key: str, rows: Sequence[Row], *, file: Path = FILE) -> None:
    """Replace the rows of the table with that key; rows of the same machine and day stay, unless `what` and `others` are equal.

    A row without a goal keeps the goal of the row that it replaces.

    Raises KeyError if the table does not exist.
    """
    contents = json.loads(file.read_text(encoding="utf-8"))
    tables = {table["key"]: table for section in contents["sections"] for table in section["tables"]}
    table = tables[key]
    measured = f"{machine()}, {date.today():%-d %B %Y}"
    before = table["rows"] if table["measured"] == measured else []
    goals = {(row["what"], row["others"]): row["goal"] for row in table["rows"]}
    new = {key: asdict(row) | {"goal": row.goal or goals.get(key, "")} for row in rows for key in [(row.what, row.others)]}
    table["rows"] = [*(row for row in before if (row["what"], row["others"]) not in new), *new.values()]
    table["measured"] = measured
    file.write_text(json.dumps(contents, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    write_page()


def machine() -> str:
    """Return the processor and its cores."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())
    return f"{model}, {os.cpu_count() or 1} cores"


def page(contents: Any) -> str:
    """Return the page."""
    parts = [contents["head"]]
    for section in contents["sections"]:
        parts.append(f"## {section['title']}")
        for table in filter(itemgetter("rows"), section["tables"]):
            command = f"`{table['command']}`" if table["command"] else ""
            parts.append(". ".join(part for part in (table["about"], ", ".join(filter(None, (table["measured"], command)))) if part) + ".")
            lines = [f"| what | ours | {table['others']} | goal |", "|---|---|---|---|"]
            lines += [f"| {row['what']} | {row['ours']} | {row['others']} | {row['goal']} |" for row in table["rows"]]
            parts += ["\n".join(lines), *([table["note"]] if table["note"] else [])]
    return "\n\n".join(parts) + "\n"


def write_page() -> None:
    """Write the page from the file."""
    PAGE.write_text(page(json.loads(FILE.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    write_page()
    sys.stdout.write(f"wrote {PAGE}\n")
