"""Interference of actor and critic (PCGrad 2001.06782), gradients of a module beside its host, and of the entropy bonus.

Ranks measure gradients of their own rows; the reductions of this module combine them to those of all rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from esper_telemetry.core.arrays import ArrayLike, as_floats, as_tensor
from esper_telemetry.core.borders import checked_arguments
from esper_telemetry.core.group import MetricGroup
from esper_telemetry.core.lazy import Tensor, no_grad, torch
from esper_telemetry.core.metric import Metric, label, reports
from esper_telemetry.core.reduction import NAN, AdditiveReduction, Array, Mean, Slot, Statistic
from esper_telemetry.metrics.gradients.health import tensor_norms
from esper_telemetry.metrics.gradients.norms import GradientNorms, coefficients
from esper_telemetry.metrics.losses import entropy_slope
from esper_telemetry.metrics.statistics import defined, defined_together, same_shape


@dataclass(frozen=True, slots=True)
class PairGradients(MetricGroup):
    """Gradients of a module and its host, one value per optimizer step; `history` derives their ratio and its cause."""

    pair: str = label()
    connected: Mean | float | None = reports(
        Metric.fraction("grad/pair/{pair}/connected", 571, "whether the loss reaches a module")
        .asks("Does the loss reach this module at all? Below 1: detached, frozen, or not in use.")
        .bounds(healthy="1", critical="0", source="no gradient is no small gradient")
        .advises("Look for detach(), no_grad or requires_grad=False between the module and the loss.")
    )
    intensity: Mean | None = reports(
        Metric.quantity(
            "grad/pair/{pair}/intensity",
            572,
            "intensity of a module's gradient",
            unit="gradient norm/√parameters",
            low=0.0,
        )
        .asks("How large is a typical entry of this module's gradient?")
        .absent("the module has no gradient, or one that is not finite")
    )
    host_intensity: Mean | None = reports(
        Metric.quantity(
            "grad/pair/{pair}/host_intensity",
            573,
            "intensity of the host's gradient",
            unit="gradient norm/√parameters",
            low=0.0,
        )
        .asks("How large is a typical entry of the gradient of the network that hosts this module?")
        .absent("the host has no gradient, or one that is not finite")
    )
    upstream: Mean | None = reports(
        Metric.gradient_norm("grad/pair/{pair}/upstream", 574, "gradient that arrives at a module")
        .asks("How strong is the gradient that arrives at this module's output? Exactly 0: it is gated off.")
        .absent("no gradient arrives there, or one that is not finite")
    )
    zero_frac: Mean | None = reports(
        Metric.fraction("grad/pair/{pair}/zero_frac", 575, "share of zeros in a module's gradient")
        .asks("What share of this module's gradient is exactly zero?")
        .bounds(healthy="< 0.3", warn="> 0.9: the module is saturated", source="heuristic")
        .absent("the module has no gradient")
        .advises("Look for dead units inside the module and for a gate in front of it that is shut.")
    )


@no_grad
def pair_gradients(
    pair: str,
    module: Sequence[Tensor],
    host: Sequence[Tensor],
    *,
    norms: tuple[Tensor, Tensor],
    upstream: Tensor | None,
) -> PairGradients:
    """Return the gradients of a module and its host at one optimizer step.

    Args:
        pair: name of the pair.
        module: gradients of the module's parameters, as far as they exist.
        host: those of the host's parameters.
        norms: [K] of the module's gradients and [K'] of the host's.
        upstream: 0-d, norm of the gradient at the module's output; None where none arrived.
    """
    entries, host_entries = (sum(gradient.numel() for gradient in gradients) for gradients in (module, host))
    own, hosts = (
        defined(parts.double().norm() / count**0.5) if count else None
        for parts, count in zip(norms, (entries, host_entries), strict=True)
    )
    filled = torch.stack([torch.count_nonzero(gradient) for gradient in module]).sum() if module else None
    return PairGradients(
        pair,
        connected=float(bool(module) and upstream is not None),
        intensity=own,
        host_intensity=hosts,
        upstream=None if upstream is None else defined(upstream.double()),
        zero_frac=None if filled is None else Mean(entries - filled, float(entries)),
    )


def compared(actor: Tensor, critic: Tensor, coefs: Tensor | float, dots: Tensor | None) -> list[Tensor]:
    """Return log10 of critic over actor, the critic's share of the squares, the clipped actor, and with `dots` the cosine.

    Args:
        actor, critic: norms [M], float64.
        coefs: clip coefficients [M], or one.
        dots: inner products [M], float64.
    """
    square = critic.square()
    values = [(critic / actor).log10(), square / (square + actor.square()), actor * coefs]
    return values if dots is None else [*values, (dots / (actor * critic)).clamp(-1.0, 1.0)]


@dataclass(frozen=True, slots=True)
class Pull(AdditiveReduction):
    """Mean over optimizer steps of a comparison of the actor's and the critic's gradient, here log10 of critic over actor.

    The loss of all rows is the mean of the ranks' losses weighted by their rows, so each rank's gradient of its own rows counts with its
    share of the rows; the squares of norms of different rows add, and so do the inner products.

    Attributes:
        total, count: of the number, over steps at which it is defined.
        actor, critic: norms.
        dot: inner product.
        coef: clip coefficient.
        rows: over which the losses' means are.
    """

    total: Slot
    count: Slot
    actor: Slot
    critic: Slot
    dot: Slot
    coef: Slot
    rows: Slot

    place: ClassVar[int] = 0
    statistics: ClassVar[Mapping[str, Statistic]] = {"mean": lambda s: s[0] / s[1] if s[1] else NAN}

    @classmethod
    def join(cls, ranks: Array) -> Array:
        """Return the comparison of the gradients of all ranks' rows at one step."""
        _, _, actor, critic, dot, coef, rows = np.moveaxis(ranks, -1, 0)
        share = rows / rows.sum(axis=0)
        norms = [np.sqrt(np.square(share * norm).sum(axis=0)) for norm in (actor, critic)]
        together = [*norms, coef[0], (share**2 * dot).sum(axis=0)]
        values = compared(*(torch.from_numpy(np.ascontiguousarray(part)) for part in together))[cls.place].numpy()
        defined = np.isfinite(values)
        parts = (np.where(defined, values, 0.0), defined, norms[0], norms[1], together[3], coef[0], rows.sum(axis=0))
        return np.stack(parts, axis=-1)


