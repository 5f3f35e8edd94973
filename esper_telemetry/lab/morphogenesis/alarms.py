"""Alarms of morphogenesis: broken hosts, exploding, vanishing, dormant and stalled seeds, and a reward that rises while hosts get worse.

The entry point `morphogenesis` of the group `esper_telemetry.alarms` registers them, as for any plugin.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from esper_telemetry.alarms.alarm_bounds import SMALLEST_DIVISOR, above, below, hard
from esper_telemetry.alarms.rule import AlarmRule, Finding, View
from esper_telemetry.core.messages import number, percent
from esper_telemetry.lab.morphogenesis.kinds import BLUEPRINTS, ROLLBACK_ALARM, Stage

EXPLODING, SUSTAINED, EXPLODING_FRAC = "seed/exploding", "seed/exploding_sustained", "seed/exploding_frac"
VANISHING, SCORE, RETURN, ROLLBACKS = "seed/vanishing", "env/score", "episode/return_mean", "env/rollbacks"
DORMANT, DISCONNECTED = "seed/cause/dormant", "seed/cause/disconnected"
GERMINATED, BLENDING = "seed/germinated", "seed/gate/g2/pass_frac"

SETTLE_UPDATES = 5
"""Updates before the levels of score and return are compared."""

LEVEL_WEIGHT = 0.2
"""Weight of a new value in the levels of score and return."""

MAX_NAMED_HOSTS = 8
"""Hosts that the sentence of an alarm names."""

SEED_EXPLODING = above(
    "seed_exploding",
    0.75,
    "severity of a seed's gradient in three epochs in a row; 0.75 is 32 times its clip limit",
    lowest=SMALLEST_DIVISOR,
)
SEED_EXPLODING_FRAC = above(
    "seed_exploding_frac",
    0.05,
    "share of the seeds that learn whose gradients are beyond ten clip limits",
    lowest=SMALLEST_DIVISOR,
)
SEED_ALONE = below(
    "seed_alone",
    0.005,
    "share of seeds beyond ten clip limits, below which the largest of thousands is chance, in journals of earlier versions",
)
SEED_VANISHING = above(
    "seed_vanishing", 0.5, "severity of the vanishing of seeds' gradients, on average", lowest=SMALLEST_DIVISOR
)
SEED_DORMANT = above(
    "seed_dormant", 0.6, "share of the seeds that learn which the loss hardly reaches", lowest=SMALLEST_DIVISOR
)
SEED_SCORE_DROP = above("seed_score_drop", 0.05, "accuracy by which hosts are worth less in the end than they were")


def roll_back(view: View) -> Iterator[Finding]:
    """Hosts that have lost their weights; the severity is 1 if there are as many roll-backs as environments."""
    count = view.get(ROLLBACKS)
    if count is not None:
        hosts, envs = view.labelled("host/each/", "/rollbacks"), view.facts.num_envs
        frac = count / envs if isinstance(envs, int | float) and envs > 0 else 1.0
        yield Finding(
            min(1.0, 0.5 + 0.5 * frac) if count > 0 else 0.0,
            ROLLBACKS,
            count,
            0.0,
            text=lambda: (
                f"the watchdog restores older weights of broken hosts, {number(count)} times in this update ({reasons(view)}), in "
                f"{named_hosts(hosts)}"
            ),
        )


def reasons(view: View) -> str:
    """Return `5 nonfinite, 1 divergence`."""
    return ", ".join(f"{number(value)} {reason}" for reason, _, value in view.labelled("env/rollback/", ""))


def named_hosts(hosts: list[tuple[str, str, float]]) -> str:
    """Return `environments 0, 3 and 5`, in order; `environments 0, 3 and 12 more` for many."""
    names = sorted((name for name, _, _ in hosts), key=int)
    if len(names) <= 1:
        return f"environment {names[0]}" if names else "environments"
    named = names[:-1] if len(names) <= MAX_NAMED_HOSTS else names[:MAX_NAMED_HOSTS]
    last = names[-1] if len(names) <= MAX_NAMED_HOSTS else f"{len(names) - MAX_NAMED_HOSTS} more"
    return f"environments {', '.join(named)} and {last}"


def explode(view: View) -> Iterator[Finding]:
    """A seed's gradient far above its clip limit for three epochs, or many above ten times theirs."""
    sustained, largest = view.get(SUSTAINED), view.get(EXPLODING)
    largest = sustained if largest is None else largest
    if largest is None:
        return
    share, share_limit = view.get(EXPLODING_FRAC) or 0.0, view.limits[SEED_EXPLODING_FRAC]
    key, value, limit = SUSTAINED, sustained, view.limits[SEED_EXPLODING]
    if value is None:  # a journal of an earlier version
        key, value = EXPLODING, largest if share >= view.limits[SEED_ALONE] else 0.0
    if share / share_limit > value / limit:
        key, value, limit = EXPLODING_FRAC, share, share_limit
    yield Finding(
        min(1.0, 0.5 * value / limit),
        key,
        value,
        limit,
        text=lambda: (
            f"the gradient of a seed has exploded{place(view)}: severity {number(largest)}; {percent(share)} of seeds and steps exceed ten "
            "clip limits"
        ),
    )


