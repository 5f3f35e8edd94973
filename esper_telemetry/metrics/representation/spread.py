"""How the responses of each layer are spread: at DEBUG, beside an alarm of the representation (R1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from esper_telemetry.group import Last, Metric, MetricGroup, label, reports
from esper_telemetry.metric import segment
from esper_telemetry.metrics.masking import ascending, quantiles, sample
from esper_telemetry.record import Level

LEVELS = (0.05, 0.5, 0.95)
NO_ROWS = "no finite response, or nobody sampled them"


@dataclass(frozen=True, slots=True)
class LayerResponses(MetricGroup):
    """Quantiles of all responses of a layer."""

    layer: tuple[str, ...] = label()
    low: Last | None = reports(
        Metric(
            key="repr/response/{layer}/p05",
            number=764,
            unit="response",
            question="How low do this layer's responses go? Near -1 behind a tanh: its units are saturated.",
            level=Level.DEBUG,
            cost="debug",
            undefined=NO_ROWS,
        )
    )
    median: Last | None = reports(
        Metric(
            key="repr/response/{layer}/p50",
            number=765,
            unit="response",
            question="Where is the middle of this layer's responses? Exactly 0 behind a ReLU: half of them are silent.",
            level=Level.DEBUG,
            cost="debug",
            undefined=NO_ROWS,
        )
    )
    high: Last | None = reports(
        Metric(
            key="repr/response/{layer}/p95",
            number=766,
            unit="response",
            question="How high do this layer's responses go? Exactly 0 behind a ReLU: the layer is all but dead.",
            level=Level.DEBUG,
            cost="debug",
            undefined=NO_ROWS,
        )
    )


@torch.inference_mode()
def layer_responses(activations: Mapping[str, Tensor]) -> LayerResponses:
    """5 %, 50 % and 95 % quantiles over rows and units of each layer [N, D], after its nonlinearity; of finite ones."""
    if not activations:
        return LayerResponses(())
    found = torch.stack([_quantiles(x) for x in activations.values()], -1)
    low, median, high = found.unsqueeze(1).unbind()
    return LayerResponses(tuple(map(segment, activations)), Last(low), Last(median), Last(high))


def _quantiles(x: Tensor) -> Tensor:
    """[3], NaN where nothing is finite."""
    s = sample(x)
    return quantiles(ascending(s), s.count, LEVELS)
