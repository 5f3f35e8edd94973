"""The backward passes of an update, stacked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from esper_telemetry.events import BackwardEnd
from esper_telemetry.metrics.gradients import leaf_gradients
from esper_telemetry.summary import Gradients, Leaves


class Leaf(NamedTuple):
    """Gradients [N, F] of the actor's and of the critic's loss at the trunk output that both use."""

    actor: Tensor
    critic: Tensor


def gradient_parts(backwards: Sequence[BackwardEnd], leaves: Sequence[Leaf]) -> tuple[Gradients, ...]:
    """All passes, those with gradients in the same parameters together: a frozen part of the network makes another one."""
    found: dict[tuple[str, ...], list[BackwardEnd]] = {}
    for event in backwards:
        found.setdefault(event.names, []).append(event)
    return tuple(_stacked(events, leaves if len(found) == 1 else ()) for names, events in found.items() if names)


def _stacked(events: Sequence[BackwardEnd], leaves: Sequence[Leaf]) -> Gradients:
    first = events[0]
    return Gradients(
        epochs=tuple([event.epoch for event in events]),
        names=first.names,
        numels=tuple([first.parameters[name].numel() for name in first.names]),
        norms=torch.stack([event.norms for event in events]),
        max_norm=first.max_norm,
        leaves=_leaves(leaves) if len(leaves) == len(events) else None,
    )


def _leaves(leaves: Sequence[Leaf]) -> Leaves:
    found = leaf_gradients([leaf.actor for leaf in leaves], [leaf.critic for leaf in leaves])
    return Leaves(found.actor, found.critic, found.dots)
