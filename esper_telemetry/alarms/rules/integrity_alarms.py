"""Alarms about non-finite numbers, and about identities that hold in every correct trainer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

from esper_telemetry.alarms.alarm_bounds import above, count, hard
from esper_telemetry.alarms.judges import AboveBound, Before, Recent, StateJudge, reading
from esper_telemetry.alarms.rule import WARNING, Finding, View, alarm
from esper_telemetry.core.messages import number
from esper_telemetry.equations.equation import EQUATION_KEY, equations

NONFINITE: Final = "_nonfinite"  # ending of the keys that count non-finite values left out of a metric
NONFINITE_KEY: Final = "numerics/nonfinite"
TRAINING_FAMILIES = (
    *("reward", "norm", "buffer", "lstm", "ret", "adv", "value", "episode", "integrity", "policy", "loss", "repr"),
    *("grad", "opt", "numerics"),
)
"""Families whose counters count, causes first; numbers that users log do not."""


def nonfinite(view: View) -> Iterator[Finding]:
    """NaN or infinity in data, losses, gradients or weights."""
    keys = (NONFINITE_KEY, "reward/nonfinite", *view.matching("", NONFINITE))
    counts = {key: view.values[key] for key in keys if view.values.get(key, 0.0) > 0 and key.partition("/")[0] in TRAINING_FAMILIES}
    if not counts and NONFINITE_KEY not in view.values:
        return
    total = counts.get(NONFINITE_KEY) or max(counts.values(), default=0.0)
    places = [key.removesuffix(NONFINITE).removesuffix("/nonfinite") for key in counts if key != NONFINITE_KEY]
    places.sort(key=lambda key: TRAINING_FAMILIES.index(key.partition("/")[0]))
    where = f", for example in {', '.join(places[:3])}" if places else ""
    yield Finding(float(bool(counts)), NONFINITE_KEY, total, 0.0).with_text(
        lambda: f"{number(total)} numbers have been NaN or infinite{where}"
    )


@dataclass(frozen=True, slots=True)
class PrecisionBounds:
    """Strict upper bounds in nats; above `critical`, another policy acted."""

    warn: float
    critical: float

    def severity(self, value: float, rounding: float = 1.0) -> float:
        """Severity of a value of `integrity/ratio_init`, whose bounds are `rounding` times as large."""
        return 1.0 if value > self.critical * rounding else WARNING if value > self.warn * rounding else 0.0


RATIO_INIT_BOUNDS = {
    "fp32": PrecisionBounds(1e-5, 1e-3),
    "tf32": PrecisionBounds(1e-3, 1e-2),
    "bf16": PrecisionBounds(2e-2, 5e-2),
    "fp16": PrecisionBounds(2e-2, 5e-2),
}
"""By compute precision. Rounding stays below `warn`; huggingface/trl#454 and sb3-contrib#75 are above `critical`."""


def ratio_init_bounds(precision: str, *, smallest_std: float | None = None) -> PrecisionBounds:
    """Bounds for `integrity/ratio_init` by compute precision; raises ValueError for an unknown one.

    Rounding of Gaussian log-probabilities is proportional to 1/σ, so bounds grow with 1/`smallest_std`.
    """
    if precision not in RATIO_INIT_BOUNDS:
        raise ValueError(f"precision must be one of {', '.join(RATIO_INIT_BOUNDS)}, got {precision!r}")
    factor = max(1.0, 1.0 / smallest_std) if smallest_std else 1.0
    bounds = RATIO_INIT_BOUNDS[precision]
    return PrecisionBounds(bounds.warn * factor, bounds.critical * factor)


UNLIKELY_NATS = 5.0
"""Negative log-probability of the least likely action above which bounds grow with it, because larger logits round more."""

MEMORY_ROUNDING = 4.0
"""Factor of the bounds for a memory, which accumulates rounding over steps; healthy runs reached 1.4 times the plain bound."""

