"""Rollouts on the device equal rollouts on the host, and episodes are counted once per rollout."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from esper_telemetry.ppo import PPOConfig
from esper_telemetry.ppo.collectors.base import EpisodeTotals
from esper_telemetry.ppo.collectors.collector import Collector, TensorCollector
from esper_telemetry.ppo.environments.cue_recall import CueRecall
from esper_telemetry.ppo.environments.environment_protocol import ActionSpec, TensorStep
from esper_telemetry.ppo.environments.wrappers import on_host
from esper_telemetry.ppo.normalizer import normalizers_for
from esper_telemetry.ppo.trainer import build_policy

COLUMNS = ("observations", "log_probs", "rewards", "values", "next_values", "ended", "terminated")


class Walk:
    """Four random walks with a forbidden direction and an amount. They are cut every 7 steps and end at positive positions."""

    name, num_envs, observation_shape, device = "Walk", 4, (2,), torch.device("cpu")

    def __init__(self) -> None:
        self.action_specs = {
            "direction": ActionSpec("categorical", 3),
            "amount": ActionSpec("continuous", 2, given="direction", relevant_for=(1, 2)),
        }

    def reset(self, seed: int | None = None) -> Tensor:
        self.generator = torch.Generator().manual_seed(0)
        self.count = torch.arange(4)
        self.state = torch.randn(4, 2, generator=self.generator)
        return self.state

    def action_masks(self) -> dict[str, Tensor]:
        masks = torch.ones(4, 3, dtype=torch.bool)
        masks[torch.arange(4), self.count % 3] = False
        return {"direction": masks}

    def step(self, actions: Any) -> TensorStep:
        self.count = self.count + 1
        final = self.state + 0.1 * actions["amount"] + torch.randn(4, 2, generator=self.generator)
        terminated, truncated = final[:, 0] > 2, self.count % 7 == 0
        ended = (terminated | truncated).unsqueeze(-1)
        self.state = torch.where(ended, torch.randn(4, 2, generator=self.generator), final)
        return TensorStep(self.state, final[:, 1], terminated, truncated, final)

    def close(self) -> None:
        """Nothing to free."""


@pytest.mark.parametrize("make", [lambda: CueRecall(4, seed=1), Walk])
@pytest.mark.parametrize("policy", ["mlp", "lstm", "gru"])
@pytest.mark.parametrize("shared_trunk", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
def test_both_collectors_find_the_same(make: Any, policy: str, shared_trunk: bool, normalize: bool) -> None:
    config = PPOConfig(
        num_steps=24, policy=policy, shared_trunk=shared_trunk, hidden_sizes=(8,), lstm_size=8, gamma=0.9,
        normalize_observations=normalize, normalize_rewards=normalize
    )  # fmt: skip
    net = build_policy(make(), config)
    first = Collector(on_host(make()), net, 24, 0, normalizers_for(make(), config))
    second = TensorCollector(make(), net, 24, 0, normalizers_for(make(), config))
    for _ in range(3):
        host, device = first.collect(), second.collect()
        for name in COLUMNS:
            assert torch.allclose(getattr(host, name).float(), getattr(device, name).float(), atol=1e-5), name
        for kind in ("actions", "action_masks", "relevance", "head_log_probs"):
            left, right = getattr(host, kind), getattr(device, kind)
            assert left.keys() == right.keys()
            assert all(torch.allclose(left[name].float(), right[name].float(), atol=1e-5) for name in left)
        assert first.episodes.returns == pytest.approx(second.episodes.returns, abs=1e-4)
        assert (host.recurrence is None) == (device.recurrence is None) == (policy == "mlp")
        if host.recurrence and device.recurrence:
            assert np.array_equal(host.recurrence.fresh, device.recurrence.fresh)
            for name, state in host.recurrence.states.items():
                assert torch.allclose(state, device.recurrence.states[name], atol=1e-5)
            assert torch.allclose(host.recurrence.before(), device.recurrence.before(), atol=1e-5)


def test_episodes_are_counted_over_rollouts_and_in_order() -> None:
    """Environment 0 ends at t = 1 and t = 2, environment 1 at t = 0. In the next rollout both end at t = 0."""
    counter = EpisodeTotals(2)
    rewards = np.array([[1, 10], [2, 20], [4, 40]], np.float32)

    counter.count(rewards, np.array([[0, 1], [1, 0], [1, 0]], bool), None)
    assert (counter.returns, counter.lengths) == ([10, 3, 4], [1, 2, 1])

    counter.count(rewards[:1], np.ones((1, 2), bool), None)
    assert (counter.returns, counter.lengths) == ([1, 70], [1, 3])

    counter.count(rewards, np.zeros((3, 2), bool), None)
    assert (counter.returns, counter.lengths) == ([], [])


def test_invalid_rows_count_for_nothing() -> None:
    """The episode's second row is a reset, so two of three rows count."""
    counter = EpisodeTotals(1)

    counter.count(np.array([[1], [9], [1]], np.float32), np.array([[0], [0], [1]], bool), np.array([[1], [0], [1]], bool))

    assert (counter.returns, counter.lengths) == ([2], [2])
