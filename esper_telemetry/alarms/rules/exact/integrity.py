"""Numbers that are not finite, and identities that hold in every correct trainer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal

from esper_telemetry.alarms.judges import AboveBound
from esper_telemetry.alarms.rule import AlarmRule, Finding, View, above, count, hard, number
from esper_telemetry.equations.equation import EQUATION_KEY, equations

NONFINITE: Final = "_nonfinite"
"""Ending of the keys that count what was left out of a metric because it was not finite."""

NONFINITE_KEY: Final = "numerics/nonfinite"
TRAINING_FAMILIES = (
    "reward",
    "norm",
    "buffer",
    "lstm",
    "ret",
    "adv",
    "value",
    "episode",
    "integrity",
    "policy",
    "loss",
    "repr",
    "grad",
    "opt",
    "numerics",
)
"""Families whose counters speak for the run, causes first; those of numbers that users log do not."""


def nonfinite(view: View) -> Iterator[Finding]:
    """NaN or infinity in data, losses, gradients or weights."""
    keys = (NONFINITE_KEY, "reward/nonfinite", *view.matching("", NONFINITE))
    counts = {
        key: view.values[key]
        for key in keys
        if view.values.get(key, 0.0) > 0 and key.partition("/")[0] in TRAINING_FAMILIES
    }
    if not counts and NONFINITE_KEY not in view.values:
        return
    total = counts.get(NONFINITE_KEY) or max(counts.values(), default=0.0)
    places = [key.removesuffix(NONFINITE) for key in counts if key != NONFINITE_KEY]
    places.sort(key=lambda key: TRAINING_FAMILIES.index(key.partition("/")[0]))
    where = f", among them in {', '.join(places[:3])}" if places else ""
    yield Finding(float(bool(counts)), NONFINITE_KEY, total, 0.0).with_text(
        lambda: f"{number(total)} numbers are NaN or infinite{where}"
    )


Grade = Literal["ok", "warn", "crit"]


@dataclass(frozen=True, slots=True)
class PrecisionBounds:
    """Strict upper bounds in nats; above `critical` the policy is not the one that acted."""

    warn: float
    critical: float


RATIO_INIT_BOUNDS = {
    "fp32": PrecisionBounds(1e-5, 1e-3),
    "tf32": PrecisionBounds(1e-3, 1e-2),
    "bf16": PrecisionBounds(2e-2, 5e-2),
    "fp16": PrecisionBounds(2e-2, 5e-2),
}
"""By compute precision. Rounding alone stays below `warn`; huggingface/trl#454 and sb3-contrib#75 lie above `critical`."""


def ratio_init_bounds(precision: str, *, smallest_std: float | None = None) -> PrecisionBounds:
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
    return PrecisionBounds(bounds.warn * factor, bounds.critical * factor)


def ratio_init_grade(value: float, precision: str, *, smallest_std: float | None = None) -> Grade:
    """Grade of a value of `integrity/ratio_init`; arguments as for `ratio_init_bounds`."""
    bounds = ratio_init_bounds(precision, smallest_std=smallest_std)
    if value > bounds.critical:
        return "crit"
    return "warn" if value > bounds.warn else "ok"


UNLIKELY_NATS = 5.0
"""Nats of the unlikeliest action from which on bounds grow with it: so do logits, and with them the rounding of their differences."""

MEMORY_ROUNDING = 4.0
"""Factor of the bounds where a memory carries rounding from step to step; healthy runs came to 1.4 times the plain bound."""

INVERSE_ROUNDING = 30.0
"""Factor of the bounds where actions are taken back through a tanh (fact `inverts_squash`), whose inverse multiplies rounding near the ends
of the range; healthy runs of TorchRL's `TanhNormal` came to ten times the plain bound."""

WARNING_SEVERITY = 0.5
"""Severity between the two bounds: it raises the alarm and no level."""

RATIO_INIT_FACTOR = above(
    "ratio_init_factor", 1.0, "times the bounds of the compute precision, for integrity/ratio_init"
)


