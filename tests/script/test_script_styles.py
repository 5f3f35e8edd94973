"""The equations of correct programs in different styles are checked without an alarm; variants with a mistake are named."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from mistakes.corpus import Edit, edited
from test_script_runs import SCRIPTS, check, python, with_telemetry

from esper_telemetry import read_run

pytestmark = pytest.mark.system

EQUATIONS = 21


def text_of(name: str, *edits: Edit) -> str:
    return edited((SCRIPTS / name).read_text(), edits)


def checked(directory: Path, name: str, *edits: Edit) -> dict[str, dict[str, Any]]:
    """Return the equations of an edited script by name."""
    rows = check(directory, text_of(name, *edits))
    assert len(rows) == EQUATIONS
    return rows


def unchecked(rows: dict[str, dict[str, Any]]) -> set[str]:
    return {name for name, row in rows.items() if row["state"] not in ("matches", "variant")}


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("worker_pipes.py", ()),
        ("functional_style.py", ()),
        ("numpy_arrays.py", ()),
        ("episode_memory.py", ()),
        ("two_networks.py", ("total_loss", "executed_actions")),
        ("own_environment.py", ()),
        ("tensor_environment.py", ()),
        ("shuffled_columns.py", ("total_loss",)),
    ],
)
def test_a_correct_program_has_its_equations_checked(tmp_path: Path, name: str, others: Collection[str]) -> None:
    """`others` are equations that do not apply: it does not add its losses, or send actions as stored."""
    rows = checked(tmp_path, name)

    assert unchecked(rows) == set(others)
    assert not [alarm for alarm in read_run(tmp_path / "run").alarms if alarm.level == "critical"]


def test_a_policy_may_be_changed_without_an_optimizer(tmp_path: Path) -> None:
    """As in TRPO, the gradient is taken, and the script changes the weights itself."""
    applied = """            with torch.no_grad():
                for part, slope in zip([*mu.parameters(), ls], torch.autograd.grad(la, [*mu.parameters(), ls]), strict=True):
                    part -= 1e-3 * slope
"""
    source = text_of("two_networks.py")
    begin, end = source.index("            oa.zero_grad()"), source.index("            lc = ")
    source = edited(source[:begin] + applied + source[end:], (("oa, oc = torch.optim.Adam([*mu.parameters(), ls], 3e-4), ", "oc = "),))

    rows = check(tmp_path, source)

    traced = {"log_probs", "actions", "advantages", "returns", "values", "stored_rewards", "transitions"}
    assert not traced & unchecked(rows)
    assert not read_run(tmp_path / "run").alarms


def test_a_critic_may_be_trained_before_the_policy(tmp_path: Path) -> None:
    """The policy's loss, which shows the columns of a rollout, comes after the first step of the update."""
    source = text_of("shuffled_columns.py")
    place = source.index("            critic_opt.zero_grad()")
    actor, critic = source[source.index("            actor_opt.zero_grad()") : place], source[place:]

    rows = checked(tmp_path, "shuffled_columns.py", (actor + critic, critic + actor))

    assert unchecked(rows) == {"total_loss"}
    assert rows["value_loss"]["updates"] == rows["advantages"]["updates"] == 2


def test_values_that_a_script_does_not_keep_follow_from_returns_and_advantages(tmp_path: Path) -> None:
    """Its loss has no bonus, either."""
    edits = (
        ("(x_, a, l, g + v, v))", "(x_, a, l, g + v, g))"),
        ("z, a, l, t, v = (", "z, a, l, t, g = ("),
        ("d, g = Categorical(logits=w(z)), t - v", "d = Categorical(logits=w(z))"),
        (" - 0.01 * d.entropy().mean()", ""),
    )
    rows = checked(tmp_path, "tensor_environment.py", *edits)

    assert unchecked(rows) == {"entropy_loss", "total_loss"}
    assert rows["entropy_loss"]["reason"] == "the loss has no entropy term"


def test_the_returns_that_a_script_prints_are_those_of_its_run(tmp_path: Path) -> None:
    """Its worker processes scale the rewards by 0.01 and add up the unscaled rewards."""
    checked(tmp_path, "worker_pipes.py")

    returns = [record.values.get("episode/return_mean", 0.0) for record in read_run(tmp_path / "run").records]
    assert max(returns) > 5


