"""Two processes: they take the same steps on the same data as one process, they agree, and if one dies, the other ends."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ppo_builders import EventLog, cartpole, equal, pendulum, random_rollout, weights
from torch import Tensor
from two_ranks import run_together

from esper_telemetry.events import EpisodeEnd, Rollback, UpdateEnd
from esper_telemetry.ppo import PPO
from esper_telemetry.ppo.checkpoint import read
from esper_telemetry.ppo.gradient_ranks import Ranks
from esper_telemetry.ppo.normalizer import RunningMoments
from esper_telemetry.ppo.rollout import Rollout


def shared_rollout() -> Rollout:
    """Return four environments of 32 steps, with observations for CartPole and log-probabilities close to a policy's."""
    rollout = random_rollout(32, 4, invalid=True)
    observations = torch.randn(32, 4, 4, generator=torch.Generator().manual_seed(1))
    return replace(rollout, observations=observations, log_probs=torch.full((32, 4), -0.69))


def columns(rollout: Rollout, chosen: slice) -> Rollout:
    """Select some of the environments."""
    changes: dict[str, Any] = {
        name: getattr(rollout, name)[:, chosen]
        for name in ("observations", "log_probs", "rewards", "values", "next_values", "ended", "terminated", "valid")
    }
    valid: Tensor = changes["valid"]
    actions = {name: action[:, chosen] for name, action in rollout.actions.items()}
    return replace(rollout, **changes, actions=actions, transitions=int(valid.sum()))


def after_update(rollout: Rollout, **settings: Any) -> tuple[list[Tensor], int]:
    """Return the weights after an update, and its number of passes."""
    trainer = cartpole(num_minibatches=1, num_epochs=6, learning_rate=0.01, max_grad_norm=0.1, **settings)
    passes = trainer._update(rollout)
    return weights(trainer), passes


def everything(rank: int) -> dict[str, Any]:
    """Run several checks in one pair of processes, which takes seconds to start."""
    half = columns(shared_rollout(), slice(0, 1) if rank == 0 else slice(1, 4))
    moments = RunningMoments((4,), Ranks.current())
    assert half.valid is not None
    for part in half.observations[half.valid].chunk(3):
        moments.update(part)
    return {
        "weights": after_update(half)[0],
        "passes": after_update(half, target_kl=1e-4)[1],
        "mean": moments.mean,
        "variance": moments.variance,
        "learned": learned(rank, cartpole),
        "rolled_back": rolled_back(rank),
        "remembered": learned(rank, lambda: pendulum(policy="lstm", num_minibatches=2, normalize_observations=True)),
    }


def rolled_back(rank: int) -> tuple[list[Tensor], list[tuple[int, int]]]:
    """Return weights and rollbacks of a run in which the second rank's loss is NaN in the second update."""
    trainer = cartpole(watchdog=True)
    usual = trainer.steps.policy_loss

    def loss(log_ratio: Tensor, advantages: Tensor, clip: float) -> Tensor:
        return usual(log_ratio, advantages, clip) * (torch.nan if rank == 1 and trainer.updates == 2 else 1.0)

    trainer.steps = replace(trainer.steps, policy_loss=loss)
    results: list[tuple[int, int]] = []
    trainer.hooks.on(Rollback, lambda event: results.append((event.update, event.rollbacks)))
    trainer.learn(1000)
    return weights(trainer), results


def learned(rank: int, make: Callable[[], PPO]) -> tuple[list[Tensor], int, int]:
    """Return weights, updates and steps of a run that the second rank stops after three updates."""
    trainer = make()

    def stop(event: UpdateEnd) -> None:
        if rank == 1 and event.update == 3:
            trainer.stop()

    trainer.hooks.on(UpdateEnd, stop)
    trainer.learn(10_000)
    return weights(trainer), trainer.updates, trainer.env_steps


