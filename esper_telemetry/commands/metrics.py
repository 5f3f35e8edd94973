"""`esper-telemetry metrics`: the registry in the terminal or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markdown import Markdown
from rich.table import Column, Table

from esper_telemetry.commands.mistakes import WrongUse
from esper_telemetry.record import template_of
from esper_telemetry.registry import Entry, entry_text, registry

if TYPE_CHECKING:
    from esper_telemetry.cli import Metrics

WIDTH = 200
"""Of the table where nobody looks: a pipe or a file."""


def metrics(options: Metrics) -> int:
    """Prints every declared metric, or those asked for."""
    found = _asked(options.key)
    if options.json:
        print(json.dumps([entry.as_dict() for entry in found], indent=1))
    elif len(found) == 1:
        _console().print(Markdown(entry_text(found[0])))
    else:
        _console().print(_table(found))
    return 0


def _asked(key: str) -> Sequence[Entry]:
    """The entry of a key or of the template it was made from; otherwise all that begin like it."""
    entries = {entry.metric.key: entry for entry in registry()}
    template = template_of(key, entries)
    if key in entries or template in entries:
        return [entries.get(key) or entries[template]]
    found = [entry for name, entry in entries.items() if name.startswith(key)]
    if not found:
        near = get_close_matches(key, entries, 3, 0.5)
        raise WrongUse(f"there is no metric {key!r}" + (f"; did you mean {' or '.join(near)}?" if near else ""))
    return found


def _table(entries: Sequence[Entry]) -> Table:
    shares = {"unit": 2, "what it tells": 5, "normal": 2, "warning": 2, "critical": 2, "what to try": 5}
    columns = [Column(title, ratio=share) for title, share in shares.items()]
    table = Table(Column("key", no_wrap=True), *columns, expand=True)
    for entry in entries:
        metric = entry.metric
        texts = (metric.unit, metric.question, metric.healthy, metric.warn, metric.critical, entry.action)
        table.add_row(metric.key, *texts)
    return table


def _console() -> Console:
    return Console(width=None if Console().is_terminal else WIDTH, markup=False)
