"""From what one update left behind to the groups that measure it: pure, so that any process can do it."""

from typing import TYPE_CHECKING

from esper_telemetry.core.lazy import lazy_names as lazy_names

if TYPE_CHECKING:
    from esper_telemetry.updates.containment import Containment as Containment
    from esper_telemetry.updates.containment import Measurement as Measurement
    from esper_telemetry.updates.data import Actions as Actions
    from esper_telemetry.updates.data import Details as Details
    from esper_telemetry.updates.data import Episodes as Episodes
    from esper_telemetry.updates.data import GradientSample as GradientSample
    from esper_telemetry.updates.data import Growth as Growth
    from esper_telemetry.updates.data import Layer as Layer
    from esper_telemetry.updates.data import Minibatches as Minibatches
    from esper_telemetry.updates.data import Normalizer as Normalizer
    from esper_telemetry.updates.data import Snapshot as Snapshot
    from esper_telemetry.updates.data import copied as copied
    from esper_telemetry.updates.groups import Observation as Observation
    from esper_telemetry.updates.groups import gradient_sample as gradient_sample
    from esper_telemetry.updates.groups import summarize as summarize
    from esper_telemetry.updates.groups import without_many_layers as without_many_layers

__all__, __getattr__, __dir__ = lazy_names(
    __name__,
    {
        "esper_telemetry.updates.containment": ("Containment", "Measurement"),
        "esper_telemetry.updates.data": (
            "Actions",
            "Details",
            "Episodes",
            "GradientSample",
            "Growth",
            "Layer",
            "Minibatches",
            "Normalizer",
            "Snapshot",
            "copied",
        ),
        "esper_telemetry.updates.groups": ("Observation", "gradient_sample", "summarize", "without_many_layers"),
    },
)
