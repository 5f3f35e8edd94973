"""The equation of a rollout's advantages, and `check_gae`.

Programs without a critic multiply log-probabilities by sums of rewards. Their variants and mistakes are explanations of the advantages:
with values of 0 and lambda 1, GAE is the discounted sum of rewards to the end of the episode. Each sum may be stored as it is, without its
mean, or normalised over the batch.

Shapes: T steps, B environments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from esper_telemetry.core.arrays import ArrayLike, as_mask, as_number, as_tensor
from esper_telemetry.core.lazy import Tensor, inference_mode, torch
from esper_telemetry.core.requirements import checked_arguments
from esper_telemetry.equations.advantage_fits import FITTED, MAX_PARAMETER, LocalEquation, fitted_gamma, normalized_whole
from esper_telemetry.equations.advantage_mistakes import MISTAKES, VARIANTS, ZERO_ADVICE, normalized
from esper_telemetry.equations.comparison import EquationCheck, compare, distinguished, explained, unchecked
from esper_telemetry.equations.equation import Equation, Explanation, Hypothesis, mistake, variant
from esper_telemetry.equations.gae import STD_EPS, GaeInputs, closest_whole, following_values, gae, in_each_rollout, is_standard
from esper_telemetry.metrics.statistics import discounted_sums, same_shape

TINY_DEVIATION = 1e-12
"""Lower bound of the standard deviation before dividing by it."""

MAX_SCALE_PASSES = 60
"""Largest number of iterations that solve for the scale of normalised advantages and an unknown row; each is several times closer."""

WILLIAMS = "Williams 1992, REINFORCE; Sutton & Barto 2018, section 13.3"


def _summed(sums: Callable[[GaeInputs], Tensor | None]) -> Callable[[GaeInputs], Tensor | None]:
    """Return the sums as they are, minus their mean, or normalised, whichever is closest to the numbers of the program."""

    @in_each_rollout
    def compute(inputs: GaeInputs) -> Tensor | None:
        own = sums(inputs)
        if own is None:
            return None
        rows = own[inputs.counted]
        stds = [rows.std(correction=correction) for correction in (0, 1) if len(rows) > correction]
        centred = own - rows.mean()
        return closest_whole(inputs, own, centred, *(centred / (std + STD_EPS) for std in stds))

    return compute


def _of_episodes(inputs: GaeInputs) -> Tensor:
    """Sums of all rewards of each episode, discounted to its first step or not discounted, in each of its steps."""

    def whole(gamma: float) -> Tensor:
        sums, goes_on = gae(inputs, decay=gamma), ~inputs.ended[:-1]
        first = [sums[0]]
        for own, inside in zip(sums[1:], goes_on, strict=True):
            first.append(torch.where(inside, first[-1], own))
        return torch.stack(first)

    return closest_whole(inputs, whole(inputs.gamma), whole(1.0))


def _discounted_from_the_start(inputs: GaeInputs) -> Tensor:
    """Sums to the end of the episode whose rewards are discounted by the step of the episode, not by the distance."""
    sums, age = gae(inputs), torch.zeros_like(inputs.rewards)
    for t in range(1, len(age)):
        age[t] = torch.where(inputs.ended[t - 1], 0.0, age[t - 1] + 1)
    return sums * inputs.gamma**age


def _immediate(inputs: GaeInputs) -> Tensor | None:
    """Rewards of single steps; None for numbers that are all 0, which equal rewards minus their mean are too."""
    return inputs.rewards if bool(inputs.claimed.any()) else None


def _across_ends(inputs: GaeInputs) -> Tensor | None:
    never = torch.zeros_like(inputs.ended)
    return gae(inputs, cut=never) if bool(inputs.ended[:-1].any()) else None


def _ends_late(inputs: GaeInputs) -> Tensor | None:
    """Sums that end one step late: the last reward of an episode is part of the next one's sums."""
    late = inputs.ended.roll(1, 0)
    late[0] = False
    return gae(inputs, cut=late) if bool(late.any()) else None


def _from_the_start(inputs: GaeInputs) -> Tensor:
    """Sums of the rewards before and in each step."""
    goes_on = inputs.gamma * (~inputs.ended).roll(1, 0).double()
    goes_on[0] = 0.0
    return discounted_sums(inputs.rewards.flip(0), goes_on.flip(0)).flip(0)


