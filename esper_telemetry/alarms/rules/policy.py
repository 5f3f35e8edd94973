"""Policy steps backwards, and heads that get no gradient."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from esper_telemetry.alarms.rule import AlarmRule, Finding, View, above, below, hard, number, percent
from esper_telemetry.alarms.rules.exploration import bonus_outweighs
from esper_telemetry.alarms.rules.gradients import CLIP_FALL
from esper_telemetry.alarms.rules.trust_region import KL_SPIKE, KL_STALL

CRITIC_LEADS = 0.98
"""Critic's share of the squared gradient from which on a shared network follows the critic alone."""

STILL_STD = 0.01
"""Spread of the ratios below which an update has hardly moved the policy, and the signs of what it moved are chance."""

DEFAULT_TRANSITIONS = 512
"""Transitions of an update where nobody counts them: correlations of as many differ from 0 by the inverse of their root, by chance."""

CHANCE_FACTOR = 4.0
"""Times that by which two correlations together must differ from 0."""

RESTART_FACTOR = 2.0
"""Learning rate over that of the update before, from which on a schedule has begun anew."""

MIN_DECISIONS = 0.05
"""Share of the steps in which a head decides, below which its statistics are noise."""

WRONG_DIRECTION = below("wrong_direction", 0.0, "gain of the update's own objective")
WRONG_LEAST = above("wrong_direction_least", 0.06, "the same correlation on average over two updates")
WRONG_CORRELATION = above(
    "wrong_direction_correlation", 0.2, "negative correlation of advantages and ratios that needs no second update"
)


@dataclass(slots=True)
class WrongDirectionJudge:
    """Updates that make good actions rarer: at once where advantages and ratios clearly point against each other, else at the second.

    Attributes:
        before: negative correlation in the update before.
        rate: learning rate of the update before.
    """

    before: float = 0.0
    rate: float | None = None

    def __call__(self, view: View) -> Iterator[Finding]:
        key, limits = "policy/surrogate_gain", view.limits
        value, spread, kl = view.get(key), view.get("policy/ratio/std"), view.get("policy/kl_max")
        if value is None:
            return
        before, self.before = self.before, 0.0
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
        self.before = against
        chance = (view.transitions or DEFAULT_TRANSITIONS) ** -0.5
        small = (view.get("policy/kl") or 0.0) < limits.low(KL_SPIKE)
        once = small and against > max(limits[WRONG_CORRELATION], 6 * chance)
        twice = min(against, before) > 0 and against + before > max(2 * limits[WRONG_LEAST], CHANCE_FACTOR * chance)
        yield Finding(hard(once or twice), key, value, limits[WRONG_DIRECTION], z=view.z(key)).with_text(
            lambda: (
                f"updates have made good actions rarer and bad ones likelier: they lower their own "
                f"objective by {number(-value)}{view.usual(key)}"
            )
        )

    def restarts(self, view: View) -> bool:
        """True where a schedule has begun anew: the first steps at a raised rate go anywhere."""
        before, self.rate = self.rate, view.get("opt/lr")
        return before is not None and self.rate is not None and self.rate > RESTART_FACTOR * before

    def size(self, view: View) -> float:
        """Standard deviation of the advantages in use: 1 where they are normalised."""
        if view.facts.get("normalize_advantages") is not False:
            return 1.0
        return view.values.get("adv/norm/std", view.values.get("adv/raw/std", 1.0))

    def offset(self, view: View) -> float:
        """Part of the gain that the mean advantage makes up, which moves all ratios alike and is no direction."""
        mean, ratio = view.get("adv/norm/mean"), view.get("policy/ratio/mean")
        if view.facts.get("normalize_advantages") is not False or mean is None or ratio is None:
            return 0.0
        return mean * (ratio - 1)


def follows_critic(view: View) -> bool:
    """True where the policy goes wherever the critic leads a shared network, or anywhere, since the critic has filled the clip limit."""
    if (view.get("grad/interference/critic_share") or 0.0) <= CRITIC_LEADS:
        return False
    shared = bool(dict(view.facts.get("groups") or {}).get("shared"))
    return shared or view.baselines.shift.get("grad/clip/coef", 0.0) < -view.limits[CLIP_FALL]


def dead_head(view: View) -> Iterator[Finding]:
    """A head with choices to make that gets no gradient."""
    for head, key, value in view.labelled("grad/head/", "/norm"):
        decides = view.get(f"policy/head/{head}/decision_frac")
        if decides is None or decides < MIN_DECISIONS:
            continue
        yield Finding(hard(value == 0), key, value, 0.0, instance=head).with_text(
            lambda head=head, decides=decides: (  # type: ignore[misc]  # the loop's values at this time
                f"the head {head} has got no gradient at all, though it decides in {percent(decides)} of the steps"
            )
        )


RULES = (
    AlarmRule(
        type="policy/wrong_direction",
        inputs=("policy/surrogate_gain",),
        meaning="Updates make good actions rarer and bad ones likelier.",
        action="Check the sign of the policy loss and that advantages belong to the actions beside them; lower the learning rate.",
        judge=WrongDirectionJudge(),
        bounds=(WRONG_DIRECTION, WRONG_LEAST, WRONG_CORRELATION),
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
        judge=dead_head,
        source="exactly zero in three updates",
        rank=100,
        hard=True,
        required=("grad/global/norm_preclip",),
        n_on=3,
        n_off=1,
        debug_updates=5,
        evidence=("grad/head/*/norm", "policy/head/*/decision_frac"),
        pieces=("transitions",),
        certain=True,
    ),
)
