"""Gymnasium's vector environments, in any autoreset mode, as a `VectorEnvironment`, and their state as plain data.

An environment is saved through its wrappers: numbers, texts, arrays, tuples and random generators among its attributes, by name. An
environment that holds anything else (a physics engine, a window) cannot be saved: its state is None.
"""

from __future__ import annotations

import enum
import importlib
from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from esper_telemetry.core.messages import did_you_mean
from esper_telemetry.ppo.environments.environment_protocol import Array, Bools, Step
from esper_telemetry.ppo.environments.spaces import ObservationPacker, action_parts, observation_form

if TYPE_CHECKING:
    import gymnasium
    from gymnasium.envs.registration import EnvSpec

    Vector: TypeAlias = gymnasium.vector.VectorEnv[Any, Any, Any]


def make_vector(env_id: str, num_envs: int, seed: int | None, kwargs: dict[str, Any]) -> GymnasiumEnvironment:
    """Return `num_envs` copies of a registered task, in Gymnasium's fastest form; raise as `make_env` does."""
    spec = find_spec(env_id)
    gym = require_gymnasium()
    try:
        if spec.vector_entry_point is not None and not spec.additional_wrappers:
            vector = gym.make_vec(spec, num_envs, vectorization_mode="vector_entry_point", **kwargs)
        else:  # single environments, one after the other; the trainer copies their observations, once
            settings = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP, "copy": False}
            kwargs = {"disable_env_checker": True, **kwargs}
            vector = gym.make_vec(spec, num_envs, vectorization_mode="sync", vector_kwargs=settings, **kwargs)
    except (ImportError, gym.error.Error) as error:
        raise ValueError(f"environment {env_id!r} cannot be made: {error}") from error
    return GymnasiumEnvironment(vector, name=spec.id, seed=seed)


