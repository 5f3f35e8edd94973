"""The minibatches of an update, stacked."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from esper_telemetry.events import MinibatchEnd
from esper_telemetry.summary import Minibatches


def stacked(events: Sequence[MinibatchEnd]) -> Minibatches | None:
    """All minibatches [N, ...] as [M, N, ...]; None where there are none."""
    if not events:
        return None
    first = events[0]
    counts = tuple([event.log_ratio.numel() for event in events])
    stack = torch.stack if len(set(counts)) == 1 else _padded
    return Minibatches(
        epochs=tuple([event.epoch for event in events]),
        counts=counts,
        log_ratio=stack([event.log_ratio for event in events]),
        advantages=stack([event.advantages for event in events]),
        valid=_valid(events, counts),
        losses={name: torch.stack([event.losses[name] for event in events]) for name in first.losses},
        logits={head: stack([event.logits[head] for event in events]) for head in first.logits},
        action_masks={head: stack([event.action_masks[head] for event in events]) for head in first.action_masks},
        log_std={head: stack([_per_row(event, head) for event in events]) for head in first.log_std},
        head_log_ratios=_head_log_ratios(events, stack),
        relevance={head: stack([event.relevance[head] for event in events]) for head in first.relevance},
    )


def _head_log_ratios(events: Sequence[MinibatchEnd], stack: Callable[[list[Tensor]], Tensor]) -> dict[str, Tensor]:
    """Per head [M, N]; empty where one head says what all heads together say."""
    heads = events[0].head_log_ratios
    return {head: stack([event.head_log_ratios[head] for event in events]) for head in heads} if len(heads) > 1 else {}


def _padded(parts: list[Tensor]) -> Tensor:
    """Minibatches [N, ...] of several sizes as [M, N, ...]; shorter ones end in zeros."""
    return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)


def _valid(events: Sequence[MinibatchEnd], counts: Sequence[int]) -> Tensor | None:
    """Which rows of the stacked minibatches count, [M, N]; None where all do."""
    if all(event.valid is None for event in events) and len(set(counts)) == 1:
        return None
    return _padded(
        [
            event.log_ratio.new_ones(count, dtype=torch.bool) if event.valid is None else event.valid
            for event, count in zip(events, counts, strict=True)
        ]
    )


def _per_row(event: MinibatchEnd, head: str) -> Tensor:
    """Log standard deviations [N, D] of a head, whether or not they depend on the state."""
    return event.log_std[head].expand(len(event.log_ratio), -1)
