"""Results of environments' steps, in the forms in which scripts return them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
from torch import Tensor

MAX_STEP_PARTS = 6
"""Parts of what an environment's `step` returns, at most."""


def step_parts(result: Any) -> tuple[Any, ...] | None:
    """Return observations, rewards, one or two flags and information of what an environment's `step` returned; None of other results.

    Flags are logical, or only zeros and ones. Other numbers are rewards, usually the second part, and what is left are observations.
    A dictionary or an instance of a dataclass has logical flags.
    """
    named = named_parts(result)
    result = result if named is None or not any(map(is_flag, named)) else named
    if not isinstance(result, tuple | list) or not 3 <= len(result) <= MAX_STEP_PARTS:
        return None
    if len(result) == 5 and isinstance(result[4], dict):  # the usual case: environments of Gymnasium
        first, amount, *ends, information = result
        if isinstance(amount, int | float | np.number) and all(isinstance(one, bool | np.bool_) for one in ends):
            return first, np.asarray([amount]), *(np.asarray([one], dtype=bool) for one in ends), information
        arrays = isinstance(amount, np.ndarray) and all(isinstance(one, np.ndarray) and one.dtype == bool for one in ends)
        if arrays and amount.ndim == 1 and amount.dtype.kind in "fiu" and ends[0].shape == ends[1].shape == amount.shape:
            return first, amount, *ends, information
    columns = {place: column for place, one in enumerate(result) if place and (column := as_numbers(one)) is not None}
    infos = next((one for one in result if _is_information(one)), None)
    # without information, numbers may be an agent's: actions, log-probabilities, values
    kinds = "fiub" if infos is not None else "fb" if len(result) == 3 else "b"
    binary = [one for one in columns if columns[one].dtype.kind in kinds and _is_binary(columns[one])]
    logical = [place for place in binary if columns[place].dtype.kind == "b"]
    flags = [one for one in logical if one > 1] or logical or [one for one in binary if one > 1]
    sizes = {columns[place].size for place in flags}
    if len(sizes) != 1 or len(flags) > 2:
        return None
    first = as_numbers(result[0])
    paid = [place for place, column in columns.items() if place not in flags and column.size in sizes]
    if flags[0] == 1 and first is not None and first.ndim <= 1 and first.size in sizes:  # what follows a flag is no reward
        paid = []
    elif not paid and sizes == {1}:  # environments of a batch may share a flag
        rows = len(first) if first is not None and first.ndim > 1 else 0
        paid = [place for place, column in columns.items() if place not in flags and column.shape == (rows,)]
    columns[0] = None if paid else first
    if not paid and (columns[0] is None or columns[0].size not in sizes):
        return None
    # whole numbers may be of the state
    real = (place for place in paid if columns[place].dtype.kind == "f" and place < flags[0])
    reward = next(real, paid[0]) if paid else 0
    seen = next((place for place in range(len(result)) if place not in (reward, *flags)), reward)
    return (
        result[seen],
        columns[reward].reshape(-1),
        *(np.broadcast_to(columns[one].reshape(-1).astype(bool), columns[reward].size) for one in flags),
        {} if infos is None else infos,
    )


def step_result(result: object) -> tuple[Any, ...] | list[Any] | None:
    """Return the result of a step in the form that `step_parts` reads; None of others.

    It may have names, be a reward and a flag, or an observation and a reward without a logical flag, which gives a list.
    """
    result = result if (named := named_parts(result)) is None else named
    pair = [as_numbers(one) for one in result] if isinstance(result, tuple | list) and len(result) == 2 else []
    if all(one is not None and one.ndim == 1 and one.dtype.kind == "f" for one in pair) and len({one.size for one in pair}) == 1:
        rewards, ended = pair
        if ended.size > 1 and bool(((ended == 0) | (ended == 1)).all()):  # the flags of several environments as numbers
            return None, rewards, ended.astype(bool), {}
    if not isinstance(result, tuple | list) or not any(map(is_flag, result)):
        return unflagged_step(result)
    parts = (None, *result, {}) if len(result) == 2 else tuple(result)
    return parts if step_parts(parts) is not None else None


def unflagged_step(result: object) -> list[Any] | None:
    """Return observations, rewards, flags and information of a step that returned an observation and a reward, perhaps with information.

    An observation of None is the end of the episode. A third part that is 0 or 1 is the flag. Returns None of other results.
    """
    parts = [one for one in result if not isinstance(one, Mapping)] if isinstance(result, tuple | list) and len(result) <= 4 else []
    if not 2 <= len(parts) <= 3:
        return None
    for seen, reward, kinds in ((parts[0], parts[1], "fiu"), (parts[1], parts[0], "f")):
        paid, shown = as_numbers(reward), as_numbers(seen)
        if paid is None or paid.ndim > 1 or paid.dtype.kind not in kinds or getattr(reward, "requires_grad", False):
            continue
        over = np.full(paid.size, seen is None) if len(parts) == 2 else as_numbers(parts[2])
        if over is None or over.shape not in (paid.shape, (paid.size,)) or not _is_binary(over):
            continue
        if seen is None or (shown is not None and shown.ndim and (not paid.ndim or len(shown) == len(paid))):
            return [seen, paid.reshape(-1), over.reshape(-1).astype(bool), {}]
    return None


def named_parts(result: object) -> tuple[Any, ...] | None:
    """Return the values of a dictionary, or of an instance of a dataclass; None of others."""
    if isinstance(result, Mapping):
        return tuple(result.values())
    if is_dataclass(result) and not isinstance(result, type):
        return tuple(getattr(result, field.name) for field in fields(result))
    return None


def is_flag(part: object) -> bool:
    """Return True for a logical part, not only a number that is 0 or 1."""
    return isinstance(part, bool | np.bool_) or str(getattr(part, "dtype", "")) in ("bool", "torch.bool")


def _is_binary(column: np.ndarray[Any, Any]) -> bool:
    return column.dtype.kind == "b" or bool(((column == 0) | (column == 1)).all())


def _is_information(part: Any) -> bool:
    each = part if isinstance(part, list | tuple) else [part]
    return bool(each) and all(isinstance(one, Mapping) for one in each)


def as_numbers(value: Any) -> Any:
    """Return an array on the host; None for anything but numbers."""
    try:
        array = np.asarray(value.detach().cpu() if isinstance(value, Tensor) else value)
    except ValueError:  # parts of different shapes
        return None
    return array if array.dtype.kind in "fiub" and array.size else None
