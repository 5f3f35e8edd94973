"""Environments by name: bundled environments, entry points of other packages, and every Gymnasium id."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from esper_telemetry.core.redaction import error_line
from esper_telemetry.ppo.environments.environment_protocol import Environment

if TYPE_CHECKING:
    from esper_telemetry.ppo.checkpoint import TrainingRun

_logger = logging.getLogger("esper_telemetry")

ENTRY_POINT_GROUP: Final = "esper_telemetry.environments"
BUNDLED: Final = {"cue-recall": "esper_telemetry.ppo.environments.cue_recall:CueRecall"}
"""The environments of this package; an installed entry point of the same name takes precedence."""

PresetSettings: TypeAlias = tuple[int, Mapping[str, Any]]
"""Number of environments that step together, and the settings of `PPOConfig` that differ from the defaults."""


@dataclass(frozen=True, slots=True)
class RegisteredEnvironment:
    """An environment that `make_env` knows by name, with settings that suit it.

    An entry point of the group `esper_telemetry.environments` names one, or only its `make`. Its module should not import torch before
    `make` does, because the command line reads the presets without torch.

    Attributes:
        make: (num_envs, *, seed, **arguments) -> the environments.
        train_options: options of `esper-telemetry train` that `make` accepts as arguments: `task`, `gamma`, `device`.
        presets: settings per policy.
        controllers: names of the policies that act by rules and do not learn.
        control: (environments, settings) -> a run of the controller that `settings.policy` names.
    """

    make: Callable[..., Environment]
    train_options: tuple[str, ...] = ()
    presets: Mapping[str, PresetSettings] = field(default_factory=dict)
    controllers: tuple[str, ...] = ()
    control: Callable[[Any, Any], TrainingRun] | None = None


def environment_names() -> tuple[str, ...]:
    """Names of all registered environments."""
    return tuple(_registered())


def registered(name: str) -> RegisteredEnvironment | None:
    """Return the registered environment with that name; None for Gymnasium ids and unknown names.

    Raises ValueError if the plugin that registers it cannot be loaded.
    """
    entry = _registered().get(name)
    if entry is None:
        return None
    try:
        loaded = entry.load()
    except (Exception, SystemExit) as error:  # from the code of a plugin
        raise ValueError(f"the environment {name!r} of {entry.value} cannot be loaded: {error_line(error)}") from error
    return loaded if isinstance(loaded, RegisteredEnvironment) else RegisteredEnvironment(loaded)


@cache
def every_environment() -> Mapping[str, RegisteredEnvironment]:
    """Return all registered environments by name; log a warning for a plugin that cannot be loaded."""
    environments = {}
    for name in environment_names():
        try:
            environments[name] = registered(name)
        except ValueError as error:
            _logger.warning("%s", error)
    return {name: environment for name, environment in environments.items() if environment is not None}


def controllers() -> tuple[str, ...]:
    """Names of the policies of all registered environments that do not learn."""
    return tuple(name for environment in every_environment().values() for name in environment.controllers)


def make_env(env_id: str, *, num_envs: int = 8, seed: int | None = None, mask_velocity: bool = False, **kwargs: Any) -> Environment:
    """Return `num_envs` copies of a task: a Gymnasium id or a registered name, such as `cue-recall` or `morphogenesis`.

    Args:
        env_id: the id or name; `module:Id` imports the module that registers a Gymnasium id first.
        num_envs: number of environments.
        seed: makes the episodes repeatable.
        mask_velocity: hide the velocities of a classic-control task, so that it needs memory.
        kwargs: passed to the environment's constructor.

    Raises:
        ValueError: unknown id, unsupported space, zero environments, no velocities to hide, or a wrong argument.
        ImportError: gymnasium, or the package with a task's data, is missing.
    """
    from esper_telemetry.ppo.environments.gymnasium import make_vector
    from esper_telemetry.ppo.environments.wrappers import HiddenVelocity, velocities

    if num_envs < 1:
        raise ValueError(f"num_envs must be at least 1, got {num_envs}")
    hidden = velocities(env_id) if mask_velocity else ()
    environment = registered(env_id)
    if environment is not None:
        return environment.make(num_envs, seed=seed, **kwargs)
    env = make_vector(env_id, num_envs, seed, kwargs)
    return HiddenVelocity(env, hidden) if mask_velocity else env


@cache
def _registered() -> dict[str, EntryPoint]:
    # The scan opens a file of every installed package. It runs once per process, as a trainer may later run out of file descriptors.
    bundled = {name: EntryPoint(name, target, ENTRY_POINT_GROUP) for name, target in BUNDLED.items()}
    return bundled | {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}
