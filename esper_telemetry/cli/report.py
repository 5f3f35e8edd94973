"""`esper-telemetry report`: write runs as one HTML file, or print the verdict on them as Markdown."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from esper_telemetry.cli.arguments import WrongUse, without_warnings, wrong_use
from esper_telemetry.importers.source import READERS, read_source
from esper_telemetry.sinks.pages import REPORT_NAME
from esper_telemetry.views.report import report_html, report_markdown, write_report
from esper_telemetry.views.run_view import open_view

if TYPE_CHECKING:
    from esper_telemetry.cli.main import Report


def report(options: Report) -> int:
    """Write the report, and print where it is."""
    if not options.run_dirs and not options.source:
        raise WrongUse("report needs a run directory or --from; see esper-telemetry report --help")
    output = Path(options.output).expanduser() if options.output else None
    if output is not None and (output.is_dir() or not output.parent.is_dir()):
        reason = "it is a directory" if output.is_dir() else f"there is no directory {output.parent}"
        raise WrongUse(f"the report cannot be written to {options.output}: {reason}")
    with wrong_use():
        for address in options.source:
            if address.partition(":")[0] not in READERS:
                read_source(address)  # refuses it
        with without_warnings():
            views = [open_view(source, judged=True) for source in (*options.run_dirs, *options.source)]
        text = report_markdown(views) if options.format == "markdown" else report_html(views)
        if options.format == "markdown" and output is None:
            print(text)
            return 0
        run_dir = views[0].run_dir if len(views) == 1 else None
        path = output or (run_dir or Path()) / REPORT_NAME
        write_report(path, text)
    print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")
    return 0