def place(view: View) -> str:
    """Return the place of the seed with the largest gradient: `, in environment 3, slot 1, stage blending, blueprint mlp`; else empty."""
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
    "half if the threshold is met; severities are made where gradients are known, see docs/morphogenesis.md"
)

RULES = (
    AlarmRule(
        type=ROLLBACK_ALARM,
        inputs=(ROLLBACKS, "env/rollback/{reason}", "host/each/{env}/rollbacks"),
        meaning="Hosts have lost their weights: the loss is not finite, at chance level, or far above its history. They continue from "
        "older weights, without the seeds that had not fossilised.",
        action="Lower the learning rate of the hosts' task; if seed/exploding is high, of seeds; look for NaN in data and weights.",
        judge=roll_back,
        source="No host of a healthy run is rolled back.",
        rank=480,
        debug_updates=2,
        evidence=(ROLLBACKS, "env/rollback/*", "host/each/*/rollbacks", "host/loss", EXPLODING),
        optional=True,
    ),
    AlarmRule(
        type="seed/explode",
        inputs=(SUSTAINED, EXPLODING_FRAC, EXPLODING, "seed/grad/norm"),
        meaning="The gradient of a seed is many times its clip limit in three epochs in a row, or many seeds exceed ten times theirs.",
        action="Lower the learning rate of seeds, or blend them more slowly; the watchdog restores weights that are lost "
        "(env/rollbacks).",
        judge=explode,
        bounds=(SEED_EXPLODING, SEED_EXPLODING_FRAC, SEED_ALONE),
        source="In runs that learn, a seed may exceed thirty clip limits in a minibatch, and none exceeds ten in three epochs in a row. "
        "If the learning rate is ten times too high, some exceed a hundred.",
        required=((SUSTAINED, EXPLODING),),
        debug_updates=5,
        evidence=("seed/largest/*", "seed/*", ROLLBACKS),
        optional=True,
    ),
    AlarmRule(
        type="seed/vanish",
        inputs=(VANISHING, "seed/grad/norm"),
        meaning="The gradients of seeds are almost zero, or zero in one of their layers.",
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
        required=(DORMANT, DISCONNECTED),
        n_on=3,
        debug_updates=2,
        evidence=("seed/cause/*", "seed/alpha", "seed/intensity_ratio"),
        optional=True,
    ),
    AlarmRule(
        type="seed/stalled",
        inputs=(GERMINATED, "seed/gate/{gate}/pass_frac", "seed/gate/{gate}/asked", "seed/stage/{stage}"),
        meaning="Seeds are germinated, but all of them fail before they have an effect.",
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
