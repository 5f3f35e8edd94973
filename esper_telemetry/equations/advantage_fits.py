"""Explanations of advantages with a fitted parameter.

Each fit returns the parameter and the advantages [T, B] that GAE gives with it, or None. Shapes: T steps, B environments.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from esper_telemetry.core.lazy import Tensor, torch
from esper_telemetry.equations.comparison import ranked
from esper_telemetry.equations.equation import TOLERANCES, mistake, variant
from esper_telemetry.equations.gae import GaeInputs, closest_whole, gae, standards

MIN_TERMINATIONS = 3
"""Fewest terminations for a test that a constant was added to their rewards."""

MIN_ENDS = 4
"""Fewest ends of episodes for a comparison with the ends that the claimed advantages imply."""

MIN_BOOTSTRAPPED = 0.8
"""Fraction of terminations with an added value above which all terminations are said to have one."""

MAX_PARAMETER = 1.0 + 1e-6
"""Largest discount and largest lambda that a fit may return."""

MIN_ROWS = 8
"""Fewest rows for which the same numbers in another order are not a coincidence."""

REFINEMENTS = 4
"""Gauss-Newton steps from the solution of the linear equation, which rounding changes by up to 1e-3."""

PROBE = 1e-6
"""Step of the numerical derivative with respect to a discount or a lambda."""

OTHER_SETTING = 1e-4
"""Difference above which a fitted discount or lambda differs from the setting."""


class LocalEquation:
    """The recursion at each row with the claimed advantage of the next row, which is linear in every parameter.

    A_t - r_t + V_t = gamma V(s_{t+1}) + gamma lambda (1 - end_t) A_{t+1}. Fits use every second row that counts.

    Attributes:
        left: A_t - r_t + V_t, [T, B].
        ahead: (1 - end_t) A_{t+1}, [T, B]; 0 in the last row.
        rows: [T, B], bool: rows that the fit uses.
    """

    def __init__(self, inputs: GaeInputs, claimed: Tensor) -> None:
        self.left = claimed - inputs.rewards + inputs.values
        self.ahead = torch.zeros_like(claimed)
        self.ahead[:-1] = claimed[1:] * (~inputs.ended & inputs.counted)[:-1]
        self.rows = torch.zeros_like(inputs.ended)
        self.rows.view(-1)[::2] = True
        self.rows &= inputs.counted

    def solve(self, left: Tensor, *factors: Tensor) -> list[float] | None:
        """Return the least-squares coefficients of the factors; None if the rows do not determine them."""
        matrix = torch.stack([factor[self.rows] for factor in factors], 1)
        normal = matrix.t() @ matrix
        scale = normal.diagonal().prod()
        if len(matrix) <= len(factors) or not bool(torch.linalg.det(normal) > 1e-12 * scale) or not bool(scale > 0):
            return None
        solution: list[float] = torch.linalg.solve(normal, matrix.t() @ left[self.rows]).tolist()
        return solution


MIN_WEIGHTS, MIN_CUT_SHARE = 64, 0.1
"""Fewest rows that show importance weights, and the smallest share of them that are at their bound, and below it."""

CUT_WEIGHT, UNKNOWN_WEIGHT = 1e-4, 1e-3
"""Rounding of a weight, and the one-step advantage, relative to the largest one, below which a weight is mostly rounding."""

FitFunction = Callable[[GaeInputs, Tensor], tuple[float, Tensor] | None]


def with_stored_limits(fit: FitFunction) -> FitFunction:
    """Return a fit that also tries stored rewards, which include a time limit's last value with the configured discount."""

    def nearest(inputs: GaeInputs, claimed: Tensor) -> tuple[float, Tensor] | None:
        stored = replace(inputs, rewards=inputs.bootstrapped_rewards, next_values=inputs.next_values * ~inputs.truncated)
        results = [fit(inputs, claimed), fit(stored, claimed) if bool(inputs.truncated.any()) else None]
        fitted = [result for result in results if result is not None]
        return min(fitted, key=lambda one: float((one[1] - claimed)[inputs.counted].abs().amax()), default=None)

    return nearest


