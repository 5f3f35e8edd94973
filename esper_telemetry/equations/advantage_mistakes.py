"""Mistakes and published variants of generalised advantages.

Every function here takes `GaeInputs` and returns float64 [T, B]. Some mistakes need a number that the columns lack, such as the reward
before the first step. Then `closest` takes the candidate closest to each environment's claimed numbers, and all other rows decide.

Shapes: T steps, B environments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from operator import attrgetter

from esper_telemetry.core.lazy import Tensor, torch
from esper_telemetry.equations.comparison import other_readings
from esper_telemetry.equations.equation import mistake, variant
from esper_telemetry.equations.gae import NEAR, STD_EPS, GaeInputs, closest, closest_whole, gae, in_each_rollout, standards
from esper_telemetry.metrics.statistics import discounted_sums

FEW_ROWS = 0.06
"""Share of the rows in episodes without an end, below which the value after the last step hardly matters."""

MAX_ENV_SHIFTS = 8
"""Number of neighbouring environments whose ends are compared with the claimed advantages."""


# ends of episodes


def _with_ends(inputs: GaeInputs, *flags: Tensor) -> Tensor | None:
    """Return GAE with other flags for the ends of episodes, the closest of several; None if no episode ends, or no flag is changed.

    The flags stop bootstrap and trace, or the trace only. A trainer may add the value of a time limit's last state to the reward. The
    trace may run through rows that do not count.
    """
    others = [cut for cut in flags if not torch.equal(cut, inputs.ended)]
    if not others or not bool(inputs.ended.any()):
        return None
    candidates: list[Tensor] = []
    bases = [inputs] if inputs.valid is None else [inputs, replace(inputs, valid=None)]
    for cut, base in product(others, bases):
        goes_on = inputs.following * ~cut
        candidates += [
            gae(base, rewards=inputs.bootstrapped_rewards, next_values=goes_on, cut=cut),
            gae(base, next_values=goes_on, cut=cut),
            gae(base, cut=cut),
        ]
    return closest(inputs, *candidates)


def _ends_ignored(inputs: GaeInputs) -> Tensor | None:
    """GAE that ignores ends in the trace, or also in the bootstrap, possibly with the values after time limits."""
    never = torch.zeros_like(inputs.ended)
    runs_on, following = _with_ends(inputs, never), torch.where(inputs.terminated, inputs.following, inputs.next_values)
    return None if runs_on is None else closest(inputs, runs_on, gae(inputs, next_values=following, cut=never))


def _terminations_ignored(inputs: GaeInputs) -> Tensor | None:
    limits = inputs.ended & ~inputs.terminated
    if not bool(limits.any()) or not bool(inputs.terminated.any()):
        return None
    return gae(inputs, next_values=torch.where(inputs.terminated, inputs.following, inputs.next_values), cut=limits)


def _ends_inverted(inputs: GaeInputs) -> Tensor | None:
    """GAE that continues only at ends; the value of the state after an end may be unknown, so the claimed number stands there."""
    continued, errors = _with_ends(inputs, ~inputs.ended), inputs.rewards - inputs.values
    beyond = (inputs.claimed - errors).abs()[inputs.ended]
    if continued is None or bool(inputs.ended.all()) or float(beyond.max()) <= NEAR * float(inputs.claimed.abs().max()):
        return continued
    return closest(inputs, continued, torch.where(inputs.ended, inputs.claimed, errors))


def _ends_late(inputs: GaeInputs) -> Tensor | None:
    """GAE with ends one step late; the first flag belongs to the previous step, and the last flag is often correct."""
    late = inputs.ended.roll(1, 0)
    return _with_ends(inputs, *_with_rows(late, (0, (False, True)), (-1, (late[-1], inputs.ended[-1]))))


def _ends_early(inputs: GaeInputs) -> Tensor | None:
    """GAE with ends one step early; the last flag belongs to the next step."""
    return _with_ends(inputs, *_with_rows(inputs.ended.roll(-1, 0), (-1, (False, True, inputs.ended[-1]))))


@in_each_rollout
def _ends_shared(inputs: GaeInputs) -> Tensor | None:
    """GAE in which the end of an episode in any environment, or in the first, ends the episodes of all environments."""
    if inputs.ended.shape[1] == 1:
        return None
    anywhere = inputs.ended.any(1, keepdim=True).expand_as(inputs.ended)
    return _with_ends(inputs, anywhere, inputs.ended[:, :1].expand_as(inputs.ended))


def _ends_of_others(inputs: GaeInputs) -> Tensor | None:
    """GAE in which each environment has the ends of another environment; the flags of the last step are often correct."""
    envs = inputs.ended.shape[1] // inputs.rollouts
    ended = inputs.ended.unflatten(1, (inputs.rollouts, envs))
    shifts = {shift % envs for shift in range(-(MAX_ENV_SHIFTS // 2), MAX_ENV_SHIFTS // 2 + 1)} - {0}
    moved = [ended.roll(shift, 2).flatten(1) for shift in sorted(shifts)]
    flags = [one for own in moved for one in _with_rows(own, (-1, (own[-1], inputs.ended[-1])))]
    return _with_ends(inputs, *flags) if flags else None


def _with_rows(flags: Tensor, *rows: tuple[int, tuple[Tensor | bool, ...]]) -> list[Tensor]:
    """Return copies of the flags with each combination of values in these rows."""
    copies = []
    for combination in product(*(contents for _, contents in rows)):
        copy = flags.clone()
        for (row, _), content in zip(rows, combination, strict=True):
            copy[row] = content
        copies.append(copy)
    return copies


def _last_end_ignored(inputs: GaeInputs) -> Tensor | None:
    if not inputs.last_known or not bool(inputs.ended[-1].any()):
        return None
    goes_on, next_values = inputs.following * ~inputs.ended, inputs.next_values.clone()
    goes_on[-1] = next_values[-1] = inputs.following[-1]
    return closest_whole(
        inputs, gae(inputs, next_values=next_values), gae(inputs, rewards=inputs.bootstrapped_rewards, next_values=goes_on)
    )


# bootstraps


def _next_episode_bootstrap(inputs: GaeInputs) -> Tensor | None:
    """GAE whose bootstrap at every end is the value of the next episode's first state; the trace ends as it should."""
    if not bool(inputs.terminated.any()):
        return None
    everywhere = inputs.following
    return closest(
        inputs,
        gae(inputs, next_values=everywhere),
        gae(inputs, rewards=inputs.bootstrapped_rewards, next_values=everywhere),
        gae(inputs, next_values=torch.where(inputs.terminated, everywhere, inputs.next_values)),
    )


