"""From what one update left behind to the groups that measure it: pure, so that any process can do it."""

from esper_telemetry.summary.containment import Containment, Measurement
from esper_telemetry.summary.copying import copied
from esper_telemetry.summary.layers import without_many_layers
from esper_telemetry.summary.samples import gradient_sample
from esper_telemetry.summary.snapshot import (
    Actions,
    Choices,
    Details,
    Drawn,
    Episodes,
    Gradients,
    GradientSample,
    Growth,
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
    "Choices",
    "Containment",
    "Details",
    "Drawn",
    "Episodes",
    "GradientSample",
    "Gradients",
    "Growth",
    "Layer",
    "Leaves",
    "Measurement",
    "Memory",
    "Minibatches",
    "Normalizer",
    "Observation",
    "Progress",
    "Rollout",
    "Snapshot",
    "copied",
    "gradient_sample",
    "summarize",
    "without_many_layers",
]
