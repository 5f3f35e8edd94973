"""Alarms about exploration: loss and excess of entropy, sudden changes of the actions, updates in the wrong direction, dead heads."""

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

EARLY = 0.25  # share of the run during which entropy should not crash; after it, entropy should have fallen
PLUNGE_UPDATES = 3  # updates over which a sudden loss of entropy is measured
MIN_SIGNED_ENTROPY = 0.01  # smallest entropy, in nats, whose sign is meaningful
SAME_SIGN_DISTANCE = 0.2  # relative distance between the entropy loss and the entropy up to which they have the same sign
ENTROPIES = ("policy/entropy*", "policy/head/*/entropy_norm", "policy/action_mi", "loss/entropy")


def categorical(facts: Facts) -> bool:
    """True if any head is categorical."""
    return facts.heads is None or "categorical" in facts.heads.values()


ENTROPY_COLLAPSE = below("entropy_collapse", 0.1, "normalised entropy of the policy")
ENTROPY_CLEAR = below("entropy_clear", 0.15, "normalised entropy above which the policy has recovered")
ENTROPY_MARGINAL = below("entropy_marginal", 0.5, "normalised entropy of the policy's actions over all states")
ENTROPY_LOW = below("entropy_low", 0.3, "normalised entropy that raises a warning while the return does not rise")
HEAD_WAS = 0.5  # normalised entropy that a head must have had before it can collapse
MIN_HEAD_DECISIONS = 0.05  # smallest share of the steps in which a head decides; with fewer its statistics are noise


@dataclass(slots=True)
class HeadEntropies:
    """Largest normalised entropy of each head so far, and the return when each head collapsed, as `ReturnLevel.moments`."""

    highest: dict[str, float] = field(default_factory=dict)
    levels: dict[str, tuple[float, float]] = field(default_factory=dict)

    def fallen(self, view: View, head: str, *, collapsed: bool) -> bool:
        """True if the return is clearly below the return when the head collapsed."""
        if not collapsed:
            self.levels.pop(head, None)
        elif view.course.latest.full:
            self.levels.setdefault(head, view.course.latest.moments())
        return head in self.levels and view.course.fallen_from(self.levels[head])


SAME = (
    "{} takes almost the same action in every state, so it has stopped exploring: its entropy is {:%} of the maximum, the entropy of its "
    "actions over all states {:%}"
)


def entropy_collapse(view: View, past: HeadEntropies) -> Iterator[Finding]:
    """The policy, or one of its heads, takes the same action in every state: entropy is low, and so is the entropy over all states.

    A solved task may need only one action. So the return must not have risen, or must have fallen since the collapse.
    """
    yield from collapsed_heads(view, past)
    key, limits = "policy/entropy_norm", view.limits
    entropy, mix = view.get(key), view.get("policy/entropy_marginal_norm")
    if entropy is None or mix is None:
        return
    same, lowest = mix < limits[ENTROPY_MARGINAL], entropy < limits[ENTROPY_COLLAPSE]
    if not past.fallen(view, "", collapsed=same and lowest) and view.course.rises:
        lowest = False  # one action may be right in every state
    warns = entropy < limits[ENTROPY_LOW] and view.course.risen is False
    near = entropy < limits[ENTROPY_CLEAR]
    severity = 1.0 if lowest else 0.5 if warns else 0.3 if near else 0.0  # 0.3 neither raises an alarm nor ends it
    bound = limits[ENTROPY_LOW if warns and not lowest else ENTROPY_COLLAPSE]
    finding = Finding(severity * hard(same), key, entropy, bound)
    yield finding.with_advice(lambda: explore_advice(view)).says(SAME, "the policy", entropy, mix)


def collapsed_heads(view: View, past: HeadEntropies) -> Iterator[Finding]:
    """Heads that always choose the same action and did not before."""
    limits = view.limits
    for head, _, mix in view.labelled("policy/head/", "/entropy_marginal_norm"):
        key = f"policy/head/{head}/entropy_norm"
        entropy, decides = view.get(key), view.values.get(f"policy/head/{head}/decision_frac", 1.0)
        if entropy is None or decides < MIN_HEAD_DECISIONS:
            continue
        highest = past.highest[head] = max(past.highest.get(head, 0.0), entropy)
        same = mix < limits[ENTROPY_MARGINAL] and entropy < limits[ENTROPY_COLLAPSE]
        fallen = past.fallen(view, head, collapsed=same)
        lost = same and highest > HEAD_WAS and (view.course.risen is False or fallen)
        finding = Finding(WARNING * hard(lost), key, entropy, limits[ENTROPY_COLLAPSE], instance=head)
        yield finding.with_advice(lambda: explore_advice(view)).says(SAME, f"the head {head}", entropy, mix)


