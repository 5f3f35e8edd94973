"""Norms of the gradients: of the whole network, of declared groups and of every tensor.

Everything follows from the norm of each tensor, which clipping computes anyway. The squared norm of a group (G1, G2, G4) is a sum of
squares, one matrix product for all groups. The effect of clipping (G3) is a factor of the global norm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple, TypeAlias

from esper_telemetry.core.arrays import ArrayLike, as_tensor
from esper_telemetry.core.group import MetricGroup
from esper_telemetry.core.lazy import Tensor, torch
from esper_telemetry.core.metric import Metric, MetricFamily, label, reports, segment
from esper_telemetry.core.rate_schedule import belongs
from esper_telemetry.core.record import Level
from esper_telemetry.core.reduction import Mean, Sum
from esper_telemetry.core.requirements import checked_arguments
from esper_telemetry.metrics.statistics import defined, same_shape

GRADIENTS_FAMILY = MetricFamily(
    "grad",
    "Gradients",
    "Size and direction of the gradients that the losses send into the network. Norms are taken before and after "
    "clipping; groups are the parts that the trainer declares: actor, critic, the shared part, single heads. Numbers "
    "that need whole gradients are measured in one update of several (`telemetry/sample_every`).",
    place=60,
    question="What dominates the gradient?",
    first=("grad/interference/critic_share", "grad/{group}/norm_preclip", "grad/clip/coef", "grad/health"),
)


@dataclass(frozen=True, slots=True)
class Clipping(MetricGroup, absent="no limit, or no step with finite gradients"):
    """Clip coefficient, frequency and excess, one value per optimizer step."""

    replicated: ClassVar[bool] = True
    coef: Mean | None = reports(
        Metric.fraction("grad/clip/coef", 510, "clip coefficient", level=Level.MINIMAL)
        .asks("By what factor does clipping shrink the gradient? 1 leaves it unchanged.")
        .bounds(healthy="> 0.3", warn="< 0.1", critical="< 0.01", source="heuristic")
        .absent("no limit, or a gradient is not finite"),
        Metric.fraction("grad/clip/coef_min", 511, "smallest clip coefficient", over="min", level=Level.MINIMAL)
        .asks("By what factor did clipping shrink the gradient at worst?")
        .bounds(healthy="> 0.1", warn="< 0.05", critical="< 0.01", source="heuristic"),
    )
    freq: Mean | None = reports(
        Metric.fraction("grad/clip/freq", 512, "share of steps that are clipped")
        .asks("In what share of the optimizer steps was the gradient clipped? High alone is normal for PPO.")
        .bounds(healthy="0.05 to 0.95; healthy runs 0.06 to 0.94", source="measured on a recurrent PPO")
    )
    excess_log10: Mean | None = reports(
        Metric.magnitude("grad/clip/excess_log10", 513, "excess over the clip limit", unit="decades")
        .asks("How many powers of ten is the gradient above the clip limit? 0 is within it.")
        .bounds(healthy="< 0.7", warn="> 1 (ten times the limit)", critical="> 2 (a hundred times)", source="heuristic")
    )


def check_limit(max_norm: float) -> None:
    """Raise ValueError for a limit of the global norm that is not positive."""
    if not max_norm > 0:
        raise ValueError(f"max_norm must be positive, got {max_norm}")


def clip_coefficients(norms: Tensor, max_norm: float) -> Tensor:
    """Return the factor min(1, max_norm / (norm + 1e-6)) of `clip_grad_norm_` for global norms [..] in float64; NaN for NaN."""
    from esper_telemetry.core.tensors import clip_coefficient  # imported here, because that module imports torch

    check_limit(max_norm)
    return clip_coefficient(norms, max_norm)


def coefficients(clip: Clipping) -> Tensor | float:
    """Return the clip coefficient of each step, [M], NaN if it is undefined; 1 if nothing is clipped."""
    if clip.coef is None:
        return 1.0
    total, usable = torch.as_tensor(clip.coef.total), torch.as_tensor(clip.coef.count)
    return torch.where(usable > 0, total, torch.nan)


def clipping(norms: Tensor, usable: Tensor, coefs: Tensor, *, max_norm: float | None) -> Clipping:
    """Return statistics of clipping global norms.

    Args:
        norms: [M] global norms before clipping, float64, finite.
        usable: [M], 1 if the gradients of the step are all finite, else 0; such steps do not count.
        coefs: [M] from `clip_coefficients`, 0 for steps that do not count.
        max_norm: the limit; None if only the effect of clipping is known.
    """
    excess = None if max_norm is None else (norms / max_norm).log10().clamp(min=0.0)
    return Clipping(
        coef=Mean(coefs, usable),
        freq=Mean((coefs < 1.0) * usable, usable),
        excess_log10=None if excess is None else Mean(excess * usable, usable),
    )


@dataclass(frozen=True, slots=True)
class GlobalGradient(MetricGroup, absent="no parameter has a gradient, or none is finite"):
    """The gradient of all parameters, one value per optimizer step."""

    replicated: ClassVar[bool] = True
    norm_preclip: Mean | None = reports(
        Metric.gradient_norm("grad/global/norm_preclip", 500, "norm before clipping of the whole gradient", level=Level.MINIMAL)
        .asks("How large is the gradient of the whole network, before clipping?")
        .bounds(
            healthy="near its own history",
            warn="robust z of its log10 > 4",
            critical="robust z of its log10 > 8",
            source="AutoClip 2007.14469; measured null rates",
        ),
        Metric.gradient_norm(
            "grad/global/norm_preclip_max", 501, "largest norm before clipping of the whole gradient", over="max", level=Level.MINIMAL
        ).asks("How large was the gradient of the whole network at its worst step?"),
    )
    rms: Mean | None = reports(
        Metric.magnitude("grad/global/rms", 502, "typical size of the whole gradient", unit="gradient norm/√parameters").asks(
            "How large is a typical entry of the gradient? Comparable between networks of any size."
        )
    )
    norm_postclip: Mean | None = reports(
        Metric.gradient_norm("grad/global/norm_postclip", 503, "norm after clipping of the whole gradient")
        .asks("How large is the gradient that the optimizer receives?")
        .bounds(healthy="at most the limit")
        .absent("nothing is clipped, or a gradient is not finite")
    )
    nonfinite: Sum | None = reports(
        Metric.count(
            "grad/global/norm_preclip_nonfinite",
            504,
            "non-finite inputs of norm before clipping of the whole gradient",
            level=Level.MINIMAL,
            when_positive=True,
        )
        .asks("How many entries of the gradients, or whole tensors if only norms are known, were not finite?")
        .bounds(healthy="0", critical="> 0")
        .absent("")
    )


@dataclass(frozen=True, slots=True)
class GroupGradients(MetricGroup, absent="no parameter of the group has a gradient, or none is finite"):
    """The gradients of the declared groups that have one."""

    replicated: ClassVar[bool] = True
    group: tuple[str, ...] = label()
    norm_preclip: Mean | None = reports(
        Metric.gradient_norm("grad/{group}/norm_preclip", 505, "norm before clipping of a group's gradient")
        .asks("How large is the gradient of this part of the network, before clipping?")
        .bounds(
            healthy="near its own history",
            warn="robust z of its log10 > 4",
            critical="robust z of its log10 > 8",
            source="AutoClip 2007.14469; measured null rates",
        ),
        Metric.gradient_norm("grad/{group}/norm_preclip_max", 506, "largest norm before clipping of a group's gradient", over="max").asks(
            "How large was the gradient of this part of the network at its worst step?"
        ),
    )
    rms: Mean | None = reports(
        Metric.magnitude("grad/{group}/rms", 507, "typical size of a group's gradient", unit="gradient norm/√parameters").asks(
            "How large is a typical entry of this group's gradient? Comparable between groups of any size."
        )
    )
    norm_postclip: Mean | None = reports(
        Metric.gradient_norm("grad/{group}/norm_postclip", 508, "norm after clipping of a group's gradient")
        .asks("How large is the gradient that the optimizer receives for this part of the network?")
        .absent("nothing is clipped, or a gradient is not finite")
    )
    nonfinite: Sum | None = reports(
        Metric.count(
            "grad/{group}/norm_preclip_nonfinite",
            509,
            "non-finite inputs of norm before clipping of a group's gradient",
            when_positive=True,
        )
        .asks("In which part of the network are gradients NaN or infinite?")
        .bounds(healthy="0", critical="> 0")
        .absent("")
    )


@dataclass(frozen=True, slots=True)
class LayerGradients(MetricGroup):
    """The gradient of every parameter tensor that has one."""

    replicated: ClassVar[bool] = True
    layer: tuple[str, ...] = label()
    norm: Mean | None = reports(
        Metric.gradient_norm("grad/layer/{layer}/norm", 520, "gradient norm of a layer")
        .asks("How large is the gradient of this parameter tensor, before clipping?")
        .absent("the tensor's gradient is missing, or never finite")
    )


@dataclass(frozen=True, slots=True)
class HeadGradients(MetricGroup):
    """The gradients of the policy's heads that have one."""

    replicated: ClassVar[bool] = True
    head: tuple[str, ...] = label()
    norm: Mean | None = reports(
        Metric.gradient_norm("grad/head/{head}/norm", 521, "gradient norm of a head")
        .asks("Which head of the policy learns? Heads that seldom matter naturally have small gradients.")
        .bounds(healthy="near its own history", critical="exactly 0 while the head decides in 5 % of the rows", source="heuristic")
        .absent("the head's gradient is missing")
    )


