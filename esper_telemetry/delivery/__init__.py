"""Delivery from the journal to sinks: live, catching up after a fault, or replaying a finished run, in one code path.

A `Delivery` follows the journal with a cursor and feeds one sink. It opens the sink at the `run` line, writes records
in batches, saves its progress in `cursors.json`, and closes the sink with the status of the `end` line. Only the delivery
catches exceptions of the sink. `Deliveries` runs the deliveries of a live run: sinks that may not share the
trainer's interpreter run in one child process, the others in a thread each. `replay` runs one delivery to its end.

A sink gets records in the order of the journal, each at least once. Records of the last second before a process was
killed may be sent again, because the cursor was not saved yet.
"""

from typing import TYPE_CHECKING

from esper_telemetry.core.lazy import lazy_names as lazy_names

if TYPE_CHECKING:
    from esper_telemetry.delivery.catch_up import replay as replay
    from esper_telemetry.delivery.child import MAX_DETACHED_SECONDS as MAX_DETACHED_SECONDS
    from esper_telemetry.delivery.cursors import Cursor as Cursor
    from esper_telemetry.delivery.cursors import Cursors as Cursors
    from esper_telemetry.delivery.delivery import Delivery as Delivery
    from esper_telemetry.delivery.delivery_health import RunHealth as RunHealth
    from esper_telemetry.delivery.delivery_health import doctor as doctor
    from esper_telemetry.delivery.live import MAX_CLOSE_SECONDS as MAX_CLOSE_SECONDS
    from esper_telemetry.delivery.live import Deliveries as Deliveries
    from esper_telemetry.delivery.status import CloseReport as CloseReport
    from esper_telemetry.delivery.status import DeliveryStats as DeliveryStats
    from esper_telemetry.delivery.status import SinkReport as SinkReport
    from esper_telemetry.delivery.status import SinkState as SinkState
    from esper_telemetry.delivery.status import SinkStatus as SinkStatus

__all__, __getattr__, __dir__ = lazy_names(
    __name__,
    {
        "esper_telemetry.delivery.catch_up": ("replay",),
        "esper_telemetry.delivery.child": ("MAX_DETACHED_SECONDS",),
        "esper_telemetry.delivery.cursors": ("Cursor", "Cursors"),
        "esper_telemetry.delivery.delivery": ("Delivery",),
        "esper_telemetry.delivery.delivery_health": ("RunHealth", "doctor"),
        "esper_telemetry.delivery.live": ("MAX_CLOSE_SECONDS", "Deliveries"),
        "esper_telemetry.delivery.status": ("CloseReport", "DeliveryStats", "SinkReport", "SinkState", "SinkStatus"),
    },
)
