"""Gymnasium's vector environments, in any autoreset mode, as a `VectorEnvironment`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from esper_telemetry.core.messages import did_you_mean
from esper_telemetry.ppo.environments.protocol import Array, Bools, Step
from esper_telemetry.ppo.environments.spaces import ObservationPacker, action_parts, observation_form
from esper_telemetry.ppo.environments.state import capture, packed, restore, unpacked

if TYPE_CHECKING:
    import gymnasium
    from gymnasium.envs.registration import EnvSpec

    Vector: TypeAlias = gymnasium.vector.VectorEnv[Any, Any, Any]


def make_vector(env_id: str, num_envs: int, seed: int | None, kwargs: dict[str, Any]) -> GymnasiumEnvironment:
    """`num_envs` copies of a registered task, in the fastest form that Gymnasium has for it; raises as `make_env`."""
    spec = find_spec(env_id)
    native = spec.vector_entry_point is not None and not spec.additional_wrappers
    make = make_native if native else make_synchronous
    try:
        vector = make(spec, num_envs, kwargs)
    except (ImportError, require_gymnasium().error.Error) as error:
        raise ValueError(f"environment {env_id!r} cannot be made: {error}") from error
    return GymnasiumEnvironment(vector, name=spec.id, seed=seed)


def make_native(spec: EnvSpec, num_envs: int, kwargs: dict[str, Any]) -> Vector:
    """The task's own vectorised implementation."""
    vector: Vector = require_gymnasium().make_vec(spec, num_envs, vectorization_mode="vector_entry_point", **kwargs)
    return vector


def make_synchronous(spec: EnvSpec, num_envs: int, kwargs: dict[str, Any]) -> Vector:
    """Single environments stepped one after the other; what they return is copied once, by the trainer."""
    gym = require_gymnasium()
    settings = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP, "copy": False}
    kwargs = {"disable_env_checker": True, **kwargs}
    vector: Vector = gym.make_vec(spec, num_envs, vectorization_mode="sync", vector_kwargs=settings, **kwargs)
    return vector


class GymnasiumEnvironment:
    """A Gymnasium vector environment as a `VectorEnvironment`, whatever its autoreset mode.

    SAME_STEP passes through. DISABLED is reset here, in the same step. NEXT_STEP returns an episode's last observation
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
        self.observation_shape, self.observation_layout, pack = observation_form(
            vector.single_observation_space, self.name
        )
        self.action_specs, self._to_native = action_parts(vector.single_action_space, self.name)
        self._vector: Any = vector
        self._rows = vector if pack is None else InRows(vector, pack)

    def reset(self, seed: int | None = None) -> Array:
        """Begin episodes everywhere, return the observations [B, ...]; a seed given at construction comes first."""
        self._resetting = None
        observations: Array = self._rows.reset(seed=seed if self._seed is None else self._seed)[0]
        return observations

    def step(self, actions: Mapping[str, Array]) -> Step:
        """Take one action in every environment; see `Step` for what comes back."""
        return self._step(self._rows.step(self._to_native(actions)))

    def close(self) -> None:
        """Close the environments."""
        self._vector.close()

    def state_dict(self) -> dict[str, Any] | None:
        """State of the environments and their random generators; None where they hold more than Python and NumPy."""
        state = capture(self._vector)
        return None if state is None else {"vector": state, "resetting": packed(self._resetting)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the environments go on from a saved state."""
        self._vector.reset(seed=0)
        restore(self._vector, state["vector"])
        self._resetting = unpacked(state["resetting"])

    def _next_step(self, result: tuple[Any, ...]) -> Step:
        observations, rewards, terminated, truncated, _ = result
        valid = None if self._resetting is None else ~self._resetting
        ended = terminated | truncated
        self._resetting = ended if ended.any() else None
        return Step(
            observations, rewards, terminated, truncated, valid, None if self._resetting is None else observations
        )

    def _same_step(self, result: tuple[Any, ...]) -> Step:
        observations, rewards, terminated, truncated, info = result
        final = info.get("final_obs")
        if final is not None:
            final = fill_rows(np.zeros_like(observations), final, info["_final_obs"])
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
    """A vector environment whose observations come as rows, however many parts they have."""

    def __init__(self, vector: Any, pack: ObservationPacker) -> None:
        self._vector, self._pack = vector, pack

    def reset(self, **arguments: Any) -> tuple[Array, dict[str, Any]]:
        """Observations [B, ...] and infos."""
        observations, info = self._vector.reset(**arguments)
        return self._pack(observations), info

    def step(self, actions: Any) -> tuple[Any, ...]:
        """Return what the environments return, final observations in rows too."""
        observations, *outcome, info = self._vector.step(actions)
        if "final_obs" in info:
            last = np.full(len(info["final_obs"]), None, object)
            for index in np.flatnonzero(info["_final_obs"]):
                last[index] = self._pack.one(info["final_obs"][index])
            info = {**info, "final_obs": last}
        return self._pack(observations), *outcome, info


def fill_rows(target: Array, rows: Array, mask: Bools) -> Array:
    """The target [B, ...] with its rows under `mask` taken from an object array [B] of observations."""
    for index in np.flatnonzero(mask):
        target[index] = rows[index]
    return target


def find_spec(env_id: str) -> EnvSpec:
    """Return Gymnasium's specification of an id; raise ValueError with the closest ids where there is none."""
    gym = require_gymnasium()
    module, _, name = env_id.rpartition(":")
    if module:
        import_environments(module, env_id)
    try:
        spec: EnvSpec = gym.spec(name)
    except (gym.error.Error, ValueError):
        hint = did_you_mean(name, gym.registry)
        raise ValueError(f"there is no environment {env_id!r}{hint}") from None
    return spec


def import_environments(module: str, env_id: str) -> None:
    """Import the module that registers an environment; raise ValueError where there is none of that name."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(f"the module of environment {env_id!r} cannot be imported: {error}") from None


def require_gymnasium() -> Any:
    """The gymnasium package; raises ImportError with the command that installs it."""
    try:
        import gymnasium
    except ImportError:
        raise ImportError("Gymnasium environments need gymnasium: pip install 'esper-telemetry[train]'") from None
    return gymnasium
