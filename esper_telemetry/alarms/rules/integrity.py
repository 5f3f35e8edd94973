"""Identities that hold in every correct trainer.

How large a mismatch of stored and recomputed log-probabilities may be before the first optimizer step: bounds by precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from esper_telemetry.alarms.rule import Finding, Rule, View, hard, number

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


UNLIKELY = 5.0
"""Nats of the unlikeliest action from which on bounds grow with it: so do logits, and with them the rounding of their differences."""

REMEMBERED = 4.0
"""Times as much where a memory carries the rounding from step to step; healthy runs came to 1.4 times the plain bound."""

LASTS = 5
"""Updates over which small deviations of normalised advantages are averaged: healthy runs have 0.0005 in each."""

FEW_ROWS = 1.0
"""What is forgiven, over the rows of an update: an unbiased standard deviation of 8 rows leaves 0.03, with masked rows twice as much."""

WARNING = 0.5
"""Severity of a mismatch between the two bounds: it is told, and raises no level."""


def ratio_init(view: View) -> Iterator[Finding]:
    """Stored log-probabilities are not those of the policy, before the first step."""
    key = "integrity/ratio_init"
    value, precision = view.get(key), view.facts.get("precision")
    if value is None or precision not in RATIO_INIT_BOUNDS:
        return
    spreads = [found for _, _, found in view.labelled("policy/head/", "/std/min") if found > 0]
    bounds = ratio_init_bounds(precision, smallest_std=min(spreads, default=None))
    rounding = view.limits.ratio_init_factor * max(1.0, abs(view.get("policy/logp/min") or 0.0) / UNLIKELY)
    rounding *= REMEMBERED if view.matching("lstm/", "") else 1.0
    warn, critical = bounds.warn * rounding, bounds.critical * rounding
    severity = 1.0 if value > critical else WARNING if value > warn else 0.0
    yield Finding(
        severity,
        key,
        value,
        warn,
        text=lambda: (
            f"log-probabilities computed before the first step differ from the stored ones by up to {number(value)} nats "
            f"(rounding in {precision} explains {number(warn)}): training does not see what the policy acted on"
        ),
    )


def beyond(view: View, key: str, bound: float, text: Callable[[float], str]) -> Iterator[Finding]:
    """Certain where a value exceeds a bound; `text` tells of the value."""
    value = view.get(key)
    if value is not None:
        yield Finding(hard(value > bound), key, value, bound, text=lambda: text(value))


def gae_identity(view: View) -> Iterator[Finding]:
    """A + V = R is broken."""

    def text(value: float) -> str:
        off = f"they are off by {number(value)} of the largest return (rounding explains 1e-5)"
        return f"returns are not advantages plus values: {off}"

    return beyond(view, "integrity/gae_identity", view.limits.gae_identity, text)


def adv_norm(view: View) -> Iterator[Finding]:
    """Advantages that are said to be normalised are not.

    A floor under their standard deviation, or one that is rounding, leaves it below 1 on purpose; so does an unbiased one, of few rows.
    """
    key, bound = "integrity/adv_norm", view.limits.adv_norm
    value = view.get(key)
    if value is None or not view.facts.get("normalize_advantages"):
        return
    spread = view.get("adv/raw/std")
    floor = float(view.facts.get("advantage_std_floor") or 0.0)
    if view.get("adv/std_floored") or (spread is not None and spread <= 1.01 * max(floor, 1e-6)):
        value = abs(view.get("adv/norm/mean") or 0.0)
    value -= FEW_ROWS / view.transitions if view.transitions else 0.0
    seen = view.memory.setdefault("seen", [])
    seen.append(value)
    del seen[:-LASTS]
    whole = view.facts.get("normalize_minibatches") is False
    lasting = whole and len(seen) == LASTS and sum(seen) / LASTS > view.limits.adv_norm_lasting
    mean, std = view.get("adv/norm/mean"), view.get("adv/norm/std")
    shown = (
        f": their mean is {number(mean)}, their standard deviation {number(std)}"
        if mean is not None and std is not None
        else ""
    )
    yield Finding(
        hard(value > bound or lasting),
        key,
        value,
        bound,
        text=lambda: f"the advantages in use are not normalised{shown}",
    )


def mask_violation(view: View) -> Iterator[Finding]:
    """Forbidden actions were taken."""
    return beyond(
        view,
        "integrity/mask_violation",
        0.0,
        lambda value: f"{number(value)} actions were taken that their mask forbids",
    )


def rows_repeated(view: View) -> Iterator[Finding]:
    """A pass sees the same transitions again."""

    def text(value: float) -> str:
        return f"{number(100 * value)} % of the rows of a pass over the rollout had been in it before"

    return beyond(view, "integrity/rows_repeated", view.limits.rows_repeated, text)


def buffer_age(view: View) -> Iterator[Finding]:
    """Data of an older policy."""

    def text(value: float) -> str:
        return f"the update learns from data that is {number(value)} updates old"

    return beyond(view, "buffer/age_updates", view.limits.buffer_age, text)


RULES = (
    Rule(
        type="integrity/ratio_init",
        judge=ratio_init,
        inputs=("integrity/ratio_init",),
        facts=("precision",),
        n_off=1,
        duration=10,
        evidence=(
            "policy/kl_first",
            "policy/head/*/std/min",
            "policy/head/*/blame",
            "lstm/staleness_first",
            "norm/*/drift",
        ),
        certain=True,
        partial=True,
        source="bounds by precision, times max(1, 1/σ_min), and wider for actions of tiny probability; trl#454, sb3-contrib#75",
    ),
    Rule(
        type="integrity/gae_identity",
        judge=gae_identity,
        inputs=("integrity/gae_identity",),
        n_off=1,
        duration=10,
        evidence=("adv/raw/mean", "adv/raw/std", "ret/mean", "ret/std", "buffer/age_updates"),
        certain=True,
        partial=True,
        source="identity of GAE, 1506.02438",
    ),
    Rule(
        type="integrity/adv_norm",
        judge=adv_norm,
        inputs=("integrity/adv_norm",),
        facts=("normalize_advantages",),
        applies=lambda facts: facts.get("normalize_advantages", True),
        certain=True,
        n_off=1,
        duration=5,
        evidence=("adv/norm/mean", "adv/norm/std", "adv/raw/mean", "adv/raw/std"),
        source="over the whole update, so that normalisation in minibatches passes as well",
    ),
    Rule(
        type="integrity/mask_violation",
        judge=mask_violation,
        inputs=("integrity/mask_violation",),
        optional=True,
        n_off=1,
        duration=10,
        evidence=("policy/head/*/decision_frac",),
        certain=True,
        partial=True,
        source="identity",
    ),
    Rule(
        type="integrity/rows_repeated",
        judge=rows_repeated,
        inputs=("integrity/rows_repeated",),
        optional=True,
        certain=True,
        n_off=1,
        duration=5,
        evidence=("integrity/adv_norm", "grad/align/*"),
        source="a pass is a permutation of the rollout; more than drawing with replacement explains",
    ),
    Rule(
        type="integrity/buffer_age",
        judge=buffer_age,
        inputs=("buffer/age_updates",),
        certain=True,
        n_off=1,
        duration=5,
        evidence=("integrity/ratio_init",),
        source="Jones 2021, sample staleness",
    ),
)
