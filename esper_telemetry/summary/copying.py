"""Copies of what is made of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from torch import Tensor

Tree = TypeVar("Tree")


def copied(tree: Tree) -> Tree:
    """Tuples, mappings and whatever else they hold, with every tensor copied."""
    copy: Any = tree
    match tree:
        case Tensor():
            copy = tree.clone()
        case tuple():
            parts = map(copied, tree)
            copy = type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
        case Mapping():
            copy = {name: copied(part) for name, part in tree.items()}
    found: Tree = copy
    return found
