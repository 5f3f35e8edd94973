"""`esper-telemetry watch`: runs in the terminal as they go on."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from esper_telemetry.cli.arguments import WrongUse, without_warnings, wrong_use

if TYPE_CHECKING:
    from esper_telemetry.cli.main import Watch


def watch(options: Watch) -> int:
    """Show the runs until the reader leaves."""
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
            raise ValueError("watch needs a terminal; in a pipe, `esper-telemetry diagnose` says how the run is")
        app.run()
    return 0
