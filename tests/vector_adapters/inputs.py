"""Shared by the adapters: inputs of reference cases, and values of groups at the steps that a case names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from esper_telemetry.core.group import MetricGroup, pack

Inputs = Mapping[str, Any]
Values = dict[str, Any]


def floats(values: Any, dtype: str = "float64") -> Tensor:
    """Nested lists as a tensor; "nan", "inf" and "-inf" stand for the float."""
    return torch.tensor(numbers(values), dtype=getattr(torch, dtype))


def numbers(values: Any) -> Any:
    """Nested lists with every text as the float it stands for."""
    if isinstance(values, list):
        return [numbers(value) for value in values]
    return float(values)


def mask(inputs: Inputs, name: str = "mask") -> Tensor | None:
    """A mask of the case; None where it has none."""
    return torch.tensor(inputs[name]).bool() if name in inputs else None


def masks(inputs: Inputs, name: str) -> dict[str, Tensor]:
    """Masks by head."""
    return {head: torch.tensor(value).bool() for head, value in inputs.get(name, {}).items()}


def by_head(inputs: Inputs, name: str) -> dict[str, Tensor]:
    """Tensors by head."""
    return {head: floats(value) for head, value in inputs[name].items()}


def padded(rows: Sequence[Sequence[Any]]) -> tuple[Tensor, Tensor]:
    """Rows of different length as [M, N], and which entries are theirs."""
    width = max(len(row) for row in rows)
    filled = [[*numbers(list(row)), *[float("nan")] * (width - len(row))] for row in rows]
    real = [[True] * len(row) + [False] * (width - len(row)) for row in rows]
    return torch.tensor(filled, dtype=torch.float64), torch.tensor(real)


def finished(group: MetricGroup, steps: Sequence[int], epochs: Sequence[int]) -> dict[str, float]:
    """Values of a group whose rows were measured before these optimizer steps."""
    packed = pack(group)
    return packed.layout.finish(packed.table(), np.array(steps), np.array(epochs)).values


def at_any_step(group: MetricGroup) -> dict[str, float]:
    """Values of one minibatch, where the case does not say whether it comes before or after the first step."""
    return {**finished(group, [0], [0]), **finished(group, [1], [0])}
