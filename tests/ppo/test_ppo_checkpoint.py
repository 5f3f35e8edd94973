"""Checkpoints: training continues bit for bit. A file is complete, runs no code, and is refused if it does not fit the run."""

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ppo_builders import EventLog, cartpole, equal, pendulum, weights

from esper_telemetry.events import EpisodeEnd, RunStart, UpdateEnd
from esper_telemetry.ppo import PPO, Checkpoints, PPOConfig
from esper_telemetry.ppo.checkpoint import Checkpointables, read
from esper_telemetry.ppo.collectors.collector import TensorCollector
from esper_telemetry.ppo.environments.cue_recall import CueRecall
from esper_telemetry.ppo.environments.environment_registry import make_env

SMALL: dict[str, Any] = {"num_steps": 16, "num_minibatches": 2, "hidden_sizes": (8,), "lstm_size": 8}
SCALED: dict[str, Any] = {"normalize_observations": True, "normalize_rewards": True}


def small(env_id: str, *, mask_velocity: bool = False, **changes: Any) -> PPO:
    env = make_env(env_id, num_envs=3, seed=0, mask_velocity=mask_velocity)
    return PPO(env, PPOConfig(**{**SMALL, **changes}))


def recall_in_tensors(**changes: Any) -> PPO:
    trainer = small("cue-recall", **changes)
    trainer.collector = TensorCollector(CueRecall(3, seed=0), trainer.policy, 16, 0, trainer.normalizers)
    return trainer


MAKERS: dict[str, Callable[..., PPO]] = {
    "cartpole": cartpole,
    "pendulum": pendulum,
    "acrobot": partial(small, "Acrobot-v1"),
    "hidden": partial(small, "CartPole-v1", mask_velocity=True),
    "parts": partial(small, "seeing_env:SpotlightParts-v0"),
    "recall": partial(small, "cue-recall"),
    "recall in tensors": recall_in_tensors,
}


@pytest.mark.system
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("settings", [{}, {"policy": "lstm", "num_minibatches": 2, **SCALED}])
def test_a_resumed_run_is_bit_identical(make: Any, settings: dict[str, Any], tmp_path: Path) -> None:
    """Saved after the third update; both runs continue to the same end."""
    whole = make(**settings)
    emitted = EventLog().listen(whole, EpisodeEnd, UpdateEnd)
    whole.hooks.on(UpdateEnd, lambda event: event.update == 3 and whole.save(tmp_path / "latest.pt"))
    whole.learn(600)

    resumed = make(**settings)
    later = EventLog().listen(resumed, EpisodeEnd, UpdateEnd)
    resumed.load(tmp_path / "latest.pt")
    resumed.learn(600)

    assert equal(weights(whole), weights(resumed))
    assert later.of(UpdateEnd)[0].update == 4
    assert [event.env_step for event in later.of(UpdateEnd)] == [event.env_step for event in emitted.of(UpdateEnd)][3:]
    returns = [event.returns for event in emitted.of(EpisodeEnd)]
    assert returns[len(returns) - len(later.of(EpisodeEnd)) :] == [event.returns for event in later.of(EpisodeEnd)]


def test_a_file_runs_no_code_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    trainer = cartpole(**SCALED)
    trainer.learn(200)

    path = trainer.save(tmp_path / "checkpoints" / "latest.pt")

    assert [file.name for file in path.parent.iterdir()] == ["latest.pt"]
    assert torch.load(path, weights_only=True)["counts"]["updates"] == trainer.updates


def test_a_broken_save_leaves_the_file_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = cartpole()
    path = trainer.save(tmp_path / "latest.pt")
    before = path.read_bytes()

    def full(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="no space left"):
        trainer.save(path)

    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (lambda: pendulum(), "its env is CartPole-v1, here it is Pendulum-v1"),
        (lambda: cartpole(hidden_sizes=(16, 8)), r"policy actor.layers.1.bias has \(16,\), here it is \(8,\)"),
        (lambda: cartpole(policy="lstm"), "policy actor.core.cells.0.bias_hh_l0 has nothing, here it is"),
        (lambda: cartpole(normalize_observations=True), "normalizers observations.count has nothing"),
    ],
)
def test_a_file_that_does_not_fit_says_which_part_differs(other: Any, sentence: str, tmp_path: Path) -> None:
    path = cartpole().save(tmp_path / "latest.pt")
    trainer = other()
    before = weights(trainer)

    with pytest.raises(ValueError, match=sentence):
        trainer.load(path)

    assert equal(weights(trainer), before)


def test_another_file_is_refused(tmp_path: Path) -> None:
    torch.save({"weights": torch.ones(1)}, tmp_path / "other.pt")

    with pytest.raises(ValueError, match=r"other\.pt is not a checkpoint of format 1"):
        cartpole().load(tmp_path / "other.pt")


def test_the_best_is_that_of_the_highest_mean_return(tmp_path: Path) -> None:
    """Mean returns of 1, 3, then 2: the best checkpoint stays at 3."""
    trainer = cartpole()
    checkpoints = Checkpoints(trainer, tmp_path, every=10**9)
    updates = []
    for level in (1.0, 3.0, 2.0):
        trainer.updates += 1
        trainer.hooks.emit(EpisodeEnd(0, [level] * 100, [1] * 100))
        checkpoints.save()
        updates.append([read(path)["counts"]["updates"] for path in (checkpoints.latest, checkpoints.best)])

    assert updates == [[1, 1], [2, 2], [3, 2]]


def test_checkpoints_come_every_so_many_steps(tmp_path: Path) -> None:
    trainer = pendulum()
    checkpoints = Checkpoints(trainer, tmp_path, every=128)
    counts: list[int] = []

    def look(_: UpdateEnd) -> None:
        counts.append(read(checkpoints.latest)["counts"]["env_steps"] if checkpoints.latest.exists() else 0)

    trainer.hooks.on(UpdateEnd, look, last=True)
    trainer.learn(320)

    assert counts == [0, 128, 128, 256, 256]


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