@pytest.mark.parametrize(
    ("name", "edit", "equation", "hypothesis"),
    [
        ("worker_pipes.py", ("g = G[b]\n", "g = G[torch.randperm(n * k)[:128]]\n"), "normalized_advantages", "other_rows"),
        (
            "numpy_arrays.py",
            ("torch.from_numpy(gain[part])", "torch.from_numpy(gain[rng.permutation(N)[:64]])"),
            "normalized_advantages",
            "other_rows",
        ),
        ("worker_pipes.py", ("(l.exp() * l).sum(1)", "(l.exp() * l).gather(1, A[b][:, None])"), "entropy_loss", "chosen_term"),
        ("shuffled_columns.py", (".entropy().mean()", ".entropy().sum()"), "entropy_loss", "sum"),
        ("tensor_environment.py", ("torch.min(ratio", "torch.max(ratio"), "policy_loss", "optimistic"),
        ("tensor_environment.py", ("l, g + v, v))", "l, (g + v).T.reshape(S, B), v))"), "advantages", "returns_swapped"),
    ],
)
def test_a_mistake_is_named_in_any_style(tmp_path: Path, name: str, edit: Edit, equation: str, hypothesis: str) -> None:
    rows = checked(tmp_path, name, edit)

    different = [one for one, row in rows.items() if row["state"] == "differs"]
    assert different in ([equation], [equation, "gradient"])  # a mistake in a loss shows in the gradient, too
    assert [one["hypothesis"] for one in rows[equation]["explanations"]] == [hypothesis]


@pytest.mark.parametrize("place", ["next", "reward"])
@pytest.mark.parametrize("swapped", [False, True])
def test_swapped_flags_of_terminations_and_time_limits_are_named(tmp_path: Path, place: str, swapped: bool) -> None:
    flags = "3, 2" if swapped else "2, 3"
    rows = checked(tmp_path, "time_limits.py", ('"next", 2, 3', f'"{place}", {flags}'))

    assert [one for one, row in rows.items() if row["state"] == "differs"] == ["advantages"] * swapped
    assert [one["hypothesis"] for one in rows["advantages"]["explanations"]] == ["ends_exchanged"] * swapped


@pytest.mark.parametrize(
    ("step", "reset", "shows"), [("paso", "reiniciar", "vista"), ("schritt", "neu", "bild"), ("advance", "begin", "look")]
)
def test_an_environment_may_have_methods_of_any_names(tmp_path: Path, step: str, reset: str, shows: str) -> None:
    source = text_of("own_environment.py")
    for old, new in (("step(", f"{step}("), ("reset(", f"{reset}("), ("seen(", f"{shows}(")):
        source = source.replace(f"def {old}", f"def {new}").replace(f"e.{old}", f"e.{new}").replace(f"self.{old}", f"self.{new}")
    (tmp_path / "script.py").write_text(source)
    plain = python(tmp_path, "script.py")
    result = with_telemetry(tmp_path, "script.py")

    assert result.stdout == plain.stdout
    assert "found episodes, rollouts" in result.stderr and "not found" not in result.stderr
    run = read_run(tmp_path / "run")
    assert len(run.records) == 12 and not run.alarms
    assert run.records[-1].values["episode/return_mean"] > 3


WITH_A_CHILD = (
    "import multiprocessing, time\nmultiprocessing.get_context('fork').Process(target=time.sleep, args=(60,), daemon=True).start()\n"
)


@pytest.mark.parametrize(
    ("before", "words"),
    [
        ("", "no function of the program took an action"),
        (WITH_A_CHILD, "what the program's child processes step is seen only if they send an observation"),
    ],
)
def test_a_script_whose_environment_is_not_seen_is_told_what_to_add(tmp_path: Path, before: str, words: str) -> None:
    """Rewards and ends are attributes, so that nothing shows which function is a step."""
    edits = (
        ("def step(", "def paso("),
        ("n, r, f = e.step(a.item())", "e.paso(a.item()); n, r, f = e.result"),
        ("return self.seen(), 5.0", "self.result = self.seen(), 5.0"),
    )
    (tmp_path / "script.py").write_text(before + text_of("own_environment.py", *edits))
    result = with_telemetry(tmp_path, "script.py")

    assert f"no environment was seen: {words}" in result.stderr
    assert ("Give the environment a method `step(action)` that returns (observation, reward, done)" in result.stderr) is (not before)
    assert len(read_run(tmp_path / "run").records) == 12


def test_what_is_not_traced_says_what_was_sought_and_what_was_found(tmp_path: Path) -> None:
    """The minibatches have advantages that do not come from an array of the script."""
    rows = checked(tmp_path, "worker_pipes.py", ("g = G[b]\n", "g = torch.randn(128)\n"))

    row = rows["normalized_advantages"]
    assert row["state"] == "untraced"
    assert "advantages" in row["reason"] and "script.py:" in row["reason"]
