"""Faults of the data of an update (`DATA`): rewards, advantages, targets, masks, states; and of the environments' steps (`BOUNDARY`)."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from esper_telemetry.lab.faults.fault import Fault, Undo, change_env_steps, replace_attribute, replace_config, replace_steps, undo_all
from esper_telemetry.ppo.environments.environment_protocol import Array, Step
from esper_telemetry.ppo.rollout import Rollout
from esper_telemetry.ppo.trainer import PPO


def one_nan(trainer: PPO, dose: float) -> Undo:
    """Make one reward NaN, once."""
    pending = [True]

    def rewards(original: Tensor) -> Tensor:
        if not pending:
            return original
        pending.clear()
        broken = original.clone()
        broken[len(broken) // 2, 0] = torch.nan
        return broken

    return replace_steps(trainer, rewards=rewards)


def flipped_advantages(trainer: PPO, dose: float) -> Undo:
    """Negate advantages; returns stay correct."""
    right = trainer.steps.advantages

    def advantages(rollout: Rollout, gamma: float, gae_lambda: float) -> Tensor:
        return -right(rollout, gamma, gae_lambda)

    return replace_steps(trainer, advantages=advantages, returns=lambda wrong, values: values - wrong)


def stale_advantages(trainer: PPO, dose: float) -> Undo:
    """Use the advantages of the previous rollout, or in the first update of the next environment; returns stay correct."""
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

    return replace_steps(trainer, advantages=advantages, returns=returns)


def shuffled_returns(trainer: PPO, dose: float) -> Undo:
    """Permute the critic's targets."""
    right, generator = trainer.steps.returns, torch.Generator().manual_seed(0)

    def returns(advantages: Tensor, values: Tensor) -> Tensor:
        targets = right(advantages, values)
        order = torch.randperm(targets.numel(), generator=generator).to(targets.device)
        return targets.flatten()[order].view_as(targets)

    return replace_steps(trainer, returns=returns)


