"""The minibatches of an update, joined."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from esper_telemetry.events import MinibatchEnd, MinibatchesEnd

Named: TypeAlias = Mapping[str, Tensor]


class Kept(NamedTuple):
    """What is kept of minibatches: these fields of `MinibatchEnd`, of one minibatch after the other."""

    epoch: tuple[int, ...]
    valid: tuple[Tensor | None, ...]
    log_ratio: tuple[Tensor, ...]
    advantages: tuple[Tensor, ...]
    rows: tuple[Tensor | None, ...]
    losses: tuple[Named, ...]
    logits: tuple[Named, ...]
    action_masks: tuple[Named, ...]
    log_std: tuple[Named, ...]
    head_log_ratios: tuple[Named, ...]
    relevance: tuple[Named, ...]


kept_of: Callable[[MinibatchEnd], tuple[Any, ...]] = attrgetter(*Kept._fields)


class Joining:
    """Takes minibatches as they come, of sources that do not join them, and gives them back as one.

    Only what is measured is kept alive. To keep whole events would scatter the memory that the trainer uses again for every minibatch,
    which costs it more than all the rest here. Nothing else is done before the update is over: between two minibatches this code has
    left the processor's caches, and takes five times as long as it does sixteen times in a row.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[Any, ...]] = []

    def add(self, event: MinibatchEnd) -> None:
        """The next minibatch."""
        self._kept.append(kept_of(event))

    def take(self) -> MinibatchesEnd | None:
        """The rows of all minibatches, one after the other; None where there are none."""
        if not self._kept:
            return None
        kept, self._kept = Kept(*zip(*self._kept, strict=True)), []
        counts = tuple(map(len, kept.log_ratio))
        return MinibatchesEnd(
            epochs=kept.epoch,
            counts=counts,
            log_ratio=torch.cat(kept.log_ratio),
            advantages=torch.cat(kept.advantages),
            valid=_valid(kept.valid, counts),
            losses=_joined(kept.losses, torch.stack),
            logits=_joined(kept.logits),
            action_masks=_joined(kept.action_masks),
            log_std=_joined([_by_row(spread, count) for spread, count in zip(kept.log_std, counts, strict=True)]),
            head_log_ratios=_joined(kept.head_log_ratios) if len(kept.head_log_ratios[0]) > 1 else {},
            relevance=_joined(kept.relevance),
            rows=_rows(kept.rows),
        )


def _valid(valid: Sequence[Tensor | None], counts: Sequence[int]) -> Tensor | None:
    """Which rows count, [R]; None where all do."""
    known = next((flags for flags in valid if flags is not None), None)
    if known is None:
        return None
    parts = zip(valid, counts, strict=True)
    return torch.cat([known.new_ones(count) if flags is None else flags for flags, count in parts])


def _rows(rows: Sequence[Tensor | None]) -> Tensor | None:
    """Which transitions the rows are, [R]; None where a minibatch does not say."""
    known = [numbers for numbers in rows if numbers is not None]
    return torch.cat(known) if len(known) == len(rows) else None


def _joined(columns: Sequence[Named], join: Callable[[list[Tensor]], Tensor] = torch.cat) -> dict[str, Tensor]:
    """Each column by its name, of all minibatches that have it."""
    names = dict.fromkeys(chain.from_iterable(columns))
    return {name: join([column[name] for column in columns if name in column]) for name in names}


def _by_row(log_std: Named, count: int) -> Named:
    """Per head [count, D], whether or not it depends on the state."""
    return {head: spread.expand(count, -1) for head, spread in log_std.items()}
