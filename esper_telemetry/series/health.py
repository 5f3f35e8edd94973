"""One number for the health of all gradients, and what spoils it (G12)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from esper_telemetry.derived import Array, Derived
from esper_telemetry.metric import Metric, reports
from esper_telemetry.record import Level
from esper_telemetry.series.severity import explode_severity, vanish_severity

Cause = Literal["nonfinite", "vanish", "explode", "imbalance", "zero"]

FACTOR_WEIGHTS = (1.0, 1.0, 0.5, 0.5)  # vanish, explode, imbalance, zero: the last two are hints, not faults
IMBALANCE = (3.0, 6.0)  # decades between the largest and the smallest norm: from 0 to 1
IMBALANCE_FLOOR = 1e-12  # of the largest norm: an exact zero is no worse than nearly zero
ZEROS_FROM = 0.5


@dataclass(frozen=True, slots=True)
class GradientCondition(Derived):
    """Health of the gradients; None where there are none.

    Attributes:
        health: product of one factor per fault.
        nonfinite: whether any norm is not finite.
        vanish, explode, imbalance, zero: severities of the faults, 0 to 1.
        cause: the fault that takes most from the health; None if nothing does.
    """

    health: float | None = reports(
        Metric(
            key="grad/health",
            number=518,
            unit="fraction",
            question="Are the gradients fit to learn from? 1 is perfect, 0 broken; alarms name the cause.",
            low=0.0,
            high=1.0,
            level=Level.MINIMAL,
            healthy="> 0.75",
            warn="< 0.5",
            critical="< 0.25",
            source="product of the severities of non-finite, vanishing, exploding, unbalanced and zero gradients",
            undefined="no parameter has a gradient",
        )
    )
    nonfinite: bool = False
    vanish: float = 0.0
    explode: float = 0.0
    imbalance: float = 0.0
    zero: float = 0.0
    cause: Cause | None = None


def gradient_condition(
    norms: Array,
    *,
    tau_vanish: Array | float,
    tau_explode: Array | float,
    zero_frac: float | None = None,
    layer_weights: Array | None = None,
    factor_weights: tuple[float, float, float, float] = FACTOR_WEIGHTS,
) -> GradientCondition:
    """Health (1-F)(1-φ_V V)(1-φ_E E)(1-φ_I I)(1-φ_Z Z) of the gradients of L layers.

    Args:
        norms: [L], not finite where any entry is not.
        tau_vanish: norms below which a layer vanishes, [L] or one for all.
        tau_explode: norms above which a layer explodes.
        zero_frac: share of exactly zero entries; None where it was not measured.
        layer_weights: [L] weights of the layers in V, which sum to 1; equal by default.
        factor_weights: φ of vanish, explode, imbalance and zero.
    """
    norms = np.asarray(norms, dtype=np.float64)
    if norms.size == 0:
        return GradientCondition()
    if not np.isfinite(norms).all():
        return GradientCondition(health=0.0, nonfinite=True, cause="nonfinite")
    weights = np.full(norms.size, 1.0 / norms.size) if layer_weights is None else np.asarray(layer_weights)
    severities = {
        "vanish": float(weights @ vanish_severity(norms, tau_vanish)),
        "explode": float(explode_severity(norms, tau_explode).max()),
        "imbalance": _imbalance(norms),
        "zero": 0.0 if zero_frac is None else _ramp(zero_frac, ZEROS_FROM, 1.0),
    }
    factors = [
        1.0 - phi * min(severity, 1.0) for phi, severity in zip(factor_weights, severities.values(), strict=True)
    ]
    return GradientCondition(health=math.prod(factors), cause=_cause(factors), **severities)  # type: ignore[arg-type]  # four floats


def _cause(factors: list[float]) -> Cause | None:
    """The fault with the smallest factor, the first of equals."""
    names: tuple[Cause, ...] = ("vanish", "explode", "imbalance", "zero")
    smallest = min(factors)
    return names[factors.index(smallest)] if smallest < 1.0 else None


def _imbalance(norms: Array) -> float:
    largest = float(norms.max())
    if largest == 0.0:
        return 0.0
    smallest = max(float(norms.min()), IMBALANCE_FLOOR * largest)
    return _ramp(math.log10(largest) - math.log10(smallest), *IMBALANCE)


def _ramp(x: float, start: float, end: float) -> float:
    return min(max((x - start) / (end - start), 0.0), 1.0)
