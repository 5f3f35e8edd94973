"""Units that no longer do anything: dormant ones hardly respond, dead ones always respond the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from esper_telemetry.group import Mean, MetricGroup, label, reports
from esper_telemetry.metric import Metric, segment
from esper_telemetry.metrics.masking import Sample, deviations, keep

DORMANT = 0.025
"""Share of its layer's mean response up to which a unit is dormant (Sokar 2023; 0.1 in their looser setting)."""
SPREAD = 0.001
"""Standard deviation below which a saturated unit is dead (code of Moalla 2024)."""

NO_ROWS = "no valid row, or nobody sampled activations"
SOKAR = "Sokar 2023, 2302.12902"


@dataclass(frozen=True, slots=True)
class UnitActivity(MetricGroup):
    """Inactive units of all layers together."""

    dormant: Mean = reports(
        Metric(
            key="repr/dormant_frac",
            number=751,
            unit="fraction",
            question="Which share of the units hardly responds to anything any more?",
            low=0.0,
            high=1.0,
            cost="sampled",
            healthy="< 0.15",
            warn="> 0.35",
            critical="> 0.75",
            source=SOKAR,
            undefined=NO_ROWS,
        )
    )
    dead: Mean = reports(
        Metric(
            key="repr/dead_frac",
            number=753,
            unit="fraction",
            question="Which share of the units is dead: a ReLU that is always off, a tanh that is always saturated?",
            low=0.0,
            high=1.0,
            cost="sampled",
            healthy="< 0.1",
            warn="> 0.3",
            critical="> 0.7",
            source="Moalla 2024, 2405.00662",
            undefined=NO_ROWS,
        )
    )


@dataclass(frozen=True, slots=True)
class LayerActivity(MetricGroup):
    """Inactive units of every layer."""

    layer: tuple[str, ...] = label()
    dormant: Mean = reports(
        Metric(
            key="repr/dormant_frac/{layer}",
            number=752,
            unit="fraction",
            question="Which share of this layer's units hardly responds to anything any more?",
            low=0.0,
            high=1.0,
            cost="sampled",
            healthy="< 0.15",
            warn="> 0.35",
            critical="> 0.75",
            source=SOKAR,
            undefined=NO_ROWS,
        )
    )


class ActivityGroups(NamedTuple):
    """The groups of one forward pass."""

    all: UnitActivity
    layers: LayerActivity


@torch.inference_mode()
def unit_activity(
    activations: Mapping[str, Tensor],
    *,
    activation: Literal["relu", "tanh"],
    threshold: float = DORMANT,
    valid: Tensor | None = None,
) -> ActivityGroups:
    """Dormant units per layer and overall, and dead ones.

    Args:
        activations: per layer [N, D], after its nonlinearity; some hundred rows.
        activation: which nonlinearity that is.
        threshold: score up to which a unit is dormant.
        valid: [N] bool; None where every row is.
    """
    units = [_units(x, valid) for x in activations.values()]
    dormant = _side_by_side([_share(dormant_scores(s) <= threshold, s) for s in units])
    dead = _side_by_side([_share(_dead(s, activation), s) for s in units])
    overall = UnitActivity(Mean(dormant.total.sum(), dormant.count.sum()), Mean(dead.total.sum(), dead.count.sum()))
    names = tuple(map(segment, activations))
    return ActivityGroups(overall, LayerActivity(names, Mean(dormant.total, dormant.count)))


def dormant_scores(units: Sample) -> Tensor:
    """Mean |response| of each unit [D] over that of its layer; 0 in a layer that does not respond at all.

    Args:
        units: responses [D, N].
    """
    mean = units.values.abs().sum(-1) / units.count
    return torch.nan_to_num(mean / mean.mean(), 0.0)


def _units(activations: Tensor, valid: Tensor | None) -> Sample:
    return keep(activations.detach().double().t(), None if valid is None else valid.bool())


def _dead(units: Sample, activation: str) -> Tensor:
    """[D] bool."""
    if activation == "relu":
        return (units.values == 0).all(-1)
    _, d = deviations(units)
    squares: Tensor = torch.linalg.vecdot(d, d)
    return squares < SPREAD**2 * units.count


class _Share(NamedTuple):
    """Units with a property, and units that saw any row: [] or, side by side, [layers]."""

    total: Tensor
    count: Tensor  # type: ignore[assignment]  # nobody counts the entries of this tuple


def _share(condition: Tensor, units: Sample) -> _Share:
    seen = units.count > 0
    return _Share((condition & seen).sum(), seen.sum())


def _side_by_side(shares: list[_Share]) -> _Share:
    return _Share(*map(torch.stack, zip(*shares, strict=True)))
