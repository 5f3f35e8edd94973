"""Faults of what an update is fed: rewards, advantages, targets, observations, masks, states.

Faults at the boundary of the environments: what they give is altered before the trainer sees it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from esper_telemetry.lab.faults import fault as changes
from esper_telemetry.lab.faults import fault as needs
from esper_telemetry.lab.faults.fault import Fault, Undo
from esper_telemetry.ppo.environments.protocol import Array, Step
from esper_telemetry.ppo.normalizer import ObservationNormalizer
from esper_telemetry.ppo.rollout import Rollout
from esper_telemetry.ppo.trainer import PPO


def scaled_rewards(trainer: PPO, dose: float) -> Undo:
    """Multiplies the rewards that are learned from, behind any normaliser."""
    return changes.steps(trainer, rewards=lambda rewards: rewards * dose)


def one_nan(trainer: PPO, dose: float) -> Undo:
    """Makes one reward NaN, once."""
    left = [1]

    def rewards(given: Tensor) -> Tensor:
        if not left:
            return given
        left.clear()
        broken = given.clone()
        broken[len(broken) // 2, 0] = torch.nan
        return broken

    return changes.steps(trainer, rewards=rewards)


def huge_advantages(trainer: PPO, dose: float) -> Undo:
    """Multiplies advantages in the place of normalising them."""
    return changes.steps(trainer, normalize=lambda advantages: advantages * dose)


def flipped_advantages(trainer: PPO, dose: float) -> Undo:
    """Flips the sign of advantages; returns stay right."""
    right = trainer.steps.advantages

    def advantages(rollout: Rollout, gamma: float, gae_lambda: float) -> Tensor:
        return -right(rollout, gamma, gae_lambda)

    return changes.steps(trainer, advantages=advantages, returns=lambda wrong, values: values - wrong)


def stale_advantages(trainer: PPO, dose: float) -> Undo:
    """Uses the advantages of the rollout before, in the first update those of the environment beside; returns stay right."""
    right = trainer.steps.advantages
    computed: list[Tensor] = []

    def advantages(rollout: Rollout, gamma: float, gae_lambda: float) -> Tensor:
        computed.append(right(rollout, gamma, gae_lambda))
        if len(computed) == 1:
            return computed[0].roll(1, 1 if computed[0].shape[1] > 1 else 0)
        return computed[-2]

    def returns(stale: Tensor, values: Tensor) -> Tensor:
        del computed[:-1]
        return computed[-1] + values

    return changes.steps(trainer, advantages=advantages, returns=returns)


def shuffled_returns(trainer: PPO, dose: float) -> Undo:
    """Permutes the critic's targets."""
    right, generator = trainer.steps.returns, torch.Generator().manual_seed(0)

    def returns(advantages: Tensor, values: Tensor) -> Tensor:
        found = right(advantages, values)
        order = torch.randperm(found.numel(), generator=generator).to(found.device)
        return found.flatten()[order].view_as(found)

    return changes.steps(trainer, returns=returns)


def other_observations(trainer: PPO, dose: float) -> Undo:
    """Trains on `dose` x + 1 of what was acted on."""
    return changes.steps(trainer, observations=lambda observations: dose * observations + 1)


def no_masks(trainer: PPO, dose: float) -> Undo:
    """Trains without the restrictions of actions under which they were chosen."""

    def dropped(columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {}

    return changes.steps(trainer, action_masks=dropped, relevance=dropped)


def zero_state(trainer: PPO, dose: float) -> Undo:
    """Begins training in states of zeros instead of the stored ones."""

    def zeros(states: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: torch.zeros_like(state) for name, state in states.items()}

    return changes.steps(trainer, initial_state=zeros)


def no_reset(trainer: PPO, dose: float) -> Undo:
    """Never resets memory, in acting and in training."""
    return changes.steps(trainer, resets=lambda ended: ended & False)


GAE_IDENTITY, RATIO_INIT = "integrity/gae_identity", "integrity/ratio_init"

DATA = (
    Fault(
        "reward_1e4",
        "Rewards that are learned from are 10,000 times as large, behind any normaliser.",
        scaled_rewards,
        ("value/scale_shift", "grad/explode"),
        bound=1,
        family="reward",
        dose=1e4,
        doses=(2, 1e8),
    ),
    Fault(
        "nan_reward",
        "One environment gives one NaN as a reward, once.",
        one_nan,
        ("numerics/nonfinite",),
        bound=0,
        noisy=True,
    ),
    Fault(
        "adv_x100",
        "Advantages are multiplied by 100 and not normalised.",
        huge_advantages,
        ("integrity/adv_norm",),
        bound=0,
        family="advantages",
        dose=100,
        doses=(1, 1e6),
        needs=(needs.normalized_advantages,),
    ),
    Fault(
        "adv_sign", "Advantages have the wrong sign; returns are right.", flipped_advantages, (GAE_IDENTITY,), bound=0
    ),
    Fault("stale_adv", "Advantages are those of the rollout before.", stale_advantages, (GAE_IDENTITY,), bound=0),
    Fault(
        "returns_shuffled",
        "The critic's targets are permuted.",
        shuffled_returns,
        (GAE_IDENTITY, "value/fit_collapse"),
        bound=0,
    ),
    Fault(
        "obs_mismatch",
        "The update trains on 3 x + 1 of what was acted on.",
        other_observations,
        (RATIO_INIT,),
        bound=0,
        family="observations",
        dose=3,
        doses=(1, 1000),
        needs=(needs.numbers,),
    ),
    Fault(
        "h0_zero",
        "Training begins in states of zeros instead of the stored ones.",
        zero_state,
        (RATIO_INIT,),
        bound=0,
        needs=(needs.memory,),
    ),
    Fault(
        "mask_bug",
        "Actions are restricted when acting and not when training.",
        no_masks,
        (RATIO_INIT,),
        bound=0,
        needs=(needs.restrictions,),
    ),
    Fault(
        "no_reset",
        "Memory is never reset, neither in acting nor in training.",
        no_reset,
        ("lstm/cell_drift", "integrity/ratio_init", "lstm/reset_missing"),
        bound=10,
        needs=(needs.memory,),
    ),
)


Change = Callable[[Step, Mapping[str, Array]], Step]


class Altered:
    """Environments whose steps are changed on their way to the trainer; everything else is theirs."""

    def __init__(self, change: Change, env: Any) -> None:
        self._env, self._change = env, change

    def step(self, actions: Mapping[str, Array]) -> Step:
        """A step, changed."""
        return self._change(self._env.step(actions), actions)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)


