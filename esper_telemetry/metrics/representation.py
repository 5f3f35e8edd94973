"""Representation: dormant and dead units, features and their rank, and the ability to learn something new.

Dormant units hardly respond, dead ones always respond the same. The number of dimensions that the features use has four definitions,
which must not be mixed. The ability to learn is measured as how well a copy of the network fits random targets (Lyle 2022). Clipping
stops the gradient of samples beyond the trust region, but the steps for other samples still move them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from esper_telemetry.core.group import MetricGroup
from esper_telemetry.core.lazy import Tensor, inference_mode, torch
from esper_telemetry.core.metric import Metric, MetricFamily, label, reports, segment
from esper_telemetry.core.record import Level
from esper_telemetry.core.reduction import Last, Mean
from esper_telemetry.metrics.ratio import EXP_LIMIT
from esper_telemetry.metrics.statistics import Sample, ascending, defined_together, deviations, keep, quantiles, same_shape, sample

DORMANT = 0.025
"""Maximum response of a dormant unit, relative to its layer's mean (Sokar 2023; 0.1 in their looser setting)."""
SPREAD = 0.001
"""Standard deviation below which a saturated unit is dead (code of Moalla 2024)."""

SOKAR = "Sokar 2023, 2302.12902"


REPRESENTATION_FAMILY = MetricFamily(
    "repr",
    "Representation",
    "Ability of the heads' input features to distinguish states. Growing norms, then falling rank, then "
    "dormant units precede many collapses of the policy (Moalla 2024).",
    place=160,
    question="Can the network still learn?",
    first=("repr/dormant_frac", "repr/effective_rank"),
)


@dataclass(frozen=True, slots=True)
class UnitActivity(MetricGroup, cost="sampled"):
    """Inactive units of all layers together."""

    dormant: Mean = reports(
        Metric.fraction("repr/dormant_frac", 751, "dormant units")
        .asks("What share of the units hardly responds to anything any more?")
        .bounds(healthy="< 0.15", warn="> 0.35", critical="> 0.75", source=SOKAR)
        .absent("no valid row, or activations were not sampled")
    )
    dead: Mean | None = reports(
        Metric.fraction("repr/dead_frac", 753, "dead units")
        .asks("What share of the units is dead: a ReLU that is always off, a tanh that is always saturated?")
        .bounds(healthy="< 0.1", warn="> 0.3", critical="> 0.7", source="Moalla 2024, 2405.00662")
        .absent("no valid row, or activations were not sampled, or the nonlinearity is unknown")
    )


@dataclass(frozen=True, slots=True)
class LayerActivity(MetricGroup):
    """Inactive units of every layer."""

    layer: tuple[str, ...] = label()
    dormant: Mean = reports(
        Metric.fraction("repr/dormant_frac/{layer}", 752, "dormant units of a layer", cost="sampled")
        .asks("What share of this layer's units hardly responds to anything any more?")
        .bounds(healthy="< 0.15", warn="> 0.35", critical="> 0.75", source=SOKAR)
        .absent("no valid row, or activations were not sampled")
    )


class ActivityGroups(NamedTuple):
    """The groups of one forward pass."""

    all: UnitActivity
    layers: LayerActivity


@inference_mode
def unit_activity(
    activations: Mapping[str, Tensor],
    *,
    activation: Literal["relu", "tanh"] | None = None,
    threshold: float = DORMANT,
    valid: Tensor | None = None,
) -> ActivityGroups:
    """Return the shares of dormant units per layer and overall, and of dead ones.

    Args:
        activations: per layer [N, D], after its nonlinearity; some hundred rows.
        activation: the nonlinearity; None if it is another one or unknown, and dead units are then not counted.
        threshold: score up to which a unit is dormant.
        valid: [N] bool; None if every row is valid.
    """
    allowed = None if valid is None else valid.bool()
    units = [keep(x.detach().double().t(), allowed) for x in activations.values()]
    seen = [s.count > 0 for s in units]  # by any row
    numbers = torch.stack([present.sum() for present in seen])
    dormant = torch.stack([((dormant_scores(s) <= threshold) & present).sum() for s, present in zip(units, seen, strict=True)])
    layers = LayerActivity(tuple(map(segment, activations)), Mean(dormant, numbers))
    dead = None
    if activation is not None:
        counts = [(_dead(s, activation) & present).sum() for s, present in zip(units, seen, strict=True)]
        dead = Mean(torch.stack(counts).sum(), numbers.sum())
    return ActivityGroups(UnitActivity(Mean(dormant.sum(), numbers.sum()), dead), layers)