@with_stored_limits
def fitted_gamma(inputs: GaeInputs, claimed: Tensor) -> tuple[float, Tensor] | None:
    """Return the discount for which GAE equals the claimed advantages."""
    local = LocalEquation(inputs, claimed)
    solution = local.solve(local.left, inputs.next_values + inputs.gae_lambda * local.ahead)
    if solution is None or not 0 <= solution[0] <= MAX_PARAMETER:
        return None
    return solution[0], gae(replace(inputs, gamma=solution[0]))


def fitted_limit_gamma(inputs: GaeInputs, claimed: Tensor) -> tuple[float, Tensor] | None:
    """Return the discount of the values after time limits, with the configured discount elsewhere."""
    limits = inputs.truncated & inputs.counted
    local, after = LocalEquation(inputs, claimed), inputs.next_values * inputs.truncated
    rest = inputs.gamma * (inputs.next_values * ~inputs.truncated + inputs.gae_lambda * local.ahead)
    values, left = after[limits][::2], (local.left - rest)[limits][::2]
    if int(limits.sum()) < MIN_TERMINATIONS or not inputs.gamma or not bool(values.any()):
        return None
    gamma = float(values @ left / (values @ values))
    if not 0 <= gamma <= MAX_PARAMETER:
        return None
    return gamma, gae(inputs, next_values=inputs.next_values + (gamma / inputs.gamma - 1) * after)


def fitted_lambda(inputs: GaeInputs, claimed: Tensor) -> tuple[float, Tensor] | None:
    """Return the lambda for which GAE equals the claimed advantages."""
    local = LocalEquation(inputs, claimed)
    solution = local.solve(local.left - inputs.gamma * inputs.next_values, inputs.gamma * local.ahead)
    if solution is None or not 0 <= solution[0] <= MAX_PARAMETER:
        return None
    return solution[0], gae(replace(inputs, gae_lambda=solution[0]))


@with_stored_limits
def fitted_step_gamma(inputs: GaeInputs, claimed: Tensor) -> tuple[float, Tensor] | None:
    """Return the discount of the next values in δ, with the configured discount in the trace."""
    local, trace = LocalEquation(inputs, claimed), inputs.gamma * inputs.gae_lambda
    solution = local.solve(local.left - trace * local.ahead, inputs.next_values)
    if solution is None or not 0 < solution[0] <= MAX_PARAMETER:
        return None
    return solution[0], gae(replace(inputs, gamma=solution[0], gae_lambda=trace / solution[0]))


def fitted_both(place: int) -> FitFunction:
    """Return a joint fit of discount and lambda, which returns the first or the second of them."""

    @with_stored_limits
    def fit(inputs: GaeInputs, claimed: Tensor) -> tuple[float, Tensor] | None:
        if fitted_gamma_explains(inputs, claimed):
            return None
        local = LocalEquation(inputs, claimed)
        solution = local.solve(local.left, inputs.next_values, local.ahead)
        if solution is None or not 0 < solution[0] <= MAX_PARAMETER:
            return None
        pair = solution[0], solution[1] / solution[0]
        if not 0 <= pair[1] <= MAX_PARAMETER:
            return None
        return pair[place], gae(replace(inputs, gamma=pair[0], gae_lambda=pair[1]))

    return fit


def fitted_gamma_explains(inputs: GaeInputs, claimed: Tensor) -> bool:
    """Return True if a single parameter explains the numbers."""
    scale = float(torch.stack([claimed.abs().amax(), inputs.values.abs().amax(), inputs.rewards.abs().amax()]).amax())
    for fit in (fitted_gamma, fitted_lambda):
        result = fit(inputs, claimed)
        if result is not None:
            difference = (result[1] - claimed).abs()[inputs.counted]
            if float(difference.amax()) <= TOLERANCES["fp32"] * scale:
                return True
    return False


