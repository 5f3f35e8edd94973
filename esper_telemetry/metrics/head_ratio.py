"""How far each head of a factored policy moved, on the rows where it takes part."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from esper_telemetry.group import Max, Mean, MetricGroup, Min, Moments, Sum, label, reports
from esper_telemetry.metric import Metric, Rows, segment
from esper_telemetry.metrics.masking import Sample, keep, rows_of, same_shape, spread
from esper_telemetry.metrics.ratio import EXP_LIMIT, NO_STEP
from esper_telemetry.record import Level
from esper_telemetry.reduction import NAN, Array, Reduction, Slot, Statistic

NO_ROWS = "no valid row on which the head takes part"


@dataclass(frozen=True, slots=True)
class Share(Reduction):
    """A part of a whole, where `count` is above zero."""

    part: Slot
    whole: Slot
    count: Slot

    statistics: ClassVar[Mapping[str, Statistic]] = {"share": lambda s: s[0] / s[1] if s[1] and s[2] else NAN}

    @staticmethod
    def merge(rows: Array) -> Array:
        """Parts, wholes and counts add."""
        merged: Array = rows.sum(axis=0)
        return merged


@dataclass(frozen=True, slots=True)
class HeadRatio(MetricGroup):
    """The log-ratio family per head."""

    head: tuple[str, ...] = label()
    kl: Mean = reports(
        Metric(
            key="policy/head/{head}/kl",
            number=151,
            unit="nats",
            question="How far did the update move this head, where it takes part?",
            low=0.0,
            healthy="0.002 to 0.02",
            warn="> 0.03",
            critical="> 0.1",
            source="as policy/kl",
            undefined=NO_ROWS,
        )
    )
    logratio: Moments = reports(
        Metric(
            key="policy/head/{head}/logratio/std",
            number=152,
            unit="nats",
            question="How differently did the probabilities of this head's actions change?",
            of="std",
            low=0.0,
            healthy="< 0.15",
            warn="> 0.3",
            critical="> 0.7",
            source="heuristic",
            undefined=NO_ROWS,
        )
    )
    ratio_min: Min = reports(
        Metric(
            key="policy/head/{head}/ratio/min",
            number=153,
            unit="ratio",
            question="How much less likely did any action of this head become?",
            low=0.0,
            healthy="> 0.3",
            warn="< 0.2",
            critical="< 0.1",
            source="heuristic",
            undefined=NO_ROWS,
        )
    )
    ratio_max: Max = reports(
        Metric(
            key="policy/head/{head}/ratio/max",
            number=154,
            unit="ratio",
            question="How much more likely did any action of this head become?",
            low=0.0,
            healthy="< 2",
            warn="> 5",
            critical="> 10",
            source="as policy/ratio/max",
            undefined=NO_ROWS,
        )
    )
    clip_frac: Mean | None = reports(
        Metric(
            key="policy/head/{head}/clip_frac",
            number=155,
            unit="fraction",
            question="On which share of its rows did this head alone leave the trust region?",
            rows=Rows.AFTER_STEP,
            low=0.0,
            high=1.0,
            healthy="0.02 to 0.2",
            warn="> 0.3",
            critical="> 0.5",
            source="as policy/clip_frac",
            undefined=f"{NO_ROWS}, or {NO_STEP}",
        )
    )
    blame: Share = reports(
        Metric(
            key="policy/head/{head}/blame",
            number=156,
            unit="fraction",
            question="Which share of the policy's movement is this head's? The shares of all heads add up to 1.",
            low=0.0,
            high=1.0,
            warn="> 0.8 while ratios explode: look at this head",
            source="share of the squared log-ratio; heuristic",
            undefined=f"{NO_ROWS}, or nothing moved",
        )
    )
    nonfinite: Sum = reports(
        Metric(
            key="policy/head/{head}/kl_nonfinite",
            number=157,
            unit="count",
            question="How many of this head's valid log-ratios were NaN or infinite?",
            low=0.0,
            level=Level.MINIMAL,
            healthy="absent",
            critical="> 0",
            undefined="none was",
            when_positive=True,
        )
    )


@torch.no_grad()
def joint_log_ratio(log_ratios: Mapping[str, Tensor], relevant: Mapping[str, Tensor] | None = None) -> Tensor:
    """Log-ratio [..] of the whole action: the sum over the heads that take part.

    Args:
        log_ratios: per head [..].
        relevant: per head [..] bool; heads left out always take part.
    """
    relevant = relevant or {}
    parts = [torch.where(relevant[h].bool(), x, 0.0) if h in relevant else x for h, x in log_ratios.items()]
    return torch.stack(parts).sum(0)


@torch.inference_mode()
def head_ratio_diagnostics(
    log_ratios: Mapping[str, Tensor],
    *,
    relevant: Mapping[str, Tensor] | None = None,
    clip: float | None = None,
    valid: Tensor | None = None,
    dim: int | None = None,
) -> HeadRatio:
    """KL, ratio extremes, clip fraction and blame of every head.

    Args:
        log_ratios: per head [N] or [M, N], log-probability now minus at collection.
        relevant: per head, bool, same shape: rows on which it takes part; heads left out always do.
        clip: ε of the ratio's clip range.
        valid: bool, same shape; None where every row is.
        dim: axis to reduce; None reduces all axes to one row, -1 keeps the leading axis as optimizer steps.
    """
    same_shape(**log_ratios, valid=valid)
    s = _stacked(log_ratios, relevant or {}, valid, dim)
    e = s.values.clamp(-EXP_LIMIT, EXP_LIMIT).expm1_()
    squared = torch.linalg.vecdot(s.values, s.values)
    low, high = (s.where(fill).clamp(-EXP_LIMIT, EXP_LIMIT).exp_() for fill in (math.inf, -math.inf))
    return HeadRatio(
        head=tuple(map(segment, log_ratios)),
        kl=Mean((e - s.values).sum(-1), s.count),
        logratio=spread(s),
        ratio_min=Min(torch.where(s.count > 0, low.amin(-1), math.inf)),
        ratio_max=Max(torch.where(s.count > 0, high.amax(-1), -math.inf)),
        clip_frac=None if clip is None else Mean((e.abs() > clip).sum(-1), s.count),
        blame=Share(squared, squared.sum(-1, keepdim=True), s.count),
        nonfinite=Sum(s.nonfinite),
    )


def _stacked(
    log_ratios: Mapping[str, Tensor], relevant: Mapping[str, Tensor], valid: Tensor | None, dim: int | None
) -> Sample:
    """All heads as one sample [.., H, N]."""
    rows = {head: rows_of(x, dim).double() for head, x in log_ratios.items()}
    every = None if valid is None else rows_of(valid, dim).bool()
    masks = [rows_of(relevant[head], dim).bool() if head in relevant else every for head in rows]
    if every is not None:
        masks = [every if mask is None else mask & every for mask in masks]
    full = [torch.ones_like(x, dtype=torch.bool) if m is None else m for x, m in zip(rows.values(), masks, strict=True)]
    return keep(torch.stack(list(rows.values()), -2), torch.stack(full, -2))
