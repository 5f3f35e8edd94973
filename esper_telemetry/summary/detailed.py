"""What is measured of minibatches only where their details are kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from esper_telemetry.metrics.entropy_gradient import entropy_gradients
from esper_telemetry.metrics.exact_kl import categorical_kl, exact_kl, gaussian_kl, head_exact_kl
from esper_telemetry.metrics.values import value_movement
from esper_telemetry.summary.containment import Measurement
from esper_telemetry.summary.snapshot import Details, Minibatches


def detailed(
    minibatches: Minibatches, facts: Mapping[str, Any], coefficients: Mapping[str, float]
) -> Iterator[Measurement]:
    """How far the critic moved, how far the policy moved over all actions, and whether the entropy bonus steers it."""
    details, valid, relevant = minibatches.details, minibatches.valid, minibatches.relevance
    if details is None:
        return
    critic = (details.values, details.old_values, details.returns)
    yield partial(value_movement, *critic, clip=facts.get("clip_value"), valid=valid, dim=-1)
    rows = _kl_rows(minibatches, details)
    if rows:
        yield partial(exact_kl, rows, relevant=relevant, valid=valid, dim=-1)
        yield partial(head_exact_kl, rows, relevant=relevant, valid=valid, dim=-1)
    if details.actions:
        yield from _entropy_gradient(minibatches, details.actions, facts, coefficients)


def _kl_rows(minibatches: Minibatches, details: Details) -> dict[str, Tensor]:
    """KL(old‖new) of every head whose old distribution is known, [M, N] each."""
    rows = {head: categorical_kl(old, minibatches.logits[head]) for head, old in details.old_logits.items()}
    for head, old_std in details.old_log_std.items():
        rows[head] = gaussian_kl(details.old_means[head], old_std, details.means[head], minibatches.log_std[head])
    return rows


def _entropy_gradient(
    minibatches: Minibatches, actions: Mapping[str, Tensor], facts: Mapping[str, Any], coefficients: Mapping[str, float]
) -> Iterator[Measurement]:
    clip, coefficient = facts.get("clip"), coefficients.get("entropy", facts.get("entropy_coef"))
    if clip is not None and coefficient is not None:
        yield partial(
            entropy_gradients,
            minibatches.logits,
            actions,
            minibatches.log_ratio,
            minibatches.advantages,
            clip=clip,
            entropy_coef=coefficient,
            relevant=minibatches.relevance,
            valid=minibatches.valid,
        )
