"""The backward passes of an update, stacked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from esper_telemetry.events import BackwardEnd, BackwardsEnd
from esper_telemetry.metrics.gradients import leaf_gradients
from esper_telemetry.summary import Gradients, Leaves


class Leaf(NamedTuple):
    """Gradients [N, F] of the actor's and of the critic's loss at the trunk output that both use."""

    actor: Tensor
    critic: Tensor


def joined(backwards: Sequence[BackwardEnd]) -> BackwardsEnd:
    """All passes of a source that tells of each alone; at least one."""
    epochs, _, _, names, norms, _, heads = zip(*backwards, strict=True)
    return BackwardsEnd(epochs, names, norms, backwards[-1].parameters, backwards[-1].max_norm, heads)


def gradient_parts(backwards: BackwardsEnd, leaves: Sequence[Leaf]) -> tuple[Gradients, ...]:
    """All passes, those with gradients in the same parameters together: a frozen part of the network makes another one."""
    kinds = dict.fromkeys(backwards.names)
    whole = len(kinds) == 1 and len(leaves) == len(backwards.epochs)
    return tuple([_stacked(backwards, names, leaves if whole else ()) for names in kinds if names])


def _stacked(backwards: BackwardsEnd, names: tuple[str, ...], leaves: Sequence[Leaf]) -> Gradients:
    """Those that have gradients in the parameters of these names."""
    places = [place for place, found in enumerate(backwards.names) if found == names]
    return Gradients(
        epochs=tuple([backwards.epochs[place] for place in places]),
        names=names,
        numels=tuple([backwards.parameters[name].numel() for name in names]),
        norms=torch.stack([backwards.norms[place] for place in places]),
        max_norm=backwards.max_norm,
        leaves=_leaves(leaves) if leaves else None,
        heads=_heads([backwards.heads[place] for place in places]) if backwards.heads else None,
    )


def _heads(norms: Sequence[Tensor | None]) -> Tensor | None:
    """[M, H]; None where a pass does not say."""
    known = [own for own in norms if own is not None]
    return torch.stack(known) if known and len(known) == len(norms) else None


def _leaves(leaves: Sequence[Leaf]) -> Leaves:
    found = leaf_gradients([leaf.actor for leaf in leaves], [leaf.critic for leaf in leaves])
    return Leaves(found.actor, found.critic, found.dots)
