"""Imports at first use, of a package's public names and of torch; and imports without garbage collection.

Modules that declare metrics also contain the functions that measure them. torch takes a second to import, and readers of the declarations
(the catalogue, a journal's run line, `esper-telemetry metrics`) do not need it. Such modules write
`from esper_telemetry.core.lazy import Tensor, inference_mode, no_grad, torch`, and torch is imported when a function first uses it.
"""

from __future__ import annotations

import ast
import gc
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

if TYPE_CHECKING:
    import torch as torch
    from torch import Tensor as Tensor
else:

    class LazyTorch(ModuleType):
        """torch, imported when an attribute is first read."""

        def __getattr__(self, name: str) -> Any:
            value = getattr(import_module("torch"), name)
            setattr(self, name, value)  # later look-ups do not call this function
            return value

    class TensorType(type):
        """Type of `Tensor`."""

        def __instancecheck__(cls, value: object) -> bool:
            """Return True for a tensor; before torch is imported none exist."""
            return isinstance(value, getattr(sys.modules.get("torch"), "Tensor", ()))

    class Tensor(metaclass=TensorType):
        """`torch.Tensor` in annotations and in `isinstance`."""

    torch = LazyTorch("torch")


def inference_mode(function: Callable[P, T]) -> Callable[P, T]:
    """Return the function as `torch.inference_mode` decorates it."""

    @wraps(function)
    def decorated(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch.inference_mode():
            return function(*args, **kwargs)

    return decorated


def no_grad(function: Callable[P, T]) -> Callable[P, T]:
    """Return the function as `torch.no_grad` decorates it."""

    @wraps(function)
    def decorated(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch.no_grad():
            return function(*args, **kwargs)

    return decorated


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause garbage collection inside: the objects that imports make are kept, and scanning them takes a fifth of a command's start."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def lazy_names(package: str) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__all__`, `__getattr__` and `__dir__` of a package whose public names are defined in other modules.

    The names are those that the package's source imports under `if TYPE_CHECKING`, so that each is written once.

    A sink's process does not need torch and a trainer does not need backends, so a package imports nothing until a name is used. A name
    is stored in the package at its first use: `__getattr__` is called once for each.

    Args:
        package: the package's `__name__`.
    """
    blocks = [node for node in ast.parse(inspect.getsource(sys.modules[package])).body if isinstance(node, ast.If)]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    module_of = {alias.name: str(node.module) for node in imports for alias in node.names}

    def lazy_attribute(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(module_of[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*module_of, *vars(sys.modules[package])})

    return sorted(module_of), lazy_attribute, names
