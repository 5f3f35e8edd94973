"""Parameters of many networks as one tensor: one row per network, so that norms, steps and snapshots are single operations."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor


class Packing:
    """Where each named parameter stands in a row.

    Attributes:
        shapes: of the parameters, in order.
        size: entries of a row.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = dict(shapes)
        self.sizes = [prod(shape) for shape in self.shapes.values()]
        self.size = sum(self.sizes)

    def unpack(self, rows: Tensor) -> dict[str, Tensor]:
        """Views of the parameters in rows [..., size or more], each [..., *shape]."""
        parts = rows[..., : self.size].split(self.sizes, -1)
        return {name: part.unflatten(-1, shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}

    def pack(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """The rows [..., size] of all parameters, each [..., *shape]."""
        return torch.cat(
            [
                parameters[name].flatten(-len(shape)) if shape else parameters[name]
                for name, shape in self.shapes.items()
            ],
            -1,
        )
