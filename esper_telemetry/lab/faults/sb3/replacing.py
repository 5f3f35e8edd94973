"""What is replaced to break a model of Stable-Baselines3: attributes of single objects, and what environments answer."""

from __future__ import annotations

from typing import Any

from esper_telemetry.lab.faults.fault import Undo
from esper_telemetry.lab.faults.sb3.environments import Breakable, Change


class NotForThisModelError(ValueError):
    """A fault needs what this model does not have; the message says what."""


def require(there: bool, lacks: str) -> None:
    """Raises NotForThisModelError with what is lacking."""
    if not there:
        raise NotForThisModelError(lacks)


def attribute(owner: Any, **values: Any) -> Undo:
    """Replaces attributes of one object, not those of its class."""
    before = {name: vars(owner)[name] for name in values if name in vars(owner)}
    vars(owner).update(values)

    def undo() -> None:
        for name in values:
            vars(owner).pop(name, None)
        vars(owner).update(before)

    return undo


def answers(model: Any, change: Change) -> Undo:
    """Changes what the environments answer."""
    env: Any = model.env
    while not isinstance(env, Breakable):
        env = env.venv
    return attribute(env, change=change)
