"""docs/architecture.md: everything it names exists, and its table of imports equals the enforced order."""

import ast
import re
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
from test_architecture import ABOVE_ALL, BELOW

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "esper_telemetry"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PROSE = re.sub(r"^```.*?^```$", "", PAGE, flags=re.MULTILINE | re.DOTALL)
CODE = sorted(set(re.findall(r"`([^`\n]+)`", PROSE)))
MODULES = sorted({name for code in CODE for name in re.findall(r"\besper_telemetry(?:\.\w+)+", code)})
PATHS = [code for code in CODE if re.fullmatch(r"[\w./-]+", code) and re.search(r"/|\.(py|md|toml)$", code)]
NAMES = [code for code in CODE if re.fullmatch(r"\w+(\.\w+)?", code) and code not in (*PATHS, *MODULES)]
LAYOUT = re.findall(r"^\| `(\w+)(?:/|\.py)` \|.*\| ([^|]*) \|$", PROSE, re.MULTILINE)


def defined_names() -> set[str]:
    """Names of classes, functions, methods (`Class.method`), constants and parts of the package and the examples."""
    names = {path.stem for path in PACKAGE.iterdir()}
    for path in (*PACKAGE.rglob("*.py"), *ROOT.glob("examples/*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                methods = [each.name for each in node.body if isinstance(each, ast.FunctionDef)]
                names |= {node.name, *(f"{node.name}.{method}" for method in methods)}
            elif isinstance(node, ast.FunctionDef):
                names.add(node.name)
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


@pytest.mark.parametrize("path", PATHS)
def test_every_path_exists(path: str) -> None:
    assert (ROOT / path).exists() or (PACKAGE / path).exists()


@pytest.mark.parametrize("name", MODULES)
def test_every_module_or_group_of_entry_points_exists(name: str) -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]

    assert name in groups or find_spec(name) is not None


def test_every_name_exists() -> None:
    defined = defined_names() | {"journal.jsonl", "clip_grad_norm_"}

    assert len(NAMES) > 50
    assert [name for name in NAMES if name not in defined] == []


def test_the_table_of_imports_is_the_enforced_order() -> None:
    listed = {part: set(re.findall(r"`(\w+)`", imports)) for part, imports in LAYOUT}

    assert {part: imports for part, imports in listed.items() if part not in ABOVE_ALL} == BELOW
