"""What the policy sees, beyond single environments: copies of one environment, observations that stand still, and their scale.

The functions look at a window of a rollout: its first steps, and of long observations every k-th entry.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from esper_telemetry.core.group import MetricGroup
from esper_telemetry.core.lazy import Tensor, inference_mode, no_grad, torch
from esper_telemetry.core.metric import Metric, reports
from esper_telemetry.core.reduction import Max, Mean
from esper_telemetry.metrics.rollout import MAX_COMPARED_ENTRIES

MAX_WINDOW_ENTRIES = 1 << 15
"""Entries of the window that is looked at."""

MAX_VECTOR_ENTRIES = 512
"""Entries of an observation that has features; longer ones are images and the like, whose networks scale them."""

FINGERPRINT_WEIGHTS = (0.618033988749895, 0.0137)
"""Step and offset of the angles whose sines weigh the entries of a fingerprint."""

LARGE_FEATURE = 10.0
"""Root mean square from which on an entry's distance from 0 counts: a height of 1.4 that hardly varies is no trouble to a network."""

MIN_RELATIVE_STD = 1e-6
"""Standard deviation relative to its size from which on an entry varies, and does not only round."""


@no_grad
def observation_window(observations: Tensor) -> Tensor:
    """Return a copy [t, B, d] of the first steps of observations [T, B, ...], `MAX_WINDOW_ENTRIES` at most, but for two steps at least."""
    rows = observations.detach().flatten(2) if observations.dim() > 2 else observations.detach().unsqueeze(-1)
    rows = rows[..., :: -(-rows.shape[-1] // MAX_COMPARED_ENTRIES) or 1]
    return rows[: max(2, MAX_WINDOW_ENTRIES // max(1, rows[0].numel()))].clone()


@dataclass(frozen=True, slots=True)
class ObservationChange(MetricGroup):
    """Environments that repeat each other, and steps after which nothing has changed."""

    copies: Mean | None = reports(
        Metric.fraction("obs/identical_frac", 860, "share of environments that repeat another one")
        .asks("What share of the environments gave, step by step, the same observations as another one?")
        .bounds(
            healthy="0; more where episodes begin alike and rollouts are a few steps long",
            warn="1 for a hundred steps and more: environments are copies of each other",
            source="exact comparison",
        )
        .absent("the trainer does not show its observations, or has one environment")
    )
    still: Mean = reports(
        Metric.fraction("obs/still_frac", 861, "share of steps that change nothing")
        .asks("After what share of the steps within an episode was the observation the same as before?")
        .bounds(
            healthy="0; more where actions may have no effect",
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
        valid: [T, B] bool; None where every entry is.
    """
    inside = ~ended[: len(window) - 1].bool()
    if valid is not None:
        inside &= valid[1 : len(window)].bool() & valid[: len(window) - 1].bool()
    still = (window[1:] == window[:-1]).all(-1) & inside
    copies = None
    if window.shape[1] > 1:
        entries = window.transpose(0, 1).flatten(1).double()
        step, offset = FINGERPRINT_WEIGHTS
        weights = (torch.arange(entries.shape[1], device=entries.device, dtype=torch.float64) * step + offset).sin()
        _, places, counts = (entries @ weights).unique(return_inverse=True, return_counts=True)
        copies = Mean((counts[places] > 1).sum().double(), float(len(entries)))
    return ObservationChange(copies, Mean(still.sum().double(), inside.sum().double()))


@dataclass(frozen=True, slots=True)
class ObservationScale(MetricGroup):
    """Size of the features that the networks receive, after any normaliser. Rank 0 reports: the sizes of several ranks do not add up."""

    replicated = True

    largest: Max = reports(
        Metric.quantity("obs/rms_max", 862, "size of the largest feature", unit="observation", low=0.0)
        .asks(
            "How large is the largest entry of the observation, as a root mean square? About 1 is easy to learn from."
        )
        .bounds(
            healthy="0.1 to 10", warn="> 100: networks saturate", source="37 details of PPO: observations are scaled"
        )
        .absent("observations are whole numbers, images or hidden")
    )
    typical: Mean = reports(
        Metric.quantity("obs/rms_median", 863, "size of the middle feature", unit="observation", low=0.0)
        .asks(
            "How large is the middle one of the entries that vary, as a root mean square? About 1 behind a normaliser."
        )
        .bounds(healthy="0.3 to 3 behind a normaliser", warn="< 0.01 or > 5 there", source="heuristic")
        .absent("observations are whole numbers, images or hidden")
    )
    ratio: Max = reports(
        Metric.ratio("obs/rms_ratio", 864, "largest over smallest feature")
        .asks("How many times as large as the smallest entry is the largest one, of those that vary?")
        .bounds(healthy="< 100", warn="> 1000: the small ones go unseen", source="heuristic")
        .absent("observations are whole numbers, images or hidden")
    )
    offset: Max = reports(
        Metric.quantity("obs/offset", 865, "distance of a feature from 0", unit="σ of the feature", low=0.0)
        .asks(
            "How many of its standard deviations lies the mean of an entry from 0, of those larger than 10? 0 without such."
        )
        .bounds(healthy="< 10", warn="> 100 where the entry is large, too", source="heuristic")
        .absent("observations are whole numbers, images or hidden")
    )


@inference_mode
def observation_scale(window: Tensor, *, valid: Tensor | None = None) -> ObservationScale:
    """Return sizes of the features of vectors; absent for whole numbers (one-hot, pixels, categories) and long observations.

    Args:
        window: [t, B, d], see `observation_window`.
        valid: [T, B] bool; None where every entry is.
    """
    if not window.is_floating_point() or window.shape[-1] > MAX_VECTOR_ENTRIES:
        return ObservationScale(Max(-math.inf), Mean(0.0, 0.0), Max(-math.inf), Max(-math.inf))
    rows = window.flatten(0, 1).double()
    counted = torch.ones_like(rows[:, :1], dtype=torch.bool)
    if valid is not None:
        counted = valid[: len(window)].bool().reshape(-1, 1)
    rows = torch.where(counted, rows, 0.0)
    count = counted.sum()
    mean = rows.sum(0) / count
    std = (torch.where(counted, rows - mean, 0.0).square().sum(0) / count).sqrt()
    rms = rows.square().sum(0).div(count).sqrt()
    varies = (std > MIN_RELATIVE_STD * rms) & rms.isfinite()
    present = varies.any() & ~(rows == rows.round()).all()
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


class EpisodeFlags(Protocol):
    """Ends of episodes and rows that count of a rollout, [T, B] bool each; see `events.RolloutEnd`."""

    @property
    def ended(self) -> Tensor:
        """The step ended its episode."""

    @property
    def valid(self) -> Tensor | None:
        """Rows that count; None where every row does."""


def observation_measurements(
    observations: Tensor | None, window: Tensor | None, rollout: EpisodeFlags
) -> Iterator[Callable[[], MetricGroup]]:
    """Yield what is measured of a rollout's observations [T, B, ...], or of a window of them where they are not there themselves."""
    if window is None and observations is not None:
        window = observation_window(observations)
    if window is None:
        return
    yield partial(observation_scale, window, valid=rollout.valid)
    if len(window) > 1:
        yield partial(observation_change, window, rollout.ended, valid=rollout.valid)
