"""How strongly a module learns next to the network that hosts it, and what reaches it (G13)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from esper_telemetry.group import Mean, Metric, MetricGroup, label, reports
from esper_telemetry.metrics.defined import defined


@dataclass(frozen=True, slots=True)
class PairGradients(MetricGroup):
    """A module beside its host, one value per optimizer step; `series` makes the ratio and its cause of them."""

    pair: str = label()
    connected: Mean | float | None = reports(
        Metric(
            key="grad/pair/{pair}/connected",
            number=571,
            unit="fraction",
            question="Does the loss reach this module at all? Below 1: detached, frozen, or not in use.",
            low=0.0,
            high=1.0,
            healthy="1",
            critical="0",
            source="no gradient is no small gradient",
        )
    )
    intensity: Mean | None = reports(
        Metric(
            key="grad/pair/{pair}/intensity",
            number=572,
            unit="gradient norm/√parameters",
            question="How large is a typical entry of this module's gradient?",
            low=0.0,
            undefined="the module has no gradient, or one that is not finite",
        )
    )
    host_intensity: Mean | None = reports(
        Metric(
            key="grad/pair/{pair}/host_intensity",
            number=573,
            unit="gradient norm/√parameters",
            question="How large is a typical entry of the gradient of the network that hosts this module?",
            low=0.0,
            undefined="the host has no gradient, or one that is not finite",
        )
    )
    upstream: Mean | None = reports(
        Metric(
            key="grad/pair/{pair}/upstream",
            number=574,
            unit="gradient norm",
            question="How strong is the gradient that arrives at this module's output? Exactly 0: it is gated off.",
            low=0.0,
            undefined="no gradient arrives there, or one that is not finite",
        )
    )
    zero_frac: Mean | None = reports(
        Metric(
            key="grad/pair/{pair}/zero_frac",
            number=575,
            unit="fraction",
            question="What share of this module's gradient is exactly zero?",
            low=0.0,
            high=1.0,
            healthy="< 0.3",
            warn="> 0.9: the module is saturated",
            source="heuristic",
            undefined="the module has no gradient",
        )
    )


@torch.no_grad()
def pair_gradients(
    pair: str,
    module: Sequence[Tensor],
    host: Sequence[Tensor],
    *,
    norms: tuple[Tensor, Tensor],
    upstream: Tensor | None,
) -> PairGradients:
    """One optimizer step of a module and its host.

    Args:
        pair: name of the pair.
        module: gradients of the module's parameters, as far as they exist.
        host: those of the host's parameters.
        norms: [K] of the module's gradients and [K'] of the host's.
        upstream: 0-d, norm of the gradient at the module's output; None where none arrived.
    """
    own, hosts = (_intensity(parts, sizes) for parts, sizes in zip(norms, (module, host), strict=True))
    return PairGradients(
        pair,
        connected=float(bool(module) and upstream is not None),
        intensity=own,
        host_intensity=hosts,
        upstream=None if upstream is None else defined(upstream.double()),
        zero_frac=_zeros(module),
    )


def _intensity(norms: Tensor, gradients: Sequence[Tensor]) -> Mean | None:
    entries = sum(gradient.numel() for gradient in gradients)
    return defined(norms.double().norm() / entries**0.5) if entries else None


def _zeros(gradients: Sequence[Tensor]) -> Mean | None:
    if not gradients:
        return None
    entries = sum(gradient.numel() for gradient in gradients)
    filled = torch.stack([torch.count_nonzero(gradient) for gradient in gradients]).sum()
    return Mean(entries - filled, float(entries))