INVERSE_ROUNDING = 30.0
"""Factor of the bounds if actions are inverted through a tanh (fact `inverts_squash`), which amplifies rounding near the ends of the range;
healthy runs of TorchRL's `TanhNormal` reached ten times the plain bound."""


OTHER_ROUNDING = 50.0
"""Factor of the bounds if no entropy of the distributions is known: a correct Beta density, a quotient of gamma functions, reached 3 times
the plain bound, and a public script that inverts a tanh in its own density 24 times."""

RATIO_FACTOR = above("ratio_init_factor", 1.0, "times the bounds of the compute precision, for integrity/ratio_init")


OF_PAIRS = (
    "Give new and old log-probabilities the shape [N]: the loss has N² ratios of N rows, because [N, 1] is broadcast against [N], or "
    "because `probs[:, actions]` takes the actions of all rows for each row instead of `gather`."
)
"""Advice for a ratio of N² numbers; see `Facts.loss_pairs`."""

AGREED = (
    "Both agreed in earlier updates, so look for what training has changed since: the weights of a separate policy that acts (copy them "
    "before each rollout), the statistics of a normaliser, or a recurrent state that is carried into the rollout."
)
"""Advice for a difference that is not there from the first update on."""

IMPOSSIBLE = (
    "An action that was taken is nearly impossible in training: store each action with the mask that it was drawn with, and with its own "
    "observation, in the same row."
)
IMPOSSIBLE_NATS = 30.0
"""Advice for log-probabilities that differ by so much that one of them is of a masked choice."""

AGREED_NATS = 0.01
"""Difference that is more than rounding in any precision."""


@reading("integrity/ratio_init")
def ratio_init(view: View, value: float, before: Before) -> Iterator[Finding]:
    """Stored log-probabilities that differ from the policy's before the first optimizer step.

    A saturated memory may occasionally round more, so with a memory a small difference must occur in two updates in a row.
    """
    precision = view.facts.precision
    if precision not in RATIO_INIT_BOUNDS:
        return
    spreads = [std for _, _, std in view.labelled("policy/head/", "/std/min") if std > 0]
    bounds = ratio_init_bounds(precision, smallest_std=min(spreads, default=None))
    rounding = view.limits[RATIO_FACTOR] * max(1.0, abs(view.get("policy/logp/min") or 0.0) / UNLIKELY_NATS)
    remembers = bool(view.matching("lstm/", ""))
    rounding *= MEMORY_ROUNDING if remembers else 1.0
    rounding *= INVERSE_ROUNDING if view.facts.inverts_squash else 1.0
    rounding *= OTHER_ROUNDING if view.facts.columns_by_name and view.get("policy/entropy") is None else 1.0
    warn, severity = bounds.warn * rounding, bounds.severity(value, rounding)
    earlier = before.swap(severity)
    severity = min(severity, earlier) if remembers and severity < 1 else severity
    advice = AGREED if earlier == 0 and value > AGREED_NATS else IMPOSSIBLE if value > IMPOSSIBLE_NATS and not spreads else None
    advice = OF_PAIRS if view.facts.loss_pairs else advice
    finding = Finding(severity, "integrity/ratio_init", value, warn).with_advice(None if advice is None else advice.__str__)
    yield finding.says(
        "log-probabilities computed before the first optimizer step have differed from the stored ones by up to {} nats "
        f"(rounding in {precision} explains {{}}): training has other inputs or another formula than the acting policy",
        *(value, warn),
    )


MEAN_UPDATES = 5
"""Updates over which small deviations of normalised advantages are averaged; they are 0.0005 in healthy runs."""

STRIDE = "telemetry/minibatch_stride"
FEW_ROWS = 1.0
"""Tolerance times the number of rows that are normalised together: an unbiased standard deviation of 8 rows deviates by 0.03, with masked
rows by twice as much."""

ADV_NORM = above("adv_norm", 0.05, "distance of normalised advantages from mean 0 and standard deviation 1")
ADV_NORM_LASTING = above("adv_norm_lasting", 0.01, "the same, mean of five updates, if whole rollouts are normalised")