def _current_value_bootstrap(inputs: GaeInputs) -> Tensor:
    """GAE whose bootstrap is the value of the step's own state: in all rows, or in rows followed by row t + 1."""
    inside = ~inputs.ended
    inside[-1] = False
    return closest_whole(
        inputs,
        gae(inputs, next_values=inputs.values * ~inputs.terminated),
        gae(inputs, next_values=torch.where(inside, inputs.values, inputs.next_values)),
    )


def _time_limit_no_end(inputs: GaeInputs) -> Tensor | None:
    if not bool(inputs.truncated.any()):
        return None
    following = torch.where(inputs.truncated, inputs.following, inputs.next_values)
    return closest(
        inputs,
        gae(inputs, next_values=following, cut=inputs.terminated),
        gae(inputs, cut=inputs.terminated),
        gae(inputs, rewards=inputs.bootstrapped_rewards, next_values=following, cut=inputs.terminated),
    )


def _bootstrapped(
    places: Callable[[GaeInputs], Tensor], value: Callable[[GaeInputs], Tensor | float]
) -> Callable[[GaeInputs], Tensor | None]:
    """Return GAE with these values, [T, B] or a number, after the steps at these places [T, B]; None if there are no such steps."""

    def compute(inputs: GaeInputs) -> Tensor | None:
        after = places(inputs)
        return gae(inputs, next_values=torch.where(after, value(inputs), inputs.next_values)) if bool(after.any()) else None

    return compute


_limits = attrgetter("truncated")


def _open_ends(inputs: GaeInputs) -> Tensor:
    """The last steps that did not end their episodes."""
    last = torch.zeros_like(inputs.ended)
    last[-1] = ~inputs.ended[-1]
    return last


def _no_last_bootstrap(inputs: GaeInputs, *, few: bool) -> Tensor | None:
    """Return GAE without the value after the last step; None unless few or more rows, as given, belong to episodes without an end."""
    has_end = inputs.ended.flip(0).cummax(0).values.flip(0)
    is_few = float((~has_end).double().mean()) < FEW_ROWS
    return _bootstrapped(_open_ends, lambda _: 0.0)(inputs) if is_few is few else None


def _last_row_zero(inputs: GaeInputs) -> Tensor | None:
    """Return GAE with 0 in the last row, which the other rows may continue from; None for a single row."""
    if len(inputs.rewards) < 2:
        return None
    alone, rewards = gae(inputs), inputs.rewards.clone()
    alone[-1] = 0.0
    rewards[-1] = inputs.values[-1] - inputs.gamma * inputs.next_values[-1]
    return closest(inputs, alone, gae(inputs, rewards=rewards))


def _monte_carlo_cut(inputs: GaeInputs) -> Tensor:
    next_values = inputs.next_values.clone()
    next_values[-1] *= inputs.ended[-1]
    return gae(replace(inputs, next_values=next_values), decay=inputs.gamma)


def _v_trace(inputs: GaeInputs) -> Tensor:
    ahead = torch.zeros_like(inputs.values)
    ahead[:-1] = gae(inputs)[1:]
    return gae(inputs, decay=0.0) + inputs.gamma * ahead * ~inputs.ended


# order and environments


def _forward(inputs: GaeInputs) -> Tensor:
    """GAE, or sums of rewards minus the values. The flag that cuts a sum is of the step itself, or of the step before."""
    goes_on = (~inputs.ended).flip(0)
    errors, paid = (
        [discounted_sums(column.flip(0), factor * one).flip(0) for one in (goes_on, goes_on.roll(-1, 0))]
        for column, factor in ((gae(inputs, decay=0.0), inputs.gamma * inputs.gae_lambda), (inputs.rewards, inputs.gamma))
    )
    return closest_whole(inputs, *errors, *(one - inputs.values for one in paid))


