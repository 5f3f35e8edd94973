"""Interference of actor and critic (PCGrad 2001.06782), gradients of a module compared with its host, and of the entropy bonus.

Each rank measures the gradients of its rows; the reductions of this module combine them into the gradients of all rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import ClassVar, NamedTuple

import numpy as np

from esper_telemetry.core.arrays import ArrayLike, as_floats, as_mask, as_tensor, as_tensors, by_head, masks_by_head
from esper_telemetry.core.group import MetricGroup
from esper_telemetry.core.lazy import Tensor, no_grad, torch
from esper_telemetry.core.metric import Metric, label, reports, segment
from esper_telemetry.core.record import Level
from esper_telemetry.core.reduction import Array, Mean, Slot
from esper_telemetry.core.requirements import checked_arguments
from esper_telemetry.metrics.gradients.gradient_health import tensor_norms
from esper_telemetry.metrics.gradients.norms import GradientNorms, coefficients
from esper_telemetry.metrics.losses import entropy_slope
from esper_telemetry.metrics.statistics import defined, defined_together, same_shape

MAX_COMPARED_HEADS = 8
"""Maximum number of heads that are compared (28 pairs). Each takes a backward pass through the trunk."""


@dataclass(frozen=True, slots=True)
class PairGradients(MetricGroup):
    """Gradients of a module and its host, one value per optimizer step; `history` derives their ratio and its cause."""

    pair: str = label()
    connected: Mean | float | None = reports(
        Metric.fraction("grad/pair/{pair}/connected", 571, "whether the loss reaches a module")
        .asks("Does the loss reach this module? Below 1: detached, frozen, or not in use.")
        .bounds(healthy="1", critical="0", source="a missing gradient is not a small gradient")
        .advises("Look for detach(), no_grad or requires_grad=False between the module and the loss.")
    )
    intensity: Mean | None = reports(
        Metric.magnitude("grad/pair/{pair}/intensity", 572, "intensity of a module's gradient", unit="gradient norm/√parameters")
        .asks("How large is a typical entry of this module's gradient?")
        .absent("the module's gradient is missing or not finite")
    )
    host_intensity: Mean | None = reports(
        Metric.magnitude("grad/pair/{pair}/host_intensity", 573, "intensity of the host's gradient", unit="gradient norm/√parameters")
        .asks("How large is a typical entry of the gradient of the network that hosts this module?")
        .absent("the host's gradient is missing or not finite")
    )
    upstream: Mean | None = reports(
        Metric.gradient_norm("grad/pair/{pair}/upstream", 574, "gradient that arrives at a module")
        .asks("How strong is the gradient that arrives at this module's output? Exactly 0: it is gated off.")
        .absent("the gradient there is missing or not finite")
    )
    zero_frac: Mean | None = reports(
        Metric.fraction("grad/pair/{pair}/zero_frac", 575, "share of zeros in a module's gradient")
        .asks("What share of this module's gradient is exactly zero?")
        .bounds(healthy="< 0.3", warn="> 0.9: the module is saturated", source="heuristic")
        .absent("the module's gradient is missing")
        .advises("Look for dead units inside the module and for a closed gate in front of it.")
    )


@no_grad
def pair_gradients(
    pair: str, module: Sequence[Tensor], host: Sequence[Tensor], *, norms: tuple[Tensor, Tensor], upstream: Tensor | None
) -> PairGradients:
    """Return the gradients of a module and its host at one optimizer step.

    Args:
        pair: name of the pair.
        module: existing gradients of the module's parameters.
        host: existing gradients of the host's parameters.
        norms: [K] of the module's gradients and [K'] of the host's.
        upstream: 0-d, norm of the gradient at the module's output; None if none arrived.
    """
    entries, host_entries = (sum(gradient.numel() for gradient in gradients) for gradients in (module, host))
    own, hosts = (
        defined(parts.double().norm() / count**0.5) if count else None for parts, count in zip(norms, (entries, host_entries), strict=True)
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
    """Return log10 of critic over actor, the critic's share of the squares, the clipped actor, and, if `dots` is given, the cosine.

    Args:
        actor, critic: norms [M], float64.
        coefs: clip coefficients [M], or one.
        dots: inner products [M], float64.
    """
    square = critic.square()
    values = [(critic / actor).log10(), square / (square + actor.square()), actor * coefs]
    return values if dots is None else [*values, (dots / (actor * critic)).clamp(-1.0, 1.0)]


@dataclass(frozen=True, slots=True)
class Pull(Mean):
    """Mean over optimizer steps of a comparison of the actor's and the critic's gradient, here log10 of critic over actor.

    The loss of all rows is the mean of the ranks' losses weighted by their rows. So each rank's gradient counts with its share of the rows;
    the squared norms of different rows add up, and so do the inner products.

    Attributes:
        total, count: sum and number of the results, over steps at which they are defined.
        actor, critic: norms.
        dot: inner product.
        coef: clip coefficient.
        rows: number of rows that the losses are averaged over.
    """

    actor: Slot
    critic: Slot
    dot: Slot
    coef: Slot
    rows: Slot

    place: ClassVar[int] = 0

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
    """The critic's share of the squared gradient."""

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
        .asks("How much of the actor's gradient is left after the clipping that it shares with the critic?")
        .bounds(healthy="near its own history", warn="robust z of its log10 < -4", source="heuristic")
        .absent("a gradient is not finite")
    )
    cos_feat: Mean | Pull | None = reports(
        Metric.cosine("grad/interference/cos_feat", 533, "agreement of actor and critic on the features")
        .asks("Do actor and critic pull the trunk's output in the same direction? Not the same as the parameters' cosine.")
        .absent("separate trunks, or either gradient is zero or not finite")
    )


