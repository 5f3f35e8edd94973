"""Continuous (Gaussian) heads: how wide they explore and how often they hit the bounds of the action space."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from esper_telemetry.group import Mean, MetricGroup, Min, label, reports
from esper_telemetry.metric import Metric, segment
from esper_telemetry.metrics.masking import keep


@dataclass(frozen=True, slots=True)
class GaussianStats(MetricGroup):
    """Standard deviations and saturation of one continuous head, as far as they are known."""

    head: str = label()
    std: Mean | None = reports(
        Metric(
            key="policy/head/{head}/std/mean",
            number=181,
            unit="action units",
            question="How widely does this head explore on average?",
            low=0.0,
            source="Andrychowicz 2021",
            undefined="no valid row",
        )
    )
    smallest: Min | None = reports(
        Metric(
            key="policy/head/{head}/std/min",
            number=182,
            unit="action units",
            question="How narrow is its exploration in the narrowest dimension or state?",
            low=0.0,
            critical="< 0.05 of its initial value while the return does not improve",
            source="heuristic",
            undefined="no valid row",
        )
    )
    bound: Mean | None = reports(
        Metric(
            key="policy/head/{head}/bound_frac",
            number=183,
            unit="fraction",
            question="Which share of the action components lies at or beyond the bounds of the action space (squashed: within 1 %)?",
            low=0.0,
            high=1.0,
            healthy="< 0.1",
            warn="> 0.3",
            critical="> 0.6",
            source="heuristic",
            undefined="the action space has no bounds",
        )
    )


@torch.inference_mode()
def gaussian_stats(
    head: str,
    log_std: Tensor | None = None,
    *,
    actions: Tensor | None = None,
    low: Tensor | float | None = None,
    high: Tensor | float | None = None,
    valid: Tensor | None = None,
) -> GaussianStats:
    """Mean and smallest σ over rows and dimensions, and the share of components at or beyond the bounds.

    Args:
        head: name of the head.
        log_std: [D] or [.., D]; None where only the bounds are asked about.
        actions: as sampled, before they are cut to the bounds, [.., D].
        low, high: bounds of the action space, [D] or one number; None where there are none.
        valid: [..] bool, rows of `actions` and of a `log_std` that depends on the state; None where every row is.
    """
    std = (
        None
        if log_std is None
        else keep(*_columns(log_std.detach().double().exp(), valid if log_std.ndim > 1 else None))
    )
    return GaussianStats(
        head=segment(head),
        std=None if std is None else std.mean(std.values),
        smallest=None if std is None else Min(std.where(math.inf).amin(-1)),
        bound=None if actions is None or (low is None and high is None) else _at_bounds(actions, low, high, valid),
    )


def _at_bounds(actions: Tensor, low: Tensor | float | None, high: Tensor | float | None, valid: Tensor | None) -> Mean:
    x = actions.detach()
    outside = torch.zeros_like(x, dtype=torch.bool)
    if low is not None:
        outside = outside | (x <= low)
    if high is not None:
        outside = outside | (x >= high)
    counted = keep(*_columns(x.double(), valid))
    return counted.share(outside.reshape(-1))


def _columns(x: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """All components of [.., D] on one axis, and which of them are valid."""
    return x.reshape(-1), None if valid is None else valid.bool().unsqueeze(-1).expand_as(x).reshape(-1)
