"""How strongly one module learns next to another that feeds it, and why too little (G13)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from esper_telemetry.derived import Derived
from esper_telemetry.metric import Metric, label, reports

Cause = Literal["disconnected", "undefined", "ok", "dormant", "saturated", "host_fast", "indeterminate"]

LOW = 0.01
UNUSUAL = 2.0  # robust standard deviations
SATURATED_ZEROS = 0.9


@dataclass(frozen=True, slots=True)
class PairIntensity(Derived):
    """Gradient intensity of a module relative to its host."""

    pair: str = label()
    intensity_ratio: float | None = reports(
        Metric(
            key="grad/pair/{pair}/intensity_ratio",
            number=570,
            unit="ratio",
            question="How strongly does this module learn, per parameter, next to the network that hosts it?",
            low=0.0,
            healthy="0.05 to 0.2",
            warn="< 0.01",
            source="heuristic of the morphogenesis environment",
            undefined="either has no parameters or no gradient, or the host's gradient is zero",
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PairEvidence:
    """What tells why a module learns little.

    Attributes:
        ratio: intensity ratio of the pair.
        grads_exist: the module's parameters have gradients.
        upstream_exists: a gradient arrives at the module's output.
        z_seed, z_host: robust z of the two intensities in their own histories.
        z_up: of the gradient that arrives at the module's output.
        z_gain: of the module's gradient over the one that arrives.
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
class Diagnosis:
    """Why a module learns as it does.

    Attributes:
        cause: the first that fits.
        confidence: 0 to 1, how far the deciding z lies beyond its threshold; None where none decides.
    """

    cause: Cause
    confidence: float | None = None


def pair_intensity(
    pair: str, *, seed_norm: float | None, seed_params: int, host_norm: float | None, host_params: int
) -> PairIntensity:
    """Ratio of the two modules' gradient norms per square root of a parameter; independent of their sizes.

    Args:
        pair: name of the pair.
        seed_norm: gradient norm of the module; None without gradients.
        seed_params: entries of the module's gradient.
        host_norm: of the network that hosts it.
        host_params: likewise.
    """
    if seed_norm is None or not host_norm or not seed_params or not host_params:
        return PairIntensity(pair)
    return PairIntensity(pair, (seed_norm / math.sqrt(seed_params)) / (host_norm / math.sqrt(host_params)))


def diagnose_pair(evidence: PairEvidence, *, low: float = LOW) -> Diagnosis:
    """Why a module's intensity ratio is what it is; a ratio of `low` or more is fine."""
    if not (evidence.grads_exist and evidence.upstream_exists):
        return Diagnosis("disconnected")
    if evidence.ratio is None:
        return Diagnosis("undefined")
    if evidence.ratio >= low:
        return Diagnosis("ok")
    if evidence.z_seed is None:
        return Diagnosis("saturated" if evidence.zero_frac >= SATURATED_ZEROS else "indeterminate")
    return _by_history(evidence, evidence.z_seed)


def _by_history(evidence: PairEvidence, z_seed: float) -> Diagnosis:
    """The cause by what is unusual for this module."""
    z_up, z_gain, z_host = (0.0 if z is None else z for z in (evidence.z_up, evidence.z_gain, evidence.z_host))
    if z_up <= -UNUSUAL:
        return Diagnosis("dormant", _confidence(z_up))
    if z_gain <= -UNUSUAL:
        return Diagnosis("saturated", _confidence(z_gain))
    if z_seed > -UNUSUAL and z_host >= UNUSUAL:
        return Diagnosis("host_fast", _confidence(z_host))
    return Diagnosis("indeterminate")


def _confidence(z: float) -> float:
    if math.isinf(z):
        return 1.0
    return (abs(z) - UNUSUAL) / (1.0 + abs(z))
