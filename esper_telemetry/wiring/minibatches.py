"""The minibatches of an update, stacked."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from esper_telemetry.events import MinibatchEnd
from esper_telemetry.summary import Minibatches


def stacked(events: Sequence[MinibatchEnd]) -> Minibatches | None:
    """All minibatches [N, ...] as [M, N, ...]; None where there are none."""
    if not events:
        return None
    first = events[0]
    return Minibatches(
        epochs=tuple([event.epoch for event in events]),
        counts=tuple([len(event.log_ratio) for event in events]),
        log_ratio=stack([event.log_ratio for event in events]),
        advantages=stack([event.advantages for event in events]),
        valid=stack_valid([event.log_ratio for event in events], [event.valid for event in events]),
        losses={name: torch.stack([event.losses[name] for event in events]) for name in first.losses},
        logits={head: stack([event.logits[head] for event in events]) for head in first.logits},
        action_masks={head: stack([event.action_masks[head] for event in events]) for head in first.action_masks},
        log_std={head: stack([_per_row(event, head) for event in events]) for head in first.log_std},
    )


def stack(parts: Sequence[Tensor]) -> Tensor:
    """Minibatches [N, ...] as [M, N, ...]; shorter ones are padded with zeros."""
    if len({len(part) for part in parts}) == 1:
        return torch.stack(list(parts))
    return torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)


def stack_valid(parts: Sequence[Tensor], masks: Sequence[Tensor | None]) -> Tensor | None:
    """Which rows of `stack(parts)` count, [M, N]; None where all do."""
    if all(mask is None for mask in masks) and len({len(part) for part in parts}) == 1:
        return None
    return stack(
        [
            part.new_ones(len(part), dtype=torch.bool) if mask is None else mask
            for part, mask in zip(parts, masks, strict=True)
        ]
    )


def _per_row(event: MinibatchEnd, head: str) -> Tensor:
    """Log standard deviations [N, D] of a head, whether or not they depend on the state."""
    return event.log_std[head].expand(len(event.log_ratio), -1)
