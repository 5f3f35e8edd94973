"""The ranks of a distributed run as telemetry sees them: what each measured becomes what one process would have measured.

One all-gather of one packed vector per update, over a gloo group of telemetry's own, so that nothing mixes with the trainer's messages.
A vector begins with a hash of its layout. Where all hashes agree that is all; otherwise the ranks exchange what their vectors hold, once
per combination, and share every field that several measure. An update that no longer fits raises the length that all ranks allot, and
all gather once more.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from esper_telemetry.ranks.merging import by_field, comparable, merged
from esper_telemetry.ranks.signature import Signature, check, digest, dumped, loaded, packed, unpacked
from esper_telemetry.reduction import Array
from esper_telemetry.window import Tables

MEETING: Final = timedelta(seconds=60)
"""How long a rank waits for the others to make their `Telemetry` too."""
HEADER: Final = 4
"""Numbers before the packed ones: the hash of the layout, how many follow, and the rank's note."""
MOST_KNOWN: Final = 256
"""Combinations of layouts that are remembered."""


class Note(NamedTuple):
    """What the first rank decides for all.

    Attributes:
        every: one update in so many is looked at closely.
        raised: updates at DEBUG that alarms ask for.
    """

    every: int
    raised: int


@dataclass(slots=True)
class Peers:
    """The ranks that report together.

    Attributes:
        rank, size: of this process, and how many there are.
        group: over which they exchange what they measured.
    """

    rank: int
    size: int
    group: dist.ProcessGroup | None
    _length: int = 1024
    _known: dict[float, Signature] = field(default_factory=dict)

    @classmethod
    def meet(cls) -> Peers | None:
        """Those of the process group that is initialised; None where there is none, or one process.

        Raises:
            RuntimeError: a rank did not come within a minute.
        """
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return None
        try:
            meeting = dist.new_group(backend="gloo", timeout=MEETING)
            group = dist.new_group(backend="gloo")  # waits for half an hour, as training does
        except RuntimeError as error:
            raise RuntimeError(
                f"not all {dist.get_world_size()} ranks made a Telemetry within {MEETING.seconds} s: make one on every rank, "
                "or pass ranks='alone' to the one that is to report its own numbers only"
            ) from error
        dist.destroy_process_group(meeting)
        return cls(dist.get_rank(), dist.get_world_size(), group)

    def tell(self, value: Any) -> Any:
        """Rank 0's value, which can be pickled, on every rank."""
        box = [value]
        dist.broadcast_object_list(box, group=self.group, group_src=0)
        return box[0]

    def join(self, tables: Tables, note: Note) -> tuple[Tables, Note]:
        """What all ranks measured of one update, and rank 0's note; to be called by all of them.

        Args:
            tables: what this one measured.
            note: all ranks know rank 0's afterwards.

        Raises:
            LayoutMismatch: they do not measure the same; on every rank.
            RuntimeError: a rank has gone.
        """
        own = comparable(tables)
        signature, vector = packed({layout: table for layout, table in own.items() if not layout.replicated})
        found = self._gather(np.concatenate([[digest(signature), len(vector), *note], vector]))
        signatures = self._signatures(signature, [row[0] for row in found])
        parts = [unpacked(known, row[HEADER:]) for known, row in zip(signatures, found, strict=True)]
        if any(other is not signature for other in signatures):
            parts = [by_field(part) for part in parts]
            check(parts)
        joined = merged(parts) | {layout: table for layout, table in own.items() if layout.replicated}
        return joined, Note(*map(int, found[0][2:HEADER]))

    def leave(self) -> None:
        """Ends the group; nothing is exchanged."""
        group, self.group = self.group, None
        if group is not None and dist.is_initialized():
            with suppress(RuntimeError, ValueError):  # where the whole process group is gone already
                dist.destroy_process_group(group)

    def _gather(self, vector: Array) -> Sequence[Array]:
        """Every rank's vector, [at least its length] each."""
        found = self._exchange(vector[: self._length])
        longest = HEADER + int(max(row[1] for row in found))
        if longest > self._length:
            self._length = longest + longest // 4
            found = self._exchange(vector)
        return found

    def _exchange(self, vector: Array) -> list[Array]:
        padded = torch.zeros(self._length, dtype=torch.float64)
        padded[: len(vector)] = torch.from_numpy(vector)
        return [row.numpy() for row in self._all(padded)]

    def _all(self, tensor: Tensor) -> list[Tensor]:
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(found, tensor, group=self.group)
        return found

    def _signatures(self, own: Signature, digests: Sequence[float]) -> list[Signature]:
        """What every rank's vector holds. All ranks know the same signatures, so all or none exchange them."""
        if len(set(digests)) == 1:
            return [own] * self.size
        if not self._known.keys() >= set(digests):
            self._learn(own, digests)
        return [self._known[value] for value in digests]

    def _learn(self, own: Signature, digests: Sequence[float]) -> None:
        messages: list[Any] = [None] * self.size
        dist.all_gather_object(messages, dumped(own), group=self.group)
        signatures = [loaded(message, rank) for rank, message in enumerate(messages)]
        if len(self._known) > MOST_KNOWN:
            self._known.clear()
        self._known.update(zip(digests, signatures, strict=True))


def portable(error: Exception) -> Exception:
    """The exception itself if it can go to another process, else its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # an exception's own pickling may raise anything
        return RuntimeError(str(error))
    return error
