"""A command's process holds nothing of the user's, so backends' clients may be set up in it as in the child process of a run."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from esper_telemetry.delivery.cursors import Cursors
from esper_telemetry.sinks.protocol import Sink, SupportsChildPreparation
from esper_telemetry.sinks.registry import as_sink


def prepared(sink: Sink) -> Sink:
    """The sink, whose client gives up soon on a server that hangs, and says nothing of itself."""
    if isinstance(sink, SupportsChildPreparation):
        sink.prepare_child()
    return sink


def prepare_for(run_dir: str) -> None:
    """The same for the backends that a run has been sent to; those that cannot be found by their names are passed over."""
    for name in Cursors(Path(run_dir)).names():
        with suppress(ValueError, TypeError, ImportError):
            prepared(as_sink(name))
