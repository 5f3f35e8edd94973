"""The process beside the trainer that turns snapshots of updates into records, and how it is talked to.

Summarising an update takes a few hundred small tensor operations: a tenth of a fast trainer's time on its own thread, nothing
on a second core. The trainer only copies the tensors into memory that both share, a few hundred microseconds per update.

The training thread never waits for this process: what neither the shared memory nor the pipe takes stays here and goes first next time.
What the process has not acknowledged is kept, so that the trainer can do it itself if the process dies. Through another pipe comes back
what the watch has found in it. If the trainer dies, the process still finds in the pipe what the trainer wrote; while it works it holds
`writer.lock` in the run directory, which whoever ends the run waits for.

Where the system refuses what this takes, a warning says so and the trainer summarises its updates itself; where it has no memory files, as
macOS, there is no such process.
"""

from esper_telemetry.offload.handover import HandOver
from esper_telemetry.offload.process import worth_offloading
from esper_telemetry.offload.writer import OffloadedWriter

__all__ = ["HandOver", "OffloadedWriter", "worth_offloading"]
