"""The names that a script has where it calls into torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

PASSED_OVER = {"torch", "esper_telemetry", "accelerate", "contextlib", "gymnasium"}
"""Packages whose frames stand between the script and us."""

OUTWARD = 4
"""Frames of the script that are looked at, the innermost first."""

OPTIMIZED = 0x1
"""Flag of code whose local variables are no dictionary."""


class Names:
    """The variables of a frame, then the attributes of its `self` and its settings, then those of the frames that called it.

    Hold it no longer than the call in which it was made: it keeps alive what the script would let go.
    """

    def __init__(self, scopes: list[Mapping[str, Any]]) -> None:
        self._scopes = scopes

    def find(self, names: tuple[str, ...], accept: Callable[[Any], T | None]) -> T | None:
        """What `accept` makes of the first variable with one of these names that it accepts; names before scopes."""
        for name in names:
            for scope in self._scopes:
                if name in scope and (found := accept(scope[name])) is not None:
                    return found
        return None

    def values(self) -> Iterator[Any]:
        """Everything that has a name."""
        for scope in self._scopes:
            yield from scope.values()


SETTINGS = ("args", "config", "cfg", "hp", "hparams", "opts", "options", "params", "flags")
"""What scripts call the object with their settings."""


def names_here() -> Names:
    """The names of whoever called into torch."""
    scopes: list[Mapping[str, Any]] = []
    for frame in _frames():
        scopes.append(_locals(frame))
        scopes += [vars(owner) for name in ("self", "agent") if hasattr(owner := scopes[-1].get(name), "__dict__")]
    scopes += [found for scope in list(scopes) for name in SETTINGS if (found := settings(scope.get(name)))]
    return Names(scopes)


def settings(thing: object) -> dict[str, Any]:
    """Settings by name, of a dictionary or an object with attributes; empty for anything else."""
    if isinstance(thing, Mapping):
        return {key: value for key, value in thing.items() if isinstance(key, str)}
    return dict(vars(thing)) if hasattr(thing, "__dict__") and not callable(thing) else {}


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    count = 0
    while frame is not None and count < OUTWARD:
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in PASSED_OVER:
            yield frame
            count += 1
            if frame.f_globals.get("__name__") == "__main__" and frame.f_locals is frame.f_globals:
                return
        frame = frame.f_back


def _locals(frame: FrameType) -> Mapping[str, Any]:
    """A copy of a frame's variables. Python 3.11 and 3.12 keep a dictionary of its own with the frame of a function, which would keep
    tensors alive after the function has let them go: they are taken out of it.
    """
    names = frame.f_locals
    if not frame.f_code.co_flags & OPTIMIZED:
        return names
    found = dict(names)
    if type(names) is dict:
        for name, value in found.items():
            if hasattr(value, "grad_fn"):
                del names[name]
    return found
