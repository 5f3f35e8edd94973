"""Checks of arguments of the metric functions: settings are numbers, and torch's errors about shapes become one sentence."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dis import opname
from functools import wraps
from inspect import signature
from types import TracebackType
from typing import Any, Final, ParamSpec, TypeVar

from esper_telemetry.core.arrays import as_integer, as_setting, shown
from esper_telemetry.core.requirements import require_text, require_truth

P = ParamSpec("P")
T = TypeVar("T")

PACKAGE: Final = "esper_telemetry."
MAX_REASON_CHARACTERS: Final = 200
SMALLEST_AXIS: Final = -64
"""Torch limits tensors to 64 axes."""


def checked_arguments(**smallest: float) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator that checks arguments annotated as numbers, texts or booleans, and names wrong ones.

    Args:
        smallest: smallest value of a setting, by its name.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        names = tuple(signature(function).parameters)
        checks = {
            name: check
            for name, annotation in function.__annotations__.items()
            if (check := _check(str(annotation), smallest.get(name))) is not None
        }

        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            for name in checks.keys() & kwargs.keys():
                kwargs[name] = checks[name](kwargs[name], name)
            positional = tuple(
                [
                    checks[name](value, name) if name in checks else value
                    for name, value in zip(names, args, strict=False)
                ]
            )
            try:
                return function(*positional, *args[len(names) :], **kwargs)  # type: ignore[arg-type]  # the same arguments
            except Exception as error:
                if _is_own(error):
                    raise
                given = dict(zip(names, args, strict=False)) | kwargs
                raise ValueError(f"{function.__name__} cannot use {_shapes(given)}: {_reason(error)}") from error

        return checked

    return decorate


def _check(annotation: str, smallest: float | None) -> Callable[[object, str], Any] | None:
    kind, _, _ = annotation.partition(" | None")
    low = -math.inf if smallest is None else smallest
    checks: dict[str, Callable[[object, str], Any]] = {
        "float": lambda value, name: as_setting(value, name, low=low),
        "int": lambda value, name: as_integer(value, name, smallest=SMALLEST_AXIS if smallest is None else int(low)),
        "str": lambda value, name: require_text(name, value),
        "bool": lambda value, name: require_truth(name, value),
    }
    check = checks.get(kind)
    if check is None or kind == annotation:
        return check
    return lambda value, name: None if value is None else check(value, name)


def _is_own(error: Exception) -> bool:
    """Return whether a `raise` statement of this package made the exception, so that its message is a sentence for users."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or not isinstance(error, TypeError | ValueError):
        return False
    own = str(trace.tb_frame.f_globals.get("__name__", "")).startswith(PACKAGE)
    return own and opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:MAX_REASON_CHARACTERS]}"


def _shapes(arguments: Mapping[str, Any]) -> str:
    return (
        ", ".join([f"{name} {text}" for name, value in arguments.items() for text in _shape(value)]) or "its arguments"
    )


def _shape(value: Any) -> Iterator[str]:
    """Yield the shape of an array, or the shapes of the arrays in a mapping; settings are skipped."""
    if isinstance(value, Mapping):
        yield "{" + ", ".join([f"{key}: {''.join(_shape(part)) or shown(part)}" for key, part in value.items()]) + "}"
    elif isinstance(value, str | bytes | None | bool | int | float):
        return
    elif getattr(value, "is_nested", False):
        yield "nested"
    elif hasattr(value, "shape"):
        yield str(list(value.shape))
    elif isinstance(value, list | tuple):
        yield f"of {len(value)} items"
    elif not callable(value):
        yield f"of type {type(value).__name__}"
