"""How large the gradients are: of the whole network, of declared groups and of every tensor (G1, G2).

Everything follows from the norm of each tensor, which clipping computes anyway: groups are sub-sums of squares.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from esper_telemetry.conversion import ArrayLike, as_tensor
from esper_telemetry.group import Mean, Sum
from esper_telemetry.metrics.defined import defined
from esper_telemetry.metrics.gradients.clipping import Clipping, clip_coefficients, clipping
from esper_telemetry.metrics.gradients.groups import (
    GlobalGradient,
    GroupGradients,
    HeadGradients,
    LayerGradients,
    TermGradients,
)
from esper_telemetry.metrics.gradients.membership import Groups, Membership, membership
from esper_telemetry.metrics.masking import same_shape

UNTOUCHED = 1 - 1e-5
"""Factor above which rounding alone tells a gradient from the one before clipping."""


class GradientNorms(NamedTuple):
    """What the norms of all tensors say: four groups to observe together."""

    total: GlobalGradient
    clip: Clipping
    groups: GroupGradients
    layers: LayerGradients


class _Sums(NamedTuple):
    """Norms of sums of tensors; columns are the whole network, then the groups.

    Attributes:
        norms: [M, 1 + G], finite, 0 where not usable.
        usable: [M, 1 + G], 1 where the norm counts, else 0.
        flaws: [M, 1 + G], how many entries or tensors were not finite.
    """

    norms: Tensor
    usable: Tensor
    flaws: Tensor


class _Columns(NamedTuple):
    """The slots of the whole network, [M], or of the groups, [M, G]; `clean` is where clipping is defined."""

    norms: Tensor
    usable: Tensor
    flaws: Tensor
    rms: Tensor | None
    clipped: Tensor | None
    clean: Tensor

    def reductions(self) -> tuple[Mean, Mean | None, Mean | None, Sum]:
        """Norm before clipping, RMS, norm after clipping and number of non-finite entries."""
        return (
            Mean(self.norms, self.usable),
            None if self.rms is None else Mean(self.rms, self.usable),
            None if self.clipped is None else Mean(self.clipped, self.clean),
            Sum(self.flaws),
        )


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
    """Norms of the network, its groups and its tensors, before and after clipping, at the optimizer steps of an update.

    Args:
        norms: [M, K] or [K], L2 norm of each of K gradients at each of M steps, before clipping.
        names: K parameter names.
        groups: parameter names by group; a module's name stands for its parameters. Names without gradient are passed
            over.
        numels: K numbers of entries, for `rms`.
        max_norm: limit of the global norm; None where nothing is clipped.
        nonfinite: like `norms`, the number of entries that were not finite, where `norms` are those of the finite ones.
        applied: like `norms`, of the gradients that the optimizer used; what clipping did is then read off these, whatever it was.

    Every step counts once. Where a tensor's norm is not finite, its own norm, its group's and the global one are left
    out at that step, and it is counted; the step has no clip coefficient. A group without gradients is absent.
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
    known, finite = _known(norms.reshape(-1, len(names)).double())
    sums = _sums(known, finite, members, nonfinite)
    total_norm = sums.norms.select(1, 0)
    clean = (sums.usable if nonfinite is None else (sums.flaws == 0).double()).select(1, 0)
    used = None if applied is None else _sums(*_known(applied.reshape(-1, len(names)).double()), members, None)
    if used is not None:
        clean = clean * used.usable.select(1, 0)
        coefs: Tensor | None = _measured(total_norm, used.norms.select(1, 0)) * clean
    else:
        coefs = None if max_norm is None else clip_coefficients(total_norm, max_norm) * clean
    total, parts = _split(sums, members, coefs, clean, None if used is None else used.norms * clean.unsqueeze(1))
    return GradientNorms(
        GlobalGradient(*total.reductions()),
        Clipping() if coefs is None else clipping(total_norm, clean, coefs, max_norm=max_norm),
        GroupGradients(members.labels, *parts.reductions()) if members.labels else GroupGradients(()),
        LayerGradients(members.layers, Mean(known, finite)),
    )


def _known(norms: Tensor) -> tuple[Tensor, Tensor]:
    """The norms with 0 in place of what is not finite, and where they are: both [M, K]."""
    known = norms.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return known, known == norms


def _sums(known: Tensor, finite: Tensor, members: Membership, nonfinite: Tensor | None) -> _Sums:
    norms = (known.square() @ members.matrix).sqrt()
    missing = (~finite).double() @ members.matrix
    usable = (missing == 0).double()
    flaws = missing if nonfinite is None else nonfinite.reshape(known.shape).double() @ members.matrix
    return _Sums(norms * usable, usable, flaws)


def _measured(before: Tensor, after: Tensor) -> Tensor:
    """By what factor [M] gradients were shrunk: 1 where rounding alone tells them apart, and where there was nothing to shrink."""
    factor = torch.where(before > 0, after / before, 1.0)
    return torch.where(factor > UNTOUCHED, 1.0, factor)


def _split(
    sums: _Sums, members: Membership, coefs: Tensor | None, clean: Tensor, applied: Tensor | None
) -> tuple[_Columns, _Columns]:
    """The columns of the whole network and those of the groups."""
    rms = None if members.scale is None else sums.norms * members.scale
    clipped = applied if applied is not None or coefs is None else sums.norms * coefs.unsqueeze(1)

    def columns(pick: Callable[[Tensor], Tensor], clean: Tensor) -> _Columns:
        root, after = (None if column is None else pick(column) for column in (rms, clipped))
        return _Columns(pick(sums.norms), pick(sums.usable), pick(sums.flaws), root, after, clean)

    count = len(members.labels)
    return columns(lambda x: x.select(1, 0), clean), columns(lambda x: x.narrow(1, 1, count), clean.unsqueeze(1))


def head_gradients(norms: Tensor, names: Sequence[str], heads: Groups) -> HeadGradients:
    """Norms of the gradients of the policy's heads.

    Args:
        norms: [M, K] or [K], as for `gradient_norms`.
        names: K parameter names.
        heads: parameter or module names by head.
    """
    found = gradient_norms(norms, names, heads).groups
    return HeadGradients(found.group, found.norm_preclip)


def value_gradient(norms: Tensor, names: Sequence[str], members: Sequence[str]) -> TermGradients:
    """Norm of the gradient of the value head's parameters, or of its module, `members`; arguments as for `gradient_norms`."""
    found = gradient_norms(norms, names, {"value": members}).groups.norm_preclip
    return TermGradients() if found is None else TermGradients(value=Mean(_column(found.total), _column(found.count)))


def _column(slot: Tensor | float) -> Tensor | float:
    """The only column of a slot [M, 1], as [M]."""
    return slot.squeeze(-1) if isinstance(slot, Tensor) else slot


def term_gradients(*, value: Tensor | None = None) -> TermGradients:
    """Norms [M] of the gradient of the value head's parameters."""
    return TermGradients(None if value is None else defined(value))
