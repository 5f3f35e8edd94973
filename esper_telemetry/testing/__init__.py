"""Tools for tests: of sinks (`check_sink`, `MemorySink`, `FailingSink`), and of the equations of a trainer (`assert_gae` and others)."""

from typing import TYPE_CHECKING

from esper_telemetry.core.lazy import lazy_names as lazy_names

if TYPE_CHECKING:
    from esper_telemetry.testing.equations import assert_gae as assert_gae
    from esper_telemetry.testing.sinks import CHECKS as CHECKS
    from esper_telemetry.testing.sinks import FailingSink as FailingSink
    from esper_telemetry.testing.sinks import MemorySink as MemorySink
    from esper_telemetry.testing.sinks import alarm as alarm
    from esper_telemetry.testing.sinks import check_sink as check_sink
    from esper_telemetry.testing.sinks import delivered as delivered
    from esper_telemetry.testing.sinks import expect_equal as expect_equal
    from esper_telemetry.testing.sinks import journalled as journalled
    from esper_telemetry.testing.sinks import record as record
    from esper_telemetry.testing.sinks import run_in as run_in

__all__, __getattr__, __dir__ = lazy_names(
    __name__,
    {
        "esper_telemetry.testing.equations": ("assert_gae",),
        "esper_telemetry.testing.sinks": (
            "CHECKS",
            "FailingSink",
            "MemorySink",
            "alarm",
            "check_sink",
            "delivered",
            "expect_equal",
            "journalled",
            "record",
            "run_in",
        ),
    },
)
