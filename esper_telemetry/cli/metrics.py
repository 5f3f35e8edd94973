"""`esper-telemetry metrics`: print the catalogue of metrics, as text or as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from shutil import get_terminal_size
from textwrap import wrap
from typing import TYPE_CHECKING, Final

from esper_telemetry.alarms.metric_entries import MetricEntry, metric_entries
from esper_telemetry.cli.arguments import WrongUse
from esper_telemetry.core.lazy import collection_paused
from esper_telemetry.core.messages import did_you_mean
from esper_telemetry.core.record import template_of
from esper_telemetry.sinks.console import make_console

if TYPE_CHECKING:
    from esper_telemetry.cli.main import Metrics

WIDTH: Final = 200
"""Width of the table in a pipe or a file, unless COLUMNS gives another."""
SHARES: Final = {"unit": 2, "what it tells": 5, "normal": 2, "warning": 2, "critical": 2, "what to try": 5}
"""Titles of the columns after the key, and the relative width of each."""
MIN_COLUMN_WIDTH: Final = 8
GAP: Final = "  "


@collection_paused()
def metrics(options: Metrics) -> int:
    """Print every declared metric, or the matching ones."""
    entries = matching_entries(options.key)
    if len(entries) > 1 and not options.json:
        print("\n".join(_table(entries, get_terminal_size((WIDTH, 0)).columns)))
        return 0
    # imported here: rich takes 80 ms of processor time, and the table does not need it
    from rich.markdown import Markdown

    from esper_telemetry.views.metrics_page import entry_text, entry_values

    if options.json:
        print(json.dumps([entry_values(entry) for entry in entries], indent=1))
    else:
        make_console(piped_width=WIDTH, markup=False).print(Markdown(entry_text(entries[0])))
    return 0


def matching_entries(text: str) -> Sequence[MetricEntry]:
    """Return the entry of a key or of its template, else all that begin with the text, else all that contain it.

    The text is searched for in keys and in names. Keys that end with it as a segment come first. Raises WrongUse without a match.
    """
    entries = {entry.metric.key: entry for entry in metric_entries()}
    template = template_of(text, entries)
    if text in entries or template in entries:
        return [entries.get(text) or entries[template]]
    beginning = [entry for key, entry in entries.items() if key.startswith(text)]
    if beginning:
        return beginning
    containing = [entry for key, entry in entries.items() if text in key or text.lower() in entry.name.lower()]
    if not containing:
        segments = {key.rpartition("/")[2]: key for key in entries}
        near = did_you_mean(text, entries) or did_you_mean(text, segments)
        raise WrongUse(f"there is no metric {text!r}{near}")
    return sorted(containing, key=lambda entry: not entry.metric.key.endswith(f"/{text}"))


def _table(entries: Sequence[MetricEntry], width: int) -> Iterator[str]:
    """Yield the lines of the table; a table of rich would take as much processor time as the rest of the command."""
    key_width = max(len(entry.metric.key) for entry in entries)
    free = width - key_width - len(GAP) * len(SHARES)
    widths = [key_width, *(max(MIN_COLUMN_WIDTH, free * share // sum(SHARES.values())) for share in SHARES.values())]
    rows: list[tuple[str, ...]] = [("key", *SHARES), tuple("─" * columns for columns in widths)]
    for entry in entries:
        metric = entry.metric
        texts = (metric.unit, metric.question, metric.healthy, metric.warn, metric.critical, entry.action)
        rows.append((metric.key, *texts))
    for row in rows:
        cells = [
            [text] if len(text) <= columns else wrap(text, columns) for text, columns in zip(row, widths, strict=True)
        ]
        for parts in zip_longest(*cells, fillvalue=""):
            yield GAP.join(part.ljust(columns) for part, columns in zip(parts, widths, strict=True)).rstrip()
