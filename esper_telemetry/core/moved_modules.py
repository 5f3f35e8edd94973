"""Old paths of public modules, importable as aliases of the modules that replaced them.

An alias is the same module object under a second name, so a class exists once. `python -m OLD_PATH` works as well.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

PACKAGE: Final = "esper_telemetry."

MOVED: Final = {
    "catalogue": "core.catalogue",
    "core.derived": "core.metric",
    "derived": "core.metric",
    "detectors": "alarms",
    "environments": "ppo.environments",
    "environments.morphogenesis": "lab.morphogenesis",
    "faults": "lab.faults",
    "foreign": "importers",
    "group": "core.group",
    "history.change": "history.deviations",
    "history.outliers": "history.deviations",
    "hooks": "events",
    "metric": "core.metric",
    "metrics.observations": "metrics.rollout",
    "record": "core.record",
    "redaction": "core.redaction",
    "reduction": "core.reduction",
    "registry": "alarms.metric_entries",
    "relay": "delivery",
    "series": "history",
    "sinks.stored": "sinks.protocol",
    "summary": "updates",
    "wiring": "adapters.attach",
}
"""New path by old path, both below the package; the modules inside a moved package are aliases too."""


def new_path(name: str) -> str | None:
    """Return the new path of a module that was moved; None for any other module."""
    if not name.startswith(PACKAGE):
        return None
    path, inner = name[len(PACKAGE) :], ""
    while path:
        if path in MOVED:
            return PACKAGE + MOVED[path] + inner
        path, _, last = path.rpartition(".")
        inner = f".{last}{inner}"
    return None


class AliasFinder:
    """Finds old module paths; stands first in `sys.meta_path`, as a package's own path would find its modules a second time."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return the spec of an alias, or None where the name is no old path or nothing is at the new one."""
        new = new_path(name)
        if new is None:
            return None
        from importlib.util import find_spec

        spec = find_spec(new)
        if spec is None:
            return None
        is_package = spec.submodule_search_locations is not None
        return ModuleSpec(name, AliasLoader(spec), origin=spec.origin, is_package=is_package)  # type: ignore[arg-type]


class AliasLoader:
    """Loads the new module under its old name."""

    def __init__(self, spec: ModuleSpec) -> None:
        self.spec = spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the new module."""
        return import_module(self.spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's own spec, which the import system has replaced by that of the alias."""
        module.__spec__ = self.spec

    def get_code(self, name: str) -> Any:
        """Return the code of the new module, for `python -m`."""
        loader: Any = self.spec.loader
        return loader.get_code(self.spec.name)


def install() -> None:
    """Make old paths importable in this process."""
    if not any(isinstance(finder, AliasFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, AliasFinder())