def _reversed(inputs: GaeInputs) -> Tensor:
    """The sums of each episode, or of the whole rollout, in reverse order of time."""
    sums, order = gae(inputs), torch.empty_like(inputs.ended, dtype=torch.long)
    for env, ended in enumerate(inputs.ended.unbind(1)):
        ends = [*(ended[:-1].nonzero().flatten() + 1).tolist(), len(ended)]
        starts = [0, *ends[:-1]]
        order[:, env] = torch.cat([torch.arange(b - 1, a - 1, -1) for a, b in zip(starts, ends, strict=True)])
    return closest_whole(inputs, sums.gather(0, order.to(sums.device)), sums.flip(0))


def _fitted_gamma(inputs: GaeInputs, claimed: Tensor) -> tuple[float, Tensor] | None:
    """Return the discount of sums that are raw, or normalised: s A_t + m = r_t + γ (s A_{t+1} + m), linear in s, m, γ s and γ m."""
    if not is_standard(claimed, inputs.valid):
        return fitted_gamma(inputs, claimed)
    local, goes_on = LocalEquation(inputs, claimed), (~inputs.ended).to(claimed)
    goes_on[-1] = 0.0
    solution = local.solve(inputs.rewards, claimed, torch.ones_like(claimed), -local.ahead, -goes_on)
    gamma = solution[2] / solution[0] if solution is not None and solution[0] else -1.0
    predicted = _summed(gae)(replace(inputs, gamma=gamma)) if 0 <= gamma <= MAX_PARAMETER else None
    return None if predicted is None else (gamma, predicted)


SUMS = tuple(
    one.given(needs="alone")
    for one in (
        variant("alone", "discounted rewards to the end of each episode, without a critic")
        .predicts("A_t = Σ_k γ^k r_{t+k}, minus their mean or normalised", _summed(gae))
        .cites(WILLIAMS),
        variant("alone_whole_episodes", "the rewards of whole episodes, in each of their steps")
        .predicts("A_t = Σ_k γ^k r_k", _summed(_of_episodes))
        .cites("openai/spinningup, 1_simple_pg.py"),
        variant("alone_from_start", "rewards to the end of each episode, discounted from its first step")
        .predicts("A_t = γ^t Σ_k γ^k r_{t+k}", _summed(_discounted_from_the_start))
        .cites("Sutton & Barto 2018, section 13.3"),
        mistake("alone_zero", "0 in every row")
        .predicts("A_t = 0", lambda inputs: torch.zeros_like(inputs.claimed) if bool(inputs.rewards.any()) else None)
        .advises(ZERO_ADVICE, source="program: test_rewards_to_go"),
        mistake("alone_immediate", "rewards of single steps instead of their sums")
        .predicts("A_t = r_t", _summed(_immediate))
        .given(of="sums")
        .advises(
            "Sum the rewards from each step to the end of its episode: append the running sum, not the reward.",
            source="program: reinforce-immediate",
        ),
        mistake("alone_across_ends", "sums of rewards that continue over the ends of episodes")
        .predicts("A_t = r_t + γ A_{t+1}", _summed(_across_ends))
        .given(of="sums")
        .advises("Set the running sum to 0 at the end of each episode.", source="program: reinforce-across_ends"),
        mistake("alone_ends_late", "sums of rewards with the ends of episodes one step late")
        .predicts("A_t = r_t + γ (1 - end_{t-1}) A_{t+1}", _summed(_ends_late))
        .given(of="sums")
        .advises("Store the end of a step with its reward, after `env.step`.", source="program: reinforce-ends_late"),
        mistake("alone_undiscounted", "sums of rewards without the discount that the program sets")
        .predicts("A_t = Σ_k r_{t+k}", _summed(lambda inputs: None if inputs.gamma == 1 else gae(inputs, decay=1.0)))
        .advises("Multiply the running sum by gamma, or remove the setting.", source="program: reinforce-undiscounted"),
        mistake("alone_rewards_discounted", "sums of rewards in which the discount multiplies the rewards, not the sums")
        .predicts("A_t = γ r_t + A_{t+1}", lambda x: gae(x, rewards=x.gamma * x.rewards, decay=1.0))
        .advises("Multiply the running sum by gamma: R = r + gamma * R.", source="program: reinforce-rewards_discounted"),
        mistake("alone_reversed", "sums of rewards in reverse order of time")
        .predicts("A_t = Σ_k γ^k r_{T-t+k}", _summed(_reversed))
        .given(of="order")
        .advises("Insert each sum at the front of the list, or reverse the list after the loop.", source="program: reinforce-reversed"),
        mistake("alone_past", "sums of the rewards before each step, not after it")
        .predicts("A_t = Σ_k γ^k r_{t-k}", _summed(_from_the_start))
        .given(of="sums")
        .advises("Loop over the rewards from the last step to the first.", source="program: reinforce-past"),
        mistake("alone_sign", "sums of rewards with the opposite sign")
        .predicts("A_t = -Σ_k γ^k r_{t+k}", _summed(lambda inputs: -gae(inputs)))
        .advises("Minimise the negative log-probabilities times the sums of rewards.", source="program: test_rewards_to_go"),
        mistake("alone_gamma", "sums of rewards with a different discount,")
        .fits("A_t = r_t + γ' A_{t+1}", "gamma", _fitted_gamma)
        .advises("Compare the discount of the sums with the setting.", source="program: reinforce-gamma"),
    )
)
"""Explanations of the advantages of programs without a critic; no others are compared with them."""