def explore_advice(view: View) -> str:
    """Advice against too little exploration, by the settings of the run."""
    weight = view.facts.entropy_coef
    raised = f"Raise entropy_coef from {number(weight)}" if weight else "Set entropy_coef to 0.01"
    return f"{raised}, lower the learning rate, and check whether one action is rewarded by mistake."


ENTROPY_CRASH = Ramp("entropy_crash", 0.1, 0.3, "share of the entropy lost per update, early in the run")
ENTROPY_PLUNGE = Ramp("entropy_plunge", 0.3, 0.9, "decrease of the log entropy per update, over the last three updates, early in the run")


def entropy_crash(view: View, logarithms: Recent) -> Iterator[Finding]:
    """Entropy falls unusually early, over many updates or within three; or the loss penalises entropy."""
    yield from punished_entropy(view)
    key, limits = "policy/entropy_rate", view.limits
    value, entropy, kl = view.get(key), view.get("policy/entropy_norm"), view.get("policy/kl")
    if value is None or entropy is None or view.progress is None:
        return
    last = logarithms.add(log(entropy)) if entropy > 0 else []
    latest = (last[0] - last[-1]) / PLUNGE_UPDATES if len(last) > PLUNGE_UPDATES else 0.0
    # a policy that is about to solve a simple task decides early, too
    early = view.progress < EARLY and entropy < 0.5 and (kl or 0.0) > 0 and view.course.risen is not True
    slow, fast = limits.severity(ENTROPY_CRASH, -value), limits.severity(ENTROPY_PLUNGE, latest)
    fall, passed = latest if fast > slow else -value, percent(view.progress)
    yield Finding(max(slow, fast) if early else 0.0, key, value, -limits.middle(ENTROPY_CRASH)).with_text(
        lambda: (
            f"the policy's entropy has fallen by {percent(1 - exp(-fall))} per update, to {percent(entropy)} of its maximum, after only "
            f"{passed} of the run: it may stop exploring too early"
        )
    )


def punished_entropy(view: View) -> Iterator[Finding]:
    """Entropy that enters the loss with the wrong sign, or with a coefficient that has become negative."""
    loss, entropy, weight = view.get("loss/entropy"), view.get("policy/entropy"), view.get("loss/entropy_coef")
    if loss is None or entropy is None or weight == 0:
        return
    flipped = abs(entropy) > MIN_SIGNED_ENTROPY and abs(loss - entropy) < SAME_SIGN_DISTANCE * abs(entropy)
    negative = weight is not None and weight < 0 <= (view.facts.entropy_coef or 0.0)
    finding = Finding(hard(flipped or negative), "loss/entropy", loss, -entropy, instance="sign", claim=True)
    words = "the loss has penalised exploration instead of rewarding it: the entropy is {}, and "
    finding = finding.with_advice(lambda: "Subtract the entropy from the loss, times a coefficient of 0 or more.")
    if flipped:
        yield finding.says(words + "its term in the loss is {} instead of {}", entropy, loss, -entropy)
    else:
        yield finding.says(words + "its coefficient is {}", entropy, weight or 0.0)


ENTROPY_EXPLOSION = below("entropy_explosion", 0.02, "distance of the normalised entropy from 1, late in the run")
STARTED_UPDATES = 20  # updates that count as early if the length of the run is not known
LOW_UPDATES = 5  # updates for which entropy must have been low before it can rise again
ENTROPY_WAS = below("entropy_was", 0.85, "normalised entropy that the policy must have had before")
STARVED = below("entropy_starved", 0.01, "share of the gradient left by clipping, if the policy is random from the start")


@dataclass(slots=True)
class LowestEntropy:
    """Recent normalised entropies, and the lowest value that they stayed below for `LOW_UPDATES` updates in a row.

    A single low value means little: entropy wanders for a long time if nothing is rewarded yet.
    """

    recent: Recent = field(default_factory=partial(Recent, LOW_UPDATES))
    lowest: float = 1.0


