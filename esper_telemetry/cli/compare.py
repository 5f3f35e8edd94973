"""`esper-telemetry compare`: compare runs by groups of seeds, in the terminal, as JSON or as a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from esper_telemetry.cli.arguments import without_warnings, wrong_use
from esper_telemetry.views.compare import comparison
from esper_telemetry.views.compare.runs import find_runs, read_compared
from esper_telemetry.views.compare.text import print_comparison

if TYPE_CHECKING:
    from esper_telemetry.cli.main import Compare


def compare(options: Compare) -> int:
    """Print in what groups of runs differ; also write it as a page."""
    with wrong_use(), without_warnings():
        output = Path(options.output).expanduser() if options.output else None
        if output is not None and (output.is_dir() or not output.absolute().parent.is_dir()):
            raise ValueError(f"{options.output} cannot be written: it is a folder, or its folder does not exist")
        result = comparison([read_compared(place) for place in find_runs(options.runs)])
        if output is not None:
            from esper_telemetry.views.compare.page import comparison_page

            output.write_text(comparison_page(result), encoding="utf-8")
    if options.json:
        print(json.dumps(result.as_dict(), indent=1))
    else:
        print_comparison(result)
        if output is not None:
            print(f"\nwrote {output}")
    return 0
