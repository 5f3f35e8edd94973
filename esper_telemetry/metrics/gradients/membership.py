"""Which gradient belongs to which group: the matrix from squared tensor norms to squared group norms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from esper_telemetry.metric import segment

Groups = Mapping[str, Sequence[str]]
FrozenGroups = tuple[tuple[str, tuple[str, ...]], ...]


class Membership(NamedTuple):
    """Sums over tensors as one matrix product; column 0 is all of them, the others are the groups that have a gradient.

    Attributes:
        labels: the G groups, as key segments.
        layers: the K tensors, as key segments.
        matrix: [K, 1 + G] of zeros and ones, float64.
        scale: [1 + G], one over the square root of the number of entries; None where sizes are unknown.
    """

    labels: tuple[str, ...]
    layers: tuple[str, ...]
    matrix: Tensor
    scale: Tensor | None


def membership(names: Sequence[str], groups: Groups, numels: Sequence[int] | None, device: torch.device) -> Membership:
    """The membership of `names`; computed once per combination.

    Args:
        names: K tensors that have a gradient.
        groups: parameter names by group; a module's name stands for its parameters. A group without any gradient is
            left out.
        numels: entries per tensor, K.
        device: where the matrix lives.
    """
    return _membership(tuple(names), frozen(groups), tuple(numels) if numels is not None else None, device)


@lru_cache(maxsize=64)
def _membership(
    names: tuple[str, ...],
    groups: FrozenGroups,
    numels: tuple[int, ...] | None,
    device: torch.device,
) -> Membership:
    columns = {segment(group): [belongs(name, members) for name in names] for group, members in groups}
    present = {label: column for label, column in columns.items() if any(column)}
    table = [[True] * len(names), *present.values()]
    matrix = torch.tensor(table, dtype=torch.float64).T.contiguous()
    scale = None if numels is None else (torch.tensor(numels, dtype=torch.float64) @ matrix).rsqrt().to(device)
    return Membership(tuple(present), tuple(map(segment, names)), matrix.to(device), scale)


def frozen(groups: Groups) -> FrozenGroups:
    """The groups as something to look up by."""
    return tuple([(name, tuple(members)) for name, members in groups.items()])


def belongs(name: str, members: Sequence[str]) -> bool:
    """Whether a parameter is named by `members`, itself or by one of its modules."""
    return any(name == member or name.startswith(f"{member}.") for member in members)
