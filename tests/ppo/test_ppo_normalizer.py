"""Running statistics: their values, and their use in acting and training."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ppo_builders import pendulum

from esper_telemetry.events import MinibatchEnd, RolloutEnd
from esper_telemetry.ppo.normalizer import ObservationNormalizer, RewardNormalizer, RunningMoments


@given(parts=st.lists(st.integers(1, 20), min_size=1, max_size=6), offset=st.sampled_from([0.0, 1e4]))
def test_moments_of_parts_are_those_of_the_whole(parts: list[int], offset: float) -> None:
    rows = torch.randn(sum(parts), 3, generator=torch.Generator().manual_seed(0)) + offset
    moments = RunningMoments((3,))

    for part in rows.split(parts):
        moments.update(part)

    assert torch.allclose(moments.mean, rows.double().mean(0))
    assert torch.allclose(moments.variance, rows.double().var(0, correction=0), rtol=1e-6, atol=1e-9)
    assert moments.count == len(rows)


def test_observations_are_normalised_alike_on_host_and_device() -> None:
    normalizer = ObservationNormalizer((3,))
    rows = torch.randn(50, 3) * 7 + 2
    normalizer.update(rows)

    assert np.allclose(normalizer.as_numpy()(rows.numpy()), normalizer(rows).numpy(), atol=1e-6)
    assert torch.allclose(normalizer(rows).std(0, correction=0), torch.ones(3), atol=1e-4)
    assert normalizer(torch.full((3,), 1e6)).tolist() == [10.0] * 3


def test_rewards_are_divided_by_the_deviation_of_the_discounted_return() -> None:
    """γ = 0.5, rewards 1, 1, 1, an end after the second: sums 1, 1.5, 1. In the next rollout: 1 + 0.5 · 1 = 1.5."""
    normalizer = RewardNormalizer(1, 0.5)
    ones, ended = torch.ones(3, 1), torch.tensor([[False], [True], [False]])

    scaled = normalizer(ones, ended, None)
    deviation = np.std([1, 1.5, 1])
    assert scaled.flatten().tolist() == pytest.approx([1 / deviation] * 3, rel=1e-5)

    normalizer(ones[:1], ended[:1], None)
    assert normalizer.sums.item() == 1.5 and normalizer.moments.count == 4


def test_invalid_rewards_count_for_nothing_even_nan() -> None:
    """The second row is a reset."""
    rewards = torch.tensor([[1.0], [torch.nan], [3.0]])
    ended, valid = torch.tensor([[True], [False], [False]]), torch.tensor([[True], [False], [True]])
    normalizer = RewardNormalizer(1, 0.5)

    scaled = normalizer(rewards, ended, valid)

    assert normalizer.moments.mean == 2 and normalizer.sums.item() == 3
    assert scaled.flatten().tolist() == pytest.approx([1, 0, 3], rel=1e-5)


def test_statistics_hold_every_transition_and_change_between_rollouts_only() -> None:
    trainer = pendulum(normalize_observations=True, normalize_rewards=True)
    counts: list[tuple[float, float]] = []
    normalizers = trainer.normalizers
    assert normalizers.observations is not None and normalizers.rewards is not None
    moments = (normalizers.observations, normalizers.rewards.moments)
    for event in (RolloutEnd, MinibatchEnd):
        trainer.hooks.on(event, lambda _: counts.append((moments[0].count.item(), moments[1].count.item())))

    trainer.learn(128)

    assert counts == [(64, 64)] * 9 + [(128, 128)] * 9


def test_a_limit_is_bootstrapped_from_the_normalised_last_observation() -> None:
    trainer = pendulum(normalize_observations=True, num_steps=200)
    collector: Any = trainer.collector
    collector.collect()
    normalize = trainer.normalizers.observations
    assert normalize is not None
    frozen = ObservationNormalizer((3,))
    frozen.load_state_dict(normalize.state_dict())

    rollout = collector.collect()

    raw = torch.from_numpy(collector._raw)
    assert torch.allclose(rollout.observations, frozen(raw[:-1]), atol=1e-6)
    with torch.no_grad():
        last = torch.from_numpy(collector._limited[0].observations)
        expected = trainer.policy.values(trainer.policy.trunks(last)[-1])
    assert torch.allclose(rollout.next_values[199], expected, atol=1e-5)
    assert last.abs().max() < 10
