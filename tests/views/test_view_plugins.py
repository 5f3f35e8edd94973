"""The extension point of views: the example of docs/watch.md as an installed plugin, and plugins that raise."""

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from journaled import lines_of, write

from esper_telemetry.core.record import Axes, Record
from esper_telemetry.views.panels import view_declarations
from esper_telemetry.views.report import report_html
from esper_telemetry.views.run_view import RunView, open_view
from esper_telemetry.views.watch.charts import WatchState
from esper_telemetry.views.watch.screens import overview, strip, table_page

PAGE = (Path(__file__).parents[2] / "docs" / "watch.md").read_text(encoding="utf-8")
VALUES = {"my/bonus": 0.005, "my/room/attic": 3.0, "policy/kl": 0.01}


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The example of the page, installed as a distribution; a test may change its module before the first view."""
    entry, code = (re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)[0] for language in ("toml", "python"))
    package, metadata = tmp_path / "my_package", tmp_path / "curious-1.dist-info"
    package.mkdir()
    metadata.mkdir()
    (package / "__init__.py").touch()
    (package / "views.py").write_text(code)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: curious\nVersion: 1\n")
    line = entry.splitlines()[1].replace('"', "")
    (metadata / "entry_points.txt").write_text(f"[esper_telemetry.views]\n{line}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    view_declarations.cache_clear()
    yield package / "views.py"
    view_declarations.cache_clear()
    for name in ("my_package", "my_package.views"):
        sys.modules.pop(name, None)


def shown(tmp_path: Path) -> tuple[RunView, str]:
    records = [Record(update, Axes(update, 10 * update, update, 1e9), VALUES) for update in (1, 2)]
    view = open_view(write(tmp_path / "run", lines_of(records, None)))
    view.strip(), view.tables()
    return view, "\n".join(line.text.plain for line in overview([view], WatchState(), 100))


def test_the_example_of_the_page_adds_a_panel_a_part_and_a_table(plugin: Path, tmp_path: Path) -> None:
    view, text = shown(tmp_path)

    assert "Does curiosity pay?" in text and "my/bonus" in text and "Plugins" not in text
    assert strip([view]).plain == "ANOMALIES: bored"
    (table,) = view.tables()
    assert [line.text.plain.split() for line in table_page(table, WatchState())[1]] == [["attic", "3"]]
    assert view.detail("rooms", 0) == "row 0 of the rooms"
    assert "Does curiosity pay?" in report_html([view]) and "attic" in report_html([view])


@pytest.mark.parametrize(
    ("broken", "problem"),
    [
        ("def bored(view): return 1 / 0", "The strip 'bored' cannot be shown: ZeroDivisionError: division by zero"),
        ("def bored(view): return 'bored'", "The strip 'bored' cannot be shown: TypeError: a part of the strip is"),
        ("def rooms(view): return view.nothing", "The table 'rooms' cannot be shown: AttributeError"),
        ("def rooms(view): return TableView('rooms', '', ('a',), (('b',),))", "The table 'rooms' cannot be shown"),
        ("DECLARATIONS[0] = PanelDeclaration('p', 'Why?', 3)", "The panel 'p' cannot be shown: TypeError"),
        ("DECLARATIONS = 3", "The views of the plugin 'curiosity' (my_package.views:DECLARATIONS) cannot be used"),
        ("DECLARATIONS = [3]", "cannot be used: views are made of PanelDeclaration, TableDeclaration, StripDeclaration, got 3"),
        ("import nowhere", "cannot be used: No module named 'nowhere'"),
    ],
)
def test_a_plugin_that_raises_costs_its_own_part_and_a_sentence(broken: str, problem: str, plugin: Path, tmp_path: Path) -> None:
    code = plugin.read_text()
    before, declarations, after = code.partition("DECLARATIONS = [")
    is_function = broken.startswith("def")
    plugin.write_text(f"{before}{broken}\n{declarations}{after}" if is_function else f"{code}{broken}\n")

    view, text = shown(tmp_path)

    assert problem in " ".join(text.split())
    assert "KL divergence of the update" in text
    if is_function:
        assert ("Does curiosity pay?" in text, len(view.tables()) + len(view.strip())) == (True, 1)


def test_a_detail_that_raises_is_a_sentence(plugin: Path, tmp_path: Path) -> None:
    plugin.write_text(plugin.read_text().replace('f"row {row} of the rooms"', "view.nothing"))

    view, _ = shown(tmp_path)

    assert str(view.detail("rooms", 0)).startswith("The table 'rooms' cannot be shown: AttributeError")
