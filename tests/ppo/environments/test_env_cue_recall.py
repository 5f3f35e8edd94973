"""CueRecall: rewards worked by hand, and three policies that show whether memory works and stays in its episode."""

import pytest
import torch
from torch import Tensor

from esper_telemetry.ppo.environments.cue_recall import CueRecall
from esper_telemetry.ppo.environments.environment_protocol import ActionSpec, TensorEnvironment
from esper_telemetry.ppo.environments.environment_registry import make_env


def act(op: Tensor, arg: Tensor) -> dict[str, Tensor]:
    return {"op": op, "arg": arg}


def mean_return(env: CueRecall, *, remembers: bool, episodes: int = 40) -> float:
    """Return the mean return of whole episodes for a policy that plays the cue, or always op 1, with the right argument."""
    observations = env.reset(0)
    cues = torch.zeros(env.num_envs, dtype=torch.int64)
    total, count, running = 0.0, 0, torch.full((env.num_envs,), torch.nan)
    for _ in range(10 * episodes):
        at_start = env._time == 0
        running = torch.where(at_start, 0.0, running)
        cues = torch.where(at_start, observations[:, :4].argmax(-1), cues)
        op = cues if remembers else torch.ones_like(cues)
        step = env.step(act(op, env._time % 3))
        running, observations = running + step.rewards, step.observations
        whole = step.terminated & running.isfinite()
        total, count = total + float(running[whole].sum()), count + int(whole.sum())
    return total / count


def test_the_cue_is_seen_at_the_first_step_only() -> None:
    env = CueRecall(64, seed=0)
    observations = env.reset()

    for _ in range(25):
        cue_bits = observations[:, :4].sum(-1)
        assert torch.equal(cue_bits == 1, env._time == 0) and torch.equal(observations[:, 6], env._time / 10)
        observations = env.step(act(torch.zeros(64), torch.zeros(64))).observations


def test_episodes_have_ten_steps_and_begin_at_different_phases() -> None:
    env = CueRecall(64, seed=0)
    env.reset()

    ends = torch.stack([env.step(act(torch.zeros(64), torch.zeros(64))).terminated for _ in range(30)])

    assert (ends.sum(0) == 3).all()
    assert torch.equal(ends[:10], ends[10:20]) and len(ends[:10].int().argmax(0).unique()) == 10


def test_rewards_of_one_episode() -> None:
    """Cue 2. t = 0: recall does not count yet; 0.3 for arg 0. t = 1: 1 + 0.3. t = 2: op 0 earns nothing. t = 3: arg is wrong: 1."""
    env = CueRecall(1, seed=0)
    env.reset()
    env._time, env._cue = torch.tensor([0]), torch.tensor([2])

    steps = [(2, 0), (2, 1), (0, 0), (2, 1)]
    rewards = [float(env.step(act(torch.tensor([op]), torch.tensor([arg]))).rewards) for op, arg in steps]

    assert rewards == pytest.approx([0.3, 1.3, 0.0, 1.0])


def test_memory_is_worth_it_and_a_stale_cue_leaves_it_at_chance() -> None:
    """With memory: 9 + 3 x 0.3 x 10 / 4 = 11.25. Always op 1: 9 / 4 + 3 = 5.25. A stale cue: 9 / 4 + 3 x 3 / 4 = 4.5."""
    assert mean_return(CueRecall(64), remembers=True) == pytest.approx(11.25, abs=0.1)
    assert mean_return(CueRecall(64), remembers=False) == pytest.approx(5.25, abs=0.3)
    assert mean_return(CueRecall(64, stale_cue=True), remembers=True) == pytest.approx(4.5, abs=0.3)


def test_the_argument_matters_unless_the_operation_is_zero() -> None:
    env = make_env("cue-recall", num_envs=3)

    assert isinstance(env, TensorEnvironment) and env.num_envs == 3
    assert env.action_specs["arg"] == ActionSpec("categorical", 3, given="op", relevant_for=(1, 2, 3))


def test_a_seed_makes_episodes_repeatable() -> None:
    assert torch.equal(CueRecall(5, seed=3).reset(), CueRecall(5).reset(3))
    assert not torch.equal(CueRecall(5).reset(3), CueRecall(5).reset(4))
