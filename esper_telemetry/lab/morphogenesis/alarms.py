"""Alarms of morphogenesis: exploding, vanishing, dormant and stalled seeds, and a reward that rises while hosts get worse.

The entry point `morphogenesis` of the group `esper_telemetry.alarms` registers them, as for any plugin.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from esper_telemetry.alarms.rule import SMALLEST_DIVISOR, AlarmRule, Finding, View, above, below, hard, number, percent
from esper_telemetry.lab.morphogenesis.kinds import BLUEPRINTS, Stage

EXPLODING, VANISHING, SCORE, RETURN = "seed/exploding", "seed/vanishing", "env/score", "episode/return_mean"
DORMANT, DISCONNECTED = "seed/cause/dormant", "seed/cause/disconnected"
GERMINATED, BLENDING = "seed/germinated", "seed/gate/g2/pass_frac"

SETTLE_UPDATES = 5
"""Updates before the levels of score and return are compared."""

LEVEL_WEIGHT = 0.2
"""Weight of a new value in the levels of score and return."""

SEED_EXPLODING = above(
    "seed_exploding",
    0.75,
    "severity of the largest gradient of a seed; 0.75 is 32 times its clip limit",
    lowest=SMALLEST_DIVISOR,
)
SEED_EXPLODING_FRAC = above(
    "seed_exploding_frac",
    0.05,
    "share of the seeds that learn whose gradients are beyond ten clip limits",
    lowest=SMALLEST_DIVISOR,
)
SEED_ALONE = below(
    "seed_alone", 0.005, "share of seeds beyond ten clip limits, below which the largest of thousands is chance"
)
SEED_VANISHING = above(
    "seed_vanishing", 0.5, "severity of the vanishing of seeds' gradients, on average", lowest=SMALLEST_DIVISOR
)
SEED_DORMANT = above(
    "seed_dormant", 0.6, "share of the seeds that learn which the loss hardly reaches", lowest=SMALLEST_DIVISOR
)
SEED_SCORE_DROP = above("seed_score_drop", 0.05, "accuracy by which hosts are worth less in the end than they were")


def explode(view: View) -> Iterator[Finding]:
    """A seed's gradient far above its clip limit, or many above ten times theirs."""
    value, limit = view.get(EXPLODING), view.limits[SEED_EXPLODING]
    if value is not None:
        share = view.get("seed/exploding_frac") or 0.0
        largest = value / limit if share >= view.limits[SEED_ALONE] else 0.0
        yield Finding(
            min(1.0, 0.5 * max(largest, share / view.limits[SEED_EXPLODING_FRAC])),
            EXPLODING,
            value,
            limit,
            text=lambda: (
                f"the gradient of a seed has exploded{place(view)}: severity {number(value)}; so it is in {percent(share)} of seeds and "
                "steps"
            ),
        )


def place(view: View) -> str:
    """Where the seed with the largest gradient is: `, in environment 3, slot 1, stage blending, blueprint mlp`; else empty."""
    names = {"stage": [stage.name.lower() for stage in Stage], "blueprint": [kind.name for kind in BLUEPRINTS]}
    places = {part: view.get(f"seed/largest/{part}") for part in ("environment", "slot", "stage", "blueprint")}
    named = {part: int(index) for part, index in places.items() if index is not None and index >= 0}
    parts = [
        f"{part} {names[part][index] if part in names and index < len(names[part]) else index}"
        for part, index in named.items()
    ]
    return f", in {', '.join(parts)}" if parts else ""


def vanish(view: View) -> Iterator[Finding]:
    """Seeds with almost no gradient."""
    value, limit = view.get(VANISHING), view.limits[SEED_VANISHING]
    if value is not None:
        yield Finding(
            min(1.0, 0.5 * value / limit),
            VANISHING,
            value,
            limit,
            text=lambda: f"the gradients of seeds have vanished: severity {number(value)} on average",
        )


def dormant(view: View) -> Iterator[Finding]:
    """Almost no gradient of the loss reaches the seeds; seeds of fast hosts do not count."""
    parts = [view.get(key) for key in (DORMANT, DISCONNECTED)]
    share, limit = sum(part or 0.0 for part in parts), view.limits[SEED_DORMANT]
    if parts[0] is not None:
        yield Finding(
            min(1.0, 0.5 * share / limit),
            DORMANT,
            share,
            limit,
            text=lambda: f"the loss hardly reaches {percent(share)} of the seeds that learn",
        )


def stalled(view: View) -> Iterator[Finding]:
    """Seeds germinate while none begins to blend."""
    germinated = view.get(GERMINATED)
    if germinated is not None:
        yield Finding(
            hard(germinated > 0 and not view.get(BLENDING)),
            GERMINATED,
            germinated,
            text=lambda: (
                f"{number(germinated)} seeds an update are germinated and none of them passes the gate to blending"
            ),
        )


