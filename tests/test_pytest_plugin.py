"""The plugin of pytest and the workflow of `examples/ci`, run as a project would run them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from healthy_run import run, set_to

from esper_telemetry.core.record import RunInfo, RunStatus
from esper_telemetry.journal.file import Journal
from esper_telemetry.journal.lines import encode_end, encode_record, encode_run

ROOT = Path(__file__).parents[1]
SCRIPT = (ROOT / "tests" / "script" / "scripts" / "categorical.py").read_text(encoding="utf-8")
RIGHT = "args.gamma * args.gae_lambda * nextnonterminal * lastgaelam"


def journal(path: Path, kl: float) -> None:
    book = Journal.create(path)
    book.write(encode_run(RunInfo("r1", "run", path, 1e9)))
    for record in run(60, set_to({"policy/kl": kl})):
        book.write(encode_record(record))
    book.write(encode_end(RunStatus.FINISHED, seq=60))
    book.close()


def pytest_in(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "COLUMNS": "200"}
    return subprocess.run([*command, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.system
def test_a_run_is_judged_in_a_test_of_the_project(tmp_path: Path) -> None:
    journal(tmp_path / "calm", kl=0.01)
    journal(tmp_path / "jumping", kl=2.0)
    (tmp_path / "test_runs.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('run', ['calm', 'jumping', 'missing'])\n"
        "def test_run(run, assert_healthy_run):\n"
        "    assert_healthy_run(run, fail_on='critical')\n"
    )

    result = pytest_in(tmp_path, "-q")

    assert result.returncode == 1
    assert re.search(r"2 failed, 1 passed", result.stdout)
    assert "incident 1, update 30: policy/kl_spike" in result.stdout and "there is no run directory" in result.stdout


@pytest.mark.system
def test_a_script_is_checked_as_a_test_and_a_mistake_fails_it_and_is_named_in_the_summary(tmp_path: Path) -> None:
    assert RIGHT in SCRIPT
    (tmp_path / "right.py").write_text(SCRIPT)
    (tmp_path / "wrong.py").write_text(SCRIPT.replace(RIGHT, "args.gamma * args.gae_lambda * lastgaelam"))
    (tmp_path / "nothing.py").write_text("print('nothing')\n")

    checks = [f"--updates 2 --run-dir runs/{name} {name}.py" for name in ("right", "wrong", "nothing")]
    result = pytest_in(tmp_path, *(word for check in checks for word in ("--esper-check", check)))

    assert result.returncode == 1
    assert "2 failed, 1 passed" in result.stdout
    (summary,) = re.findall(r"^FAILED .*wrong\.py - (.*)", result.stdout, re.MULTILINE)
    assert summary.startswith("the advantages equal GAE that continues over the ends of episodes")
    assert "  reference: A_t = " in result.stdout and "  try: Multiply the trace" in result.stdout
    assert "nothing to measure" in result.stdout


@pytest.mark.system
def test_the_steps_of_the_workflow_run_and_write_the_summary(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load((ROOT / "examples" / "ci" / "telemetry.yml").read_text(encoding="utf-8"))
    steps = {step["name"]: step["run"] for step in workflow["jobs"]["telemetry"]["steps"] if "run" in step}
    (tmp_path / "ppo.py").write_text(SCRIPT)
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    for name, module in (("esper-telemetry", "esper_telemetry"), ("pytest", "pytest")):
        tool = bin_dir / name
        tool.write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
        tool.chmod(0o755)
    summary = tmp_path / "summary.md"
    environment = {
        **os.environ,
        "PATH": f"{bin_dir}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        "GITHUB_STEP_SUMMARY": str(summary),
    }

    for name in ("Equations", "Train", "Verdict", "Summary"):
        command = ["bash", "-e", "-c", steps[name]]
        result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert result.returncode == 0, f"{name}: {result.stdout}{result.stderr}"

    titles = [line for line in summary.read_text(encoding="utf-8").splitlines() if line.startswith("## ")]
    assert [title.split()[-1] for title in titles] == ["check", "train"]
