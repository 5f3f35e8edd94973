"""Whether advantages carry a signal that normalisation may blow up to size 1."""

from __future__ import annotations

from dataclasses import dataclass

from esper_telemetry.derived import Derived
from esper_telemetry.metric import Metric, reports

FLOOR = 1e-6  # of the largest magnitude: rounding noise of float32


@dataclass(frozen=True, slots=True)
class AdvantageScale(Derived):
    """Extremes of the raw advantages against their spread."""

    absmax_over_std: float | None = reports(
        Metric(
            key="adv/raw/absmax_over_std",
            number=216,
            unit="σ",
            question="How far out is the most surprising single step? It alone may decide the update.",
            low=0.0,
            healthy="< 6",
            warn="> 10",
            critical="> 20",
            source="about √(2 ln N) for a Gaussian; heuristic",
            undefined="advantages do not vary",
        )
    )
    std_floored: float | None = reports(
        Metric(
            key="adv/std_floored",
            number=217,
            unit="flag",
            question="Are advantages all the same, so that normalising them amplifies rounding noise? 1 where it is so.",
            low=0.0,
            high=1.0,
            healthy="0",
            warn="1",
            source="std <= 1e-6 max|A|",
            undefined="no valid advantage",
        )
    )


def advantage_scale(
    mean: float | None, std: float | None, smallest: float | None, largest: float | None
) -> AdvantageScale:
    """max|A - mean A| / std A, and whether the spread is lost in rounding, from a rollout's raw advantages."""
    if mean is None or std is None or smallest is None or largest is None:
        return AdvantageScale()
    floored = std <= FLOOR * max(abs(smallest), abs(largest))
    far = max(largest - mean, mean - smallest)
    return AdvantageScale(absmax_over_std=far / std if std > 0 else None, std_floored=float(floored))
