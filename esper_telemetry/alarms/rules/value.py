"""The critic: it fitted and no longer does, it jumps, it is wrong in one direction."""

from __future__ import annotations

from collections.abc import Iterator

from esper_telemetry.alarms.rule import Finding, Rule, View, decade_ramp, hard, number, percent, ramp, times
from esper_telemetry.alarms.rules.endings import confused_ends
from esper_telemetry.alarms.rules.numerics import outlier

LOSS, R2, EXPLAINED, SPREAD = "loss/value", "value/r2", "value/explained_variance", "value/target/std"
PHASES = ((0.10, -0.5), (0.25, -0.2), (0.75, 0.0), (1.0, 0.1))
"""Explained variance that may be expected up to that share of the run: early a critic knows nothing yet, late it should."""

LOOKS = 20
RECENT = 5
"""Latest losses that a jump is compared with."""

BIASED = 10
"""Updates for which a critic must be wrong in one direction."""

GROWN = 0.5
"""Decades by which the loss must have grown too: the fit also falls where returns only vary less."""


def expected_fit(progress: float | None) -> float:
    """Explained variance below which a critic is useless at that share of the run; the strictest bound where that is unknown."""
    if progress is None:
        return PHASES[0][1]
    return next((bound for end, bound in PHASES if progress < end), PHASES[-1][1])


def fit_collapse(view: View) -> Iterator[Finding]:
    """The critic has lost a fit that it had, and its error has grown."""
    limits = view.limits
    r2, explained, loss_norm = view.get(R2), view.get(EXPLAINED), view.get("value/loss_norm")
    if r2 is None and loss_norm is None:
        return
    seen = view.memory.setdefault("seen", [])
    best = max(seen, default=None)
    if r2 is not None:
        seen.append(r2)
        del seen[:-LOOKS]
    usual_returns = view.baselines.off_median(SPREAD) < GROWN
    grown = view.baselines.shift.get(LOSS, 0.0) > GROWN and usual_returns
    useless = explained is not None and explained < expected_fit(view.progress)
    lost = r2 is not None and best is not None and best > limits.fit_was and r2 < limits.fit_now
    ratio = decade_ramp(loss_norm or 0.0, limits.loss_norm_low, limits.loss_norm_high) if grown else 0.0
    by_fit = lost and (useless or best is None) and grown
    yield Finding(
        max(hard(bool(by_fit)), ratio),
        R2 if by_fit else "value/loss_norm",
        r2 if by_fit else loss_norm,
        limits.fit_now if by_fit else (limits.loss_norm_low * limits.loss_norm_high) ** 0.5,
        z=view.z(LOSS),
        text=lambda: (
            f"the critic no longer predicts returns: R² has fallen from {number(best or 0.0)} to {number(r2 or 0.0)}, "
            f"its loss is {number(view.get(LOSS) or 0.0)}{view.usual(LOSS)}"
            if by_fit
            else f"the critic's squared error has been {times(loss_norm or 0.0)} the variance of returns"
        ),
    )


def loss_jump(view: View) -> Iterator[Finding]:
    """The critic's error jumped."""
    found, value = outlier(view, LOSS), view.get(LOSS)
    if value is None:
        return
    recently = max(fresh(view, key) for key in (LOSS, "value/loss_norm"))
    if found is None:
        return
    median = view.baselines.median(LOSS) or value
    paid_more = (view.z("reward/absmax") or 0.0) >= view.limits.z_high
    severity = max(found[0], recently if paid_more else 0.0)
    yield Finding(
        severity,
        LOSS,
        value,
        adaptive=True,
        z=found[1],
        text=lambda: (
            f"the critic's loss has jumped to {number(value)}, {times(value / median)} its median{view.usual(LOSS)}"
        ),
    )


def fresh(view: View, key: str) -> float:
    """Severity of a value far above all of the last five.

    It tells, together with new rewards, where the history spans decades; relative to the variance of returns also where they are scaled.
    """
    value = view.get(key)
    if value is None:
        return 0.0
    recent = view.memory.setdefault((key, "recent"), [])
    highest = max(recent, default=0.0)
    enough = len(recent) == RECENT
    recent.append(value)
    del recent[:-RECENT]
    limits = view.limits
    return (
        decade_ramp(value / highest, limits.loss_recent_low, limits.loss_recent_high) if enough and highest > 0 else 0.0
    )


def bias(view: View) -> Iterator[Finding]:
    """The critic is wrong in one direction, by much of the spread of returns and of their size, for long; or it must become so,
    because terminations and time limits are confused.
    """
    yield from confused_ends(view)
    key, limits = "value/bias_over_std", view.limits
    value, off, mean, spread = (view.get(name) for name in (key, "value/bias", "ret/mean", "ret/std"))
    if value is None or off is None or mean is None or spread is None:
        return
    view.memory["best"] = min(view.memory.get("best", abs(value)), abs(value))
    size = abs(mean) + spread
    share = abs(off) / size if size > 0 else 0.0
    low, high = limits.bias_low, limits.bias_high
    learned = view.memory["best"] < low
    severity = min(ramp(abs(value), low, high), ramp(share, 0.0, 2 * limits.bias_share)) if learned else 0.0
    seen = view.memory.setdefault("severities", [])
    seen.append(severity)
    del seen[:-BIASED]
    lasting = min(seen) if len(seen) == BIASED else 0.0
    yield Finding(
        lasting,
        key,
        value,
        (low + high) / 2,
        text=lambda: (
            f"the critic has been {'over' if off > 0 else 'under'}estimating returns by {number(abs(off))} on average, "
            f"{percent(share)} of their size, which explained variance cannot see"
        ),
    )


RULES = (
    Rule(
        type="value/loss_jump",
        judge=loss_jump,
        inputs=(LOSS,),
        watches=(LOSS, "reward/absmax"),
        duration=5,
        evidence=("loss/*", "ret/*", "reward/*", "value/r2", "opt/lr"),
        relative=True,
        source="Far out at once, or out of line twice; or far above the last five while rewards are larger than ever: a critic that "
        "learned fast has a history of many decades.",
    ),
    Rule(
        type="value/fit_collapse",
        judge=fit_collapse,
        inputs=(R2, "value/loss_norm"),
        watches=(LOSS, SPREAD),
        warmup=10,
        n_on=2,
        duration=5,
        evidence=("value/*", "ret/std", "loss/value"),
        relative=True,
        source="baselines#454, ray#10159: the fit alone is noise where returns hardly vary, so the loss must have grown. Bounds by phase. "
        "A critic of a solved task cannot foresee the next failure: where returns vary more than ever, the fit says nothing.",
    ),
    Rule(
        type="value/bias",
        judge=bias,
        inputs=("value/bias_over_std", "value/bias"),
        warmup=10,
        duration=3,
        evidence=("value/bias", "value/bias_over_std", "value/terminal_err", "ret/mean", "ret/std", "episode/*"),
        relative=True,
        source="A critic lags behind returns that rise: it must be wrong for ten updates, by much of their size, and have been right "
        "before: one that learns slowly is wrong from the start. Ends of episodes that contradict the time limit tell at once.",
    ),
)