def no_masks(trainer: PPO, dose: float) -> Undo:
    """Train without the masks and the relevance under which actions were chosen."""

    def dropped(columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {}

    return replace_steps(trainer, action_masks=dropped, relevance=dropped)


def zero_state(trainer: PPO, dose: float) -> Undo:
    """Replace the stored initial states of training by zeros."""

    def zeros(states: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: torch.zeros_like(state) for name, state in states.items()}

    return replace_steps(trainer, initial_state=zeros)


GAE_IDENTITY, RATIO_INIT = "integrity/gae_identity", "integrity/ratio_init"

DATA = (
    Fault(
        "reward_1e4",
        "The rewards for learning are 10,000 times as large, after any normaliser.",
        lambda trainer, dose: replace_steps(trainer, rewards=lambda rewards: rewards * dose),
        ("value/scale_shift", "grad/explode"),
        bound=1,
        family="reward",
        dose=1e4,
        doses=(2, 1e8),
    ),
    Fault("nan_reward", "One environment gives one NaN as a reward, once.", one_nan, ("numerics/nonfinite",), bound=0, noisy=True),
    Fault(
        "adv_x100",
        "Advantages are multiplied by 100 and not normalised.",
        lambda trainer, dose: replace_steps(trainer, normalize=lambda advantages: advantages * dose),
        ("integrity/adv_norm",),
        bound=0,
        family="advantages",
        dose=100,
        doses=(1, 1e6),
        needs=("normalized advantages",),
        hypotheses=("normalized_advantages_not_normalized", "gradient_advantages_raw", "advantages_scaled"),
    ),
    Fault(
        "adv_sign",
        "Advantages have the wrong sign; returns are right.",
        flipped_advantages,
        (GAE_IDENTITY,),
        bound=0,
        hypotheses=("advantages_sign", "normalized_advantages_sign"),
    ),
    Fault(
        "stale_adv",
        "Advantages come from the previous rollout.",
        stale_advantages,
        (GAE_IDENTITY,),
        bound=0,
        hypotheses=("advantages_stale", "advantages_other_rows"),  # the latter in the first update
    ),
    Fault(
        "returns_shuffled",
        "The critic's targets are permuted.",
        shuffled_returns,
        (GAE_IDENTITY, "value/fit_collapse"),
        bound=0,
        hypotheses=("returns_other_rows", "returns_unrelated"),
    ),
    Fault(
        "obs_mismatch",
        "The update trains on 3 x + 1 of the observations x used for acting.",
        lambda trainer, dose: replace_steps(trainer, observations=lambda x: dose * x + 1),
        (RATIO_INIT,),
        bound=0,
        family="observations",
        dose=3,
        doses=(1, 1000),
        needs=("numeric observations",),
        hypotheses=("replayed_log_probs_other_observations", "replayed_log_probs_other_statistics"),
    ),
    Fault(
        "h0_zero",
        "Training begins in states of zeros instead of the stored ones.",
        zero_state,
        (RATIO_INIT,),
        bound=0,
        needs=("memory",),
        hypotheses=("replayed_log_probs_memory_zero",),
    ),
    Fault(
        "mask_bug",
        "Actions are restricted when acting and not when training.",
        no_masks,
        (RATIO_INIT,),
        bound=0,
        needs=("restrictions",),
        hypotheses=("replayed_log_probs_mask_missing",),
    ),
    Fault(
        "no_reset",
        "Memory is never reset, neither in acting nor in training.",
        lambda trainer, _: replace_steps(trainer, resets=lambda ended: ended & False),
        ("lstm/cell_drift", "integrity/ratio_init", "lstm/reset_missing"),
        bound=10,
        needs=("memory",),
        hypotheses=("replayed_log_probs_memory_not_reset", "values_memory_not_reset"),
    ),
)


def favoured_action(trainer: PPO, dose: float) -> Undo:
    """Reward only the second choice of the first categorical head, without an entropy bonus."""
    name = next(name for name, spec in trainer.env.action_specs.items() if spec.kind == "categorical")

    def change(step: Step, actions: Mapping[str, Array]) -> Step:
        return step._replace(rewards=(dose * (np.asarray(actions[name]) == 1)).astype(np.float32))

    return undo_all(change_env_steps(trainer, change), replace_config(trainer, entropy_coef=0.0, final_entropy_coef=None))


def constant_observations(trainer: PPO, dose: float) -> Undo:
    """Replace the observations of the first `dose` environments by ones."""
    count = round(dose)

    def change(step: Step, _: Mapping[str, Array]) -> Step:
        observations = np.array(step.observations)
        observations[:count] = 1
        return step._replace(observations=observations)

    return change_env_steps(trainer, change)


def swapped_ends(trainer: PPO, dose: float) -> Undo:
    """Exchange termination and time limit."""

    def change(step: Step, _: Mapping[str, Array]) -> Step:
        return step._replace(terminated=step.truncated & ~step.terminated, truncated=step.terminated)

    return change_env_steps(trainer, change)


def stuck_normalizer(trainer: PPO, dose: float) -> Undo:
    """Fix the normaliser at `dose` times the standard deviation of the observations."""
    fixed: Any = copy.deepcopy(trainer.normalizers.observations)
    fixed.variance.mul_(dose**2)
    fixed.update = lambda rows: None
    return replace_attribute(trainer.normalizers, "observations", fixed)


BOUNDARY = (
    Fault(
        "ent0_strong",
        "No entropy bonus, and 5 for one fixed action instead of the task's rewards.",
        favoured_action,
        ("value/loss_jump", "policy/entropy_collapse"),
        bound=5,
        dose=5,
        doses=(0.01, 1e4),
        needs=("choices", "host environments"),
    ),
    Fault(
        "constant_observations",
        "One environment returns the same observation forever.",
        constant_observations,
        ("lstm/cell_drift", "obs/constant"),
        bound=20,
        dose=1,
        doses=(1, 1e6),
        needs=("host environments", "several environments"),
        core=False,
    ),
    Fault(
        "swapped_ends",
        "Terminations and time limits are swapped.",
        swapped_ends,
        ("value/bias",),
        bound=20,
        needs=("host environments",),
        core=False,
    ),
    Fault(
        "stuck_normalizer",
        "The normaliser of observations is frozen at a twentieth of their spread.",
        stuck_normalizer,
        ("norm/drift",),
        bound=5,
        dose=0.05,
        doses=(1e-4, 0.9),
        needs=("normalized observations",),
        core=False,
    ),
)