@dataclass(slots=True)
class RatioInitJudge:
    """Stored log-probabilities that are not those of the policy, before the first step.

    A saturated memory may round by more once: where one is in use, a small difference needs two updates in a row.

    Attributes:
        before: severity in the update before.
    """

    before: float = 1.0

    def __call__(self, view: View) -> Iterator[Finding]:
        key = "integrity/ratio_init"
        value, precision = view.get(key), view.facts.precision
        if value is None or precision not in RATIO_INIT_BOUNDS:
            return
        spreads = [std for _, _, std in view.labelled("policy/head/", "/std/min") if std > 0]
        bounds = ratio_init_bounds(precision, smallest_std=min(spreads, default=None))
        rounding = view.limits[RATIO_INIT_FACTOR] * max(1.0, abs(view.get("policy/logp/min") or 0.0) / UNLIKELY_NATS)
        remembers = bool(view.matching("lstm/", ""))
        rounding *= MEMORY_ROUNDING if remembers else 1.0
        rounding *= INVERSE_ROUNDING if view.facts.inverts_squash else 1.0
        warn, critical = bounds.warn * rounding, bounds.critical * rounding
        severity = 1.0 if value > critical else WARNING_SEVERITY if value > warn else 0.0
        before, self.before = self.before, severity
        severity = min(severity, before) if remembers and severity < 1 else severity
        yield Finding(severity, key, value, warn).with_text(
            lambda: (
                f"log-probabilities computed before the first step differ from the stored ones by up to {number(value)} nats "
                f"(rounding in {precision} explains {number(warn)}): training does not see what the policy acted on"
            )
        )


MEAN_UPDATES = 5
"""Updates over which small deviations of normalised advantages are averaged: healthy runs have 0.0005 in each."""

STRIDE = "telemetry/minibatch_stride"
FEW_ROWS = 1.0
"""Tolerance over the rows that are normalised together: an unbiased standard deviation of 8 leaves 0.03, with masked rows twice as much."""

ADV_NORM = above("adv_norm", 0.05, "distance of normalised advantages from mean 0 and standard deviation 1")
ADV_NORM_LASTING = above(
    "adv_norm_lasting", 0.01, "the same on average over five updates, where whole rollouts are normalised"
)


@dataclass(slots=True)
class AdvantageNormJudge:
    """Advantages that are declared to be normalised and are not.

    A floor under their standard deviation, or one that is rounding, leaves it below 1 on purpose; so does an unbiased one, of few rows.
    """

    distances: list[float] = field(default_factory=list)

    def __call__(self, view: View) -> Iterator[Finding]:
        key, bound = "integrity/adv_norm", view.limits[ADV_NORM]
        value = view.get(key)
        if value is None or not view.facts.normalize_advantages:
            return
        whole = view.facts.normalize_minibatches is False
        if whole and view.get(STRIDE):  # of a part of the rows that are normalised together
            return
        spread = view.get("adv/raw/std")
        floor = view.facts.advantage_std_floor or 0.0
        if view.get("adv/std_floored") or (spread is not None and spread <= 1.01 * max(floor, 1e-6)):
            value = abs(view.get("adv/norm/mean") or 0.0)
        rows: float | None = view.transitions
        if view.facts.normalize_minibatches is not False:
            rows = view.values.get("adv/minibatch_rows", rows)
        value -= FEW_ROWS / rows if rows else 0.0
        distances = self.distances
        distances.append(value)
        del distances[:-MEAN_UPDATES]
        full = len(distances) == MEAN_UPDATES
        lasting = whole and full and sum(distances) / MEAN_UPDATES > view.limits[ADV_NORM_LASTING]
        mean, std = view.get("adv/norm/mean"), view.get("adv/norm/std")
        moments = (
            f": their mean is {number(mean)}, their standard deviation {number(std)}"
            if mean is not None and std is not None
            else ""
        )
        yield Finding(hard(value > bound or lasting), key, value, bound).with_text(
            lambda: f"the advantages in use are not normalised{moments}"
        )


GAE_IDENTITY = above("gae_identity", 1e-4, "relative error of advantages + values = returns")
RETURNS = "returns"
"""Name of the equation of the critic's targets."""


@dataclass(slots=True)
class ReturnsJudge:
    """Returns that are not advantages plus values, unless a published target explained them when the equation was checked last."""

    variant: bool = False

    def __call__(self, view: View) -> Iterator[Finding]:
        key, bound = "integrity/gae_identity", view.limits[GAE_IDENTITY]
        equation, value = equations()[RETURNS], view.get(key)
        if EQUATION_KEY + equation.label() in view.values:
            self.variant = any(one.variant for one in equation.explanations(view.values))
        if value is not None:
            yield Finding(hard(value > bound and not self.variant), key, value, bound).with_text(
                lambda: (
                    f"returns are not advantages plus values: they are off by {number(value)} of the largest return "
                    "(rounding explains 1e-5)"
                )
            )


ROWS_REPEATED = above(
    "rows_repeated", 0.45, "share of a pass's rows that come again: drawing with replacement gives 0.37"
)
BUFFER_AGE = count("buffer_age", 0, "updates that data may be old")

exact_check = partial(AlarmRule, hard=True, n_off=1, pieces=("transitions", "stability"), certain=True)
"""Declare an alarm of something that is always a mistake."""

