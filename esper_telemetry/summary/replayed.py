"""What it says of an update that the policy was shown its rollout once more, before and after."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from torch import Tensor

from esper_telemetry.group import MetricGroup
from esper_telemetry.metrics.actions import greedy_agreement
from esper_telemetry.metrics.exact_kl import categorical_kl, gaussian_kl, kl_after_update
from esper_telemetry.metrics.lstm import bptt_stats, first_staleness, memory_use, state_staleness
from esper_telemetry.metrics.representation import (
    capacity_loss,
    feature_drift,
    feature_norm,
    layer_responses,
    unit_activity,
)
from esper_telemetry.policy_replay import Activations, Copy, Outputs, Replay
from esper_telemetry.record import Level
from esper_telemetry.summary.containment import Measurement

MOST_ROWS = 512
"""Transitions whose features are compared."""


def before_update(stored: Outputs, now: Outputs) -> Iterator[Measurement]:
    """Whether training begins where acting was: `stored` is what was acted on, `now` what the same weights say in training."""
    if stored.memory is not None and now.memory is not None:
        yield partial(first_staleness, stored.memory, now.memory)


def responses(activations: Activations, level: Level) -> Iterator[Measurement]:
    """Units of single layers, and the size of the features before the last nonlinearity; at DEBUG how layers respond."""
    if activations.layers:
        yield partial(_units, activations.layers)
        if level >= Level.DEBUG:
            yield partial(layer_responses, activations.layers)
    if activations.last is not None:
        yield partial(feature_norm, activations.last)


def _units(layers: Mapping[str, Tensor]) -> MetricGroup:
    """Of each layer."""
    return unit_activity(layers).layers


def after_update(stored: Outputs, before: Outputs, now: Outputs) -> Iterator[Measurement]:
    """How far an update went in the end: from what was acted on, and from what the policy said before it."""
    yield lambda: kl_after_update(kl_rows(stored, now), relevant=now.relevance)
    if now.logits:
        yield partial(greedy_agreement, stored.logits, now.logits, relevant=now.relevance)
    if before.features is not None and now.features is not None:
        some = slice(None, None, max(1, len(now.features) // MOST_ROWS))
        yield partial(feature_drift, before.features[some], now.features[some])
    if stored.memory is not None and now.memory is not None:
        yield partial(state_staleness, stored.memory, now.memory)


def through_time(policy: Replay) -> Iterator[Measurement]:
    """Gradients at the states of a recurrent policy, and what it would do without memory."""
    gradients = policy.state_gradients()
    if gradients is not None:
        yield partial(bptt_stats, gradients.first, gradients.last)
    without = policy.without_memory()
    if without is not None:
        yield partial(memory_use, kl_rows(policy.stored_part(), without), relevant=without.relevance)


def capacity(copy: Copy) -> Iterator[Measurement]:
    """Whether a copy of the network can still learn."""
    if copy.parameters:
        yield partial(capacity_loss, copy.network, copy.parameters, copy.observations)


def kl_rows(old: Outputs, new: Outputs) -> Mapping[str, Tensor]:
    """KL(old‖new) of every head in every transition, [N] each."""
    rows = {head: categorical_kl(old.logits[head], logits) for head, logits in new.logits.items()}
    for head, means in new.means.items():
        stds = (side.log_std[head].expand_as(means) for side in (old, new))
        old_std, new_std = stds
        rows[head] = gaussian_kl(old.means[head], old_std, means, new_std)
    return rows
