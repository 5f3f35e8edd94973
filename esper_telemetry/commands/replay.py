"""`esper-telemetry replay`: a journal into a backend, from where that backend stopped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from esper_telemetry.commands.mistakes import wrong_use
from esper_telemetry.commands.own_process import prepared
from esper_telemetry.relay import replay as replay_into
from esper_telemetry.sinks import as_sink

if TYPE_CHECKING:
    from esper_telemetry.cli import Replay


def replay(options: Replay) -> int:
    """Sends what the backend does not have yet and says how much that was."""
    with wrong_use():
        sink = prepared(as_sink(options.to))
        report = replay_into(options.run_dir, sink, follow=options.follow, missing=options.missing)
    print(report)
    return 0 if report.complete else 1
