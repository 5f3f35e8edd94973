"""What a policy draws from, kept call by call and described all at once when it is over.

It is called between the trainer's own steps, where every line counts, so it keeps tensors, and the fewest that do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from esper_telemetry.adapters.sb3.heads import Description, Heads, drawn_from

BLOCK = 16
"""Calls of which what is kept is joined at once. To hold on to a few tensors of every call of an update would wake Python's garbage
collector, whose full collection takes a fifth of a second in a process that has loaded torch, more than all else telemetry does."""

Join = Callable[[tuple[Tensor, ...]], Tensor]
"""`torch.stack`, or `torch.cat`."""


class DrawnRecorder(Protocol):
    """A way to keep what was drawn from."""

    def kept(self, policy: Any) -> Any:
        """What is needed of what `policy` has drawn from, or evaluated, last."""

    def joined(self, kept: Sequence[Any], join: Join) -> Description:
        """What several of them say of the heads."""


def drawn_by(policy: Any, heads: Heads) -> DrawnRecorder:
    """The cheapest way for this policy."""
    single = not hasattr(policy.action_dist, "distributions")
    if single and heads.gaussian:
        return GaussianColumns(heads.names[0])
    if single and heads.single_choice:
        return MaskedChoice(heads.names[0]) if hasattr(policy.action_dist, "apply_masking") else Choice(heads.names[0])
    return Parts(heads)


class GaussianColumns:
    """Of numbers: means and standard deviations."""

    def __init__(self, head: str) -> None:
        self._head = head

    def kept(self, policy: Any) -> tuple[Tensor, Tensor]:
        """See `DrawnRecorder`."""
        drawn = policy.action_dist.distribution
        return drawn.mean.detach(), drawn.stddev.detach()

    def joined(self, kept: Sequence[tuple[Tensor, Tensor]], join: Join) -> Description:
        """See `DrawnRecorder`."""
        means, stds = (join(column) for column in zip(*kept, strict=True))
        return Description({}, {self._head: means}, {self._head: stds.log()}, {})


class Choice:
    """Of one choice: its logits."""

    def __init__(self, head: str) -> None:
        self._head = head

    def kept(self, policy: Any) -> Tensor:
        """See `DrawnRecorder`."""
        logits: Tensor = policy.action_dist.distribution.logits
        return logits.detach() if logits.requires_grad else logits

    def joined(self, kept: Sequence[Tensor], join: Join) -> Description:
        """See `DrawnRecorder`."""
        return Description({self._head: join(tuple(kept))}, {}, {}, {})


class MaskedChoice:
    """Of one choice, some of which may be forbidden: logits and masks."""

    def __init__(self, head: str) -> None:
        self._head = head

    def kept(self, policy: Any) -> tuple[Tensor, Tensor | None]:
        """See `DrawnRecorder`."""
        drawn = policy.action_dist.distribution
        return drawn.logits.detach(), drawn.masks

    def joined(self, kept: Sequence[tuple[Tensor, Tensor | None]], join: Join) -> Description:
        """See `DrawnRecorder`."""
        logits, masks = zip(*kept, strict=True)
        known = tuple([mask for mask in masks if mask is not None])
        return Description(
            {self._head: join(logits)}, {}, {}, {self._head: join(known)} if len(known) == len(kept) else {}
        )


class Parts:
    """Of several choices."""

    def __init__(self, heads: Heads) -> None:
        self._heads = heads

    def kept(self, policy: Any) -> Description:
        """See `DrawnRecorder`."""
        return self._heads.describe(drawn_from(policy))

    def joined(self, kept: Sequence[Description], join: Join) -> Description:
        """See `DrawnRecorder`."""
        return Description(*(_by_name([one[part] for one in kept], join) for part in range(len(Description._fields))))


def described(parts: Sequence[Description]) -> Description:
    """Several descriptions, one after the other."""
    if len(parts) == 1:
        return parts[0]
    return Description(*(_by_name(columns, torch.cat) for columns in zip(*parts, strict=True)))


def _by_name(kept: Sequence[Mapping[str, Tensor]], join: Join) -> dict[str, Tensor]:
    """What all of them have."""
    names = kept[0] if all(len(one) == len(kept[0]) for one in kept) else ()
    return {name: join(tuple([one[name] for one in kept])) for name in names}
