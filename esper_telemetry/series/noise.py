"""The gradient noise scale: the batch size at which noise and signal would be equal (G9; McCandlish 2018)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from esper_telemetry.derived import Array, Derived
from esper_telemetry.metric import Metric, reports
from esper_telemetry.series.ema import FAST, Ema


@dataclass(frozen=True, slots=True)
class NoiseScale(Derived):
    """The noise scale and whether noise drowns the gradient."""

    b_simple: float | None = reports(
        Metric(
            key="grad/gns/b_simple",
            number=562,
            unit="samples (sequences)",
            question="How large a batch would the gradient need for its noise to equal its signal?",
            low=0.0,
            cost="sampled",
            healthy="0.1 to 10 batch sizes",
            warn="> 10 batch sizes: noise; < 0.1: the batch could shrink",
            source="McCandlish 2018, 1812.06162",
            undefined="the average estimate of the true gradient is not positive",
        )
    )
    noise_dominated: float | None = reports(
        Metric(
            key="grad/gns/noise_dominated",
            number=563,
            unit="flag",
            question="Is this update's gradient indistinguishable from noise?",
            low=0.0,
            high=1.0,
            cost="sampled",
            source="McCandlish 2018, 1812.06162",
            undefined="the noise was not measured",
        )
    )


class NoiseAverage:
    """Averages signal and noise separately; their ratio is far less biased than an average of ratios.

    Negative single estimates enter the averages: to drop them would bias the signal upwards.
    """

    def __init__(self, beta: float = FAST) -> None:
        self._ema = Ema(2, beta)

    def step(self, g2: float | None, tr_sigma: float | None) -> NoiseScale:
        """Takes the estimates of one update; None where they were not measured."""
        if g2 is None or tr_sigma is None or not math.isfinite(g2 + tr_sigma):
            return NoiseScale()
        self._ema.step(np.array([g2, tr_sigma]))
        signal, noise = self._ema.mean.tolist()
        return NoiseScale(noise / signal if signal > 0 else None, float(g2 <= 0))

    def state(self) -> Array:
        """All of the state, to go into a checkpoint."""
        return self._ema.state()

    def restore(self, state: Array) -> None:
        """Continues from `state()`."""
        self._ema.restore(state)
