"""Exploration that ends, jumps or drowns the task; policies that step backwards, and heads that get no gradient."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import exp, log

from esper_telemetry.alarms.rule import AlarmRule, Finding, Ramp, View, above, below, hard, number, percent
from esper_telemetry.alarms.rules.gradients import CLIP_FALL, STARVED_SHARE
from esper_telemetry.alarms.rules.trust_region import KL_SPIKE, KL_STALL
from esper_telemetry.alarms.verdict.published_settings import PUBLISHED
from esper_telemetry.core.facts import Facts

EARLY = 0.25
"""Share of the run in which entropy should not crash, and after which it should have fallen."""

PLUNGE_UPDATES = 3
"""Updates over which a sudden loss of entropy is measured."""

MIN_SIGNED_ENTROPY = 0.01
"""Smallest entropy, in nats, whose sign is meaningful."""

SAME_SIGN_DISTANCE = 0.2
"""Relative distance between a loss and its entropy up to which they have one sign."""

ENTROPIES = ("policy/entropy*", "policy/head/*/entropy_norm", "policy/action_mi", "loss/entropy")


def categorical(facts: Facts) -> bool:
    """True where any head chooses among actions."""
    return facts.heads is None or "categorical" in facts.heads.values()


ENTROPY_COLLAPSE = below("entropy_collapse", 0.1, "normalised entropy of the policy")
ENTROPY_CLEAR = below("entropy_clear", 0.15, "from which on it has recovered")
ENTROPY_MARGINAL = below("entropy_marginal", 0.5, "normalised entropy of its actions over all states")
ENTROPY_LOW = below("entropy_low", 0.3, "normalised entropy that warns, where the return does not rise")

HEAD_WAS = 0.5
"""Normalised entropy that a head must have had before, to have collapsed."""

MIN_HEAD_DECISIONS = 0.05
"""Share of the steps in which a head decides, below which its statistics are noise."""


@dataclass(slots=True)
class EntropyCollapseJudge:
    """The same action everywhere: little entropy, and little in the mix of actions over all states; of the policy, or of one head.

    A solved task may need one action of a head only, so the warning waits for a return that has not risen, and a head for one that has
    not risen or has fallen since the head collapsed.

    Attributes:
        highest: largest normalised entropy of each head so far.
        levels: return when each head collapsed, as `ReturnLevel.moments`.
    """

    highest: dict[str, float] = field(default_factory=dict)
    levels: dict[str, tuple[float, float]] = field(default_factory=dict)

    def __call__(self, view: View) -> Iterator[Finding]:
        limits = view.limits
        entropy, mix = view.get("policy/entropy_norm"), view.get("policy/entropy_marginal_norm")
        yield from self.heads(view)
        if entropy is None or mix is None:
            return
        one_sided = mix < limits[ENTROPY_MARGINAL]
        lowest = entropy < limits[ENTROPY_COLLAPSE]
        warns = entropy < limits[ENTROPY_LOW] and view.course.risen is False
        near = entropy < limits[ENTROPY_CLEAR]
        severity = 1.0 if lowest else 0.5 if warns else 0.3 if near else 0.0  # 0.3 neither raises an alarm nor ends it
        bound = limits[ENTROPY_LOW if warns and not lowest else ENTROPY_COLLAPSE]
        yield (
            Finding(severity * hard(one_sided), "policy/entropy_norm", entropy, bound)
            .with_advice(lambda: explore_advice(view))
            .with_text(
                lambda: (
                    f"the policy does nearly the same everywhere: its entropy is {percent(entropy)} of the largest, "
                    f"that of its actions over all states {percent(mix)}"
                )
            )
        )

    def heads(self, view: View) -> Iterator[Finding]:
        """Heads that always choose the same, and did not before."""
        limits = view.limits
        for head, mix_key, mix in view.labelled("policy/head/", "/entropy_marginal_norm"):
            key = f"policy/head/{head}/entropy_norm"
            entropy, decides = view.get(key), view.values.get(f"policy/head/{head}/decision_frac", 1.0)
            if entropy is None or decides < MIN_HEAD_DECISIONS:
                continue
            highest = self.highest[head] = max(self.highest.get(head, 0.0), entropy)
            same = mix < limits[ENTROPY_MARGINAL] and entropy < limits[ENTROPY_COLLAPSE]
            if not same:
                self.levels.pop(head, None)
            elif view.course.latest.full:
                self.levels.setdefault(head, view.course.latest.moments())
            fallen = head in self.levels and view.course.fallen_from(self.levels[head])
            lost = same and highest > HEAD_WAS and (view.course.risen is False or fallen)
            yield (
                Finding(WARNING * hard(lost), key, entropy, limits[ENTROPY_COLLAPSE], instance=head)
                .with_advice(lambda: explore_advice(view))
                .with_text(
                    lambda head=head, entropy=entropy, mix=view.values[mix_key]: (  # type: ignore[misc]  # the loop's values
                        f"the head {head} does nearly the same everywhere: its entropy is {percent(entropy)} of the largest, "
                        f"that of its actions over all states {percent(mix)}"
                    )
                )
            )


WARNING = 0.5
"""Severity of what may still be the right thing to do in the task."""


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


@dataclass(slots=True)
class EntropyCrashJudge:
    """A policy that becomes certain abnormally early, over many updates or within three; or one that is paid for doing so."""

    logarithms: list[float] = field(default_factory=list)

    def __call__(self, view: View) -> Iterator[Finding]:
        yield from punished_entropy(view)
        key, limits = "policy/entropy_rate", view.limits
        value, entropy, kl = view.get(key), view.get("policy/entropy_norm"), view.get("policy/kl")
        if value is None or entropy is None or view.progress is None:
            return
        latest = self.latest_fall(entropy)
        early = view.progress < EARLY and entropy < 0.5 and (kl or 0.0) > 0
        slow, fast = limits.severity(ENTROPY_CRASH, -value), limits.severity(ENTROPY_PLUNGE, latest)
        fall = latest if fast > slow else -value
        yield Finding(max(slow, fast) if early else 0.0, key, value, -limits.middle(ENTROPY_CRASH)).with_text(
            lambda: (
                f"the policy's entropy has been falling by {percent(1 - exp(-fall))} per update, to {percent(entropy)} of the largest, "
                f"after {percent(view.progress or 0.0)} of the run"
            )
        )

    def latest_fall(self, entropy: float) -> float:
        """Fall of the logarithm of the entropy per update, over the last three; 0 before there are as many."""
        if entropy <= 0:
            return 0.0
        logarithms = self.logarithms
        logarithms.append(log(entropy))
        del logarithms[: -PLUNGE_UPDATES - 1]
        return (logarithms[0] - logarithms[-1]) / PLUNGE_UPDATES if len(logarithms) > PLUNGE_UPDATES else 0.0


def punished_entropy(view: View) -> Iterator[Finding]:
    """An entropy that enters the loss with the wrong sign, or with a weight that has become negative."""
    loss, entropy, weight = view.get("loss/entropy"), view.get("policy/entropy"), view.get("loss/entropy_coef")
    if loss is None or entropy is None or weight == 0:
        return
    flipped = abs(entropy) > MIN_SIGNED_ENTROPY and abs(loss - entropy) < SAME_SIGN_DISTANCE * abs(entropy)
    negative = weight is not None and weight < 0 <= (view.facts.entropy_coef or 0.0)
    finding = Finding(hard(flipped or negative), "loss/entropy", loss, -entropy, instance="sign", claim=True)
    yield finding.with_advice(
        lambda: "Subtract the weighted entropy from the loss, with a weight of 0 or more."
    ).with_text(
        lambda: (
            f"exploring has been punished instead of rewarded: the entropy is {number(entropy)}, and in the loss stands "
            + (
                f"{number(loss)} instead of {number(-entropy)}"
                if flipped
                else f"{number(weight or 0.0)} times its bonus"
            )
        )
    )


ENTROPY_EXPLOSION = below("entropy_explosion", 0.02, "distance of the normalised entropy from 1, late in the run")
LOW_UPDATES = 5
"""Updates for which entropy must have been low, to have risen."""

ENTROPY_WAS = below("entropy_was", 0.85, "normalised entropy that it must have had before, to have risen")
ENTROPY_STARVED = below(
    "entropy_starved", 0.01, "what clipping leaves of the gradient, where it stays random from the start"
)


@dataclass(slots=True)
class EntropyExplosionJudge:
    """A policy that has become random again, or stays so because clipping leaves the actor nothing, or the bonus outweighs the task.

    Attributes:
        recent: normalised entropy of the latest updates.
        lowest: value that it was below for that many updates in a row: it wanders for long where nothing is rewarded yet.
    """

    recent: list[float] = field(default_factory=list)
    lowest: float = 1.0

    def __call__(self, view: View) -> Iterator[Finding]:
        limits = view.limits
        entropy, kl, coef = view.get("policy/entropy_norm"), view.get("policy/kl"), view.get("grad/clip/coef")
        if entropy is None or kl is None or view.progress is None:
            return
        self.recent.append(entropy)
        del self.recent[:-LOW_UPDATES]
        if len(self.recent) == LOW_UPDATES:
            self.lowest = min(self.lowest, max(self.recent))
        lowest = self.lowest
        share = view.get("grad/interference/critic_share") or 0.0
        rose = lowest < limits[ENTROPY_WAS]
        starved = coef is not None and coef < limits[ENTROPY_STARVED] and share > limits[STARVED_SHARE]
        starved = starved and view.course.risen is False
        paid = bonus_outweighs(view)
        wrong = view.progress > EARLY and 1 - entropy < limits[ENTROPY_EXPLOSION] and (rose or starved or paid)
        reason = (
            f"from {percent(lowest)} before"
            if rose
            else "which is what it is paid for"
            if paid
            else f"and clipping leaves {percent(coef or 0.0)} of the gradient"
        )
        yield (
            Finding(hard(wrong), "policy/entropy_norm", entropy, 1 - limits[ENTROPY_EXPLOSION])
            .with_advice(lambda: calm_advice(view, starved=starved and not rose and not paid))
            .with_text(
                lambda: (
                    f"the policy is random: its entropy is {percent(entropy)} of the largest, {reason}, and updates move it by "
                    f"{number(kl)} nats"
                )
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

ALIKE_STEPS = 10
"""Steps in a row whose actions are alike, as a pendulum is swung, so that they count as one sample."""


def action_shift(view: View) -> Iterator[Finding]:
    """An abrupt change of the mix of actions."""
    key, limits = "policy/action_shift_js", view.limits
    value = view.get(key)
    if value is not None:
        by_chance = ALIKE_STEPS / view.transitions if view.transitions else 0.0  # of the samples of two rollouts
        yield Finding(
            limits.severity(ACTION_SHIFT, value - by_chance), key, value, limits.middle(ACTION_SHIFT) + by_chance
        ).with_text(
            lambda: (
                f"the mix of actions has changed abruptly, by a Jensen-Shannon divergence of {number(value)} (usually below 0.02)"
            )
        )


CRITIC_LEADS = 0.98
"""Critic's share of the squared gradient from which on a shared network follows the critic alone."""

