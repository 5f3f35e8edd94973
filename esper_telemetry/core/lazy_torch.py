"""torch for modules that must import without it: `from esper_telemetry.core.lazy_torch import Tensor, inference_mode, torch`.

The modules that declare metrics also hold the functions that measure them. torch takes a second to import, and readers of the
declarations (the catalogue, a journal's run line, `esper-telemetry metrics`) need none: it is imported when such a function first uses it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
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
            setattr(self, name, value)  # found without this function from now on
            return value

    class TensorType(type):
        """Type of `Tensor`."""

        def __instancecheck__(cls, value: object) -> bool:
            """Before torch is imported there are no tensors."""
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
