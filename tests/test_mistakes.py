"""The corpus `benchmarks/mistakes`: each program contains its declared mistake, and a run's true outcome follows from its returns.

Three steps of one environment, γ = λ = 0.5, rewards 1, 2, 4, values 2, 4, 6 and 8 after the last step; the first step ends its episode:

    δ_2 = 4 + 0.5 · 8 - 6 = 2     A_2 = 2
    δ_1 = 2 + 0.5 · 6 - 4 = 1     A_1 = 1 + 0.25 · 2 = 1.5
    δ_0 = 1 - 2 = -1              A_0 = -1
"""

import json
import sys
import textwrap
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mistakes import outside_tool
from mistakes.corpus import BY_NAME, CHANGES, EQUATION_PROGRAMS, PROGRAMS, TASK_PROGRAMS, Program, edited
from mistakes.correct import CORRECT
from mistakes.truth import harm, judged

HEALTHY_SCRIPT = (PROGRAMS / "script.py").read_text()
WRONG = [one for one in TASK_PROGRAMS if one.kind == "wrong"]


def targets_of(text: str) -> dict[str, list[float]]:
    """Return the advantages and the returns that a script's block computes for the three steps."""
    begin = text.index("    with torch.no_grad():\n        next_value")
    block = textwrap.dedent(text[begin : text.index("    b_obs = obs.reshape")])

    def column(*numbers: float) -> torch.Tensor:
        return torch.tensor(numbers)[:, None]

    names: dict[str, Any] = {
        "torch": torch,
        "args": SimpleNamespace(num_steps=3, num_envs=1, gamma=0.5, gae_lambda=0.5),
        "agent": SimpleNamespace(get_value=lambda _: torch.tensor([[8.0]])),
        "next_obs": None,
        "next_done": torch.zeros(1),
        "rewards": column(1.0, 2.0, 4.0),
        "values": column(2.0, 4.0, 6.0),
        "dones": column(0.0, 1.0, 0.0),
    }
    exec(block, names)
    return {name: names[name].flatten().tolist() for name in ("advantages", "returns")}


def test_the_healthy_script_computes_the_advantages_of_the_paper() -> None:
    assert targets_of(HEALTHY_SCRIPT) == {"advantages": [-1, 1.5, 2], "returns": [1, 5.5, 8]}


@pytest.mark.parametrize(
    ("name", "advantages"),
    [
        ("forward", [-1, 1 - 0.25, 2 + 0.25 * 0.75]),
        ("ends_ignored", [1 + 0.25 * 1.5, 1.5, 2]),
        ("ends_late", [1 + 0.25 * -2, -2, 2]),
        ("no_bootstrap", [-1, 1 + 0.25 * -2, -2]),
        ("bootstrap_old_value", [-1, 1 + 0.25 * 1, 1]),
        ("gamma", [-1, 3.4 + 0.45 * 5.2, 5.2]),
        ("lambda", [-1, 1 + 0.3 * 2, 2]),
        ("reward_shift", [-2, 0, 0]),
        ("reward_clip", [-1, -0.25, -1]),
        ("sign", [1, -1.5, -2]),
        ("sign_both", [1, -1.5, -2]),
        ("last_row_zero", [-1, 1.5, 0]),
    ],
)
def test_advantages_worked_by_hand(name: str, advantages: list[float]) -> None:
    assert targets_of(BY_NAME[f"script-{name}"].text())["advantages"] == pytest.approx(advantages)


def test_monte_carlo_returns_worked_by_hand() -> None:
    returns = {name: targets_of(BY_NAME[f"script-{name}"].text())["returns"] for name in ("returns_mc", "returns_mc_cut")}
    assert returns == {"returns_mc": [1, 6, 8], "returns_mc_cut": [1, 4, 4]}


def test_every_program_can_be_made_and_differs_from_its_twin() -> None:
    """The text that an edit replaces occurs once in its program."""
    for program in EQUATION_PROGRAMS:
        compile(program.text(), program.name, "exec")
        twin = program.correct()
        assert (program.text(), program.args) != (twin.text(), twin.args), program.name
    for program in CORRECT:
        compile(program.text(), program.name, "exec")
    for program in TASK_PROGRAMS:
        compile(program.long_run(1)[0], program.name, "exec")
    for change in ("own_loop", "continuous"):
        compile(edited(HEALTHY_SCRIPT, CHANGES[change]), change, "exec")


