"""Returns: the regression targets of the critic."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from esper_telemetry.conversion import ArrayLike, as_mask, as_tensor
from esper_telemetry.group import Counts, Max, MetricGroup, Min, Moments, Sum, reports
from esper_telemetry.metric import Metric
from esper_telemetry.metrics.distribution import REWARDS, histogram
from esper_telemetry.metrics.masking import ascending, moments, quantiles, sample
from esper_telemetry.metrics.quantiles import Quantiles, as_quantiles, levels_for
from esper_telemetry.record import Level

NO_ROWS = "no valid, finite return"


@dataclass(frozen=True, slots=True)
class ReturnStats(MetricGroup):
    """Returns of a rollout, as the critic is trained on them."""

    moments: Moments = reports(
        Metric(
            key="ret/mean",
            number=301,
            unit="return",
            question="What return does the critic have to predict on average?",
            level=Level.MINIMAL,
            undefined=NO_ROWS,
        ),
        Metric(
            key="ret/std",
            number=302,
            unit="return",
            question="How much do returns vary? A jump means that the scale of rewards changed.",
            of="std",
            low=0.0,
            level=Level.MINIMAL,
            warn="robust z of log10 above 4",
            critical="robust z of log10 above 8",
            source="SB3#2240; cleanrl#441",
            undefined=NO_ROWS,
        ),
        Metric(
            key="ret/skew",
            number=303,
            unit="1",
            question="Is one tail of the returns longer: a few very good (above 0) or very bad ones?",
            of="skew",
            undefined="returns do not vary",
        ),
    )
    smallest: Min = reports(
        Metric(key="ret/min", number=304, unit="return", question="What is the lowest return?", undefined=NO_ROWS)
    )
    largest: Max = reports(
        Metric(key="ret/max", number=305, unit="return", question="What is the highest return?", undefined=NO_ROWS)
    )
    quantiles: Quantiles = reports(
        Metric(
            key="ret/p10",
            number=306,
            unit="return",
            question="Below which return lie the lowest 10 %?",
            of="p10",
            undefined=NO_ROWS,
        ),
        Metric(
            key="ret/p50",
            number=307,
            unit="return",
            question="What is the median return?",
            of="p50",
            undefined=NO_ROWS,
        ),
        Metric(
            key="ret/p90",
            number=308,
            unit="return",
            question="Above which return lie the highest 10 %?",
            of="p90",
            undefined=NO_ROWS,
        ),
    )
    histogram: Counts = reports(
        Metric(
            key="ret/hist",
            number=310,
            unit="return",
            question="How are the returns distributed?",
            undefined=NO_ROWS,
        )
    )
    nonfinite: Sum = reports(
        Metric(
            key="ret/mean_nonfinite",
            number=309,
            unit="count",
            question="How many valid returns were NaN or infinite?",
            low=0.0,
            level=Level.MINIMAL,
            healthy="absent",
            critical="> 0",
            undefined="none was",
            when_positive=True,
        )
    )


@torch.inference_mode()
def return_stats(returns: ArrayLike, *, valid: ArrayLike | None = None) -> ReturnStats:
    """Population moments, extremes and quantiles of the returns.

    Args:
        returns: [T, B] or [N].
        valid: bool, same shape; None where every entry is.
    """
    returns = as_tensor(returns)
    s = sample(returns, as_mask(valid, returns))
    found = quantiles(ascending(s), s.count, levels_for(returns))
    return ReturnStats(
        moments=moments(s),
        smallest=Min(found[0]),
        largest=Max(found[-1]),
        quantiles=as_quantiles(found, s.count),
        histogram=histogram(s, REWARDS),
        nonfinite=Sum(s.nonfinite),
    )
