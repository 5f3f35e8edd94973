"""Calls a function when a module has been imported, whoever imports it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


class AfterImport(MetaPathFinder):
    """Finds the modules it is told of as all others would, and calls back when one has been loaded.

    Args:
        callbacks: by the full name of the module.
    """

    def __init__(self, callbacks: dict[str, Callable[[ModuleType], None]]) -> None:
        self._callbacks = callbacks

    def install(self) -> None:
        """Begins; modules that are there already are told of at once."""
        for name in [name for name in self._callbacks if name in sys.modules]:
            self._callbacks.pop(name)(sys.modules[name])
        sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Ends; harmless when repeated."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Another finder's, with a loader that calls back."""
        callback = self._callbacks.pop(fullname, None)
        if callback is None:
            return None
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            _call_after(spec.loader, callback)
        return spec


def _call_after(loader: Loader, callback: Callable[[ModuleType], None]) -> None:
    load = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        load(module)
        callback(module)

    loader.exec_module = exec_module  # type: ignore[method-assign]  # this loader is of this module alone
