"""What a record's gradient norms say in the light of the records before it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from esper_telemetry.record import Level
from esper_telemetry.series.health import GradientCondition, gradient_condition
from esper_telemetry.series.noise import NoiseAverage
from esper_telemetry.series.rank import WINDOW, advantage_gradient
from esper_telemetry.series.severity import LayerSeverity, NormBaseline

LAYER = ("grad/layer/", "/norm")
"""How the keys of single layers' norms begin and end."""

UNCLIPPED = 1.0
"""Stands for the clip limit where nothing is clipped: thresholds need a scale."""


class GradientHistory:
    """Severity per group, health over layers, and whether the scale of the advantages leaks into the gradients.

    Args:
        groups: parameter groups, as the run declares them.
        max_grad_norm: the clip limit; None where nothing is clipped.

    Attributes:
        condition: health of the gradients in the last record, and what spoils it most.
        rebaselined: groups whose thresholds start anew with the last record, because their norms had been out of range for long.
    """

    def __init__(self, groups: Sequence[str], max_grad_norm: float | None) -> None:
        self.condition = GradientCondition()
        self.rebaselined: tuple[str, ...] = ()
        self._groups = tuple(groups)
        self._limit = max_grad_norm or UNCLIPPED
        self._baseline = NormBaseline(self._groups, self._limit)
        self._layers = NormBaseline((), self._limit)
        self._noise = NoiseAverage()
        self._pairs: deque[tuple[float, float]] = deque(maxlen=WINDOW)

    def derive(self, values: Mapping[str, float], level: Level) -> dict[str, float]:
        """The derived values of a record with these measured ones."""
        return {
            **self._severity(values, level),
            **self._health(values, level),
            **self._noise.step(values.get("grad/gns/g2"), values.get("grad/gns/tr_sigma")).values(level),
            **self._scale_leak(values, level),
        }

    def _severity(self, values: Mapping[str, float], level: Level) -> dict[str, float]:
        if not self._groups:
            return {}
        means = [values.get(f"grad/{group}/norm_preclip", np.nan) for group in self._groups]
        peaks = [self._peak(values, group) for group in self._groups]
        severity, anew = self._baseline.step(np.array(means), np.array(peaks))
        self.rebaselined = tuple(group for group, new in zip(self._groups, anew.tolist(), strict=True) if new)
        return severity.values(level)

    def _peak(self, values: Mapping[str, float], group: str) -> float:
        flawed = f"grad/{group}/norm_preclip_nonfinite" in values
        return np.inf if flawed else values.get(f"grad/{group}/norm_preclip_max", np.nan)

    def _health(self, values: Mapping[str, float], level: Level) -> dict[str, float]:
        """Health over layers, each judged by its own history: a naturally small gradient is no fault."""
        found = {
            key[len(LAYER[0]) : -len(LAYER[1])]: value
            for key, value in values.items()
            if key.startswith(LAYER[0]) and key.endswith(LAYER[1])
        }
        if tuple(found) != self._layers.groups:
            self._layers = NormBaseline(tuple(found), self._limit)
        norms = np.array(list(found.values()))
        severity, _ = self._layers.step(norms, norms)
        flawed = "grad/global/norm_preclip_nonfinite" in values
        self.condition = gradient_condition(
            np.append(norms, np.inf) if flawed else norms,
            tau_vanish=np.asarray(severity.threshold_vanish),
            tau_explode=np.asarray(severity.threshold_explode),
            zero_frac=values.get("grad/zero_frac"),
        )
        layers = LayerSeverity(tuple(found), severity.severity_explode, severity.severity_vanish)
        return {**self.condition.values(level), **layers.values(level)}

    def _scale_leak(self, values: Mapping[str, float], level: Level) -> dict[str, float]:
        names = ("adv/raw/std", "grad/actor/norm_preclip")
        self._pairs.append((values.get(names[0], np.nan), values.get(names[1], np.nan)))
        spread, norm = np.array(self._pairs).T
        return advantage_gradient(spread, norm).values(level)
