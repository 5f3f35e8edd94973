"""From the journal into sinks: live, catching up after a fault, or replaying a finished run, in one code path.

A `Delivery` follows the journal with a cursor and feeds one sink: it opens the sink at the `run` line, writes records
in batches, remembers in `cursors.json` what the sink has taken, and closes it with the status of the `end` line. What a
sink raises is caught there and nowhere else. `Relay` runs the deliveries of a live run: sinks that may not share the
trainer's interpreter in one child process, the others in a thread each. `replay` runs one delivery to its end.

Order and loss: a sink gets records in the order of the journal. Delivery is at least once: what a process took in the
last second before it was killed, and could not note any more, is sent again.
"""

from esper_telemetry.relay.catch_up import replay
from esper_telemetry.relay.child import ORPHAN_SECONDS
from esper_telemetry.relay.cursors import Cursor, Cursors
from esper_telemetry.relay.delivery import Delivery
from esper_telemetry.relay.doctor import Health, SinkHealth, doctor
from esper_telemetry.relay.live import Relay
from esper_telemetry.relay.status import CloseReport, RelayStats, SinkReport, SinkState, SinkStatus
from esper_telemetry.relay.waiting import CLOSE_SECONDS

__all__ = [
    "CLOSE_SECONDS",
    "ORPHAN_SECONDS",
    "CloseReport",
    "Cursor",
    "Cursors",
    "Delivery",
    "Health",
    "Relay",
    "RelayStats",
    "SinkHealth",
    "SinkReport",
    "SinkState",
    "SinkStatus",
    "doctor",
    "replay",
]
