"""Numbers that are not finite.

When a single value is out of line, and when two are.
"""

from __future__ import annotations

from collections.abc import Iterator

from esper_telemetry.alarms.kinds import NONFINITE
from esper_telemetry.alarms.rule import Finding, Rule, View, number, ramp

KEY = "numerics/nonfinite"
OURS = (
    "reward",
    "norm",
    "buffer",
    "lstm",
    "ret",
    "adv",
    "value",
    "episode",
    "integrity",
    "policy",
    "loss",
    "repr",
    "grad",
    "opt",
    "numerics",
)
"""Families whose counters of what was left out speak for the run, causes first; the counters of numbers that users log do not."""


def nonfinite(view: View) -> Iterator[Finding]:
    """Any NaN or infinity in data, losses, gradients or weights."""
    keys = (KEY, "reward/nonfinite", *view.matching("", NONFINITE))
    counts = {key: view.values[key] for key in keys if view.values.get(key, 0.0) > 0 and key.partition("/")[0] in OURS}
    if not counts and KEY not in view.values:
        return
    total = counts.get(KEY) or max(counts.values(), default=0.0)
    places = sorted((key.removesuffix(NONFINITE) for key in counts if key != KEY), key=_place)
    where = f", among them in {', '.join(places[:3])}" if places else ""
    yield Finding(
        float(bool(counts)), KEY, total, 0.0, text=lambda: f"{number(total)} numbers are NaN or infinite{where}"
    )


def _place(key: str) -> int:
    """Where the family of a key stands among causes."""
    return OURS.index(key.partition("/")[0])


RULES = (
    Rule(
        type=KEY,
        judge=nonfinite,
        inputs=(KEY,),
        n_off=1,
        duration=10,
        evidence=("reward/nonfinite", "*_nonfinite", "loss/*", "policy/kl", "grad/global/norm_preclip", "opt/lr"),
        certain=True,
        partial=True,
        source="always an error; ray#28283, coach#87",
    ),
)


def outlier(view: View, key: str) -> tuple[float, float] | None:
    """Severity and z of an upward outlier: far out at once, or out of line for two updates in a row.

    Where a history is so wide that nothing is far out by its standard scores, it counts how far a value exceeds all before it.
    """
    z = view.z(key)
    if z is None:
        return None
    limits = view.limits
    before = view.memory.get(key, 0.0)
    view.memory[key] = z
    sudden = ramp(z, limits.z_sudden_low, limits.z_sudden_high)
    lasting = ramp(min(z, before), limits.z_low, limits.z_high)
    beyond = ramp(view.baselines.beyond.get(key, 0.0), limits.beyond_low, limits.beyond_high)
    return max(sudden, lasting, beyond), z