STILL_STD = 0.01
"""Spread of the ratios below which an update has hardly moved the policy, and the signs of what it moved are chance."""

DEFAULT_TRANSITIONS = 512
"""Transitions of an update where they are not counted: correlations of as many differ from 0 by the inverse of their root, by chance."""

CHANCE_FACTOR = 4.0
"""Times that by which two correlations together must differ from 0."""

RESTART_FACTOR = 2.0
"""Learning rate over that of the update before, from which on a schedule has restarted."""

MIN_DECISIONS = 0.05
"""Share of the steps in which a head decides, below which its statistics are noise."""

WRONG_DIRECTION = below("wrong_direction", 0.0, "gain of the update's own objective")
WRONG_LEAST = above("wrong_direction_least", 0.06, "the same correlation on average over three updates")
WRONG_CORRELATION = above(
    "wrong_direction_correlation", 0.2, "negative correlation of advantages and ratios that needs no third update"
)


@dataclass(slots=True)
class WrongDirectionJudge:
    """Updates that make good actions rarer: two in a row where advantages and ratios clearly point against each other, else three.

    Attributes:
        before: negative correlations in the two updates before.
        rate: learning rate of the update before.
    """

    before: tuple[float, float] = (0.0, 0.0)
    rate: float | None = None

    def __call__(self, view: View) -> Iterator[Finding]:
        key, limits = "policy/surrogate_gain", view.limits
        value, spread, kl = view.get(key), view.get("policy/ratio/std"), view.get("policy/kl_max")
        if value is None:
            return
        before, self.before = self.before, (0.0, 0.0)
        restarts = self.restarts(view)
        if (
            (kl is not None and kl < limits[KL_STALL])
            or (spread or 0.0) < STILL_STD
            or follows_critic(view)
            or restarts
            or bonus_outweighs(view)
        ):
            yield Finding(0.0, key, value)
            return
        value = value - self.offset(view)
        size = self.size(view)
        against = max(0.0, (limits[WRONG_DIRECTION] - value) / spread / size) if spread and size else 0.0
        self.before = before[1], against
        chance = (view.transitions or DEFAULT_TRANSITIONS) ** -0.5
        small = (view.get("policy/kl") or 0.0) < limits.low(KL_SPIKE)
        clearly = small and min(against, before[1]) > max(limits[WRONG_CORRELATION], 6 * chance)
        lasting, total = min(against, *before) > 0, against + sum(before)
        wrong = clearly or (lasting and total > max(3 * limits[WRONG_LEAST], CHANCE_FACTOR * chance))
        yield Finding(hard(wrong), key, value, limits[WRONG_DIRECTION], z=view.z(key)).with_text(
            lambda: (
                f"updates have made good actions rarer and bad ones likelier: they lower their own "
                f"objective by {number(-value)}{view.usual(key)}"
            )
        )

    def restarts(self, view: View) -> bool:
        """True where a schedule has restarted: the first steps at a raised rate go anywhere."""
        before, self.rate = self.rate, view.get("opt/lr")
        return before is not None and self.rate is not None and self.rate > RESTART_FACTOR * before

    def size(self, view: View) -> float:
        """Standard deviation of the advantages in use: 1 where they are normalised."""
        if view.facts.normalize_advantages is not False:
            return 1.0
        return view.values.get("adv/norm/std", view.values.get("adv/raw/std", 1.0))

    def offset(self, view: View) -> float:
        """Part of the gain that the mean advantage makes up, which moves all ratios alike and is no direction."""
        mean, ratio = view.get("adv/norm/mean"), view.get("policy/ratio/mean")
        if view.facts.normalize_advantages is not False or mean is None or ratio is None:
            return 0.0
        return mean * (ratio - 1)