@reading("integrity/adv_norm")
def advantage_norm(view: View, value: float, distances: Recent) -> Iterator[Finding]:
    """Advantages that are declared as normalised but are not.

    The standard deviation may be below 1 on purpose: if it has a floor, if it is only rounding, or if an unbiased estimate of few rows is
    used.
    """
    whole = view.facts.normalize_minibatches is False
    # with a stride, only part of the rows that are normalised together is measured
    if not view.facts.normalize_advantages or (whole and view.get(STRIDE)):
        return
    spread, floor = view.get("adv/raw/std"), view.facts.advantage_std_floor or 0.0
    mean, std, bound = view.get("adv/norm/mean"), view.get("adv/norm/std"), view.limits[ADV_NORM]
    if view.get("adv/std_floored") or (spread is not None and spread <= 1.01 * max(floor, 1e-6)):
        value = abs(mean or 0.0)
    rows: float | None = view.transitions
    if not whole:
        rows = view.values.get("adv/minibatch_rows", rows)
    value -= FEW_ROWS / rows if rows else 0.0
    average = distances.mean(value)
    lasting = whole and average is not None and average > view.limits[ADV_NORM_LASTING]
    finding, words = Finding(hard(value > bound or lasting), "integrity/adv_norm", value, bound), ""
    if mean is not None and std is not None:
        words = f": their mean is {number(mean)}, their standard deviation {number(std)}"
    yield finding.says("the advantages in use have not been normalised, although the settings require it{}", words)


GAE_IDENTITY = above("gae_identity", 1e-4, "relative error of advantages + values = returns")
RETURNS = "returns"  # name of the equation of the critic's targets


def returns_identity(view: View, variant: list[bool]) -> Iterator[Finding]:
    """Returns that differ from advantages plus values, unless a published target explained them in the last check of the equation.

    Columns that were found by name may be others, so there a mistake must have explained them.
    """
    key, bound = "integrity/gae_identity", view.limits[GAE_IDENTITY]
    equation, value = equations()[RETURNS], view.get(key)
    if EQUATION_KEY + equation.label() in view.values:
        variant[:] = [one.variant for one in equation.explanations(view.values)]
    if view.facts.columns_by_name and not variant:
        return
    if value is not None:
        words = (
            "returns have differed from advantages plus values by {} of the largest return (rounding explains 1e-5), so the critic learns "
            "wrong targets"
        )
        yield Finding(hard(value > bound and not any(variant)), key, value, bound).says(words, value)


REPEATED = above("rows_repeated", 0.45, "share of repeated rows in an epoch: drawing with replacement gives 0.37")
BUFFER_AGE = count("buffer_age", 0, "largest age of data, updates")

exact_check = partial(alarm, hard=True, n_off=1, pieces=("transitions", "stability"), certain=True)
"""Declares an alarm about something that is always a mistake."""

