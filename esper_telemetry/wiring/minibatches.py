"""The minibatches of an update, joined."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from esper_telemetry.events import MinibatchEnd
from esper_telemetry.summary import Minibatches


def joined(events: Sequence[MinibatchEnd], features: Tensor | None = None) -> Minibatches | None:
    """The rows of all minibatches, one after the other, with `features` [n, F] of the first; None where there are none."""
    if not events:
        return None
    first = events[0]
    return Minibatches(
        epochs=tuple([event.epoch for event in events]),
        counts=tuple([event.log_ratio.numel() for event in events]),
        log_ratio=torch.cat([event.log_ratio for event in events]),
        advantages=torch.cat([event.advantages for event in events]),
        valid=_valid(events),
        losses={name: torch.stack([event.losses[name] for event in events]) for name in first.losses},
        logits={head: torch.cat([event.logits[head] for event in events]) for head in first.logits},
        action_masks={head: torch.cat([event.action_masks[head] for event in events]) for head in first.action_masks},
        log_std={head: torch.cat([_per_row(event, head) for event in events]) for head in first.log_std},
        head_log_ratios=_head_log_ratios(events),
        relevance={head: torch.cat([event.relevance[head] for event in events]) for head in first.relevance},
        features=features,
    )


def _head_log_ratios(events: Sequence[MinibatchEnd]) -> dict[str, Tensor]:
    """Per head [R]; empty where one head says what all heads together say."""
    heads = events[0].head_log_ratios
    return {head: torch.cat([event.head_log_ratios[head] for event in events]) for head in heads if len(heads) > 1}


def _valid(events: Sequence[MinibatchEnd]) -> Tensor | None:
    """Which rows count, [R]; None where all do."""
    if all(event.valid is None for event in events):
        return None
    return torch.cat(
        [torch.ones_like(event.log_ratio, dtype=torch.bool) if event.valid is None else event.valid for event in events]
    )


def _per_row(event: MinibatchEnd, head: str) -> Tensor:
    """Log standard deviations [N, D] of a head, whether or not they depend on the state."""
    return event.log_std[head].expand(len(event.log_ratio), -1)
