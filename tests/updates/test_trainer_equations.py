"""Equations of the bundled trainer: they match in every setting, and a wrong step of the update is named."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from esper_telemetry import PPO, PPOConfig, Telemetry, attach, make_env, read_run
from esper_telemetry.core.facts import Facts
from esper_telemetry.equations.equation import EQUATION_KEY, EquationResult, equation_results
from esper_telemetry.equations.minibatch_losses import LOSS_TOLERANCE
from esper_telemetry.journal.read import Run
from esper_telemetry.ppo.ppo_objective import UpdateSteps, generalized_advantages
from esper_telemetry.ppo.rollout import Batch, Rollout
from esper_telemetry.updates.equation_checks import short_passes

TARGETS = ("advantages", "returns", "normalized_advantages")
LOSSES = ("policy_loss", "value_loss", "entropy_loss", "minibatches")
STEP = ("gradient", "clipping", "optimizer_step")
COLLECTION = ("log_probs", "replayed_log_probs", "values", "actions")
SMALL: dict[str, Any] = {
    "num_steps": 48,
    "num_epochs": 3,
    "num_minibatches": 2,
    "hidden_sizes": (8, 8),
    "entropy_coef": 0.01,
    "learning_rate": 0.02,
}
MEMORY: dict[str, Any] = {"env": "cue-recall", "num_envs": 8, "num_steps": 32, "lstm_size": 8}


def trainer(env: str = "CartPole-v1", num_envs: int = 4, **settings: Any) -> PPO:
    return PPO(make_env(env, num_envs=num_envs, seed=1), PPOConfig(**{**SMALL, **settings}))


def recorded(source: PPO, run_dir: Path, updates: int = 3) -> Run:
    """Return a run of that many updates, all sampled."""
    with Telemetry([], run_dir=run_dir, level="debug", offload=False) as telemetry:
        attach(telemetry, source)
        while source.updates < updates:
            source.learn(source.env_steps + 1)
    return read_run(run_dir)


def results_of(run: Run) -> dict[str, list[EquationResult]]:
    """Return the results of each equation in the records that have it."""
    results: dict[str, list[EquationResult]] = {}
    for record in run.records:
        for result in equation_results(record.values, Facts.of(run.info.facts)):
            results.setdefault(result.equation.name, []).append(result)
    return results


def explanations(results: Iterable[EquationResult]) -> list[set[str]]:
    """Return the hypotheses of each result that differs from its equation."""
    return [{one.name for one in result.hypotheses} for result in results if not result.matches]


HEALTHY: dict[str, dict[str, Any]] = {
    "cartpole": {},
    "one environment": {"num_envs": 1, "num_steps": 128},
    "pendulum": {"env": "Pendulum-v1", "num_envs": 2, "num_steps": 256, "normalize_observations": True},
    "squashed": {"env": "Pendulum-v1", "state_dependent_std": True, "squash": True},
    "frozen lake": {"env": "FrozenLake-v1", "gamma": 1.0, "gae_lambda": 1.0},
    "cliff": {"env": "CliffWalking-v1", "num_steps": 256, "gae_lambda": 0.0},
    "acrobot": {"env": "Acrobot-v1", "num_envs": 2, "num_steps": 600},
    "mountain car": {"env": "MountainCarContinuous-v0", "num_envs": 1, "num_steps": 1024, "normalize_rewards": True},
    "normalised over the rollout": {"normalize_minibatches": False},
    "floor": {"advantage_std_floor": 20.0},
    "as they are": {"normalize_advantages": False, "shared_trunk": True},
    "uneven minibatches": {"num_steps": 33, "num_minibatches": 6},
    "clipped values": {"clip_value": 0.2, "normalize_minibatches": True, "target_kl": 1e-4},
    "rate by the KL divergence": {"desired_kl": 0.01},
    "constant rate": {"anneal_learning_rate": False},
    "no clip of gradients": {"max_grad_norm": None},
    "bfloat16": {"precision": "bf16"},
    "lstm": {"policy": "lstm"},
    "factored lstm": {**MEMORY, "policy": "lstm"},
    "factored gru": {**MEMORY, "policy": "gru", "clip_value": 0.2},
    "morphogenesis": {"env": "morphogenesis", "num_steps": 32, "policy": "lstm"},
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_follows_its_equations(name: str, tmp_path: Path) -> None:
    """To rounding: errors of targets are 1e-8 to 3e-6, the latter if normalised advantages are only rounding errors."""
    run = recorded(trainer(**HEALTHY[name]), tmp_path, updates=2)

    results = results_of(run)
    assert {*TARGETS, *LOSSES, *STEP, *COLLECTION} - {"actions"} <= results.keys()
    assert {equation: explanations(each) for equation, each in results.items() if explanations(each)} == {}
    for names, bound in ((TARGETS, 2e-5), (LOSSES, 0.2e-4 * LOSS_TOLERANCE)):
        assert all((result.error or 0.0) < bound for equation in names for result in results[equation])
    assert not {"integrity/equation", "integrity/gae_identity", "integrity/adv_norm"} & {a.type for a in run.alarms}


def without_ends(rollout: Rollout, gamma: float, gae_lambda: float) -> Tensor:
    advantages = torch.zeros_like(rollout.rewards)
    following = torch.zeros_like(rollout.rewards[0])
    for t in range(len(advantages) - 1, -1, -1):
        delta = rollout.rewards[t] + gamma * rollout.next_values[t] - rollout.values[t]
        following = delta + gamma * gae_lambda * following
        advantages[t] = following
    return advantages


def of_the_batch(advantages: Tensor) -> Tensor:
    return (advantages - advantages.mean()) / (advantages.std() + 1e-8)


def surrogates(log_ratio: Tensor, advantages: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    ratio = log_ratio.exp()
    return -ratio * advantages, -ratio.clamp(1 - clip, 1 + clip) * advantages


def overlapping(batch: Batch, count: int, generator: torch.Generator) -> Iterable[Batch]:
    return [batch.take(torch.randperm(len(batch), generator=generator)[: len(batch) // count]) for _ in range(count)]


MISTAKES: dict[tuple[str, str], dict[str, Callable[..., Any]]] = {
    ("advantages", "ends_ignored"): {"advantages": without_ends},
    ("advantages", "other_gamma"): {"advantages": lambda rollout, _, gae_lambda: generalized_advantages(rollout, 0.9, gae_lambda)},
    ("advantages", "sign"): {"advantages": lambda *arguments: -generalized_advantages(*arguments)},
    ("returns", "normalized"): {"returns": lambda advantages, values: of_the_batch(advantages) + values},
    ("returns", "values_missing"): {"returns": lambda advantages, values: advantages},
    ("normalized_advantages", "mean_alone"): {"normalize": lambda a: a - a.mean()},
    ("normalized_advantages", "std_alone"): {"normalize": lambda a: a / (a.std() + 1e-8)},
    ("normalized_advantages", "not_normalized"): {"normalize": lambda a: a},
    ("normalized_advantages", "other_rows"): {"normalize": lambda a: of_the_batch(a).flip(0)},
    ("policy_loss", "no_clip"): {"policy_loss": lambda *columns: surrogates(*columns)[0].mean()},
    ("policy_loss", "optimistic"): {"policy_loss": lambda *columns: torch.min(*surrogates(*columns)).mean()},
    ("policy_loss", "sum"): {"policy_loss": lambda *columns: torch.max(*surrogates(*columns)).sum()},
    ("value_loss", "broadcast"): {"value_loss": lambda v, returns, old: 0.5 * (v[:, None] - returns).square().mean()},
    ("value_loss", "sign"): {"value_loss": lambda v, returns, old: -0.5 * (v - returns).square().mean()},
    ("value_loss", "old_value_target"): {"value_loss": lambda v, returns, old: (v - old).square().mean()},
    ("entropy_loss", "sign"): {"entropy_loss": lambda entropy: entropy},
    ("minibatches", "overlapping"): {"minibatches": overlapping},
    ("minibatches", "one_minibatch"): {"minibatches": lambda *arguments: list(overlapping(*arguments))[:1]},
    ("minibatches", "unshuffled"): {"minibatches": lambda batch, count, generator: batch.split(count)},
}
QUICK = {"no_clip", "sign", "unshuffled"}
"""Mistakes in losses and minibatches that every test run checks; the slow tests train the others."""


@pytest.mark.system
@pytest.mark.parametrize(
    ("equation", "mistake"),
    [pytest.param(*one, marks=() if one[0] in TARGETS or one[1] in QUICK else pytest.mark.slow) for one in MISTAKES],
)
def test_a_wrong_step_of_the_update_is_named_and_the_others_match(tmp_path: Path, equation: str, mistake: str) -> None:
    source = trainer(num_steps=96, num_epochs=6, num_minibatches=4)
    source.steps = replace(source.steps, **MISTAKES[equation, mistake])

    run = recorded(source, tmp_path, updates=2)

    results = results_of(run)
    assert set.intersection(*explanations(results[equation])) == {mistake}
    others = TARGETS if equation in TARGETS else LOSSES
    assert [other for other in others if other != equation and explanations(results[other])] == []
    alarms = {alarm.key for alarm in run.alarms if alarm.type == "integrity/equation"}
    is_variant = all(one.variant for result in results[equation] for one in result.hypotheses)
    assert (EQUATION_KEY + equation in alarms) != is_variant


def normalized_twice(steps: UpdateSteps) -> UpdateSteps:
    """Normalises the rollout, and each minibatch in another step: the result equals normalising minibatches alone."""

    def again(*arguments: Any) -> Iterable[Batch]:
        return (replace(part, advantages=of_the_batch(part.advantages)) for part in steps.minibatches(*arguments))

    return replace(steps, minibatches=again)


def stale(steps: UpdateSteps) -> UpdateSteps:
    kept: list[Tensor] = []

    def advantages(*arguments: Any) -> Tensor:
        kept.append(generalized_advantages(*arguments))
        return kept[-2] if len(kept) > 1 else kept[-1]

    return replace(steps, advantages=advantages)


def normalized_after(steps: UpdateSteps) -> UpdateSteps:
    raw: list[Tensor] = []

    def advantages(*arguments: Any) -> Tensor:
        raw.append(generalized_advantages(*arguments))
        return of_the_batch(raw[-1])

    return replace(steps, advantages=advantages, returns=lambda advantages, values: raw[-1] + values)


@pytest.mark.system
@pytest.mark.parametrize(
    ("change", "settings", "expected"),
    [
        (normalized_twice, {"normalize_minibatches": False}, {"normalized_advantages": [{"over_minibatch"}] * 3}),
        (stale, {}, {"advantages": [{"stale"}] * 2}),
        (normalized_after, {}, {"advantages": [{"normalized"}] * 3, "returns": [{"normalized_after"}] * 3}),
    ],
)
def test_advantages_of_other_rollouts_or_scales_are_named_and_published_ones_raise_nothing(
    tmp_path: Path, change: Callable[[UpdateSteps], UpdateSteps], settings: dict[str, Any], expected: dict[str, list[set[str]]]
) -> None:
    source = trainer(**settings)
    source.steps = change(source.steps)

    run = recorded(source, tmp_path)

    results = results_of(run)
    assert {equation: explanations(results[equation]) for equation in expected} == expected
    alarms = {"integrity/equation", "integrity/gae_identity"} & {alarm.type for alarm in run.alarms}
    assert not alarms or change is not normalized_after


def test_passes_that_are_not_counted_are_told_apart_where_they_take_the_same_few_rows() -> None:
    draw = torch.Generator().manual_seed(1)
    short = [part for _ in range(3) for part in torch.randperm(40, generator=draw).chunk(2)]
    alone = [torch.randperm(40, generator=draw)[:20] for _ in range(6)]
    one = list(torch.randperm(120, generator=draw).chunk(6))

    assert [len(minibatches) for minibatches in short_passes(short)] == [2, 2, 2]
    assert short_passes(alone) == [] and short_passes(one) == []