@dataclass(frozen=True, slots=True)
class ParameterInterference(MetricGroup, cost="sampled"):
    """Agreement of the actor's and the critic's gradients of the shared parameters, on a sampled minibatch."""

    cos: Mean | None = reports(
        Metric.cosine("grad/interference/cos", 534, "agreement of actor and critic on the shared parameters")
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
        Metric.fraction("grad/interference/cancel", 535, "cancellation of actor and critic")
        .asks("How much of the two gradients cancels out? 0 for parallel gradients, 1 for equal and opposite ones.")
        .bounds(healthy="< 0.8", warn="> 0.8", source="heuristic")
        .absent("no shared parameters, both gradients are zero, or one is not finite")
    )


@dataclass(frozen=True, slots=True)
class LayerInterference(MetricGroup):
    """Agreement of the actor's and the critic's gradients of every parameter tensor that they share, on a sampled minibatch."""

    layer: tuple[str, ...] = label()
    cos: Mean | None = reports(
        Metric.cosine(
            "grad/layer/{layer}/interference_cos", 526, "agreement of actor and critic on a layer", level=Level.DEBUG, cost="debug"
        )
        .asks("In which layer do actor and critic pull in opposite directions? Judge its average only.")
        .bounds(healthy="> -0.3", warn="< -0.7", source="as grad/interference/cos; chance level 0 ± 1/√(entries of the tensor)")
        .absent("actor and critic do not share this tensor, or either gradient is zero or not finite")
        .advises("Separate the networks of actor and critic from this layer on, or lower value_coef.")
    )


@dataclass(frozen=True, slots=True)
class HeadPairs(MetricGroup):
    """Agreement of the gradients of two heads of the policy on the parameters that they share, on a sampled minibatch."""

    pair: tuple[str, ...] = label()
    cos: Mean | None = reports(
        Metric.cosine("grad/heads/{pair}/cos", 536, "agreement of two heads", level=Level.DEBUG, cost="debug")
        .asks("Do two heads of the policy pull the parameters that they share in the same direction? Judge its average only.")
        .bounds(
            healthy="> -0.3", warn="< -0.7", source="conflict is a negative cosine (PCGrad 2001.06782); bounds as grad/interference/cos"
        )
        .absent(
            f"the policy has one head, the source does not separate the heads, or a gradient is zero or not finite; only the first "
            f"{MAX_COMPARED_HEADS} heads are compared"
        )
        .advises("Give each head a hidden layer, or widen the trunk.")
    )


