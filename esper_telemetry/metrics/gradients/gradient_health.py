"""Gradient norms of a model in a user's own loop, after `backward` and before clipping."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Self, TypeAlias

from esper_telemetry.core.arrays import shown
from esper_telemetry.core.group import MetricGroup, Postponed
from esper_telemetry.core.lazy import Tensor, no_grad, torch
from esper_telemetry.core.rate_schedule import belongs
from esper_telemetry.core.requirements import checked_arguments
from esper_telemetry.metrics.gradients.norms import FrozenGroups, Groups, check_limit, frozen, gradient_norms

if TYPE_CHECKING:
    from torch import nn


Parameters: TypeAlias = "nn.Module | Mapping[str, Tensor] | Iterable[Tensor] | Iterable[tuple[str, Tensor]]"


@dataclass(frozen=True, slots=True, eq=False)
class GradientHealth(Postponed):
    """The norms of K gradients after one backward pass, summarised together with the other passes when the update ends.

    Attributes:
        norms: [K], of the finite entries.
        nonfinite: [K], number of other entries; None if all entries are finite or were not checked.
        names, numels: K names and numbers of entries.
        groups: parameter or module names by group.
        max_norm: limit of the global norm; None if nothing is clipped.
    """

    norms: Tensor
    nonfinite: Tensor | None
    names: tuple[str, ...]
    numels: tuple[int, ...]
    groups: FrozenGroups
    max_norm: float | None

    @property
    def kind(self) -> Hashable:
        """Return gradients, groups and limit."""
        return type(self), self.names, self.numels, self.groups, self.max_norm, self.norms.device

    @classmethod
    def together(cls, measurements: Sequence[Self]) -> Iterable[MetricGroup]:
        """Return the statistics of all passes."""
        first = measurements[0]
        norms = torch.stack([one.norms.double() for one in measurements])
        nonfinite = None
        if any(one.nonfinite is not None for one in measurements):
            zeros = torch.zeros_like(first.norms).double()
            nonfinite = torch.stack([zeros if one.nonfinite is None else one.nonfinite for one in measurements])
        return gradient_norms(norms, first.names, dict(first.groups), first.numels, max_norm=first.max_norm, nonfinite=nonfinite)


@checked_arguments()
@no_grad
def gradient_health(parameters: Parameters, *, groups: Groups | None = None, max_norm: float | None = None) -> GradientHealth:
    """Return the norms of a model's present gradients: call it after `backward` and before clipping.

    Dense, sparse and non-contiguous gradients of any floating type are supported. NaN and infinite entries are
    left out and counted. On CUDA, where looking for them would synchronise, whole tensors with such entries are left out.
    With a gradient scaler, unscale first.

    Args:
        parameters: a module, its parameters, or its named parameters.
        groups: parameter or module names by group, such as `{"actor": ["actor"], "critic": ["critic"]}`.
        max_norm: the limit to which you clip, to report the effect of clipping.

    Raises:
        ValueError: for a group with an unknown parameter, and a limit that is not positive.
    """
    if max_norm is not None:
        check_limit(max_norm)
    named, declared = named_parameters(parameters), frozen(groups or {})
    _check_groups(declared, tuple(named))
    present = {name: parameter for name, parameter in named.items() if parameter.grad is not None}
    norms, nonfinite = finite_norms(gradients_of(present.values()))
    numels = tuple([parameter.numel() for parameter in present.values()])
    return GradientHealth(norms, nonfinite, tuple(present), numels, declared, max_norm)


def named_parameters(parameters: Parameters) -> dict[str, Tensor]:
    """Return the trainable parameters by name, or by position if they are not named, each once."""
    if isinstance(parameters, torch.nn.Module):
        return {name: p for name, p in parameters.named_parameters() if p.requires_grad}
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    if not isinstance(parameters, Iterable) or isinstance(parameters, str):
        raise TypeError(f"gradient_health takes a module or its parameters, got {shown(parameters)}")
    items = list(parameters.items() if isinstance(parameters, Mapping) else parameters)
    named = [item if isinstance(item, tuple) else (str(index), item) for index, item in enumerate(items)]
    by_identity: dict[int, tuple[str, Tensor]] = {}
    for name, parameter in named:
        if not isinstance(parameter, Tensor):
            raise TypeError(f"gradient_health takes a module or its parameters, got {shown(parameter)}")
        by_identity.setdefault(id(parameter), (name, parameter))
    return dict(by_identity.values())


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the existing gradients as dense real tensors; for a sparse one its values, with repeated rows summed."""
    dense = []
    for gradient in (parameter.grad for parameter in parameters):
        if gradient is None:
            continue
        if gradient.layout is torch.sparse_coo:
            gradient = gradient.coalesce().values()
        elif gradient.layout is not torch.strided:
            gradient = gradient.values()
        dense.append(torch.view_as_real(gradient) if gradient.is_complex() else gradient)
    return dense


@no_grad
def finite_norms(gradients: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Return the norm of each gradient's finite entries, [K], and its number of other entries, [K], or None if all norms are finite.

    On CUDA nothing is left out, because looking for such entries would synchronise: norms may then be non-finite.
    """
    if not gradients:
        return torch.zeros(0, dtype=torch.float64), None
    norms = tensor_norms(gradients)
    if norms.is_cuda or math.isfinite(sum(norms.tolist())):
        return norms, None
    repaired, counts = zip(*map(finite_norm, gradients), strict=True)
    return torch.stack(repaired), torch.stack(counts)


def finite_norm(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return the L2 norm of the finite entries and the number of other entries, both 0-d float64."""
    finite = torch.isfinite(gradient)
    known_entries = torch.where(finite, gradient, gradient.new_zeros(()))
    return torch.linalg.vector_norm(known_entries, dtype=torch.float64), (~finite).sum().double()


def tensor_norms(gradients: Sequence[Tensor]) -> Tensor:
    """Return the L2 norm of each gradient, [K], on the first one's device; types and devices may differ."""
    from esper_telemetry.core.tensors import gradient_norms  # imported here, because that module imports torch

    first = gradients[0]
    if all(gradient.dtype is first.dtype and gradient.device == first.device for gradient in gradients):
        return gradient_norms(gradients)
    return torch.stack([torch.linalg.vector_norm(g, dtype=torch.float64).to(first.device) for g in gradients])


@lru_cache(maxsize=64)
def _check_groups(groups: FrozenGroups, names: tuple[str, ...]) -> None:
    for group, members in groups:
        for member in members:
            if not any(belongs(name, [member]) for name in names):
                raise ValueError(f"group {group!r} names {member!r}, which is not a trainable parameter or module of the model")
