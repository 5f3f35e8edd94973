"""The programs of `benchmarks/equations.py` have the mistakes that they are said to have.

Three steps of one environment, γ = λ = 0.5, rewards 1, 2, 4, values 2, 4, 6 and 8 after the last step; the first step ends its episode:

    δ_2 = 4 + 0.5 · 8 - 6 = 2     A_2 = 2
    δ_1 = 2 + 0.5 · 6 - 4 = 1     A_1 = 1 + 0.25 · 2 = 1.5
    δ_0 = 1 - 2 = -1              A_0 = -1
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from equation_bugs import CONTINUOUS, PROGRAMS, Bug, edited
from equation_bugs_loop import LOOP, OWN_LOOP
from equation_bugs_rollout import SCRIPT_COLLECTING, SCRIPT_TARGETS
from equation_bugs_sb3 import BUNDLED, SB3_COLLECTING, SB3_LOSSES, SB3_STEPS, SB3_TARGETS
from equation_bugs_update import SCRIPT_LOSSES, SCRIPT_STEPS
from equation_healthy import HEALTHY

SCRIPT = (*SCRIPT_TARGETS, *SCRIPT_COLLECTING, *SCRIPT_LOSSES, *SCRIPT_STEPS)
BUGS: tuple[Bug, ...] = (*SCRIPT, *SB3_TARGETS, *SB3_COLLECTING, *SB3_LOSSES, *SB3_STEPS, *BUNDLED, *LOOP)
HEALTHY_SCRIPT = (PROGRAMS / "script.py").read_text()


def targets_of(text: str) -> dict[str, list[float]]:
    """Return the advantages and the returns that the block of a script computes for the three steps."""
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
    bug = next(bug for bug in SCRIPT_TARGETS if bug.name == f"script-{name}")
    assert targets_of(bug.text())["advantages"] == pytest.approx(advantages)


def test_monte_carlo_returns_worked_by_hand() -> None:
    returns = {
        bug.name: targets_of(bug.text())["returns"]
        for bug in SCRIPT_TARGETS
        if bug.name.startswith("script-returns_mc")
    }
    assert returns == {"script-returns_mc": [1, 6, 8], "script-returns_mc_cut": [1, 4, 4]}


def test_every_program_can_be_made_and_differs_from_the_healthy_one() -> None:
    """A piece that an edit replaces occurs once in its program."""
    for bug in BUGS:
        text = bug.text()
        compile(text, bug.name, "exec")
        assert text != Path(PROGRAMS / bug.base).read_text() or "--fault" in bug.args, bug.name
    for program in HEALTHY:
        compile(edited(program.path.read_text(), program.edits), program.name, "exec")
    compile(edited(HEALTHY_SCRIPT, OWN_LOOP), "own loop", "exec")
    compile(edited(HEALTHY_SCRIPT, CONTINUOUS), "continuous", "exec")


def test_names_are_unique() -> None:
    assert len({bug.name for bug in BUGS}) == len(BUGS)
    assert len({program.name for program in HEALTHY}) == len(HEALTHY)
