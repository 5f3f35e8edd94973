"""Requirements on arguments: each function returns the value, or raises TypeError or ValueError, with the value in one sentence.

`checked_arguments` also turns torch's errors about shapes into one sentence.
"""

from __future__ import annotations

import math
import operator
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import fields
from dis import opname
from functools import partial, wraps
from inspect import signature
from numbers import Real
from pathlib import Path
from types import TracebackType
from typing import Any, Final, ParamSpec, TypeVar

from esper_telemetry.core.arrays import as_integer, as_setting
from esper_telemetry.core.messages import shown

MAX_NAME_BYTES: Final = 255
MAX_PATH_BYTES: Final = 4095
"""Maximum length of a file name, and of a whole path, in the usual file systems."""

Value = TypeVar("Value")


def require_text(name: str, value: Any, *, may_be_empty: bool = False) -> str:
    """Return a text."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a text, got {shown(value)}")
    if not (may_be_empty or value.strip()):
        raise ValueError(f"{name} must not be empty, got {shown(value)}")
    return value


def require_path(name: str, value: Any) -> Path:
    """Return a path, `~` expanded, that file systems can represent."""
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str):
        raise TypeError(f"{name} must be a path, got {shown(value)}")
    if not text.strip():
        raise ValueError(f"{name} must not be empty, got {shown(text)}")
    if "\0" in text:
        raise ValueError(f"{name} must be a path without NUL characters, got {shown(text)}")
    try:
        sizes = [len(os.fsencode(part)) for part in (text, *Path(text).parts)]
    except UnicodeEncodeError:
        raise ValueError(f"{name} must be a path that file systems can encode, got {shown(text)}") from None
    if sizes[0] > MAX_PATH_BYTES or max(sizes[1:], default=0) > MAX_NAME_BYTES:
        limits = f"at most {MAX_PATH_BYTES:,} bytes, and {MAX_NAME_BYTES} between slashes"
        raise ValueError(f"{name} must be a path of {limits}, got {shown(text)}")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ValueError(f"{name} must be a path, and this system lacks a home directory of {text.partition(os.sep)[0]}") from None


def require_flag(name: str, value: Any) -> bool:
    """Return True or False."""
    if value is not True and value is not False:
        raise TypeError(f"{name} must be True or False, got {shown(value)}")
    return value


def require_truth(name: str, value: Any) -> bool:
    """Return the truth value of True, False, NumPy's booleans, or 0 and 1."""
    if getattr(value, "ndim", 0) or isinstance(value, float | str) or value not in (True, False):
        raise TypeError(f"{name} must be True or False, got {shown(value)}")
    return bool(value)


def require_number(name: str, value: Any, *, low: float = -math.inf, high: float = math.inf, above: float = -math.inf) -> float:
    """Return a finite number from `low` to `high`, and larger than `above`."""
    if type(value) not in (int, float) and (isinstance(value, bool) or not isinstance(value, Real)):
        raise TypeError(f"{name} must be one number, got {shown(value)}")
    if not (math.isfinite(value) and low <= value <= high and value > above):
        raise ValueError(f"{name} must be {_range(low, high, above)}, got {shown(value)}")
    return float(value)


def require_count(name: str, value: Any, *, low: int = 0, high: float = math.inf) -> int:
    """Return a whole number from `low` to `high`."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or bool(getattr(value, "ndim", 0)):
        raise TypeError(f"{name} must be a whole number, got {shown(value)}")
    count = operator.index(value)
    if not low <= count <= high:
        end = f"at least {low:,}" if count < low else f"at most {high:,}"
        raise ValueError(f"{name} must be {end}, got {shown(value)}")
    return count


def require_each(name: str, values: Any, require: Callable[[str, Any], Value], *, may_be_empty: bool = True) -> tuple[Value, ...]:
    """Return the items of a tuple, a list or a set, each of which meets a requirement."""
    if not isinstance(values, tuple | list | set | frozenset):
        raise TypeError(f"{name} must be a tuple, got {shown(values)}")
    if not (values or may_be_empty):
        raise ValueError(f"{name} must not be empty, got {shown(values)}")
    each = f"each of {name}" if values else ""
    return tuple([require(each, value) for value in values])


def require_choice(name: str, value: Any, choices: Collection[Value]) -> Value:
    """Return one of some values."""
    for choice in choices:
        if type(value) is type(choice) and value == choice:
            return choice
    raise ValueError(f"{name} must be {_alternatives(choices)}, got {shown(value)}")


def require_types(settings: Any) -> None:
    """Raise TypeError for a field of a dataclass whose value does not have the declared type: a plain type, or a tuple of one."""
    for field in fields(settings):
        value, kind = getattr(settings, field.name), str(field.type)
        if value is None and kind.endswith(" | None"):
            continue
        requirement = REQUIREMENTS[kind.removesuffix(" | None")]
        requirement(field.name, value)


def _require_real(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be one number, got {shown(value)}")


REQUIREMENTS: Final[Mapping[str, Callable[[str, Any], object]]] = {
    "bool": require_truth,
    "float": _require_real,
    "int": partial(require_count, low=-sys.maxsize),
    "str": partial(require_text, may_be_empty=True),
    "tuple[int, ...]": partial(require_each, require=partial(require_count, low=-sys.maxsize)),
}
"""Requirements by the annotation of a field."""


def _range(low: float, high: float, above: float) -> str:
    if low > -math.inf and high < math.inf:
        return f"between {low:,.15g} and {high:,.15g}"
    words = [f"at least {low:,.15g}"] if low > -math.inf else ["positive"] if above == 0 else []
    return " and ".join([*words, f"at most {high:,.15g}" if high < math.inf else "finite"])


def _alternatives(choices: Iterable[object]) -> str:
    *others, last = map(repr, choices)
    return f"{', '.join(others)} or {last}" if others else last


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
            positional = tuple([checks[name](value, name) if name in checks else value for name, value in zip(names, args, strict=False)])
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
    return ", ".join([f"{name} {text}" for name, value in arguments.items() for text in _shape(value)]) or "its arguments"


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