def fitted_reward_scale(inputs: GaeInputs, claimed: Tensor) -> tuple[float, Tensor] | None:
    """Return the factor of the rewards for which GAE equals the claimed advantages."""
    local = LocalEquation(inputs, claimed)
    solution = local.solve(_implied_rewards(inputs, local), inputs.rewards)
    if solution is None or not solution[0] > 0:
        return None
    return solution[0], gae(inputs, rewards=solution[0] * inputs.rewards)


def fitted_scale(inputs: GaeInputs, claimed: Tensor) -> tuple[float, Tensor] | None:
    """Return the factor of all advantages, fitted on every second row that counts."""
    right = gae(inputs)
    reference, stored = (column[inputs.counted][::2] for column in (right, claimed))
    square = float(reference @ reference)
    if not square:
        return None
    factor = float(stored @ reference) / square
    return factor, factor * right


def fitted_clip(inputs: GaeInputs, claimed: Tensor) -> tuple[float, Tensor] | None:
    """Return the magnitude at which rewards are clipped."""
    local = LocalEquation(inputs, claimed)
    fitted = _implied_rewards(inputs, local)[local.rows]
    limit = float(fitted.abs().amax()) if fitted.numel() else 0.0
    beyond = inputs.rewards.abs() > limit
    if limit <= 0 or int(beyond.sum()) < MIN_TERMINATIONS:
        return None
    return limit, gae(inputs, rewards=inputs.rewards.clamp(-limit, limit))


def _implied_rewards(inputs: GaeInputs, local: LocalEquation) -> Tensor:
    """Rewards for which the recursion gives the claimed advantages, [T, B]."""
    decay = inputs.gamma * inputs.gae_lambda
    return local.left + inputs.rewards - inputs.gamma * inputs.next_values - decay * local.ahead


def fitted_termination(inputs: GaeInputs, claimed: Tensor, *, constant: bool, cuts_limits: bool = False) -> tuple[float, Tensor] | None:
    """Fit the numbers added to the rewards of terminations: a constant, or numbers within the range of the values.

    The rows of terminations determine these numbers; the other rows, most of them before a termination, decide. `cuts_limits`: nothing
    follows time limits.
    """
    rows = inputs.terminated & inputs.counted
    added = (claimed - inputs.rewards + inputs.values)[rows]
    if len(added) < MIN_TERMINATIONS:
        return None
    if constant:
        value = float(added[::2].mean())
        return value, gae(inputs, rewards=inputs.rewards + value * inputs.terminated)
    scale = float(claimed.abs().amax())
    spread = float(added.amax() - added.amin())
    limits_are_cut = bool(inputs.truncated.any()) and not bool((inputs.next_values * inputs.truncated).any())
    low, high = float(inputs.values.amin()), float(inputs.values.amax())
    bootstrap = torch.zeros_like(inputs.values)
    bootstrap[rows] = added / max(inputs.gamma, 1e-6)
    outside = (bootstrap[rows] < low - (high - low)) | (bootstrap[rows] > high + (high - low))
    some = (added.abs() > 1e-3 * scale).double().mean() > MIN_BOOTSTRAPPED
    if spread <= 1e-3 * scale or bool(outside.any()) or not bool(some) or limits_are_cut != cuts_limits:
        return None
    return float(bootstrap[rows].mean()), gae(inputs, next_values=inputs.next_values + bootstrap)


def _end_together(inputs: GaeInputs) -> bool:
    """Return True if all environments always end together, or the only one after equally many steps, as at a time limit."""
    ends = inputs.terminated
    if ends.shape[1] > 1:
        return bool((ends == ends[:, :1]).all())
    lengths = ends[:, 0].nonzero().flatten().diff()
    return len(lengths) > 1 and bool((lengths == lengths[0]).all())