@dataclass(frozen=True, slots=True)
class ShareOfCritic(Pull):
    """The critic's share of the squares."""

    place: ClassVar[int] = 1


@dataclass(frozen=True, slots=True)
class EffectivePull(Pull):
    """The actor's norm after clipping."""

    place: ClassVar[int] = 2


@dataclass(frozen=True, slots=True)
class Agreement(Pull):
    """The cosine."""

    place: ClassVar[int] = 3


@dataclass(frozen=True, slots=True)
class Interference(MetricGroup):
    """Sizes of the actor's and the critic's gradients, one value per optimizer step."""

    log_ratio: Mean | Pull | None = reports(
        Metric.quantity("grad/interference/log_ratio", 530, "critic's gradient over the actor's", unit="decades")
        .asks("How many powers of ten is the critic's gradient larger than the actor's?")
        .bounds(
            healthy="-1 to 1; about 1.6 at the start is normal",
            warn="robust z > 4, or > 1.5 sustained",
            critical="> 2",
            source="measured on a recurrent PPO",
        )
        .absent("either gradient is exactly zero or not finite")
    )
    critic_share: Mean | Pull | None = reports(
        Metric.fraction("grad/interference/critic_share", 531, "critic's share of the gradient")
        .asks("What share of the squared gradient comes from the critic, and so of the clip budget?")
        .bounds(healthy="< 0.95", warn="> 0.99", critical="> 0.9999", source="heuristic")
        .absent("both gradients are exactly zero, or one is not finite")
    )
    actor_effective: Mean | Pull | None = reports(
        Metric.gradient_norm("grad/interference/actor_effective", 532, "actor's gradient after clipping")
        .asks("How much of the actor's gradient is left after the clipping that the critic shares?")
        .bounds(healthy="near its own history", warn="robust z of its log10 < -4", source="heuristic")
        .absent("a gradient is not finite")
    )
    cos_feat: Mean | Pull | None = reports(
        Metric.cosine("grad/interference/cos_feat", 533, "agreement of actor and critic on the features")
        .asks("Do actor and critic ask the same of the trunk's output? Not the same as the parameters' cosine.")
        .absent("separate trunks, or either gradient is zero or not finite")
    )


