"""Modules beside their hosts over time: the intensity ratio of each pair, and why it is low (G13)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from esper_telemetry.record import Level
from esper_telemetry.series.pair import Diagnosis, PairEvidence, PairIntensity, diagnose_pair
from esper_telemetry.series.robust import N_MIN, History, decades, robust_z

START, END = "grad/pair/", "/connected"
SIGNALS = ("intensity", "host_intensity", "upstream", "gain")


class PairHistories:
    """The history of every pair that is watched; give it every record in order.

    Attributes:
        diagnoses: why each pair learns as it does, by name, of the last record.
    """

    def __init__(self) -> None:
        self.diagnoses: dict[str, Diagnosis] = {}
        self._histories: dict[str, History] = {}

    def derive(self, values: Mapping[str, float], level: Level) -> dict[str, float]:
        """The intensity ratios of a record with these measured values."""
        pairs = [key[len(START) : -len(END)] for key in values if key.startswith(START) and key.endswith(END)]
        self.diagnoses = {}
        found: dict[str, float] = {}
        for pair in pairs:
            signals = _signals(pair, values)
            ratio = _ratio(signals["intensity"], signals["host_intensity"])
            self.diagnoses[pair] = self._diagnose(pair, values, signals, ratio)
            found.update(PairIntensity(pair, ratio).values(level))
        return found

    def _diagnose(
        self, pair: str, values: Mapping[str, float], signals: Mapping[str, float | None], ratio: float | None
    ) -> Diagnosis:
        z = self._unusual(pair, signals)
        connected = values[f"{START}{pair}{END}"] > 0
        return diagnose_pair(
            PairEvidence(
                ratio=ratio,
                grads_exist=connected,
                upstream_exists=connected,
                z_seed=z["intensity"],
                z_host=z["host_intensity"],
                z_up=z["upstream"],
                z_gain=z["gain"],
                zero_frac=values.get(f"{START}{pair}/zero_frac", 0.0),
            )
        )

    def _unusual(self, pair: str, signals: Mapping[str, float | None]) -> dict[str, float | None]:
        """Robust z of every signal in its own history; minus infinity of an exact zero, None without a history."""
        history = self._histories.setdefault(pair, History(len(SIGNALS)))
        raw = np.array([math.nan if signals[name] is None else signals[name] for name in SIGNALS], dtype=np.float64)
        found = np.asarray(robust_z(decades(raw), history.values, keys=SIGNALS).robust_z)
        found = np.where((raw == 0) & (history.count >= N_MIN), -np.inf, found)
        history.push(decades(raw))
        return {name: None if math.isnan(z) else z for name, z in zip(SIGNALS, found.tolist(), strict=True)}


def _signals(pair: str, values: Mapping[str, float]) -> dict[str, float | None]:
    found = {name: values.get(f"{START}{pair}/{name}") for name in SIGNALS[:3]}
    return {**found, "gain": _ratio(found["intensity"], found["upstream"])}


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None