def follows_critic(view: View) -> bool:
    """True where the policy goes wherever the critic leads a shared network, or anywhere, since the critic has filled the clip limit."""
    if (view.get("grad/interference/critic_share") or 0.0) <= CRITIC_LEADS:
        return False
    shared = bool(view.facts.groups.get("shared"))
    return shared or view.baselines.shift.get("grad/clip/coef", 0.0) < -view.limits[CLIP_FALL]


LONE_HEAD_UPDATES = 3
"""Updates in a row without a gradient that make a head dead where no other head has one either: a task may pay nothing for a while."""


@dataclass(slots=True)
class DeadHeadJudge:
    """A head with choices to make that gets no gradient: at once where another head gets one.

    Attributes:
        updates: without a gradient so far, by head.
    """

    updates: dict[str, int] = field(default_factory=dict)

    def __call__(self, view: View) -> Iterator[Finding]:
        norms = {head: (key, value) for head, key, value in view.labelled("grad/head/", "/norm")}
        others = any(value > 0 for _, value in norms.values())
        for head, (key, value) in norms.items():
            decides = view.get(f"policy/head/{head}/decision_frac")
            if decides is None or decides < MIN_DECISIONS:
                continue
            self.updates[head] = self.updates.get(head, 0) + 1 if value == 0 else 0
            wrong = self.updates[head] >= (1 if others else LONE_HEAD_UPDATES)
            yield Finding(hard(wrong), key, value, 0.0, instance=head).with_text(
                lambda head=head, decides=decides: (  # type: ignore[misc]  # the loop's values at this time
                    f"the head {head} has got no gradient at all, though it decides in {percent(decides)} of the steps"
                )
            )


