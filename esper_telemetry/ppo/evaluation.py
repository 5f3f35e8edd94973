"""Evaluation: whole episodes with the likeliest actions, in environments of their own, without a trace in training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from esper_telemetry.ppo.collectors.factory import collector_for
from esper_telemetry.ppo.environments.protocol import Environment
from esper_telemetry.ppo.normalizer import Normalizers
from esper_telemetry.ppo.policy import ActorCritic

CHUNK = 128
"""Steps between looks at which episodes are over."""


class Evaluation(NamedTuple):
    """The first episode of each environment.

    Attributes:
        returns: undiscounted sums of raw rewards; of an episode that did not end in time, up to there.
        lengths: steps.
    """

    returns: Sequence[float]
    lengths: Sequence[int]


def evaluate(
    policy: ActorCritic, env: Environment, normalizers: Normalizers, *, seed: int = 0, max_steps: int = 10_000
) -> Evaluation:
    """One episode in each environment, with the likeliest choice or the mean of every head.

    Args:
        policy: acts; its memory begins empty.
        env: where; as many episodes as it has environments, so that short ones are not preferred.
        normalizers: as they are; they learn nothing here.
        seed: of the episodes, unless the environment has its own.
        max_steps: when to give up on episodes that do not end.
    """
    collector = collector_for(env, policy, normalizers.frozen(), num_steps=CHUNK, seed=seed, greedy=True)
    returns, lengths = torch.zeros(env.num_envs, dtype=torch.float64), torch.zeros(env.num_envs, dtype=torch.int64)
    unfinished = torch.ones(env.num_envs, dtype=torch.bool)
    for _ in range(0, max_steps, CHUNK):
        rollout = collector.collect()
        ended, in_first = rollout.ended.cpu(), first_episode(rollout.ended.cpu(), unfinished)
        if rollout.valid is not None:
            in_first &= rollout.valid.cpu()
        returns += torch.where(in_first, rollout.rewards.cpu().double(), 0.0).sum(0)
        lengths += in_first.sum(0)
        unfinished &= ~ended.any(0)
        if not unfinished.any():
            break
    return Evaluation(returns.tolist(), lengths.tolist())


def first_episode(ended: Tensor, unfinished: Tensor) -> Tensor:
    """Flags [T, B] of the steps that belong to the first episode of environments that are still in it [B]."""
    before = ended.int().cumsum(0) - ended.int()
    return (before == 0) & unfinished
