"""docs/*.md: the Python blocks of a page run as printed in one namespace, and its commands parse and run in a directory with their inputs.

Trainings are cut to two thousand steps. `tests/test_readme.py` runs the README.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
from forked import run_python
from test_readme import PROGRESS_CSV

from esper_telemetry.cli.arguments import parse_arguments
from esper_telemetry.cli.check import parse as parse_check
from esper_telemetry.cli.main import parse, run
from esper_telemetry.cli.run import parse as parse_run
from esper_telemetry.lab.faults.__main__ import Demo, List, Score
from esper_telemetry.lab.faults.__main__ import run as run_faults

if TYPE_CHECKING:
    from command_line import Finished

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
STEPS = 2_048
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^(?:esper-telemetry|(?:python|torchrun .*) -m esper_telemetry(?:\.faults|\.lab\.faults)?) [a-z-]")
FAULTS = {"list": List, "score": Score, "demo": Demo}
NOT_RUN = {
    "torchrun": "tests/end_to_end starts several processes",
    "--resume": "tests/test_readme.py resumes a run",
    "watch": "needs a terminal; tests/views has one",
    " mcp ": "tests/cli/test_mcp.py has a client",
    "score": "trains for minutes",
    "demo": "trains for minutes",
    "--push": "needs an account",
    "compress runs/a runs/b": "packs the journal that the next commands of the page read",
    "wandb:wandb/": "tests/importers reads W&B's files",
    "mlflow:sqlite": "tests/importers reads MLflow's files",
    "morphogenesis": "tests/lab trains it",
}
TRL_ROWS = [{"step": step, "reward": 0.1 * step, "frac_reward_zero_std": 0.1, "entropy": 1.0} for step in range(1, 31)]
PACE = """import gymnasium as gym

gym.register("Pace-v0", entry_point="gymnasium.envs.classic_control:CartPoleEnv", max_episode_steps=500)
"""


def blocks(page: Path, *languages: str) -> list[str]:
    """Return the code blocks of a page in these languages; "" selects blocks without a language."""
    text = page.read_text(encoding="utf-8")
    return [block for _, language, block in BLOCK.findall(text) if language in languages]


def commands(page: Path) -> Iterator[str]:
    """Yield the lines of a page that call this package, without redirections."""
    for block in blocks(page, "", "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            if COMMAND.match(line):
                yield re.split(r"\s(?:#|>>|\|)", line)[0].strip()


PYTHON_PAGES = [page for page in sorted(DOCS.glob("*.md")) if blocks(page, "python")]
PAGES = [page for page in sorted(DOCS.glob("*.md")) if any(commands(page))]


def cut(learn: Callable[..., Any], count: str) -> Callable[..., Any]:
    """Return a `learn` that continues for at most `STEPS` steps after the trainer's current `count`."""

    def learn_briefly(trainer: Any, *args: Any, **keywords: Any) -> Any:
        def brief(value: Any) -> Any:
            return min(value, getattr(trainer, count) + STEPS) if type(value) is int else value

        return learn(trainer, *map(brief, args), **{name: brief(value) for name, value in keywords.items()})

    return learn_briefly


def execute(page: Path) -> None:
    """Run the Python blocks of a page in order, as one module."""
    from esper_telemetry import PPO

    PPO.learn = cut(PPO.learn, "env_steps")  # type: ignore[method-assign]
    text = page.read_text(encoding="utf-8")
    if "from stable_baselines3 import" in text:
        import stable_baselines3

        stable_baselines3.PPO.learn = cut(stable_baselines3.PPO.learn, "num_timesteps")  # type: ignore[method-assign]
    module = sys.modules["page"] = ModuleType("page")
    for match in BLOCK.finditer(text):
        if match[2] == "python":
            line = text.count("\n", 0, match.start()) + 1
            exec(compile("\n" * line + match[3], str(page), "exec"), module.__dict__)


@pytest.mark.system
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.stem, marks=[pytest.mark.sb3] if "from stable_baselines3 import" in page.read_text() else [])
        for page in PYTHON_PAGES
        if page.stem != "is_my_ppo_correct"
    ],
)
def test_the_python_blocks_of_a_page_run_as_printed(page: Path, tmp_path: Path) -> None:
    code = f"from pathlib import Path; import test_documented_code; test_documented_code.execute(Path({str(page)!r}))"
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), *sys.path])
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true", "PYTHONPATH": path}

    process = run_python("-c", code, cwd=tmp_path, env=environment)

    assert process.returncode == 0, process.stderr
    assert process.stderr == ""