def dormant_scores(units: Sample) -> Tensor:
    """Return the mean |response| of each unit [D], relative to its layer's; 0 in a layer without any response.

    Args:
        units: responses [D, N].
    """
    mean = units.values.abs().sum(-1) / units.count
    return torch.nan_to_num(mean / mean.mean(), 0.0)


def _dead(units: Sample, activation: str) -> Tensor:
    if activation == "relu":
        return (units.values == 0).all(-1)
    _, d = deviations(units)
    squares: Tensor = torch.linalg.vecdot(d, d)
    return squares < SPREAD**2 * units.count


STEPS = 20
LEARNING_RATE = 1e-3
SEED = 0


@dataclass(frozen=True, slots=True)
class CapacityLoss(MetricGroup):
    """Remaining error after some steps towards random targets, relative to the initial error."""

    loss: Last = reports(
        Metric.magnitude("repr/capacity_loss", 763, "capacity loss", unit="loss", level=Level.DEBUG, cost="debug")
        .asks(
            "How badly does the network fit random targets after a few steps? The error grows as the network loses its "
            "ability to learn; 1 means that nothing was learned."
        )
        .bounds(source="20 steps of Adam on a copy; Lyle 2022, 2204.09560")
        .absent("the network was not copied, or its features are not finite")
    )


def capacity_loss(
    network: Callable[[Tensor], Tensor],
    parameters: Sequence[Tensor],
    inputs: Tensor,
    *,
    steps: int = STEPS,
    learning_rate: float = LEARNING_RATE,
) -> CapacityLoss:
    """Return the mean squared error, in units of the targets' variance, after some steps towards random targets.

    Args:
        network: inputs [n, ...] to features [n, F]; a copy, because it is trained. On a GPU its recurrent layers are in training mode.
        parameters: parameters of the copy.
        inputs: [n, ...].
        steps: steps of Adam on all inputs at once.
        learning_rate: learning rate of these steps.
    """
    with torch.enable_grad():
        generator = torch.Generator().manual_seed(SEED)
        targets = torch.randn(len(inputs), 1, generator=generator).to(inputs.device)
        targets = targets - targets.mean()
        width = network(inputs).shape[-1]
        # weights so small that the first estimates are near 0
        readout = (torch.randn(width, 1, generator=generator).to(inputs.device) / (10 * width)).requires_grad_()
        optimizer = torch.optim.Adam([*parameters, readout], lr=learning_rate)
        for _ in range(steps):
            optimizer.zero_grad()
            _error(network(inputs), readout, targets).backward()
            optimizer.step()
        left = _error(network(inputs), readout, targets).detach()
    return CapacityLoss(Last(left / targets.square().mean()))


def _error(features: Tensor, readout: Tensor, targets: Tensor) -> Tensor:
    return (features @ readout - targets).square().mean()


MOALLA = "Moalla 2024, 2405.00662"


@dataclass(frozen=True, slots=True)
class ExcessRatio(MetricGroup):
    """Distance from the clip range of the ratios outside it."""

    high: Mean = reports(
        Metric.ratio("repr/excess_ratio/high", 761, "ratios beyond the clip range, upwards")
        .asks("How far above the clip range are the ratios that left it? Large: clipping no longer holds the policy.")
        .bounds(healthy="< 0.1", warn="> 0.3", critical="> 1", source=MOALLA)
        .absent("no ratio above the clip range")
        .advises("Clipping no longer holds the policy: use fewer epochs, a lower learning rate, or target_kl; see `repr/effective_rank`.")
    )
    low: Mean = reports(
        Metric.ratio("repr/excess_ratio/low", 762, "ratios beyond the clip range, downwards", high=1.0)
        .asks("How far below the clip range are the ratios that left it?")
        .bounds(healthy="< 0.1", warn="> 0.3", source=MOALLA)
        .absent("no ratio below the clip range")
        .advises("Clipping no longer holds the policy: use fewer epochs, a lower learning rate, or target_kl; see `repr/effective_rank`.")
    )