@dataclass(frozen=True, slots=True)
class LayerHeads(MetricGroup):
    """Worst agreement of two heads on every parameter tensor that they share, on a sampled minibatch."""

    layer: tuple[str, ...] = label()
    cos: Mean | None = reports(
        Metric.cosine("grad/layer/{layer}/heads_cos", 527, "worst agreement of two heads on a layer", level=Level.DEBUG, cost="debug")
        .asks("In which layer do two heads of the policy pull in opposite directions? The smallest cosine of any two heads.")
        .bounds(healthy="> -0.3", warn="< -0.7", source="as grad/heads/{pair}/cos; the smallest of many cosines is below 0 by chance")
        .absent("fewer than two heads have a gradient in this tensor that is finite and not zero")
        .advises("Separate the heads from this layer on, or widen the trunk.")
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
    actor: ArrayLike, critic: ArrayLike, *, coefs: ArrayLike = 1.0, dots: ArrayLike | None = None, counts: Sequence[int] | None = None
) -> Interference:
    """Return the comparison of the sizes of the two gradients.

    Args:
        actor: [M] norm of the actor's gradient per optimizer step: at the output of a shared trunk, or of the
            actor's parameters for separate networks.
        critic: [M] norm of the critic's gradient, its loss coefficient included.
        coefs: [M] clip coefficients; 1 if nothing is clipped.
        dots: [M] inner products of the two, for the cosine.
        counts: [M] number of rows that this rank has averaged its losses over, if several ranks report together and each has gradients of
            its own rows; None for one rank, or if the gradients already cover all rows.
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
        coefs: [M] clip coefficients; 1 if nothing is clipped.
        shared: whether both are gradients of the same output; the cosine needs this.
    """
    of_actors, of_critics = as_floats(actors), as_floats(critics)
    if not of_actors or len(of_actors) != len(of_critics):
        raise ValueError(f"every step needs one gradient of each, got {len(of_actors)} actors and {len(of_critics)} critics")
    leaves = leaf_gradients(of_actors, of_critics)
    return interference(leaves.actor, leaves.critic, coefs=coefs, dots=leaves.dots if shared else None)


def group_interference(norms: GradientNorms, *, actor: str = "actor", critic: str = "critic") -> Interference:
    """Return the `interference` of two groups of parameters: for separate networks, which share only the clip limit.

    Args:
        norms: norms of all steps of an update, from `gradient_norms`.
        actor: label of the actor's group.
        critic: label of the critic's group; if either group is missing, everything is absent.
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
        critic: gradient of the critic's loss, its coefficient included.
    """
    if not actor:
        return ParameterInterference()
    a, c = (torch.cat([part.reshape(-1) for part in parts]).double() for parts in (actor, critic))
    size = torch.linalg.vector_norm
    return ParameterInterference(cos=defined(cosine(a, c)), cancel=defined((1.0 - size(a + c) / (size(a) + size(c))).clamp(min=0.0)))


@checked_arguments()
@no_grad
def layer_interference(actor: Sequence[ArrayLike], critic: Sequence[ArrayLike], names: Sequence[str]) -> LayerInterference:
    """Return the cosine of the actor's and the critic's gradients of each shared parameter.

    Args:
        actor: gradient of the actor's loss with respect to each of K shared parameters.
        critic: gradient of the critic's loss, its coefficient included.
        names: names of the K parameters.
    """
    if not names:
        return LayerInterference(())
    cosines = _cosines(_vectors(actor, names), _vectors(critic, names))
    return LayerInterference(tuple(map(segment, names)), defined(cosines[None]))


class HeadGroups(NamedTuple):
    """The groups of the agreement of heads."""

    pairs: HeadPairs
    layers: LayerHeads


@checked_arguments()
@no_grad
def head_interference(heads: Mapping[str, Sequence[ArrayLike]], names: Sequence[str]) -> HeadGroups:
    """Return the cosines of the gradients of all pairs of heads: over all shared parameters, and the smallest one per parameter.

    Args:
        heads: per head, the gradient of the actor's loss through it, with respect to each of K shared parameters.
        names: names of the K parameters.
    """
    compared_heads = list(heads)[:MAX_COMPARED_HEADS]
    if len(compared_heads) < 2 or not names:
        return HeadGroups(HeadPairs(()), LayerHeads(()))
    parts = [_vectors(heads[head], names) for head in compared_heads]
    places = list(combinations(range(len(parts)), 2))
    whole = [torch.cat(own) for own in parts]
    by_layer = torch.stack([_cosines(parts[one], parts[other]) for one, other in places])
    pairs = torch.stack([cosine(whole[one], whole[other]) for one, other in places])
    worst = torch.where(torch.isnan(by_layer), torch.inf, by_layer).min(0).values
    labels = [f"{compared_heads[one]}_vs_{compared_heads[other]}" for one, other in places]
    return HeadGroups(
        HeadPairs(tuple(map(segment, labels)), defined(pairs[None])), LayerHeads(tuple(map(segment, names)), defined(worst[None]))
    )


