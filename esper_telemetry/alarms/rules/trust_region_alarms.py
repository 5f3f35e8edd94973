"""Policy steps that are too large, or too small.

Policies that are nearly deterministic, and policies with memory, get a large KL divergence from a handful of rare actions, lose most of a
minibatch's effective samples to them, and keep learning. A learning rate that is too high moves nearly all samples. So a KL divergence
counts in full only if typical samples account for a twelfth of it, and an explosion of ratios also needs their 99th percentile.

The log-ratio of a Gaussian action is a sum over its D dimensions, and Adam moves each mean by about the same amount. So the KL divergence
grows with D, and the spread of log-ratios with √D. Published settings with narrow Gaussians (σ = 0.14) move 1 to 17 dimensions by 0.006
to 0.026 nats each. Bounds are therefore per dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from math import inf
from statistics import NormalDist, median
from typing import Final

from esper_telemetry.alarms.alarm_bounds import SMALLEST_DIVISOR, Ramp, above, below, count, hard
from esper_telemetry.alarms.judges import AnnealedRate, Recent, StateJudge, reading
from esper_telemetry.alarms.rule import WARNING, Finding, View, alarm
from esper_telemetry.alarms.verdict.published_settings import INITIAL_STD, PUBLISHED, SMALL_FEATURES
from esper_telemetry.core.messages import number, percent

RATIOS = ("policy/ratio/*", "policy/head/*/blame", "policy/head/*/ratio/*", "policy/logp/min", "policy/kl*", "opt/lr")
STEP_COUNT_UPDATES = 10  # updates after which their number of optimizer steps is typical
KL_SPIKE = Ramp("kl_spike", 0.03, 0.3, "KL divergence of an update, nats per dimension of a Gaussian action")
KL_SUDDEN = Ramp("kl_sudden", 0.1, 1.0, "the same for a single update after a smaller one")
KL_TYPICAL = count("kl_typical", 1 / 12, "share of the KL from typical samples, above which the KL divergence counts in full")
KL_FEW = count("kl_few", 1 / 3, "weight of a KL divergence that comes from a few samples")
USUAL_CLIP = 0.2  # clip range if the run's facts have none


def action_dimensions(view: View) -> float:
    """Dimensions of the continuous actions; 1 if there are none or the record does not have them."""
    return max(1.0, sum(value for _, _, value in view.labelled("policy/head/", "/dimensions")))


def typical_kl(view: View, outside: float) -> float:
    """KL divergence of Gaussian log-ratios with that share outside the trust region: the part that typical samples account for.

    Log-ratios of a small step are normal with a variance of twice the KL divergence.
    """
    clip = view.facts.clip
    width = clip if clip is not None and clip > 0 else USUAL_CLIP
    tail = outside / 2
    if not 0 < tail < 0.5:
        return inf if tail >= 0.5 else 0.0
    return float((width / NormalDist().inv_cdf(tail)) ** 2 / 2)


PASSES = above("passes", 1.5, "optimizer steps of an update over the largest number so far")
KL_PASSES = Ramp("kl_passes", 1.0, 4.0, "KL over its median, if updates take many more steps than before")
WIDER: Final = "Raise the standard deviation (log_std_init, log_std), or set a lower bound for it."


def narrow_std(view: View, effect: str = "the KL divergence grows with its inverse square") -> str:
    """A clause about a head whose standard deviation is below all published initial values; otherwise empty.

    The KL divergence of a step is proportional to 1/σ², so a small σ makes it large even if the step is small.
    """
    for head, _, std in view.labelled("policy/head/", "/std/mean"):
        if max(std, view.values.get(f"policy/head/{head}/std_of_range", 0.0)) < INITIAL_STD.lowest:
            return f": the standard deviation of the head {head} is {number(std)}, and {effect}"
    return ""


@dataclass(slots=True)
class PolicySteps:
    """KL per dimension that counted in the previous update, the largest number of optimizer steps, and the updates it is based on."""

    before: float = 0.0
    most_steps: int = 0
    updates: int = 0

    def relative(self, view: View) -> float | None:
        """Optimizer steps over the largest number so far; None in the first ten updates."""
        steps = view.steps
        if steps is None:
            return None
        settled = self.most_steps > 0 and self.updates >= STEP_COUNT_UPDATES
        relative = steps / self.most_steps if settled else None
        if relative is None or relative <= view.limits[PASSES]:
            self.most_steps, self.updates = max(self.most_steps, steps), self.updates + 1
        return relative


def kl_spike(view: View, past: PolicySteps) -> Iterator[Finding]:
    """One update moved the policy very far, or two in a row moved it far; or two moved it further than usual, with many more steps.

    A KL divergence that comes from a few samples counts a third, or twelve times the part from typical samples. A single sample that has
    become thousands of times as likely can make the mean of r - 1 - log r arbitrarily large, so half the mean of log² r bounds it.
    """
    # some trainers log the mean negative log-ratio, which has the same expectation
    key, limits = "policy/kl" if "policy/kl" in view.values else "policy/kl_k1", view.limits
    value, share = view.get(key), view.get("policy/clip_frac")
    if value is None:
        return
    shared = bounded = min(value, view.values.get("policy/kl_k2", value))
    if share is not None:
        shared = min(bounded, typical_kl(view, share) / max(limits[KL_TYPICAL], SMALLEST_DIVISOR))
    counts = max(shared, bounded * limits[KL_FEW]) / action_dimensions(view)
    sudden = limits.log_severity(KL_SUDDEN, counts)
    lasting = limits.log_severity(KL_SPIKE, min(counts, past.before))
    past.before = counts
    passes, earlier = past.relative(view), view.previous.get(key)
    if passes is not None and earlier is not None:
        yield moved_by_passes(view, min(value, earlier), passes)
    bound = limits.log_middle(KL_SUDDEN if sudden >= lasting else KL_SPIKE) * value / max(counts, 1e-300)
    finding = Finding(max(sudden, lasting), key, value, bound, z=view.z(key))
    yield finding.with_advice((lambda: WIDER) if narrow_std(view) else None).says(
        "updates have moved the policy by a KL divergence of {} nats{}, too far for the rollout they learn from{}",
        *(value, partial(view.usual, key), partial(narrow_std, view)),
    )


def moved_by_passes(view: View, kl: float, passes: float) -> Finding:
    """The finding for more passes over a rollout than ever before; `kl` is the smaller value of two updates."""
    key, limits = "policy/kl", view.limits
    usual = view.baselines.median(key)
    relative = kl / usual if usual else 0.0
    severity = limits.log_severity(KL_PASSES, relative) if passes > limits[PASSES] else 0.0
    bound = usual and usual * limits.log_middle(KL_PASSES)
    return Finding(severity, key, kl, bound, adaptive=True, z=view.z(key), instance="passes").says(
        "updates have taken {:x} as many optimizer steps as before, and have moved the policy {:x} as far: by a KL divergence of {} nats{}",
        *(passes, relative, kl, partial(view.usual, key)),
    )


ESS = Ramp("ess", 0.4, 0.9, "share of the effective samples lost in the worst minibatch")
ESS_SUDDEN = Ramp("ess_sudden", 0.8, 1.0, "the same for a single update")
RATIO_SPREAD = Ramp("ratio_spread", 1.5, 6.0, "99th percentile of the probability ratios, required in addition")


@reading("policy/ess_frac_min")
def ratio_explosion(view: View, effective: float, past: list[tuple[float, float]]) -> Iterator[Finding]:
    """A few samples dominate the update: nearly all effective samples are lost at once, or many in two updates in a row.

    One sample in a minibatch suffices for either. So one sample in a hundred of the whole update must also have become far more likely,
    per dimension of a Gaussian action.
    """
    limits, largest, wide = view.limits, view.get("policy/ratio/max") or 0.0, view.get("policy/ratio/p99")
    spread = 1.0 if wide is None else limits.log_severity(RATIO_SPREAD, per_dimension(view, wide))
    lost = 1 - effective
    lost_before, spread_before = past.pop() if past else (0.0, 0.0)
    past.append((lost, spread))
    lasting = min(limits.severity(ESS, min(lost, lost_before)), spread, spread_before)
    severity = max(lasting, min(limits.severity(ESS_SUDDEN, lost), spread))
    yield Finding(severity, "policy/ess_frac_min", effective, 1 - limits.middle(ESS)).says(
        "the effective sample size of a minibatch has fallen to {:%} (usually 90 % or more), so a few samples dominate the update; the "
        "largest probability ratio is {}{}",
        *(effective, largest, partial(blamed_head, view)),
    )


def per_dimension(view: View, ratio: float) -> float:
    """Contribution of one dimension of a Gaussian action to a quantile of the ratios."""
    return float(max(ratio, 0.0) ** (1 / action_dimensions(view) ** 0.5))


def blamed_head(view: View) -> str:
    """The head responsible for most of the change, if there are several."""
    shares = {head: value for head, _, value in view.labelled("policy/head/", "/blame")}
    if len(shares) < 2:
        return ""
    head = max(shares, key=lambda name: shares[name])
    return f", {percent(shares[head])} of it from the head {head}"


KL_STALL = below("kl_stall", 1e-7, "largest KL of a minibatch in an update that did not move the policy")
KL_SLOW = below("kl_slow", 1e-5, "the same, median over twenty updates, while the return does not rise")
SLOW_UPDATES = 20  # updates in which the policy must have hardly moved
SLOW_STEPS = 16  # optimizer steps for which the bound on the KL holds; with fewer it shrinks with their square

DECIDED_ENTROPY = 0.03
"""Normalised entropy (in nats for logs without it) below which a policy is deterministic unless its return has not risen: it samples hardly
any action that could move it."""

MIN_LOWERED = 1e-12  # smallest factor by which a schedule lowers the expected KL
MIN_MOVED = 1e-5  # KL of the whole distributions above which a policy has moved even if its ratios are 1


@dataclass(slots=True)
class PolicyMoves:
    """Course of the learning rate, and how far the policy has moved.

    Attributes:
        largest: largest KL of a minibatch in the latest updates, rescaled to the highest learning rate so far.
        exact: KL of the whole distributions in the latest sampled update; 0 after an update whose ratios have moved, which makes it
            outdated.
        penalty: smallest weight of a penalty on the KL divergence so far.
    """

    rates: AnnealedRate = field(default_factory=AnnealedRate)
    penalty: float = inf
    largest: Recent = field(default_factory=partial(Recent, SLOW_UPDATES))
    exact: float = 0.0


def kl_stall(view: View, past: PolicyMoves) -> Iterator[Finding]:
    """A policy that does not move, or hardly moves for a long time while the return does not rise, without an annealed learning rate.

    The KL of a step is proportional to the square of the learning rate, so a schedule lowers the expected KL.
    """
    limits, rates, annealed = view.limits, past.rates, past.rates.stopped(view)
    # with a single step, as in A2C, the only minibatch precedes it: its effect is measured in sampled updates only
    value, rate = view.get("policy/kl_post" if view.steps == 1 else "policy/kl_max"), view.get("opt/lr")
    if value is None:
        return
    exact = past.exact = view.values.get("policy/kl_exact", past.exact) if value < limits[KL_SLOW] else 0.0
    lowered = 1.0
    if rate is not None and 0 < rate < rates.highest and not rates.abrupt:
        lowered = max(MIN_LOWERED, (rate / rates.highest) ** 2)
    middle = median(past.largest.add(value / lowered))
    entropy = view.values.get("policy/entropy_norm", view.values.get("policy/entropy", 1.0))
    decided = view.course.risen is not False and 0 <= entropy < DECIDED_ENTROPY
    bound = limits[KL_STALL] * lowered
    signal = view.get("adv/norm/std") != 0  # without differences of advantages, the policy has no reason to move
    stalled = value < bound and not annealed and not decided and signal
    slow_bound = limits[KL_SLOW] * min(1.0, (view.steps or SLOW_STEPS) / SLOW_STEPS) ** 2
    slow = past.largest.full and middle < slow_bound and view.course.risen is False and not annealed and not stalled
    severity = 1.0 if stalled else WARNING if slow else 0.0
    held, bound = (SLOW_UPDATES, slow_bound) if slow else (1, bound)
    finding = Finding(severity, "policy/kl_max", value, bound, held=held)
    if exact > MIN_MOVED:
        words = "probability ratios have stayed at 1 (KL {}), although the policy has moved by {} nats: the old log-probabilities are "
        yield finding.says(words + "recomputed, so nothing is clipped", value, exact)
        return
    conditions = "" if rate is None else f", at a learning rate of {number(rate)}"
    penalty, size = view.get("loss/penalty_coef"), view.get("obs/rms_max")
    past.penalty = min(past.penalty, penalty or inf)
    has_grown = penalty is not None and penalty > PENALTY_GROWTH * past.penalty
    if penalty is not None and has_grown:
        conditions += f", and the weight of the penalty on it has grown from {number(past.penalty)} to {number(penalty)}"
    if size is not None and size < SMALL_FEATURES:
        conditions += f", and the largest entry of the observations is about {number(size)}"
    words = "updates have not changed the policy, so it cannot learn: their KL divergence is at most {} nats{}"
    if slow:
        words = f"{SLOW_UPDATES} updates have hardly moved the policy: their KL divergence is at most {{}} nats (usually 0.002 to 0.02){{}}"
    yield finding.with_advice(
        lambda: GROWN_PENALTY if has_grown else stall_advice(rate, view.facts.optimizer, size, slow=slow, same=value == 0)
    ).says(words, middle if slow else value, conditions)


PENALTY_GROWTH: Final = 10.0
GROWN_PENALTY: Final = "Check how the weight of the penalty adapts: it must fall while the KL divergence is below its target."


def stall_advice(rate: float | None, optimizer: str | None, features: float | None, *, slow: bool, same: bool) -> str:
    """Advice for a policy that does not move, by the learning rate, the name of the optimizer and the size of the observations; its new
    and old log-probabilities may be the `same`.
    """
    if rate == 0:
        return "Set a learning rate above 0, or correct the schedule that lowered it to 0."
    if features is not None and features < SMALL_FEATURES:
        return "Scale observations to about 1, because small ones hardly change what networks return."
    published = PUBLISHED["learning_rate"]
    if rate is not None and 0 < rate < published.lowest:
        return f"Raise the learning rate to {number(published.p10)} or more, with Adam."
    if optimizer == "SGD":
        return "Use Adam, or raise the learning rate: plain SGD needs a much higher one."
    if slow:
        return "Raise the learning rate: the policy moves too little to learn. Plain SGD needs a much higher one than Adam."
    if rate is not None and rate > published.highest:
        return "Restart with a lower learning rate: a very large step can saturate a policy so that its gradient vanishes."
    if same:
        return (
            "Give the old policy weights of its own (`copy.deepcopy`), or store its log-probabilities when actions are taken: a KL of "
            "exactly 0 shows that both come from the same weights. Otherwise check that the policy's parameters are in the optimizer."
        )
    size = "" if rate is None else " If they do, raise the learning rate."
    return f"Check that the policy's parameters are in the optimizer and require gradients, and that advantages vary.{size}"


RATIO_COLLAPSE = Ramp("ratio_collapse", 0.1, 0.02, "first percentile of the probability ratios, per dimension of a Gaussian action")


@reading("policy/ratio/p01")
def ratio_collapse(view: View, value: float) -> Iterator[Finding]:
    """Actions that have become far less likely."""
    bound = view.limits.middle(RATIO_COLLAPSE) ** (action_dimensions(view) ** 0.5)
    severity = view.limits.severity(RATIO_COLLAPSE, per_dimension(view, value))
    words = "one action in a hundred has become {:x} less likely in a single update, so the step was too large for these actions"
    yield Finding(severity, "policy/ratio/p01", value, bound).says(words, 1 / max(value, 1e-30))


CLIP_FRAC = Ramp("clip_frac", 0.2, 0.5, "share of the samples outside the trust region")
CLIP_KL = above("clip_kl", 0.02, "KL divergence per dimension up to which leaving a narrow trust region is harmless, nats")
CLIP_USUAL = above("clip_usual", 1.25, "share over its median, if the return has risen with the usual share")

MIN_SAMPLES = 512
"""Environment steps over which the share outside the trust region is averaged: in a rollout of 8 it is a multiple of an eighth."""


@reading("policy/clip_frac")
def clip_saturation(view: View, value: float, shares: list[tuple[float, int]]) -> Iterator[Finding]:
    """Much of the batch is outside the trust region, averaged over updates with enough samples; `shares` are (share, steps) of each."""
    key, limits = "policy/clip_frac", view.limits
    shares.append((value, view.rollout_steps or MIN_SAMPLES))
    while len(shares) > 1 and sum(steps for _, steps in shares[1:]) >= MIN_SAMPLES:
        del shares[0]
    total = sum(steps for _, steps in shares)
    if total < MIN_SAMPLES:
        return
    mean = sum(share * steps for share, steps in shares) / total
    usual = view.baselines.median(key)
    harmless = view.course.risen is True and usual is not None and mean <= limits[CLIP_USUAL] * usual
    moved = view.values.get("policy/kl", inf) > limits[CLIP_KL] * action_dimensions(view)
    worst = 1.0 if view.course.risen is False else WARNING  # a rising return survives it
    severity = min(worst, limits.severity(CLIP_FRAC, mean)) * hard(moved and not harmless)
    narrow = partial(narrow_std, view, "ratios are proportional to its inverse")
    finding = Finding(severity, key, mean, limits.middle(CLIP_FRAC)).with_advice((lambda: WIDER) if severity and narrow() else None)
    words = "{:%} of the samples have left the trust region{}, where clipping stops them from training the policy{}"
    yield finding.says(words, mean, partial(view.usual, key, percent), narrow)


step_alarm = partial(alarm, debug_updates=3, pieces=("transitions",))  # declares an alarm about the size of policy steps

RULES = (
    step_alarm("policy/kl_spike", rank=290, relative=True, n_off=2, debug_updates=5)
    .reads("policy/kl", "policy/kl_max", "policy/kl_k1")
    .follows("policy/kl")
    .changes(learning_rate=1 / 3, num_epochs=1 / 2, minibatch_size=2)
    .says(
        "One update moved the policy much further than usual.",
        "Lower the learning rate or the number of epochs, set target_kl, use larger minibatches.",
        "Usual values of target_kl are 0.015 to 0.03. Policies with memory have single updates of 0.1 and recover, so two in a row count, "
        "or 0.3. With suddenly more steps, less is enough. Nearly deterministic policies get a large KL from a few rare actions and keep "
        "learning: if the samples outside the trust region account for less than a twelfth of it, the bound is three times as high. "
        "Published settings with narrow Gaussians move each dimension by 0.006 to 0.026 nats.",
    )
    .shows("policy/kl*", "policy/head/*/kl", "policy/ratio/*", "opt/lr", "grad/global/*", "adv/norm/*")
    .judged(StateJudge(kl_spike, PolicySteps()), KL_SPIKE, KL_SUDDEN, KL_TYPICAL, KL_FEW, PASSES, KL_PASSES),
    step_alarm("policy/ratio_explosion", effect=True, n_off=2, debug_updates=5)
    .reads("policy/ess_frac_min", "policy/ratio/max", "policy/ess_frac", "policy/head/{head}/blame")
    .reads("policy/head/{head}/ratio/max")
    .changes(learning_rate=1 / 3, num_epochs=1 / 2)
    .says(
        "The probabilities of a few samples have changed so much that they dominate the update.",
        "Lower the learning rate, set target_kl, keep action probabilities away from 0; with several heads, policy/head/*/blame shows "
        "which one changed most.",
        "Kong's effective sample size; Moalla 2024, coach#87. In healthy runs a single sample of a rare action can cost a minibatch 90 % "
        "of it, which clipping absorbs; the 99th percentile of the ratios is then 1.2 to 2.7.",
    )
    .shows("policy/ess_frac*", *RATIOS)
    .judged(StateJudge(ratio_explosion, list[tuple[float, float]]()), ESS, ESS_SUDDEN, RATIO_SPREAD),
    step_alarm("policy/ratio_collapse", "policy/ratio/p01", "policy/ratio/min", effect=True, n_on=3)
    .changes(learning_rate=1 / 3, num_epochs=1 / 2)
    .says(
        "One action in a hundred has become more than ten times less likely in a single update.",
        "Lower the learning rate; check the sign and the order of advantages.",
        "The first percentile replaces the share of rows, which is not recorded. Published settings reach 0.001 in six dimensions and keep "
        "learning.",
    )
    .shows(*RATIOS)
    .judged(ratio_collapse, RATIO_COLLAPSE),
    step_alarm("policy/clip_saturation", effect=True, warmup=15, n_on=2)
    .reads("policy/clip_frac", "policy/clip_frac_active", "policy/clip_frac_pos", "policy/clip_frac_neg")
    .reads("policy/head/{head}/clip_frac")
    .follows("policy/clip_frac")
    .changes("clip", num_epochs=1 / 2, learning_rate=1 / 3)
    .says(
        "Much of the batch has left the trust region, where clipping stops it from training the policy.",
        "Use fewer epochs or a lower learning rate; use a larger batch if advantages are noisy.",
        "Common practice; healthy runs stay below 0.17 after their first updates. The share is the mean of the last 512 steps, because "
        "short rollouts are small samples. At a KL of 0.01, below all usual values of target_kl, half of the samples may leave a clip of "
        "0.1. With the 20 epochs and the clip of 0.1 published for Walker2d it is 0.6 throughout, while the return rises from 18 to 350.",
    )
    .shows("policy/clip_frac*", "policy/head/*/clip_frac", "policy/kl*", "opt/lr")
    .judged(StateJudge(clip_saturation, list[tuple[float, int]]()), CLIP_FRAC, CLIP_KL, CLIP_USUAL),
    step_alarm("policy/kl_stall", "policy/kl_max", "opt/lr", rank=240, n_on=3, n_off=1)
    .changes("learning_rate")
    .says(
        "The policy does not change, or hardly changes.",
        "Store the log-probabilities when the actions are taken, and use them as the old log-probabilities in every minibatch.",
        "The KL is proportional to the square of the learning rate: at 5 % of the peak of a schedule the policy may stop.",
    )
    .shows("policy/kl*", "opt/lr", "grad/*/norm_preclip", "opt/update_to_weight*")
    .judged(StateJudge(kl_stall, PolicyMoves()), KL_STALL),
)
