"""The critic: how well it fits the returns, and how far an update moves it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from esper_telemetry.conversion import ArrayLike, as_mask, as_tensor
from esper_telemetry.group import Counts, Max, Mean, MetricGroup, Moments, Sum, reports
from esper_telemetry.metric import Metric
from esper_telemetry.metrics.distribution import REWARDS, histogram
from esper_telemetry.metrics.masking import (
    ascending,
    deviations,
    keep,
    moments,
    quantiles,
    rows_of,
    same_shape,
    sample,
)
from esper_telemetry.metrics.quantiles import Quantiles, as_quantiles, levels_for
from esper_telemetry.record import Level
from esper_telemetry.reduction import NAN, Array, Reduction, Slot, Statistic

_std = Moments.statistics["std"]

NO_ROWS = "no valid, finite pair of value and return"


@dataclass(frozen=True, slots=True)
class ValueFit(MetricGroup):
    """The critic's estimates against the returns they are trained towards; errors are V - R."""

    error: Moments = reports(
        Metric(
            key="value/bias",
            number=401,
            unit="return",
            question="Does the critic promise too much (above 0) or too little? Explained variance cannot see this.",
            level=Level.MINIMAL,
            healthy="|bias| < 0.1 of ret/std",
            warn="> 0.5 of ret/std",
            critical="> 1 of ret/std",
            source="heuristic; EV(V + c) = EV(V)",
            undefined=NO_ROWS,
        ),
        Metric(
            key="value/err/std",
            number=402,
            unit="return",
            question="How widely do the critic's errors scatter around its bias?",
            of="std",
            low=0.0,
            level=Level.MINIMAL,
            healthy="well below ret/std",
            undefined=NO_ROWS,
        ),
        Metric(
            key="value/err/skew",
            number=403,
            unit="1",
            question="Are large errors one-sided: overestimates (above 0) or underestimates?",
            of="skew",
            undefined="errors do not vary",
        ),
    )
    estimate: Moments = reports(
        Metric(
            key="value/std",
            number=404,
            unit="return",
            question="How much do the critic's estimates differ between states? Near 0: it predicts the same everywhere.",
            of="std",
            low=0.0,
            level=Level.MINIMAL,
            healthy="close to value/target/std",
            undefined=NO_ROWS,
        )
    )
    target: Moments = reports(
        Metric(
            key="value/target/std",
            number=405,
            unit="return",
            question="How much do the returns vary that the critic is compared with?",
            of="std",
            low=0.0,
            level=Level.MINIMAL,
            undefined=NO_ROWS,
        )
    )
    quantiles: Quantiles = reports(
        Metric(
            key="value/err/p05",
            number=406,
            unit="return",
            question="How large are the critic's worst 5 % of underestimates?",
            of="p05",
            healthy="|p95| / |p05| between 1/3 and 3",
            source="heuristic",
            undefined=NO_ROWS,
        ),
        Metric(
            key="value/err/p25",
            number=407,
            unit="return",
            question="Below which error lies a quarter of the estimates?",
            of="p25",
            undefined=NO_ROWS,
        ),
        Metric(
            key="value/err/p50",
            number=408,
            unit="return",
            question="What is the critic's typical (median) error?",
            of="p50",
            healthy="about 0",
            undefined=NO_ROWS,
        ),
        Metric(
            key="value/err/p75",
            number=409,
            unit="return",
            question="Above which error lies a quarter of the estimates?",
            of="p75",
            undefined=NO_ROWS,
        ),
        Metric(
            key="value/err/p95",
            number=410,
            unit="return",
            question="How large are the critic's worst 5 % of overestimates?",
            of="p95",
            healthy="|p95| / |p05| between 1/3 and 3",
            source="heuristic",
            undefined=NO_ROWS,
        ),
    )
    histogram: Counts = reports(
        Metric(
            key="value/err/hist",
            number=413,
            unit="return",
            question="How are the critic's errors distributed?",
            undefined=NO_ROWS,
        )
    )
    absmax: Max = reports(
        Metric(
            key="value/err/absmax",
            number=411,
            unit="return",
            question="What is the critic's largest single error?",
            low=0.0,
            undefined=NO_ROWS,
        )
    )
    nonfinite: Sum = reports(
        Metric(
            key="value/explained_variance_nonfinite",
            number=412,
            unit="count",
            question="How many valid pairs of value and return held a NaN or an infinity?",
            low=0.0,
            level=Level.MINIMAL,
            healthy="absent",
            critical="> 0",
            undefined="none did",
            when_positive=True,
        )
    )


