"""The documentation site: the strict build, every page in its navigation, and no request to another host."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import glossary
import pytest
import results

import esper_telemetry

ROOT = Path(__file__).parent.parent
REQUEST = re.compile(
    r"""<(?:script|img|iframe)[^>]+src=["']?https?://|<link[^>]+rel=["']?stylesheet["']?[^>]+href=["']?https?://|url\(https?://"""
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(place)]
    build = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert build.returncode == 0, build.stderr
    return place


@pytest.mark.system
def test_every_page_is_in_the_navigation(site: Path) -> None:
    index = (site / "index.html").read_text(encoding="utf-8")
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"}

    assert pages
    assert not [page for page in sorted(pages) if f'href="{page}/"' not in index]


@pytest.mark.system
def test_the_api_page_describes_every_public_name(site: Path) -> None:
    page = (site / "api" / "index.html").read_text(encoding="utf-8")

    assert not [name for name in esper_telemetry.__all__ if f'id="esper_telemetry.{name}"' not in page]


@pytest.mark.system
def test_no_page_asks_another_host(site: Path) -> None:
    assert not [path for path in site.rglob("*.html") if REQUEST.search(path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize(
    ("page", "content", "program"),
    [
        (glossary.COMMANDS_PAGE, glossary.command_page, "docs/glossary.py"),
        (glossary.EQUATIONS_PAGE, glossary.equation_page, "docs/glossary.py"),
        (results.PAGE, lambda: results.page(json.loads(results.FILE.read_text(encoding="utf-8"))), "benchmarks/results.py"),
    ],
)
def test_generated_pages_are_up_to_date(page: Path, content: Callable[[], str], program: str) -> None:
    assert page.read_text(encoding="utf-8") == content(), f"run: python {program}"


def test_saved_rows_replace_their_like_and_keep_its_goal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of another day or machine are dropped; otherwise, only remeasured rows are replaced."""
    file = tmp_path / "benchmarks.json"
    old = [results.Row("8 environments", "2.0", "A", "2.5"), results.Row("64 environments", "3.0", "A")]
    table = {"key": "speed", "about": "Speed", "measured": "", "command": "", "others": "others", "note": ""}
    contents = {"head": "# Page", "sections": [{"title": "T", "tables": [{**table, "rows": [*map(asdict, old)]}]}]}
    file.write_text(json.dumps(contents), encoding="utf-8")
    monkeypatch.setattr(results, "write_page", lambda: None)
    monkeypatch.setattr(results, "machine", lambda: "a machine")

    results.save("speed", [results.Row("8 environments", "2.1", "A")], file=file)
    results.save("speed", [results.Row("64 environments", "3.1", "A")], file=file)

    saved = json.loads(file.read_text(encoding="utf-8"))["sections"][0]["tables"][0]
    assert [(row["what"], row["ours"], row["goal"]) for row in saved["rows"]] == [
        ("8 environments", "2.1", "2.5"),
        ("64 environments", "3.1", ""),
    ]
    assert saved["measured"].startswith("a machine, ")
