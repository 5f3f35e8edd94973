"""Modules compared with their hosts: the ratio of their gradient intensities, and the reason if it is low (G13)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from esper_telemetry.core.metric import Derived, Metric, label, reports
from esper_telemetry.core.record import Level
from esper_telemetry.history.deviations import N_MIN, RobustHistory, decades, robust_z

Cause = Literal["disconnected", "undefined", "ok", "dormant", "saturated", "host_fast", "indeterminate"]

LOW = 0.01
UNUSUAL = 2.0  # robust standard deviations
SATURATED_ZEROS = 0.9


@dataclass(frozen=True, slots=True)
class PairIntensity(Derived):
    """Gradient intensity of a module relative to its host."""

    sources: ClassVar[tuple[str, ...]] = (
        "grad/pair/{pair}/connected",
        "grad/pair/{pair}/intensity",
        "grad/pair/{pair}/host_intensity",
    )
    pair: str = label()
    intensity_ratio: float | None = reports(
        Metric.ratio("grad/pair/{pair}/intensity_ratio", 570, "intensity of a module next to its host")
        .asks("How strongly does this module learn, per parameter, compared with the network that hosts it?")
        .bounds(healthy="0.05 to 0.2", warn="< 0.01", source="heuristic of the morphogenesis environment")
        .absent("the parameters or the gradient of either are missing, or the host's gradient is zero")
        .advises("The journal names the cause (`evidence/pairs`): disconnected, dormant, saturated, or a fast host.")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PairEvidence:
    """Evidence for the reason why a module learns little.

    Attributes:
        ratio: intensity ratio of the pair.
        grads_exist: whether the module's parameters have gradients.
        upstream_exists: whether a gradient arrives at the module's output.
        z_seed, z_host: robust z of the two intensities in their own histories.
        z_up: robust z of the gradient that arrives at the module's output.
        z_gain: robust z of the module's gradient relative to the arriving one.
        zero_frac: share of exact zeros in the module's gradient.
    """

    ratio: float | None
    grads_exist: bool
    upstream_exists: bool
    z_seed: float | None
    z_host: float | None
    z_up: float | None
    z_gain: float | None
    zero_frac: float


@dataclass(frozen=True, slots=True)
class PairDiagnosis:
    """The reason why a module learns as it does.

    Attributes:
        cause: the first cause that fits.
        confidence: 0 to 1, how far the deciding z is beyond its threshold; None if no z decides.
    """

    cause: Cause
    confidence: float | None = None


def pair_intensity(
    pair: str, *, seed_norm: float | None, seed_params: int, host_norm: float | None, host_params: int
) -> PairIntensity:
    """Return the ratio of the two modules' gradient norms per square root of a parameter, which does not depend on their sizes.

    Args:
        pair: name of the pair.
        seed_norm: gradient norm of the module; None without gradients.
        seed_params: number of entries of the module's gradient.
        host_norm: gradient norm of the network that hosts it; None without gradients.
        host_params: number of entries of the host's gradient.
    """
    if seed_norm is None or not host_norm or not seed_params or not host_params:
        return PairIntensity(pair)
    return PairIntensity(pair, (seed_norm / math.sqrt(seed_params)) / (host_norm / math.sqrt(host_params)))


def diagnose_pair(evidence: PairEvidence, *, low: float = LOW) -> PairDiagnosis:
    """Return the reason for a module's intensity ratio; a ratio of at least `low` is fine."""
    if not (evidence.grads_exist and evidence.upstream_exists):
        return PairDiagnosis("disconnected")
    if evidence.ratio is None:
        return PairDiagnosis("undefined")
    if evidence.ratio >= low:
        return PairDiagnosis("ok")
    if evidence.z_seed is None:
        return PairDiagnosis("saturated" if evidence.zero_frac >= SATURATED_ZEROS else "indeterminate")
    return _by_history(evidence, evidence.z_seed)


def _by_history(evidence: PairEvidence, z_seed: float) -> PairDiagnosis:
    """Return the cause by what is unusual for this module."""
    z_up, z_gain, z_host = (0.0 if z is None else z for z in (evidence.z_up, evidence.z_gain, evidence.z_host))
    if z_up <= -UNUSUAL:
        return PairDiagnosis("dormant", _confidence(z_up))
    if z_gain <= -UNUSUAL:
        return PairDiagnosis("saturated", _confidence(z_gain))
    if z_seed > -UNUSUAL and z_host >= UNUSUAL:
        return PairDiagnosis("host_fast", _confidence(z_host))
    return PairDiagnosis("indeterminate")


def _confidence(z: float) -> float:
    if math.isinf(z):
        return 1.0
    return (abs(z) - UNUSUAL) / (1.0 + abs(z))


START, END = "grad/pair/", "/connected"
SIGNALS = ("intensity", "host_intensity", "upstream", "gain")


class PairHistories:
    """The history of every watched pair; it needs every record in order.

    Attributes:
        diagnoses: why each pair learns as it does, by name, in the last record.
    """

    def __init__(self) -> None:
        self.diagnoses: dict[str, PairDiagnosis] = {}
        self._histories: dict[str, RobustHistory] = {}

    def derive(self, values: Mapping[str, float], level: Level) -> dict[str, float]:
        """Return the intensity ratios of a record with these measured values."""
        pairs = [key[len(START) : -len(END)] for key in values if key.startswith(START) and key.endswith(END)]
        self.diagnoses = {}
        derived: dict[str, float] = {}
        for pair in pairs:
            signals = {name: values.get(f"{START}{pair}/{name}") for name in SIGNALS[:3]}
            signals["gain"] = _ratio(signals["intensity"], signals["upstream"])
            ratio = _ratio(signals["intensity"], signals["host_intensity"])
            self.diagnoses[pair] = self._diagnose(pair, values, signals, ratio)
            derived.update(PairIntensity(pair, ratio).values(level))
        return derived

    def _diagnose(
        self, pair: str, values: Mapping[str, float], signals: Mapping[str, float | None], ratio: float | None
    ) -> PairDiagnosis:
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
        """Return the robust z of every signal in its own history; minus infinity for an exact zero, None without a history."""
        history = self._histories.setdefault(pair, RobustHistory(len(SIGNALS)))
        raw = np.array([math.nan if signals[name] is None else signals[name] for name in SIGNALS], dtype=np.float64)
        scores = np.asarray(robust_z(decades(raw), history.values, keys=SIGNALS).robust_z)
        scores = np.where((raw == 0) & (history.count >= N_MIN), -np.inf, scores)
        history.push(decades(raw))
        return {name: None if math.isnan(z) else z for name, z in zip(SIGNALS, scores.tolist(), strict=True)}


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None
