"""CueRecall: rewards worked by hand."""

import pytest
import torch
from torch import Tensor

from esper_telemetry.ppo.environments.cue_recall import CueRecall
from esper_telemetry.ppo.environments.environment_protocol import ActionSpec, TensorEnvironment
from esper_telemetry.ppo.environments.environment_registry import make_env


def act(op: Tensor, arg: Tensor) -> dict[str, Tensor]:
    return {"op": op, "arg": arg}


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


@pytest.mark.parametrize(("stale_cue", "expected"), [(False, [0.3, 1.3, 0.0, 0.0, 1.0]), (True, [0.3, 0.3, 0.0, 1.0, 0.0])])
def test_rewards_of_one_episode(stale_cue: bool, expected: list[float]) -> None:
    """Cue 2, after a cue of 3. t = 0: recall does not count yet; 0.3 for arg 0. t = 1: 0.3 for arg 1. t = 2: op 0 earns nothing.

    t = 3 and 4: arg is wrong.
    """
    env = CueRecall(1, seed=0, stale_cue=stale_cue)
    env.reset()
    env._time, env._cue, env._previous = torch.tensor([0]), torch.tensor([2]), torch.tensor([3])

    steps = [(2, 0), (2, 1), (0, 0), (3, 1), (2, 0), *[(0, 0)] * 5]
    rewards = [float(env.step(act(torch.tensor([op]), torch.tensor([arg]))).rewards) for op, arg in steps]

    assert rewards == pytest.approx([*expected, 0, 0, 0, 0, 0])
    assert env._time.tolist() == [0] and env._previous.tolist() == [2]


def test_the_argument_matters_unless_the_operation_is_zero() -> None:
    env = make_env("cue-recall", num_envs=3)

    assert isinstance(env, TensorEnvironment) and env.num_envs == 3
    assert env.action_specs["arg"] == ActionSpec("categorical", 3, given="op", relevant_for=(1, 2, 3))


def test_a_seed_makes_episodes_repeatable() -> None:
    assert torch.equal(CueRecall(5, seed=3).reset(), CueRecall(5).reset(3))
    assert not torch.equal(CueRecall(5).reset(3), CueRecall(5).reset(4))
