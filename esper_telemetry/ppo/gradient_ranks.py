"""The processes that train together: a single one, or the processes that `torchrun` started and `torch.distributed` joins.

Environments are split over the ranks. Losses are local sums divided by the global count, so gradients are summed; moments of
advantages and of normalisers are global; decisions on the course of training are agreed. On the same data the ranks
take the same step as a single process.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

SEED_STRIDE = 10_007
"""Difference between the seeds of two ranks; larger than the number of environments of a rank, which are seeded consecutively."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """Number of processes that train together, and the rank of this one."""

    size: int = 1
    rank: int = 0

    @classmethod
    def current(cls) -> Ranks:
        """Return the ranks of the process group, if one is initialised."""
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_world_size(), dist.get_rank())
        return cls()

    @property
    def alone(self) -> bool:
        """True if there is one process."""
        return self.size == 1

    def seed(self, seed: int) -> int:
        """This rank's seed, for everything that must differ between ranks."""
        return seed + SEED_STRIDE * self.rank

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks; with one rank, the tensor itself."""
        if self.alone:
            return tensor
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    def totals(self, *counts: int) -> list[int]:
        """Sums of whole numbers over all ranks."""
        return list(counts) if self.alone else self.sum(torch.tensor(counts, dtype=torch.int64)).tolist()

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, of tensors and plain data, on rank 0, with its tensors on the CPU; nothing on other ranks.

        Data of another rank are read like a checkpoint: their code is not run.
        """
        if self.alone:
            return [value]
        file = io.BytesIO()
        torch.save(value, file)
        payloads: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(file.getvalue(), payloads)
        return [torch.load(io.BytesIO(part), map_location="cpu", weights_only=True) for part in payloads or ()]

    def share(self, module: nn.Module) -> None:
        """Copy the first rank's weights to every rank."""
        if not self.alone:
            for tensor in module.state_dict().values():
                dist.broadcast(tensor, 0)

    def average(self, gradients: Sequence[Tensor], rows: int) -> None:
        """Turn gradients of means over `rows` local rows into gradients of the mean over the rows of all ranks, in place."""
        if self.alone:
            return
        sums = [gradient.flatten() * rows for gradient in gradients]
        *parts, total = self.sum(torch.cat([*sums, sums[0].new_tensor([rows])])).split([*map(len, sums), 1])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_((part / total).view_as(gradient))

    def moments(self, values: Tensor, around: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Count, mean and sum of squared deviations of rows [N, ...] of all ranks, float64; `around` is any value near them."""
        shifted = values.double() - around
        count = torch.full_like(shifted[:1], len(values)).flatten()[:1]
        sums, squares = shifted.sum(0), shifted.square().sum(0)
        total = self.sum(torch.cat([count, sums.flatten(), squares.flatten()]))
        count, sums, squares = total[0], total[1 : 1 + sums.numel()], total[1 + sums.numel() :]
        mean = sums / count
        return count, (around.flatten() + mean).view(around.shape), (squares - count * mean.square()).view(around.shape)


ALONE = Ranks()
