"""The layout in docs/architecture.md: which part may import which, and what importing the package must not do."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import esper_telemetry
from esper_telemetry.equations.equation import equations

PACKAGE = Path(__file__).parents[1] / "esper_telemetry"

BELOW: dict[str, set[str]] = {
    "core": set(),
    "events": {"core"},
    "history": {"core"},
    "journal": {"core"},
    "metrics": {"core"},
    "equations": {"core", "metrics"},
    "alarms": {"core", "history", "equations"},
    "updates": {"core", "events", "metrics", "equations"},
    "ppo": {"core", "events"},
    "sinks": {"core", "history", "alarms", "journal"},
    "importers": {"core", "history", "alarms", "journal"},
    "views": {"core", "equations", "history", "alarms", "journal", "sinks", "importers"},
    "delivery": {"core", "journal", "sinks"},
    "pipeline": {"core", "updates", "history", "alarms", "journal"},
}
BELOW["session"] = BELOW.keys() - {"ppo"}
BELOW["testing"] = {"core", "equations", "journal", "sinks", "delivery"}
BELOW["recording"] = {"core", "events", "updates", "metrics", "equations", "session"}
BELOW["telemetry"] = {*BELOW["session"], "session", "recording"}
BELOW["adapters"] = {"core", "events", "updates", "metrics", "equations", "session", "recording", "telemetry"}
"""The other parts of the package that each part may import; `lab`, `cli` and `__main__` may import everything."""

ABOVE_ALL = {"lab", "cli", "__main__", "__init__"}

WITHOUT_TORCH = ("metrics", "equations", "history", "alarms", "journal", "delivery", "sinks", "views", "importers", "testing")


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]


def imports() -> Iterator[tuple[str, str, str]]:
    """Yield (file, importing part, imported part) for every import of this package, at any level of a file."""
    for path in PACKAGE.rglob("*.py"):
        place = path.relative_to(PACKAGE)
        for node in nodes_of(path):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module == "esper_telemetry":
                names = [f"esper_telemetry.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            for name in names:
                if name.startswith("esper_telemetry"):
                    yield str(place), place.with_suffix("").parts[0], (*name.split("."), "__init__")[1]


def test_every_part_has_its_place() -> None:
    parts = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()} - {"__pycache__"}

    assert parts <= set(BELOW) | ABOVE_ALL


def test_parts_import_only_what_lies_below_them() -> None:
    wrong = [
        f"{place} imports {imported}"
        for place, importer, imported in imports()
        if importer not in ABOVE_ALL
        if imported not in BELOW[importer] | {importer}
    ]

    assert wrong == []


@pytest.mark.system
def test_the_sinks_process_needs_no_torch() -> None:
    modules = [
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for part in WITHOUT_TORCH
        for path in [*PACKAGE.glob(f"{part}.py"), *PACKAGE.glob(f"{part}/**/*.py")]
        if "tensorboard" not in path.parts or path.stem == "sink"
    ]

    assert "torch" not in _loaded_by("import " + ", ".join(modules))


@pytest.mark.system
def test_importing_telemetry_imports_no_backend() -> None:
    names = "Telemetry, TensorBoardSink, WandbSink, MLflowSink, attach, delivery, testing"
    loaded = _loaded_by(f"import esper_telemetry.delivery.child; from esper_telemetry import {names}")

    assert loaded.isdisjoint({"wandb", "mlflow", "tensorboard", "gymnasium", "rich", "tyro", "pandas"})


GLOBAL_STATE = """
import atexit, copyreg, gc, importlib, logging, os, signal, sys, warnings
import gymnasium, numpy, rich, stable_baselines3, torch, torch._dynamo, tyro
try:
    import ray.rllib.algorithms.ppo
except ImportError:
    pass

def state():
    return {
        "environment": dict(os.environ),
        "import": ([*map(id, sys.meta_path)], [*sys.path], [*map(id, sys.path_hooks)]),
        "hooks": (sys.excepthook, sys.unraisablehook, sys.displayhook, atexit._ncallbacks()),
        "signals": [signal.getsignal(number) for number in signal.valid_signals()],
        "warnings": [*warnings.filters],
        "logging": ([*logging.root.handlers], logging.root.level, logging.getLogger("esper_telemetry").handlers),
        "pickling": dict(copyreg.dispatch_table),
        "garbage": (gc.isenabled(), gc.get_threshold()),
        "torch": (torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(), torch.initial_seed()),
    }

before = state()
register, registered = os.register_at_fork, []
os.register_at_fork = lambda **hooks: registered.append(hooks)
for module in sys.argv[1:]:
    try:
        importlib.import_module(module)
    except ImportError as missing:  # the trainer of an adapter
        assert "esper_telemetry" not in (missing.name or "")
after = state()
print(registered, *[name for name in before if before[name] != after[name]])
"""


@pytest.mark.system
def test_importing_changes_nothing_global() -> None:
    """Only modules that are programs may set import finders, variables, signal handlers, hooks, filters or settings of torch."""
    programs = {"__main__", "sb3_models", "language_models"}
    modules = sorted(
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        for path in PACKAGE.rglob("*.py")
        if path.stem not in programs
    )

    done = subprocess.run([sys.executable, "-c", GLOBAL_STATE, *modules], capture_output=True, text=True, check=False)

    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


def test_nothing_branches_on_the_name_of_a_mistake_or_a_trainer() -> None:
    """What is special about a mistake is a field of its declaration; what is special about a trainer is a fact."""
    names = {one.name for equation in equations().values() for one in equation.hypotheses}
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        about_hypotheses = "hypothes" in path.read_text(encoding="utf-8")
        is_measurement = path.relative_to(PACKAGE).parts[0] in ("equations", "updates")
        if not about_hypotheses and not is_measurement:
            continue
        tree, *nodes = nodes_of(path)
        assert isinstance(tree, ast.Module)
        texts = {target: _strings(getattr(node, "value", None)) for node in tree.body for target in _targets(node)}
        for node in nodes:
            if isinstance(node, ast.Compare):
                sides = [node.left, *node.comparators]
                of_name = any(isinstance(side, ast.Attribute) and side.attr == "name" for side in sides)
                compared = {text for side in sides for text in _strings(side) | texts.get(ast.unparse(side), set())}
                named = of_name and compared & names and about_hypotheses
                wrong += [f"{path.name}:{node.lineno}: {ast.unparse(node)}"] if named else []
            elif isinstance(node, ast.Attribute) and node.attr == "trainer" and is_measurement:
                wrong += [f"{path.name}:{node.lineno}: {ast.unparse(node)}"]

    assert wrong == []


def _strings(node: ast.AST | None) -> set[str]:
    """The strings in a constant or in a collection of constants."""
    constants = [] if node is None or isinstance(node, ast.Lambda) else [*ast.walk(node)]
    return {one.value for one in constants if isinstance(one, ast.Constant) and isinstance(one.value, str)}


def _targets(node: ast.stmt) -> list[str]:
    """Names that a statement assigns to."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [ast.unparse(target) for target in targets]


def _loaded_by(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(process.stdout.split())


def test_no_module_hides_a_public_name() -> None:
    """Otherwise `from esper_telemetry import replay` would import the module instead of the function once the module is loaded."""
    modules = {path.stem for path in PACKAGE.glob("*.py")} | {path.parent.name for path in PACKAGE.glob("*/__init__.py")}

    assert modules.isdisjoint(esper_telemetry.__all__)
