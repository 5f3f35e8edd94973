"""The optimizer: steps too large, none at all, a memory that no longer fits."""

from __future__ import annotations

from collections.abc import Iterator

from esper_telemetry.alarms.rule import Finding, Rule, View, decade_ramp, hard, number, percent, segment_of, times

SIZE, RATE = "opt/update_to_weight", "opt/lr"
WARMS = 5
"""Updates at the beginning in which a schedule may not have begun to warm up."""

GAPS = 20
"""Updates in which gaps between rewards are looked for."""

ANNEALED = 0.05
"""Of the largest learning rate: from there down a schedule may well end at nothing."""


def update_too_large(view: View) -> Iterator[Finding]:
    """One optimizer step changes the weights by a large share of themselves.

    Between the updates in which this is measured, the learning rate says how it has changed: steps of Adam are proportional to it.
    """
    yield from jumping_rate(view)
    low, high = view.limits.update_to_weight_low, view.limits.update_to_weight_high
    value, rate = view.get(SIZE), view.get(RATE)
    if value is not None and rate:
        view.memory["size"] = value / rate
    if rate is None or "size" not in view.memory:
        return
    size = view.memory["size"] * rate
    yield Finding(
        decade_ramp(size, low, high),
        SIZE,
        size,
        (low * high) ** 0.5,
        text=lambda: (
            f"every optimizer step changes the weights by {percent(size)} of themselves (usual are 0.01 % to 1 %), "
            f"at a learning rate of {number(rate)}"
        ),
    )


def jumping_rate(view: View) -> Iterator[Finding]:
    """The learning rate has jumped from one update to the next, above what was set; where it follows the KL it may."""
    rate, before, asked = view.get(RATE), view.previous.get(RATE), view.facts.get("learning_rate")
    if rate is None or not before or not asked or view.facts.get("desired_kl"):
        return
    above = rate > view.limits.rate_grown * asked
    if above and rate >= view.limits.rate_jump * before:
        view.memory["jumped_from"] = before
    elif not above:
        view.memory.pop("jumped_from", None)
    origin = view.memory.get("jumped_from")
    yield Finding(
        hard(origin is not None),
        RATE,
        rate,
        view.limits.rate_grown * asked,
        instance="rate",
        text=lambda: (
            f"the learning rate has jumped from {number(origin or rate)} to {number(rate)}, "
            f"{times(rate / asked)} the {number(asked)} that was set"
        ),
    )


def stopped_on_purpose(view: View) -> bool:
    """Whether a learning rate near 0 is what a schedule led to, and no mistake; keeps its largest value in mind."""
    rate = view.get(RATE)
    if rate is None:
        return False
    highest = view.memory["highest"] = max(view.memory.get("highest", 0.0), rate)
    if highest == 0:
        return view.update <= WARMS
    before = view.previous.get(RATE, rate)
    if rate > ANNEALED * highest:
        view.memory["abrupt"] = False
        return False
    if before > ANNEALED * highest and rate < before / 4:
        view.memory["abrupt"] = True
    return not view.memory.get("abrupt")


def stalled_weights(view: View) -> Iterator[Finding]:
    """A tensor has a gradient and does not move, or the learning rate fell to 0 at once."""
    annealed = stopped_on_purpose(view)
    rate = view.get(RATE)
    measured = view.labelled(f"{SIZE}/", "")
    if rate is None or (not measured and rate > 0):
        return
    declared = {segment_of(name) for names in dict(view.facts.get("groups") or {}).values() for name in names}
    still = [
        layer
        for layer, _, value in measured
        if value == 0 and layer in declared and view.values.get(f"grad/layer/{layer}/norm", 0.0) > 0
    ]
    wrong = not annealed and (rate == 0 or bool(still))
    told = ", ".join(still[:3]) + (f" and {len(still) - 3} more" if len(still) > 3 else "")
    yield Finding(
        hard(wrong),
        f"{SIZE}/{still[0]}" if still else RATE,
        0.0,
        0.0,
        text=lambda: (
            "the learning rate has been 0: no weight moves"
            if rate == 0
            else f"weights have a gradient and do not move: {told}"
        ),
    )


