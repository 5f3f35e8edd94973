"""Settings as JSON that a person can read."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any


def plain(value: Any, *, depth: int = 16) -> Any:
    """The value as JSON: enums by name, paths as text, dataclasses and mappings as objects, arrays as lists.

    Functions and classes become their names; non-finite floats and everything else become text. Nesting beyond `depth`
    is text too, so a structure that contains itself ends.
    """
    if isinstance(value, Enum):
        return value.value if isinstance(value, str) else value.name
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return float(value) if value - value == 0 else repr(float(value))
    if depth == 0:
        return repr(value)
    return _plain_structure(value, depth - 1)


def _plain_structure(value: Any, depth: int) -> Any:
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(item, depth=depth) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name), depth=depth) for field in fields(value)}
    if isinstance(value, (set, frozenset)):
        return sorted((plain(item, depth=depth) for item in value), key=repr)
    if isinstance(value, (list, tuple, deque)):
        return [plain(item, depth=depth) for item in value]
    return _plain_leaf(value, depth)


def _plain_leaf(value: Any, depth: int) -> Any:
    if isinstance(value, os.PathLike):
        return str(os.fspath(value))
    if not isinstance(value, type) and callable(getattr(value, "tolist", None)):
        return plain(value.tolist(), depth=depth)
    name = getattr(value, "__qualname__", None)
    return repr(value) if name is None else f"{value.__module__}.{name}"