RULES = (
    AlarmRule(
        type="policy/entropy_collapse",
        inputs=(
            "policy/entropy_norm",
            "policy/entropy_marginal_norm",
            "policy/head/{head}/entropy_norm",
            "policy/head/{head}/entropy_marginal_norm",
            "policy/entropy_grad_ratio",
        ),
        meaning="The policy does the same everywhere: it has stopped exploring without having solved the task.",
        action="Raise entropy_coef, lower the learning rate, check whether one action is rewarded by mistake.",
        judge=EntropyCollapseJudge(),
        bounds=(ENTROPY_COLLAPSE, ENTROPY_CLEAR, ENTROPY_MARGINAL, ENTROPY_LOW),
        source="Solved tasks end with 0.05 too, but with all of their actions in use: both entropies count. Some need one action of a head "
        "alone: between 0.1 and 0.3 the return must not have risen; for a single head it must not have risen, or have fallen since.",
        settings=("learning_rate", "entropy_coef", "num_epochs"),
        required=("policy/entropy_norm", "policy/entropy_marginal_norm"),
        applies=categorical,
        warmup=10,
        n_on=3,
        debug_updates=5,
        evidence=ENTROPIES,
        pieces=("transitions",),
    ),
    AlarmRule(
        type="policy/entropy_crash",
        inputs=("policy/entropy_rate", "policy/entropy_norm", "loss/entropy", "loss/entropy_coef"),
        meaning="The policy makes up its mind abnormally early.",
        action="Raise entropy_coef, lower the learning rate, normalise rewards.",
        judge=EntropyCrashJudge(),
        bounds=(ENTROPY_CRASH, ENTROPY_PLUNGE),
        source="only where half of the entropy is gone: short runs learn simple tasks within a quarter of their time. "
        "A loss of entropy is minus the entropy, in every trainer: where it is the entropy, the sign is wrong.",
        required=("policy/entropy_rate", "policy/entropy_norm", "policy/kl"),
        facts=("total_steps",),
        settings=("learning_rate", "entropy_coef", "num_epochs"),
        warmup=5,
        n_on=2,
        debug_updates=5,
        evidence=ENTROPIES,
        pieces=("transitions",),
        relative=True,
    ),
    AlarmRule(
        type="policy/entropy_explosion",
        inputs=("policy/entropy_norm", "policy/kl"),
        meaning="The policy stays random: it learns nothing, or the bonus for exploring outweighs the task.",
        action="Lower entropy_coef; check that rewards arrive and that advantages are not all the same.",
        judge=EntropyExplosionJudge(),
        bounds=(ENTROPY_EXPLOSION, ENTROPY_WAS, ENTROPY_STARVED),
        source="SB3#2240. Sparse tasks and low learning rates stay random for long: it must have been lower, or the "
        "critic must fill the clip limit, or the bonus weigh ten times what any published one does.",
        required=("policy/entropy_norm", "policy/kl"),
        facts=("total_steps",),
        applies=categorical,
        settings=("entropy_coef", "learning_rate"),
        n_on=10,
        n_off=5,
        debug_updates=3,
        evidence=ENTROPIES,
        pieces=("transitions",),
    ),
    AlarmRule(
        type="policy/action_shift",
        effect=True,
        inputs=("policy/action_shift_js", "policy/head/{head}/action_shift_js"),
        meaning="The mix of actions changed abruptly between two rollouts.",
        action="Look at the update before: KL, ratios and the learning rate; check for a change of the environment.",
        judge=action_shift,
        bounds=(ACTION_SHIFT,),
        source="healthy runs stay below 0.03",
        applies=categorical,
        warmup=5,
        n_off=2,
        debug_updates=3,
        evidence=("policy/action_shift_js", "policy/head/*/action_shift_js", "policy/kl*", "policy/entropy_norm"),
        pieces=("transitions",),
    ),
    AlarmRule(
        type="policy/wrong_direction",
        inputs=("policy/surrogate_gain",),
        meaning="Updates make good actions rarer and bad ones likelier.",
        action="Check the sign of the policy loss and that advantages belong to the actions beside them; lower the learning rate.",
        judge=WrongDirectionJudge(),
        bounds=(WRONG_DIRECTION, WRONG_LEAST, WRONG_CORRELATION),
        required=("policy/surrogate_gain", "policy/ratio/std"),
        source="Single updates of healthy runs do so by chance, with correlations of up to 0.1: one in six of those that learn slowly.",
        rank=260,
        histories=("policy/surrogate_gain", "grad/clip/coef"),
        debug_updates=5,
        evidence=("policy/surrogate_gain", "adv/norm/*", "loss/*", "opt/lr", "policy/kl*"),
        pieces=("transitions",),
    ),
    AlarmRule(
        type="policy/dead_head",
        inputs=("grad/head/{head}/norm", "policy/head/{head}/decision_frac"),
        meaning="A head that has choices to make gets no gradient.",
        action="Check its mask, and whether its output is detached or left out of the joint log-probability.",
        judge=DeadHeadJudge(),
        source="exactly zero, where another head has a gradient; else in three updates",
        rank=100,
        hard=True,
        required=("grad/head/{head}/norm", "policy/head/{head}/decision_frac"),
        optional=True,
        n_off=1,
        debug_updates=5,
        evidence=("grad/head/*/norm", "policy/head/*/decision_frac"),
        pieces=("transitions",),
        certain=True,
    ),
)
