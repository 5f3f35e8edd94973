"""The state of Gymnasium environments as plain data, for those written in Python and NumPy.

An environment is saved through its wrappers: numbers, texts, arrays, tuples and random generators among its
attributes, by name. One that holds anything else (a physics engine, a window) cannot be saved, and says so by `None`.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

PLAIN = (bool, int, float, str, bytes, type(None))
SEQUENCES: dict[str, type] = {"list": list, "tuple": tuple, "set": set}
CODE = (FunctionType, MethodType, BuiltinFunctionType, ModuleType, partial, type, np.ufunc)
"""Types of values that are part of the program. An object that can merely be called may have a state."""

State = dict[str, Any]


class CannotSaveError(TypeError):
    """Something among the attributes is neither plain data nor known to stay as it is."""


def capture(env: Any) -> State | None:
    """The state of an environment, its wrappers and its parts; None where it cannot be saved."""
    try:
        return {"layers": [layer_state(layer) for layer in layers(env)]}
    except (CannotSaveError, RecursionError):
        return None


def restore(env: Any, state: Mapping[str, Any]) -> None:
    """Put a captured state into an environment made in the same way; raise ValueError if it was made otherwise."""
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
    values = {name: value for name, value in vars(layer).items() if not is_static(value)}
    return {name: packed(value) for name, value in values.items()}


def is_static(value: Any) -> bool:
    """Return True where a value is part of how an environment was made, or another layer."""
    import gymnasium

    made = (gymnasium.Space, gymnasium.Env, gymnasium.vector.VectorEnv, gymnasium.envs.registration.EnvSpec, enum.Enum)
    if isinstance(value, (list, tuple)) and value:
        return all(is_static(part) for part in value)
    return isinstance(value, (*made, *CODE))


def packed(value: Any) -> Any:
    """A value as tensors and plain data; raises CannotSaveError.

    Only the types themselves are taken, no types derived from them: of those nobody knows how they are made.
    """
    if isinstance(value, np.random.Generator):
        return {"generator": packed(value.bit_generator.state)}
    if isinstance(value, np.generic):
        return {"scalar": value.item(), "dtype": value.dtype.str} if type(value.item()) in PLAIN else refuse(value)
    if type(value) is np.ndarray:
        return packed_array(value)
    if type(value) is deque:
        return {"deque": [packed(part) for part in value], "most": value.maxlen}
    if type(value) is dict:
        return {"mapping": [(packed(key), packed(part)) for key, part in value.items() if not is_static(part)]}
    if type(value) in PLAIN:
        return value
    kind = next((name for name, form in SEQUENCES.items() if type(value) is form), None)
    return {"sequence": [packed(part) for part in value], "kind": kind} if kind else refuse(value)


def packed_array(value: np.ndarray[Any, Any]) -> Any:
    """An array as a tensor; one of texts, and other kinds that torch has not, as its bytes."""
    if value.dtype.hasobject or value.dtype.kind == "V":
        refuse(value)
    if value.dtype.isnative and value.dtype.kind in "biuf" and value.dtype.itemsize <= 8:
        return torch.from_numpy(value.copy())
    return {"bytes": value.tobytes(), "dtype": value.dtype.str, "shape": value.shape}


def refuse(value: Any) -> Any:
    """Raise CannotSaveError."""
    raise CannotSaveError(type(value).__name__)


def unpacked(value: Any) -> Any:
    """Return the value that `packed` was given; a random generator becomes a new one in the same state."""
    if isinstance(value, torch.Tensor):
        return value.numpy().copy()
    if not isinstance(value, dict):
        return value
    if "scalar" in value:
        return np.dtype(value["dtype"]).type(value["scalar"])
    if "bytes" in value:
        return np.frombuffer(value["bytes"], value["dtype"]).reshape(value["shape"]).copy()
    if "sequence" in value:
        return SEQUENCES[value["kind"]](unpacked(part) for part in value["sequence"])
    if "deque" in value:
        return deque((unpacked(part) for part in value["deque"]), value["most"])
    if "generator" in value:
        return generator(unpacked(value["generator"]))
    return {unpacked(key): unpacked(part) for key, part in value["mapping"]}


def generator(state: Mapping[str, Any]) -> np.random.Generator:
    """A random generator in that state."""
    bits = getattr(np.random, state["bit_generator"])()
    bits.state = state
    return np.random.Generator(bits)


def put(layer: Any, name: str, value: Any) -> None:
    """Set one attribute; arrays of the same kind are written in place, and generators go on, because others may hold them."""
    restored, present = unpacked(value), getattr(layer, name, None)
    if isinstance(restored, np.ndarray) and isinstance(present, np.ndarray) and same_kind(present, restored):
        present[...] = restored
    elif isinstance(restored, np.random.Generator) and isinstance(present, np.random.Generator):
        set_generator(present, restored)
    else:
        setattr(layer, name, restored)


def set_generator(present: np.random.Generator, restored: np.random.Generator) -> None:
    """Set a generator to the state of another one of its kind."""
    present.bit_generator.state = restored.bit_generator.state


def same_kind(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> bool:
    """Return True where one array can be written into the other without loss."""
    return bool(left.shape == right.shape and left.dtype == right.dtype)
