"""Checkpoints: training continues bit for bit. A file is complete, runs no code, and is refused if it does not fit the run."""

from pathlib import Path
from typing import Any

import pytest
import torch
from ppo_builders import EventLog, cartpole, equal, pendulum, weights

from esper_telemetry.events import EpisodeEnd, UpdateEnd
from esper_telemetry.ppo import PPO, PPOConfig
from esper_telemetry.ppo.checkpoint import Checkpoints, read
from esper_telemetry.ppo.collectors.collector import TensorCollector
from esper_telemetry.ppo.environments.cue_recall import CueRecall
from esper_telemetry.ppo.environments.environment_registry import make_env

SMALL: dict[str, Any] = {"num_steps": 16, "num_minibatches": 2, "hidden_sizes": (8,), "lstm_size": 8}
SCALED: dict[str, Any] = {"normalize_observations": True, "normalize_rewards": True}


def acrobot(**changes: Any) -> PPO:
    return PPO(make_env("Acrobot-v1", num_envs=3, seed=0), PPOConfig(**{**SMALL, **changes}))


def hidden(**changes: Any) -> PPO:
    return PPO(make_env("CartPole-v1", num_envs=3, seed=0, mask_velocity=True), PPOConfig(**{**SMALL, **changes}))


def parts(**changes: Any) -> PPO:
    return PPO(make_env("seeing_env:SpotlightParts-v0", num_envs=3, seed=0), PPOConfig(**{**SMALL, **changes}))


def recall(**changes: Any) -> PPO:
    return PPO(CueRecall(4, seed=0), PPOConfig(**{**SMALL, **changes}))


def recall_in_tensors(**changes: Any) -> PPO:
    trainer = recall(**changes)
    trainer.collector = TensorCollector(CueRecall(4, seed=0), trainer.policy, 16, 0, trainer.normalizers)
    return trainer


@pytest.mark.system
@pytest.mark.parametrize("make", [cartpole, pendulum, acrobot, hidden, parts, recall, recall_in_tensors])
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
