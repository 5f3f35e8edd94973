"""`esper-telemetry watch`, `report` and `compare`: show runs live in the terminal, as a page, or in comparison.

A command imports the views that it shows when it runs, because each needs other packages.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from esper_telemetry.cli.arguments import WrongUse, echo, output_path, without_warnings, wrong_use
from esper_telemetry.core.files import replace_file, write_output

if TYPE_CHECKING:
    from esper_telemetry.cli.main import Compare, Report, Watch


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
    output = output_path(options.output, sources=sources) if options.output else None
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
        output = output_path(options.output) if options.output else None
        result = comparison(
            [read_compared(place) for place in find_runs(options.runs)], ignore=options.ignore, by=options.by
        )
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
