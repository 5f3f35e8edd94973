"""The state of Gymnasium environments as plain data, for those written in Python and NumPy.

An environment is saved through its wrappers: numbers, texts, arrays, tuples and random generators among its
attributes, by name. One that holds anything else (a physics engine, a window) cannot be saved, and says so by `None`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

PLAIN = (bool, int, float, str, type(None))
State = dict[str, Any]


class CannotSaveError(TypeError):
    """Something among the attributes is neither plain data nor known to stay as it is."""


def capture(env: Any) -> State | None:
    """The state of an environment, its wrappers and its parts; None where it cannot be saved."""
    try:
        return {"layers": [layer_state(layer) for layer in layers(env)]}
    except CannotSaveError:
        return None


def restore(env: Any, state: Mapping[str, Any]) -> None:
    """Puts a captured state into an environment made in the same way; raises ValueError if it was made otherwise."""
    found = list(layers(env))
    saved = state["layers"]
    if len(found) != len(saved):
        raise ValueError(f"the environment has {len(found)} layers, the saved one has {len(saved)}")
    for layer, values in zip(found, saved, strict=True):
        for name, value in values.items():
            put(layer, name, value)


def layers(env: Any) -> Iterator[Any]:
    """The environment, what it wraps, and its parts, each once, from the outside in."""
    yield env
    for part in getattr(env, "envs", ()):
        yield from layers(part)
    if "env" in vars(env):
        yield from layers(env.env)


def layer_state(layer: Any) -> State:
    """The attributes of one layer that can change."""
    values = {name: value for name, value in vars(layer).items() if not stays(value)}
    return {name: packed(value) for name, value in values.items()}


def stays(value: Any) -> bool:
    """Whether a value is part of how an environment was made, or another layer."""
    import gymnasium

    made = (gymnasium.Space, gymnasium.Env, gymnasium.vector.VectorEnv, gymnasium.envs.registration.EnvSpec, enum.Enum)
    if isinstance(value, (list, tuple)) and value:
        return all(stays(part) for part in value)
    return isinstance(value, made) or callable(value)


def packed(value: Any) -> Any:
    """A value as tensors and plain data; raises CannotSaveError."""
    if isinstance(value, np.random.Generator):
        return {"generator": value.bit_generator.state}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return torch.from_numpy(value.copy())
    if isinstance(value, np.generic):
        return {"scalar": value.item(), "dtype": value.dtype.str}
    if isinstance(value, (list, tuple)):
        return {"sequence": [packed(part) for part in value], "tuple": isinstance(value, tuple)}
    if isinstance(value, dict):
        return {"mapping": [(packed(key), packed(part)) for key, part in value.items() if not stays(part)]}
    if isinstance(value, PLAIN):
        return value
    raise CannotSaveError(type(value).__name__)


def unpacked(value: Any) -> Any:
    """What `packed` was given."""
    if isinstance(value, torch.Tensor):
        return value.numpy().copy()
    if not isinstance(value, dict):
        return value
    if "scalar" in value:
        return np.dtype(value["dtype"]).type(value["scalar"])
    if "sequence" in value:
        parts = [unpacked(part) for part in value["sequence"]]
        return tuple(parts) if value["tuple"] else parts
    return {unpacked(key): unpacked(part) for key, part in value["mapping"]}


def put(layer: Any, name: str, value: Any) -> None:
    """Sets one attribute; arrays of the same kind are written in place, because others may hold them."""
    if isinstance(value, dict) and "generator" in value:
        getattr(layer, name if name != "_np_random" else "np_random").bit_generator.state = value["generator"]
        return
    restored, present = unpacked(value), getattr(layer, name, None)
    if isinstance(restored, np.ndarray) and isinstance(present, np.ndarray) and alike(present, restored):
        present[...] = restored
    else:
        setattr(layer, name, restored)


def alike(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> bool:
    """Whether one array can be written into the other without loss."""
    return bool(left.shape == right.shape and left.dtype == right.dtype)
