"""Members of a checkpoint in addition to the trainer, and environments that cannot be saved."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ppo_builders import EventLog, cartpole, pendulum

from esper_telemetry.events import RunStart, UpdateEnd
from esper_telemetry.ppo import PPO, Checkpoints, PPOConfig
from esper_telemetry.ppo.checkpoint import Checkpointables
from esper_telemetry.ppo.environments.environment_registry import make_env


class Curriculum:
    """A user's object that a run must not lose."""

    def __init__(self, lesson: int = 0) -> None:
        self.lesson = lesson

    def state_dict(self) -> dict[str, Any]:
        return {"lesson": self.lesson}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.lesson = state["lesson"]


@pytest.mark.parametrize("joins_first", [True, False])
def test_an_object_that_joined_is_saved_and_loaded_with_the_trainer(joins_first: bool, tmp_path: Path) -> None:
    trainer = cartpole()
    trainer.checkpointables.join("curriculum", Curriculum(lesson=3))
    path = trainer.save(tmp_path / "latest.pt")

    resumed, curriculum = cartpole(), Curriculum()
    if joins_first:
        resumed.checkpointables.join("curriculum", curriculum)
    resumed.load(path)
    if not joins_first:
        resumed.checkpointables.join("curriculum", curriculum)

    assert curriculum.lesson == 3


def test_checkpointables_of_one_name_are_numbered_and_may_leave() -> None:
    checkpointables = Checkpointables()
    leave = checkpointables.join("lesson", Curriculum(1))
    checkpointables.join("lesson", Curriculum(2))

    assert checkpointables.state_dict() == {"lesson": {"lesson": 1}, "lesson-2": {"lesson": 2}}
    leave()
    assert checkpointables.state_dict() == {"lesson-2": {"lesson": 2}}


def draws() -> tuple[float, float, float]:
    """Draw one number from each global generator."""
    return random.random(), float(np.random.normal()), float(torch.rand(()))


def test_global_generators_go_on_where_they_were(tmp_path: Path) -> None:
    """NumPy keeps the second of two normal numbers for the next call; that is restored too."""
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    draws()
    path = cartpole().save(tmp_path / "latest.pt")
    expected = draws()
    draws()

    cartpole().load(path)

    assert draws() == expected


def test_a_watchdog_goes_on_counting(tmp_path: Path) -> None:
    trainer = pendulum(watchdog=True)
    assert trainer.watchdog is not None
    trainer.watchdog.rollbacks = 2
    path = trainer.save(tmp_path / "latest.pt")

    resumed = pendulum(watchdog=True)
    resumed.load(path)

    assert resumed.watchdog is not None
    assert resumed.watchdog.state_dict() == {"rollbacks": 2, "in_a_row": 0}


def test_the_best_is_not_overwritten_by_a_resumed_run_that_does_worse(tmp_path: Path) -> None:
    trainer = cartpole()
    checkpoints = Checkpoints(trainer, tmp_path, every=10**9)
    checkpoints.load_state_dict({"highest": 400.0, "returns": [400.0] * 100})
    checkpoints.save()

    resumed = cartpole()
    again = Checkpoints(resumed, tmp_path, every=10**9)
    resumed.load(checkpoints.latest)
    again._returns.extend([1.0] * 100)
    again.save()

    assert again.state_dict()["highest"] == 400.0
    assert not again.best.exists()


def test_a_checkpoint_is_written_after_everybody_was_told_of_the_update(tmp_path: Path) -> None:
    trainer = pendulum()
    Checkpoints(trainer, tmp_path, every=1)
    curriculum = Curriculum()
    trainer.checkpointables.join("curriculum", curriculum)
    trainer.hooks.on(UpdateEnd, lambda event: curriculum.load_state_dict({"lesson": event.update}))
    trainer.learn(128)

    state = torch.load(tmp_path / "latest.pt", weights_only=True)
    assert state["checkpointables"]["curriculum"] == {"lesson": trainer.updates}

    state["companions"] = state.pop("checkpointables")  # written by releases up to 0.2
    torch.save(state, tmp_path / "old.pt")
    curriculum.load_state_dict({"lesson": 0})
    trainer.load(tmp_path / "old.pt")
    assert curriculum.state_dict() == {"lesson": trainer.updates}


def test_a_run_that_goes_on_says_from_where(tmp_path: Path) -> None:
    trainer = pendulum()
    trainer.learn(128)
    path = trainer.save(tmp_path / "latest.pt")

    resumed = pendulum()
    emitted = EventLog().listen(resumed, RunStart)
    resumed.load(path)
    resumed.learn(200)

    (start,) = emitted.of(RunStart)
    assert (start.update, start.env_step, start.gradient_step) == (2, 128, 16)


@pytest.mark.parametrize("policy", ["mlp", "lstm"])
def test_new_episodes_are_not_those_the_run_began_with(policy: str, tmp_path: Path) -> None:
    """Open episodes do not continue either: their sums, memory and discounted returns begin at 0."""
    settings = PPOConfig(num_steps=16, num_minibatches=2, policy=policy, normalize_rewards=True)
    trainer = PPO(make_env("Pendulum-v1", num_envs=3), settings)
    trainer.learn(48 * 2)
    env: Any = trainer.env
    env._vector.envs[0].unwrapped.engine = object()
    path = trainer.save(tmp_path / "latest.pt")

    resumed = PPO(make_env("Pendulum-v1", num_envs=3), settings)
    first = resumed.collector.state_dict()["observations"].clone()
    resumed.learn(48)
    resumed.load(path)

    state = resumed.collector.state_dict()
    assert not torch.equal(state["observations"], first)
    assert state["fresh"].all()
    assert all(not memory.any() for memory in state["memories"].values())
    assert not state["episodes"]["returns"].any() and not state["episodes"]["lengths"].any()
    assert resumed.normalizers.rewards is not None and not resumed.normalizers.rewards.sums.any()
    assert resumed.env_steps == trainer.env_steps


def test_stop_before_learn_ends_it_after_one_update() -> None:
    """A signal during the preparation of a run."""
    trainer = pendulum()
    trainer.stop()
    trainer.learn(10**6)

    assert trainer.updates == 1
