"""From what one update left behind to the groups that measure it: pure, so that any process can do it."""

from esper_telemetry.summary.snapshot import (
    Actions,
    Details,
    Drawn,
    Episodes,
    Gradients,
    Layer,
    Leaves,
    Memory,
    Minibatches,
    Normalizer,
    Progress,
    Rollout,
    Snapshot,
)
from esper_telemetry.summary.summarize import Observation, summarize

__all__ = [
    "Actions",
    "Details",
    "Drawn",
    "Episodes",
    "Gradients",
    "Layer",
    "Leaves",
    "Memory",
    "Minibatches",
    "Normalizer",
    "Observation",
    "Progress",
    "Rollout",
    "Snapshot",
    "summarize",
]
