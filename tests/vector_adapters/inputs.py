"""Shared by the adapters: inputs of reference cases, and values of groups at the steps that a case names."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from esper_telemetry.core.group import MetricGroup, pack

Inputs = Mapping[str, Any]
Values = dict[str, Any]
Adapter = Callable[[Inputs], Values]

BY_KEY: dict[str, Adapter] = {}
"""By metric key, template segments as in the reference cases."""

BY_FORMULA: dict[str, Adapter] = {}
"""By the beginning of the formula, for cases without a key, or whose key does not identify the series."""


def of_keys(start: str, *names: str) -> Callable[[Adapter], Adapter]:
    """Declare an adapter of a key, or of all keys with this start and one of the names, which spaces separate."""

    def declare(adapter: Adapter) -> Adapter:
        BY_KEY.update({start + name: adapter for line in names or ("",) for name in line.split(" ")})
        return adapter

    return declare


def of_formula(*starts: str) -> Callable[[Adapter], Adapter]:
    def declare(adapter: Adapter) -> Adapter:
        BY_FORMULA.update(dict.fromkeys(starts, adapter))
        return adapter

    return declare


def floats(values: Any, dtype: str = "float64") -> Tensor:
    """Return nested lists as a tensor; "nan", "inf" and "-inf" are parsed as floats."""
    return torch.tensor(numbers(values), dtype=getattr(torch, dtype))


def numbers(values: Any) -> Any:
    """Return nested lists with every text parsed as a float."""
    if isinstance(values, list):
        return [numbers(value) for value in values]
    return float(values)


def mask(inputs: Inputs, name: str = "mask") -> Tensor | None:
    """Return a mask of the case, or None."""
    return torch.tensor(inputs[name]).bool() if name in inputs else None


def masks(inputs: Inputs, name: str) -> dict[str, Tensor]:
    return {head: torch.tensor(value).bool() for head, value in inputs.get(name, {}).items()}


def by_head(inputs: Inputs, name: str) -> dict[str, Tensor]:
    return {head: floats(value) for head, value in inputs[name].items()}


def padded(rows: Sequence[Sequence[Any]]) -> tuple[Tensor, Tensor]:
    """Return rows of different length as [M, N], and a mask of their entries."""
    width = max(len(row) for row in rows)
    filled = [[*numbers(list(row)), *[float("nan")] * (width - len(row))] for row in rows]
    real = [[True] * len(row) + [False] * (width - len(row)) for row in rows]
    return torch.tensor(filled, dtype=torch.float64), torch.tensor(real)


def finished(group: MetricGroup, steps: Sequence[int], epochs: Sequence[int]) -> dict[str, float]:
    """Return values of a group whose rows were measured before these optimizer steps."""
    packed = pack(group)
    return packed.layout.finish(packed.table(), np.array(steps), np.array(epochs)).values


def at_any_step(group: MetricGroup) -> dict[str, float]:
    """Return the values of one minibatch, if the case does not say whether the first step comes before or after it."""
    return {**finished(group, [0], [0]), **finished(group, [1], [0])}
