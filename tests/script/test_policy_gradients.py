"""Policy gradients without a ratio: sums of rewards without a critic, and a critic that learns from the advantages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mistakes.corpus import BY_NAME, CHANGES, PROGRAMS, Edit, edited
from test_script_runs import check, telemetry_lines, with_telemetry

PROGRAM = (PROGRAMS / "policy_gradient.py").read_text()
BONUS = ("loss = actor_loss + 0.5 * critic_loss", "loss = actor_loss + 0.5 * critic_loss + 0.01 * features[0].weight.cosh().mean()")
"""A term that is none of PPO's: the loss cannot be recomputed."""

pytestmark = pytest.mark.system


def checked(directory: Path, edits: tuple[Edit, ...], critic: bool) -> dict[str, dict[str, Any]]:
    """Return the equations of the edited program by name."""
    return check(directory, edited(PROGRAM, edits), "--env-id", "CartPole-v1", *["--critic"] * critic, updates=3)


def names(row: dict[str, Any]) -> list[str]:
    return [one["hypothesis"] for one in row["explanations"]]


def differing(rows: dict[str, dict[str, Any]]) -> set[str]:
    return {name for name, row in rows.items() if row["state"] == "differs"}


def test_sums_of_rewards_are_a_variant_and_values_do_not_apply(tmp_path: Path) -> None:
    rows = checked(tmp_path, (), critic=False)

    assert (rows["advantages"]["state"], names(rows["advantages"])) == ("variant", ["alone"])
    assert {rows[name]["reason"] for name in ("values", "returns", "value_loss")} == {"the program has no critic"}
    assert not differing(rows)


def test_the_first_line_speaks_of_policy_losses_and_misses_no_episodes(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)

    result = with_telemetry(tmp_path, str(script), "--env-id", "CartPole-v1")

    line = next(line for line in telemetry_lines(result) if "found" in line)
    assert "policy losses" in line and "distributions" in line
    assert "probability ratios" not in line and "not found" not in line


@pytest.mark.parametrize("edits", [(), (BONUS,)])
def test_a_critic_may_learn_from_the_advantages(tmp_path: Path, edits: tuple[Edit, ...]) -> None:
    rows = checked(tmp_path, edits, critic=True)

    assert rows["value_loss"]["state"] == "matches"
    assert not differing(rows)


SCALED = ("returns = torch.tensor(returns, dtype=torch.float32)", "returns = torch.tensor(returns, dtype=torch.float32) / 20")
BEFORE = (
    "        advantages = returns - values\n",
    "        advantages = returns - values\n        normed = (advantages - advantages.mean()) / advantages.std()\n",
)
NORMED = (BEFORE, ("log_probs * advantages.detach()", "log_probs * normed.detach()"))


@pytest.mark.parametrize(
    ("edits", "state", "hypothesis"),
    [((), "variant", "reward_scale"), ((("returns.insert(0, total)", "returns.append(total)"),), "differs", "alone_reversed")],
)
def test_sums_that_are_scaled_and_have_a_baseline(tmp_path: Path, edits: tuple[Edit, ...], state: str, hypothesis: str) -> None:
    rows = checked(tmp_path, (SCALED, *NORMED, *edits), critic=True)

    assert rows["advantages"]["state"] == state and hypothesis in names(rows["advantages"])
    assert differing(rows) == ({"advantages"} if state == "differs" else set())


@pytest.mark.parametrize(("style", "critic"), [("parts", False), ("parts", True), ("apart", True)])
def test_several_backward_passes_of_a_step_are_one_loss(tmp_path: Path, style: str, critic: bool) -> None:
    rows = checked(tmp_path, CHANGES[style], critic)

    assert not differing(rows)
    assert {rows[name]["state"] for name in ("gradient", "log_ratios", "log_probs", "transitions")} == {"matches"}


MEMORY = "    observations, actions, rewards, ends = [], [], [], []\n"
NEVER_CLEARED = (
    (MEMORY, "    goal = len(rewards) + args.steps\n"),
    ("for _update in", MEMORY.lstrip() + "for _update in"),
    ("< args.steps or", "< goal or"),
)
RETURNS = "    returns, total = [], 0.0\n"
NORMALIZED = (RETURNS, "    rewards = (np.array(rewards) - np.mean(rewards)) / (np.std(rewards) + 1e-8)\n" + RETURNS)
"""CartPole pays 1 in every step."""

OTHERS = "torch.randperm(len(chosen))"
OTHER_ACTIONS = (
    ("log_prob(chosen)", f"log_prob(chosen[{OTHERS}])"),
    ("    optimizer.zero_grad()\n", f"    chosen = chosen[{OTHERS}]\n    optimizer.zero_grad()\n"),
)
"""The actions that the environments received are the ones that the policy has drawn."""

OTHER_WEIGHTS = f"(log_probs * returns[{OTHERS}[:len(log_probs)]])"


@pytest.mark.parametrize(
    ("edits", "critic", "equation", "hypotheses"),
    [
        (BY_NAME["reinforce-across_ends"].edits, False, "advantages", "alone_across_ends"),
        (BY_NAME["a2c-attached"].edits, True, "gradient", "advantages_attached"),
        ((*BY_NAME["a2c-attached"].edits, BONUS), True, "gradient", "advantages_attached"),
        (BY_NAME["apart-attached"].edits, True, "gradient", "advantages_attached"),
        (BY_NAME["parts-sign"].edits, False, "gradient", "sign policy_sign"),
        (BY_NAME["parts-cleared"].edits, False, "gradient", "last_pass"),
        (BY_NAME["parts-gamma"].edits, False, "advantages", "alone_gamma"),
        (NEVER_CLEARED, False, "minibatches", "earlier_rows"),
        (NEVER_CLEARED, True, "minibatches", "earlier_rows"),
        ((NORMALIZED,), False, "advantages", "alone_zero"),
        ((NORMALIZED,), True, "advantages", "rewards_zero"),
        *(((edit,), critic, "log_probs", "other_choices") for edit in OTHER_ACTIONS for critic in (False, True)),
        ((("(log_probs * returns)", OTHER_WEIGHTS),), False, "normalized_advantages", "other_rows"),
        ((*CHANGES["parts"], ("(log_probs * returns[part])", OTHER_WEIGHTS)), False, "normalized_advantages", "other_rows"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, edits: tuple[Edit, ...], critic: bool, equation: str, hypotheses: str) -> None:
    rows = checked(tmp_path, edits, critic)

    assert names(rows[equation]) == hypotheses.split()
    assert differing(rows) == {equation}
