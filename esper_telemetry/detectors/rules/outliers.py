"""When a single value is out of line, and when two are."""

from __future__ import annotations

from esper_telemetry.detectors.rule import View, ramp


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
