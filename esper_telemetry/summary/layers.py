"""Large networks: the numbers of single layers are left out of records where there are too many of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from esper_telemetry.metric import declared, label_field
from esper_telemetry.metrics.gradients import LayerGradients, LayerZeros
from esper_telemetry.metrics.optimizer import LayerSteps

MOST_LAYERS = 64
"""Parameter tensors of which NORMAL still reports each; DEBUG reports all."""


def _ends(groups: Iterable[type]) -> Iterator[tuple[str, str]]:
    """How the keys of single layers begin and end."""
    for group in groups:
        for _, metric in declared(group):
            before, _, after = metric.key.partition(f"{{{label_field(group)}}}")
            yield before, after


ENDS = tuple(_ends((LayerGradients, LayerZeros, LayerSteps)))


def without_many_layers(values: Mapping[str, float]) -> dict[str, float]:
    """The values, without those of single layers where a network has more than `MOST_LAYERS`."""
    for before, after in ENDS:
        keys = [key for key in values if key.startswith(before) and key.endswith(after)]
        if len(keys) > MOST_LAYERS:
            values = {key: value for key, value in values.items() if key not in set(keys)}
    return dict(values)
