"""Observations as they arrive: whether they change at all.

Running normalisers of observations and returns: whether they still describe the data.
"""

from __future__ import annotations

from dataclasses import dataclass

from esper_telemetry.core.group import MetricGroup
from esper_telemetry.core.lazy import Tensor, inference_mode, no_grad, torch
from esper_telemetry.core.metric import Metric, MetricFamily, label, reports, segment
from esper_telemetry.core.reduction import Last, Mean
from esper_telemetry.metrics.statistics import rows_of, sample

MOST_ENTRIES = 1024
"""Entries of an observation that are compared: of larger ones every k-th."""

FEW = 6
"""Steps that are looked at first: where all environments have changed by then, there is nothing more to look for."""


OBSERVATIONS_FAMILY = MetricFamily(
    "obs",
    "Observations",
    "Change in what the policy sees.",
    place=150,
    question="Does the policy see anything change?",
)
NORMALIZERS_FAMILY = MetricFamily(
    "norm",
    "Normalisers",
    "Running statistics that scale observations and returns, and whether they have settled.",
    place=200,
    question="Do the normalisers keep up?",
)


@dataclass(frozen=True, slots=True)
class ConstantObservations(MetricGroup):
    """Environments that gave the same observation all the time."""

    constant: Mean = reports(
        Metric.fraction("obs/constant_frac", 341, "share of environments that stand still")
        .asks("What share of the environments gave one and the same observation in every step of the rollout?")
        .bounds(
            healthy="0",
            warn="> 0 for several updates: an environment that hangs, or a sensor that is not wired",
            source="exact comparison",
        )
        .absent("the trainer does not show its observations")
    )


@no_grad
def constant_rows(observations: Tensor, *, valid: Tensor | None = None) -> Tensor:
    """Which environments gave one observation in all of their steps, [B] bool.

    Args:
        observations: [T, B, ...] of any type; of more than `MOST_ENTRIES` entries every k-th is compared.
        valid: [T, B] bool; None where every entry is. Steps beside one that does not count are not compared.

    An environment with fewer than two steps side by side that count has nothing to compare, and is not constant.
    """
    rows = observations.detach().flatten(2) if observations.dim() > 2 else observations.detach().unsqueeze(-1)
    rows = rows[..., :: -(-rows.shape[-1] // MOST_ENTRIES) or 1]
    if rows.is_cpu and _all_changed(rows[:FEW], None if valid is None else valid[:FEW]):
        return torch.zeros(rows.shape[1], dtype=torch.bool)
    if valid is None:
        return torch.full_like(rows[0, :, 0], len(rows) > 1, dtype=torch.bool) & ~_changed(rows, None)
    return (valid[1:].bool() & valid[:-1].bool()).any(0) & ~_changed(rows, valid)


def _all_changed(rows: Tensor, valid: Tensor | None) -> bool:
    """Whether `_changed` holds everywhere: of a few rows NumPy tells it in a third of the time."""
    if rows.dtype is torch.bfloat16:
        return bool(_changed(rows, valid).all())
    values = rows.numpy()
    changed = (values[1:] != values[:-1]).any(-1)
    if valid is not None:
        counted = valid.numpy().astype(bool, copy=False)
        changed &= counted[1:]
        changed &= counted[:-1]
    return bool(changed.any(0).all())


def _changed(rows: Tensor, valid: Tensor | None) -> Tensor:
    """Which environments have two steps side by side that count and differ, [B] bool, of [T, B, D]."""
    changed = (rows[1:] != rows[:-1]).any(-1)
    return (changed if valid is None else changed & valid[1:].bool() & valid[:-1].bool()).any(0)


@inference_mode
def constant_observations(constant: Tensor) -> ConstantObservations:
    """Share of the environments that are constant, [B] bool; see `constant_rows`."""
    return ConstantObservations(Mean(constant.sum().double(), float(constant.numel())))


@dataclass(frozen=True, slots=True)
class NormalizerDrift(MetricGroup):
    """How far a normaliser moved."""

    normalizer: str = label()
    drift: Last = reports(
        Metric.quantity("norm/{normalizer}/drift", 321, "drift of a normaliser", unit="σ or ln, the larger", low=0.0)
        .asks(
            "How far did the normaliser's mean or scale move over the last 10 updates? The networks see shifted inputs."
        )
        .bounds(healthy="< 0.1", warn="> 0.3", critical="> 1", source="heuristic")
        .absent("fewer than 10 updates, or no normaliser")
    )


@inference_mode
def normalizer_drift(
    normalizer: str, mean: Tensor, std: Tensor, previous_mean: Tensor, previous_std: Tensor
) -> NormalizerDrift:
    """max(RMS_d((μ - μ') / σ'), RMS_d(ln(σ / σ'))) over dimensions d.

    Args:
        normalizer: what it normalises, `obs` or `ret`.
        mean, std: [D] now.
        previous_mean, previous_std: [D] k updates ago.
    """
    before = previous_std.detach().double()
    shift = (mean.detach().double() - previous_mean.detach().double()) / before
    scale = (std.detach().double() / before).log()
    rms = torch.stack([shift, scale]).square().mean(-1).sqrt()
    return NormalizerDrift(segment(normalizer), Last(rms.amax()))


@no_grad
def cut_entries(normalized: Tensor, limit: float, *, valid: Tensor | None = None) -> tuple[Tensor, Tensor | int]:
    """How many entries stand at the limit at which they were cut, 0-d, and how many there are.

    Args:
        normalized: [T, B, ...], after they were cut.
        limit: magnitude at which they were.
        valid: [T, B] bool; None where every row is.
    """
    at_limit = normalized.abs() >= limit
    if valid is None:
        return at_limit.sum(), at_limit.numel()
    per_row = at_limit.flatten(valid.dim()) if at_limit.dim() > valid.dim() else at_limit.unsqueeze(-1)
    return (per_row & valid.unsqueeze(-1)).sum(), valid.sum() * per_row.shape[-1]


@dataclass(frozen=True, slots=True)
class NormalizerClipping(MetricGroup):
    """How much a normaliser cuts off."""

    normalizer: str = label()
    clipped: Mean = reports(
        Metric.fraction("norm/{normalizer}/clip_frac", 322, "share of entries that a normaliser cuts off")
        .asks("Which share of the normalised entries is cut off at the normaliser's limit?")
        .bounds(healthy="< 0.01", warn="> 0.05", source="heuristic")
        .absent("no valid entry")
        .advises("Look for outliers or a constant dimension; raise the limit of the normaliser, or warm it up.")
    )


@inference_mode
def normalizer_clipping(
    normalizer: str, normalized: Tensor, *, clip: float, valid: Tensor | None = None
) -> NormalizerClipping:
    """Share of entries beyond the limit, strictly.

    Args:
        normalizer: what it normalises, `obs` or `ret`.
        normalized: entries before they are cut, any shape.
        clip: the limit.
        valid: bool, same shape; None where every entry is.
    """
    s = sample(normalized, valid)
    return NormalizerClipping(segment(normalizer), s.share(rows_of(normalized, None).abs() > clip))
