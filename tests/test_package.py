"""Contents of a release: files of the wheel and the source archive, one version everywhere, the licence, and existing extras."""

import re
import tomllib
from pathlib import Path

import pytest

import esper_telemetry

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DATA = {"py.typed", "views/report_template.html", "alarms/healthy_values.json", "lab/morphogenesis/text.txt"}
MAX_LINES_OF_A_RELEASE = 60
EXTRA = re.compile(r"esper-telemetry\[([\w,]+)\]")


def packed_files(kind: str) -> set[str]:
    """Return the paths in the archive that hatchling would build; kind is wheel or sdist."""
    builders = pytest.importorskip(f"hatchling.builders.{kind}", reason="hatchling is not installed")
    builder = {"wheel": "WheelBuilder", "sdist": "SdistBuilder"}[kind]
    return {file.distribution_path for file in getattr(builders, builder)(str(ROOT)).recurse_included_files()}


def test_the_wheel_is_the_package_with_its_data() -> None:
    package = {path for path in (ROOT / "esper_telemetry").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    files = packed_files("wheel")

    assert files == {str(path.relative_to(ROOT)) for path in package}
    assert {path.removeprefix("esper_telemetry/") for path in files if not path.endswith(".py")} == DATA
    assert not [path for path in files if "/tests/" in path or Path(path).name.startswith(("test_", "conftest"))]


def test_the_source_archive_can_be_built_and_tested() -> None:
    files = packed_files("sdist")

    assert {"LICENSE", "README.md", "pyproject.toml", "Makefile", "tests/conftest.py", "docs/index.md"} <= files
    assert not [path for path in files if path.startswith(("runs/", "wandb/", "build/", "dist/", ".venv/"))]


def test_the_version_is_the_same_everywhere() -> None:
    citation = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    releases = re.findall(r"^## (\d+\.\d+\.\d+) - ", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)

    assert citation is not None
    assert esper_telemetry.__version__ == PROJECT["version"] == citation[1] == releases[0]


def test_the_conda_recipe_agrees_with_the_project() -> None:
    recipe = (ROOT / "conda" / "recipe.yaml").read_text(encoding="utf-8")
    run = re.search(r"^  run:\n((?:    - .+\n)+)", recipe, re.MULTILINE)

    assert run is not None
    needed = {line.removeprefix("    - ").replace(" ", "").replace("pytorch", "torch") for line in run[1].splitlines()}
    assert needed == {f"python{PROJECT['requires-python']}", *(name.partition(";")[0] for name in PROJECT["dependencies"])}
    assert f"  version: {PROJECT['version']}\n" in recipe


def test_a_release_is_short_in_the_changelog() -> None:
    _, *releases = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split("\n## ")

    assert len(releases) >= 2
    assert {text.partition("\n")[0]: len(text.splitlines()) for text in releases if text.count("\n") > MAX_LINES_OF_A_RELEASE} == {}


def test_extras_in_messages_and_documents_exist() -> None:
    texts = [*(ROOT / "esper_telemetry").rglob("*.py"), *(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    named = {extra for path in texts for names in EXTRA.findall(path.read_text(encoding="utf-8")) for extra in names.split(",")}

    assert {"train", "views", "sb3"} <= named
    assert named <= set(PROJECT["optional-dependencies"])
