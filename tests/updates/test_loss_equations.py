"""Losses and minibatches of the bundled trainer: they match in every setting, and a wrong step of the update is named."""

from __future__ import annotations

from collections.abc import Iterable
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
from esper_telemetry.ppo.rollout import Batch
from esper_telemetry.updates.equation_checks import short_passes

STEPS, ENVS = 32, 4
CHECKED = ("policy_loss", "value_loss", "entropy_loss", "minibatches")
SETTINGS = {
    "num_steps": STEPS,
    "num_epochs": 3,
    "num_minibatches": 4,
    "hidden_sizes": (16, 16),
    "entropy_coef": 0.01,
    "learning_rate": 0.02,
}


def train(
    path: Path, env: str = "CartPole-v1", *, changes: dict[str, Any] | None = None, **settings: Any
) -> dict[str, list[EquationResult]]:
    """Train for two updates, all sampled; return each equation in the records that have it."""
    trainer = PPO(make_env(env, num_envs=ENVS, seed=0), PPOConfig(**{**SETTINGS, **settings}))
    trainer.steps = replace(trainer.steps, **(changes or {}))
    with Telemetry([], run_dir=path, level="debug", offload=False) as telemetry:
        attach(telemetry, trainer)
        trainer.learn(2 * STEPS * ENVS)
    run = read_run(path)
    results = [result for record in run.records for result in equation_results(record.values, Facts.of(run.info.facts))]
    return {name: [result for result in results if result.equation.name == name] for name in CHECKED}


def names(results: Iterable[EquationResult]) -> set[str]:
    return {one.name for result in results for one in result.hypotheses}


@pytest.mark.parametrize(
    ("env", "settings"),
    [
        ("CartPole-v1", {"clip_value": 0.2, "normalize_minibatches": True, "target_kl": 1e-4}),
        ("CartPole-v1", {"normalize_advantages": False, "shared_trunk": True}),
        ("cue-recall", {"policy": "gru", "clip_value": 0.2}),
        ("Pendulum-v1", {"state_dependent_std": True, "squash": True}),
        ("morphogenesis", {"policy": "lstm"}),
    ],
)
def test_right_losses_and_minibatches_match(tmp_path: Path, env: str, settings: dict[str, Any]) -> None:
    results = train(tmp_path, env, **settings)

    for name in CHECKED:
        assert results[name]
        assert all(result.matches for result in results[name])
        assert (
            max(result.error or 0.0 for result in results[name]) < 0.2 * LOSS_TOLERANCE * 1e-4
        )  # far from the tolerance


def broadcast(values: Tensor, returns: Tensor, old_values: Tensor) -> Tensor:
    return 0.5 * (values[:, None] - returns).square().mean()


def overlapping(batch: Batch, count: int, generator: torch.Generator) -> Iterable[Batch]:
    return [batch.take(torch.randperm(len(batch), generator=generator)[: len(batch) // count]) for _ in range(count)]


def first_only(batch: Batch, count: int, generator: torch.Generator) -> Iterable[Batch]:
    return [batch.take(torch.randperm(len(batch), generator=generator)[: len(batch) // count])]


def in_order(batch: Batch, count: int, generator: torch.Generator) -> Iterable[Batch]:
    return batch.split(count)


BREAKS: dict[tuple[str, str], dict[str, Any]] = {
    ("policy_loss", "no_clip"): {"policy_loss": lambda log_ratio, a, clip: -(log_ratio.exp() * a).mean()},
    ("policy_loss", "optimistic"): {
        "policy_loss": lambda log_ratio, a, clip: torch.min(
            -log_ratio.exp() * a, -log_ratio.exp().clamp(1 - clip, 1 + clip) * a
        ).mean()
    },
    ("policy_loss", "sum"): {
        "policy_loss": lambda log_ratio, a, clip: torch.max(
            -log_ratio.exp() * a, -log_ratio.exp().clamp(1 - clip, 1 + clip) * a
        ).sum()
    },
    ("value_loss", "broadcast"): {"value_loss": broadcast},
    ("value_loss", "sign"): {"value_loss": lambda values, returns, old: -0.5 * (values - returns).square().mean()},
    ("value_loss", "old_value_target"): {"value_loss": lambda values, returns, old: (values - old).square().mean()},
    ("entropy_loss", "sign"): {"entropy_loss": lambda entropy: entropy},
    ("minibatches", "overlapping"): {"minibatches": overlapping},
    ("minibatches", "one_minibatch"): {"minibatches": first_only},
    ("minibatches", "unshuffled"): {"minibatches": in_order},
}


QUICK = {("policy_loss", "no_clip"), ("value_loss", "sign"), ("entropy_loss", "sign"), ("minibatches", "unshuffled")}
"""Mistakes that every test run checks; the slow tests train the others."""


@pytest.mark.parametrize(
    ("equation", "mistake"),
    [pytest.param(*one, marks=() if one in QUICK else pytest.mark.slow) for one in BREAKS],
)
def test_a_wrong_step_of_the_update_is_named_and_the_others_match(tmp_path: Path, equation: str, mistake: str) -> None:
    results = train(tmp_path, changes=BREAKS[equation, mistake], num_epochs=6)
    failing = [result for result in results[equation] if not result.matches]

    assert failing
    assert set.intersection(*[names([result]) for result in failing]) == {mistake}
    assert all(result.matches for name in CHECKED if name != equation for result in results[name])


def test_a_wrong_loss_raises_the_alarm(tmp_path: Path) -> None:
    train(tmp_path, changes=BREAKS["entropy_loss", "sign"])

    alarms = [alarm for alarm in read_run(tmp_path).alarms if alarm.type == "integrity/equation"]

    assert {alarm.key for alarm in alarms} == {EQUATION_KEY + "entropy_loss"}


def test_passes_that_are_not_counted_are_told_apart_where_they_take_the_same_few_rows() -> None:
    draw = torch.Generator().manual_seed(1)
    short = [part for _ in range(3) for part in torch.randperm(40, generator=draw).chunk(2)]
    alone = [torch.randperm(40, generator=draw)[:20] for _ in range(6)]
    one = list(torch.randperm(120, generator=draw).chunk(6))

    assert [len(minibatches) for minibatches in short_passes(short)] == [2, 2, 2]
    assert short_passes(alone) == [] and short_passes(one) == []
