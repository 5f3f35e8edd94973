"""PPO scores above the heuristic, and the heuristic above random actions. A resumed run equals an uninterrupted one."""

import statistics
from pathlib import Path

import pytest
import torch
from growing import tiny

from esper_telemetry import PPO, PPOConfig
from esper_telemetry.events import EpisodeEnd
from esper_telemetry.lab.morphogenesis.controllers import SCRIPTS, ScriptedRun
from esper_telemetry.lab.morphogenesis.environment import Morphogenesis
from esper_telemetry.lab.morphogenesis.growth_telemetry import GrowthStep
from esper_telemetry.ppo.config import preset

UPDATES, LAST_EPISODES = 25, 4
"""Updates of a run, each an episode of 16 environments, and the number of last episodes to score."""


def learned(task: str, seed: int) -> float:
    """Return the mean final score of the last episodes of a PPO run."""
    tuned, scores = preset("morphogenesis", "lstm"), list[float]()
    trainer = PPO(Morphogenesis(tuned.num_envs, task=task), tuned.config(seed=seed))

    def keep(event: GrowthStep) -> None:
        if event.last:
            scores.append(float(event.hosts["score"].mean()))

    trainer.hooks.on(GrowthStep, keep)
    trainer.learn(UPDATES * 32 * tuned.num_envs)
    return statistics.mean(scores[-LAST_EPISODES:])


def scripted(task: str, policy: str, seed: int) -> float:
    """Return the same mean for a policy that does not learn."""
    env, choose, scores = Morphogenesis(16, task=task, seed=seed), SCRIPTS[policy](seed), list[float]()
    for _ in range(LAST_EPISODES * env.horizon):
        if env.step(choose(env)).terminated.any():
            scores.append(float(env.score.mean()))
    return statistics.mean(scores)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["synthetic", "digits"])
def test_ppo_beats_the_heuristic_which_beats_chance(task: str) -> None:
    """Medians over five seeds. `benchmarks/controllers.py` shows the uninterrupted curve."""
    torch.set_num_threads(1)
    seeds = range(1, 6)
    ppo = statistics.median(learned(task, seed) for seed in seeds)
    heuristic, chance = (statistics.median(scripted(task, policy, seed) for seed in seeds) for policy in ("heuristic", "random"))
    print(f"{task}: PPO {ppo:.3f}, heuristic {heuristic:.3f}, random {chance:.3f}")

    assert ppo > heuristic > chance


@pytest.mark.system
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    """Three uninterrupted updates, compared with two, a checkpoint in the middle of an episode, and one more."""
    config = PPOConfig(
        policy="lstm", num_steps=12, num_epochs=1, num_minibatches=2, lstm_size=8, hidden_sizes=(8,), anneal_learning_rate=False
    )
    uninterrupted, first, second = (PPO(tiny(4), config) for _ in range(3))
    steps = 12 * 4

    uninterrupted.learn(3 * steps)
    first.learn(2 * steps)
    second.load(first.save(tmp_path / "a.pt"))
    second.learn(3 * steps)

    pairs = zip(uninterrupted.policy.parameters(), second.policy.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert isinstance(uninterrupted.env, Morphogenesis) and isinstance(second.env, Morphogenesis)
    assert torch.equal(uninterrupted.env.colony.hosts, second.env.colony.hosts)
    assert torch.equal(uninterrupted.env.colony.seeds, second.env.colony.seeds)


@pytest.mark.system
@pytest.mark.parametrize("policy", SCRIPTS)
def test_a_resumed_script_equals_an_uninterrupted_one(policy: str, tmp_path: Path) -> None:
    """Six uninterrupted updates, compared with three, a checkpoint in the middle of an episode, and three more."""
    uninterrupted, first, second = (ScriptedRun(tiny(4), PPOConfig(policy=policy, num_steps=12)) for _ in range(3))
    returns, resumed_returns = list[float](), list[float]()
    uninterrupted.hooks.on(EpisodeEnd, lambda event: returns.extend(event.returns))
    second.hooks.on(EpisodeEnd, lambda event: resumed_returns.extend(event.returns))

    uninterrupted.learn(6 * 48)
    first.learn(3 * 48)
    second.load(first.save(tmp_path / "a.pt"))
    second.learn(6 * 48)

    assert second.updates == 6 and torch.equal(uninterrupted.env.colony.hosts, second.env.colony.hosts)
    assert torch.equal(uninterrupted.env.colony.seeds, second.env.colony.seeds)
    assert len(resumed_returns) == 4 and resumed_returns == returns[-4:]


def test_a_checkpoint_of_another_script_does_not_fit(tmp_path: Path) -> None:
    path = ScriptedRun(tiny(2), PPOConfig(policy="oracle", num_steps=2)).save(tmp_path / "a.pt")

    with pytest.raises(ValueError, match="does not fit: its policy is oracle, here it is random"):
        ScriptedRun(tiny(2), PPOConfig(policy="random", num_steps=2)).load(path)
