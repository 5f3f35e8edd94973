"""For tests, ours and yours: sinks that remember everything or fail on demand, and a kit that tries a sink of yours.

from esper_telemetry.testing import check_sink

def test_my_sink() -> None:
    check_sink(MySink)
"""

from esper_telemetry.testing.conformance import CHECKS, check_sink
from esper_telemetry.testing.sinks import METHODS, FailingSink, MemorySink

__all__ = ["CHECKS", "METHODS", "FailingSink", "MemorySink", "check_sink"]
