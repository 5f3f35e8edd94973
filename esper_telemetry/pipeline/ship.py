"""Copies of an update's tensors from a GPU to the host, which the training thread starts without waiting for them.

Measuring an update on a GPU takes a thousand small kernels, and copying its columns about thirty copies; the worker then measures on the
CPU. The copies are enqueued on the trainer's stream, so the trainer cannot overwrite a tensor before it has been copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from esper_telemetry.pipeline.in_process import FlushedUpdate
from esper_telemetry.updates.update import Update, mapped

MAX_MINIBATCH_ROWS: Final = 1 << 16
"""Rows of minibatches copied from one update on a GPU: a core measures about 500,000 a second, and an update takes a fifth of that."""


class Shipment(NamedTuple):
    """An update whose tensors are on the host, or on their way there.

    Attributes:
        update: update with tensors on the host.
        arrival: event after which they may be read; None if they may be read at once.
    """

    update: FlushedUpdate
    arrival: torch.cuda.Event | None = None


def ship(update: FlushedUpdate) -> Shipment:
    """Begin to copy the tensors of an update that are on a GPU into pinned memory of the host."""
    copier = _Copier()
    stride = max((_stride(part.minibatches.counts) for part in update.updates if part.minibatches), default=1)
    updates = tuple([copier.copy(thinned(part, stride)) for part in update.updates])
    evidence_updates = tuple(map(copier.copy, update.evidence_updates))
    shipped = update._replace(updates=updates, evidence_updates=evidence_updates, minibatch_stride=stride, copies=copier.copies)
    if not copier.copies:
        return Shipment(update)
    arrival = torch.cuda.Event()
    arrival.record()
    return Shipment(shipped, arrival)


class _Copier:
    """Copies tensors, each one once, and counts the copies."""

    def __init__(self) -> None:
        self.copies = 0
        self._copied: dict[int, tuple[Tensor, Tensor]] = {}

    def copy(self, update: Update) -> Update:
        return mapped(update, self._to_host)

    def _to_host(self, tensor: Tensor) -> Tensor:
        if not tensor.is_cuda:
            return tensor
        known = self._copied.get(id(tensor))
        if known is None:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            host.copy_(tensor.detach(), non_blocking=True)
            self._copied[id(tensor)] = known = tensor, host  # keeps the tensor alive, so that its id stays unique
            self.copies += 1
        return known[1]


def _stride(counts: Sequence[int]) -> int:
    return -(-sum(counts) // MAX_MINIBATCH_ROWS)


def thinned(update: Update, stride: int) -> Update:
    """Return the update with the first minibatch, every `stride`-th after it, and the last one, without their row numbers.

    Minibatches stay whole for the sake of their ratios, losses and normalisation. Repeated rows can no longer be identified.
    """
    minibatches = update.minibatches
    if stride <= 1 or minibatches is None:
        return update
    last = len(minibatches.counts) - 1
    kept = sorted({*range(0, last + 1, stride), last})

    def picked(column: Any, counts: Sequence[int]) -> Any:
        if isinstance(column, Mapping):
            return {name: picked(part, counts) for name, part in column.items()}
        if not isinstance(column, Tensor):
            return column
        parts = column.split(list(counts))
        return torch.cat([parts[index] for index in kept])

    each: dict[str, Any] = {name: tuple([getattr(minibatches, name)[index] for index in kept]) for name in ("epochs", "counts")}
    each["losses"], each["rows"] = picked(minibatches.losses, [1] * (last + 1)), None
    rows = {name: picked(column, minibatches.counts) for name, column in minibatches._asdict().items() if name not in each}
    return update._replace(minibatches=minibatches._replace(**each, **rows))