class Stuck(nn.Module):
    """A normaliser with the moments of another one, except that it believes in a smaller spread, and learns nothing."""

    def __init__(self, other: ObservationNormalizer, spread: float) -> None:
        super().__init__()
        self.inner = copy.deepcopy(other)
        self.inner.variance.mul_(spread**2)
        self.mean, self.vectors, self.scale = self.inner.mean, self.inner.vectors, self.inner.scale
        self.as_numpy = self.inner.as_numpy

    def forward(self, observations: Tensor) -> Tensor:
        """Normalised observations [..., *shape]."""
        normalized: Tensor = self.inner(observations)
        return normalized

    def update(self, rows: Tensor) -> None:
        """Learns nothing."""


def favoured_action(trainer: PPO, dose: float) -> Undo:
    """Rewards the second choice of the first categorical head and nothing else; the entropy bonus is off."""
    name = next(name for name, spec in trainer.env.action_specs.items() if spec.kind == "categorical")

    def change(step: Step, actions: Mapping[str, Array]) -> Step:
        return step._replace(rewards=(dose * (np.asarray(actions[name]) == 1)).astype(np.float32))

    return changes.together(
        changes.environment(trainer, partial(Altered, change)),
        changes.config(trainer, entropy_coef=0.0, final_entropy_coef=None),
    )


def constant_observations(trainer: PPO, dose: float) -> Undo:
    """Gives ones for the observations of the first `dose` environments."""
    count = round(dose)

    def change(step: Step, _: Mapping[str, Array]) -> Step:
        observations = np.array(step.observations)
        observations[:count] = 1
        return step._replace(observations=observations)

    return changes.environment(trainer, partial(Altered, change))


def swapped_ends(trainer: PPO, dose: float) -> Undo:
    """Takes termination for a time limit, and a time limit for termination."""

    def change(step: Step, _: Mapping[str, Array]) -> Step:
        return step._replace(terminated=step.truncated & ~step.terminated, truncated=step.terminated)

    return changes.environment(trainer, partial(Altered, change))


def stuck_normalizer(trainer: PPO, dose: float) -> Undo:
    """Puts in a normaliser that stands still, at `dose` times the spread that observations have."""
    current = trainer.normalizers.observations
    assert current is not None
    return changes.observation_normalizer(trainer, Stuck(current, dose))


BOUNDARY = (
    Fault(
        "ent0_strong",
        "No entropy bonus, and 5 for one fixed action instead of the task's rewards.",
        favoured_action,
        ("value/loss_jump", "policy/entropy_collapse"),
        bound=5,
        dose=5,
        doses=(0.01, 1e4),
        needs=(needs.choices, needs.on_the_host),
    ),
    Fault(
        "constant_observations",
        "One environment gives the same observation for ever.",
        constant_observations,
        ("lstm/cell_drift", "obs/constant"),
        bound=20,
        dose=1,
        doses=(1, 1e6),
        needs=(needs.on_the_host, needs.several_environments),
        core=False,
    ),
    Fault(
        "swapped_ends",
        "Termination is taken for a time limit, and a time limit for termination.",
        swapped_ends,
        ("value/bias",),
        bound=20,
        needs=(needs.on_the_host,),
        core=False,
    ),
    Fault(
        "stuck_normalizer",
        "The normaliser of observations stands still since they had a twentieth of their spread.",
        stuck_normalizer,
        ("norm/drift",),
        bound=5,
        dose=0.05,
        doses=(1e-4, 0.9),
        needs=(needs.normalized_observations,),
        core=False,
    ),
)
