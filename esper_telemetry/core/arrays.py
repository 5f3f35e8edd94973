"""Conversion of arguments: arrays and lists to tensors, NumPy scalars and 0-d tensors to Python numbers.

A value that already has the right type is returned unchanged, without a copy.
"""

from __future__ import annotations

import argparse
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import Any, Final, SupportsFloat, SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt

from esper_telemetry.core.lazy import Tensor, torch
from esper_telemetry.core.messages import shown as shown
from esper_telemetry.core.record import MAX_COUNT

IntegerLike: TypeAlias = SupportsIndex | SupportsFloat
"""A whole number of Python, NumPy or torch."""

ArrayLike: TypeAlias = Tensor | npt.ArrayLike
"""A tensor, or a value that NumPy can make an array of: arrays, numbers, nested lists of numbers."""

NUMBERS: Final = "biuf"
"""NumPy's kinds of booleans, integers and floats."""


def as_tensor(value: ArrayLike, like: Tensor | None = None) -> Tensor:
    """Return the numbers as a tensor, which shares their memory if possible.

    Booleans and unsigned integers become int64, so that differences have a sign.

    Args:
        value: Python's floats become float64, its integers int64; arrays keep their type if torch has it.
        like: a tensor that determines the device for an array or a list; a tensor is not moved.

    Raises:
        TypeError: for anything without numbers, and for tensors that are sparse, quantized or complex.
        ValueError: for nested lists whose rows differ in length.
    """
    if isinstance(value, Tensor):
        return _signed(readable(value))
    if isinstance(value, Sequence) and any(isinstance(item, Tensor) for item in value):
        tensors = [as_tensor(item).detach() for item in value]
        shapes = sorted({tuple(tensor.shape) for tensor in tensors})
        if len(shapes) > 1:
            raise ValueError(f"the tensors of a list must have one shape, got {shapes}")
        tensor = torch.stack(tensors)
    else:
        tensor = _signed(torch.from_numpy(_array(value)))
    return tensor if like is None else tensor.to(like.device)


def readable(tensor: Tensor) -> Tensor:
    """Return the tensor; raise TypeError, with the way to make it dense and real, if arithmetic cannot read it."""
    if tensor.is_nested:
        kind, remedy = "a nested tensor", "pad it with torch.nested.to_padded_tensor"
    elif tensor.layout is not torch.strided:
        kind, remedy = f"a tensor of layout {tensor.layout}", "call to_dense()"
    elif tensor.is_meta:
        kind, remedy = "a tensor on the meta device", "it has no numbers"
    elif tensor.is_quantized:
        kind, remedy = f"a tensor of {tensor.dtype}", "call dequantize()"
    elif tensor.is_complex():
        kind, remedy = f"a tensor of {tensor.dtype}", "pass its real part, or its magnitude"
    elif tensor.is_floating_point() and tensor.dtype.itemsize < 2:
        kind, remedy = f"a tensor of {tensor.dtype}", "call float()"
    else:
        return tensor
    raise TypeError(f"expected a dense tensor of real numbers, got {kind}: {remedy}")


def _signed(tensor: Tensor) -> Tensor:
    return tensor.long() if tensor.dtype is torch.bool or not tensor.dtype.is_signed else tensor


def as_mask(value: ArrayLike | None, like: Tensor | None = None) -> Tensor | None:
    """Return a mask as a tensor of booleans, True for values other than 0; None for None."""
    if value is None:
        return None
    mask = readable(value) if isinstance(value, Tensor) else as_tensor(value, like)
    return mask if mask.dtype is torch.bool else mask.bool()


def as_tensors(values: Iterable[ArrayLike]) -> list[Tensor]:
    """Return each value as a tensor; raise TypeError for anything but a list of values."""
    if isinstance(values, Mapping | str) or not isinstance(values, Iterable):
        raise TypeError(f"expected a list of tensors or arrays, got {shown(values)}")
    return [as_tensor(value) for value in values]


