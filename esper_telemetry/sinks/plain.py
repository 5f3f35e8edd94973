"""Settings in forms that every backend takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from numbers import Integral, Real
from typing import Any


def plain(value: Any) -> Any:
    """The value as None, bool, int, float, str, list and dict; whatever else it holds, as its text."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    return _plain_container(value)


def _plain_container(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [plain(item) for item in value]
    return str(value)


def flattened(config: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves of nested settings by dotted path; lists become text."""
    return dict(_leaves("", plain(config)))


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(f"{path}.{key}" if path else key, item)
    elif path:
        yield path, str(value) if isinstance(value, list | dict) else value