def entropy_explosion(view: View, past: LowestEntropy) -> Iterator[Finding]:
    """The policy has become random again, or stays random because clipping removes the actor's gradient or the bonus outweighs the task."""
    limits = view.limits
    entropy, kl, coef = view.get("policy/entropy_norm"), view.get("policy/kl"), view.get("grad/clip/coef")
    if entropy is None or kl is None:
        return
    past.recent.add(entropy)
    if past.recent.full:
        past.lowest = min(past.lowest, max(past.recent.values))
    share = view.get("grad/interference/critic_share") or 0.0
    rose = past.lowest < limits[ENTROPY_WAS]
    starved = coef is not None and coef < limits[STARVED] and share > limits[STARVED_SHARE]
    starved = starved and view.course.risen is False
    paid = bonus_outweighs(view)
    late = view.update > STARTED_UPDATES if view.progress is None else view.progress > EARLY
    wrong = late and 1 - entropy < limits[ENTROPY_EXPLOSION] and (rose or starved or paid)
    clipped = f"and clipping leaves {percent(coef or 0.0)} of the gradient"
    reason = f"up from {percent(past.lowest)}" if rose else "which the entropy bonus encourages" if paid else clipped
    finding = Finding(hard(wrong), "policy/entropy_norm", entropy, 1 - limits[ENTROPY_EXPLOSION])
    yield finding.with_advice(lambda: calm_advice(view, starved=starved and not rose and not paid)).says(
        "the policy acts almost at random: its entropy is {:%} of the maximum, {}, and each update moves it by {} nats",
        *(entropy, reason, kl),
    )


BONUS_FACTOR = 10.0
"""Entropy coefficient over the largest published one, above which the bonus outweighs normalised advantages."""


def bonus_outweighs(view: View) -> bool:
    """True if the policy follows the entropy bonus instead of the advantages."""
    weight = view.values.get("loss/entropy_coef", view.facts.entropy_coef)
    large = weight is not None and weight > BONUS_FACTOR * PUBLISHED["entropy_coef"].highest
    return large and view.facts.normalize_advantages is not False


def calm_advice(view: View, *, starved: bool) -> str:
    """Advice for a policy that stays random, by the settings of the run."""
    weight = view.values.get("loss/entropy_coef", view.facts.entropy_coef)
    checks = "check that rewards arrive and that advantages are not all equal."
    if starved:
        return f"Normalise returns, or clip the critic's gradient separately from the actor's; {checks}"
    if not weight:  # there is no bonus to lower
        return f"Lower the learning rate; {checks}"
    return f"Lower the entropy coefficient, which is {number(weight)}; {checks}"


ACTION_SHIFT = Ramp("action_shift", 0.05, 0.25, "change of the mix of actions between rollouts, Jensen-Shannon")
ALIKE_STEPS = 10  # steps in a row that count as one sample, because their actions are similar, as when swinging a pendulum


@reading("policy/action_shift_js")
def action_shift(view: View, value: float) -> Iterator[Finding]:
    """An abrupt change in the mix of a head's actions, beyond the divergence of two samples of as few actions as the head has chosen."""
    worst = Finding(0.0, "policy/action_shift_js", value, view.limits.middle(ACTION_SHIFT))
    for head, key, shift in view.labelled("policy/head/", "/action_shift_js") or [("", worst.key, value)]:
        decided = f"policy/head/{head}/decision_frac"
        actions = (view.transitions or 0) * min(view.values.get(decided, 1.0), view.previous.get(decided, 1.0))
        by_chance = ALIKE_STEPS / actions if actions else 0.0
        severity = view.limits.severity(ACTION_SHIFT, shift - by_chance)
        if severity > worst.severity:
            worst = Finding(severity, key, shift, view.limits.middle(ACTION_SHIFT) + by_chance)
    words = "the mix of actions has changed abruptly, by a Jensen-Shannon divergence of {} (usually below 0.02)"
    yield worst.says(words, worst.value or 0.0)


CRITIC_LEADS = 0.98  # critic's share of the squared gradient above which a shared network follows the critic alone
STILL_STD = 0.01  # spread of the ratios below which an update has hardly moved the policy, in directions that are chance

DEFAULT_TRANSITIONS = 512
"""Transitions of an update if they are not counted; a correlation of n transitions differs from 0 by about 1/√n by chance."""

CHANCE_FACTOR = 4.0  # multiple of this chance deviation that the sum of the correlations must exceed
RESTART_FACTOR = 2.0  # learning rate over the previous update's, above which a schedule has restarted
WRONG_DIRECTION = below("wrong_direction", 0.0, "gain of the update's own objective")
WRONG_LEAST = above("wrong_direction_least", 0.06, "negative correlation of advantages and ratios, mean of three updates")
WRONG_CORRELATION = above("wrong_direction_correlation", 0.2, "negative correlation of advantages and ratios for which two updates suffice")


