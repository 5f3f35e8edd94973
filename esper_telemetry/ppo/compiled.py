"""Compiling the passes of an update with `torch.compile`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Outcome = TypeVar("Outcome")

COMPILERS = ("g++", "clang++")


def compiled(function: Callable[Arguments, Outcome]) -> Callable[Arguments, Outcome]:
    """The function, compiled when it is first called; a second backward pass through what it returns stays possible.

    Compiled backward passes reuse the memory of what they read unless the process tells them not to, and then fail where a
    hook has looked at gradients on their way.
    """
    import torch._functorch.config as functorch

    functorch.donated_buffer = False
    return torch.compile(function)


def require_compiler(device: torch.device) -> None:
    """Raises ValueError where nothing on this machine can compile for that device; on the CPU that takes a C++ compiler."""
    candidates = (os.environ.get("CXX"), *COMPILERS)
    if device.type == "cpu" and not any(name and shutil.which(name) for name in candidates):
        raise ValueError(
            f"compile needs a C++ compiler on the CPU: neither $CXX nor {' nor '.join(COMPILERS)} is found"
        )