def fitted_bootstrap(inputs: GaeInputs, claimed: Tensor, *, together: bool) -> tuple[float, Tensor] | None:
    """Return the mean of the values that are added to terminations, and GAE with them, if the environments end together or do not."""
    return fitted_termination(inputs, claimed, constant=False) if _end_together(inputs) == together else None


def fitted_swapped_ends(inputs: GaeInputs, claimed: Tensor) -> tuple[float, Tensor] | None:
    """Return the mean of the values that are added to terminations if nothing follows time limits; None without time limits."""
    if not bool(inputs.truncated.any()):
        return None
    cut = replace(inputs, next_values=inputs.next_values * ~inputs.truncated)
    return fitted_termination(cut, claimed, constant=False, cuts_limits=True)


def fitted_last_value(inputs: GaeInputs, claimed: Tensor) -> tuple[float, Tensor] | None:
    """Return the mean of the values that bootstrap the last step. The last row determines them; all other rows decide."""
    if len(claimed) < MIN_TERMINATIONS or not inputs.gamma or not inputs.gae_lambda:
        return None
    open_ends = ~inputs.ended[-1]
    if not bool((open_ends & ~inputs.ended[-2]).any()):
        return None
    implied = (claimed[-1] - inputs.rewards[-1] + inputs.values[-1]) / inputs.gamma
    next_values = inputs.next_values.clone()
    next_values[-1] = torch.where(open_ends, implied, next_values[-1])
    return float(implied[open_ends].mean()), gae(inputs, next_values=next_values)