class GymnasiumEnvironment:
    """A Gymnasium vector environment, in any autoreset mode, as a `VectorEnvironment`.

    SAME_STEP is passed through. DISABLED is reset here, in the same step. NEXT_STEP returns an episode's last observation
    and spends the following step on the reset: that row is marked invalid.
    """

    def __init__(self, vector: Vector, *, name: str = "", seed: int | None = None) -> None:
        mode = require_gymnasium().vector.AutoresetMode
        steps = {mode.NEXT_STEP: self._next_step, mode.SAME_STEP: self._same_step, mode.DISABLED: self._reset_here}
        self._seed = seed
        self._step = steps[mode(vector.metadata.get("autoreset_mode", mode.NEXT_STEP))]
        self._resetting: Bools | None = None
        self.name = name or type(vector.unwrapped).__name__
        self.num_envs: int = vector.num_envs
        self.horizon: int | None = getattr(vector.spec, "max_episode_steps", None)
        self.reward_threshold: float | None = getattr(vector.spec, "reward_threshold", None)
        self.observation_shape, self.observation_layout, pack = observation_form(vector.single_observation_space, self.name)
        self.action_specs, self._to_native = action_parts(vector.single_action_space, self.name)
        self._vector: Any = vector
        self._rows = vector if pack is None else InRows(vector, pack)

    def reset(self, seed: int | None = None) -> Array:
        """Begin episodes everywhere, return the observations [B, ...]; a seed given at construction comes first."""
        self._resetting = None
        observations: Array = self._rows.reset(seed=seed if self._seed is None else self._seed)[0]
        return observations

    def step(self, actions: Mapping[str, Array]) -> Step:
        """Take one action in every environment; see `Step` for the result."""
        return self._step(self._rows.step(self._to_native(actions)))

    def close(self) -> None:
        """Close the environments."""
        self._vector.close()

    def state_dict(self) -> dict[str, Any] | None:
        """State of the environments and their random generators; None if they hold more than Python and NumPy objects."""
        state = capture(self._vector)
        return None if state is None else {"vector": state, "resetting": packed(self._resetting)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the environments continue from a saved state."""
        self._vector.reset(seed=0)
        restore(self._vector, state["vector"])
        self._resetting = unpacked(state["resetting"])

    def _next_step(self, result: tuple[Any, ...]) -> Step:
        observations, rewards, terminated, truncated, _ = result
        valid = None if self._resetting is None else ~self._resetting
        ended = terminated | truncated
        self._resetting = ended if ended.any() else None
        return Step(observations, rewards, terminated, truncated, valid, None if self._resetting is None else observations)

    def _same_step(self, result: tuple[Any, ...]) -> Step:
        observations, rewards, terminated, truncated, info = result
        final = None
        if info.get("final_obs") is not None:  # an object array [B] of observations
            final = np.zeros_like(observations)
            for index in np.flatnonzero(info["_final_obs"]):
                final[index] = info["final_obs"][index]
        return Step(observations, rewards, terminated, truncated, None, final)

    def _reset_here(self, result: tuple[Any, ...]) -> Step:
        observations, rewards, terminated, truncated, _ = result
        ended = terminated | truncated
        if not ended.any():
            return Step(observations, rewards, terminated, truncated)
        final, terminated, truncated = observations.copy(), terminated.copy(), truncated.copy()
        observations = self._rows.reset(options={"reset_mask": ended})[0]
        return Step(observations, rewards, terminated, truncated, None, final)


class InRows:
    """A vector environment whose observations are packed into rows, regardless of their number of parts."""

    def __init__(self, vector: Any, pack: ObservationPacker) -> None:
        self._vector, self._pack = vector, pack

    def reset(self, **arguments: Any) -> tuple[Array, dict[str, Any]]:
        """Observations [B, ...] and infos."""
        observations, info = self._vector.reset(**arguments)
        return self._pack(observations), info

    def step(self, actions: Any) -> tuple[Any, ...]:
        """Return the results of the environments, with final observations packed into rows too."""
        observations, *outcome, info = self._vector.step(actions)
        if "final_obs" in info:
            last = np.full(len(info["final_obs"]), None, object)
            for index in np.flatnonzero(info["_final_obs"]):
                last[index] = self._pack.one(info["final_obs"][index])
            info = {**info, "final_obs": last}
        return self._pack(observations), *outcome, info


def find_spec(env_id: str) -> EnvSpec:
    """Return Gymnasium's specification of an id; raise ValueError with the closest ids if it is unknown."""
    gym = require_gymnasium()
    module, _, name = env_id.rpartition(":")
    if module:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise ValueError(f"the module of environment {env_id!r} cannot be imported: {error}") from None
    try:
        spec: EnvSpec = gym.spec(name)
    except (gym.error.Error, ValueError):
        hint = did_you_mean(name, gym.registry)
        raise ValueError(f"there is no environment {env_id!r}{hint}") from None
    return spec


def require_gymnasium() -> Any:
    """The gymnasium package; raises ImportError with the command that installs it."""
    try:
        import gymnasium
    except ImportError:
        raise ImportError("Gymnasium environments need gymnasium: pip install 'esper-telemetry[train]'") from None
    return gymnasium


PLAIN = (bool, int, float, str, bytes, type(None))
SEQUENCES: dict[str, type] = {"list": list, "tuple": tuple, "set": set}
CODE = (FunctionType, MethodType, BuiltinFunctionType, ModuleType, partial, type, np.ufunc)
"""Types of values that are part of the program. A callable object, in contrast, may have a state."""


class CannotSaveError(TypeError):
    """An attribute is neither plain data nor known to be constant."""


def capture(env: Any) -> dict[str, Any] | None:
    """Return the state of an environment, its wrappers and its parts; None if it cannot be saved."""
    try:
        return {"layers": [{name: packed(value) for name, value in vars(layer).items() if not is_static(value)} for layer in layers(env)]}
    except (CannotSaveError, RecursionError):
        return None


def restore(env: Any, state: Mapping[str, Any]) -> None:
    """Put a captured state into an environment that was made in the same way; raise ValueError if it was made otherwise."""
    present = list(layers(env))
    saved = state["layers"]
    if len(present) != len(saved):
        raise ValueError(f"the environment has {len(present)} layers, the saved one has {len(saved)}")
    for layer, values in zip(present, saved, strict=True):
        for name, value in values.items():
            put(layer, name, value)


def layers(env: Any) -> Iterator[Any]:
    """Yield the environment, the wrapped environments, and its parts, each once, from the outside in."""
    yield env
    for part in getattr(env, "envs", ()):
        yield from layers(part)
    if "env" in vars(env):
        yield from layers(env.env)


def is_static(value: Any) -> bool:
    """Return True if a value is part of how an environment was made, or another layer."""
    import gymnasium

    construction_types = (gymnasium.Space, gymnasium.Env, gymnasium.vector.VectorEnv, gymnasium.envs.registration.EnvSpec, enum.Enum)
    if isinstance(value, (list, tuple)) and value:
        return all(is_static(part) for part in value)
    return isinstance(value, (*construction_types, *CODE))


def packed(value: Any) -> Any:
    """Return a value as tensors and plain data; raise CannotSaveError for subclasses of the supported types.

    A subclass may have its own constructor.
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
    """Return an array as a tensor, or as bytes if torch has no such type."""
    if value.dtype.hasobject or value.dtype.kind == "V":
        refuse(value)
    if value.dtype.isnative and value.dtype.kind in "biuf" and value.dtype.itemsize <= 8:
        return torch.from_numpy(value.copy())
    return {"bytes": value.tobytes(), "dtype": value.dtype.str, "shape": value.shape}


def refuse(value: Any) -> Any:
    """Raise CannotSaveError."""
    raise CannotSaveError(type(value).__name__)


def unpacked(value: Any) -> Any:
    """Return the value that was given to `packed`; a random generator becomes a new one in the same state."""
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
    """Set one attribute; arrays of the same kind and generators are changed in place, because other objects may refer to them."""
    restored, present = unpacked(value), getattr(layer, name, None)
    if isinstance(restored, np.ndarray) and isinstance(present, np.ndarray) and same_kind(present, restored):
        present[...] = restored
    elif isinstance(restored, np.random.Generator) and isinstance(present, np.random.Generator):
        present.bit_generator.state = restored.bit_generator.state
    else:
        setattr(layer, name, restored)


def same_kind(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> bool:
    """Return True if one array can be written into the other without loss."""
    return bool(left.shape == right.shape and left.dtype == right.dtype)
