"""Compute advantages, returns, rewards, losses, episodes and integrity from the inputs of a reference case."""

import torch
from torch import Tensor

from esper_telemetry.history.critic import advantage_scale
from esper_telemetry.metrics.advantages import advantage_stats, normalized_advantage_stats
from esper_telemetry.metrics.episodes import episode_stats
from esper_telemetry.metrics.integrity import gae_identity, mask_violation
from esper_telemetry.metrics.losses import ppo_losses
from esper_telemetry.metrics.rollout_stats import normalizer_clipping, normalizer_drift, return_stats, reward_stats
from esper_telemetry.metrics.values import td_errors
from esper_telemetry.ppo.ppo_objective import generalized_advantages
from esper_telemetry.ppo.rollout import Rollout
from vector_adapters.inputs import Inputs, Values, floats, mask, masks, of_formula, of_keys


@of_keys(
    "adv/",
    "raw/mean raw/mean_nonfinite raw/std raw/min raw/max raw/skew raw/kurtosis raw/pos_frac raw/p05 raw/p95",
    "raw/absmax_over_std std_floored",
)
def raw_advantages(inputs: Inputs) -> Values:
    """A1, and the flag of A2."""
    values = advantage_stats(floats(inputs["advantages"]), valid=mask(inputs)).values()
    scale = advantage_scale(*(values.get(f"adv/raw/{name}") for name in ("mean", "std", "min", "max")))
    return {**values, **scale.values()}


@of_keys("", "adv/norm/mean adv/norm/std adv/participation adv/sign_flip_frac integrity/adv_norm")
def used_advantages(inputs: Inputs) -> Values:
    if "advantages_norm" in inputs:
        return normalized_advantage_stats(floats(inputs["advantages_norm"]), valid=mask(inputs)).values()
    raw = floats(inputs["advantages"])
    used = (raw - raw.mean()) / (raw.std(correction=inputs["correction"]) + inputs["eps"])
    return normalized_advantage_stats(used, raw).values()


@of_keys("ret/", "mean std min max skew p10 p50 p90")
def returns(inputs: Inputs) -> Values:
    return return_stats(floats(inputs["returns"]), valid=mask(inputs)).values()


@of_keys("reward/", "mean std absmax zero_frac nonfinite")
def rewards(inputs: Inputs) -> Values:
    return reward_stats(floats(inputs["rewards"]), valid=mask(inputs)).values()


@of_keys("norm/", "obs/drift ret/drift obs/clip_frac ret/clip_frac")
def normalizer(inputs: Inputs) -> Values:
    which = inputs["which"]
    if "normalised" in inputs:
        return normalizer_clipping(which, floats(inputs["normalised"]), clip=inputs["clip"]).values()
    return normalizer_drift(which, *(floats(inputs[name]) for name in ("mean", "std", "mean_prev", "std_prev"))).values()


def following_values(inputs: Inputs) -> Tensor:
    """V of the state after each step: 0 after termination, V of the final observation after truncation."""
    values, bootstrap = floats(inputs["values"]), floats(inputs["bootstrap"])
    after = torch.cat([values[1:], bootstrap[None]])
    if "truncations" in inputs:
        after = torch.where(floats(inputs["truncations"]) > 0, floats(inputs["final_values"]), after)
    return torch.where(floats(inputs["dones"]) > 0, 0.0, after)


@of_formula("A4: a truncated step")
@of_keys("", "integrity/gae_identity value/td/mean value/td/std value/td/absmean")
def gae(inputs: Inputs) -> Values:
    """A4 and V5; advantages and returns as the trainer computes them, if the case does not give them."""
    values, valid = floats(inputs["values"]), mask(inputs)
    if "advantages" in inputs:
        return gae_identity(floats(inputs["advantages"]), values, floats(inputs["returns"]), valid=valid).values()
    after = following_values(inputs)
    advantages = generalized_advantages(_rollout(inputs, values, after), inputs["gamma"], inputs["lam"])
    errors = td_errors(floats(inputs["rewards"]), values, after, gamma=inputs["gamma"], valid=valid)
    identity = gae_identity(advantages, values, advantages + values, valid=valid)
    computed = {"aux:advantages": advantages.tolist(), "aux:returns": (advantages + values).tolist()}
    return {**errors.values(), **identity.values(), **computed}


def _rollout(inputs: Inputs, values: Tensor, after: Tensor) -> Rollout:
    terminated = floats(inputs["dones"]) > 0
    ended = terminated | (floats(inputs["truncations"]) > 0) if "truncations" in inputs else terminated
    return Rollout(
        observations=values,
        actions={},
        log_probs=values,
        rewards=floats(inputs["rewards"]),
        values=values,
        next_values=after,
        ended=ended,
        terminated=terminated,
        valid=None,
        transitions=values.numel(),
    )


@of_keys("integrity/mask_violation")
def forbidden(inputs: Inputs) -> Values:
    actions = {head: torch.tensor(value) for head, value in inputs["head_actions"].items()}
    allowed, relevant = masks(inputs, "head_action_mask"), masks(inputs, "head_mask")
    return mask_violation(actions, allowed, relevant=relevant).values()


@of_keys("loss/", "policy value entropy total")
def losses(inputs: Inputs) -> Values:
    names = ("logratio", "advantages_norm", "values", "returns", "entropy")
    return ppo_losses(
        *(floats(inputs[name]) for name in names), clip=inputs["clip_eps"], value_coef=inputs["vf_coef"], entropy_coef=inputs["ent_coef"]
    ).values()


@of_keys("episode/", "return_mean return_std return_min return_max length_mean count")
def episodes(inputs: Inputs) -> Values:
    return episode_stats(inputs["episode_returns"], inputs["episode_lengths"]).values()
