"""Data of a rollout: observations, rewards, returns, and the running normalisers of observations and returns.

Observations are examined in a window of the rollout: its first steps, and only every k-th entry of long observations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from esper_telemetry.core.arrays import ArrayLike, as_mask, as_tensor
from esper_telemetry.core.group import MetricGroup
from esper_telemetry.core.lazy import Tensor, inference_mode, no_grad, torch
from esper_telemetry.core.metric import Metric, MetricFamily, label, reports, segment
from esper_telemetry.core.record import Level
from esper_telemetry.core.reduction import Counts, Last, Max, Mean, Min, Moments, Sum
from esper_telemetry.core.requirements import checked_arguments
from esper_telemetry.metrics.statistics import (
    REWARDS,
    Quantiles,
    as_quantiles,
    ascending,
    defined,
    histogram,
    levels_for,
    moments,
    quantiles,
    rows_of,
    same_shape,
    sample,
    spread,
    where_any,
)

MAX_COMPARED_ENTRIES = 1024
"""Maximum number of entries of an observation that are compared; of larger ones every k-th."""


FIRST_STEPS = 6
"""Steps that are examined first; if all environments have changed by then, the search ends."""


CONSTANT = 1e-12
"""Share of the variance in the mean square below which rewards are all equal, but for rounding."""

OBSERVATIONS_FAMILY = MetricFamily(
    "obs", "Observations", "Change in what the policy sees.", place=150, question="Does the policy see anything change?"
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
    """Environments that returned the same observation all the time."""

    constant: Mean = reports(
        Metric.fraction("obs/constant_frac", 341, "share of environments with constant observations")
        .asks("What share of the environments returned the same observation in every step of the rollout?")
        .bounds(
            healthy="0",
            warn="> 0 for several updates: an environment that hangs, or a sensor that is not connected",
            source="exact comparison",
        )
        .absent("the trainer does not show its observations")
    )


@no_grad
def constant_rows(observations: Tensor, *, valid: Tensor | None = None) -> Tensor:
    """Return the mask [B] of environments that returned the same observation in all of their steps.

    An environment without two consecutive steps that count cannot be compared, and is not constant.

    Args:
        observations: [T, B, ...] of any type; of more than `MAX_COMPARED_ENTRIES` entries every k-th is compared.
        valid: [T, B] bool; None if every entry is valid. Neighbours of steps that do not count are not compared.
    """
    rows = observations.detach().flatten(2) if observations.dim() > 2 else observations.detach().unsqueeze(-1)
    rows = rows[..., :: -(-rows.shape[-1] // MAX_COMPARED_ENTRIES) or 1]
    if rows.is_cpu and _all_changed(rows[:FIRST_STEPS], None if valid is None else valid[:FIRST_STEPS]):
        return torch.zeros(rows.shape[1], dtype=torch.bool)
    if valid is None:
        return torch.full_like(rows[0, :, 0], len(rows) > 1, dtype=torch.bool) & ~_changed(rows, None)
    return (valid[1:].bool() & valid[:-1].bool()).any(0) & ~_changed(rows, valid)


def _all_changed(rows: Tensor, valid: Tensor | None) -> bool:
    """Return True if `_changed` holds everywhere; for a few rows NumPy takes a third of the time."""
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
    """Return the mask [B] of environments with two consecutive steps that count and differ, from [T, B, D]."""
    changed = (rows[1:] != rows[:-1]).any(-1)
    return (changed if valid is None else changed & valid[1:].bool() & valid[:-1].bool()).any(0)


@inference_mode
def constant_observations(constant: Tensor) -> ConstantObservations:
    """Return the share of the environments that are constant, [B] bool; see `constant_rows`."""
    return ConstantObservations(Mean(constant.sum().double(), float(constant.numel())))


@dataclass(frozen=True, slots=True)
class NormalizerDrift(MetricGroup):
    """Movement of a normaliser."""

    normalizer: str = label()
    drift: Last = reports(
        Metric.magnitude("norm/{normalizer}/drift", 321, "drift of a normaliser", unit="σ or ln, the larger")
        .asks("How far did the normaliser's mean or scale move over the last 10 updates? The networks see shifted inputs.")
        .bounds(healthy="< 0.1", warn="> 0.3", critical="> 1", source="heuristic")
        .absent("fewer than 10 updates, or no normaliser")
    )


@inference_mode
def normalizer_drift(normalizer: str, mean: Tensor, std: Tensor, previous_mean: Tensor, previous_std: Tensor) -> NormalizerDrift:
    """Return max(RMS_d((μ - μ') / σ'), RMS_d(ln(σ / σ'))) over dimensions d.

    Args:
        normalizer: name of the normaliser, `obs` or `ret`.
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
    """Return the number of entries at the limit to which they were clipped, 0-d, and the number of all entries.

    Args:
        normalized: [T, B, ...], after clipping.
        limit: magnitude of the limit.
        valid: [T, B] bool; None if every row is valid.
    """
    at_limit = normalized.abs() >= limit
    if valid is None:
        return at_limit.sum(), at_limit.numel()
    per_row = at_limit.flatten(valid.dim()) if at_limit.dim() > valid.dim() else at_limit.unsqueeze(-1)
    return (per_row & valid.unsqueeze(-1)).sum(), valid.sum() * per_row.shape[-1]


@dataclass(frozen=True, slots=True)
class NormalizerClipping(MetricGroup):
    """Share of entries that a normaliser clips."""

    normalizer: str = label()
    clipped: Mean = reports(
        Metric.fraction("norm/{normalizer}/clip_frac", 322, "share of entries that a normaliser cuts off")
        .asks("What share of the normalised entries is clipped at the normaliser's limit?")
        .bounds(healthy="< 0.01", warn="> 0.05", source="heuristic")
        .absent("no valid entry")
    )


@inference_mode
def normalizer_clipping(normalizer: str, normalized: Tensor, *, clip: float, valid: Tensor | None = None) -> NormalizerClipping:
    """Return the share of entries strictly beyond the limit.

    Args:
        normalizer: name of the normaliser, `obs` or `ret`.
        normalized: entries before clipping, any shape.
        clip: the limit.
        valid: bool, same shape; None if every entry is valid.
    """
    s = sample(normalized, valid)
    return NormalizerClipping(segment(normalizer), s.share(rows_of(normalized, None).abs() > clip))


RETURNS_FAMILY = MetricFamily(
    "ret",
    "Returns",
    "The targets of the critic: advantages plus values.",
    place=130,
    question="What must the critic predict?",
    first=("ret/mean", "ret/std"),
)


REWARDS_FAMILY = MetricFamily(
    "reward",
    "Rewards",
    "Rewards per step from the environment, before any normaliser.",
    place=140,
    question="What does the environment reward?",
    axis="axis/env_step",
    first=("reward/mean", "reward/std"),
)


@dataclass(frozen=True, slots=True)
class RewardStats(MetricGroup, absent="no valid, finite reward"):
    """Rewards of a rollout before any normaliser."""

    moments: Moments = reports(
        Metric.quantity("reward/mean", 311, "mean of rewards", unit="reward").asks("How much reward does a step bring on average?"),
        Metric.std("reward/std", 312, "standard deviation of rewards", unit="reward")
        .asks("Do rewards vary? Exactly 0 for long means that the reward is not connected, or clipped away.")
        .bounds(healthy="> 0", critical="exactly 0 over 10 updates", source="heuristic"),
    )
    absmax: Max = reports(
        Metric.magnitude("reward/absmax", 313, "largest magnitude of rewards", unit="reward").asks(
            "What is the largest single reward or penalty? A jump points at the environment."
        )
    )
    zero: Mean = reports(
        Metric.fraction("reward/zero_frac", 314, "share of steps without reward").asks(
            "What share of the steps brings no reward? Near 1: rewards are sparse."
        )
    )
    nonfinite: Sum = reports(
        Metric.count("reward/nonfinite", 315, "rewards that are not finite")
        .asks("How many rewards were NaN or infinite?")
        .bounds(healthy="0", critical="> 0", source="always an error of the environment")
        .advises("Fix the environment or its wrappers: a reward has to be a number.")
        .absent("")
    )
    trained: Mean | None = reports(
        Metric.correlation(
            "reward/trained_correlation", 316, "correlation of the rewards in training and of the environment", unit="correlation"
        )
        .asks("Does training get the environment's rewards? Below 1 if wrappers add others, 0 if all those in training are equal.")
        .absent("the same rewards, or rewards of the environment that do not vary")
    )


@checked_arguments()
@inference_mode
def reward_stats(rewards: ArrayLike, *, trained: ArrayLike | None = None, valid: ArrayLike | None = None) -> RewardStats:
    """Return mean, spread and largest magnitude of the raw rewards; zeros are counted exactly.

    Args:
        rewards: [T, B] or [N].
        trained: same shape, what training gets for them; None if it gets `rewards`.
        valid: bool, same shape; None if every entry is valid.
    """
    rewards = as_tensor(rewards)
    s = sample(rewards, as_mask(valid, rewards))
    zero = s.mask & (s.values == 0)
    correlation = None
    if trained is not None:
        other = sample(as_tensor(trained).to(rewards), as_mask(valid, rewards))
        one, two = ((x.values - (x.values * s.weight).sum() / s.count) * s.weight * other.weight for x in (s, other))
        products = (one * two).sum(), one.square().sum(), two.square().sum()
        varies = [own > CONSTANT * (x.values.square() * s.weight).sum() for own, x in zip(products[1:], (s, other), strict=True)]
        # rewards in training that are all equal say nothing of rewards that vary
        correlation = defined(torch.where(varies[1], products[0] / (products[1] * products[2]).sqrt(), 0.0) + 0.0 / varies[0])
    return RewardStats(
        trained=correlation,
        moments=spread(s),
        absmax=Max(where_any(s.values.abs().amax(-1), s.count)),
        zero=Mean(zero.sum(-1), s.count),
        nonfinite=Sum(s.nonfinite),
    )


@dataclass(frozen=True, slots=True)
class ReturnStats(MetricGroup, absent="no valid, finite return"):
    """Returns of a rollout, as the critic is trained on them."""

    moments: Moments = reports(
        Metric.quantity("ret/mean", 301, "mean of returns", unit="return", level=Level.MINIMAL).asks(
            "What return does the critic have to predict on average?"
        ),
        Metric.std("ret/std", 302, "standard deviation of returns", unit="return", level=Level.MINIMAL)
        .asks("How much do returns vary? A jump means that the scale of rewards changed.")
        .bounds(warn="robust z of log10 above 4", critical="robust z of log10 above 8", source="SB3#2240; cleanrl#441"),
        Metric.quantity("ret/skew", 303, "skewness of returns", unit="1", of="skew")
        .asks("Is one tail of the returns longer: a few very good (above 0) or very bad ones?")
        .absent("returns do not vary"),
    )
    smallest: Min = reports(Metric.quantity("ret/min", 304, "smallest of returns", unit="return").asks("What is the lowest return?"))
    largest: Max = reports(Metric.quantity("ret/max", 305, "largest of returns", unit="return").asks("What is the highest return?"))
    quantiles: Quantiles = reports(
        Metric.quantity("ret/p10", 306, "10 % quantile of returns", unit="return", of="p10").asks(
            "How low are the lowest 10 % of the returns?"
        ),
        Metric.quantity("ret/p50", 307, "median of returns", unit="return", of="p50").asks("What is the median return?"),
        Metric.quantity("ret/p90", 308, "90 % quantile of returns", unit="return", of="p90").asks(
            "How high are the highest 10 % of the returns?"
        ),
    )
    histogram: Counts = reports(
        Metric.quantity("ret/hist", 310, "histogram of returns", unit="return").asks("How are the returns distributed?")
    )
    nonfinite: Sum = reports(
        Metric.nonfinite("ret/mean_nonfinite", 309, "non-finite inputs of mean of returns").asks(
            "How many valid returns were NaN or infinite?"
        )
    )


@checked_arguments()
@inference_mode
def return_stats(returns: ArrayLike, *, valid: ArrayLike | None = None) -> ReturnStats:
    """Return population moments, extremes and quantiles of the returns.

    Args:
        returns: [T, B] or [N].
        valid: bool, same shape; None if every entry is valid.
    """
    returns = as_tensor(returns)
    s = sample(returns, as_mask(valid, returns))
    at_levels = quantiles(ascending(s), s.count, levels_for(returns))
    return ReturnStats(
        moments=moments(s),
        smallest=Min(at_levels[0]),
        largest=Max(at_levels[-1]),
        quantiles=as_quantiles(at_levels, s.count),
        histogram=histogram(s, REWARDS),
        nonfinite=Sum(s.nonfinite),
    )


MAX_WINDOW_ENTRIES = 1 << 15
"""Maximum number of entries of the window."""

MAX_VECTOR_ENTRIES = 512
"""Maximum number of entries of an observation with features; longer ones are images and the like, which networks scale themselves."""

FINGERPRINT_WEIGHTS = (0.618033988749895, 0.0137)
"""Step and offset of the angles whose sines weigh the entries of a fingerprint."""

LARGE_FEATURE = 10.0
"""Root mean square above which an entry's distance from 0 counts: a nearly constant height of 1.4 does not trouble a network."""

MIN_RELATIVE_STD = 1e-6
"""Standard deviation, relative to its size, above which an entry varies and does not only round."""


@no_grad
def observation_window(observations: Tensor) -> Tensor:
    """Return a copy [t, B, d] of the first steps of observations [T, B, ...]: at least two steps, and at most `MAX_WINDOW_ENTRIES`."""
    rows = observations.detach().flatten(2) if observations.dim() > 2 else observations.detach().unsqueeze(-1)
    rows = rows[..., :: -(-rows.shape[-1] // MAX_COMPARED_ENTRIES) or 1]
    return rows[: max(2, MAX_WINDOW_ENTRIES // max(1, rows[0].numel()))].clone()


@dataclass(frozen=True, slots=True)
class ObservationChange(MetricGroup):
    """Environments that repeat each other, and steps after which nothing has changed."""

    copies: Mean | None = reports(
        Metric.fraction("obs/identical_frac", 860, "share of environments that repeat another one")
        .asks("What share of the environments returned, step by step, the same observations as another one?")
        .bounds(
            healthy="0; more if episodes begin alike and rollouts are a few steps long",
            warn="1 for a hundred steps and more: environments are copies of each other",
            source="exact comparison",
        )
        .absent("the trainer does not show its observations, has one environment, or observations show nothing but the step of the episode")
    )
    still: Mean = reports(
        Metric.fraction("obs/still_frac", 861, "share of steps that change nothing")
        .asks("After what share of the steps within an episode was the observation the same as before?")
        .bounds(
            healthy="0; more if actions may be without effect",
            warn="1 for a hundred steps and more: the policy does not see what its actions do",
            source="exact comparison",
        )
        .absent("the trainer does not show its observations, or no two steps of one episode follow each other")
    )


@inference_mode
def observation_change(window: Tensor, ended: Tensor, *, valid: Tensor | None = None) -> ObservationChange:
    """Return the share of environments that repeat another one, and of steps within episodes that change nothing.

    Args:
        window: [t, B, d], see `observation_window`.
        ended: [T, B] bool, the step ended its episode.
        valid: [T, B] bool; None if every entry is valid.
    """
    window = window.to(ended.device, non_blocking=True)  # observations may still be on the host
    inside = ~ended[: len(window) - 1].bool()
    if valid is not None:
        inside &= valid[1 : len(window)].bool() & valid[: len(window) - 1].bool()
    still = (window[1:] == window[:-1]).all(-1) & inside
    copies = None
    if window.shape[1] > 1:
        ordered = _fingerprints(window.transpose(0, 1).flatten(1)).sort().values
        same = torch.nn.functional.pad(ordered[1:] == ordered[:-1], (1, 1))
        counts = ~_follow_time(_fingerprints(window), ended[: len(window)].bool())
        copies = Mean((same[1:] | same[:-1]).sum() * counts.double(), len(ordered) * counts.double())
    return ObservationChange(copies, Mean(still.sum().double(), inside.sum().double()))


def _fingerprints(entries: Tensor) -> Tensor:
    """Return a number for each row of entries [..., n]: equal rows have equal numbers."""
    step, offset = FINGERPRINT_WEIGHTS
    weights = (torch.arange(entries.shape[-1], device=entries.device, dtype=torch.float64) * step + offset).sin()
    return entries.double() @ weights


def _follow_time(rows: Tensor, ended: Tensor) -> Tensor:
    """Return whether observations [t, B] depend on nothing but the step of their episode; False if no environment shows two starts.

    Then the environments are alike by nature, whatever their actions.
    """
    place = torch.arange(len(rows), device=rows.device).unsqueeze(1)
    began = torch.nn.functional.pad(torch.where(ended, place + 1, -1)[:-1], (0, 0, 1, 0), value=-1).cummax(0).values
    known = began >= 0
    step = torch.where(known, place - began, len(rows)).flatten()  # the last place is of steps since an unknown start
    low, high = (
        rows.new_full((len(rows) + 1,), start).scatter_reduce(0, step, rows.flatten(), kind)[:-1]
        for start, kind in ((torch.inf, "amin"), (-torch.inf, "amax"))
    )
    starts = (known & (place == began)).sum(0)
    return (starts.amax() > 1) & (low >= high).all()


@dataclass(frozen=True, slots=True)
class ObservationScale(MetricGroup, absent="observations are whole numbers up to 255, images or hidden"):
    """Size of the features that the networks receive, after any normaliser. Only rank 0 reports, because sizes do not add up."""

    replicated = True

    largest: Max = reports(
        Metric.magnitude("obs/rms_max", 862, "size of the largest feature", unit="observation")
        .asks("How large is the largest entry of the observation, as a root mean square? About 1 is easy to learn from.")
        .bounds(
            healthy="0.1 to 10",
            warn="> 100: networks saturate; < 0.05: networks hardly react",
            source="37 details of PPO: observations are scaled",
        )
    )
    typical: Mean = reports(
        Metric.magnitude("obs/rms_median", 863, "size of the middle feature", unit="observation")
        .asks("How large is the median of the entries that vary, as a root mean square? About 1 after a normaliser.")
        .bounds(healthy="0.3 to 3 after a normaliser", warn="< 0.01 or > 5 there", source="heuristic")
    )
    ratio: Max = reports(
        Metric.ratio("obs/rms_ratio", 864, "largest over smallest feature")
        .asks("Among the entries that vary, how many times larger is the largest than the smallest?")
        .bounds(healthy="< 100", warn="> 1000: the small entries are lost", source="heuristic")
    )
    offset: Max = reports(
        Metric.magnitude("obs/offset", 865, "distance of a feature from 0", unit="σ of the feature")
        .asks(
            "Among entries larger than 10, what is the largest distance of a mean from 0, in standard deviations? 0 without such entries."
        )
        .bounds(healthy="< 10", warn="> 100 if the entry is large, too", source="heuristic")
    )


LARGEST_CODE = 255
"""Largest whole number of pixels and categories; larger ones are quantities."""


@checked_arguments()
@inference_mode
def observation_scale(observations: ArrayLike, *, valid: ArrayLike | None = None) -> ObservationScale:
    """Return sizes of the features of vectors; absent for whole numbers up to 255 (one-hot, pixels, categories) and long observations.

    Args:
        observations: as the networks receive them, [T, B, d] or [N, d].
        valid: [T, B] or [N] bool; None if every entry is valid.

    Raises:
        ValueError: shapes do not fit.
    """
    entries, counts = as_tensor(observations), as_mask(valid)
    if entries.dim() < 2:
        raise ValueError(f"observations must be [T, B, d] or [N, d], got {[*entries.shape]}")
    same_shape(observations=entries[..., :1].squeeze(-1), valid=counts)
    if not (entries.is_floating_point() and entries.numel() and entries.shape[-1] <= MAX_VECTOR_ENTRIES):
        return ObservationScale(Max(-math.inf), Mean(0.0, 0.0), Max(-math.inf), Max(-math.inf))
    rows = entries.flatten(0, -2).double()
    counted = torch.ones_like(rows[:, :1], dtype=torch.bool)
    if counts is not None:
        counted = counts.reshape(-1, 1)
    rows = torch.where(counted, rows, 0.0)
    count = counted.sum()
    mean = rows.sum(0) / count
    std = (torch.where(counted, rows - mean, 0.0).square().sum(0) / count).sqrt()
    rms = rows.square().sum(0).div(count).sqrt()
    varies = (std > MIN_RELATIVE_STD * rms) & rms.isfinite()
    is_code = (rows == rows.round()).all() & (rows.abs().amax() <= LARGEST_CODE)
    present = varies.any() & ~is_code
    varying = torch.where(varies, rms, math.nan)
    far = torch.where(varies & (rms > LARGE_FEATURE), mean.abs() / std, 0.0).amax()
    largest = torch.where(varies, rms, -math.inf).amax()
    smallest = torch.where(varies, rms, math.inf).amin()
    absent = torch.full_like(largest, -math.inf)
    return ObservationScale(
        largest=Max(torch.where(present, largest, absent)),
        typical=Mean(torch.where(present, varying.nanmedian(), 0.0), present.double()),
        ratio=Max(torch.where(present, largest / smallest, absent)),
        offset=Max(torch.where(present, far, absent)),
    )


def observation_measurements(
    observations: Tensor | None, window: Tensor | None, *, ended: Tensor, valid: Tensor | None
) -> Iterator[Callable[[], MetricGroup]]:
    """Yield the measurements of a rollout's observations [T, B, ...], or of a window of them if they are not available.

    `ended` and `valid` [T, B] are as in `observation_change`.
    """
    if window is None and observations is not None:
        window = observation_window(observations)
    if window is None:
        return
    yield partial(observation_scale, window, valid=None if valid is None else valid[: len(window)])
    if len(window) > 1:
        yield partial(observation_change, window, ended, valid=valid)