def test_names_are_unique() -> None:
    for programs in (EQUATION_PROGRAMS, TASK_PROGRAMS, CORRECT):
        assert len({one.name for one in programs}) == len(programs)


def episodes(levels: list[float], *, each: int = 10) -> list[tuple[int, float]]:
    """For each level, ten episodes of 10 steps that are alternately one above and one below it."""
    returns = [level + (1 if index % 2 else -1) for level in levels for index in range(each)]
    return [(10 * (index + 1), value) for index, value in enumerate(returns)]


@pytest.mark.parametrize(
    ("levels", "kind"),
    [
        ([5, 5, 6, 7, 8, 9, 9, 9, 9, 9], "learns"),
        ([5, 5, 5, 5, 5, 5, 5, 5, 5, 5], "flat"),
        ([5, 5, 5, 5, 5, 5, 5, 5, 5.4, 5.4], "flat"),  # less than half of the first episodes' spread of 1
        ([5, 4, 3, 3, 3, 3, 3, 3, 3, 3], "declining"),
        ([5, 6, 9, 9, 9, 9, 9, 7, 6.5, 6], "declining"),  # more than half of the rise of 4 is lost
    ],
)
def test_the_truth_is_told_from_returns(levels: list[float], kind: str) -> None:
    assert judged(episodes(levels)).kind == kind
    assert judged(episodes(levels, each=2)).kind == "undecided"


def test_harm_is_measured_beside_the_correct_twin(tmp_path: Path) -> None:
    """Two of three seeds are flat although the twin learns; a program that fails like its twin is not harmful."""
    rise, flat = [5.0, 5, 6, 7, 8, 9, 9, 9, 9, 9], [5.0] * 10
    runs = {"twin": [rise, rise, flat], "broken": [flat, rise, flat], "hard": [flat, flat, flat]}
    for name, seeds in runs.items():
        for seed, levels in enumerate(seeds, 1):
            directory = tmp_path / name / str(seed)
            directory.mkdir(parents=True)
            (directory / "run.json").write_text(json.dumps({"exit": 0}))
            (directory / "returns.txt").write_text("".join(f"{step} {value}\n" for step, value in episodes(levels)))

    assert harm(tmp_path, "broken", "twin", (1, 2, 3)) is True
    assert harm(tmp_path, "twin", "twin", (1, 2, 3)) is False
    assert harm(tmp_path, "broken", "hard", (1, 2, 3)) is False
    assert harm(tmp_path, "broken", "never run", (1, 2, 3)) is None


def test_the_programs_are_what_the_page_says() -> None:
    """Each half of the corpus keeps related mistakes together; each wrong program has causes, words and a correct twin."""
    names = [one.name for one in TASK_PROGRAMS]
    families = sorted((one.family, one.half) for one in TASK_PROGRAMS if one.kind != "correct")

    assert len(WRONG) >= 40 and sum(one.source.startswith("https://") for one in WRONG) >= 20
    assert all(one.causes and one.words and one.twin in names for one in WRONG)
    assert all(len({half for _, half in group}) == 1 for _, group in groupby(families, key=lambda one: one[0]))
    assert sum(one.kind == "published" for one in TASK_PROGRAMS) >= 15


def test_another_tool_is_scored_on_mistakes_and_twins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tool that finds every use of γ = 0.9 names one mistake, reports nothing on the twin, and is never wrong."""
    tool = tmp_path / "tool.py"
    tool.write_text("import sys\nif '0.9 * nextvalues' in open(sys.argv[1]).read(): print('finding: another gamma')\n")
    programs: list[Program] = [BY_NAME["script-gamma"], BY_NAME["script-lambda"]]
    outside_tool.run(f"{sys.executable} {tool}", programs, tmp_path / "said", long=False)
    capsys.readouterr()
    outside_tool.print_score(tmp_path / "said")

    assert capsys.readouterr().out.splitlines()[2:] == ["| with a mistake | 2 | 1 | 0 | 0 | 1 | 0 |", "| correct | 1 | 0 | 0 | 0 | 1 | 0 |"]
