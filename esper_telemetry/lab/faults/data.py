"""Faults of what an update is fed: rewards, advantages, targets, observations, masks, states."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from esper_telemetry.lab.faults import changes, needs
from esper_telemetry.lab.faults.fault import Fault, Undo
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
