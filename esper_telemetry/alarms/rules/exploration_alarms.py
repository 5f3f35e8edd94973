"""Exploration that ends, jumps or drowns the task; policies that step backwards, and heads that get no gradient."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from math import exp, log

from esper_telemetry.alarms.alarm_bounds import Ramp, above, below, hard
from esper_telemetry.alarms.judges import Recent, StateJudge, Streaks, reading
from esper_telemetry.alarms.rule import WARNING, Finding, View, alarm
from esper_telemetry.alarms.rules.gradient_alarms import CLIP_FALL, STARVED_SHARE
from esper_telemetry.alarms.rules.trust_region_alarms import KL_SPIKE, KL_STALL
from esper_telemetry.alarms.verdict.published_settings import PUBLISHED
from esper_telemetry.core.facts import Facts
from esper_telemetry.core.messages import number, percent

EARLY = 0.25  # share of the run in which entropy should not crash, and after which it should have fallen
PLUNGE_UPDATES = 3  # updates over which a sudden loss of entropy is measured
MIN_SIGNED_ENTROPY = 0.01  # smallest entropy, in nats, whose sign is meaningful
SAME_SIGN_DISTANCE = 0.2  # relative distance between a loss and its entropy up to which they have one sign
ENTROPIES = ("policy/entropy*", "policy/head/*/entropy_norm", "policy/action_mi", "loss/entropy")


def categorical(facts: Facts) -> bool:
    """True where any head chooses among actions."""
    return facts.heads is None or "categorical" in facts.heads.values()


ENTROPY_COLLAPSE = below("entropy_collapse", 0.1, "normalised entropy of the policy")
ENTROPY_CLEAR = below("entropy_clear", 0.15, "from which on it has recovered")
ENTROPY_MARGINAL = below("entropy_marginal", 0.5, "normalised entropy of its actions over all states")
ENTROPY_LOW = below("entropy_low", 0.3, "normalised entropy that warns, where the return does not rise")
HEAD_WAS = 0.5  # normalised entropy that a head must have had before, to have collapsed
MIN_HEAD_DECISIONS = 0.05  # share of the steps in which a head decides, below which its statistics are noise


@dataclass(slots=True)
class HeadEntropies:
    """Largest normalised entropy of each head so far, and the return when each head collapsed, as `ReturnLevel.moments`."""

    highest: dict[str, float] = field(default_factory=dict)
    levels: dict[str, tuple[float, float]] = field(default_factory=dict)


SAME = (
    "{} does nearly the same everywhere: its entropy is {:%} of the largest, that of its actions over all states {:%}"
)


def entropy_collapse(view: View, past: HeadEntropies) -> Iterator[Finding]:
    """The same action everywhere: little entropy, and little in the mix of actions over all states; of the policy, or of one head.

    A solved task may need one action of a head only, so the warning waits for a return that has not risen, and a head for one that has
    not risen or has fallen since the head collapsed.
    """
    yield from collapsed_heads(view, past)
    key, limits = "policy/entropy_norm", view.limits
    entropy, mix = view.get(key), view.get("policy/entropy_marginal_norm")
    if entropy is None or mix is None:
        return
    lowest = entropy < limits[ENTROPY_COLLAPSE]
    warns = entropy < limits[ENTROPY_LOW] and view.course.risen is False
    near = entropy < limits[ENTROPY_CLEAR]
    severity = 1.0 if lowest else 0.5 if warns else 0.3 if near else 0.0  # 0.3 neither raises an alarm nor ends it
    bound = limits[ENTROPY_LOW if warns and not lowest else ENTROPY_COLLAPSE]
    finding = Finding(severity * hard(mix < limits[ENTROPY_MARGINAL]), key, entropy, bound)
    yield finding.with_advice(lambda: explore_advice(view)).says(SAME, "the policy", entropy, mix)


def collapsed_heads(view: View, past: HeadEntropies) -> Iterator[Finding]:
    """Heads that always choose the same, and did not before."""
    limits = view.limits
    for head, _, mix in view.labelled("policy/head/", "/entropy_marginal_norm"):
        key = f"policy/head/{head}/entropy_norm"
        entropy, decides = view.get(key), view.values.get(f"policy/head/{head}/decision_frac", 1.0)
        if entropy is None or decides < MIN_HEAD_DECISIONS:
            continue
        highest = past.highest[head] = max(past.highest.get(head, 0.0), entropy)
        same = mix < limits[ENTROPY_MARGINAL] and entropy < limits[ENTROPY_COLLAPSE]
        if not same:
            past.levels.pop(head, None)
        elif view.course.latest.full:
            past.levels.setdefault(head, view.course.latest.moments())
        fallen = head in past.levels and view.course.fallen_from(past.levels[head])
        lost = same and highest > HEAD_WAS and (view.course.risen is False or fallen)
        finding = Finding(WARNING * hard(lost), key, entropy, limits[ENTROPY_COLLAPSE], instance=head)
        yield finding.with_advice(lambda: explore_advice(view)).says(SAME, f"the head {head}", entropy, mix)


def explore_advice(view: View) -> str:
    """What to try against too little exploration, by the settings of the run."""
    weight = view.facts.entropy_coef
    name = "ent_coef" if view.facts.of_sb3 else "entropy_coef"
    raised = f"Raise {name} from {number(weight)}" if weight else f"Set {name} to 0.01"
    return f"{raised}, lower the learning rate, check whether one action is rewarded by mistake."


ENTROPY_CRASH = Ramp("entropy_crash", 0.1, 0.3, "share of the entropy that is lost per update, early in the run")
ENTROPY_PLUNGE = Ramp(
    "entropy_plunge", 0.3, 0.9, "fall of the logarithm of the entropy per update, over the last three, early in the run"
)


def entropy_crash(view: View, logarithms: Recent) -> Iterator[Finding]:
    """A policy that becomes certain abnormally early, over many updates or within three; or one that is paid for doing so."""
    yield from punished_entropy(view)
    key, limits = "policy/entropy_rate", view.limits
    value, entropy, kl = view.get(key), view.get("policy/entropy_norm"), view.get("policy/kl")
    if value is None or entropy is None or view.progress is None:
        return
    last = logarithms.add(log(entropy)) if entropy > 0 else []
    latest = (last[0] - last[-1]) / PLUNGE_UPDATES if len(last) > PLUNGE_UPDATES else 0.0
    early = view.progress < EARLY and entropy < 0.5 and (kl or 0.0) > 0
    slow, fast = limits.severity(ENTROPY_CRASH, -value), limits.severity(ENTROPY_PLUNGE, latest)
    fall, passed = latest if fast > slow else -value, percent(view.progress)
    yield Finding(max(slow, fast) if early else 0.0, key, value, -limits.middle(ENTROPY_CRASH)).with_text(
        lambda: (
            f"the policy's entropy has been falling by {percent(1 - exp(-fall))} per update, to {percent(entropy)} of the largest, "
            f"after {passed} of the run"
        )
    )


def punished_entropy(view: View) -> Iterator[Finding]:
    """An entropy that enters the loss with the wrong sign, or with a weight that has become negative."""
    loss, entropy, weight = view.get("loss/entropy"), view.get("policy/entropy"), view.get("loss/entropy_coef")
    if loss is None or entropy is None or weight == 0:
        return
    flipped = abs(entropy) > MIN_SIGNED_ENTROPY and abs(loss - entropy) < SAME_SIGN_DISTANCE * abs(entropy)
    negative = weight is not None and weight < 0 <= (view.facts.entropy_coef or 0.0)
    finding = Finding(hard(flipped or negative), "loss/entropy", loss, -entropy, instance="sign", claim=True)
    words = "exploring has been punished instead of rewarded: the entropy is {}, and in the loss stands {} "
    finding = finding.with_advice(lambda: "Subtract the weighted entropy from the loss, with a weight of 0 or more.")
    if flipped:
        yield finding.says(words + "instead of {}", entropy, loss, -entropy)
    else:
        yield finding.says(words + "times its bonus", entropy, weight or 0.0)


ENTROPY_EXPLOSION = below("entropy_explosion", 0.02, "distance of the normalised entropy from 1, late in the run")
LOW_UPDATES = 5  # updates for which entropy must have been low, to have risen
ENTROPY_WAS = below("entropy_was", 0.85, "normalised entropy that it must have had before, to have risen")
STARVED = below("entropy_starved", 0.01, "what clipping leaves of the gradient, where it stays random from the start")


@dataclass(slots=True)
class LowestEntropy:
    """Recent normalised entropies, and the value that they were below for that many updates in a row.

    They wander for long where nothing is rewarded yet.
    """

    recent: Recent = field(default_factory=partial(Recent, LOW_UPDATES))
    lowest: float = 1.0


def entropy_explosion(view: View, past: LowestEntropy) -> Iterator[Finding]:
    """A policy that has become random again, or stays so because clipping leaves the actor nothing, or the bonus outweighs the task."""
    limits = view.limits
    entropy, kl, coef = view.get("policy/entropy_norm"), view.get("policy/kl"), view.get("grad/clip/coef")
    if entropy is None or kl is None or view.progress is None:
        return
    past.recent.add(entropy)
    if past.recent.full:
        past.lowest = min(past.lowest, max(past.recent.values))
    share = view.get("grad/interference/critic_share") or 0.0
    rose = past.lowest < limits[ENTROPY_WAS]
    starved = coef is not None and coef < limits[STARVED] and share > limits[STARVED_SHARE]
    starved = starved and view.course.risen is False
    paid = bonus_outweighs(view)
    wrong = view.progress > EARLY and 1 - entropy < limits[ENTROPY_EXPLOSION] and (rose or starved or paid)
    clipped = f"and clipping leaves {percent(coef or 0.0)} of the gradient"
    reason = f"from {percent(past.lowest)} before" if rose else "which is what it is paid for" if paid else clipped
    yield (
        Finding(hard(wrong), "policy/entropy_norm", entropy, 1 - limits[ENTROPY_EXPLOSION])
        .with_advice(lambda: calm_advice(view, starved=starved and not rose and not paid))
        .says(
            "the policy is random: its entropy is {:%} of the largest, {}, and updates move it by {} nats",
            entropy,
            reason,
            kl,
        )
    )


BONUS_FACTOR = 10.0
"""Weight of the entropy over the largest published one, from which on the bonus leads the policy where advantages are normalised."""


def bonus_outweighs(view: View) -> bool:
    """True where the policy goes where the bonus for entropy leads it, not where advantages do."""
    weight = view.values.get("loss/entropy_coef", view.facts.entropy_coef)
    large = weight is not None and weight > BONUS_FACTOR * PUBLISHED["entropy_coef"].highest
    return large and view.facts.normalize_advantages is not False


def calm_advice(view: View, *, starved: bool) -> str:
    """What to try against a policy that stays random, by the settings of the run."""
    weight = view.values.get("loss/entropy_coef", view.facts.entropy_coef)
    checks = "check that rewards arrive and that advantages are not all the same."
    if starved:
        return f"Normalise returns, or clip the critic's gradient apart from the actor's; {checks}"
    if not weight:  # no bonus that could be lowered
        return f"Lower the learning rate; {checks}"
    return f"Lower the weight of the entropy, which is {number(weight)}; {checks}"


ACTION_SHIFT = Ramp("action_shift", 0.05, 0.25, "change of the mix of actions between rollouts, Jensen-Shannon")
ALIKE_STEPS = 10  # steps in a row whose actions are alike, as a pendulum is swung, so that they count as one sample


@reading("policy/action_shift_js")
def action_shift(view: View, value: float) -> Iterator[Finding]:
    """An abrupt change of the mix of actions."""
    by_chance = ALIKE_STEPS / view.transitions if view.transitions else 0.0  # of the samples of two rollouts
    severity = view.limits.severity(ACTION_SHIFT, value - by_chance)
    words = "the mix of actions has changed abruptly, by a Jensen-Shannon divergence of {} (usually below 0.02)"
    bound = view.limits.middle(ACTION_SHIFT) + by_chance
    yield Finding(severity, "policy/action_shift_js", value, bound).says(words, value)


CRITIC_LEADS = 0.98  # critic's share of the squared gradient from which on a shared network follows the critic alone
STILL_STD = 0.01  # spread of the ratios below which an update has hardly moved the policy, and the signs of what it moved are chance

DEFAULT_TRANSITIONS = 512
"""Transitions of an update where they are not counted: correlations of as many differ from 0 by the inverse of their root, by chance."""

CHANCE_FACTOR = 4.0  # times that by which two correlations together must differ from 0
RESTART_FACTOR = 2.0  # learning rate over that of the update before, from which on a schedule has restarted
WRONG_DIRECTION = below("wrong_direction", 0.0, "gain of the update's own objective")
WRONG_LEAST = above("wrong_direction_least", 0.06, "the same correlation on average over three updates")
WRONG_CORRELATION = above(
    "wrong_direction_correlation", 0.2, "negative correlation of advantages and ratios that needs no third update"
)


@dataclass(slots=True)
class Directions:
    """Negative correlations in the two updates before, and the learning rate of the update before."""

    before: tuple[float, float] = (0.0, 0.0)
    rate: float | None = None


@reading("policy/surrogate_gain")
def wrong_direction(view: View, value: float, past: Directions) -> Iterator[Finding]:
    """Updates that make good actions rarer: two in a row where advantages and ratios clearly point against each other, else three."""
    key, limits = "policy/surrogate_gain", view.limits
    spread, kl, rate = view.get("policy/ratio/std") or 0.0, view.get("policy/kl_max"), view.get("opt/lr")
    (before, past.before), (rate_before, past.rate) = (past.before, (0.0, 0.0)), (past.rate, rate)
    still = (kl is not None and kl < limits[KL_STALL]) or spread < STILL_STD
    # the first steps at a raised rate, where a schedule has restarted, go anywhere
    restarts = rate_before is not None and rate is not None and rate > RESTART_FACTOR * rate_before
    if still or restarts or follows_critic(view) or bonus_outweighs(view):
        yield Finding(0.0, key, value)
        return
    value, size = value - mean_gain(view), advantage_size(view)
    against = max(0.0, (limits[WRONG_DIRECTION] - value) / spread / size) if spread and size else 0.0
    past.before = before[1], against
    chance = (view.transitions or DEFAULT_TRANSITIONS) ** -0.5
    small = (view.get("policy/kl") or 0.0) < limits.low(KL_SPIKE)
    clearly = small and min(against, before[1]) > max(limits[WRONG_CORRELATION], 6 * chance)
    lasting, total = min(against, *before) > 0, against + sum(before)
    wrong = clearly or (lasting and total > max(3 * limits[WRONG_LEAST], CHANCE_FACTOR * chance))
    yield Finding(hard(wrong), key, value, limits[WRONG_DIRECTION], z=view.z(key)).says(
        "updates have made good actions rarer and bad ones likelier: they lower their own objective by {}{}",
        *(-value, partial(view.usual, key)),
    )


def advantage_size(view: View) -> float:
    """Standard deviation of the advantages in use: 1 where they are normalised."""
    if view.facts.normalize_advantages is not False:
        return 1.0
    return view.values.get("adv/norm/std", view.values.get("adv/raw/std", 1.0))


def mean_gain(view: View) -> float:
    """Part of the gain that the mean advantage makes up, which moves all ratios alike and is no direction."""
    mean, ratio = view.get("adv/norm/mean"), view.get("policy/ratio/mean")
    known = view.facts.normalize_advantages is False and mean is not None and ratio is not None
    return mean * (ratio - 1) if known and mean is not None and ratio is not None else 0.0


def follows_critic(view: View) -> bool:
    """True where the policy goes wherever the critic leads a shared network, or anywhere, since the critic has filled the clip limit."""
    if (view.get("grad/interference/critic_share") or 0.0) <= CRITIC_LEADS:
        return False
    shared = bool(view.facts.groups.get("shared"))
    return shared or view.baselines.shift.get("grad/clip/coef", 0.0) < -view.limits[CLIP_FALL]


LONE_HEAD_UPDATES = 3
"""Updates in a row without a gradient that make a head dead where no other head has one either: a task may pay nothing for a while."""


def dead_head(view: View, streaks: Streaks) -> Iterator[Finding]:
    """A head with choices to make that gets no gradient: at once where another head gets one."""
    norms = {head: (key, value) for head, key, value in view.labelled("grad/head/", "/norm")}
    needed = 1 if any(value > 0 for _, value in norms.values()) else LONE_HEAD_UPDATES
    for head, (key, value) in norms.items():
        decides = view.get(f"policy/head/{head}/decision_frac")
        if decides is None or decides < MIN_HEAD_DECISIONS:
            continue
        wrong = streaks.add(head, value == 0) >= needed
        words = f"the head {head} has got no gradient at all, though it decides in {{:%}} of the steps"
        yield Finding(hard(wrong), key, value, 0.0, instance=head).says(words, decides)


RULES = (
    alarm("policy/entropy_collapse", warmup=10, n_on=3, debug_updates=5)
    .reads("policy/entropy_norm", "policy/entropy_marginal_norm", "policy/head/{head}/entropy_norm")
    .reads("policy/head/{head}/entropy_marginal_norm", "policy/entropy_grad_ratio")
    .needs("policy/entropy_norm", "policy/entropy_marginal_norm", applies=categorical)
    .changes("learning_rate", "entropy_coef", "num_epochs")
    .says(
        "The policy does the same everywhere: it has stopped exploring without having solved the task.",
        "Raise entropy_coef, lower the learning rate, check whether one action is rewarded by mistake.",
        "Solved tasks end with 0.05 too, but with all of their actions in use: both entropies count. Some need one action of a head "
        "alone: between 0.1 and 0.3 the return must not have risen; for a single head it must not have risen, or have fallen since.",
    )
    .shows(*ENTROPIES, pieces=("transitions",))
    .judged(
        StateJudge(entropy_collapse, HeadEntropies()), ENTROPY_COLLAPSE, ENTROPY_CLEAR, ENTROPY_MARGINAL, ENTROPY_LOW
    ),
    alarm("policy/entropy_crash", relative=True, warmup=5, n_on=2, debug_updates=5)
    .reads("policy/entropy_rate", "policy/entropy_norm", "loss/entropy", "loss/entropy_coef")
    .needs("policy/entropy_rate", "policy/entropy_norm", "policy/kl", facts=("total_steps",))
    .changes("learning_rate", "entropy_coef", "num_epochs")
    .says(
        "The policy makes up its mind abnormally early.",
        "Raise entropy_coef, lower the learning rate, normalise rewards.",
        "only where half of the entropy is gone: short runs learn simple tasks within a quarter of their time. "
        "A loss of entropy is minus the entropy, in every trainer: where it is the entropy, the sign is wrong.",
    )
    .shows(*ENTROPIES, pieces=("transitions",))
    .judged(StateJudge(entropy_crash, Recent(PLUNGE_UPDATES + 1)), ENTROPY_CRASH, ENTROPY_PLUNGE),
    alarm("policy/entropy_explosion", "policy/entropy_norm", "policy/kl", n_on=10, n_off=5, debug_updates=3)
    .needs("policy/entropy_norm", "policy/kl", facts=("total_steps",), applies=categorical)
    .changes("entropy_coef", "learning_rate")
    .says(
        "The policy stays random: it learns nothing, or the bonus for exploring outweighs the task.",
        "Lower entropy_coef; check that rewards arrive and that advantages are not all the same.",
        "SB3#2240. Sparse tasks and low learning rates stay random for long: it must have been lower, or the "
        "critic must fill the clip limit, or the bonus weigh ten times what any published one does.",
    )
    .shows(*ENTROPIES, pieces=("transitions",))
    .judged(StateJudge(entropy_explosion, LowestEntropy()), ENTROPY_EXPLOSION, ENTROPY_WAS, STARVED),
    alarm("policy/action_shift", effect=True, warmup=5, n_off=2, debug_updates=3)
    .reads("policy/action_shift_js", "policy/head/{head}/action_shift_js")
    .needs(applies=categorical)
    .says(
        "The mix of actions changed abruptly between two rollouts.",
        "Look at the update before: KL, ratios and the learning rate; check for a change of the environment.",
        "healthy runs stay below 0.03",
    )
    .shows("policy/action_shift_js", "policy/head/*/action_shift_js", "policy/kl*", "policy/entropy_norm")
    .shows(pieces=("transitions",))
    .judged(action_shift, ACTION_SHIFT),
    alarm("policy/wrong_direction", "policy/surrogate_gain", rank=260, debug_updates=5)
    .needs("policy/surrogate_gain", "policy/ratio/std")
    .follows("policy/surrogate_gain", "grad/clip/coef")
    .says(
        "Updates make good actions rarer and bad ones likelier.",
        "Check the sign of the policy loss and that advantages belong to the actions beside them; lower the learning rate.",
        "Single updates of healthy runs do so by chance, with correlations of up to 0.1: one in six of those that learn slowly.",
    )
    .shows("policy/surrogate_gain", "adv/norm/*", "loss/*", "opt/lr", "policy/kl*", pieces=("transitions",))
    .judged(StateJudge(wrong_direction, Directions()), WRONG_DIRECTION, WRONG_LEAST, WRONG_CORRELATION),
    alarm("policy/dead_head", rank=100, hard=True, certain=True, optional=True, n_off=1, debug_updates=5)
    .reads("grad/head/{head}/norm", "policy/head/{head}/decision_frac")
    .needs("grad/head/{head}/norm", "policy/head/{head}/decision_frac")
    .says(
        "A head that has choices to make gets no gradient.",
        "Check its mask, and whether its output is detached or left out of the joint log-probability.",
        "exactly zero, where another head has a gradient; else in three updates",
    )
    .shows("grad/head/*/norm", "policy/head/*/decision_frac", pieces=("transitions",))
    .judged(StateJudge(dead_head, Streaks())),
)
