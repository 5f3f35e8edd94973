"""Gradients of single layers over a run: which of them explode or vanish, and in which part of the network.

Severities follow from the norms in the journal, as live ones do (`history.gradients.NormBaseline`), so runs at NORMAL have them too. If a
run has more than `MAX_COLUMNS` updates, a column is several updates: their smallest norm decides whether a layer vanishes, their largest
one whether it explodes.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from esper_telemetry.core.metric import Array
from esper_telemetry.history.gradient_history import DEFAULT_CLIP_LIMIT, LAYER, NormBaseline
from esper_telemetry.views.run_view import RunView

MAX_COLUMNS: Final = 200
"""Columns of the picture: each is some four pixels wide."""
MAX_LAYERS: Final = 64
"""Layers that are shown; a larger network shows the layers with the largest severities."""
WARN_SEVERITY: Final = 0.25
"""Severity above which `grad/layer/{layer}/severity_explode` warns."""
NONFINITE: Final = "grad/global/norm_preclip_nonfinite"


class LayerFlow(NamedTuple):
    """The gradient of one parameter tensor.

    Attributes:
        layer: its name in keys.
        severity: [columns], above 0 if it explodes, below 0 if it vanishes, NaN without a finite gradient.
        last, smallest, largest: norms.
    """

    layer: str
    severity: Array
    last: float
    smallest: float
    largest: float


class GradientFlow(NamedTuple):
    """The gradients of a network's layers.

    Attributes:
        layers: in the order of the network, from its inputs to its outputs.
        updates, env_steps: of the columns, at their ends.
        nonfinite: whether a gradient of any layer was NaN or infinite in the column.
        hidden: number of layers that are left out.
    """

    layers: tuple[LayerFlow, ...]
    updates: tuple[int, ...]
    env_steps: tuple[int, ...]
    nonfinite: tuple[bool, ...]
    hidden: int

    @property
    def worst(self) -> tuple[LayerFlow, int] | None:
        """The layer and the column with the largest severity; None if none is above `WARN_SEVERITY`."""
        sizes = np.nan_to_num(np.abs([layer.severity for layer in self.layers]))
        row, column = np.unravel_index(int(sizes.argmax()), sizes.shape)
        return (self.layers[row], int(column)) if sizes[row, column] > WARN_SEVERITY else None


def gradient_flow(view: RunView) -> GradientFlow | None:
    """Return the gradients of a run's layers; None without norms of at least two layers in two updates."""
    begin, end = LAYER
    keys = [key for key in view.keys if key.startswith(begin) and key.endswith(end)]
    series = [view.series(key) for key in keys]
    broken = view.series(NONFINITE).updates
    updates = sorted({*broken, *(update for one in series for update in one.updates)})
    if len(keys) < 2 or len(updates) < 2:
        return None
    ends = np.unique(np.linspace(0, len(updates) - 1, min(MAX_COLUMNS, len(updates))).astype(int))
    column_ends = np.array(updates)[ends]
    low, high = np.full((2, len(keys), len(ends)), np.nan)
    for row, one in enumerate(series):
        columns = np.searchsorted(column_ends, one.updates)
        np.fmin.at(low[row], columns, one.values)
        np.fmax.at(high[row], columns, one.values)
    # the severity of explosion of each layer, or below 0 the severity of vanishing
    baseline = NormBaseline(tuple(map(str, range(len(keys)))), view.facts.max_grad_norm or DEFAULT_CLIP_LIMIT)
    severity = np.full(low.shape, np.nan)
    for column, (smallest, largest) in enumerate(zip(low.T, high.T, strict=True)):
        judged, _ = baseline.step(smallest, largest)
        explode, vanish = np.asarray(judged.severity_explode), np.asarray(judged.severity_vanish)
        severity[:, column] = np.where(explode >= vanish, explode, -vanish)
    layers = [
        LayerFlow(key[len(begin) : -len(end)], own, one.values[-1], min(one.values), max(one.values))
        for key, own, one in zip(keys, severity, series, strict=True)
    ]
    worst = np.nan_to_num(np.abs(severity)).max(1)
    shown = sorted(np.argsort(-worst, kind="stable")[:MAX_LAYERS].tolist())
    return GradientFlow(
        layers=tuple(layers[row] for row in shown),
        updates=tuple(column_ends.tolist()),
        env_steps=tuple(map(view.step_of, column_ends.tolist())),
        nonfinite=tuple(np.isin(np.arange(len(ends)), np.searchsorted(column_ends, broken)).tolist()),
        hidden=len(layers) - len(shown),
    )
