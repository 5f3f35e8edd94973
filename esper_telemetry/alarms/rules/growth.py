"""Seeds: exploding, vanishing, out of reach, stuck, or grown for the reward instead of the host."""

from __future__ import annotations

from collections.abc import Iterator

from esper_telemetry.alarms.rule import Finding, Rule, View, hard, number, percent

EXPLODING, VANISHING, SCORE, RETURN = "seed/exploding", "seed/vanishing", "env/score", "episode/return_mean"
DORMANT, DISCONNECTED = "seed/cause/dormant", "seed/cause/disconnected"
GERMINATED, BLENDING = "seed/germinated", "seed/gate/g2/pass_frac"

SETTLED = 5
"""Updates before a level is one."""

SMOOTH = 0.2
"""Share of a new value in the levels of score and return."""


def explode(view: View) -> Iterator[Finding]:
    """A seed's gradient is far beyond its clip limit, or those of many are beyond ten times theirs."""
    value, limit = view.get(EXPLODING), view.limits.seed_exploding
    if value is not None:
        share = view.get("seed/exploding_frac") or 0.0
        yield Finding(
            min(1.0, 0.5 * max(value / limit, share / view.limits.seed_exploding_frac)),
            EXPLODING,
            value,
            limit,
            text=lambda: (
                f"the gradient of a seed has exploded: severity {number(value)}; so it is in {percent(share)} of seeds and steps"
            ),
        )


def vanish(view: View) -> Iterator[Finding]:
    """Seeds have next to no gradient."""
    value, limit = view.get(VANISHING), view.limits.seed_vanishing
    if value is not None:
        yield Finding(
            min(1.0, 0.5 * value / limit),
            VANISHING,
            value,
            limit,
            text=lambda: f"the gradients of seeds have vanished: severity {number(value)} on average",
        )


def dormant(view: View) -> Iterator[Finding]:
    """Too little of the loss reaches the seeds; one whose host is fast is none of these."""
    parts = [view.get(key) for key in (DORMANT, DISCONNECTED)]
    share, limit = sum(part or 0.0 for part in parts), view.limits.seed_dormant
    if parts[0] is not None:
        yield Finding(
            min(1.0, 0.5 * share / limit),
            DORMANT,
            share,
            limit,
            text=lambda: f"the loss hardly reaches {percent(share)} of the seeds that learn",
        )


def stalled(view: View) -> Iterator[Finding]:
    """Seeds are germinated, and none begins to blend."""
    born = view.get(GERMINATED)
    if born is not None:
        opened = view.get(BLENDING)
        yield Finding(
            hard(born > 0 and not opened),
            GERMINATED,
            born,
            text=lambda: f"{number(born)} seeds an update are germinated and none of them passes the gate to blending",
        )


def reward_hacking(view: View) -> Iterator[Finding]:
    """The score is well below its best while the return is not below what it was then."""
    score, paid = view.get(SCORE), view.get(RETURN)
    if score is None or paid is None:
        return
    memory = view.memory
    count = memory["count"] = memory.get("count", 0) + 1
    share = max(SMOOTH, 1 / count)
    for name, value in (("score", score), ("paid", paid)):
        memory[name] = memory.get(name, value) + share * (value - memory.get(name, value))
    if count < SETTLED:
        return
    if memory["score"] >= memory.get("best", memory["score"]):
        memory["best"], memory["paid_then"] = memory["score"], memory["paid"]
    best, limit = memory["best"], view.limits.seed_score_drop
    lost, as_much = best - memory["score"], memory["paid"] >= memory["paid_then"]
    yield Finding(
        hard(lost > limit and as_much),
        SCORE,
        score,
        best - limit,
        adaptive=True,
        text=lambda: (
            f"hosts are worth {number(score)} in the end, {number(lost)} below their best, and the return has not fallen"
        ),
    )


SEVERITY = "half where the threshold is met; severities are made where gradients are known, see docs/morphogenesis.md"

RULES = (
    Rule(
        type="seed/explode",
        judge=explode,
        inputs=(EXPLODING,),
        optional=True,
        duration=5,
        evidence=("seed/*", "env/rollbacks"),
        source="Of a thousand healthy seeds and epochs one passes ten clip limits for a minibatch; none passes thirty.",
    ),
    Rule(
        type="seed/vanish",
        judge=vanish,
        inputs=(VANISHING,),
        optional=True,
        n_on=2,
        duration=2,
        evidence=("seed/*",),
        source=SEVERITY,
    ),
    Rule(
        type="seed/dormant",
        judge=dormant,
        inputs=(DORMANT,),
        optional=True,
        n_on=3,
        duration=2,
        evidence=("seed/cause/*", "seed/alpha", "seed/intensity_ratio"),
        source="Most of the seeds, three times in a row: some are always about to begin.",
    ),
    Rule(
        type="seed/stalled",
        judge=stalled,
        inputs=(GERMINATED,),
        optional=True,
        n_on=5,
        duration=2,
        evidence=(GERMINATED, "seed/gate/*", "seed/stage/*"),
        source="A controller that acts at random lets some seeds pass in every update.",
    ),
    Rule(
        type="seed/reward_hacking",
        judge=reward_hacking,
        inputs=(SCORE, RETURN),
        optional=True,
        n_on=3,
        duration=2,
        evidence=("env/*", "episode/*"),
        relative=True,
        source="Shaped rewards and worth part ways; both are judged by their own levels, since scales differ between tasks.",
    ),
)
