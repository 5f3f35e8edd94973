"""Who may import whom, and what importing the package must not cost: the house of docs/architecture.md."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import esper_telemetry

PACKAGE = Path(__file__).parents[1] / "esper_telemetry"

CORE = {"conversion", "record", "metric", "derived", "reduction", "layout", "group", "ops"}
ALLOWED: dict[str, set[str]] = {
    "record": set(),
    "hooks": set(),
    "policy_replay": set(),
    "events": {"policy_replay"},
    "ops": set(),
    "clock": set(),
    "courtesy": set(),
    "sampling": {"record"},
    "profiling": {"events", "hooks"},
    "metric": {"record"},
    "derived": {"record", "metric"},
    "conversion": set(),
    "reduction": {"conversion"},
    "layout": {"conversion", "record", "metric", "reduction"},
    "group": {"conversion", "record", "metric", "reduction", "layout"},
    "window": {"conversion", "record", "metric", "reduction", "layout", "group"},
    "metrics": CORE,
    "series": {"record", "metric", "derived"},
    "alarms": {"record"},
    "detectors": {"record", "metric", "derived", "series", "alarms", "suggestion"},
    "foreign": {"record", "metric", "derived", "redaction", "series", "sinks"},
    "catalogue": CORE | {"detectors", "metrics", "series"},
    "registry": CORE | {"alarms", "catalogue", "series", "sinks"},
    "journal": {"record"},
    "redaction": set(),
    "forks": set(),
    "suggestion": set(),
    "sinks": {"record", "redaction", "journal", "suggestion"},
    "relay": {"record", "redaction", "courtesy", "journal", "sinks"},
    "summary": CORE | {"metrics", "policy_replay"},
    "evidence": CORE | {"alarms", "metrics", "summary"},
    "writer": CORE | {"evidence", "journal", "logged", "metrics", "series", "summary", "watch", "window"},
    "watch": {"record"},
    "response": {"clock", "record", "watch"},
    "detecting": {"detectors", "watch"},
    "offload": CORE | {"courtesy", "journal", "logged", "sampling", "summary", "watch", "writer"},
    "claim": {"journal"},
    "recorder": CORE
    | {"claim", "journal", "logged", "offload", "redaction", "registry", "relay"}
    | {"sinks", "summary", "watch", "writer"},
    "failure": {"record"},
    "logged": {"conversion", "record"},
    "gradient_tap": {"ops"},
    "watched": CORE | {"clock", "failure", "gradient_tap", "metrics", "summary"},
    "ranks": CORE | {"recorder", "watch", "window"},
    "telemetry": CORE
    | {"clock", "detecting", "failure", "ranks", "recorder", "relay", "response", "sampling", "sinks", "summary"}
    | {"forks", "gradient_tap", "open_update", "watched", "window", "writer"},
    "open_update": CORE | {"logged", "summary", "window"},
    "wiring": CORE | {"clock", "events", "failure", "hooks", "metrics", "policy_replay", "summary", "telemetry"},
    "environments": {"events", "hooks", "suggestion"},
    "adapters": {
        "clock",
        "environments",
        "events",
        "failure",
        "hooks",
        "metric",
        "ops",
        "record",
        "policy_replay",
        "telemetry",
        "wiring",
    },
    "ppo": {"environments", "ops", "hooks", "events", "policy_replay"},
    "testing": {"record", "journal", "relay", "sinks"},
    "faults": CORE
    | {
        "adapters",
        "alarms",
        "commands",
        "detectors",
        "environments",
        "events",
        "journal",
        "ppo",
        "sinks",
        "telemetry",
        "wiring",
    },
}
"""Of ours, what each module or package may import besides itself; `cli` and `commands` may import everything."""

FREE = {"__init__", "__main__", "cli", "commands"}
WITHOUT_TORCH = ("record", "metric", "series", "journal", "sinks", "relay", "testing", "alarms", "detectors", "foreign")


def imports() -> Iterator[tuple[str, str]]:
    """(importing module, imported module), both by the first name below the package."""
    for path in PACKAGE.rglob("*.py"):
        importer = path.relative_to(PACKAGE).with_suffix("").parts[0]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for name in _imported(node):
                yield importer, name


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module == "esper_telemetry":
        return [f"esper_telemetry.{alias.name}" for alias in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) and node.module else []


def test_every_module_has_its_place() -> None:
    modules = {
        path.stem if path.is_file() else path.name for path in PACKAGE.iterdir() if not path.name.startswith("_")
    }

    assert modules - {"py"} <= set(ALLOWED) | FREE


def test_modules_import_only_what_lies_below_them() -> None:
    wrong = [
        f"{importer} imports {name}"
        for importer, name in imports()
        if name.startswith("esper_telemetry.") and importer not in FREE
        if name.split(".")[1] not in ALLOWED[importer] | {importer}
    ]

    assert wrong == []


def test_no_module_imports_the_package_itself() -> None:
    assert [importer for importer, name in imports() if name == "esper_telemetry"] == []


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_the_sinks_process_needs_no_torch(module: str) -> None:
    assert "torch" not in _loaded_by(f"import esper_telemetry.{module}")


def test_importing_telemetry_imports_no_backend() -> None:
    loaded = _loaded_by("from esper_telemetry import Telemetry, TensorBoardSink, WandbSink, MLflowSink, attach")

    assert loaded.isdisjoint({"wandb", "mlflow", "tensorboard", "gymnasium", "rich", "tyro", "pandas"})


def _loaded_by(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_no_module_hides_a_public_name() -> None:
    """`from esper_telemetry import replay` would give the module instead of the function, once anything has imported that."""
    modules = {path.stem for path in PACKAGE.glob("*.py")} | {
        path.parent.name for path in PACKAGE.glob("*/__init__.py")
    }

    assert modules.isdisjoint(esper_telemetry.__all__)