def rms_spike(view: View) -> Iterator[Finding]:
    """Gradients have outgrown Adam's memory of them, or it is too short for rewards that are rare."""
    yield from short_memory(view)
    key, limits = "opt/stable_rms", view.limits
    value = view.get(key)
    if value is not None:
        before, view.memory["rms"] = view.memory.get("rms", 0.0), value
        low, high = limits.stable_rms_low, limits.stable_rms_high
        lasting = decade_ramp(min(value, before), low, high)
        yield Finding(
            max(lasting, decade_ramp(value, limits.stable_rms_sudden_low, limits.stable_rms_sudden_high)),
            key,
            value,
            (low * high) ** 0.5,
            text=lambda: f"gradients have been {number(value)} times what Adam remembers of them (settled: about 1)",
        )


def short_memory(view: View) -> Iterator[Finding]:
    """Adam forgets within one update, and did not before; or rewards come in some updates only, and are forgotten in between."""
    beta2, zeros, steps = view.get("opt/beta2"), view.get("reward/zero_frac"), view.steps
    paid = view.memory.setdefault("paid", [])
    if zeros is not None:
        paid.append(zeros < 1)
        del paid[:-GAPS]
    if beta2 is None or not steps or not 0 <= beta2 < 1:
        return
    reach, need = 1 / (1 - beta2), view.limits.memory_updates * steps
    before = view.memory["reach"] = max(view.memory.get("reach", 0.0), reach)
    fallen = before >= need
    rare = any(paid) and not all(paid)
    why = (
        f"rewards came in {paid.count(True)} of the last {len(paid)} updates"
        if rare
        else f"it reached back {number(before)} before"
    )
    yield Finding(
        hard(reach < need and (rare or fallen)),
        "opt/beta2",
        beta2,
        1 - 1 / max(1.0, need),
        instance="memory",
        text=lambda: (
            f"Adam's memory of squared gradients reaches back {number(reach)} steps, less than the {steps} of an update, and {why}: a "
            "gradient that is larger than usual meets a memory that has forgotten the like"
        ),
    )


def state_lost(view: View) -> Iterator[Finding]:
    """The optimizer was made anew."""
    key = "opt/state_reset"
    value = view.get(key)
    if value is not None:
        yield Finding(
            hard(value > 0), key, value, 0.0, text=lambda: "the optimizer has lost its moments: it was made anew"
        )


RULES = (
    Rule(
        type="opt/stalled_weights",
        judge=stalled_weights,
        inputs=(RATE,),
        facts=("groups",),
        certain=True,
        n_off=1,
        duration=5,
        evidence=(RATE, "opt/update_to_weight/*", "policy/kl_max"),
        source="A schedule that ends at 0 comes there in small steps; a tensor without gradient is another question.",
    ),
    Rule(
        type="opt/state_lost",
        judge=state_lost,
        inputs=("opt/state_reset",),
        warmup=2,
        n_off=1,
        duration=2,
        evidence=("opt/state_reset", "opt/stable_rms"),
        sampled=True,
        source="steps of a fresh Adam are large whatever the gradient",
    ),
    Rule(
        type="opt/update_too_large",
        judge=update_too_large,
        inputs=(SIZE, RATE),
        warmup=3,
        n_off=2,
        duration=5,
        evidence=("opt/update_to_weight*", RATE, "policy/kl"),
        source="per optimizer step; CS231n: 0.001 is usual. A learning rate that jumps above what was set is no schedule",
    ),
    Rule(
        type="opt/rms_spike",
        judge=rms_spike,
        inputs=("opt/stable_rms",),
        warmup=20,
        duration=3,
        evidence=("opt/stable_rms", "grad/global/norm_preclip", RATE),
        relative=True,
        sampled=True,
        source="Wortsman 2023 has 2.3 for language models; PPO's gradients jump at every new rollout, and to 6 for three updates where "
        "a task that is nearly solved fails once more: 10 at two looks in a row, or 20.",
    ),
)
