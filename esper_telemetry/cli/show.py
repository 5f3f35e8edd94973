"""`watch`, `report`, `compare` and `metrics`: runs live in the terminal, as a page, or in comparison, and the catalogue of metrics.

A command imports the views that it shows when it runs, because each needs other packages.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from shutil import get_terminal_size
from textwrap import wrap
from typing import TYPE_CHECKING, Final

from esper_telemetry.alarms.metric_entries import MetricEntry, metric_entries
from esper_telemetry.cli.arguments import WrongUse, echo, output_path, without_warnings, wrong_use
from esper_telemetry.core.files import replace_file, write_output
from esper_telemetry.core.lazy import collection_paused
from esper_telemetry.core.messages import did_you_mean
from esper_telemetry.core.record import template_of
from esper_telemetry.sinks.console import make_console

if TYPE_CHECKING:
    from esper_telemetry.cli.main import Compare, Metrics, Report, Watch

WIDTH: Final = 200
"""Width of the table in a pipe or a file, unless COLUMNS gives another."""
SHARES: Final = {"unit": 2, "what it tells": 5, "normal": 2, "warning": 2, "critical": 2, "what to try": 5}
"""Titles of the columns after the key, and the relative width of each."""
MIN_COLUMN_WIDTH: Final = 8
GAP: Final = "  "


def watch(options: Watch) -> int:
    """Show the runs until the user quits."""
    if not options.runs:
        raise WrongUse("watch needs a run directory; see esper-telemetry watch --help")
    try:
        from esper_telemetry.views.watch.app import WatchApp
    except ModuleNotFoundError as missing:
        raise WrongUse(f"watch needs {missing.name}: pip install 'esper-telemetry[views]'") from None
    with wrong_use(), without_warnings():
        app = WatchApp(options.runs, wait=options.wait)
        # Textual draws on stderr
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise ValueError("watch needs a terminal; in a pipe, use `esper-telemetry diagnose`")
        app.run()
    return 0


def report(options: Report) -> int:
    """Write runs as one HTML file, or their verdicts as Markdown, and print where it is."""
    from esper_telemetry.sinks.pages import REPORT_NAME
    from esper_telemetry.views.report import report_html, report_markdown
    from esper_telemetry.views.run_view import open_logs, open_view

    if not options.run_dirs and not options.source:
        raise WrongUse("report needs a run directory or --from; see esper-telemetry report --help")
    sources = [address.partition(":")[2] or address for address in options.source]
    output = output_path(options.output, sources=sources) if options.output is not None else None
    with wrong_use():
        with without_warnings():
            views = [open_view(run_dir, judged=True) for run_dir in options.run_dirs]
            views += [open_logs(address) for address in options.source]
        text = report_markdown(views) if options.format == "markdown" else report_html(views)
        if options.format == "markdown" and output is None:
            echo(text)
            return 0
        run_dir = views[0].run_dir if len(views) == 1 else None
        path = output or (run_dir or Path()) / REPORT_NAME
        (write_output if output else replace_file)(path, text)
    if path.is_file():  # else it may be the terminal itself
        echo(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")
    return 0


def compare(options: Compare) -> int:
    """Print how groups of seeds differ, optionally as JSON, and write the comparison as a page."""
    from esper_telemetry.views.compare import comparison
    from esper_telemetry.views.compare.compared_runs import find_runs, read_compared
    from esper_telemetry.views.compare.comparison_page import printed_comparison
    from esper_telemetry.views.document import print_document

    with wrong_use(), without_warnings():
        output = output_path(options.output) if options.output is not None else None
        result = comparison([read_compared(place) for place in find_runs(options.runs)], ignore=options.ignore, by=options.by)
        if output is not None:
            from esper_telemetry.views.compare.comparison_page import comparison_page

            write_output(output, comparison_page(result))
    if options.json:
        print(json.dumps(result.as_dict(), indent=1))
    else:
        print_document(printed_comparison(result))
        if output is not None:
            echo(f"\nwrote {output}")
    return 0


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
        cells = [[text] if len(text) <= columns else wrap(text, columns) for text, columns in zip(row, widths, strict=True)]
        for parts in zip_longest(*cells, fillvalue=""):
            yield GAP.join(part.ljust(columns) for part, columns in zip(parts, widths, strict=True)).rstrip()
