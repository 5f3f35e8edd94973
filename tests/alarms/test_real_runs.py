"""Real runs: every rule's inputs are measured, and healthy training raises no alarm."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from healthy_run import judged, raised
from torch import Tensor

from esper_telemetry import PPO, PPOConfig, Telemetry, attach, make_env, read_run
from esper_telemetry.alarms import Detectors
from esper_telemetry.events import UpdateEnd
from esper_telemetry.journal.read import Run
from esper_telemetry.ppo.environments.cue_recall import CueRecall

BREAKS = 24


def trained(run_dir: Path, trainer: PPO, updates: int) -> Run:
    """The journal of that many updates at NORMAL."""
    with Telemetry(run_dir=run_dir, offload=False) as telemetry:
        attach(telemetry, trainer)
        while trainer.updates < updates:
            trainer.learn(trainer.env_steps + 1)
    return read_run(run_dir)


def recall(**settings: Any) -> PPO:
    """The memory task, small."""
    common: dict[str, Any] = {"num_steps": 32, "num_epochs": 4, "num_minibatches": 4, "entropy_coef": 0.01, "gamma": 0.95}
    sizes: dict[str, Any] = {"policy": "lstm", "lstm_size": 16, "encoder_sizes": (16,), "hidden_sizes": (), "shared_trunk": True}
    return PPO(CueRecall(16, seed=0), PPOConfig(**{**common, **sizes, "anneal_learning_rate": False, **settings}))


def pole() -> PPO:
    """CartPole without memory."""
    return PPO(make_env("CartPole-v1", num_envs=4, seed=0), PPOConfig(num_steps=32, num_epochs=2, hidden_sizes=(8,)))


@pytest.mark.system
@pytest.mark.parametrize(("trainer", "open_questions"), [(recall, {"repr/norm_growth"}), (pole, set())], ids=["recall", "pole"])
def test_a_run_at_normal_answers_every_question(trainer: Any, open_questions: set[str], tmp_path: Path) -> None:
    """Nine updates include two sampled ones. The norm of features is not measured in policies with memory."""
    run = trained(tmp_path / "run", trainer(), 9)
    detectors = Detectors(run.info.facts)
    for record in run.records:
        detectors.step(record)

    assert set(detectors.coverage.unanswered()) <= open_questions


@pytest.mark.system
def test_a_healthy_run_is_silent_and_a_broken_one_is_not(tmp_path: Path) -> None:
    """The policy loss has the wrong sign from update 24 on; the alarm follows within three updates, and none precedes it."""
    trainer = recall(learning_rate=2.5e-3)
    right = trainer.steps.policy_loss

    def wrong(log_ratio: Tensor, advantages: Tensor, clip: float) -> Tensor:
        return right(log_ratio, -advantages, clip)

    def swap(event: UpdateEnd) -> None:
        if event.update == BREAKS - 1:
            trainer.steps = replace(trainer.steps, policy_loss=wrong)

    trainer.hooks.on(UpdateEnd, swap)
    run = trained(tmp_path / "run", trainer, 28)
    updates = {kind: update for kind, update in raised(judged(run.records, run.info.facts)).items() if "telemetry/" not in kind}

    assert BREAKS <= updates["policy/wrong_direction"] <= BREAKS + 2
    assert min(updates.values()) >= BREAKS
