"""Facts about the environment that a trainer or a script uses: its name, its arguments, its wrappers and its spaces.

`compare` reads them as settings, so runs before and after a change of the environment are two configurations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

MAX_WRAPPERS: Final = 32
MAX_FACT_CHARACTERS: Final = 500
NEUTRAL_WRAPPERS: Final = frozenset(
    {"HumanRendering", "Monitor", "OrderEnforcing", "PassiveEnvChecker", "RecordEpisodeStatistics", "RecordVideo"}
    | {"RenderCollection", "VecCheckNan", "VecMonitor", "VecVideoRecorder"}
)
"""Wrappers that only check or record: observations, actions, rewards and the ends of episodes stay as they are."""
NEUTRAL_ARGUMENTS: Final = frozenset({"max_episode_steps", "num_envs", "render_mode", "vector_kwargs", "vectorization_mode", "wrappers"})
"""Arguments of `gymnasium.make` and `make_vec` that change nothing in the environment, or that other facts show."""


def environment_facts(env: Any) -> dict[str, Any]:
    """Return the facts of an environment, or of the first of several that step together; none for an object that is not one.

    Wrappers are in the order from the environment outwards. Environments in other processes show only what their spec lists.
    """
    try:
        return _facts(env) if hasattr(env, "step") else {}
    except Exception:  # of any kind: an environment's attributes may be computed
        return {}


def _facts(env: Any) -> dict[str, Any]:
    layers = list(_layers(env))
    spec = next((one for layer in layers if (one := getattr(layer, "spec", None)) is not None), None)
    is_remote = hasattr(layers[-1], "processes")  # as in SubprocVecEnv and AsyncVectorEnv
    if is_remote and not hasattr(layers[-1], "spec"):
        spec = layers[-1].get_attr("spec")[0]
    wrappers = [layer for layer in reversed(layers) if getattr(layer, "unwrapped", layer) is not layer]
    chain = [(type(one).__name__, getattr(one, "_saved_kwargs", None)) for one in wrappers]
    if is_remote:
        chain = [(one.name, one.kwargs) for one in getattr(spec, "additional_wrappers", ())] + chain
    has_limit = getattr(spec, "max_episode_steps", None) is not None  # which is the fact `horizon`
    hidden = NEUTRAL_WRAPPERS | {"TimeLimit"} if has_limit else NEUTRAL_WRAPPERS
    shown = [f"{name}({_arguments(kwargs)})" if kwargs else name for name, kwargs in chain if name not in hidden]
    spaces = {name: getattr(env, f"single_{name}", getattr(env, name, None)) for name in ("observation_space", "action_space")}
    name = getattr(spec, "id", None) or ("" if is_remote else type(layers[-1]).__name__)
    arguments = {key: value for key, value in getattr(spec, "kwargs", {}).items() if key not in NEUTRAL_ARGUMENTS}
    texts = {
        "env": name,
        "env_arguments": _arguments(arguments),
        "env_wrappers": ", ".join(shown),
        **{name: " ".join(str(space).split()) for name, space in spaces.items() if space is not None},
    }
    threshold = getattr(spec, "reward_threshold", None)
    known = {} if threshold is None else {"reward_threshold": float(threshold)}
    return {name: str(text)[:MAX_FACT_CHARACTERS] for name, text in texts.items() if text} | known


def _layers(env: Any) -> Iterator[Any]:
    """Yield an environment, and what it wraps or holds, from the outside in."""
    for _ in range(MAX_WRAPPERS):
        yield env
        is_wrapper = getattr(env, "unwrapped", env) is not env
        inner = [getattr(env, name, None) for name in (("venv", "env") if is_wrapper else ())]
        envs = getattr(env, "envs", None)
        inner += envs[:1] if isinstance(envs, list | tuple) and not is_wrapper else []
        env = next((one for one in inner if one is not None), None)
        if env is None:
            return


def _arguments(kwargs: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={_plain(value)}" for name, value in kwargs.items())


def _plain(value: Any) -> str:
    """Return numbers and texts as they are written; of other objects, whose texts may differ from run to run, only the name or class."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_plain, value))}]"
    is_plain = isinstance(value, str | int | float | None)
    return repr(value) if is_plain else str(getattr(value, "__name__", type(value).__name__))
