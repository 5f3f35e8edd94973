"""Memory over time: gradients through a sequence, growth of the cell state with its age, and effect of memory on the policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from esper_telemetry.core.group import MetricGroup
from esper_telemetry.core.lazy import Tensor, inference_mode, torch
from esper_telemetry.core.metric import Metric, reports
from esper_telemetry.core.record import Level
from esper_telemetry.core.reduction import NAN, AdditiveReduction, Array, Mean, Slot, Statistic
from esper_telemetry.metrics.kl import joint_kl
from esper_telemetry.metrics.statistics import keep, rows_of, same_shape

PASCANU = "Pascanu 2013, 1211.5063"


@dataclass(frozen=True, slots=True)
class BpttStats(MetricGroup):
    """Gradients of the loss at the recurrent state h."""

    first: Mean = reports(
        Metric.gradient_norm("lstm/bptt/h0_grad_norm", 732, "gradient at the first state of a sequence", cost="sampled")
        .asks("How much of the loss's gradient reaches the state at the start of a sequence?")
        .bounds(healthy="1e-4 to 10", critical="> 100: gradients explode through time", source=PASCANU)
        .absent("no recurrent policy, or every environment was reset")
        .advises(
            "Open the forget gate (bias 1), train on shorter sequences, or give the policy what it has to remember."
        )
    )
    profile: Mean = reports(
        Metric.ratio(
            "lstm/bptt/profile_ratio",
            733,
            "gradient at the beginning of a sequence, divided by the gradient at its end",
            level=Level.DEBUG,
            cost="debug",
        )
        .asks(
            "How much larger is the gradient at the beginning of a sequence than at its end? Far above 1 it "
            "explodes on the way, near 0 it vanishes."
        )
        .bounds(source=PASCANU)
        .absent("no recurrent policy, or every environment was reset, or the gradient of the last step is missing")
    )


@inference_mode
def bptt_stats(first: Tensor, last: Tensor) -> BpttStats:
    """Return the norm of the gradient before the first step, and the ratio of its last layer's norm to the norm after the last step.

    Args:
        first: ∂L/∂h before the first step, [layers, envs, H].
        last: ∂L/∂h of the last layer after the last step, [envs, H].
    """
    norm = torch.linalg.vector_norm
    end = norm(last.double())
    ratio = norm(first[-1].double()) / end
    defined = torch.isfinite(ratio)
    begin = norm(first.double())
    return BpttStats(
        first=Mean(begin.nan_to_num(0.0, 0.0), torch.isfinite(begin)),
        profile=Mean(torch.where(defined, ratio, 0.0), defined),
    )


BUCKETS = 64
"""Maximum number of buckets of ages; older states count in the last bucket."""


@dataclass(frozen=True, slots=True)
class AgeProfile(AdditiveReduction):
    """Size of the cell state by age.

    Attributes:
        count: [K] number of states in each bucket of ages.
        age: [K] sum of their ages.
        size: [K] sum of their sizes.
    """

    count: Tensor
    age: Tensor
    size: Tensor

    statistics: ClassVar[Mapping[str, Statistic]] = {"growth": lambda s: _growth(np.array(s).reshape(3, -1))}

    def slots(self) -> tuple[Slot, ...]:
        """Return all counts, then all ages, then all sizes."""
        return (*self.count.unbind(-1), *self.age.unbind(-1), *self.size.unbind(-1))


def _growth(profile: Array) -> float:
    count, *sums = profile[:, profile[0] > 0]
    if len(count) < 2:
        return NAN
    age, size = sums[0] / count, sums[1] / count
    typical = float(np.median(size))
    return theil_sen_slope(age, size) * float(age.max()) / typical if typical else NAN


def theil_sen_slope(x: Array, y: Array) -> float:
    """Return the median slope over all pairs of points (Sen 1968); needs at least two points, with distinct x."""
    i, j = np.triu_indices(len(x), 1)
    return float(np.median((y[j] - y[i]) / (x[j] - x[i])))


@dataclass(frozen=True, slots=True)
class CellGrowth(MetricGroup):
    """Dependence of the cell state's size on its age."""

    growth: AgeProfile = reports(
        Metric.ratio("lstm/c_growth", 745, "growth of the cell state with age", low=None)
        .asks("By how many times its median does the cell state grow from a fresh memory to the oldest?")
        .bounds(
            healthy="< 2",
            warn="> 2",
            critical="> 5",
            source="Theil-Sen slope of mean |c| against age, times the largest age, over the median; heuristic",
        )
        .absent("memory of fewer than two ages, or a cell state of zero")
    )


@inference_mode
def cell_growth(sizes: Tensor, ages: Tensor, *, width: int = 1, valid: Tensor | None = None) -> CellGrowth:
    """Return the profile of the cell state's size over its age.

    Args:
        sizes: mean |c| of each state, [T, B] or [N].
        ages: steps since memory was reset, same shape.
        width: number of neighbouring ages per bucket.
        valid: bool, same shape; None if every state counts.
    """
    if width < 1:
        raise ValueError(f"width must be at least 1, got {width}")
    same_shape(sizes=sizes, ages=ages, valid=valid)
    s = keep(rows_of(sizes, None).double(), None if valid is None else rows_of(valid, None).bool())
    age = rows_of(ages, None)
    bucket = (age.long() // width).clamp(0, BUCKETS - 1)
    columns = torch.stack([s.weight, age * s.weight, s.values])
    profile = columns.new_zeros(3, BUCKETS).index_add_(1, bucket, columns)
    return CellGrowth(AgeProfile(*profile))


def bucket_width(steps: int) -> int:
    """Return the number of ages per bucket so that the buckets cover the last four rollouts of `steps`."""
    return max(1, -(-4 * steps // BUCKETS))


@dataclass(frozen=True, slots=True)
class MemoryUse(MetricGroup):
    """Effect of memory on the policy."""

    kl: Mean = reports(
        Metric.nats("lstm/ablate_kl", 734, "KL divergence without memory", level=Level.DEBUG, cost="debug")
        .asks("How differently would the policy act if it remembered nothing? Near 0: memory is ignored.")
        .bounds(healthy="> 1e-3 if the task needs memory", source="KL(π(·|x,h)‖π(·|x,0)); heuristic")
        .absent("no recurrent policy, or no valid row")
    )


@inference_mode
def memory_use(rows: Mapping[str, Tensor], *, relevant: Mapping[str, Tensor] | None = None) -> MemoryUse:
    """Return the mean KL between the policy with memory and without.

    Args:
        rows: per head [n], from `categorical_kl` or `gaussian_kl`, of the same weights with memory and without.
        relevant: per head [n] bool; other heads always take part.
    """
    return MemoryUse(joint_kl(rows, relevant))
