"""Running statistics of observations and of the discounted return, on the device of the policy.

They are updated once per rollout, after it is collected. Stored and trained observations are thus the ones used for acting,
and the ratio of an update's first minibatch is 1.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from esper_telemetry.core.event_parts import Scale
from esper_telemetry.ppo.config import PPOConfig
from esper_telemetry.ppo.environments.environment_protocol import Array, ObservationLayout, Rows, Task, layout_of
from esper_telemetry.ppo.gradient_ranks import ALONE, Ranks
from esper_telemetry.ppo.rollout import Rollout, running_sums

EPSILON, LIMIT = 1e-8, 10.0  # as in Stable-Baselines3 and Gymnasium


class RunningMoments(nn.Module):
    """Mean and (population) variance of all rows so far, in float64; 0 and 1 before the first.

    Saved and loaded as buffers: `mean`, `variance` and `count`.
    """

    mean: Tensor
    variance: Tensor
    count: Tensor

    def __init__(self, shape: tuple[int, ...], ranks: Ranks = ALONE) -> None:
        super().__init__()
        self.ranks = ranks
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(shape, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    @torch.no_grad()
    def update(self, rows: Tensor) -> None:
        """Add rows [N, ...] of all ranks (Chan et al. 1979, parallel variance)."""
        if self.ranks.alone:
            count: Tensor | int = len(rows)
            variance, mean = torch.var_mean(rows.double(), 0, correction=0)
        else:
            count, mean, squares = self.ranks.moments(rows, self.mean)
            variance = squares / count
        total = self.count + count
        share, shift = count / total, mean - self.mean
        self.variance.lerp_(variance, share).add_(shift.square() * share * (1 - share))
        self.mean.add_(shift * share)
        self.count.copy_(total)

    def scale(self) -> Tensor:
        """Standard deviation, float32."""
        return (self.variance + EPSILON).sqrt().float()


class ObservationNormalizer(RunningMoments):
    """Observations minus their mean, divided by their standard deviation, clipped at ±10."""

    def forward(self, observations: Tensor) -> Tensor:
        """Normalised observations [..., *shape]."""
        return ((observations - self.mean.float()) / self.scale()).clamp(-LIMIT, LIMIT)

    def as_numpy(self) -> Callable[[Array], Array]:
        """Return the normalisation as a NumPy function, valid until the next update."""
        mean, scale = self.mean.float().cpu().numpy(), self.scale().cpu().numpy()

        def normalize(observations: Array) -> Array:
            rows: Array = np.asarray(observations, np.float32) - mean
            rows /= scale
            return np.clip(rows, -LIMIT, LIMIT, out=rows)

        return normalize

    def vectors(self, observations: Rows) -> Rows:
        """Return the part of stored observations that is normalised: all of them."""
        return observations


class VectorNormalizer(ObservationNormalizer):
    """Normaliser of the vectors among observations with several parts; one-hot choices and images are not changed."""

    def __init__(self, layout: ObservationLayout, ranks: Ranks = ALONE) -> None:
        super().__init__((layout.vectors,), ranks)
        self._layout = layout

    def update(self, rows: Tensor) -> None:
        """Add the vectors of observations [N, ...] of all ranks."""
        super().update(self.vectors(rows))

    def forward(self, observations: Tensor) -> Tensor:
        """Observations [..., *shape] with their vectors normalised."""
        rows = observations.clone()
        vectors = self.vectors(rows)
        vectors.copy_(super().forward(vectors))
        return rows

    def as_numpy(self) -> Callable[[Array], Array]:
        """Return the normalisation as a NumPy function, valid until the next update."""
        scaled = super().as_numpy()

        def normalize(observations: Array) -> Array:
            rows = np.array(observations, self._layout.dtype)
            vectors = self.vectors(rows)
            vectors[...] = scaled(vectors)
            return rows

        return normalize

    def vectors(self, observations: Rows) -> Rows:
        """Return the part of stored observations [..., *shape] that is normalised: a view of their vectors [..., vectors]."""
        return self._layout.numbers_of(observations)[..., : self._layout.vectors]


class RewardNormalizer(nn.Module):
    """Rewards divided by the standard deviation of the discounted return, clipped at ±10 (as in VecNormalize).

    The return is summed forwards, R_t = r_t + γ R_{t-1}, and restarts with every episode. Rewards are scaled with
    statistics that already include them; this is safe because the policy never acts on a reward.
    """

    sums: Tensor

    def __init__(self, num_envs: int, gamma: float, ranks: Ranks = ALONE) -> None:
        super().__init__()
        self.gamma = gamma
        self.moments = RunningMoments((), ranks)
        self.register_buffer("sums", torch.zeros(num_envs, dtype=torch.float64))

    @torch.no_grad()
    def forward(self, rewards: Tensor, ended: Tensor, valid: Tensor | None) -> Tensor:
        """Return scaled rewards [T, B] after adding them to the statistics; 0 in invalid rows."""
        goes_on = ~ended
        amounts = rewards.double()
        if valid is not None:
            goes_on &= valid
            amounts = torch.where(valid, amounts, 0.0)
        first = torch.ones_like(goes_on[:1])
        decay = self.gamma * torch.cat([first, goes_on[:-1]]).double()
        amounts[0] += decay[0] * self.sums
        sums = running_sums(amounts, decay)
        self.sums.copy_(sums[-1] * goes_on[-1])
        self.moments.update(sums.flatten() if valid is None else sums[valid])
        scaled = rewards / self.moments.scale()
        return scaled.clamp(-LIMIT, LIMIT) if valid is None else scaled.clamp(-LIMIT, LIMIT).where(valid, 0.0)


class Normalizers(nn.Module):
    """Normalisers of observations and rewards, each None if it is switched off; saved and loaded together."""

    def __init__(self, observations: ObservationNormalizer | None = None, rewards: RewardNormalizer | None = None) -> None:
        super().__init__()
        self.observations, self.rewards = observations, rewards

    def finish(self, rollout: Rollout, raw: Tensor) -> Rollout:
        """Return the rollout with its rewards scaled, and add its raw observations [T, B, ...] to the statistics for the next one.

        In evaluation mode nothing changes.
        """
        if not self.training:
            return rollout
        if self.observations:
            self.observations.update(raw.flatten(0, 1) if rollout.valid is None else raw[rollout.valid])
        if self.rewards is None:
            return rollout
        scaled = self.rewards(rollout.rewards, rollout.ended, rollout.valid)
        return replace(rollout, rewards=scaled, raw_rewards=rollout.rewards)

    def forget(self) -> None:
        """Drop the discounted returns of episodes that will not continue."""
        if self.rewards is not None:
            self.rewards.sums.zero_()

    def scales(self, rollout: Rollout) -> dict[str, Scale]:
        """Return the statistics after this rollout, and the data that were normalised in it."""
        scales = {}
        if self.observations is not None:
            vectors = self.observations.vectors(rollout.observations)
            scales["obs"] = Scale(self.observations.mean, self.observations.scale(), LIMIT, vectors)
        if self.rewards is not None:
            moments = self.rewards.moments
            scales["ret"] = Scale(moments.mean, moments.scale(), LIMIT, rollout.rewards)
        return scales

    def frozen(self) -> Normalizers:
        """Return copies whose statistics do not change; rewards are not scaled."""
        return Normalizers(copy.deepcopy(self.observations)).eval()


PLAIN = Normalizers()


def normalizers_for(env: Task, config: PPOConfig, ranks: Ranks = ALONE) -> Normalizers:
    """Return the normalisers that the settings ask for; only vectors among the observations are normalised."""
    layout, observations = layout_of(env), None
    if config.normalize_observations and layout.vectors:
        parts = layout.choices or layout.images
        observations = VectorNormalizer(layout, ranks) if parts else ObservationNormalizer(env.observation_shape, ranks)
    return Normalizers(observations, RewardNormalizer(env.num_envs, config.gamma, ranks) if config.normalize_rewards else None)