def fitted_ends(inputs: GaeInputs, claimed: Tensor) -> tuple[float, Tensor] | None:
    """Return the number of steps whose flag differs, and the advantages with the flags that the claimed numbers imply.

    Each step either ends its episode or continues with the next step's claimed advantage. Misplaced flags hardly change the number of ends;
    a program that cuts episodes on purpose does.
    """
    if inputs.rollouts > 1 or int(inputs.ended.sum()) < MIN_ENDS or not inputs.gamma:
        return None
    ahead = torch.cat([claimed[1:], torch.zeros_like(claimed[:1])])
    ends = [one - inputs.values for one in (inputs.rewards, inputs.bootstrapped_rewards)]
    further = inputs.gamma * (inputs.following + inputs.gae_lambda * ahead)
    cut, goes_on = (
        torch.where((one - claimed).abs() < (other - claimed).abs(), one, other)
        for one, other in (ends, [delta + further for delta in ends])
    )
    flags = (cut - claimed).abs() < (goes_on - claimed).abs()
    differs = int((flags ^ inputs.ended)[inputs.counted].sum())
    surplus = abs(int(flags[inputs.counted].sum()) - int(inputs.ended[inputs.counted].sum()))
    if differs < MIN_ENDS or surplus > max(inputs.ended.shape[1], differs // 3):
        return None
    return float(differs), torch.where(flags, cut, goes_on)


def normalized_whole(inputs: GaeInputs, values: Tensor) -> Tensor:
    """Return advantages minus their mean, divided by their standard deviation, biased or not, over all rows that count."""
    return closest_whole(inputs, *standards(values, values[inputs.counted]))


def fitted_normalized(*names: str, returned: str) -> FitFunction:
    """Return a fit of `gamma`, `gae_lambda` or both to advantages that are normalised over all rows; it returns one of them.

    With A = s C + m, where C are the claimed numbers, the recursion is linear in s, m, γ, γλs and γλm; its solution is refined.
    """

    def fit(inputs: GaeInputs, claimed: Tensor) -> tuple[float, Tensor] | None:
        local = LocalEquation(inputs, claimed)
        goes_on = (~inputs.ended & inputs.counted).to(claimed)
        goes_on[-1] = 0.0
        solution = local.solve(
            inputs.rewards - inputs.values, claimed, torch.ones_like(claimed), -inputs.next_values, -local.ahead, -goes_on
        )
        if solution is None or not solution[0] * solution[2]:
            return None
        near = {"gamma": solution[2], "gae_lambda": solution[3] / (solution[2] * solution[0])}
        fitted = {name: min(max(near[name], 0.0), 1.0) for name in names}

        def advantages(**parameters: Any) -> Tensor:
            return normalized_whole(inputs, gae(replace(inputs, **parameters)))

        for _ in range(REFINEMENTS):
            now = advantages(**fitted)
            slopes = [(advantages(**fitted | {name: fitted[name] + PROBE}) - now) / PROBE for name in names]
            step = local.solve(claimed - now, *slopes)
            if step is None or not all(map(math.isfinite, step)):
                return None
            fitted = {name: fitted[name] + change for name, change in zip(names, step, strict=True)}
        inside = all(0 <= value <= MAX_PARAMETER for value in fitted.values())
        others = all(abs(value - getattr(inputs, name)) > OTHER_SETTING for name, value in fitted.items())
        return (fitted[returned], advantages(**fitted)) if inside and others else None

    return fit


def other_rows(inputs: GaeInputs, claimed: Tensor, *, normalized: bool = False) -> tuple[float, Tensor] | None:
    """Return how many rows have another row's number, and the correct numbers in the order of the claimed numbers."""
    counted, results = inputs.counted, []
    if int(counted.sum()) < MIN_ROWS:
        return None
    own = gae(inputs)
    for right in standards(own, own[counted]) if normalized else [own]:
        moved = claimed.clone()
        moved[counted] = ranked(claimed[counted], right[counted])
        results.append((float((moved != right)[counted].sum()), moved))
    return min(results, key=lambda one: float((one[1] - claimed)[counted].abs().amax()))


def fitted_weights(inputs: GaeInputs, claimed: Tensor) -> tuple[float, Tensor] | None:
    """Return the share of importance weights that are cut at 1, and V-trace's advantages with the weights that the claimed ones imply.

    With both bounds at 1, v_t = V_t + A_t. Weights other than 0 to 1, and few or no weights at the bound, are of another formula.
    """
    one_step = inputs.rewards + inputs.gamma * (inputs.next_values + LocalEquation(inputs, claimed).ahead) - inputs.values
    rows = (one_step.abs() > UNKNOWN_WEIGHT * one_step.abs().amax()) & inputs.counted
    weights = (claimed / one_step)[rows]
    cut = float((weights - 1).abs().le(CUT_WEIGHT).double().mean()) if len(weights) >= MIN_WEIGHTS else 0.0
    within = bool(((weights > 0) & (weights <= 1 + CUT_WEIGHT)).all())
    return (cut, torch.where(rows, claimed, one_step)) if within and MIN_CUT_SHARE <= cut < 1 - MIN_CUT_SHARE else None


FITTED = (
    variant("importance_weights", "one-step advantages times importance weights that are cut at 1, as in V-trace,")
    .fits("A_t = min(1, π(a_t | s_t) / μ(a_t | s_t)) (r_t + γ v_{t+1} - V_t)", "share of the weights at 1", fitted_weights)
    .cites("IMPALA, 1802.01561, section 4.2"),
    mistake("other_gamma", "GAE with a different discount,")
    .fits("A_t with another γ", "gamma", fitted_gamma, fitted_normalized("gamma", returned="gamma"))
    .advises("Compare the discount that the advantages use with the setting.", source="program: loop-gamma"),
    mistake("other_lambda", "GAE with a different lambda,")
    .fits("A_t with another λ", "lambda", fitted_lambda, fitted_normalized("gae_lambda", returned="gae_lambda"))
    .given(of="gae_lambda")
    .advises("Compare the lambda that the advantages use with the setting.", source="program: loop-lambda"),
    mistake("time_limit_gamma", "GAE with a different discount of the values after time limits,")
    .fits("δ_t = r_t + γ' V(s_{t+1}) - V_t at time limits", "gamma", fitted_limit_gamma)
    .advises("Use one discount for time limits and for all other steps."),
    mistake("step_gamma", "GAE with a different discount of the next values than in the trace,")
    .fits("δ_t = r_t + γ' V(s_{t+1}) - V_t, A_t = δ_t + γλ (1 - end_t) A_{t+1}", "gamma", fitted_step_gamma)
    .advises("Use one discount for the next values and for the trace."),
    mistake("both_gamma", "GAE with a different discount and a different lambda,")
    .fits("A_t with other γ and λ", "gamma", fitted_both(0), fitted_normalized("gamma", "gae_lambda", returned="gamma"))
    .advises("Compare both with the settings."),
    mistake("both_lambda", "the same with")
    .fits("A_t with other γ and λ", "lambda", fitted_both(1), fitted_normalized("gamma", "gae_lambda", returned="gae_lambda"))
    .advises("Compare both with the settings.", source="program: test_advantage_equations"),
    mistake("terminal_reward", "GAE with the same number added to the reward of each termination,")
    .fits("r_t + c at terminations", "c", partial(fitted_termination, constant=True))
    .advises("Compute advantages from the stored rewards."),
    mistake("termination_bootstrapped", "GAE that adds a value after terminations, as if a time limit had ended the episode;")
    .fits("δ_t = r_t + γ V(s_{t+1}) - V_t at terminations", "mean value", partial(fitted_bootstrap, together=False))
    .advises("Bootstrap only if truncated is set and terminated is not.", source="Pardo et al. 2018, 1712.00378"),
    variant("fixed_length_bootstrapped", "GAE that adds a value after ends that come after equally many steps, as time limits do;")
    .fits("δ_t = r_t + γ V(s_{t+1}) - V_t at the ends", "mean value", partial(fitted_bootstrap, together=True))
    .cites("Pardo et al. 2018, 1712.00378"),
    mistake("ends_exchanged", "GAE that adds values after terminations and none after time limits: the two flags are swapped;")
    .fits("δ_t = r_t + γ V(s_{t+1}) - V_t at terminations, r_t - V_t at time limits", "mean value", fitted_swapped_ends)
    .advises("`step` returns (observation, reward, terminated, truncated, info): bootstrap only after truncations.")
    .cites("https://gymnasium.farama.org/api/env/#gymnasium.Env.step"),
    mistake("other_last_value", "GAE that bootstraps the last step with other values;")
    .fits("δ_T = r_T + γ x - V_T", "their mean", fitted_last_value)
    .given(doubtful_without="values")
    .advises("Evaluate the critic at the observation after the last step, with the weights and states of the rollout."),
    mistake("other_ends", "GAE with the ends of episodes in different steps than the environments returned;")
    .fits("A_t = δ_t + γλ (1 - d_t) A_{t+1} with flags d that are not the ends", "differing steps", fitted_ends)
    .advises("Compare the flags that the advantages use with the flags that `env.step` returns, step by step and in each environment.")
    .cites("program: script-ends_of_rollout_before"),
    mistake("other_rows", "GAE of other rows;")
    .fits("A_j in row i", "rows that differ", other_rows, partial(other_rows, normalized=True))
    .given(doubtful_without="order")
    .advises("Index advantages with the rows of the observations and actions, and shuffle all columns by the same permutation."),
    mistake("reward_clip", "GAE of rewards clipped to [-c, c],")
    .fits("δ_t = clip(r_t, -c, c) + γ V_{t+1} - V_t", "c", fitted_clip)
    .advises("If you clip rewards, clip them in a wrapper of the environment, so that everything learns from the same rewards."),
    mistake("scaled", "GAE times a factor,")
    .fits("A_t = c GAE_t", "c", fitted_scale)
    .advises("Look for a factor after the advantages are computed; normalised advantages do not need one."),
    variant("reward_scale", "GAE of scaled rewards,")
    .fits("δ_t = c r_t + γ V_{t+1} - V_t", "factor", fitted_reward_scale)
    .cites("2005.12729, section 3, reward scaling"),
)
"""Explanations with a parameter."""
