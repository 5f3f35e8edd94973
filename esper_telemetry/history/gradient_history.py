"""Gradient norms of a record compared with earlier records.

Severities of explosion and vanishing by thresholds that follow the run (G10, G11), one number for the health of all gradients (G12), and
the gradient noise scale: the batch size at which noise and signal would be equal (G9; McCandlish 2018).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from esper_telemetry.core.metric import Array, Derived, Metric, label, reports
from esper_telemetry.core.record import Level
from esper_telemetry.history.deviations import FAST, Ema, HealthyHistory, decades, spread
from esper_telemetry.history.trend import CORRELATION_WINDOW, advantage_gradient


@dataclass(frozen=True, slots=True)
class NoiseScale(Derived, cost="sampled"):
    """The noise scale and whether noise drowns the gradient."""

    sources: ClassVar[tuple[str, ...]] = ("grad/gns/g2", "grad/gns/tr_sigma")
    b_simple: float | None = reports(
        Metric.magnitude("grad/gns/b_simple", 562, "gradient noise scale", unit="samples (sequences)")
        .asks("How large a batch would the gradient need for its noise to equal its signal?")
        .bounds(
            healthy="0.1 to 10 batch sizes",
            warn="> 10 batch sizes: noise; < 0.1: the batch could shrink",
            source="McCandlish 2018, 1812.06162",
        )
        .absent("the average estimate of the true gradient is not positive")
    )
    noise_dominated: float | None = reports(
        Metric.fraction("grad/gns/noise_dominated", 563, "gradient drowned in noise", unit="flag")
        .asks("Is this update's gradient indistinguishable from noise?")
        .bounds(source="McCandlish 2018, 1812.06162")
        .absent("the noise was not measured")
    )


class NoiseAverage:
    """Separate averages of signal and noise; their ratio is far less biased than an average of ratios.

    Negative single estimates are included, because dropping them would bias the signal upwards.
    """

    def __init__(self, beta: float = FAST) -> None:
        self._ema = Ema(2, beta)

    def step(self, g2: float | None, tr_sigma: float | None) -> NoiseScale:
        """Add the estimates of one update; None if they were not measured."""
        if g2 is None or tr_sigma is None or not math.isfinite(g2 + tr_sigma):
            return NoiseScale()
        self._ema.step(np.array([g2, tr_sigma]))
        signal, noise = self._ema.mean.tolist()
        return NoiseScale(noise / signal if signal > 0 else None, float(g2 <= 0))


DECADES_EXPLODE = 2.0
DECADES_VANISH = 4.0
SPREADS = 6.0
CLAMP_EXPLODE = (2.0, 200.0)  # clip limits, so that a slow rise cannot become normal
CLAMP_VANISH = (1e-8, 1e-2)
EXPLODE_AT_START = 10.0  # times the clip limit, while the history is short
VANISH_AT_START = 1e-7
HEALTHY_BELOW = 0.5  # only updates below this severity enter the history


@dataclass(frozen=True, slots=True)
class GroupSeverity(Derived, absent="the gradient of the group is missing"):
    """Severities and their thresholds per group, [groups] each; NaN where undefined."""

    sources: ClassVar[tuple[str, ...]] = (
        "grad/{group}/norm_preclip",
        "grad/{group}/norm_preclip_max",
        "grad/{group}/norm_preclip_nonfinite",
    )
    group: tuple[str, ...] = label()
    severity_explode: Array | None = reports(
        Metric.severity("grad/{group}/severity_explode", 514, "exploding gradients of a group")
        .asks("Does this part of the network have exploding gradients? 0 no, 1 a hundred times the threshold.")
        .bounds(healthy="0", warn="> 0.25", critical=">= 0.75", source="ramp of two decades above the adaptive threshold")
    )
    severity_vanish: Array | None = reports(
        Metric.severity("grad/{group}/severity_vanish", 515, "vanishing gradients of a group")
        .asks("Does this part of the network have vanishing gradients? 0 no, 1 exactly zero or nearly so.")
        .bounds(healthy="0", warn="> 0.25", critical=">= 0.75", source="ramp of four decades below the adaptive threshold")
    )
    threshold_explode: Array | None = reports(
        Metric.gradient_norm("grad/{group}/threshold_explode", 516, "norm from which a group explodes")
        .asks("Above which norm are this group's gradients considered to explode?")
        .bounds(source="median + 6 robust standard deviations of its log10 norms, 2 to 200 clip limits")
    )
    threshold_vanish: Array | None = reports(
        Metric.gradient_norm("grad/{group}/threshold_vanish", 517, "norm below which a group vanishes")
        .asks("Below which norm are this group's gradients considered to vanish?")
        .bounds(source="median - 6 robust standard deviations of its log10 norms, 1e-8 to 1e-2 clip limits")
    )


@dataclass(frozen=True, slots=True)
class LayerSeverity(Derived, absent="the tensor's gradient is missing", cost="debug", level=Level.DEBUG):
    """Severities per parameter tensor, [layers] each; NaN where undefined."""

    sources: ClassVar[tuple[str, ...]] = ("grad/layer/{layer}/norm",)
    layer: tuple[str, ...] = label()
    severity_explode: Array | None = reports(
        Metric.severity("grad/layer/{layer}/severity_explode", 524, "exploding gradients of a layer")
        .asks("Does this parameter tensor have exploding gradients? 0 no, 1 a hundred times its own threshold.")
        .bounds(healthy="0", warn="> 0.25", critical=">= 0.75", source="as grad/{group}/severity_explode, with a separate history")
        .advises(
            "Compare with its group's severity; look for dead units (`repr/dormant_frac`), saturated activations or outliers in its inputs."
        )
    )
    severity_vanish: Array | None = reports(
        Metric.severity("grad/layer/{layer}/severity_vanish", 525, "vanishing gradients of a layer")
        .asks("Does this parameter tensor have vanishing gradients? 0 no, 1 exactly zero or nearly so.")
        .bounds(healthy="0", warn="> 0.25", critical=">= 0.75", source="as grad/{group}/severity_vanish, with a separate history")
        .advises(
            "Compare with its group's severity; look for dead units (`repr/dormant_frac`), saturated activations or outliers in its inputs."
        )
    )


class SeverityThresholds(NamedTuple):
    """Norms above or below which gradients explode or vanish; median and scale of log10 norms, NaN with too few; [K] each."""

    explode: Array
    vanish: Array
    median: Array
    scale: Array


def explode_severity(norms: Array, threshold: Array | float) -> Array:
    """Return 0 up to the threshold, 1 from `DECADES_EXPLODE` above it and for non-finite norms; linear in log10 between."""
    norms = np.asarray(norms, dtype=np.float64)
    ramp = np.clip((_log10(norms) - np.log10(threshold)) / DECADES_EXPLODE, 0.0, 1.0)
    return np.where(np.isfinite(norms), ramp, 1.0)


def vanish_severity(norms: Array, threshold: Array | float) -> Array:
    """Return 0 down to the threshold and for non-finite norms, 1 from `DECADES_VANISH` below it; linear in log10 between."""
    norms = np.asarray(norms, dtype=np.float64)
    ramp = np.clip((np.log10(threshold) - _log10(norms)) / DECADES_VANISH, 0.0, 1.0)
    return np.where(np.isfinite(norms), ramp, 0.0)


def _log10(norms: Array) -> Array:
    """Return the logarithm of finite norms; -inf for zero, 0 for non-finite norms."""
    finite = np.where(np.isfinite(norms), norms, 1.0)
    return np.log10(finite, out=np.full_like(finite, -np.inf), where=finite > 0)


def adaptive_thresholds(history: Array, max_grad_norm: float) -> SeverityThresholds:
    """Return thresholds from the history of each group: its median ± 6 robust standard deviations, within absolute bounds.

    With fewer than 20 norms, they are 10 clip limits and 1e-7.

    Args:
        history: [K, W], log10 of norms, NaN for missing values.
        max_grad_norm: the clip limit, which sets the scale of the bounds.
    """
    median, scale = spread(history)
    explode = np.clip(10.0 ** (median + SPREADS * scale), CLAMP_EXPLODE[0] * max_grad_norm, CLAMP_EXPLODE[1] * max_grad_norm)
    vanish = np.clip(10.0 ** (median - SPREADS * scale), CLAMP_VANISH[0] * max_grad_norm, CLAMP_VANISH[1] * max_grad_norm)
    early = np.isnan(median)
    return SeverityThresholds(
        np.where(early, EXPLODE_AT_START * max_grad_norm, explode), np.where(early, VANISH_AT_START, vanish), median, scale
    )


class NormBaseline:
    """Usual gradient norms of K groups, with thresholds from healthy updates only, whose severity is below 0.5.

    Attributes:
        max_grad_norm: the clip limit.
    """

    def __init__(self, groups: tuple[str, ...], max_grad_norm: float) -> None:
        self.groups = groups
        self.max_grad_norm = max_grad_norm
        self._history = HealthyHistory(len(groups))

    def extend(self, groups: tuple[str, ...]) -> None:
        """Add groups without a history."""
        self.groups += groups
        self._history.extend(len(groups))

    def step(self, mean: Array, peak: Array) -> tuple[GroupSeverity, npt.NDArray[np.bool_]]:
        """Compare one update with the updates before it.

        Args:
            mean: [K] mean norm of each group over the update's steps; NaN without a gradient.
            peak: [K] its largest norm; infinite if a gradient was not finite.

        Returns:
            Severities and thresholds; and the groups, [K] bool, whose baseline restarts with this update.
        """
        thresholds = adaptive_thresholds(self._history.values, self.max_grad_norm)
        present = ~np.isnan(mean) | np.isinf(peak)
        explode = np.where(present, explode_severity(peak, thresholds.explode), np.nan)
        vanish = np.where(present, vanish_severity(mean, thresholds.vanish), np.nan)
        restarted = self._history.learn(decades(mean), present=present, healthy=np.fmax(explode, vanish) < HEALTHY_BELOW)
        limits = (np.where(present, limit, np.nan) for limit in (thresholds.explode, thresholds.vanish))
        return GroupSeverity(self.groups, explode, vanish, *limits), restarted


Cause = Literal["nonfinite", "vanish", "explode", "imbalance", "zero"]

FACTOR_WEIGHTS = (1.0, 1.0, 0.5, 0.5)  # vanish, explode, imbalance, zero: the last two are hints, not faults
IMBALANCE = (3.0, 6.0)  # decades between the largest and the smallest norm: from 0 to 1
IMBALANCE_FLOOR = 1e-12  # of the largest norm: exactly zero is not worse than nearly zero
ZEROS_FROM = 0.5


@dataclass(frozen=True, slots=True)
class GradientCondition(Derived):
    """Health of the gradients; None without gradients.

    Attributes:
        health: product of one factor per fault.
        nonfinite: whether any norm is not finite.
        vanish, explode, imbalance, zero: severities of the faults, 0 to 1.
        cause: the fault that reduces the health most; None without a fault.
    """

    sources: ClassVar[tuple[str, ...]] = ("grad/layer/{layer}/norm", "grad/zero_frac", "grad/global/norm_preclip_nonfinite")
    health: float | None = reports(
        Metric.fraction("grad/health", 518, "health of the gradients", level=Level.MINIMAL)
        .asks("Are the gradients fit to learn from? 1 is perfect, 0 broken; alarms name the cause.")
        .bounds(
            healthy="> 0.75",
            warn="< 0.5",
            critical="< 0.25",
            source="product of the severities of non-finite, vanishing, exploding, unbalanced and zero gradients",
        )
        .absent("no parameter has a gradient")
    )
    nonfinite: bool = False
    vanish: float = 0.0
    explode: float = 0.0
    imbalance: float = 0.0
    zero: float = 0.0
    cause: Cause | None = None


def gradient_condition(
    norms: Array,
    *,
    tau_vanish: Array | float,
    tau_explode: Array | float,
    zero_frac: float | None = None,
    layer_weights: Array | None = None,
) -> GradientCondition:
    """Return the health (1-F)(1-φ_V V)(1-φ_E E)(1-φ_I I)(1-φ_Z Z) of the gradients of L layers, φ as in `FACTOR_WEIGHTS`.

    Args:
        norms: [L], not finite if any entry is not.
        tau_vanish: norms below which a layer vanishes, [L] or one for all.
        tau_explode: norms above which a layer explodes.
        zero_frac: share of exactly zero entries; None if it was not measured.
        layer_weights: [L] weights of the layers in V, which sum to 1; equal by default.
    """
    norms = np.asarray(norms, dtype=np.float64)
    if norms.size == 0:
        return GradientCondition()
    if not np.isfinite(norms).all():
        return GradientCondition(health=0.0, nonfinite=True, cause="nonfinite")
    weights = np.full(norms.size, 1.0 / norms.size) if layer_weights is None else np.asarray(layer_weights)
    largest, imbalance = float(norms.max()), 0.0
    if largest > 0.0:
        smallest_norm = max(float(norms.min()), IMBALANCE_FLOOR * largest)
        imbalance = _ramp(math.log10(largest) - math.log10(smallest_norm), *IMBALANCE)
    severities = {
        "vanish": float(weights @ vanish_severity(norms, tau_vanish)),
        "explode": float(explode_severity(norms, tau_explode).max()),
        "imbalance": imbalance,
        "zero": _ramp(zero_frac or 0.0, ZEROS_FROM, 1.0),
    }
    factors = [1.0 - phi * min(severity, 1.0) for phi, severity in zip(FACTOR_WEIGHTS, severities.values(), strict=True)]
    names: tuple[Cause, ...] = ("vanish", "explode", "imbalance", "zero")
    smallest = min(factors)
    cause = names[factors.index(smallest)] if smallest < 1.0 else None  # the first of equal factors
    return GradientCondition(health=math.prod(factors), cause=cause, **severities)  # type: ignore[arg-type]  # four floats


def _ramp(x: float, start: float, end: float) -> float:
    return min(max((x - start) / (end - start), 0.0), 1.0)


LAYER = ("grad/layer/", "/norm")
"""Beginning and end of the keys of single layers' norms."""