def _minus_values(one: Hypothesis) -> Hypothesis:
    """Return the mistake for programs with a critic: their advantages are the normalised sums minus the values.

    GAE with lambda 1 has mistakes of its own for sums that are not normalised, except for their order.
    """
    sums = one.compute
    assert sums is not None

    def compute(inputs: GaeInputs) -> Tensor | None:
        if one.of != "order" and not is_standard(inputs.claimed + inputs.values, inputs.valid):
            return None
        none = torch.zeros_like(inputs.values)
        rewards_alone = replace(inputs, values=none, next_values=none, following=none, gae_lambda=1.0)
        own = sums(replace(rewards_alone, claimed=inputs.claimed + inputs.values))
        return None if own is None else own - inputs.values

    equation = f"{one.equation.partition(', ')[0].replace('A_t', 'A_t + V_t', 1)}, perhaps normalised"
    name, says = one.name.replace("alone", "sums"), f"{one.says}, minus the values"
    return replace(one, name=name, says=says, needs="has_critic").predicts(equation, compute)


SUMS_MINUS_VALUES = tuple(_minus_values(one) for one in SUMS if one.of in ("sums", "order"))
"""Explanations of the advantages of programs with a critic that sum rewards to the end of each episode."""


ADVANTAGES = Equation(
    name="advantages",
    rank=20,
    quantity="the advantages",
    equation="A_t = δ_t + γλ (1 - end_t) A_{t+1}, δ_t = r_t + γ V(s_{t+1}) - V(s_t)",
    source="1506.02438, eq. 16",
    inputs="rewards, values, ends, and the value after the last step",
    check="check_gae",
    shown_by="gae_programs",
    compute=gae,
    # loops in float32 have a relative error of 2e-7 with values near 0; with values near 1000 and no discount it is 2e-6 over 128 steps and
    # 2e-5 over 2048 steps
    tolerance=1.0,
    hypotheses=(*MISTAKES, *SUMS_MINUS_VALUES, *VARIANTS, *FITTED, *SUMS),
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
        rewards, values, advantages: [T, B]; [T] for one environment, like all other columns. Rewards are used for learning and do not
                include the value of a time limit's last state.
        gamma, gae_lambda: settings of the estimate.
        ended: bool: the step taken at t ended its episode; `terminated` or `truncated` if it is None.
        terminated: bool: the episode ended by termination; if it is None, all ends that are not `truncated`. If both are None, ends with
            nonzero `next_values` may be time limits.
        truncated: bool: the episode ended by a time limit.
        next_values: the critic's estimate of the state that follows t; ignored after termination.
        last_values: [B], the critic's estimates of the states after the last step. Without `next_values`, values after time limits are
            unknown, and rows from the start of an episode to its time limit are left out. With `next_values`, they show how the trainer
            handled a last step that ended an episode.
        raw_rewards: before scaling; None if they are `rewards`.
        valid: bool; None if every entry counts.
        precision: of the trainer's arithmetic: fp32, tf32, bf16 or fp16.
        tolerance: largest relative error; by precision if it is None.

    Raises:
        ValueError: if shapes disagree, flags of the ends are missing, neither `next_values` nor `last_values` is given,
                or a setting is outside 0 to 1.
    """
    for name, setting in (("gamma", gamma), ("gae_lambda", gae_lambda)):
        if not 0 <= as_number(setting, name) <= 1:
            raise ValueError(f"{name} must be between 0 and 1, got {setting!r}")
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
        cut = (ends & ~terminations).double()  # the next value is unknown throughout an episode that ends in such a step
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
    # `ended` does not show which ends are time limits: an end with a nonzero next value may be one
    inputs = replace(inputs, next_values=following, terminated=ends & (following == 0))
    other = compare_advantages(following_values(inputs, last), precision=precision, tolerance=tolerance)
    # unless the values after the ends belong to the next episodes, not to last states
    of_next_episode = bool((following[:-1] == estimates[1:])[ends[:-1]].all())
    return check if not other.explained or (check.explanations and of_next_episode) else other


def compare_advantages(
    inputs: GaeInputs, *, known: Tensor | None = None, precision: str | None = None, tolerance: float | None = None
) -> EquationCheck:
    """Return the comparison of the claimed advantages with GAE in the rows that count.

    Args:
        known: [T, B], bool: rows whose advantage the columns determine; None if all rows are known.
    """
    counted = inputs.valid if known is None else known if inputs.valid is None else inputs.valid & known
    if counted is not None and not bool(counted.any()):
        reason = "no row counts" if known is None else "the values after time limits are not known"
        return unchecked(ADVANTAGES, reason)
    settings: dict[str, Any] = {"valid": counted, "precision": precision, "tolerance": tolerance}
    columns = (inputs.rewards, inputs.values, inputs.next_values)
    # not a constant, as every module constant that is an equation is listed as a separate equation
    equation = replace(ADVANTAGES, hypotheses=SUMS) if inputs.alone else ADVANTAGES
    check = compare(equation, inputs, inputs.claimed, magnitudes=columns, **settings)
    if inputs.alone and check.matches:
        return explained(ADVANTAGES, "alone")
    check = distinguished(check)
    if check.matches or check.explanations or inputs.alone or not is_standard(inputs.claimed, inputs.valid):
        return check
    std = gae(inputs)[inputs.counted].std(correction=0).clamp(min=TINY_DEVIATION)
    magnitudes = [column / std for column in columns]
    normalized = compare(_of_normalized(), inputs, inputs.claimed, magnitudes=magnitudes, **settings)
    if normalized.matches:  # values that are large next to the spread of the advantages are rounded by more
        return replace(check, explanations=(Explanation(ADVANTAGES["normalized"], normalized.error or 0.0),))
    return replace(check, explanations=distinguished(normalized).explanations)


def _normalized(compute: Callable[[GaeInputs], Tensor | None], *, has_unknown_rewards: bool) -> Callable[[GaeInputs], Tensor | None]:
    """Normalise the prediction of a hypothesis over all rows that count, by the biased or the unbiased standard deviation."""

    def normalized(inputs: GaeInputs) -> Tensor | None:
        # hypotheses choose the candidate closest to the claimed numbers, so the claimed numbers are put on the original scale
        claimed = inputs.claimed[inputs.counted]
        std, mean = torch.std_mean(gae(inputs)[inputs.counted], correction=0)
        values = compute(replace(inputs, claimed=inputs.claimed * std + mean))
        for _ in range(MAX_SCALE_PASSES if has_unknown_rewards else 0):
            if values is None:
                break
            # a row with an unknown reward copies the claimed number, so it depends on the scale, and the scale depends on it
            rows, before = values[inputs.counted], std
            std = ((claimed * rows).mean() - claimed.mean() * rows.mean()) / claimed.var(correction=0)
            mean = rows.mean() - std * claimed.mean()
            values = compute(replace(inputs, claimed=inputs.claimed * std + mean))
            if torch.isclose(before, std, rtol=1e-12, atol=0):
                break
        return None if values is None else normalized_whole(inputs, values)

    return normalized


@cache
def _of_normalized() -> Equation:
    """The equation of advantages that a program normalises over the whole batch without keeping the originals."""
    hypotheses = [
        replace(one, compute=_normalized(one.compute, has_unknown_rewards=one.unknown_row))
        for one in ADVANTAGES.hypotheses
        if one.compute is not None
    ]
    fits = [replace(one, fit=one.normalized_fit) for one in ADVANTAGES.hypotheses if one.normalized_fit is not None]
    return replace(ADVANTAGES, compute=normalized, hypotheses=(*hypotheses, *fits))


def _grid(name: str, column: Tensor) -> Tensor:
    """Return the column as [T, B]."""
    if column.dim() not in (1, 2):
        raise ValueError(f"{name} must have shape [T, B], or [T] for one environment, got {list(column.shape)}")
    return column.unsqueeze(1) if column.dim() == 1 else column


def _ends(flags: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Steps that ended an episode, and steps that ended it by termination."""
    ended, terminated, truncated = (flags.get(name) for name in ("ended", "terminated", "truncated"))
    given = [part for part in (terminated, truncated) if part is not None]
    if ended is None:
        if not given:
            raise ValueError("give ended, or terminated and truncated: the steps that ended an episode")
        ended = given[0] if len(given) == 1 else given[0] | given[1]
    if terminated is None:
        terminated = ended if truncated is None else ended & ~truncated
    return ended, terminated & ended
