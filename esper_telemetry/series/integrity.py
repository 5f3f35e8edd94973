"""How large a mismatch of stored and recomputed log-probabilities may be before the first optimizer step: bounds by precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Grade = Literal["ok", "warn", "crit"]


@dataclass(frozen=True, slots=True)
class Bounds:
    """Strict upper bounds in nats; above `critical` the policy is not the one that acted."""

    warn: float
    critical: float


RATIO_INIT_BOUNDS = {
    "fp32": Bounds(1e-5, 1e-3),
    "tf32": Bounds(1e-3, 1e-2),
    "bf16": Bounds(2e-2, 5e-2),
    "fp16": Bounds(2e-2, 5e-2),
}
"""By compute precision. Rounding alone stays below `warn`; huggingface/trl#454 and sb3-contrib#75 lie above `critical`."""


def ratio_init_bounds(precision: str, *, smallest_std: float | None = None) -> Bounds:
    """Bounds for `integrity/ratio_init`.

    Args:
        precision: compute precision: fp32, tf32, bf16 or fp16.
        smallest_std: σ_min of Gaussian heads, whose log-probabilities round in proportion to 1/σ; None without such heads.

    Raises:
        ValueError: for an unknown precision.
    """
    if precision not in RATIO_INIT_BOUNDS:
        raise ValueError(f"precision must be one of {', '.join(RATIO_INIT_BOUNDS)}, got {precision!r}")
    factor = max(1.0, 1.0 / smallest_std) if smallest_std else 1.0
    bounds = RATIO_INIT_BOUNDS[precision]
    return Bounds(bounds.warn * factor, bounds.critical * factor)


def ratio_init_grade(value: float, precision: str, *, smallest_std: float | None = None) -> Grade:
    """What a value of `integrity/ratio_init` means; arguments as for `ratio_init_bounds`."""
    bounds = ratio_init_bounds(precision, smallest_std=smallest_std)
    if value > bounds.critical:
        return "crit"
    return "warn" if value > bounds.warn else "ok"