@dataclass(frozen=True, slots=True)
class TermGradients(MetricGroup):
    """The gradient of the value head."""

    replicated: ClassVar[bool] = True
    value: Mean | None = reports(
        Metric.gradient_norm("grad/value/norm", 522, "gradient norm of the value head")
        .asks("How large is the gradient of the value head?")
        .bounds(healthy="near its own history")
        .absent("the value head's gradient is missing")
    )


Groups = Mapping[str, Sequence[str]]
FrozenGroups = tuple[tuple[str, tuple[str, ...]], ...]


class Membership(NamedTuple):
    """Sums over tensors as one matrix product; column 0 is the sum of all, the others are the groups that have a gradient.

    Attributes:
        labels: the G groups, as key segments.
        layers: the K tensors, as key segments.
        matrix: [K, 1 + G] of zeros and ones, float64.
        scale: [1 + G], one over the square root of the number of entries; None if sizes are unknown.
    """

    labels: tuple[str, ...]
    layers: tuple[str, ...]
    matrix: Tensor
    scale: Tensor | None


def membership(names: Sequence[str], groups: Groups, numels: Sequence[int] | None, device: torch.device) -> Membership:
    """Return the membership of `names`; computed once per combination.

    Args:
        names: K tensors that have a gradient.
        groups: parameter names by group; a module's name includes its parameters. Groups without any gradient are
            left out.
        numels: entries per tensor, K.
        device: device of the matrix.
    """
    return _membership(tuple(names), frozen(groups), tuple(numels) if numels is not None else None, device)