@torch.inference_mode()
def value_fit(values: ArrayLike, returns: ArrayLike, *, valid: ArrayLike | None = None) -> ValueFit:
    """Errors of the critic: moments and quantiles, and how much its estimates and the returns vary.

    Args:
        values: critic's estimates at collection, [T, B] or [N].
        returns: regression targets, same shape.
        valid: bool, same shape; None where every entry is.

    Explained variance, R², correlation and their relatives need earlier updates and are derived from these on the host (`series.critic`).
    """
    values = as_tensor(values)
    returns, valid = as_tensor(returns, values), as_mask(valid, values)
    same_shape(values=values, returns=returns, valid=valid)
    both = torch.stack([rows_of(values, None), rows_of(returns, None)]).double()
    difference = both[0] - both[1]
    error = sample(difference, None if valid is None else rows_of(valid, None))
    means, d = deviations(error._replace(values=torch.where(error.kept, both, 0.0)))
    squares = torch.linalg.vecdot(d, d)
    found = quantiles(ascending(error), error.count, levels_for(values))
    return ValueFit(
        error=moments(error),
        estimate=Moments(error.count, means[0], squares[0], math.nan, math.nan),
        target=Moments(error.count, means[1], squares[1], math.nan, math.nan),
        quantiles=as_quantiles(found, error.count),
        histogram=histogram(error, REWARDS),
        absmax=Max(found[:: len(found) - 1].abs().amax()),
        nonfinite=Sum(error.nonfinite),
    )


@dataclass(frozen=True, slots=True)
class ScaledMean(Reduction):
    """Mean of `total` over the standard deviation of other values of the same rows."""

    total: Slot
    count: Slot
    mean: Slot
    m2: Slot

    statistics: ClassVar[Mapping[str, Statistic]] = {"scaled": lambda s: _scaled(s[0], s[1], _std(s[1:4]))}

    @staticmethod
    def merge(rows: Array) -> Array:
        """Totals add; the moments merge around the common mean."""
        return np.concatenate([rows[..., :1].sum(axis=0), merge_spreads(rows[..., 1:])], axis=-1)


def merge_spreads(rows: Array) -> Array:
    """[rows, fields, (count, mean, m2)] merged around the common means into [fields, 3]."""
    padded = np.concatenate([rows, np.zeros((*rows.shape[:-1], 2))], axis=-1)
    return Moments.merge(padded)[..., :3]


def _scaled(total: float, count: float, std: float) -> float:
    return total / count / std if count and std > 0 else NAN


@dataclass(frozen=True, slots=True)
class ValueMovement(MetricGroup):
    """How far the update moved the critic's estimates from those at collection."""

    clip_frac: Mean | None = reports(
        Metric(
            key="value/clip_frac",
            number=421,
            unit="fraction",
            question="Which share of the value estimates is held back by value clipping? Depends on the scale of returns.",
            low=0.0,
            high=1.0,
            healthy="< 0.2",
            warn="> 0.5",
            source="SB3#1426",
            undefined="value clipping is off",
        )
    )
    move: ScaledMean = reports(
        Metric(
            key="value/move_over_std",
            number=422,
            unit="σ_R",
            question="How far did the update move the critic, in units of the returns' spread?",
            cost="sampled",
            low=0.0,
            healthy="< 0.2",
            warn="> 0.5",
            source="heuristic",
            undefined="returns do not vary",
        )
    )
    nonfinite: Sum = reports(
        Metric(
            key="value/clip_frac_nonfinite",
            number=423,
            unit="count",
            question="How many valid new or old value estimates were NaN or infinite?",
            low=0.0,
            level=Level.MINIMAL,
            healthy="absent",
            critical="> 0",
            undefined="none was",
            when_positive=True,
        )
    )


@torch.inference_mode()
def value_movement(
    values: ArrayLike,
    old_values: ArrayLike,
    returns: ArrayLike,
    *,
    clip: float | None = None,
    valid: ArrayLike | None = None,
    dim: int | None = None,
) -> ValueMovement:
    """Share of clipped value estimates, and their mean movement over the returns' standard deviation.

    Args:
        values: critic's estimates now, [N] or [M, N].
        old_values, returns: at collection, same shape.
        clip: ε of the value clip; None where values are not clipped.
        valid: bool, same shape; None where every entry is.
        dim: axis to reduce; None reduces all axes to one row, -1 keeps the leading axis as optimizer steps.
    """
    if clip is not None and clip < 0:
        raise ValueError(f"clip must not be negative, got {clip}")
    values = as_tensor(values)
    old_values, returns, valid = as_tensor(old_values, values), as_tensor(returns, values), as_mask(valid, values)
    same_shape(values=values, old_values=old_values, returns=returns, valid=valid)
    move = sample(values.detach().double() - old_values.detach().double(), valid, dim=dim)
    distance = move.values.abs()
    mean, d = deviations(keep(rows_of(returns, dim).double(), move.kept))
    return ValueMovement(
        clip_frac=None if clip is None else Mean((distance > clip).sum(-1), move.count),
        move=ScaledMean(distance.sum(-1), move.count, mean, torch.linalg.vecdot(d, d)),
        nonfinite=Sum(move.nonfinite),
    )