@in_each_rollout
def _axes_swapped(inputs: GaeInputs) -> Tensor | None:
    turned = [reading(gae(inputs)) for reading in other_readings(inputs.values.shape)]
    return closest_whole(inputs, *turned) if turned else None


@in_each_rollout
def _returns_swapped(inputs: GaeInputs) -> Tensor | None:
    turned = [reading(gae(inputs) + inputs.values) - inputs.values for reading in other_readings(inputs.values.shape)]
    return closest_whole(inputs, *turned) if turned else None


@in_each_rollout
def _along_environments(inputs: GaeInputs) -> Tensor | None:
    if inputs.values.shape[1] == 1:
        return None
    delta = gae(inputs, decay=0.0)
    decay = inputs.gamma * inputs.gae_lambda * ~inputs.ended
    next_env = replace(inputs, next_values=_ahead(inputs, inputs.values.t()).t() * ~inputs.terminated)
    other = gae(next_env, decay=0.0)
    return closest_whole(inputs, discounted_sums(delta.t(), decay.t()).t(), discounted_sums(other.t(), decay.t()).t())


@in_each_rollout
def _chained(inputs: GaeInputs) -> Tensor | None:
    """GAE of all environments as one sequence, ordered by step or by environment."""
    if inputs.values.shape[1] == 1:
        return None
    goes_on = ~inputs.ended
    decay = inputs.gamma * inputs.gae_lambda * goes_on
    right = gae(inputs, decay=0.0)
    candidates: list[Tensor] = []
    for turned in (False, True):
        values = inputs.values.t() if turned else inputs.values
        flat = _ahead(inputs, values.reshape(-1)).view_as(values)
        chain = inputs.bootstrapped_rewards - inputs.values + inputs.gamma * goes_on * (flat.t() if turned else flat)
        for delta in (right, chain):
            parts = (delta.t(), decay.t()) if turned else (delta, decay)
            flow = discounted_sums(*(part.reshape(-1) for part in parts)).view_as(values)
            candidates.append(flow.t() if turned else flow)
    return closest_whole(inputs, *candidates)


def _ahead(inputs: GaeInputs, values: Tensor) -> Tensor:
    """Values of the next entry along the first axis; the last entry is the last next value of the rollout."""
    return torch.cat([values[1:], inputs.next_values[-1:, -1:].reshape(1).expand_as(values[:1])])


@in_each_rollout
def _environment_mean(inputs: GaeInputs) -> Tensor | None:
    if inputs.values.shape[1] == 1:
        return None
    right = gae(inputs)
    return right.mean(1, keepdim=True).expand_as(right)


@in_each_rollout
def _broadcast_mean(inputs: GaeInputs) -> Tensor | None:
    """Returns minus the mean value, or the mean return minus values: means over one axis of a matrix of all pairs."""
    returns = gae(inputs) + inputs.values
    if returns.numel() == 1:
        return None
    candidates = []
    for dims in ((0, 1), (1,), (0,)):
        means = returns.mean(dims, keepdim=True), inputs.values.mean(dims, keepdim=True)
        candidates += [means[0] - inputs.values, returns - means[1]]
    return closest_whole(inputs, *candidates)


# rewards


def _rewards_late(inputs: GaeInputs) -> Tensor | None:
    """GAE from the previous step's rewards; the first row keeps its claimed advantage, because its reward is not in the rollout.

    None if rewards are constant: only the first row would decide, because shifted rewards are the same.
    """
    if _constant(inputs.rewards):
        return None
    shifted = [gae(inputs, rewards=rewards) for rewards in _of_stored(inputs, lambda rewards: rewards.roll(1, 0))]
    for one in shifted:
        one[0] = inputs.claimed[0]
    return closest_whole(inputs, *shifted)


def _rewards_early(inputs: GaeInputs) -> Tensor | None:
    """GAE from the next step's rewards; the reward after the last step is fitted to its row. None if rewards are constant."""
    if _constant(inputs.rewards):
        return None
    shifted = _of_stored(inputs, lambda rewards: rewards.roll(-1, 0))
    for one in shifted:
        one[-1] = inputs.claimed[-1] - inputs.gamma * inputs.next_values[-1] + inputs.values[-1]
    return closest_whole(inputs, *(gae(inputs, rewards=one) for one in shifted))


def _constant(rewards: Tensor) -> bool:
    return torch.equal(rewards[1:], rewards[:-1])


def _of_rewards(change: Callable[[Tensor], Tensor]) -> Callable[[GaeInputs], Tensor | None]:
    """Return GAE of changed rewards; None if only the values after time limits change, because other mistakes change them too."""

    def compute(inputs: GaeInputs) -> Tensor | None:
        if torch.equal(change(inputs.rewards), inputs.rewards):
            return None
        return closest_whole(inputs, *(gae(inputs, rewards=one) for one in _of_stored(inputs, change)))

    return compute


