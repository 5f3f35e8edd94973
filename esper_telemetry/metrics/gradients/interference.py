"""Do actor and critic pull the shared network in the same direction, and with what force? (G5; PCGrad 2001.06782)"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from esper_telemetry.conversion import ArrayLike, as_tensor, as_tensors
from esper_telemetry.group import Mean, Metric, MetricGroup, reports
from esper_telemetry.metrics.defined import defined, defined_together
from esper_telemetry.metrics.gradients.clipping import coefficients
from esper_telemetry.metrics.gradients.health import tensor_norms
from esper_telemetry.metrics.gradients.norms import GradientNorms
from esper_telemetry.metrics.gradients.pull import Agreement, EffectivePull, Pull, ShareOfCritic, compared
from esper_telemetry.metrics.masking import same_shape


@dataclass(frozen=True, slots=True)
class Interference(MetricGroup):
    """Sizes of the actor's and the critic's gradients, one value per optimizer step."""

    log_ratio: Mean | Pull | None = reports(
        Metric(
            key="grad/interference/log_ratio",
            number=530,
            unit="decades",
            question="How many powers of ten is the critic's gradient larger than the actor's?",
            healthy="-1 to 1; about 1.6 at the start is normal",
            warn="robust z > 4, or > 1.5 sustained",
            critical="> 2",
            source="measured on a recurrent PPO",
            undefined="either gradient is exactly zero or not finite",
        )
    )
    critic_share: Mean | Pull | None = reports(
        Metric(
            key="grad/interference/critic_share",
            number=531,
            unit="fraction",
            question="What share of the squared gradient comes from the critic, and so of the clip budget?",
            low=0.0,
            high=1.0,
            healthy="< 0.95",
            warn="> 0.99",
            critical="> 0.9999",
            source="heuristic",
            undefined="both gradients are exactly zero, or one is not finite",
        )
    )
    actor_effective: Mean | Pull | None = reports(
        Metric(
            key="grad/interference/actor_effective",
            number=532,
            unit="gradient norm",
            question="How much of the actor's gradient is left after the clipping that the critic shares?",
            low=0.0,
            healthy="near its own history",
            warn="robust z of its log10 < -4",
            source="heuristic",
            undefined="a gradient is not finite",
        )
    )
    cos_feat: Mean | Pull | None = reports(
        Metric(
            key="grad/interference/cos_feat",
            number=533,
            unit="cosine",
            question="Do actor and critic ask the same of the trunk's output? Not the same as the parameters' cosine.",
            low=-1.0,
            high=1.0,
            undefined="separate trunks, or either gradient is zero or not finite",
        )
    )


@dataclass(frozen=True, slots=True)
class ParameterInterference(MetricGroup):
    """Agreement of the actor's and the critic's gradients of the shared parameters, on a sampled minibatch."""

    cos: Mean | None = reports(
        Metric(
            key="grad/interference/cos",
            number=534,
            unit="cosine",
            question="Do actor and critic pull the shared parameters in the same direction? Judge its average only.",
            low=-1.0,
            high=1.0,
            cost="sampled",
            healthy="EMA > -0.3",
            warn="EMA over at least 10 samples < -0.3",
            critical="EMA over at least 10 samples < -0.7",
            source="PCGrad 2001.06782; swings of ±0.5 between updates measured",
            undefined="no shared parameters, or either gradient is zero or not finite",
        )
    )
    cancel: Mean | None = reports(
        Metric(
            key="grad/interference/cancel",
            number=535,
            unit="fraction",
            question="How much of the two gradients cancels out? 0 for parallel ones, 1 for opposite equals.",
            low=0.0,
            high=1.0,
            cost="sampled",
            healthy="< 0.8",
            warn="> 0.8",
            source="heuristic",
            undefined="no shared parameters, both gradients are zero, or one is not finite",
        )
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


def interference(
    actor: ArrayLike,
    critic: ArrayLike,
    *,
    coefs: ArrayLike = 1.0,
    dots: ArrayLike | None = None,
    counts: Sequence[int] | None = None,
) -> Interference:
    """How the sizes of the two gradients compare.

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


@torch.no_grad()
def leaf_gradients(actors: Sequence[Tensor], critics: Sequence[Tensor]) -> LeafGradients:
    """Sizes of the gradients at the trunk's outputs at M optimizer steps; each [N, F] of its minibatch."""
    norms = tensor_norms([*actors, *critics])
    shared = all(a.shape == c.shape for a, c in zip(actors, critics, strict=True))
    dots = torch.stack([_dot(a, c) for a, c in zip(actors, critics, strict=True)]) if shared else None
    return LeafGradients(norms[: len(actors)], norms[len(actors) :], dots)


def leaf_interference(
    actors: Sequence[ArrayLike], critics: Sequence[ArrayLike], *, coefs: ArrayLike = 1.0, shared: bool = True
) -> Interference:
    """`interference` of the gradients at the trunk's outputs at M optimizer steps.

    Args:
        actors: gradients of the actor's loss, [N, F] per step, N may differ.
        critics: gradients of the critic's loss.
        coefs: [M] clip coefficients; 1 where nothing is clipped.
        shared: both are gradients of one and the same output; otherwise there is no cosine.
    """
    of_actors, of_critics = as_tensors(actors), as_tensors(critics)
    if not of_actors or len(of_actors) != len(of_critics):
        raise ValueError(
            f"every step has a gradient of each, got {len(of_actors)} actors and {len(of_critics)} critics"
        )
    leaves = leaf_gradients(of_actors, of_critics)
    return interference(leaves.actor, leaves.critic, coefs=coefs, dots=leaves.dots if shared else None)


def group_interference(norms: GradientNorms, *, actor: str = "actor", critic: str = "critic") -> Interference:
    """`interference` of two groups of parameters: for separate networks, which share nothing but the clip limit.

    Args:
        norms: of all steps of an update, from `gradient_norms`.
        actor: label of the actor's group.
        critic: label of the critic's; without either of the two everything is absent.
    """
    labels, found = norms.groups.group, norms.groups.norm_preclip
    if found is None or actor not in labels or critic not in labels:
        return Interference()
    sizes = torch.where(torch.as_tensor(found.count) > 0, torch.as_tensor(found.total), torch.nan)
    of = {label: sizes[:, labels.index(label)] for label in (actor, critic)}
    return interference(of[actor], of[critic], coefs=coefficients(norms.clip))


@torch.no_grad()
def parameter_interference(actor: Sequence[Tensor], critic: Sequence[Tensor]) -> ParameterInterference:
    """Cosine and cancellation of two gradients of the same parameters.

    Args:
        actor: gradient of the actor's loss with respect to each shared parameter.
        critic: of the critic's, its loss coefficient included.
    """
    if not actor:
        return ParameterInterference()
    a, c = (torch.cat([part.reshape(-1) for part in parts]).double() for parts in (actor, critic))
    size = torch.linalg.vector_norm
    return ParameterInterference(
        cos=defined(cosine(a, c)),
        cancel=defined((1.0 - size(a + c) / (size(a) + size(c))).clamp(min=0.0)),
    )


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Cosine of two float64 vectors over the last axis; NaN where one is zero or not finite."""
    norms = torch.linalg.vector_norm(a, dim=-1) * torch.linalg.vector_norm(b, dim=-1)
    return torch.clamp((a * b).sum(-1) / norms, -1.0, 1.0)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Inner product in at least float32; one that leaves its range makes the cosine undefined."""
    if a.dtype.itemsize < 4:
        a, b = a.float(), b.float()
    return torch.dot(a.reshape(-1), b.reshape(-1))
