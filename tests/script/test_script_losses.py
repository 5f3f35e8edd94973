"""Advantages, losses and minibatches of a script whose code is in a function: only its mistake is named."""

from __future__ import annotations

import textwrap
from collections.abc import Collection
from pathlib import Path

import pytest
from forked import run_python
from mistakes.corpus import BY_NAME

from esper_telemetry import read_run
from esper_telemetry.core.facts import Facts
from esper_telemetry.equations.equation import equation_results

CHECKED = {
    *("advantages", "returns", "normalized_advantages"),
    *("policy_loss", "value_loss", "entropy_loss", "total_loss", "minibatches"),
}


def named_mistakes(directory: Path, text: str, checked: Collection[str] = CHECKED) -> dict[str, set[str]]:
    """Run a script; return the equations in its first record, and the names of their explanations."""
    head, parser, body = text.partition("parser = ")
    (directory / "ppo.py").write_text(f"{head}def main():\n{textwrap.indent(parser + body, '    ')}\n\nmain()\n")
    words = ["-m", "esper_telemetry", "run", "--run-dir", "run", "ppo.py", "--env-id", "CartPole-v1", "--total-timesteps", "768"]
    run_python(*words, cwd=directory).check_returncode()
    run = read_run(directory / "run")
    results = [one for one in equation_results(run.records[0].values, Facts.of(run.info.facts)) if one.equation.name in checked]
    assert all(one.matches or one.explanations for one in results)
    return {one.equation.name: {hypothesis.name for hypothesis in one.hypotheses} for one in results}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ends_late", {"advantages": {"ends_late"}}),
        pytest.param("ends_ignored", {"advantages": {"ends_ignored"}}, marks=pytest.mark.slow),
        pytest.param("norm_no_mean", {"normalized_advantages": {"std_alone"}}, marks=pytest.mark.slow),
        ("pg_optimistic", {"policy_loss": {"optimistic"}}),
        pytest.param("pg_sign", {"policy_loss": {"sign"}}, marks=pytest.mark.slow),
        pytest.param("v_broadcast", {"value_loss": {"broadcast"}}, marks=pytest.mark.slow),
        ("entropy_sign", {"entropy_loss": {"sign"}}),
        pytest.param("entropy_sample", {"entropy_loss": {"sample"}}, marks=pytest.mark.slow),
        pytest.param("overlapping", {"minibatches": {"overlapping"}}, marks=pytest.mark.slow),
        pytest.param("first_minibatch_only", {"minibatches": {"same_minibatch"}}, marks=pytest.mark.slow),
    ],
)
def test_the_mistake_of_a_script_is_named(tmp_path: Path, name: str, expected: dict[str, set[str]]) -> None:
    program = BY_NAME[f"script-{name}"]
    names = named_mistakes(tmp_path, program.text())

    assert names.keys() == CHECKED
    assert {equation: of for equation, of in names.items() if of} == expected


@pytest.mark.parametrize("name", ["drawn_again", pytest.param("other_scale", marks=pytest.mark.slow)])
def test_what_the_policy_is_asked_for_in_the_update_is_named(tmp_path: Path, name: str) -> None:
    names = named_mistakes(tmp_path, BY_NAME[f"script-{name}"].text(), {"replayed_log_probs"})

    assert names == {"replayed_log_probs": {name}}


def test_the_correct_script_has_no_mistake(tmp_path: Path) -> None:
    assert named_mistakes(tmp_path, BY_NAME["script-pg_sign"].correct().text()) == {name: set() for name in CHECKED}