RULES = (
    exact_check(
        type=NONFINITE_KEY,
        inputs=(NONFINITE_KEY,),
        meaning="A NaN or an infinity has appeared in the data, the losses, the gradients or the weights.",
        action="Look at the first non-finite tensor, if the record names one; lower the learning rate, clip gradients, check the rewards "
        "and observations of the environment, bound log standard deviations.",
        judge=nonfinite,
        source="always an error; ray#28283, coach#87",
        rank=10,
        debug_updates=10,
        evidence=(
            *("reward/nonfinite", "grad/global/*", "loss/*", "policy/kl", "opt/lr"),
            *("value/*_nonfinite", "adv/*_nonfinite", "ret/*_nonfinite", "policy/*_nonfinite"),
        ),
        pieces=("stability", "layers"),
        partial=True,
    ),
    exact_check(
        type="integrity/ratio_init",
        inputs=("integrity/ratio_init", "policy/kl_first"),
        meaning="The log-probabilities that were stored are not those that the trainer computes now, before anything was learned.",
        action="Store the observation, the mask and the hidden state that the policy acted on; keep all columns in the same order of rows; "
        "freeze normalisers and dropout between acting and training; let no operation, such as a softmax over the wrong axis, mix the rows "
        "of a batch.",
        judge=RatioInitJudge(),
        bounds=(RATIO_INIT_FACTOR,),
        # No claim: logits that have exploded are rounded by more than the bounds allow.
        source="bounds by precision, times max(1, 1/σ_min), and wider for actions of tiny probability; trl#454, sb3-contrib#75",
        rank=60,
        facts=("precision",),
        debug_updates=10,
        evidence=(
            "policy/kl_first",
            "policy/head/*/std/min",
            "policy/head/*/blame",
            "lstm/staleness_first",
            "norm/*/drift",
        ),
        partial=True,
    ),
    exact_check(
        type="integrity/gae_identity",
        inputs=("integrity/gae_identity",),
        meaning="Returns are not advantages plus values: rows of the buffer are stale or shuffled against each other.",
        action="Check that advantages, values and returns are indexed and masked alike, and that nothing overwrites the buffer in the "
        "update.",
        judge=ReturnsJudge(),
        bounds=(GAE_IDENTITY,),
        source="identity of GAE, 1506.02438",
        rank=40,
        claim=True,
        debug_updates=10,
        evidence=("adv/raw/mean", "adv/raw/std", "ret/mean", "ret/std", "buffer/age_updates"),
        partial=True,
    ),
    exact_check(
        type="integrity/adv_norm",
        inputs=("integrity/adv_norm", "adv/norm/mean", "adv/norm/std"),
        meaning="Advantages are said to be normalised and are not.",
        action="Normalise over the rows that count, not over padding; once, and after everything else is done to the advantages.",
        judge=AdvantageNormJudge(),
        bounds=(ADV_NORM, ADV_NORM_LASTING),
        source="over the whole update, so that normalisation in minibatches passes as well",
        rank=80,
        claim=True,
        facts=("normalize_advantages",),
        applies=lambda facts: facts.normalize_advantages is not False,
        debug_updates=5,
        evidence=("adv/norm/mean", "adv/norm/std", "adv/raw/mean", "adv/raw/std"),
    ),
    exact_check(
        type="integrity/mask_violation",
        inputs=("integrity/mask_violation",),
        meaning="Actions were taken that their mask forbids.",
        action="Apply the mask of the step that is acted on, before sampling; check the order of auto-reset and mask.",
        judge=AboveBound("integrity/mask_violation", 0.0, "{number} actions were taken that their mask forbids"),
        source="identity",
        rank=20,
        claim=True,
        debug_updates=10,
        evidence=("policy/head/*/decision_frac",),
        optional=True,
        partial=True,
    ),
    exact_check(
        type="integrity/rows_repeated",
        inputs=("integrity/rows_repeated",),
        meaning="A pass over the rollout sees some transitions again and again, and leaves others out.",
        action="Draw a new permutation of the rollout for each pass, and cut it into minibatches that do not overlap.",
        judge=AboveBound(
            "integrity/rows_repeated",
            ROWS_REPEATED,
            "{percent} of the rows of a pass over the rollout had been in it before",
        ),
        bounds=(ROWS_REPEATED,),
        source="a pass is a permutation of the rollout; more than drawing with replacement explains",
        rank=70,
        claim=True,
        debug_updates=5,
        evidence=("integrity/adv_norm", "grad/align/*"),
        optional=True,
    ),
    exact_check(
        type="integrity/buffer_age",
        inputs=("buffer/age_updates",),
        meaning="The update learns from data that an older policy collected.",
        action="Clear the buffer after each update, or correct for the age (V-trace).",
        judge=AboveBound("buffer/age_updates", BUFFER_AGE, "the update learns from data that is {number} updates old"),
        bounds=(BUFFER_AGE,),
        source="Jones 2021, sample staleness",
        rank=30,
        debug_updates=5,
        evidence=("integrity/ratio_init",),
    ),
)
