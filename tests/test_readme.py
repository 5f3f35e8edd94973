"""README.md: Python blocks run as printed in an empty directory; command lines parse and run in the printed order."""

import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from forked import run_python

from esper_telemetry import RunStatus, read_run
from esper_telemetry.cli.check import parse as parse_check
from esper_telemetry.cli.main import Train, parse, run
from esper_telemetry.cli.run import parse as parse_run

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAX_WORDS = 1_200
PYTHON_BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
PROSE = re.sub(r"^```.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL)
COMMANDS = [shlex.split(line, comments=True)[1:] for line in README.splitlines() if line.startswith("esper-telemetry ")]
HAND_WRITTEN = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.name != "metrics.md"),
]
HISTORY = re.compile(
    r"\b(had been|where it (had|was)|used to|no longer|formerly|since then|turned out|earlier (version|sitting|system)"
    r"|older (system|version)|before the last(?! update))\b",
    re.IGNORECASE,
)
PROGRESS_CSV = "time/total_timesteps,train/approx_kl,train/policy_gradient_loss\n" + "".join(
    f"{128 * update},0.01,-0.02\n" for update in range(1, 31)
)
"""Logs as Stable-Baselines3 writes them, for `diagnose --from csv:progress.csv`."""


def test_the_readme_is_short() -> None:
    assert len(README.split()) < MAX_WORDS


def test_every_link_leads_to_a_file() -> None:
    links = re.findall(r"\]\((.+?)\)", PROSE) + re.findall(r"`(examples/\w+\.py)`", PROSE)

    assert links
    assert [link for link in links if not (ROOT / link.partition("#")[0]).exists()] == []


@pytest.mark.parametrize("page", HAND_WRITTEN, ids=lambda page: page.name)
def test_pages_state_the_present(page: Path) -> None:
    """A page of documentation says what is, not what was measured or planned before; the changelog has the changes."""
    text = re.sub(r"^\| `\w+/\w+` \| Since .*", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE)  # texts of alarms

    assert [words.group() for words in HISTORY.finditer(text)] == []


@pytest.mark.system
@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block, id=f"block{place}", marks=[pytest.mark.sb3] if "stable_baselines3" in block else [])
        for place, block in enumerate(PYTHON_BLOCKS)
    ],
)
def test_every_python_block_runs_as_printed(block: str, tmp_path: Path) -> None:
    """Each block exits with 0 and leaves one finished run with a record for each update."""
    environment = {**os.environ, "WANDB_MODE": "offline", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}

    process = run_python("-c", block, cwd=tmp_path, env=environment)

    assert process.returncode == 0, process.stderr
    (run_dir,) = (tmp_path / "runs").iterdir()
    journal = read_run(run_dir)
    assert journal.status is RunStatus.FINISHED
    assert len(journal.records) >= 4
    assert {"policy/kl", "grad/global/norm_preclip", "value/explained_variance"} <= journal.records[-1].values.keys()


@pytest.mark.parametrize("words", COMMANDS, ids=shlex.join)
def test_every_command_line_parses(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if words[0] == "run":
        assert (ROOT / parse_run(words[1:]).script).exists()
    elif words[0] == "check":
        assert parse_check(words[1:]).target == words[1]
    elif "--resume" not in words:  # a resumed run takes its options from the first part
        command = parse(words)
        assert isinstance(command, Train) == (words[0] == "train")


@pytest.mark.system
@pytest.mark.filterwarnings("ignore:Pydantic V1 style `@validator` validators")  # in wandb-workspaces 0.4
@pytest.mark.usefixtures("one_core")
def test_the_commands_run_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Except `run SCRIPT`, which tests/test_examples.py covers, and `watch`, which needs a terminal (see tests/views)."""
    monkeypatch.chdir(tmp_path)
    Path("progress.csv").write_text(PROGRESS_CSV, encoding="utf-8")

    codes = {shlex.join(words): run(words) for words in COMMANDS if words[0] not in ("run", "watch")}

    assert codes == dict.fromkeys(codes, 0)
    assert read_run("runs/a").records[-1].axes.env_step >= 20_000