SMALLER_STEPS = "Lower the learning rate or the number of epochs."
"""Advice if a step that was too large came first: the objective of a rollout means little for a policy that is far from it."""


@dataclass(slots=True)
class Directions:
    """Negative correlations in the previous two updates, and the previous learning rate."""

    before: tuple[float, float] = (0.0, 0.0)
    rate: float | None = None


@reading("policy/surrogate_gain")
def wrong_direction(view: View, value: float, past: Directions) -> Iterator[Finding]:
    """Updates that make good actions rarer: two in a row if advantages and ratios are clearly opposed, otherwise three."""
    key, limits = "policy/surrogate_gain", view.limits
    spread, kl, rate = view.get("policy/ratio/std") or 0.0, view.get("policy/kl_max"), view.get("opt/lr")
    (before, past.before), (rate_before, past.rate) = (past.before, (0.0, 0.0)), (past.rate, rate)
    still = (kl is not None and kl < limits[KL_STALL]) or spread < STILL_STD
    # after a schedule restarts, the first steps at the higher rate may go in any direction
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
    finding = Finding(hard(wrong), key, value, limits[WRONG_DIRECTION], z=view.z(key))
    yield finding.with_advice((lambda: SMALLER_STEPS) if view.recent_large_step else None).says(
        "updates have made good actions less likely and bad ones more likely: each changes its own objective by {}{}",
        *(value, partial(view.usual, key)),
    )


def advantage_size(view: View) -> float:
    """Standard deviation of the advantages in use: 1 if they are normalised."""
    if view.facts.normalize_advantages is not False:
        return 1.0
    return view.values.get("adv/norm/std", view.values.get("adv/raw/std", 1.0))


def mean_gain(view: View) -> float:
    """Part of the gain that comes from the mean advantage, which moves all ratios alike."""
    mean, ratio = view.get("adv/norm/mean"), view.get("policy/ratio/mean")
    if view.facts.normalize_advantages is not False or mean is None or ratio is None:
        return 0.0
    return mean * (ratio - 1)


def follows_critic(view: View) -> bool:
    """True if the critic's gradient moves the policy through a shared network, or leaves it none by filling the clip limit."""
    if (view.get("grad/interference/critic_share") or 0.0) <= CRITIC_LEADS:
        return False
    shared = bool(view.facts.groups.get("shared"))
    return shared or view.baselines.shift.get("grad/clip/coef", 0.0) < -view.limits[CLIP_FALL]


LONE_HEAD_UPDATES = 3
"""Updates in a row without a gradient after which a head is dead even if no head has one: a task may give no reward for a while."""


def dead_head(view: View, streaks: Streaks) -> Iterator[Finding]:
    """A head with choices to make that has no gradient; reported at once if another head has one."""
    norms = {head: (key, value) for head, key, value in view.labelled("grad/head/", "/norm")}
    needed = 1 if any(value > 0 for _, value in norms.values()) else LONE_HEAD_UPDATES
    for head, (key, value) in norms.items():
        decides = view.get(f"policy/head/{head}/decision_frac")
        if decides is None or decides < MIN_HEAD_DECISIONS:
            continue
        wrong = streaks.add(head, value == 0) >= needed
        words = f"the head {head} has had a gradient of exactly 0, so it cannot learn, although it decides in {{:%}} of the steps"
        yield Finding(hard(wrong), key, value, 0.0, instance=head).says(words, decides)