def as_floats(values: Iterable[ArrayLike]) -> list[Tensor]:
    """Return each value as a tensor of floats; raise TypeError for anything but a list of values."""
    return [tensor if tensor.is_floating_point() else tensor.double() for tensor in as_tensors(values)]


def by_head(values: Mapping[str, ArrayLike] | None) -> dict[str, Tensor]:
    """Return a mapping from heads to values with the values as tensors, empty for None; raise TypeError for anything else."""
    return {head: as_tensor(value) for head, value in _heads(values).items()}


def masks_by_head(values: Mapping[str, ArrayLike] | None) -> dict[str, Tensor]:
    """Return a mapping from heads to masks, without heads that are not masked."""
    masks = {head: as_mask(value) for head, value in _heads(values).items()}
    return {head: mask for head, mask in masks.items() if mask is not None}


def _heads(values: Mapping[str, ArrayLike] | None) -> Mapping[str, ArrayLike]:
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise TypeError(f"expected a mapping from the name of each head, such as {{'action': ...}}, got {shown(values)}")
    return values


def as_integer(value: object, name: str, *, smallest: int = 0) -> int:
    """Return the whole number of a Python or NumPy number, or of an array or tensor with one entry.

    Raises:
        TypeError: for anything that is not a number.
        ValueError: for fractions, NaN, infinities, and numbers below `smallest` or above `MAX_COUNT`.
    """
    number = _integer(value, name)
    if number < smallest:
        raise ValueError(f"{name} must be at least {smallest}, got {shown(value)}")
    if number > MAX_COUNT:
        raise ValueError(f"{name} must be at most {MAX_COUNT}, got {shown(value)}")
    return number


def _integer(value: object, name: str) -> int:
    if type(value) is int:
        return value
    try:
        return operator.index(value)  # type: ignore[arg-type]  # its error says that there is no index
    except TypeError:
        number = as_number(value, name)
    if not number.is_integer():
        raise ValueError(f"{name} must be a whole number, got {shown(value)}")
    return int(number)


def as_number(value: object, name: str) -> float:
    """Return the number as a float, infinite if it is too large; an array or tensor must have one entry.

    Raises:
        TypeError: for everything else.
    """
    try:
        number: Any = value.detach() if isinstance(value, Tensor) else value
        number = number.item() if hasattr(number, "item") else number
        if not isinstance(number, str | bytes):
            return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf
    except (TypeError, ValueError, RuntimeError):
        pass
    raise TypeError(f"{name} must be one number, got {shown(value)}")


def as_setting(value: object, name: str, *, low: float = -math.inf) -> float:
    """Return a number of at least `low`; infinity means unlimited.

    Raises:
        TypeError: if it is not a single number.
        ValueError: for NaN and numbers below `low`.
    """
    number = as_number(value, name)
    if not number >= low:
        rules = {-math.inf: "be a number", 0.0: "not be negative"}
        rule = rules.get(low, f"be at least {low:g}")
        raise ValueError(f"{name} must {rule}, got {shown(value)}")
    return number


def as_settings(value: object, name: str) -> dict[str, Any]:
    """Return the settings of a mapping, a dataclass or an argument parser's namespace by name; empty for None.

    Raises:
        TypeError: for anything else.
    """
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return dict(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, argparse.Namespace | SimpleNamespace):
        return dict(vars(value))
    raise TypeError(f"{name} must be a mapping, a dataclass or an argparse.Namespace, got {shown(value)}")


def _array(value: Any) -> npt.NDArray[Any]:
    """Return an array that torch can share memory with."""
    try:
        array = np.asarray(value)
    except ValueError:
        raise ValueError(f"rows of nested lists must have one length, got {shown(value)}") from None
    if array.dtype.kind not in NUMBERS:
        raise TypeError(f"expected a tensor, a NumPy array or a list of numbers, got {shown(value)}")
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        array = array.astype(np.int64)
    elif array.dtype.kind == "f" and array.dtype.itemsize > 8:
        array = array.astype(np.float64)
    return np.require(array, array.dtype.newbyteorder("="), ["C", "W", "A"])
