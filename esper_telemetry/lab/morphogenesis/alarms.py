"""Alarms of morphogenesis: broken hosts, exploding, vanishing, dormant and stalled seeds, and reward hacking.

The entry point `morphogenesis` of the group `esper_telemetry.alarms` registers them, as for any plugin.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from esper_telemetry.alarms.alarm_bounds import SMALLEST_DIVISOR, above, below, hard
from esper_telemetry.alarms.judges import Recent, StateJudge
from esper_telemetry.alarms.rule import AlarmRule, Finding, View
from esper_telemetry.core.messages import number
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
    "seed_exploding_frac", 0.05, "share of the learning seeds whose gradients are above ten times their clip limit", lowest=SMALLEST_DIVISOR
)
SEED_ALONE = below(
    "seed_alone",
    0.005,
    "share of seeds beyond ten clip limits, below which the largest of thousands is chance, in journals of earlier versions",
)
SEED_VANISHING = above("seed_vanishing", 0.5, "severity of the vanishing of seeds' gradients, on average", lowest=SMALLEST_DIVISOR)
SEED_DORMANT = above("seed_dormant", 0.6, "share of the learning seeds that the loss hardly reaches", lowest=SMALLEST_DIVISOR)
SEED_SCORE_DROP = above("seed_score_drop", 0.05, "fall of the hosts' final accuracy from its best")


MIN_ROLLBACKS, ROLLBACK_UPDATES = 2, 10
"""Hosts that are rolled back within so many updates."""


def roll_back(view: View, counts: Recent) -> Iterator[Finding]:
    """Hosts that have lost their weights; the severity is 1 if there are as many roll-backs as environments.

    A single loss far above its history may be chance, one that is not finite is not.
    """
    count = view.get(ROLLBACKS)
    if count is not None:
        alone = sum(counts.add(count)) < MIN_ROLLBACKS and not view.get("env/rollback/nonfinite")
        hosts, envs = view.labelled("host/each/", "/rollbacks"), view.facts.num_envs
        frac = count / envs if isinstance(envs, int | float) and envs > 0 else 1.0
        yield Finding(min(1.0, 0.5 + 0.5 * frac) if count > 0 and not alone else 0.0, ROLLBACKS, count, 0.0).says(
            "the watchdog has restored older weights of broken hosts {} times in the last update ({}), in {}",
            *(count, lambda: reasons(view), lambda: named_hosts(hosts)),
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
    yield Finding(min(1.0, 0.5 * value / limit), key, value, limit).says(
        "the gradient of a seed has exploded{}: its severity is {} of 1, and {:%} of the seeds' gradients are above ten times their clip "
        "limit",
        *(lambda: place(view), largest, share),
    )


def place(view: View) -> str:
    """Return the place of the seed with the largest gradient: `, in environment 3, slot 1, stage blending, blueprint mlp`; else empty."""
    names = {"stage": [stage.name.lower() for stage in Stage], "blueprint": [kind.name for kind in BLUEPRINTS]}
    places = {part: view.get(f"seed/largest/{part}") for part in ("environment", "slot", "stage", "blueprint")}
    named = {part: int(index) for part, index in places.items() if index is not None and index >= 0}
    parts = [f"{part} {names[part][index] if part in names and index < len(names[part]) else index}" for part, index in named.items()]
    return f", in {', '.join(parts)}" if parts else ""


def vanish(view: View) -> Iterator[Finding]:
    """Seeds whose gradients are almost zero."""
    value, limit = view.get(VANISHING), view.limits[SEED_VANISHING]
    if value is not None:
        yield Finding(min(1.0, 0.5 * value / limit), VANISHING, value, limit).says(
            "the gradients of seeds have vanished, so they do not learn: the severity averages {} of 1", value
        )


def dormant(view: View) -> Iterator[Finding]:
    """The loss's gradient hardly reaches the seeds; seeds of fast hosts are left out."""
    parts = [view.get(key) for key in (DORMANT, DISCONNECTED)]
    share, limit = sum(part or 0.0 for part in parts), view.limits[SEED_DORMANT]
    if parts[0] is not None:
        yield Finding(min(1.0, 0.5 * share / limit), DORMANT, share, limit).says(
            "the loss has hardly reached {:%} of the seeds that should learn, so they do not improve", share
        )


def stalled(view: View) -> Iterator[Finding]:
    """Seeds germinate, and none begins to blend."""
    germinated = view.get(GERMINATED)
    if germinated is not None:
        yield Finding(hard(germinated > 0 and not view.get(BLENDING)), GERMINATED, germinated).says(
            "{} seeds have germinated per update, and none has passed the gate to blending, so hosts do not change", germinated
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
        yield Finding(hard(lost > limit and self.paid >= self.paid_then), SCORE, score, self.best - limit, adaptive=True).says(
            "the final score of hosts has been {}, {} below its best, although the return has not fallen: the reward pays for something "
            "else",
            *(score, lost),
        )


SEVERITY_SOURCE = "a severity of half at the threshold; docs/morphogenesis.md defines the severities of gradients"

RULES = (
    AlarmRule(
        type=ROLLBACK_ALARM,
        inputs=(ROLLBACKS, "env/rollback/{reason}", "host/each/{env}/rollbacks"),
        meaning="Hosts have lost their weights: their loss is not finite, at chance level, or far above its history. They continue with "
        "older weights, and lose the seeds that had not fossilised.",
        action="Lower the learning rate of the hosts, and of the seeds if seed/exploding is high; look for NaN in data and weights.",
        judge=StateJudge(roll_back, Recent(ROLLBACK_UPDATES)),
        source="In a healthy run hosts are hardly ever rolled back.",
        rank=480,
        debug_updates=2,
        evidence=(ROLLBACKS, "env/rollback/*", "host/each/*/rollbacks", "host/loss", EXPLODING),
        optional=True,
    ),
    AlarmRule(
        type="seed/explode",
        inputs=(SUSTAINED, EXPLODING_FRAC, EXPLODING, "seed/grad/norm"),
        meaning="The gradient of a seed is many times its clip limit in three epochs in a row, or many seeds exceed ten times the limit.",
        action="Lower the learning rate of the seeds, or blend them more slowly; env/rollbacks counts how often lost weights were "
        "restored.",
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
        action="Look at seed/cause: either gradients do not reach the seeds, or the seeds lose them. Gradients also vanish once hosts "
        "have learned everything.",
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
        meaning="Seeds hardly learn because the loss does not reach them; a host that merely learns faster does not raise this.",
        action="Raise the weight of the seeds (seed/alpha), or prune them: a seed without an effect only costs parameters.",
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
        meaning="Seeds germinate, but all of them fail before they affect their hosts.",
        action="Look at seed/gate for the gate that rejects them; train seeds longer before advancing them, or use permissive gates.",
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
        meaning="The controller's return stays the same while its hosts become worse.",
        action="Look at env/reward for the component that grows, and lower its weight; or reward only the final score (`sparse`).",
        judge=RewardHackingJudge(),
        bounds=(SEED_SCORE_DROP,),
        source="The shaped reward no longer follows the score. Each is compared with its own earlier level, because scales differ "
        "between tasks.",
        required=(SCORE, RETURN),
        n_on=3,
        debug_updates=2,
        evidence=("env/*", "episode/*"),
        relative=True,
        optional=True,
    ),
)