DEFAULT_CLIP_LIMIT = 1.0
"""Scale of the thresholds if nothing is clipped."""


class GradientHistory:
    """Severity per group, health over layers, and correlation of the advantages' scale with the gradients.

    Args:
        groups: parameter groups, as the run declares them.
        max_grad_norm: the clip limit; None if nothing is clipped.

    Attributes:
        condition: health of the gradients in the last record, and what reduces it most.
        rebaselined: groups whose thresholds restart with the last record, because their norms were out of range for long.
    """

    def __init__(self, groups: Sequence[str], max_grad_norm: float | None) -> None:
        self.condition = GradientCondition()
        self.rebaselined: tuple[str, ...] = ()
        self._groups = tuple(groups)
        self._limit = max_grad_norm or DEFAULT_CLIP_LIMIT
        self._baseline = NormBaseline(self._groups, self._limit)
        self._layers = NormBaseline((), self._limit)
        self._noise = NoiseAverage()
        self._pairs: deque[tuple[float, float]] = deque(maxlen=CORRELATION_WINDOW)

    def derive(self, values: Mapping[str, float], level: Level) -> dict[str, float]:
        """Return the derived values of a record with these measured ones."""
        self._pairs.append((values.get("adv/raw/std", np.nan), values.get("grad/actor/norm_preclip", np.nan)))
        spread, norm = np.array(self._pairs).T
        return {
            **self._severity(values, level),
            **self._health(values, level),
            **self._noise.step(values.get("grad/gns/g2"), values.get("grad/gns/tr_sigma")).values(level),
            **advantage_gradient(spread, norm).values(level),
        }

    def _severity(self, values: Mapping[str, float], level: Level) -> dict[str, float]:
        if not self._groups:
            return {}
        keys = [f"grad/{group}/norm_preclip" for group in self._groups]
        means = np.array([values.get(key, np.nan) for key in keys])
        peaks = np.array([np.inf if f"{key}_nonfinite" in values else values.get(f"{key}_max", np.nan) for key in keys])
        severity, restarted = self._baseline.step(means, peaks)
        self.rebaselined = tuple(group for group, new in zip(self._groups, restarted.tolist(), strict=True) if new)
        return severity.values(level)

    def _health(self, values: Mapping[str, float], level: Level) -> dict[str, float]:
        """Return the health over the layers that have a gradient, each compared with its own history.

        A layer that is missing in an update keeps its history.
        """
        start, end = LAYER
        layer_norms = {key[len(start) : -len(end)]: value for key, value in values.items() if key.startswith(start) and key.endswith(end)}
        if tuple(layer_norms) != self._layers.groups:
            known = dict.fromkeys(self._layers.groups)
            self._layers.extend(tuple(name for name in layer_norms if name not in known))
        flawed = "grad/global/norm_preclip_nonfinite" in values
        if not layer_norms and not flawed:
            self.condition = GradientCondition()
            return {}
        norms = np.array([layer_norms.get(name, np.nan) for name in self._layers.groups])
        severity, _ = self._layers.step(norms, norms)
        present = ~np.isnan(norms)
        self.condition = gradient_condition(
            np.append(norms[present], np.inf) if flawed else norms[present],
            tau_vanish=np.asarray(severity.threshold_vanish)[present],
            tau_explode=np.asarray(severity.threshold_explode)[present],
            zero_frac=values.get("grad/zero_frac"),
        )
        layers = LayerSeverity(self._layers.groups, severity.severity_explode, severity.severity_vanish)
        return {**self.condition.values(level), **layers.values(level)}