RULES = (
    alarm("policy/entropy_collapse", warmup=10, n_on=3, debug_updates=5)
    .reads("policy/entropy_norm", "policy/entropy_marginal_norm", "policy/head/{head}/entropy_norm")
    .reads("policy/head/{head}/entropy_marginal_norm", "policy/entropy_grad_ratio")
    .needs("policy/entropy_norm", "policy/entropy_marginal_norm", applies=categorical)
    .changes(entropy_coef=2, learning_rate=1 / 3, num_epochs=1 / 2)
    .says(
        "The policy takes the same action in every state: it has stopped exploring before solving the task.",
        "Raise entropy_coef, lower the learning rate, and check whether one action is rewarded by mistake.",
        "Solved tasks also end at 0.05, but still use all of their actions, so both entropies count. Some tasks need only one action: the "
        "return must not have risen, or must have fallen since.",
    )
    .shows(*ENTROPIES, pieces=("transitions",))
    .judged(StateJudge(entropy_collapse, HeadEntropies()), ENTROPY_COLLAPSE, ENTROPY_CLEAR, ENTROPY_MARGINAL, ENTROPY_LOW),
    alarm("policy/entropy_crash", relative=True, warmup=5, n_on=2, debug_updates=5)
    .reads("policy/entropy_rate", "policy/entropy_norm", "loss/entropy", "loss/entropy_coef")
    .needs("policy/entropy_rate", "policy/entropy_norm", "policy/kl", facts=("total_steps",))
    .changes(entropy_coef=2, learning_rate=1 / 3, num_epochs=1 / 2)
    .says(
        "The policy becomes almost deterministic unusually early.",
        "Raise entropy_coef, lower the learning rate, normalise rewards.",
        "Only if half of the entropy is gone: short runs learn simple tasks within a quarter of their time. "
        "The entropy loss is minus the entropy in every trainer: if it equals the entropy, the sign is wrong.",
    )
    .shows(*ENTROPIES, pieces=("transitions",))
    .judged(StateJudge(entropy_crash, Recent(PLUNGE_UPDATES + 1)), ENTROPY_CRASH, ENTROPY_PLUNGE),
    alarm("policy/entropy_explosion", "policy/entropy_norm", "policy/kl", n_on=10, n_off=5, debug_updates=3)
    .needs("policy/entropy_norm", "policy/kl", applies=categorical)
    .changes("learning_rate", entropy_coef=1 / 10)
    .says(
        "The policy stays random: it learns nothing, or the entropy bonus outweighs the task.",
        "Lower entropy_coef; check that rewards arrive and that advantages are not all equal.",
        "SB3#2240. With sparse rewards or a low learning rate a policy stays random for a long time. So its entropy must have been "
        "lower, or the critic must fill the clip limit, or the entropy coefficient must be ten times the largest published one.",
    )
    .shows(*ENTROPIES, pieces=("transitions",))
    .judged(StateJudge(entropy_explosion, LowestEntropy()), ENTROPY_EXPLOSION, ENTROPY_WAS, STARVED),
    alarm("policy/action_shift", effect=True, warmup=5, n_off=2, debug_updates=3)
    .reads("policy/action_shift_js", "policy/head/{head}/action_shift_js", "policy/head/{head}/decision_frac")
    .needs(applies=categorical)
    .says(
        "The mix of actions changed abruptly between two rollouts.",
        "Look at the previous update: KL divergence, ratios and learning rate; check whether the environment has changed.",
        "healthy runs stay below 0.03",
    )
    .shows("policy/action_shift_js", "policy/head/*/action_shift_js", "policy/kl*", "policy/entropy_norm")
    .shows(pieces=("transitions",))
    .judged(action_shift, ACTION_SHIFT),
    alarm("policy/wrong_direction", "policy/surrogate_gain", rank=260, debug_updates=5)
    .needs("policy/surrogate_gain", "policy/ratio/std")
    .follows("policy/surrogate_gain", "grad/clip/coef")
    .changes("learning_rate", "num_epochs")
    .says(
        "Updates make good actions less likely and bad ones more likely.",
        "Check the sign of the policy loss; check that each advantage belongs to its action; lower the learning rate.",
        "Single updates of healthy runs do so by chance, with correlations of up to 0.1: one update in six if the run learns slowly.",
    )
    .shows("policy/surrogate_gain", "adv/norm/*", "loss/*", "opt/lr", "policy/kl*", pieces=("transitions",))
    .judged(StateJudge(wrong_direction, Directions()), WRONG_DIRECTION, WRONG_LEAST, WRONG_CORRELATION),
    alarm("policy/dead_head", rank=100, hard=True, certain=True, optional=True, n_off=1, debug_updates=5)
    .reads("grad/head/{head}/norm", "policy/head/{head}/decision_frac")
    .needs("grad/head/{head}/norm", "policy/head/{head}/decision_frac")
    .says(
        "A head that has choices to make gets no gradient.",
        "Check its mask, and whether its output is detached or missing from the joint log-probability.",
        "exactly 0 while another head has a gradient, or in three updates in a row",
    )
    .shows("grad/head/*/norm", "policy/head/*/decision_frac", pieces=("transitions",))
    .judged(StateJudge(dead_head, Streaks())),
)