@pytest.mark.system
def test_two_ranks_do_what_one_process_does(tmp_path: Path) -> None:
    first, second = run_together(everything, tmp_path)
    rollout = shared_rollout()
    assert rollout.valid is not None
    rows = rollout.observations[rollout.valid].double()

    for ours, theirs, alone in zip(first["weights"], second["weights"], after_update(rollout)[0], strict=True):
        assert torch.equal(ours, theirs) and torch.allclose(ours, alone, atol=1e-5)
    assert first["passes"] == second["passes"] == after_update(rollout, target_kl=1e-4)[1] < 6
    assert torch.allclose(first["mean"], rows.mean(0)) and torch.equal(first["mean"], second["mean"])
    assert torch.allclose(first["variance"], rows.var(0, correction=0))
    for name in ("learned", "remembered"):
        (ours, updates, steps), (theirs, others, same_steps) = first[name], second[name]
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        assert updates == others == 3 and steps == same_steps
    assert first["remembered"][2] == 3 * 2 * 64
    (ours, rollbacks), (theirs, others) = first["rolled_back"], second["rolled_back"]
    assert rollbacks == others == [(2, 1)]
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(ours, theirs, strict=True))


def remembering() -> PPO:
    return pendulum(policy="lstm", num_minibatches=2, normalize_observations=True, normalize_rewards=True)


def gone_on(rank: int, directory: str) -> dict[str, Any]:
    """Run eight updates, and again with a resume after the third; return the states of both, and the refusal of an unfit checkpoint."""
    path = Path(directory) / "latest.pt"
    whole = remembering()
    whole.hooks.on(UpdateEnd, lambda event: whole.save(path).touch() if event.update == 3 else None)
    whole.learn(1000)
    resumed = remembering()
    resumed.load(path)
    later = EventLog().listen(resumed, EpisodeEnd)
    resumed.learn(1000)
    alone = cartpole()
    alone.ranks = Ranks()
    misfit = Path(directory) / f"alone{rank}.pt"
    alone.save(misfit)
    return {
        "weights": [weights(trainer) for trainer in (whole, resumed)],
        "states": [own_state(trainer) for trainer in (whole, resumed)],
        "returns": [event.returns for event in later.of(EpisodeEnd)],
        "updates": (whole.updates, resumed.updates),
        "refusal": refusal(cartpole(), misfit),
    }


def own_state(trainer: PPO) -> list[Tensor]:
    """Return the state of this rank alone: open episodes, generators, discounted returns."""
    state = trainer.collector.state_dict()
    assert trainer.normalizers.rewards is not None
    return [state["observations"], state["generator"], *state["memories"].values(), trainer.normalizers.rewards.sums]


def refusal(trainer: PPO, path: Path) -> str:
    with pytest.raises(ValueError, match="saved by") as refused:
        trainer.load(path)
    return str(refused.value)


@pytest.mark.system
def test_ranks_go_on_from_one_file_each_with_its_own_episodes(tmp_path: Path) -> None:
    """Eight updates of 128 steps: each rank's state equals, bit for bit, the state without a break."""
    ranks = run_together(gone_on, tmp_path, str(tmp_path))

    for result in ranks:
        assert result["updates"] == (8, 8)
        assert equal(*result["weights"]) and equal(*result["states"])
    first, second = (result["states"][1] for result in ranks)
    assert not any(torch.equal(ours, theirs) for ours, theirs in zip(first, second, strict=True))
    assert ranks[0]["refusal"].endswith("alone0.pt was saved by 1 rank, here are 2")
    saved = read(tmp_path / "latest.pt")
    assert len(saved["others"]) == 1 and saved["counts"]["updates"] == 3
    assert refusal(remembering(), tmp_path / "latest.pt").endswith("latest.pt was saved by 2 ranks, here is 1")


def dying(rank: int) -> str:
    trainer = cartpole()

    def die(event: UpdateEnd) -> None:
        if rank == 1 and event.update == 2:
            os._exit(1)

    trainer.hooks.on(UpdateEnd, die)
    try:
        trainer.learn(10_000)
    except RuntimeError as error:
        return str(error)
    return "learned on"


def test_a_dead_rank_ends_the_other_with_an_error(tmp_path: Path) -> None:
    survivor, dead = run_together(dying, tmp_path)

    assert dead is None and survivor != "learned on" and survivor


def test_alone_nothing_is_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", None)

    cartpole(normalize_observations=True, target_kl=0.01).learn(300)

    assert Ranks.current() == Ranks(1, 0) and Ranks.current().seed(7) == 7
