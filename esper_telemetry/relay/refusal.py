"""What a sink's exception says: that the backend cannot be reached, or that it does not want this record."""

from __future__ import annotations

from esper_telemetry.sinks.protocol import PoisonRecordError

SUSPICIOUS_AFTER = 4
"""Failures in a row of one record after which an exception that says nothing may be the record's fault."""

OF_THE_WORLD = (OSError, MemoryError, EOFError, SystemExit)
"""Network, disk, memory, a client that gives up; time-outs and refused connections are OSError: none is a record's fault."""
OF_THE_DATA = (PoisonRecordError, ValueError, TypeError, ArithmeticError, LookupError)


def may_be_the_records(error: BaseException, failures: int) -> bool:
    """Whether one of the records may be what the sink cannot take, after so many failures in a row before."""
    if isinstance(error, OF_THE_WORLD):
        return False
    return isinstance(error, OF_THE_DATA) or failures >= SUSPICIOUS_AFTER