@dataclass(slots=True)
class RewardHackingJudge:
    """A score well below its best while the return has not fallen since.

    Attributes:
        count: updates with score and return.
        score, paid: levels of score and return.
        best, paid_then: the best level of the score, and the return at that time.
    """

    count: int = 0
    score: float = 0.0
    paid: float = 0.0
    best: float | None = None
    paid_then: float = 0.0

    def __call__(self, view: View) -> Iterator[Finding]:
        score, paid = view.get(SCORE), view.get(RETURN)
        if score is None or paid is None:
            return
        self.count += 1
        if self.count == 1:
            self.score, self.paid = score, paid
        weight = max(LEVEL_WEIGHT, 1 / self.count)
        self.score += weight * (score - self.score)
        self.paid += weight * (paid - self.paid)
        if self.count < SETTLE_UPDATES:
            return
        if self.best is None or self.score >= self.best:
            self.best, self.paid_then = self.score, self.paid
        limit = view.limits[SEED_SCORE_DROP]
        lost = self.best - self.score
        yield Finding(
            hard(lost > limit and self.paid >= self.paid_then),
            SCORE,
            score,
            self.best - limit,
            adaptive=True,
            text=lambda: (
                f"hosts are worth {number(score)} in the end, {number(lost)} below their best, and the return has not fallen"
            ),
        )


SEVERITY_SOURCE = (
    "half where the threshold is met; severities are made where gradients are known, see docs/morphogenesis.md"
)

RULES = (
    AlarmRule(
        type="seed/explode",
        inputs=(EXPLODING, "seed/exploding_frac", "seed/grad/norm"),
        meaning="The gradient of a seed is many times its clip limit, or those of many seeds are ten times theirs.",
        action="Lower the learning rate of seeds, or blend them more slowly; the watchdog gives back weights that are lost "
        "(env/rollbacks).",
        judge=explode,
        bounds=(SEED_EXPLODING, SEED_EXPLODING_FRAC, SEED_ALONE),
        source="Of a thousand healthy seeds and epochs one passes ten clip limits for a minibatch, and of many thousands one passes "
        "thirty: the largest counts where five in a thousand pass ten.",
        debug_updates=5,
        evidence=("seed/largest/*", "seed/*", "env/rollbacks"),
        optional=True,
    ),
    AlarmRule(
        type="seed/vanish",
        inputs=(VANISHING, "seed/grad/norm"),
        meaning="Seeds get next to no gradient at all.",
        action="See why in seed/cause: nothing reaches them, or they lose it; a host that has learned everything leaves nothing either.",
        judge=vanish,
        bounds=(SEED_VANISHING,),
        source=SEVERITY_SOURCE,
        n_on=2,
        debug_updates=2,
        evidence=("seed/*",),
        optional=True,
    ),
    AlarmRule(
        type="seed/dormant",
        inputs=("seed/cause/{cause}", "seed/intensity_ratio", "seed/alpha"),
        meaning="Seeds learn next to nothing because the loss hardly reaches them; this is not a host that is merely faster.",
        action="Raise the weight with which they count (seed/alpha), or prune them: a seed without effect costs its parameters.",
        judge=dormant,
        bounds=(SEED_DORMANT,),
        source="Most of the seeds, three times in a row: some are always about to begin.",
        required=(DORMANT,),
        n_on=3,
        debug_updates=2,
        evidence=("seed/cause/*", "seed/alpha", "seed/intensity_ratio"),
        optional=True,
    ),
    AlarmRule(
        type="seed/stalled",
        inputs=(GERMINATED, "seed/gate/{gate}/pass_frac", "seed/gate/{gate}/asked", "seed/stage/{stage}"),
        meaning="Seeds are germinated and none of them gets as far as having an effect.",
        action="See which gate refuses them; train them for longer before they are advanced, or use permissive gates.",
        judge=stalled,
        source="A controller that acts at random lets some seeds pass in every update.",
        n_on=5,
        debug_updates=2,
        evidence=(GERMINATED, "seed/gate/*", "seed/stage/*"),
        optional=True,
    ),
    AlarmRule(
        type="seed/reward_hacking",
        inputs=(SCORE, RETURN, "env/reward/{component}"),
        meaning="The controller earns as much as ever while the hosts that it grows become worse.",
        action="See which component of the reward pays (env/reward), and weigh it less; pay for the end of the episode (reward sparse).",
        judge=RewardHackingJudge(),
        bounds=(SEED_SCORE_DROP,),
        source="Shaped rewards and worth part ways; both are judged by their own levels, since scales differ between tasks.",
        required=(SCORE, RETURN),
        n_on=3,
        debug_updates=2,
        evidence=("env/*", "episode/*"),
        relative=True,
        optional=True,
    ),
)
