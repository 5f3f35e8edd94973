"""Losses and minibatches of a script that is run as it is: its mistake is named, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from forked import run_python

from esper_telemetry import read_run
from esper_telemetry.core.facts import Facts
from esper_telemetry.equations.equation import equation_results

SCRIPT = Path(__file__).parent / "scripts" / "wrong_losses.py"
CHECKED = {"policy_loss", "value_loss", "entropy_loss", "total_loss", "minibatches"}


def mistakes(directory: Path, bug: str) -> dict[str, set[str]]:
    """Run the script; return the equations that its first record has, and the names of what explains them."""
    words = ["-m", "esper_telemetry", "run", "--run-dir", "run", str(SCRIPT), "--bug", bug]
    run_python(*words, cwd=directory).check_returncode()
    run = read_run(directory / "run")
    results = [
        one for one in equation_results(run.records[0].values, Facts.of(run.info.facts)) if one.equation.name in CHECKED
    ]
    assert all(one.matches or one.explanations for one in results)
    return {one.equation.name: {hypothesis.name for hypothesis in one.hypotheses} for one in results}


@pytest.mark.parametrize(
    ("bug", "expected"),
    [
        ("none", {}),
        ("min", {"policy_loss": {"optimistic"}}),
        pytest.param("sign", {"policy_loss": {"sign"}}, marks=pytest.mark.slow),
        pytest.param("broadcast", {"value_loss": {"broadcast"}}, marks=pytest.mark.slow),
        ("bonus", {"entropy_loss": {"sign"}}),
        pytest.param("sample", {"entropy_loss": {"sample"}}, marks=pytest.mark.slow),
        pytest.param("replace", {"minibatches": {"with_replacement"}}, marks=pytest.mark.slow),
        pytest.param("slice", {"minibatches": {"same_minibatch"}}, marks=pytest.mark.slow),
    ],
)
def test_the_mistake_of_a_script_is_named(tmp_path: Path, bug: str, expected: dict[str, set[str]]) -> None:
    found = mistakes(tmp_path, bug)

    assert found.keys() == CHECKED
    assert {name: names for name, names in found.items() if names} == expected