def _of_stored(inputs: GaeInputs, change: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Return rewards changed before the value of a time limit's last state is added, and rewards changed after."""
    within = change(inputs.bootstrapped_rewards) - inputs.gamma * inputs.next_values * inputs.truncated
    return change(inputs.rewards), within


def _one_reward(inputs: GaeInputs, claimed: Tensor) -> tuple[float, Tensor] | None:
    """Return the number that replaces all rewards; None unless the rewards differ from each other."""
    if _constant(inputs.rewards):
        return None
    none = torch.zeros_like(inputs.rewards)
    base, slope = gae(inputs, rewards=none), gae(inputs, rewards=none + 1, values=none, next_values=none)
    size = float((slope * (claimed - base)).sum() / slope.square().sum())
    return size, base + size * slope


@in_each_rollout
def _rewards_swapped(inputs: GaeInputs) -> Tensor | None:
    results = [_of_rewards(reading)(inputs) for reading in other_readings(inputs.values.shape)]
    present = [result for result in results if result is not None]
    return closest_whole(inputs, *present) if present else None


@in_each_rollout
def _ends_swapped(inputs: GaeInputs) -> Tensor | None:
    """GAE of ends, and possibly of rewards, with [T, B] read as [B, T] or the reverse."""
    results = []
    for reading in other_readings(inputs.values.shape):
        ended = reading(inputs.ended)
        if not torch.equal(ended, inputs.ended):
            both = replace(inputs, rewards=reading(inputs.rewards))
            rewards = (one for base in (inputs, both) for one in (base.rewards, base.bootstrapped_rewards))
            results += [gae(inputs, rewards=one, next_values=inputs.following * ~ended, cut=ended) for one in rewards]
    return closest_whole(inputs, *results) if results else None


# what is stored instead


@in_each_rollout
def normalized(inputs: GaeInputs) -> Tensor:
    """GAE minus its mean, divided by its standard deviation, biased or not, over all rows that count."""
    right = gae(inputs)
    return closest_whole(inputs, *standards(right, right[inputs.counted], right))


@in_each_rollout
def _normalized_returns(inputs: GaeInputs) -> Tensor:
    """Discounted rewards to the end of each episode, normalised over the rows that count, biased or not, minus the values.

    At time limits the values that follow may be added.
    """
    rewards = [inputs.rewards, inputs.bootstrapped_rewards] if bool(inputs.truncated.any()) else [inputs.rewards]
    sums = [discounted_sums(one, inputs.gamma * ~inputs.ended) for one in rewards]
    return closest_whole(inputs, *(one - inputs.values for own in sums for one in standards(own, own[inputs.counted])))


def _normalized_returns_over_limits(inputs: GaeInputs) -> Tensor | None:
    """The same of sums that only terminations end; None without time limits."""
    limited = bool(inputs.truncated[:-1].any())
    return _normalized_returns(replace(inputs, ended=inputs.terminated)) if limited else None


def _moved_and_scaled(change: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[GaeInputs], Tensor | None]:
    """Return the result of `change` for GAE and its mean and standard deviation, biased or not, over the rows that count."""

    @in_each_rollout
    def compute(inputs: GaeInputs) -> Tensor:
        right = gae(inputs)
        rows = right[inputs.counted]
        moments = [torch.std_mean(rows, correction=correction) for correction in (0, 1)]
        return closest_whole(inputs, *(change(right, mean, std + STD_EPS) for std, mean in moments))

    return compute


def _without_signs(inputs: GaeInputs) -> Tensor | None:
    right = gae(inputs)
    if not bool(inputs.claimed.any()):
        return None
    return closest_whole(inputs, right.abs(), right.square(), right.clamp(min=0.0))


def _normalized_along(dim: int) -> Callable[[GaeInputs], Tensor | None]:
    """Return the estimate that normalises over the steps of each environment (`dim` 0) or the environments of each step (1)."""

    @in_each_rollout
    def compute(inputs: GaeInputs) -> Tensor | None:
        size = inputs.values.shape[dim]
        if inputs.values.shape[1] == 1 or inputs.valid is not None:
            return None
        right = gae(inputs)
        stds = [right.std(dim, correction=c, keepdim=True) for c in (0, 1) if size - c > 1]
        return closest_whole(inputs, *((right - right.mean(dim, keepdim=True)) / (std + STD_EPS) for std in stds))

    return compute


def _stale(inputs: GaeInputs) -> Tensor | None:
    """The previous rollout's advantages, computed by GAE or claimed by the trainer, in the environments that are known."""
    result = inputs.claimed.clone()
    if inputs.rollouts > 1:
        envs = result.shape[1] // inputs.rollouts
        before = [gae(inputs), inputs.claimed]
        kept = [torch.cat([result[:, :envs], one[:, :-envs]], 1) for one in before]
        return closest_whole(inputs, *kept)
    previous = inputs.previous
    if previous is None or len(previous.values) != len(result):
        return None
    envs = previous.values.shape[1]
    kept = [torch.cat([one, result[:, envs:]], 1) for one in (gae(previous), previous.claimed)]
    return closest_whole(inputs, *kept)


ZERO_ADVICE = "Look for a normalisation over an axis with one entry, equal rewards less their mean, or a column that is never written."

MISTAKES = (
    mistake("zero", "0 in every row")
    .predicts("A_t = 0", lambda inputs: torch.zeros_like(inputs.claimed) if bool(inputs.rewards.any()) else None)
    .advises(ZERO_ADVICE),
    mistake("ends_ignored", "GAE that continues over the ends of episodes")
    .predicts("A_t = r_t + γ V_{t+1} - V_t + γλ A_{t+1}", _ends_ignored)
    .advises("Multiply the trace, and the bootstrap, by 1 - done.")
    .cites("Huang et al. 2022, The 37 implementation details of PPO"),
    mistake("terminations_ignored", "GAE that continues over terminations but not over time limits")
    .predicts("A_t = δ_t + γλ (1 - truncated_t) A_{t+1}", _terminations_ignored)
    .advises("Also multiply the trace, and the bootstrap, by 1 - terminated."),
    mistake("ends_late", "GAE with the ends of episodes one step late")
    .predicts("A_t = δ_t + γλ (1 - end_{t-1}) A_{t+1}", _ends_late)
    .given(doubtful_without="flags")
    .advises("Take the flag that the step itself returned: if `dones[t]` is the flag before step t, use `dones[t + 1]`.")
    .cites("automl/Mighty#126; vwxyzjn/cleanrl: dones[t + 1], not dones[t], says that step t ended an episode"),
    mistake("ends_early", "GAE with the ends of episodes one step early")
    .predicts("A_t = δ_t + γλ (1 - end_{t+1}) A_{t+1}", _ends_early)
    .given(doubtful_without="flags")
    .advises("Take the flag that the step itself returned: if `dones[t]` belongs to step t, do not use `dones[t + 1]`.")
    .cites("program: loop-dones_after_step"),
    mistake("ends_inverted", "GAE with inverted flags: it continues only at the ends of episodes")
    .predicts("A_t = δ_t + γλ end_t A_{t+1}, δ_t = r_t + γ end_t V_{t+1} - V_t", _ends_inverted)
    .given(unknown_row=True)
    .advises("Multiply by 1 - done, not by done."),
    mistake("ends_shared", "GAE in which the end of one environment's episode ends the episodes of all environments")
    .predicts("A_t = δ_t + γλ (1 - max_b end_tb) A_{t+1}", _ends_shared)
    .advises("Use each environment's own flag: look for `any()` and for shapes that broadcast."),
    mistake("ends_of_others", "GAE with the ends of episodes of other environments")
    .predicts("A_tb = δ_tb + γλ (1 - end_{t,σ(b)}) A_{t+1,b}", _ends_of_others)
    .advises(
        "Keep the order of environments in the flags: look for `roll`, for reshapes and for workers whose results arrive in another order."
    )
    .cites("program: subclass-ends_neighbour"),
    mistake("last_end_ignored", "GAE that bootstraps after the last step although that step ended its episode")
    .predicts("A_T = r_T + γ V(s_{T+1}) - V_T", _last_end_ignored)
    .advises("Multiply the value after the last step by 1 - done of the last step.")
    .cites("vwxyzjn/cleanrl: `next_done` masks the bootstrap of the last step"),
    mistake("next_episode_bootstrap", "GAE that bootstraps ends with the first value of the next episode")
    .predicts("δ_t = r_t + γ V_{t+1} - V_t at ends too", _next_episode_bootstrap)
    .advises("Multiply the next value by 1 - done."),
    mistake("time_limit_as_termination", "GAE that treats time limits as terminations")
    .predicts("δ_t = r_t - V_t at time limits", _bootstrapped(_limits, lambda inputs: 0.0))
    .advises("Add γ times the value of the episode's last observation if a time limit ended the episode.")
    .cites("Pardo et al. 2018, 1712.00378; DLR-RM/stable-baselines3#633"),
    mistake("time_limit_no_end", "GAE that ignores time limits, so that the trace continues into the next episode")
    .predicts("A_t = δ_t + γλ (1 - terminated_t) A_{t+1}", _time_limit_no_end)
    .advises("Cut the trace if terminated or truncated is set, and mask the bootstrap by terminated only.")
    .cites("Pardo et al. 2018, 1712.00378"),
    mistake("time_limit_next_episode", "GAE that bootstraps time limits with the first value of the next episode")
    .predicts("δ_t = r_t + γ V_{t+1} - V_t at time limits", _bootstrapped(_limits, lambda inputs: inputs.following))
    .advises("Use the value of the episode's last observation (`final_observation`), not of the observation after the reset.")
    .cites("Unity-Technologies/ml-agents#574"),
    mistake("time_limit_twice", "GAE that adds the value after a time limit twice")
    .predicts("δ_t = r_t + 2 γ V(s_{t+1}) - V_t at time limits", _bootstrapped(_limits, lambda inputs: 2 * inputs.next_values))
    .advises("Add the value either to the reward or as the next value."),
    mistake("no_last_bootstrap", "GAE without the value after the last step")
    .predicts("δ_T = r_T - V_T", partial(_no_last_bootstrap, few=False))
    .advises("Bootstrap the last step with the value of the state that follows the rollout.")
    .cites("Huang et al. 2022, The 37 implementation details of PPO"),
    mistake("last_row_zero", "GAE except in the last row, which is 0")
    .predicts("A_T = 0", _last_row_zero)
    .advises("Let the loop over steps begin at the last step: its next value is the value after the rollout.")
    .cites("Farama-Foundation/Gymnasium, docs/tutorials/training_agents/vector_a2c.py; PufferAI/PufferLib#445"),
    mistake("old_last_bootstrap", "GAE that bootstraps the last step with the value of the state before it")
    .predicts("δ_T = r_T + γ V_T - V_T", _bootstrapped(_open_ends, lambda inputs: inputs.values))
    .advises("Evaluate the critic at the observation after the last step.")
    .cites("program: loop-bootstrap_old_value"),
    mistake("current_value_bootstrap", "GAE that bootstraps each step with the value of its own state")
    .predicts("δ_t = r_t + γ V_t - V_t", _current_value_bootstrap)
    .advises("The next value is the value in row t + 1."),
    mistake("values_exchanged", "GAE with the value and the next value swapped")
    .predicts("δ_t = r_t + γ V_t - V_{t+1}", lambda inputs: gae(inputs, values=inputs.next_values, next_values=inputs.values))
    .advises("δ_t = r_t + γ V_{t+1} - V_t."),
    mistake("not_flipped", "GAE in reverse order of time")
    .predicts("A_t = GAE_{T-t}", lambda inputs: gae(inputs).flip(0))
    .advises("Reverse the list that the backward loop has filled."),
    mistake("forward", "the recursion of GAE run forward in time")
    .predicts("A_t = δ_t + γλ (1 - end_t) A_{t-1}", _forward)
    .advises("Loop over `reversed(range(T))`.", source="program: loop-forward"),
    mistake("exchanged", "GAE with gamma and lambda swapped")
    .predicts("δ_t = r_t + λ V_{t+1} - V_t", lambda inputs: gae(inputs, gamma=inputs.gae_lambda))
    .advises("Look at the order of the arguments."),
    mistake("undiscounted_bootstrap", "GAE whose bootstrap is not discounted")
    .predicts("δ_t = r_t + V_{t+1} - V_t", lambda inputs: gae(inputs, gamma=1.0))
    .advises("Multiply the next value by gamma."),
    mistake("rewards_discounted", "GAE in which the discount multiplies the rewards, not the next values")
    .predicts(
        "δ_t = γ r_t + V_{t+1} - V_t, A_t = δ_t + λ A_{t+1}", lambda x: gae(x, rewards=x.gamma * x.rewards, gamma=1.0, decay=x.gae_lambda)
    )
    .advises("Multiply the running sum by gamma: R = r + gamma * R."),
    mistake("trace_without_gamma", "GAE whose trace decays by lambda only")
    .predicts("A_t = δ_t + λ A_{t+1}", lambda inputs: gae(inputs, decay=inputs.gae_lambda))
    .advises("Multiply the trace by gamma times lambda."),
    mistake("sign", "GAE with the opposite sign")
    .predicts("A_t = -GAE_t", lambda inputs: -gae(inputs))
    .advises("Advantages are returns minus values.", source="program: bundled-adv_sign"),
    mistake("absolute", "GAE with negative numbers made positive, or 0")
    .predicts("A_t = |GAE_t|, GAE_t² or max(GAE_t, 0)", _without_signs)
    .advises("Keep the signs: an action that is worse than expected must become less likely.")
    .cites("program: subclass-abs"),
    mistake("rewards_late", "GAE from the previous step's rewards")
    .predicts("δ_t = r_{t-1} + γ V_{t+1} - V_t", _rewards_late)
    .given(unknown_row=True)
    .advises("Store each reward in the row of the action that earned it.", source="program: loop-reward_shift"),
    mistake("rewards_early", "GAE from the next step's rewards")
    .predicts("δ_t = r_{t+1} + γ V_{t+1} - V_t", _rewards_early)
    .given(unknown_row=True)
    .advises("Store each reward in the row of the action that earned it."),
    mistake("rewards_negated", "GAE of the negative rewards")
    .predicts("δ_t = -r_t + γ V_{t+1} - V_t", _of_rewards(lambda rewards: -rewards))
    .advises("Rewards are maximised; costs need a minus sign."),
    mistake("rewards_clipped", "GAE of rewards clipped to [-1, 1]")
    .predicts("δ_t = clip(r_t, -1, 1) + γ V_{t+1} - V_t", _of_rewards(lambda rewards: rewards.clamp(-1, 1)))
    .advises("If you clip rewards, clip them in a wrapper of the environment, so that everything learns from the same rewards.")
    .cites("Mnih et al. 2015: rewards of Atari are clipped in the environment"),
    mistake("reward_signs", "GAE of the signs of the rewards")
    .predicts("δ_t = sign(r_t) + γ V_{t+1} - V_t", _of_rewards(lambda rewards: rewards.sign()))
    .advises("If you clip rewards, clip them in a wrapper of the environment, so that everything learns from the same rewards.")
    .cites("Mnih et al. 2015: rewards of Atari are clipped in the environment"),
    mistake("rewards_zero", "GAE of rewards that are all 0")
    .predicts("δ_t = γ V_{t+1} - V_t", _of_rewards(lambda rewards: 0.0 * rewards))
    .advises(
        "Do not subtract the mean of the rewards: nothing is left of equal ones. Divide them by a standard deviation, or leave them as "
        "they are."
    )
    .cites("program: test_advantage_equations"),
    mistake("rewards_constant", "GAE of one number in place of all rewards,")
    .fits("δ_t = c + γ V_{t+1} - V_t", "c", _one_reward)
    .advises("Look for what the program does to the rewards before it sums them: they must differ as they do in the environment.")
    .cites("program: test_advantage_equations"),
    mistake("raw_rewards", "GAE of the rewards before normalisation")
    .predicts("δ_t = raw r_t + γ V_{t+1} - V_t", lambda inputs: gae(inputs, rewards=inputs.raw_rewards))
    .given(needs="raw_rewards")
    .advises("Store the normalised rewards, or train the critic on the raw rewards too.")
    .cites("program: test_advantage_equations"),
    mistake("returns_stored", "returns: the values were not subtracted")
    .predicts("A_t = GAE_t + V_t", lambda inputs: gae(inputs) + inputs.values)
    .advises("Subtract the values, or store returns and advantages separately."),
    mistake("immediate_rewards", "immediate rewards instead of sums of rewards")
    .predicts("A_t = r_t - V_t, or r_t", lambda x: closest_whole(x, x.rewards - x.values, x.rewards))
    .advises("Sum the rewards from each step to the end of its episode."),
    mistake("values_missing", "discounted sums of rewards, as if all values were 0")
    .predicts(
        "A_t = Σ_k (γλ)^k r_{t+k}",
        lambda inputs: gae(inputs, values=torch.zeros_like(inputs.values), next_values=torch.zeros_like(inputs.values)),
    )
    .advises("Fill the values before the advantages are computed."),
    mistake("monte_carlo_cut", "discounted rewards to the end of the rollout, minus values, without a bootstrap after the last step")
    .predicts("A_t = Σ_k γ^k r_{t+k} - V_t", lambda inputs: None if inputs.gae_lambda == 1 else _monte_carlo_cut(inputs))
    .advises("Bootstrap the last step with the value of the state that follows the rollout."),
    mistake("rewards_to_go", "discounted rewards to go without a baseline")
    .predicts("A_t = Σ_k γ^k r_{t+k}", lambda x: closest_whole(x, _monte_carlo_cut(x) + x.values, gae(x, decay=x.gamma) + x.values))
    .advises("Subtract the values."),
    mistake(
        "normalized_returns_over_limits",
        "discounted rewards that run across time limits into the next episode, normalised over the whole batch, minus the values",
    )
    .predicts("A_t = (Σ_k γ^k r_{t+k} - mean) / std - V_t", _normalized_returns_over_limits)
    .advises("End the sums where the program itself ends an episode, too, as at a limit of its length.")
    .cites("program: test_advantage_equations"),
    mistake("other_units", "normalised returns minus the values of a critic that learns returns that are not normalised")
    .predicts("A_t = (R_t - mean) / std - V_t, with V_t trained on R_t")
    .advises("Normalise the returns for both the advantages and the critic's loss, or for neither.")
    .cites("program: test_script_targets"),
    mistake("axes_swapped", "GAE, reshaped with steps and environments swapped")
    .predicts("A[t, b] = GAE.reshape(B, T)[b, t]", _axes_swapped)
    .advises("Transpose before you reshape: `reshape` and `view` do not move entries.")
    .cites("program: loop-axes_gae"),
    mistake("returns_swapped", "returns that were reshaped with steps and environments swapped, minus the values")
    .predicts("A[t, b] = (GAE + V).reshape(B, T)[b, t] - V[t, b]", _returns_swapped)
    .advises("Flatten returns, observations and values in the same order: `reshape` and `view` do not move entries."),
    mistake("rewards_swapped", "GAE of rewards that were reshaped with steps and environments swapped")
    .predicts("δ[t, b] = r.reshape(B, T)[b, t] + γ V_{t+1} - V_t", _rewards_swapped)
    .advises("Transpose before you reshape: `reshape` and `view` do not move entries.")
    .cites("program: subclass-axes_rewards"),
    mistake("ends_swapped", "GAE of ends, possibly also of rewards, that were reshaped with steps and environments swapped")
    .predicts("end[t, b] = ends.reshape(B, T)[b, t]", _ends_swapped)
    .advises("Transpose before you reshape: `reshape` and `view` do not move entries."),
    mistake("along_environments", "the recursion of GAE over environments instead of steps")
    .predicts("A_tb = δ_tb + γλ A_t,b+1", _along_environments)
    .advises("Loop over the axis of time."),
    mistake("chained", "GAE of all environments as one sequence")
    .predicts("A_n = δ_n + γλ A_{n+1} over the flattened rollout", _chained)
    .advises("Compute advantages before the rollout is flattened."),
    mistake("environment_mean", "GAE averaged over the environments")
    .predicts("A_tb = mean_b GAE_tb", _environment_mean)
    .advises("Keep the axis of environments: look for `mean()` and for shapes that broadcast."),
    mistake("broadcast_mean", "returns minus values, with one of them averaged over all rows")
    .predicts("A_i = mean_j (R_j - V_i)", _broadcast_mean)
    .advises("Print the shapes of returns and values: [N] minus [N, 1] is [N, N].")
    .cites("PacktPublishing/Deep-Reinforcement-Learning-Hands-On#74"),
    mistake("normalized_parts", "GAE normalised over each environment")
    .predicts("A_tb = (GAE_tb - mean_b) / std_b", _normalized_along(0))
    .advises("Normalise over all rows of the batch or of the minibatch.")
    .cites("Huang et al. 2022, detail 7, normalises over the minibatch"),
    mistake("normalized_steps", "GAE normalised over the environments of each step")
    .predicts("A_tb = (GAE_tb - mean_t) / std_t", _normalized_along(1))
    .advises("Normalise over all rows of the batch or of the minibatch.")
    .cites("Huang et al. 2022, detail 7, normalises over the minibatch"),
    mistake("std_alone", "GAE divided by its standard deviation, without subtracting its mean")
    .predicts("A_t = GAE_t / std", _moved_and_scaled(lambda right, mean, std: right / std))
    .advises("Subtract the mean."),
    mistake("mean_alone", "GAE minus its mean, not divided by its standard deviation")
    .predicts("A_t = GAE_t - mean", _moved_and_scaled(lambda right, mean, std: right - mean))
    .advises("Divide by the standard deviation."),
    mistake("variance", "GAE minus its mean, divided by its variance")
    .predicts("A_t = (GAE_t - mean) / std²", _moved_and_scaled(lambda right, mean, std: (right - mean) / std.square()))
    .advises("Divide by the standard deviation."),
    mistake("precedence", "GAE minus the ratio of its mean and its standard deviation")
    .predicts("A_t = GAE_t - mean / std", _moved_and_scaled(lambda right, mean, std: right - mean / std))
    .advises("Put `advantages - mean` in parentheses."),
    mistake("stale", "the previous rollout's advantages")
    .predicts("A_t = GAE_t of rollout k - 1", _stale)
    .advises("Compute advantages after the rollout is complete, and clear the buffer after each update.")
    .cites("program: bundled-stale_adv"),
    mistake("uncleared", "the first entries of a longer array, which begins with earlier updates")
    .predicts("A_t = A'_t of an array A' of all updates so far")
    .advises("Clear every list of a rollout after its update: the rewards, too.")
    .cites("program: test_script_rollouts"),
)
VARIANTS = (
    variant("few_without_bootstrap", "GAE without the value after the last step, on which only a few rows depend")
    .predicts("δ_T = r_T - V_T, with less than 6 % of the rows in episodes without an end", partial(_no_last_bootstrap, few=True))
    .cites("https://github.com/nikhilbarhate99/PPO-PyTorch, PPO.update"),
    variant("lambda_one", "returns minus values (lambda = 1)")
    .predicts("A_t = Σ_k γ^k r_{t+k} + γ^n V(s_{t+n}) - V_t", lambda inputs: gae(inputs, decay=inputs.gamma))
    .cites("A2C, 1602.01783; 1506.02438, eq. 16"),
    variant("lambda_zero", "one-step TD errors (lambda = 0)")
    .predicts("A_t = r_t + γ V_{t+1} - V_t", lambda inputs: gae(inputs, decay=0.0))
    .cites("1506.02438, eq. 16"),
    variant("v_trace", "one-step advantages with lambda-returns as next values, as in V-trace")
    .predicts("A_t = r_t + γ v_{t+1} - V_t", _v_trace)
    .cites("IMPALA, 1802.01561, section 4.2"),
    variant("time_limit_current_value", "GAE that bootstraps time limits with the value of the last state that was acted on")
    .predicts("δ_t = r_t + γ V_t - V_t at time limits", _bootstrapped(_limits, lambda inputs: inputs.values))
    .cites("leggedrobotics/rsl_rl, Rudin et al. 2021, 2109.11978"),
    variant("time_limits_end", "GAE in which time limits end episodes as terminations do")
    .predicts("δ_t = r_t - V_t at time limits")
    .cites("vwxyzjn/cleanrl, ppo.py; Pardo et al. 2018, 1712.00378, shows when it does harm"),
    variant("normalized", "GAE that was normalised over the whole batch")
    .predicts("A = (GAE - mean) / std", normalized)
    .given(of="scale")
    .cites("openai/spinningup, PPOBuffer.get; leggedrobotics/rsl_rl, RolloutStorage.compute_returns"),
    variant("normalized_returns", "discounted rewards to the end of each episode, normalised over the whole batch, minus the values")
    .predicts("A_t = (Σ_k γ^k r_{t+k} - mean) / std - V_t", _normalized_returns)
    .cites("https://github.com/nikhilbarhate99/PPO-PyTorch, PPO.update"),
)
