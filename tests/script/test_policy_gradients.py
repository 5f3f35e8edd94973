"""Policy gradients without a ratio: sums of rewards without a critic, and a critic that learns from the advantages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mistakes.corpus import CHANGES
from test_script_runs import python

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "mistakes" / "programs" / "policy_gradient.py"
BONUS = ("loss = actor_loss + 0.5 * critic_loss", "loss = actor_loss + 0.5 * critic_loss + 0.01 * features[0].weight.cosh().mean()")
"""A term that is none of PPO's: the loss cannot be recomputed."""

pytestmark = pytest.mark.system


def checked(directory: Path, *edits: tuple[str, str], args: tuple[str, ...] = ()) -> dict[str, dict[str, Any]]:
    """Return the equations of the program by name, after replacing pieces of it."""
    source = PROGRAM.read_text()
    for old, new in edits:
        assert source.count(old) == 1
        source = source.replace(old, new)
    (directory / "script.py").write_text(source)
    words = ("--json", "--updates", "3", "--run-dir", "run", "script.py", "--env-id", "CartPole-v1", *args)
    result = python(directory, "-m", "esper_telemetry", "check", *words)
    assert result.stdout.startswith("{"), result.stderr
    return {row["equation"]: row for row in json.loads(result.stdout)["equations"]}


def names(row: dict[str, Any]) -> list[str]:
    return [one["hypothesis"] for one in row["explanations"]]


def test_sums_of_rewards_are_a_variant_and_values_do_not_apply(tmp_path: Path) -> None:
    rows = checked(tmp_path)

    assert (rows["advantages"]["state"], names(rows["advantages"])) == ("variant", ["alone"])
    assert {rows[name]["reason"] for name in ("values", "returns", "value_loss")} == {"the program has no critic"}
    assert not [name for name, row in rows.items() if row["state"] == "differs"]


def test_sums_over_the_ends_of_episodes_are_named(tmp_path: Path) -> None:
    rows = checked(tmp_path, ("total * (not end)", "total"))

    assert (rows["advantages"]["state"], names(rows["advantages"])) == ("differs", ["alone_across_ends"])


@pytest.mark.parametrize("edits", [(), (BONUS,)])
def test_a_policy_loss_that_reaches_the_critic_is_named(tmp_path: Path, edits: tuple[tuple[str, str], ...]) -> None:
    wrong = checked(tmp_path, ("advantages.detach()", "advantages"), *edits, args=("--critic",))

    assert names(wrong["gradient"]) == ["advantages_attached"]


@pytest.mark.parametrize("edits", [(), (BONUS,)])
def test_a_critic_may_learn_from_the_advantages(tmp_path: Path, edits: tuple[tuple[str, str], ...]) -> None:
    rows = checked(tmp_path, *edits, args=("--critic",))

    assert rows["value_loss"]["state"] == "matches"
    assert not [name for name, row in rows.items() if row["state"] == "differs"]


@pytest.mark.parametrize(("style", "args"), [("parts", ()), ("parts", ("--critic",)), ("apart", ("--critic",))])
def test_several_backward_passes_of_a_step_are_one_loss(tmp_path: Path, style: str, args: tuple[str, ...]) -> None:
    rows = checked(tmp_path, *CHANGES[style], args=args)

    assert not [name for name, row in rows.items() if row["state"] == "differs"]
    assert {rows[name]["state"] for name in ("gradient", "log_ratios", "log_probs", "transitions")} == {"matches"}


MEMORY = "    observations, actions, rewards, ends = [], [], [], []\n"
NORMALIZED = "    rewards = (np.array(rewards) - np.mean(rewards)) / (np.std(rewards) + 1e-8)\n"
OTHERS = "torch.randperm(len(chosen))"


@pytest.mark.parametrize("args", [(), ("--critic",)])
def test_rows_of_a_memory_that_is_never_cleared_are_named(tmp_path: Path, args: tuple[str, ...]) -> None:
    edits = (
        (MEMORY, "    goal = len(rewards) + args.steps\n"),
        ("for _update in", MEMORY.lstrip() + "for _update in"),
        ("< args.steps or", "< goal or"),
    )
    rows = checked(tmp_path, *edits, args=args)

    assert names(rows["minibatches"]) == ["earlier_rows"]
    assert rows["minibatches"]["state"] == "differs"


@pytest.mark.parametrize(("args", "name"), [((), "alone_zero"), (("--critic",), "rewards_zero")])
def test_rewards_that_a_normalisation_has_removed_are_named(tmp_path: Path, args: tuple[str, ...], name: str) -> None:
    """CartPole pays 1 in every step."""
    rows = checked(tmp_path, ("    returns, total = [], 0.0\n", NORMALIZED + "    returns, total = [], 0.0\n"), args=args)

    assert names(rows["advantages"]) == [name]


@pytest.mark.parametrize("args", [(), ("--critic",)])
@pytest.mark.parametrize("edit", ["log_prob(chosen)", "chosen = chosen"])
def test_actions_of_other_rows_are_named(tmp_path: Path, edit: str, args: tuple[str, ...]) -> None:
    """The actions that the environments received are the ones that the policy has drawn."""
    edits = [("log_prob(chosen)", f"log_prob(chosen[{OTHERS}])")]
    if edit != "log_prob(chosen)":
        edits = [("    optimizer.zero_grad()\n", f"    chosen = chosen[{OTHERS}]\n    optimizer.zero_grad()\n")]
    rows = checked(tmp_path, *edits, args=args)

    assert names(rows["log_probs"]) == ["other_choices"]
    assert [name for name, row in rows.items() if row["state"] == "differs"] == ["log_probs"]


@pytest.mark.parametrize("style", ["", "parts"])
def test_weights_of_other_rows_are_named(tmp_path: Path, style: str) -> None:
    old = "(log_probs * returns[part])" if style else "(log_probs * returns)"
    edits = [*(CHANGES[style] if style else ()), (old, f"(log_probs * returns[{OTHERS}[:len(log_probs)]])")]
    rows = checked(tmp_path, *edits)

    assert names(rows["normalized_advantages"]) == ["other_rows"]


WRONG = {
    "sign": ("loss = -(log_probs * returns[part]).mean()", "loss = (log_probs * returns[part]).mean()"),
    "last_pass": ("        hidden =", "        optimizer.zero_grad()\n        hidden ="),
    "alone_gamma": ("args.gamma * total", "0.9 * total"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_mistakes_in_parts_of_a_rollout_are_named(tmp_path: Path, mistake: str) -> None:
    rows = checked(tmp_path, *CHANGES["parts"], WRONG[mistake])

    assert mistake in [name for row in rows.values() if row["state"] == "differs" for name in names(row)]


def test_a_policy_loss_that_reaches_the_critic_in_a_pass_of_its_own_is_named(tmp_path: Path) -> None:
    rows = checked(tmp_path, *CHANGES["apart"], ("advantages.detach()", "advantages"), args=("--critic",))

    assert names(rows["gradient"]) == ["advantages_attached"]