@lru_cache(maxsize=64)
def _membership(names: tuple[str, ...], groups: FrozenGroups, numels: tuple[int, ...] | None, device: torch.device) -> Membership:
    columns = {segment(group): [belongs(name, members) for name in names] for group, members in groups}
    present = {label: column for label, column in columns.items() if any(column)}
    table = [[True] * len(names), *present.values()]
    matrix = torch.tensor(table, dtype=torch.float64).T.contiguous()
    scale = None if numels is None else (torch.tensor(numels, dtype=torch.float64) @ matrix).rsqrt().to(device)
    return Membership(tuple(present), tuple(map(segment, names)), matrix.to(device), scale)


def frozen(groups: Groups) -> FrozenGroups:
    """Return the groups as a hashable value."""
    return tuple([(name, tuple(members)) for name, members in groups.items()])


UNTOUCHED = 1 - 1e-5
"""Smallest factor that rounding alone may cause; below it a gradient has been clipped."""


class GradientNorms(NamedTuple):
    """Statistics of the norms of all tensors: four groups to observe together."""

    total: GlobalGradient
    clip: Clipping
    groups: GroupGradients
    layers: LayerGradients


class _Sums(NamedTuple):
    """Norms of sums of tensors; columns are the whole network, then the groups.

    Attributes:
        norms: [M, 1 + G], finite, 0 if not usable.
        usable: [M, 1 + G], 1 if the norm counts, else 0.
        flaws: [M, 1 + G], number of entries or tensors that were not finite.
    """

    norms: Tensor
    usable: Tensor
    flaws: Tensor


Reductions: TypeAlias = tuple[Mean, Mean | None, Mean | None, Sum]
"""Norm before clipping, RMS, norm after clipping, and number of non-finite entries."""