@pytest.mark.system
@pytest.mark.parametrize("block", blocks(DOCS / "is_my_ppo_correct.md", "python"), ids=["own_loop", "unit_test"])
def test_blocks_about_equations_run_alone(block: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}

    process = run_python("-c", block, cwd=tmp_path, env=environment)

    assert process.returncode == 0, process.stderr
    assert "Telemetry(" not in block or "GAE that continues over the ends of episodes" in process.stdout


@pytest.mark.system
def test_the_cells_of_the_notebook_run_in_order(tmp_path: Path) -> None:
    """As one program that evaluates the last expression of each cell, as a notebook does to show it."""
    cells = json.loads((DOCS / "notebook.ipynb").read_text(encoding="utf-8"))["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}

    process = run_python("-c", code, cwd=tmp_path, env=environment)

    assert process.returncode == 0, process.stderr
    assert "policy/kl_spike" in process.stdout
    assert process.stdout.splitlines()[-1].endswith("[]")  # the healthy run's alarms


def arguments(command: str) -> tuple[str, list[str]]:
    """Return the program, `esper-telemetry` or `faults`, and its words."""
    words = shlex.split(command)
    if words[0] == "esper-telemetry":
        return words[0], words[1:]
    module = words.index("-m") + 1
    return "faults" if words[module].endswith("faults") else "esper-telemetry", words[module + 1 :]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_page_parse(page: Path) -> None:
    for command in commands(page):
        program, words = arguments(command)
        if program == "faults":
            parse_arguments(words[1:], FAULTS[words[0]])
        elif words[0] == "run":
            parse_run(words[1:])
        elif words[0] == "check":
            parse_check(words[1:])
        elif "--resume" not in words:  # a resumed run takes its options from the first part
            parse(words)


def write_tensorboard_log(directory: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(directory)) as writer:
        for step in range(128, 128 * 31, 128):
            writer.add_scalar("train/approx_kl", 0.01, step)
            writer.add_scalar("train/policy_gradient_loss", -0.02, step)


def prepare(words: list[str], finished: Finished) -> None:
    """Create the run directories, logs, scripts and environments that a command reads, in the current directory."""
    for word in words:
        if (words[0] not in ("train", "run") and word.startswith("runs/")) or word == "runs":
            run_dir = Path(word.replace("*", "1"), *(["1"] if word == "runs" else []))
            if not run_dir.exists():
                shutil.copytree(finished.run_dir, run_dir)
        elif word.startswith("csv:"):
            Path(word[4:]).parent.mkdir(parents=True, exist_ok=True)
            Path(word[4:]).write_text(PROGRESS_CSV, encoding="utf-8")
        elif word.startswith("log:"):
            Path(word[4:]).parent.mkdir(parents=True, exist_ok=True)
            Path(word[4:]).write_text(json.dumps({"log_history": TRL_ROWS}), encoding="utf-8")
        elif word.startswith("tensorboard:") or word == "logs/PPO_1":
            write_tensorboard_log(Path(word.removeprefix("tensorboard:")))
        elif word == "own.csv":
            Path(word).write_text("episode,timestep,reward\n1,100,-5\n2,200,-4\n", encoding="utf-8")
        elif word == "ppo.py":
            script = (ROOT / "examples" / "unedited.py").read_text(encoding="utf-8")
            brief = script.replace("parse_args()", "parse_known_args()[0]").replace("20_480", str(STEPS))
            Path(word).write_text(brief, encoding="utf-8")
        elif word.startswith("pace:"):
            Path("pace.py").write_text(PACE, encoding="utf-8")


def briefly(words: list[str]) -> list[str]:
    """Return a command with fewer steps and with its file patterns expanded as a shell would."""
    steps = ["--total-steps", str(STEPS)] if words[0] == "train" else []  # the last `--total-steps` applies
    return [*(word.replace("*", "1") for word in words), *steps]


@pytest.mark.system
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
@pytest.mark.usefixtures("one_core")
@pytest.mark.filterwarnings("ignore:Pydantic V1 style `@validator` validators")  # in wandb-workspaces 0.4
def test_the_commands_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: Finished) -> None:
    """Each command exits with 0. Only the page's last script runs, because its process takes seconds."""
    scripts = [command for command in commands(page) if "ppo.py" in command]
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for command in commands(page):
        program, words = arguments(command)
        if command in scripts[:-1] or any(part in command for part in NOT_RUN):
            continue
        prepare(words, finished)
        words = briefly(words)
        if program == "faults":
            assert run_faults(words) == 0
        elif command in scripts:
            process = run_python("-m", "esper_telemetry", *words)
            assert process.returncode == 0, process.stderr
        else:
            assert run(words) == 0, command