def _vectors(gradients: Sequence[ArrayLike], names: Sequence[str]) -> list[Tensor]:
    """Return the gradient of each named parameter as a vector."""
    vectors = [gradient.detach().reshape(-1).double() for gradient in as_tensors(gradients)]
    if len(vectors) != len(names):
        raise ValueError(f"gradients of {len(vectors)} parameters need as many names, got {len(names)}")
    return vectors


def _cosines(some: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
    """Return the cosine of each pair of vectors, [K]."""
    for one, other in zip(some, others, strict=True):
        same_shape(one=one, other=other)
    return torch.stack([cosine(*pair) for pair in zip(some, others, strict=True)])


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Return the cosine of two float64 vectors over the last axis; NaN if one is zero or not finite."""
    norms = torch.linalg.vector_norm(a, dim=-1) * torch.linalg.vector_norm(b, dim=-1)
    return torch.clamp((a * b).sum(-1) / norms, -1.0, 1.0)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Return the inner product in at least float32; if it exceeds that range, the cosine is undefined."""
    dtype = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    a, b = a.to(dtype), b.to(dtype)
    return torch.dot(a.reshape(-1), b.reshape(-1))


@dataclass(frozen=True, slots=True)
class BonusNorm(Mean):
    """A mean over optimizer steps of the norm √(Σ squares) / rows; the squares and the rows of several ranks add up.

    Attributes:
        total, count: sum and number of the norms, over steps at which they are defined.
        squares: summed over the rows, times the square of the bonus's weight.
        rows: number of rows that the entropy is averaged over.
    """

    squares: Slot
    rows: Slot

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
        .asks("How large is the gradient of the entropy bonus at the outputs of the policy: logits, log standard deviations?")
        .bounds(
            healthy="near its own history; c √(dimensions / rows) for Gaussian heads, independent of their outputs",
            source="∂H/∂z of a row is -p (ln p + H) for logits z, and 1 for each log standard deviation",
        )
        .absent("there is no entropy bonus, its weight or the policy's distributions are unknown, or actions are squashed")
    )


@checked_arguments()
@no_grad
def bonus_gradient(
    logits: Mapping[str, ArrayLike],
    *,
    entropy_coef: float,
    log_std: Mapping[str, ArrayLike] | None = None,
    action_masks: Mapping[str, ArrayLike] | None = None,
    relevant: Mapping[str, ArrayLike] | None = None,
    valid: ArrayLike | None = None,
) -> BonusGradient:
    """Return the norm c ‖∂H/∂z‖ over the outputs z of all heads, with H the mean over rows of the heads' entropies.

    The outputs are logits and, for each row, the logarithms of its standard deviations, even if all rows share them.

    Args:
        logits: per categorical head [M, N, A], or [N, A] for one minibatch.
        entropy_coef: c, weight of the bonus; if it is 0, nothing is reported.
        log_std: per Gaussian head [M, N, D] or [N, D].
        action_masks: per restricted head, as `logits`, bool.
        relevant: per head that is not always relevant [M, N] or [N], bool.
        valid: [M, N] or [N], bool; None if every row counts.
    """
    from esper_telemetry.core.tensors import mask_logits  # imported here, because that module imports torch

    if not entropy_coef > 0:
        return BonusGradient()
    masks, matters, counted = masks_by_head(action_masks), masks_by_head(relevant), as_mask(valid)
    squares: dict[str, Tensor] = {}
    for head, z in by_head(logits).items():
        squares[head] = entropy_slope(mask_logits(z.double(), masks.get(head))).square().sum(-1)
    for head, z in by_head(log_std).items():
        squares[head] = z.new_full(z.shape[:-1], z.shape[-1], dtype=torch.float64)
    if not squares:
        return BonusGradient()
    named = [("rows of", squares), ("relevant", matters)]
    same_shape(**{f"{name} {head}": rows for name, heads in named for head, rows in heads.items()}, valid=counted)
    parts = []
    for head, square in squares.items():
        flags = [flag for flag in (matters.get(head), counted) if flag is not None]
        parts.append(torch.where(torch.stack(flags).all(0), square, 0.0) if flags else square)
    rows = torch.full_like(parts[0][..., 0], parts[0].shape[-1]) if counted is None else counted.sum(-1)
    total = entropy_coef**2 * torch.stack(parts).sum((0, -1))
    mean = defined(total.sqrt() / rows)
    return BonusGradient(BonusNorm(mean.total, mean.count, total, rows))