@checked_arguments()
def gradient_norms(
    norms: ArrayLike,
    names: Sequence[str],
    groups: Groups | None = None,
    numels: Sequence[int] | None = None,
    *,
    max_norm: float | None = None,
    nonfinite: ArrayLike | None = None,
    applied: ArrayLike | None = None,
) -> GradientNorms:
    """Return the norms of the network, its groups and its tensors, before and after clipping, at the optimizer steps of an update.

    Every step counts once. If a tensor's norm is not finite, its own norm, its group's and the global one are left
    out at that step, and the tensor is counted; the clip coefficient of the step is undefined. A group without gradients is absent.

    Args:
        norms: [M, K] or [K], L2 norm of each of K gradients at each of M steps, before clipping.
        names: K parameter names.
        groups: parameter names by group; a module's name includes its parameters. Names without gradient are
            ignored.
        numels: K numbers of entries, for `rms`.
        max_norm: limit of the global norm; None if nothing is clipped.
        nonfinite: like `norms`, the number of entries that were not finite, if `norms` covers only the finite ones.
        applied: like `norms`, of the gradients that the optimizer used; the effect of any kind of clipping is then read from these.
    """
    norms = as_tensor(norms)
    nonfinite = None if nonfinite is None else as_tensor(nonfinite, norms)
    applied = None if applied is None else as_tensor(applied, norms)
    same_shape(norms=norms, nonfinite=nonfinite, applied=applied)
    tensors = norms.shape[-1] if norms.ndim else 1
    if tensors != len(names):
        raise ValueError(f"norms of {tensors} tensors need as many names, got {len(names)}")
    if not names:
        return GradientNorms(GlobalGradient(), Clipping(), GroupGradients(()), LayerGradients(()))
    members = membership(names, groups or {}, numels, norms.device)
    norms, finite = _finite(norms.reshape(-1, len(names)).double())
    sums = _sums(norms, finite, members, nonfinite)
    total_norm = sums.norms.select(1, 0)
    clean = (sums.usable if nonfinite is None else (sums.flaws == 0).double()).select(1, 0)
    used = None if applied is None else _sums(*_finite(applied.reshape(-1, len(names)).double()), members, None)
    if used is not None:
        clean = clean * used.usable.select(1, 0)
        factor = torch.where(total_norm > 0, used.norms.select(1, 0) / total_norm, 1.0)
        coefs: Tensor | None = torch.where(factor > UNTOUCHED, 1.0, factor) * clean
    else:
        coefs = None if max_norm is None else clip_coefficients(total_norm, max_norm) * clean
    total, parts = _reductions(sums, members, coefs, clean, None if used is None else used.norms * clean.unsqueeze(1))
    return GradientNorms(
        GlobalGradient(*total),
        Clipping() if coefs is None else clipping(total_norm, clean, coefs, max_norm=max_norm),
        GroupGradients(members.labels, *parts) if members.labels else GroupGradients(()),
        LayerGradients(members.layers, Mean(norms, finite)),
    )


def _finite(norms: Tensor) -> tuple[Tensor, Tensor]:
    """Return the norms with 0 for non-finite ones, and the mask of the finite ones: both [M, K]."""
    values = norms.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return values, values == norms


def _sums(values: Tensor, finite: Tensor, members: Membership, nonfinite: Tensor | None) -> _Sums:
    norms = (values.square() @ members.matrix).sqrt()
    missing = (~finite).double() @ members.matrix
    usable = (missing == 0).double()
    flaws = missing if nonfinite is None else nonfinite.reshape(values.shape).double() @ members.matrix
    return _Sums(norms * usable, usable, flaws)


def _reductions(
    sums: _Sums, members: Membership, coefs: Tensor | None, clean: Tensor, applied: Tensor | None
) -> tuple[Reductions, Reductions]:
    """Return the reductions of the whole network, [M], and of the groups, [M, G]; `clean` marks steps at which clipping is defined."""
    rms = None if members.scale is None else sums.norms * members.scale
    clipped = applied if applied is not None or coefs is None else sums.norms * coefs.unsqueeze(1)

    def columns(pick: Callable[[Tensor], Tensor], clean: Tensor) -> Reductions:
        usable = pick(sums.usable)
        return (
            Mean(pick(sums.norms), usable),
            None if rms is None else Mean(pick(rms), usable),
            None if clipped is None else Mean(pick(clipped), clean),
            Sum(pick(sums.flaws)),
        )

    count = len(members.labels)
    return columns(lambda x: x.select(1, 0), clean), columns(lambda x: x.narrow(1, 1, count), clean.unsqueeze(1))


def head_gradients(norms: Tensor, names: Sequence[str], heads: Groups) -> HeadGradients:
    """Return the norms of the gradients of the policy's heads.

    Args:
        norms: [M, K] or [K], as for `gradient_norms`.
        names: K parameter names.
        heads: parameter or module names by head.
    """
    groups = gradient_norms(norms, names, heads).groups
    return HeadGradients(groups.group, groups.norm_preclip)


def value_gradient(norms: Tensor, names: Sequence[str], members: Sequence[str]) -> TermGradients:
    """Return the norm of the gradient of the value head's parameters or module `members`; arguments as for `gradient_norms`."""
    norm = gradient_norms(norms, names, {"value": members}).groups.norm_preclip
    return TermGradients() if norm is None else TermGradients(value=Mean(_column(norm.total), _column(norm.count)))


def _column(slot: Tensor | float) -> Tensor | float:
    """Return the only column of a slot [M, 1], as [M]."""
    return slot.squeeze(-1) if isinstance(slot, Tensor) else slot


def term_gradients(*, value: Tensor | None = None) -> TermGradients:
    """Return the norms [M] of the gradient of the value head's parameters."""
    return TermGradients(None if value is None else defined(value))