RULES = (
    exact_check(NONFINITE_KEY, NONFINITE_KEY, rank=10, partial=True, debug_updates=10)
    .says(
        "NaN or infinity has appeared in the data, the losses, the gradients or the weights.",
        "Look at the first non-finite tensor; lower the learning rate, clip gradients, check the rewards and observations of the "
        "environment, set a lower bound for log standard deviations.",
        "always an error; ray#28283, coach#87",
    )
    .shows(*("reward/nonfinite", "grad/global/*", "loss/*", "policy/kl", "opt/lr"))
    .shows(*("value/*_nonfinite", "adv/*_nonfinite", "ret/*_nonfinite", "policy/*_nonfinite"))
    .shows(pieces=("stability", "layers"))
    .judged(nonfinite),
    # Not a claim: exploded logits are rounded by more than the bounds allow.
    exact_check("integrity/ratio_init", rank=60, partial=True, debug_updates=10)
    .reads("integrity/ratio_init", "policy/kl_first")
    .needs(facts=("precision",))
    .says(
        "The stored log-probabilities differ from the log-probabilities that the trainer computes before the first optimizer step.",
        "Store what the policy acted on (observation, mask, hidden state), and the action before it is squashed or cut; keep the rows of "
        "all columns in the same order; sum both log-probabilities over the action dimensions; freeze normalisers and dropout between the "
        "rollout and training; check that no operation, such as a softmax or a GRU over the wrong axis, mixes the rows of a batch.",
        "bounds by precision, times max(1, 1/σ_min), and wider for actions of tiny probability; trl#454, sb3-contrib#75",
    )
    .shows("policy/kl_first", "policy/head/*/std/min", "policy/head/*/blame", "lstm/staleness_first", "norm/*/drift")
    .judged(StateJudge(ratio_init, Before(1.0)), RATIO_FACTOR),
    exact_check("integrity/gae_identity", "integrity/gae_identity", rank=40, claim=True, partial=True, debug_updates=10)
    .says(
        "Returns differ from advantages plus values: rows of the buffer are stale or in a different order.",
        "Check that advantages, values and returns are indexed and masked in the same way, and that nothing overwrites the buffer.",
        "identity of GAE, 1506.02438",
    )
    .shows("adv/raw/mean", "adv/raw/std", "ret/mean", "ret/std", "buffer/age_updates")
    .judged(StateJudge(returns_identity, list[bool]()), GAE_IDENTITY),
    exact_check("integrity/adv_norm", rank=80, claim=True, debug_updates=5)
    .reads("integrity/adv_norm", "adv/norm/mean", "adv/norm/std")
    .needs(facts=("normalize_advantages",), applies=lambda facts: facts.normalize_advantages is not False)
    .says(
        "Advantages are declared as normalised but are not.",
        "Normalise over the valid rows, not over padding; normalise once, as the last operation on the advantages.",
        "measured over the whole update, so normalisation within minibatches also passes",
    )
    .shows("adv/norm/mean", "adv/norm/std", "adv/raw/mean", "adv/raw/std")
    .judged(StateJudge(advantage_norm, Recent(MEAN_UPDATES)), ADV_NORM, ADV_NORM_LASTING),
    exact_check("integrity/mask_violation", rank=20, claim=True, optional=True, partial=True, debug_updates=10)
    .reads("integrity/mask_violation")
    .says(
        "Actions were taken that their mask forbids.",
        "Apply the current step's mask before sampling; after an automatic reset, use the mask of the new episode.",
        "identity",
    )
    .shows("policy/head/*/decision_frac")
    .judged(AboveBound("integrity/mask_violation", 0.0, "{number} actions have been taken although their mask forbids them")),
    exact_check("integrity/rows_repeated", rank=70, claim=True, optional=True, debug_updates=5)
    .reads("integrity/rows_repeated")
    .says(
        "An epoch over the rollout repeats some transitions and leaves others out.",
        "Draw a new permutation of the rollout for each epoch, and split it into minibatches that do not overlap.",
        "an epoch is a permutation of the rollout; the bound is above drawing with replacement",
    )
    .shows("integrity/adv_norm", "grad/align/*")
    .judged(
        AboveBound(
            "integrity/rows_repeated",
            REPEATED,
            "{percent} of the rows in an epoch over the rollout have been repetitions, so other rows are left out",
        ),
        REPEATED,
    ),
    exact_check("integrity/buffer_age", "buffer/age_updates", rank=30, debug_updates=5)
    .says(
        "The update learns from data that an older policy collected.",
        "Clear the buffer after each update, or correct for the age (V-trace).",
        "Jones 2021, sample staleness",
    )
    .shows("integrity/ratio_init")
    .judged(
        AboveBound(
            "buffer/age_updates",
            BUFFER_AGE,
            "updates have learned from data of an older policy, although PPO needs on-policy data: its age in updates is {number}",
        ),
        BUFFER_AGE,
    ),
)