@inference_mode
def excess_ratio(log_ratio: Tensor, *, clip: float, valid: Tensor | None = None, dim: int | None = None) -> ExcessRatio:
    """Return the mean of r - 1 - ε over r > 1 + ε, and of 1 - ε - r over r < 1 - ε.

    Args:
        log_ratio: [N] or [M, N], log-probability now minus at collection.
        clip: ε.
        valid: bool, same shape; None if every entry is valid.
        dim: axis to reduce; None reduces all axes to one row, -1 keeps the leading axis as optimizer steps.
    """
    s = sample(log_ratio, valid, dim=dim)
    e = s.values.clamp(-EXP_LIMIT, EXP_LIMIT).expm1()
    return ExcessRatio(_above(e, clip), _above(-e, clip))


def _above(x: Tensor, clip: float) -> Mean:
    return Mean((x - clip).clamp(min=0).sum(-1), (x > clip).sum(-1))


@dataclass(frozen=True, slots=True)
class FeatureNorm(MetricGroup):
    """Length of the features."""

    norm: Mean = reports(
        Metric.magnitude("repr/feature_norm", 758, "feature norm", unit="feature norm", cost="sampled")
        .asks("How long are the features before the last nonlinearity? The norm grows, then the rank falls, then the policy collapses.")
        .bounds(warn="twice its baseline", critical="five times its baseline", source="Moalla 2024, 2405.00662")
        .absent("no valid row, or features were not sampled")
    )


@inference_mode
def feature_norm(preactivations: Tensor, *, valid: Tensor | None = None) -> FeatureNorm:
    """Return the mean Euclidean length of rows [N, D] before the last nonlinearity; `valid` [N] bool, None if every row is valid."""
    s = sample(torch.linalg.vector_norm(preactivations.detach().double(), dim=-1), valid)
    return FeatureNorm(s.mean(s.values))


@dataclass(frozen=True, slots=True)
class FeatureDrift(MetricGroup):
    """Rotation of the features in an update."""

    cosine: Mean = reports(
        Metric.cosine("repr/drift_cos", 759, "drift of the features", cost="sampled")
        .asks("Do the features of a state still point in the same direction as before the update? Otherwise the trunk moves away.")
        .bounds(healthy="> 0.95", critical="< 0.8", source="heuristic")
        .absent("only features of zero, or they were not sampled")
        .advises("The trunk moves under the heads: lower the learning rate or the number of epochs.")
    )


@inference_mode
def feature_drift(old: Tensor, new: Tensor) -> FeatureDrift:
    """Return the mean cosine between features [N, D] of the same states before and after.

    Rows of zeros do not count, because their direction is undefined.
    """
    same_shape(old=old, new=new)
    before, after = old.detach().double(), new.detach().double()
    norm = torch.linalg.vector_norm
    s = sample(torch.linalg.vecdot(before, after) / norm(before, dim=-1) / norm(after, dim=-1))
    return FeatureDrift(s.mean(s.values))


SMALL = 0.01
"""Singular values divided by √N up to this do not count (Lyle 2022)."""
VARIANCE = 0.99
"""Share of the squared singular values that `pca99` covers."""


