"""Packages whose public names are imported when they are first used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(
    package: str, modules: Mapping[str, tuple[str, ...]]
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__all__`, `__getattr__` and `__dir__` of a package whose public names stand in other modules.

    A sink's process needs no torch and a trainer no backend, so a package imports nothing until a name is used. A name
    is stored in the package once it was used: `__getattr__` is called once for each.

    Args:
        package: the package's `__name__`.
        modules: the public names by the module that defines them.
    """
    module_of = {name: module for module, names in modules.items() for name in names}

    def lazy_attribute(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(module_of[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*module_of, *vars(sys.modules[package])})

    return sorted(module_of), lazy_attribute, names
