"""The equation of a rollout's advantages, and `check_gae`.

Shapes: T steps, B environments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from esper_telemetry.core.arrays import ArrayLike, as_mask, as_number, as_tensor
from esper_telemetry.core.borders import checked_arguments
from esper_telemetry.core.lazy import Tensor, inference_mode, torch
from esper_telemetry.equations import gae as estimates
from esper_telemetry.equations.advantage_fits import (
    ADVANTAGE_TOLERANCE,
    FITTED,
    normalized_whole,
)
from esper_telemetry.equations.comparison import EquationCheck, compare, distinguished, unchecked
from esper_telemetry.equations.equation import Equation, hypothesis_table
from esper_telemetry.equations.gae import (
    GaeInputs,
    following_values,
    gae,
    is_standard,
    rows_that_count,
)
from esper_telemetry.metrics.statistics import discounted_sums, same_shape

TINY_DEVIATION = 1e-12
"""Smallest standard deviation to divide by."""

MAX_SCALE_PASSES = 60
"""Passes up to which the scale of normalised advantages and such a row are found together; each is several times nearer."""

DETAILS = "Huang et al. 2022, The 37 implementation details of PPO"

MISTAKES = hypothesis_table(
    "ends_ignored: GAE that runs on over the ends of episodes // A_t = r_t + γ V_{t+1} - V_t + γλ A_{t+1}"
    " // Multiply the trace, and the bootstrap, by 1 - done. // Huang et al. 2022, The 37 implementation details of PPO",
    estimates.ends_ignored,
    "terminations_ignored: GAE that runs on over terminations, and not over time limits // A_t = δ_t + γλ (1 - truncated_t) A_{t+1}"
    " // Multiply the trace, and the bootstrap, by 1 - terminated too.",
    estimates.terminations_ignored,
    "ends_late (doubtful_without flags): GAE with the ends of episodes one step late // A_t = δ_t + γλ (1 - end_{t-1}) A_{t+1}"
    " // Take the flag that the step itself returned: where `dones[t]` is the flag before step t, use `dones[t + 1]`."
    " // automl/Mighty#126; vwxyzjn/cleanrl: dones[t + 1], not dones[t], says that step t ended an episode",
    estimates.ends_late,
    "ends_early (doubtful_without flags): GAE with the ends of episodes one step early // A_t = δ_t + γλ (1 - end_{t+1}) A_{t+1}"
    " // Take the flag that the step itself returned: where `dones[t]` belongs to step t, do not use `dones[t + 1]`.",
    estimates.ends_early,
    "ends_inverted: GAE that goes on only where an episode ends // A_t = δ_t + γλ end_t A_{t+1} // Multiply by 1 - done, not by done.",
    estimates.ends_inverted,
    "ends_shared: GAE in which the end of an episode in one environment ends those of all // A_t = δ_t + γλ (1 - max_b end_tb) "
    "A_{t+1} // Use each environment's own flag: look for `any()` and for shapes that broadcast.",
    estimates.ends_shared,
    "ends_of_others: GAE with the ends of episodes of other environments // A_tb = δ_tb + γλ (1 - end_{t,σ(b)}) A_{t+1,b}"
    " // Keep the order of environments in the flags: look for `roll`, for reshapes and for results of workers in another order.",
    estimates.ends_of_others,
    "last_end_ignored: GAE that bootstraps after the last step though that ended its episode // A_T = r_T + γ V(s_{T+1}) - V_T"
    " // Multiply the value after the last step by 1 - done of the last step."
    " // vwxyzjn/cleanrl: `next_done` masks the bootstrap of the last step",
    estimates.last_end_ignored,
    "next_episode_bootstrap: GAE that bootstraps ends with the first value of the next episode"
    " // δ_t = r_t + γ V_{t+1} - V_t at ends too // Multiply the next value by 1 - done.",
    estimates.next_episode_bootstrap,
    "time_limit_as_termination: GAE that takes time limits for terminations // δ_t = r_t - V_t at time limits"
    " // Add γ times the value of the episode's last observation where a time limit ended it."
    " // Pardo et al. 2018, 1712.00378; DLR-RM/stable-baselines3#633",
    estimates.time_limit_bootstrap(lambda inputs: 0.0),
    "time_limit_no_end: GAE that takes time limits for no end, so that the trace runs into the next episode // A_t = δ_t + γλ (1 - "
    "terminated_t) A_{t+1} // Cut the trace where terminated or truncated is set, and mask the bootstrap by terminated alone. // "
    "Pardo et al. 2018, 1712.00378",
    estimates.time_limit_no_end,
    "time_limit_next_episode: GAE that bootstraps time limits with the first value of the next episode // δ_t = r_t + γ V_{t+1} - V_t"
    " at time limits // Use the value of the episode's last observation (`final_observation`), not of the one after the reset. // "
    "Unity-Technologies/ml-agents#574",
    estimates.time_limit_next_episode,
    "time_limit_twice: GAE that adds the value after a time limit twice // δ_t = r_t + 2 γ V(s_{t+1}) - V_t at time limits"
    " // Add the value either to the reward or as the next value.",
    estimates.time_limit_bootstrap(lambda inputs: 2 * inputs.next_values),
    "no_last_bootstrap: GAE without the value after the last step // δ_T = r_T - V_T // Bootstrap the last step with the value of the"
    " state that follows the rollout. // Huang et al. 2022, The 37 implementation details of PPO",
    estimates.last_bootstrap(lambda inputs: 0.0),
    "old_last_bootstrap: GAE that bootstraps the last step with the value of the state before it // δ_T = r_T + γ V_T - V_T"
    " // Ask the critic for the observation after the last step.",
    estimates.last_bootstrap(lambda inputs: inputs.values),
    "current_value_bootstrap: GAE that bootstraps each step with the value of its own state // δ_t = r_t + γ V_t - V_t"
    " // The next value is that of row t + 1.",
    estimates.current_value_bootstrap,
    "values_exchanged: GAE with the value and the next value exchanged // δ_t = r_t + γ V_t - V_{t+1} // δ_t = r_t + γ V_{t+1} - V_t.",
    lambda inputs: gae(inputs, values=inputs.next_values, next_values=inputs.values),
    "not_flipped: GAE in reversed order of time // A_t = GAE_{T-t} // Reverse the list that the backward loop has filled.",
    lambda inputs: gae(inputs).flip(0),
    "forward: the recursion of GAE run forward in time // A_t = δ_t + γλ (1 - end_t) A_{t-1} // Loop over `reversed(range(T))`.",
    estimates.forward,
    "exchanged: GAE with gamma and lambda exchanged // δ_t = r_t + λ V_{t+1} - V_t // Look at the order of the arguments.",
    lambda inputs: gae(inputs, gamma=inputs.gae_lambda),
    "undiscounted_bootstrap: GAE whose bootstrap is not discounted // δ_t = r_t + V_{t+1} - V_t // Multiply the next value by gamma.",
    lambda inputs: gae(inputs, gamma=1.0),
    "trace_without_gamma: GAE whose trace decays by lambda alone // A_t = δ_t + λ A_{t+1}"
    " // Multiply the trace by gamma times lambda.",
    lambda inputs: gae(inputs, decay=inputs.gae_lambda),
    "sign: GAE with the opposite sign // A_t = -GAE_t // Advantages are returns less values.",
    lambda inputs: -gae(inputs),
    "absolute: GAE whose negative numbers have become positive, or 0 // A_t = |GAE_t|, GAE_t² or max(GAE_t, 0)"
    " // Keep the signs: an action that is worse than expected is to become less likely.",
    estimates.without_signs,
    "rewards_late (unknown_row): GAE from the rewards of the step before // δ_t = r_{t-1} + γ V_{t+1} - V_t"
    " // Store each reward in the row of the action that earned it.",
    estimates.rewards_late,
    "rewards_early (unknown_row): GAE from the rewards of the step after // δ_t = r_{t+1} + γ V_{t+1} - V_t"
    " // Store each reward in the row of the action that earned it.",
    estimates.rewards_early,
    "rewards_negated: GAE of the negative rewards // δ_t = -r_t + γ V_{t+1} - V_t // Rewards are maximised; costs need a minus sign.",
    estimates.of_rewards(lambda rewards: -rewards),
    "rewards_clipped: GAE of rewards clipped to [-1, 1] // δ_t = clip(r_t, -1, 1) + γ V_{t+1} - V_t"
    " // Clip rewards in a wrapper of the environment if at all, so that all that is learned from agrees."
    " // Mnih et al. 2015: rewards of Atari are clipped in the environment",
    estimates.of_rewards(lambda rewards: rewards.clamp(-1, 1)),
    "reward_signs: GAE of the signs of the rewards // δ_t = sign(r_t) + γ V_{t+1} - V_t"
    " // Clip rewards in a wrapper of the environment if at all, so that all that is learned from agrees."
    " // Mnih et al. 2015: rewards of Atari are clipped in the environment",
    estimates.of_rewards(lambda rewards: rewards.sign()),
    "raw_rewards (needs raw_rewards): GAE of the rewards before normalisation // δ_t = raw r_t + γ V_{t+1} - V_t"
    " // Store the normalised rewards, or train the critic on the raw ones too.",
    lambda inputs: gae(inputs, rewards=inputs.raw_rewards),
    "returns_stored: returns: the values were not subtracted // A_t = GAE_t + V_t"
    " // Subtract the values, or store returns and advantages apart.",
    lambda inputs: gae(inputs) + inputs.values,
    "values_missing: discounted sums of rewards, as if all values were 0 // A_t = Σ_k (γλ)^k r_{t+k}"
    " // Fill the values before the advantages are computed.",
    lambda inputs: gae(inputs, values=torch.zeros_like(inputs.values), next_values=torch.zeros_like(inputs.values)),
    "monte_carlo_cut: discounted rewards to the end of the rollout, less values, without a bootstrap after the last step"
    " // A_t = Σ_k γ^k r_{t+k} - V_t // Bootstrap the last step with the value of the state that follows the rollout.",
    lambda inputs: None if inputs.gae_lambda == 1 else estimates.monte_carlo_cut(inputs),
    "rewards_to_go: discounted rewards to go without a baseline // A_t = Σ_k γ^k r_{t+k} // Subtract the values.",
    estimates.rewards_to_go,
    "axes_swapped: GAE with steps and environments exchanged when it was reshaped // A[t, b] = GAE.reshape(B, T)[b, t]"
    " // Transpose before you reshape: `reshape` and `view` do not move entries.",
    estimates.axes_swapped,
    "rewards_swapped: GAE of rewards with steps and environments exchanged when they were reshaped"
    " // δ[t, b] = r.reshape(B, T)[b, t] + γ V_{t+1} - V_t // Transpose before you reshape: `reshape` and `view` do not move entries.",
    estimates.rewards_swapped,
    "ends_swapped: GAE of ends, perhaps of rewards too, with steps and environments exchanged when they were reshaped"
    " // end[t, b] = ends.reshape(B, T)[b, t] // Transpose before you reshape: `reshape` and `view` do not move entries.",
    estimates.ends_swapped,
    "along_environments: the recursion of GAE over environments in place of steps // A_tb = δ_tb + γλ A_t,b+1"
    " // Loop over the axis of time.",
    estimates.along_environments,
    "chained: GAE of all environments as one sequence // A_n = δ_n + γλ A_{n+1} over the flattened rollout"
    " // Compute advantages before the rollout is flattened.",
    estimates.chained,
    "environment_mean: GAE averaged over the environments // A_tb = mean_b GAE_tb"
    " // Keep the axis of environments: look for `mean()` and for shapes that broadcast.",
    estimates.environment_mean,
    "broadcast_mean: differences of returns and values in which one of both is a mean over all rows // A_i = mean_j (R_j - V_i) // "
    "Print the shapes of returns and values: [N] less [N, 1] is [N, N]. // PacktPublishing/Deep-Reinforcement-Learning-Hands-On#74",
    estimates.broadcast_mean,
    "normalized_parts: GAE normalised over each environment // A_tb = (GAE_tb - mean_b) / std_b"
    " // Normalise over all rows of the batch or of the minibatch. // Huang et al. 2022, detail 7, normalises over the minibatch",
    estimates.normalized_along(0),
    "normalized_steps: GAE normalised over the environments of each step // A_tb = (GAE_tb - mean_t) / std_t"
    " // Normalise over all rows of the batch or of the minibatch. // Huang et al. 2022, detail 7, normalises over the minibatch",
    estimates.normalized_along(1),
    "std_alone: GAE divided by its standard deviation without taking its mean away // A_t = GAE_t / std // Subtract the mean.",
    estimates.moved_and_scaled(lambda right, mean, std: right / std),
    "mean_alone: GAE less its mean, which is not divided by its standard deviation // A_t = GAE_t - mean"
    " // Divide by the standard deviation.",
    estimates.moved_and_scaled(lambda right, mean, std: right - mean),
    "variance: GAE less its mean, divided by its variance // A_t = (GAE_t - mean) / std² // Divide by the standard deviation.",
    estimates.moved_and_scaled(lambda right, mean, std: (right - mean) / std.square()),
    "precedence: GAE less the ratio of its mean and its standard deviation // A_t = GAE_t - mean / std"
    " // Put `advantages - mean` in parentheses.",
    estimates.moved_and_scaled(lambda right, mean, std: right - mean / std),
    "stale: the advantages of the rollout before // A_t = GAE_t of rollout k - 1"
    " // Compute advantages after the rollout is complete, and clear the buffer after each update.",
    estimates.stale,
)
VARIANTS = hypothesis_table(
    "lambda_one (variant): returns less values (lambda = 1) // A_t = Σ_k γ^k r_{t+k} + γ^n V(s_{t+n}) - V_t // "
    " // A2C, 1602.01783; 1506.02438, eq. 16",
    lambda inputs: gae(inputs, decay=inputs.gamma),
    "lambda_zero (variant): one-step TD errors (lambda = 0) // A_t = r_t + γ V_{t+1} - V_t //  // 1506.02438, eq. 16",
    lambda inputs: gae(inputs, decay=0.0),
    "v_trace (variant): one-step advantages against lambda-returns, as in V-trace // A_t = r_t + γ v_{t+1} - V_t // "
    " // IMPALA, 1802.01561, section 4.2",
    estimates.v_trace,
    "time_limit_current_value (variant): GAE that bootstraps time limits with the value of the last state acted in"
    " // δ_t = r_t + γ V_t - V_t at time limits //  // leggedrobotics/rsl_rl, Rudin et al. 2021, 2109.11978",
    estimates.time_limit_bootstrap(lambda inputs: inputs.values),
    "normalized (variant, of scale): GAE that was normalised over the whole batch // A = (GAE - mean) / std // "
    " // openai/spinningup, PPOBuffer.get; leggedrobotics/rsl_rl, RolloutStorage.compute_returns",
    estimates.normalized,
)

ADVANTAGES = Equation(
    name="advantages",
    rank=20,
    quantity="the advantages",
    equation="A_t = δ_t + γλ (1 - end_t) A_{t+1}, δ_t = r_t + γ V(s_{t+1}) - V(s_t)",
    source="1506.02438, eq. 16",
    inputs="rewards, values, ends, and the value after the last step",
    compute=gae,
    tolerance=ADVANTAGE_TOLERANCE,
    hypotheses=(*MISTAKES, *VARIANTS, *FITTED),
    advice="Recompute one environment's advantages by hand, from the last step to the first.",
)


@checked_arguments(tolerance=0)
@inference_mode
def check_gae(
    rewards: ArrayLike,
    values: ArrayLike,
    advantages: ArrayLike,
    *,
    gamma: float,
    gae_lambda: float,
    ended: ArrayLike | None = None,
    terminated: ArrayLike | None = None,
    truncated: ArrayLike | None = None,
    next_values: ArrayLike | None = None,
    last_values: ArrayLike | None = None,
    raw_rewards: ArrayLike | None = None,
    valid: ArrayLike | None = None,
    precision: str | None = None,
    tolerance: float | None = None,
) -> EquationCheck:
    """Return the comparison of advantages, before normalisation, with GAE.

    Args:
        rewards, values, advantages: [T, B]; [T] for one environment, like all other columns. Rewards are those that are learned from,
            without the value of a time limit's last state.
        gamma, gae_lambda: settings of the estimate.
        ended: bool: the step taken at t ended its episode; `terminated` or `truncated` where it is None.
        terminated: bool: it ended by termination; where it is None, all ends but those `truncated`. Where both are None, ends whose
            `next_values` are not 0 may be time limits.
        truncated: bool: it ended by a time limit.
        next_values: the critic's estimate of the state that follows t, whatever it is after termination.
        last_values: [B], its estimates of the states after the last step. In place of `next_values`, values after time limits are
            unknown: rows from the start of an episode to its time limit are left out. Beside them, they tell what was done where
            the last step ended an episode.
        raw_rewards: before scaling; None where they are `rewards`.
        valid: bool; None where every entry is.
        precision: of the trainer's arithmetic: fp32, tf32, bf16 or fp16.
        tolerance: largest relative error; by precision where it is None.

    Raises:
        ValueError: where shapes disagree, no flag says where episodes end, neither `next_values` nor `last_values` is given,
            or a setting lies outside 0 to 1.
    """
    for name, setting in (("gamma", gamma), ("gae_lambda", gae_lambda)):
        if not 0 <= as_number(setting, name) <= 1:
            raise ValueError(f"{name} must lie between 0 and 1, got {setting!r}")
    if next_values is None and last_values is None:
        raise ValueError("give next_values [T, B] or last_values [B]: the values of the states that follow")
    claimed = _grid("advantages", as_tensor(advantages).detach())

    def column(name: str, given: ArrayLike | None) -> Tensor | None:
        if given is None:
            return None
        grid = _grid(name, as_tensor(given, claimed).detach().to(claimed.device).double())
        same_shape(**{"advantages": claimed, name: grid})
        return grid

    flags = {
        name: _grid(name, mask.to(claimed.device))
        for name, given in (("ended", ended), ("terminated", terminated), ("truncated", truncated), ("valid", valid))
        if (mask := as_mask(given, claimed)) is not None
    }
    same_shape(advantages=claimed, **flags)
    paid, estimates = column("rewards", rewards), column("values", values)
    following = column("next_values", next_values)
    if not claimed.numel() or paid is None or estimates is None:
        return unchecked(ADVANTAGES, "there are no rows")
    ends, terminations = _ends(flags)
    last = None if last_values is None else as_tensor(last_values, claimed).detach().to(estimates).reshape(-1)
    if last is not None and len(last) != claimed.shape[1]:
        raise ValueError(f"last_values must have {claimed.shape[1]} entries, one for each environment, got {len(last)}")
    known = None
    if following is None:
        ahead = torch.cat([estimates[1:], last[None] if last is not None else estimates[:0]])
        following = torch.where(ends, 0.0, ahead)
        cut = (ends & ~terminations).double()  # what follows is not known in all of an episode that ends in such a step
        known = discounted_sums(cut, (~ends).double()) <= 0
    inputs = GaeInputs(
        rewards=paid,
        values=estimates,
        next_values=torch.where(terminations, 0.0, following),
        ended=ends,
        terminated=terminations,
        following=following,
        claimed=claimed.double(),
        gamma=float(gamma),
        gae_lambda=float(gae_lambda),
        valid=flags.get("valid"),
        raw_rewards=column("raw_rewards", raw_rewards),
    )
    check = compare_advantages(following_values(inputs, last), known=known, precision=precision, tolerance=tolerance)
    if check.matches or next_values is None or "terminated" in flags or "truncated" in flags:
        return check
    # `ended` alone does not say which ends are time limits: those whose next value is not 0 may be
    inputs = replace(inputs, next_values=following, terminated=ends & (following == 0))
    other = compare_advantages(following_values(inputs, last), precision=precision, tolerance=tolerance)
    return _likelier(check, other, of_next_episode=bool((following[:-1] == estimates[1:])[ends[:-1]].all()))


def _likelier(terminations: EquationCheck, limits: EquationCheck, *, of_next_episode: bool) -> EquationCheck:
    """Return one of two checks, in which all ends are terminations, or some are time limits; the first one does not match.

    `of_next_episode`: the values after the ends are those of the next episode, not of a last state.
    """
    known = limits.matches or bool(limits.explanations)
    return terminations if not known or (terminations.explanations and of_next_episode) else limits


def compare_advantages(
    inputs: GaeInputs, *, known: Tensor | None = None, precision: str | None = None, tolerance: float | None = None
) -> EquationCheck:
    """Return the comparison of the claimed advantages with GAE in the rows that count.

    Args:
        known: [T, B], bool: rows whose advantage the columns determine; None where they do everywhere.
    """
    counted = inputs.valid if known is None else known if inputs.valid is None else inputs.valid & known
    if counted is not None and not bool(counted.any()):
        reason = "no row counts" if known is None else "the values after time limits are not known"
        return unchecked(ADVANTAGES, reason)
    check = compare(
        ADVANTAGES,
        inputs,
        inputs.claimed,
        magnitudes=(inputs.rewards, inputs.values, inputs.next_values),
        valid=counted,
        precision=precision,
        tolerance=tolerance,
    )
    check = distinguished(check)
    if check.matches or check.explanations or not is_standard(inputs.claimed, inputs.valid):
        return check
    std = rows_that_count(gae(inputs), inputs.valid).std(correction=0).clamp(min=TINY_DEVIATION)
    normalized = compare(
        _of_normalized(),
        inputs,
        inputs.claimed,
        magnitudes=tuple(column / std for column in (inputs.rewards, inputs.values, inputs.next_values)),
        valid=counted,
        precision=precision,
        tolerance=tolerance,
    )
    return replace(check, explanations=distinguished(normalized).explanations)


def _normalized(
    compute: Callable[[GaeInputs], Tensor | None], *, has_unknown_rewards: bool
) -> Callable[[GaeInputs], Tensor | None]:
    """Normalise what a hypothesis computes over all rows that count, by the biased or the unbiased standard deviation."""

    def normalized(inputs: GaeInputs) -> Tensor | None:
        # hypotheses with several candidates take the one nearest to the claimed numbers, so these are put near to what they were
        claimed = rows_that_count(inputs.claimed, inputs.valid)
        std, mean = torch.std_mean(rows_that_count(gae(inputs), inputs.valid), correction=0)
        values = compute(replace(inputs, claimed=inputs.claimed * std + mean))
        for _ in range(MAX_SCALE_PASSES if has_unknown_rewards else 0):
            if values is None:
                break
            # a row whose reward is unknown is taken from the claimed numbers, so that it depends on their scale, and the scale on it
            rows, before = rows_that_count(values, inputs.valid), std
            std = ((claimed * rows).mean() - claimed.mean() * rows.mean()) / claimed.var(correction=0)
            mean = rows.mean() - std * claimed.mean()
            values = compute(replace(inputs, claimed=inputs.claimed * std + mean))
            if torch.isclose(before, std, rtol=1e-12, atol=0):
                break
        return None if values is None else normalized_whole(inputs, values)

    return normalized


@cache
def _of_normalized() -> Equation:
    """The equation of advantages that a program normalises over the whole batch without keeping others, with the same hypotheses.

    A function, because each constant of these modules that is an equation is listed as one of its own.
    """
    hypotheses = [
        replace(one, compute=_normalized(one.compute, has_unknown_rewards=one.unknown_row))
        for one in ADVANTAGES.hypotheses
        if one.compute is not None
    ]
    fits = [replace(one, fit=one.normalized_fit) for one in ADVANTAGES.hypotheses if one.normalized_fit is not None]
    return replace(ADVANTAGES, compute=estimates.normalized, hypotheses=(*hypotheses, *fits))


def _grid(name: str, column: Tensor) -> Tensor:
    """The column as [T, B]."""
    if column.dim() not in (1, 2):
        raise ValueError(f"{name} must have shape [T, B], or [T] for one environment, got {list(column.shape)}")
    return column.unsqueeze(1) if column.dim() == 1 else column


def _ends(flags: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Steps that ended an episode, and those that did so by termination."""
    ended, terminated, truncated = (flags.get(name) for name in ("ended", "terminated", "truncated"))
    given = [part for part in (terminated, truncated) if part is not None]
    if ended is None:
        if not given:
            raise ValueError("give ended, or terminated and truncated: the steps that ended an episode")
        ended = given[0] if len(given) == 1 else given[0] | given[1]
    if terminated is None:
        terminated = ended if truncated is None else ended & ~truncated
    return ended, terminated & ended