@dataclass(frozen=True, slots=True)
class FeatureRank(
    MetricGroup, absent="fewer valid rows than features, features that are not finite, or they were not sampled", cost="sampled"
):
    """Ranks of the features that the heads read."""

    effective_rank: Mean | None = reports(
        Metric.quantity("repr/effective_rank", 754, "effective rank", unit="dimensions", low=1.0)
        .asks("How many dimensions do the features effectively use? A collapse precedes the policy's collapse.")
        .bounds(
            healthy="rising, then level",
            critical="below half of the run's median",
            source="e to the entropy of σ / Σσ: Roy & Vetterli 2007; Moalla 2024, 2405.00662",
        )
    )
    srank: Mean | None = reports(
        Metric.quantity("repr/srank", 755, "stable rank", unit="dimensions", low=1.0)
        .asks("How many singular values make up 99 % of their sum?")
        .bounds(source="Kumar 2021, 2010.14498")
    )
    pca99: Mean | None = reports(
        Metric.quantity("repr/pca99", 756, "directions with 99 % of the length", unit="dimensions", low=1.0)
        .asks("How many directions carry 99 % of the features' squared length?")
        .bounds(source="Moalla 2024, 2405.00662")
    )
    feature_rank: Mean | None = reports(
        Metric.magnitude("repr/feature_rank", 757, "feature rank", unit="dimensions")
        .asks("How many directions of the features are longer than 0.01 for a typical state?")
        .bounds(source="Lyle 2022, 2204.09560")
    )


@inference_mode
def feature_rank(features: Tensor, *, delta: float = 0.01, valid: Tensor | None = None) -> FeatureRank:
    """Return ranks from the singular values of the features, which are not centred.

    It takes one decomposition of [N, D]; rows that are not valid are zero and do not change the singular values.

    Args:
        features: [N, D], as the heads read them; at least D rows.
        delta: share of the sum of singular values that `srank` leaves out.
        valid: [N] bool; None if every row is valid.
    """
    rows, width = features.shape
    if rows < width:
        return FeatureRank()
    s = keep(features.detach().double().t(), None if valid is None else valid.bool())
    try:
        sigma: Tensor = torch.linalg.svdvals(s.values)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # it did not converge; torch's stubs lack the class
        return FeatureRank()
    used = (s.count.amin() >= width) & (s.nonfinite.sum() == 0)
    effective = torch.special.entr(sigma / sigma.sum()).sum().exp()
    longer = (sigma / s.count.amax().sqrt() > SMALL).sum().double()
    ranks = (effective, _covering(sigma, 1 - delta), _covering(sigma**2, VARIANCE), longer)
    return FeatureRank(*defined_together(*(torch.where(used, rank, torch.nan) for rank in ranks)))


def _covering(parts: Tensor, share: float) -> Tensor:
    """Return how many of the descending `parts` make up that share of their sum; NaN if the sum is zero."""
    covered = parts.cumsum(0) / parts.sum()
    return (covered < share).sum() + 1 + 0 * covered[-1]


LEVELS = (0.05, 0.5, 0.95)


@dataclass(frozen=True, slots=True)
class LayerResponses(MetricGroup, absent="no finite response, or they were not sampled", cost="debug", level=Level.DEBUG):
    """Quantiles of all responses of a layer."""

    layer: tuple[str, ...] = label()
    low: Last | None = reports(
        Metric.quantity("repr/response/{layer}/p05", 764, "5 % quantile of a layer's responses", unit="response").asks(
            "How low do this layer's responses go? Near -1 after a tanh: its units are saturated."
        )
    )
    median: Last | None = reports(
        Metric.quantity("repr/response/{layer}/p50", 765, "median of a layer's responses", unit="response").asks(
            "What is the median of this layer's responses? Exactly 0 after a ReLU: half of them are silent."
        )
    )
    high: Last | None = reports(
        Metric.quantity("repr/response/{layer}/p95", 766, "95 % quantile of a layer's responses", unit="response").asks(
            "How high do this layer's responses go? Exactly 0 after a ReLU: the layer is all but dead."
        )
    )


@inference_mode
def layer_responses(activations: Mapping[str, Tensor]) -> LayerResponses:
    """Return the 5 %, 50 % and 95 % quantiles of the finite responses of each layer [N, D], after its nonlinearity."""
    if not activations:
        return LayerResponses(())
    samples = [sample(x) for x in activations.values()]
    responses = torch.stack([quantiles(ascending(s), s.count, LEVELS) for s in samples], -1)
    low, median, high = responses.unsqueeze(1).unbind()
    return LayerResponses(tuple(map(segment, activations)), Last(low), Last(median), Last(high))