@dataclass(frozen=True, slots=True)
class ParameterInterference(MetricGroup):
    """Agreement of the actor's and the critic's gradients of the shared parameters, on a sampled minibatch."""

    cos: Mean | None = reports(
        Metric.cosine(
            "grad/interference/cos", 534, "agreement of actor and critic on the shared parameters", cost="sampled"
        )
        .asks("Do actor and critic pull the shared parameters in the same direction? Judge its average only.")
        .bounds(
            healthy="EMA > -0.3",
            warn="EMA over at least 10 samples < -0.3",
            critical="EMA over at least 10 samples < -0.7",
            source="PCGrad 2001.06782; swings of ±0.5 between updates measured",
        )
        .absent("no shared parameters, or either gradient is zero or not finite")
    )
    cancel: Mean | None = reports(
        Metric.fraction("grad/interference/cancel", 535, "cancellation of actor and critic", cost="sampled")
        .asks("How much of the two gradients cancels out? 0 for parallel ones, 1 for opposite equals.")
        .bounds(healthy="< 0.8", warn="> 0.8", source="heuristic")
        .absent("no shared parameters, both gradients are zero, or one is not finite")
    )


class LeafGradients(NamedTuple):
    """Sizes of the gradients at the trunk's outputs.

    Attributes:
        actor, critic: [M] norms.
        dots: [M] inner products; None for separate trunks.
    """

    actor: Tensor
    critic: Tensor
    dots: Tensor | None


@checked_arguments()
def interference(
    actor: ArrayLike,
    critic: ArrayLike,
    *,
    coefs: ArrayLike = 1.0,
    dots: ArrayLike | None = None,
    counts: Sequence[int] | None = None,
) -> Interference:
    """Return the comparison of the sizes of the two gradients.

    Args:
        actor: [M] norm of the actor's gradient per optimizer step: at the trunk's output where it is shared, of the
            actor's parameters where networks are separate.
        critic: [M] the critic's likewise, its loss coefficient included.
        coefs: [M] clip coefficients; 1 where nothing is clipped.
        dots: [M] inner products of the two, for the cosine.
        counts: [M] rows over which each rank has taken its losses' means, where gradients are those of its own rows and several ranks
            report together; None where there is one, or the gradients are those of all.
    """
    actor = as_tensor(actor).double()
    critic, factor = as_tensor(critic, actor).double(), as_tensor(coefs, actor).double()
    dots = None if dots is None else as_tensor(dots, actor).double()
    same_shape(actor=actor, critic=critic, dots=dots, coefs=factor if factor.ndim else None)
    means = defined_together(*compared(actor, critic, factor, dots))
    if counts is None:
        return Interference(*means)
    rows = torch.tensor(counts, dtype=torch.float64, device=actor.device)
    parts = (actor, critic, actor * critic if dots is None else dots, factor, rows)
    kinds = zip((Pull, ShareOfCritic, EffectivePull, Agreement), means, strict=False)
    return Interference(*(kind(mean.total, mean.count, *parts) for kind, mean in kinds))


@no_grad
def leaf_gradients(actors: Sequence[Tensor], critics: Sequence[Tensor]) -> LeafGradients:
    """Return the sizes of the gradients at the trunk's outputs at M optimizer steps; each [N, F] of its minibatch."""
    norms = tensor_norms([*actors, *critics])
    shared = all(a.shape == c.shape for a, c in zip(actors, critics, strict=True))
    dots = torch.stack([_dot(a, c) for a, c in zip(actors, critics, strict=True)]) if shared else None
    return LeafGradients(norms[: len(actors)], norms[len(actors) :], dots)


@checked_arguments()
def leaf_interference(
    actors: Sequence[ArrayLike], critics: Sequence[ArrayLike], *, coefs: ArrayLike = 1.0, shared: bool = True
) -> Interference:
    """Return the `interference` of the gradients at the trunk's outputs at M optimizer steps.

    Args:
        actors: gradients of the actor's loss, [N, F] per step, N may differ.
        critics: gradients of the critic's loss.
        coefs: [M] clip coefficients; 1 where nothing is clipped.
        shared: both are gradients of one and the same output; otherwise there is no cosine.
    """
    of_actors, of_critics = as_floats(actors), as_floats(critics)
    if not of_actors or len(of_actors) != len(of_critics):
        raise ValueError(
            f"every step has a gradient of each, got {len(of_actors)} actors and {len(of_critics)} critics"
        )
    leaves = leaf_gradients(of_actors, of_critics)
    return interference(leaves.actor, leaves.critic, coefs=coefs, dots=leaves.dots if shared else None)


def group_interference(norms: GradientNorms, *, actor: str = "actor", critic: str = "critic") -> Interference:
    """Return the `interference` of two groups of parameters: for separate networks, which share only the clip limit.

    Args:
        norms: of all steps of an update, from `gradient_norms`.
        actor: label of the actor's group.
        critic: label of the critic's; without either of the two everything is absent.
    """
    labels, present = norms.groups.group, norms.groups.norm_preclip
    if present is None or actor not in labels or critic not in labels:
        return Interference()
    sizes = torch.where(torch.as_tensor(present.count) > 0, torch.as_tensor(present.total), torch.nan)
    of = {label: sizes[:, labels.index(label)] for label in (actor, critic)}
    return interference(of[actor], of[critic], coefs=coefficients(norms.clip))


