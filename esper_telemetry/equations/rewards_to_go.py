"""Sums of rewards that multiply log-probabilities in programs without a critic: published variants and mistakes.

They are explanations of the advantages: with values of 0 and lambda 1, GAE is the discounted sum of rewards to the end of the episode. Each
sum may be stored as it is, without its mean, or normalised over the batch. Shapes: T steps, B environments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from esper_telemetry.core.lazy import Tensor, torch
from esper_telemetry.equations.advantage_fits import MAX_PARAMETER, LocalEquation, fitted_gamma
from esper_telemetry.equations.advantage_mistakes import ZERO_ADVICE
from esper_telemetry.equations.equation import Hypothesis, mistake, variant
from esper_telemetry.equations.gae import STD_EPS, GaeInputs, closest_whole, gae, in_each_rollout, is_standard, rows_that_count
from esper_telemetry.metrics.statistics import discounted_sums

WILLIAMS = "Williams 1992, REINFORCE; Sutton & Barto 2018, section 13.3"


def _summed(sums: Callable[[GaeInputs], Tensor | None]) -> Callable[[GaeInputs], Tensor | None]:
    """Return the sums as they are, minus their mean, or normalised, whichever is closest to the numbers of the program."""

    @in_each_rollout
    def compute(inputs: GaeInputs) -> Tensor | None:
        own = sums(inputs)
        if own is None:
            return None
        rows = rows_that_count(own, inputs.valid)
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
        .advises(
            "Sum the rewards from each step to the end of its episode: append the running sum, not the reward.",
            source="program: reinforce-immediate",
        ),
        mistake("alone_across_ends", "sums of rewards that continue over the ends of episodes")
        .predicts("A_t = r_t + γ A_{t+1}", _summed(_across_ends))
        .advises("Set the running sum to 0 at the end of each episode.", source="program: reinforce-across_ends"),
        mistake("alone_ends_late", "sums of rewards with the ends of episodes one step late")
        .predicts("A_t = r_t + γ (1 - end_{t-1}) A_{t+1}", _summed(_ends_late))
        .advises("Store the end of a step with its reward, after `env.step`.", source="program: reinforce-ends_late"),
        mistake("alone_undiscounted", "sums of rewards without the discount that the program sets")
        .predicts("A_t = Σ_k r_{t+k}", _summed(lambda inputs: None if inputs.gamma == 1 else gae(inputs, decay=1.0)))
        .advises("Multiply the running sum by gamma, or remove the setting.", source="program: reinforce-undiscounted"),
        mistake("alone_rewards_discounted", "sums of rewards in which the discount multiplies the rewards, not the sums")
        .predicts("A_t = γ r_t + A_{t+1}", lambda x: gae(x, rewards=x.gamma * x.rewards, decay=1.0))
        .advises("Multiply the running sum by gamma: R = r + gamma * R.", source="program: reinforce-rewards_discounted"),
        mistake("alone_reversed", "sums of rewards in reverse order of time")
        .predicts("A_t = Σ_k γ^k r_{T-t+k}", _summed(_reversed))
        .advises("Insert each sum at the front of the list, or reverse the list after the loop.", source="program: reinforce-reversed"),
        mistake("alone_past", "sums of the rewards before each step, not after it")
        .predicts("A_t = Σ_k γ^k r_{t-k}", _summed(_from_the_start))
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
        if one.name != "alone_reversed" and not is_standard(inputs.claimed + inputs.values, inputs.valid):
            return None
        none = torch.zeros_like(inputs.values)
        rewards_alone = replace(inputs, values=none, next_values=none, following=none, gae_lambda=1.0)
        own = sums(replace(rewards_alone, claimed=inputs.claimed + inputs.values))
        return None if own is None else own - inputs.values

    equation = f"{one.equation.partition(', ')[0].replace('A_t', 'A_t + V_t', 1)}, perhaps normalised"
    name, says = one.name.replace("alone", "sums"), f"{one.says}, minus the values"
    return replace(one, name=name, says=says, needs="has_critic").predicts(equation, compute)


SUMS_MINUS_VALUES = tuple(
    _minus_values(one)
    for one in SUMS
    if one.name in {"alone_immediate", "alone_across_ends", "alone_ends_late", "alone_reversed", "alone_past"}
)
"""Explanations of the advantages of programs with a critic that sum rewards to the end of each episode."""
