"""docs/is_my_ppo_correct.md: Python blocks run as printed. docs/equations.md equals the declared list."""

import os
import re
import sys
from pathlib import Path

import glossary
import pytest
from forked import run_python

from esper_telemetry.equations.equation import equations

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "is_my_ppo_correct.md"
TEXT = PAGE.read_text(encoding="utf-8")
PYTHON_BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


@pytest.mark.system
@pytest.mark.parametrize("block", PYTHON_BLOCKS, ids=["own_loop", "unit_test"])
def test_every_python_block_runs_as_printed(block: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}

    process = run_python("-c", block, cwd=tmp_path, env=environment)

    assert process.returncode == 0, process.stderr
    if "Telemetry(" in block:
        assert "GAE that continues over the ends of episodes" in process.stdout


def test_the_list_of_equations_is_up_to_date() -> None:
    assert glossary.EQUATIONS_PAGE.read_text(encoding="utf-8") == glossary.equation_page(), "run: python docs/glossary.py"


def test_the_list_has_every_equation_and_every_hypothesis() -> None:
    written = glossary.EQUATIONS_PAGE.read_text(encoding="utf-8")

    for equation in equations().values():
        assert f"`{equation.equation}`" in written
        assert [one.name for one in equation.hypotheses if one.says.rstrip(";") not in written] == []


def test_links_lead_to_pages_and_headings() -> None:
    headings = {"#" + re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in re.findall(r"^#+ (.+)$", TEXT, re.MULTILINE)}
    links = re.findall(r"\]\(([^)\s]+)\)", TEXT)

    assert links
    assert [link for link in links if link not in headings and not (PAGE.parent / link.partition("#")[0]).exists()] == []