@no_grad
def parameter_interference(actor: Sequence[Tensor], critic: Sequence[Tensor]) -> ParameterInterference:
    """Return cosine and cancellation of two gradients of the same parameters.

    Args:
        actor: gradient of the actor's loss with respect to each shared parameter.
        critic: of the critic's, its loss coefficient included.
    """
    if not actor:
        return ParameterInterference()
    a, c = (torch.cat([part.reshape(-1) for part in parts]).double() for parts in (actor, critic))
    size = torch.linalg.vector_norm
    return ParameterInterference(
        cos=defined(cosine(a, c)), cancel=defined((1.0 - size(a + c) / (size(a) + size(c))).clamp(min=0.0))
    )


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Return the cosine of two float64 vectors over the last axis; NaN where one is zero or not finite."""
    norms = torch.linalg.vector_norm(a, dim=-1) * torch.linalg.vector_norm(b, dim=-1)
    return torch.clamp((a * b).sum(-1) / norms, -1.0, 1.0)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Return the inner product in at least float32; one that leaves its range makes the cosine undefined."""
    dtype = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    a, b = a.to(dtype), b.to(dtype)
    return torch.dot(a.reshape(-1), b.reshape(-1))


@dataclass(frozen=True, slots=True)
class BonusNorm(AdditiveReduction):
    """A mean over optimizer steps of the norm √(Σ squares) / rows; the squares and the rows of several ranks add.

    Attributes:
        total, count: of the norm, over steps at which it is defined.
        squares: summed over the rows, times the square of the bonus's weight.
        rows: over which the mean entropy is.
    """

    total: Slot
    count: Slot
    squares: Slot
    rows: Slot

    statistics: ClassVar[Mapping[str, Statistic]] = {"mean": lambda s: s[0] / s[1] if s[1] else NAN}

    @classmethod
    def join(cls, ranks: Array) -> Array:
        """Return the norm over the rows of all ranks at one step."""
        squares, rows = ranks[..., 2].sum(axis=0), ranks[..., 3].sum(axis=0)
        norm = np.sqrt(squares) / np.maximum(rows, 1)
        defined = np.isfinite(norm) & (rows > 0)
        return np.stack([np.where(defined, norm, 0.0), defined, squares, rows], axis=-1)


@dataclass(frozen=True, slots=True)
class BonusGradient(MetricGroup):
    """Gradient of the entropy bonus, one value per optimizer step."""

    entropy: BonusNorm | None = reports(
        Metric.gradient_norm("grad/entropy/norm", 523, "gradient norm of the entropy bonus")
        .asks("How large is the gradient of the entropy bonus, where it enters the policy?")
        .bounds(healthy="near its own history")
        .absent("no entropy bonus, or no categorical head")
    )


@no_grad
def bonus_gradient(
    logits: Mapping[str, Tensor],
    *,
    entropy_coef: float,
    action_masks: Mapping[str, Tensor] | None = None,
    relevant: Mapping[str, Tensor] | None = None,
    valid: Tensor | None = None,
) -> BonusGradient:
    """Return the norm c ‖∂H/∂z‖ over the logits z of all heads, with H the mean over rows of the heads' entropies.

    Args:
        logits: per categorical head [M, N, A].
        entropy_coef: c, weight of the bonus; without one there is no gradient and nothing is reported.
        action_masks: per restricted head [M, N, A], bool.
        relevant: per head that is not always relevant [M, N], bool.
        valid: [M, N], bool; None where every row counts.
    """
    from esper_telemetry.core.tensors import mask_logits  # here, because that module imports torch

    if not logits or not entropy_coef > 0:
        return BonusGradient()
    masks, matters = action_masks or {}, relevant or {}
    squares = []
    for head, scores in logits.items():
        slope = entropy_slope(mask_logits(scores.double(), masks.get(head)))
        square = slope.square().sum(-1)
        flags = [flag for flag in (matters.get(head), valid) if flag is not None]
        squares.append(torch.where(torch.stack(flags).all(0), square, 0.0) if flags else square)
    rows = torch.full_like(squares[0][..., 0], squares[0].shape[-1]) if valid is None else valid.sum(-1)
    total = entropy_coef**2 * torch.stack(squares).sum((0, -1))
    norm = total.sqrt() / rows
    defined = torch.isfinite(norm)
    return BonusGradient(BonusNorm(torch.where(defined, norm, 0.0), defined, total, rows))
