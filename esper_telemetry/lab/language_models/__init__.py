"""A small language model that learns a verifiable task with TRL, and the faults that break it. It needs `esper-telemetry[trl]`."""
