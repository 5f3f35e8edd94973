"""Generalised advantages, and what known mistakes compute in their place.

Every function here takes `GaeInputs` and returns float64 [T, B]. A mistake that needs a number which the columns lack, such as the reward
before the first step, leaves one choice per environment: `closest` takes the one that is nearest to the trainer's numbers, and all other
rows decide.

Shapes: T steps, B environments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import wraps
from itertools import product
from typing import Any

from esper_telemetry.core.lazy import Tensor, torch
from esper_telemetry.metrics.statistics import discounted_sums

MAX_ENV_SHIFTS = 8
"""Other environments whose ends are compared with the claimed advantages, of many: the nearest on both sides."""

NEAR = 1e-3
"""Largest difference from the claimed advantages, next to the largest of them, of a candidate that is taken for them."""

STD_EPS = 1e-8
"""Added to a standard deviation that is divided by, as in Stable-Baselines3 and CleanRL."""


@dataclass(frozen=True, slots=True)
class GaeInputs:
    """Columns of a rollout, [T, B] float64 or bool, and the settings of the estimate.

    Attributes:
        rewards: as they are learned from, without the value of a time limit's last state.
        values, next_values: of the states before and after each step; `next_values` is 0 after termination.
        ended, terminated: the step ended its episode; it did so by termination.
        following: values of the states in the next row: where an episode ended, of the first state of the next one. Where the last
            step ended its episode and nothing says what followed, the value with which the claimed advantage would go on.
        claimed: the trainer's advantages.
        valid: rows that count; None where all do.
        raw_rewards: before scaling; None where they are `rewards`.
        previous: the rollout before, or its first environment; None where it is not there.
        rollouts: rollouts that stand side by side, the environments of one after those of the other.
        last_known: the last row of `following` is the trainer's.
    """

    rewards: Tensor
    values: Tensor
    next_values: Tensor
    ended: Tensor
    terminated: Tensor
    following: Tensor
    claimed: Tensor
    gamma: float
    gae_lambda: float
    valid: Tensor | None = None
    raw_rewards: Tensor | None = None
    previous: GaeInputs | None = None
    rollouts: int = 1
    last_known: bool = True

    @property
    def truncated(self) -> Tensor:
        """Steps that a time limit ended."""
        return self.ended & ~self.terminated

    @property
    def bootstrapped_rewards(self) -> Tensor:
        """Rewards with the value of a time limit's last state in them, as Stable-Baselines3 stores them."""
        return self.rewards + self.gamma * self.next_values * self.truncated


def following_values(inputs: GaeInputs, last_values: Tensor | None) -> GaeInputs:
    """Return the inputs with `following` from the values of the next rows and those after the last step, [B], where they are known."""
    last = inputs.next_values[-1]
    if last_values is not None:
        last = last_values
    elif inputs.gamma:
        implied = (inputs.claimed[-1] - inputs.bootstrapped_rewards[-1] + inputs.values[-1]) / inputs.gamma
        last = torch.where(inputs.ended[-1], implied, last)
    return replace(inputs, following=torch.cat([inputs.values[1:], last[None]]), last_known=last_values is not None)


def gae(
    inputs: GaeInputs,
    *,
    rewards: Tensor | None = None,
    values: Tensor | None = None,
    next_values: Tensor | None = None,
    cut: Tensor | None = None,
    gamma: float | None = None,
    decay: float | None = None,
) -> Tensor:
    """Return generalised advantages [T, B] (1506.02438, eq. 16), with other columns where they are given; 0 in rows that do not count.

    Args:
        cut: steps at which the trace ends; those that ended an episode where it is None.
        gamma: discount of the next value; the trace keeps its own.
        decay: of the trace at each step; gamma times lambda where it is None.
    """
    rewards = inputs.rewards if rewards is None else rewards
    values = inputs.values if values is None else values
    next_values = inputs.next_values if next_values is None else next_values
    delta = rewards + (inputs.gamma if gamma is None else gamma) * next_values - values
    goes_on = ~(inputs.ended if cut is None else cut)
    if inputs.valid is not None:
        delta, goes_on = torch.where(inputs.valid, delta, 0.0), goes_on & inputs.valid
    return discounted_sums(delta, (inputs.gamma * inputs.gae_lambda if decay is None else decay) * goes_on)


def closest(inputs: GaeInputs, *candidates: Tensor) -> Tensor:
    """Return in each environment the candidate, [T, B], that is nearest to the trainer's advantages."""
    stacked = torch.stack(candidates)
    difference = (stacked - inputs.claimed).abs().nan_to_num(torch.inf)
    if inputs.valid is not None:
        difference = difference * inputs.valid
    best = difference.amax(1).argmin(0)
    return stacked.gather(0, best.expand(1, *inputs.claimed.shape)).squeeze(0)


def closest_whole(inputs: GaeInputs, *candidates: Tensor) -> Tensor:
    """Return the candidate, [T, B], that is nearest to the trainer's advantages in all environments.

    Where none is near, that is the one of which a multiple and an offset are: the advantages may be normalised.
    """
    valid = None if inputs.valid is None else inputs.valid.reshape(-1, 1)
    flat = replace(inputs, claimed=inputs.claimed.reshape(-1, 1), valid=valid)
    columns = [one.reshape(-1, 1) for one in candidates]
    best = closest(flat, *columns)
    limit = NEAR * float(rows_that_count(flat.claimed, valid).abs().max())
    if float(rows_that_count(best - flat.claimed, valid).abs().max()) > limit:
        rows = torch.stack([rows_that_count(one, valid) for one in (flat.claimed, *columns)])
        best = columns[int(torch.corrcoef(rows)[0, 1:].nan_to_num(-1.0).argmax())]
    return best.view_as(inputs.claimed)


def at(mask: Tensor, values: Tensor | float, otherwise: Tensor) -> Tensor:
    """Return `values` where the mask is set, else the other ones."""
    return torch.where(mask, values, otherwise)


def in_each_rollout(estimate: Callable[[GaeInputs], Tensor | None]) -> Callable[[GaeInputs], Tensor | None]:
    """Return the estimate of each rollout by itself, for one that mixes environments; None where it applies to no rollout."""

    @wraps(estimate)
    def compute(inputs: GaeInputs) -> Tensor | None:
        if inputs.rollouts == 1:
            return estimate(inputs)
        columns = {one.name: getattr(inputs, one.name) for one in fields(inputs)}
        parts = {name: one.chunk(inputs.rollouts, 1) for name, one in columns.items() if isinstance(one, Tensor)}
        own: list[dict[str, Any]] = [{name: part[k] for name, part in parts.items()} for k in range(inputs.rollouts)]
        rollouts = [replace(inputs, rollouts=1, **part) for part in own]
        estimates = [estimate(one) for one in rollouts]
        if all(one is None for one in estimates):
            return None
        pairs = zip(rollouts, estimates, strict=True)
        return torch.cat([gae(rollout) if one is None else one for rollout, one in pairs], 1)

    return compute


# ends of episodes


def with_ends(inputs: GaeInputs, *flags: Tensor) -> Tensor | None:
    """Return GAE in which other flags say where episodes end, the nearest of several; None where no episode ends, or none are other flags.

    The flags stop bootstrap and trace. A trainer adds the value of a time limit's last state to the reward, or not; or it uses the
    wrong flags for the trace alone; and the trace may run through rows that do not count.
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


def ends_ignored(inputs: GaeInputs) -> Tensor | None:
    """GAE in which no episode ends, in the trace or in the bootstrap too, but perhaps for the values after time limits."""
    never = torch.zeros_like(inputs.ended)
    runs_on, following = with_ends(inputs, never), at(inputs.terminated, inputs.following, inputs.next_values)
    return None if runs_on is None else closest(inputs, runs_on, gae(inputs, next_values=following, cut=never))


def terminations_ignored(inputs: GaeInputs) -> Tensor | None:
    """GAE that runs on over terminations alone: time limits end their episodes."""
    limits = inputs.ended & ~inputs.terminated
    if not bool(limits.any()) or not bool(inputs.terminated.any()):
        return None
    return gae(inputs, next_values=at(inputs.terminated, inputs.following, inputs.next_values), cut=limits)


def ends_late(inputs: GaeInputs) -> Tensor | None:
    """GAE whose ends come one step late; the first flag belongs to the step before, and the last one is often right."""
    late = inputs.ended.roll(1, 0)
    return with_ends(inputs, *_with_rows(late, (0, (False, True)), (-1, (late[-1], inputs.ended[-1]))))


def ends_early(inputs: GaeInputs) -> Tensor | None:
    """GAE whose ends come one step early; the last flag belongs to the step after."""
    return with_ends(inputs, *_with_rows(inputs.ended.roll(-1, 0), (-1, (False, True, inputs.ended[-1]))))


def ends_inverted(inputs: GaeInputs) -> Tensor | None:
    """GAE that goes on at the ends of episodes only."""
    return with_ends(inputs, ~inputs.ended)


@in_each_rollout
def ends_shared(inputs: GaeInputs) -> Tensor | None:
    """GAE in which the end of an episode in any environment, or in the first, ends those of all."""
    if inputs.ended.shape[1] == 1:
        return None
    anywhere = inputs.ended.any(1, keepdim=True).expand_as(inputs.ended)
    return with_ends(inputs, anywhere, inputs.ended[:, :1].expand_as(inputs.ended))


def ends_of_others(inputs: GaeInputs) -> Tensor | None:
    """GAE in which each environment has the ends of another one of the same rollout; those of the last step are often right."""
    envs = inputs.ended.shape[1] // inputs.rollouts
    ended = inputs.ended.unflatten(1, (inputs.rollouts, envs))
    shifts = {shift % envs for shift in range(-(MAX_ENV_SHIFTS // 2), MAX_ENV_SHIFTS // 2 + 1)} - {0}
    moved = [ended.roll(shift, 2).flatten(1) for shift in sorted(shifts)]
    flags = [one for own in moved for one in _with_rows(own, (-1, (own[-1], inputs.ended[-1])))]
    return with_ends(inputs, *flags) if flags else None


def _with_rows(flags: Tensor, *rows: tuple[int, tuple[Tensor | bool, ...]]) -> list[Tensor]:
    """Return copies of the flags with each combination of contents in these rows."""
    variants = [flags]
    for row, contents in rows:
        copies = []
        for variant in variants:
            for content in contents:
                copy = variant.clone()
                copy[row] = content
                copies.append(copy)
        variants = copies
    return variants


def last_end_ignored(inputs: GaeInputs) -> Tensor | None:
    """GAE that bootstraps after the last step also where that ended its episode."""
    if not inputs.last_known or not bool(inputs.ended[-1].any()):
        return None
    goes_on, next_values = inputs.following * ~inputs.ended, inputs.next_values.clone()
    goes_on[-1] = next_values[-1] = inputs.following[-1]
    return closest_whole(
        inputs,
        gae(inputs, next_values=next_values),
        gae(inputs, rewards=inputs.bootstrapped_rewards, next_values=goes_on),
    )


# bootstraps


def next_episode_bootstrap(inputs: GaeInputs) -> Tensor | None:
    """GAE whose bootstrap at every end is the value of the next episode's first state; the trace ends as it should."""
    if not bool(inputs.terminated.any()):
        return None
    everywhere = inputs.following
    return closest(
        inputs,
        gae(inputs, next_values=everywhere),
        gae(inputs, rewards=inputs.bootstrapped_rewards, next_values=everywhere),
        gae(inputs, next_values=at(inputs.terminated, everywhere, inputs.next_values)),
    )


def current_value_bootstrap(inputs: GaeInputs) -> Tensor:
    """GAE whose bootstrap is the value of the step's own state: everywhere, or where the next one is that of row t + 1."""
    inside = ~inputs.ended
    inside[-1] = False
    return closest_whole(
        inputs,
        gae(inputs, next_values=inputs.values * ~inputs.terminated),
        gae(inputs, next_values=at(inside, inputs.values, inputs.next_values)),
    )


def time_limit_next_episode(inputs: GaeInputs) -> Tensor | None:
    """GAE whose bootstrap at a time limit is the value of the next episode's first state; the trace ends there."""
    if not bool(inputs.truncated.any()):
        return None
    return gae(inputs, next_values=at(inputs.truncated, inputs.following, inputs.next_values))


def time_limit_no_end(inputs: GaeInputs) -> Tensor | None:
    """GAE whose trace runs on over time limits."""
    if not bool(inputs.truncated.any()):
        return None
    following = at(inputs.truncated, inputs.following, inputs.next_values)
    return closest(
        inputs,
        gae(inputs, next_values=following, cut=inputs.terminated),
        gae(inputs, cut=inputs.terminated),
        gae(inputs, rewards=inputs.bootstrapped_rewards, next_values=following, cut=inputs.terminated),
    )


def time_limit_bootstrap(value: Callable[[GaeInputs], Tensor | float]) -> Callable[[GaeInputs], Tensor | None]:
    """Return GAE with these values after time limits; it does not apply where no time limit was reached."""

    def compute(inputs: GaeInputs) -> Tensor | None:
        if not bool(inputs.truncated.any()):
            return None
        return gae(inputs, next_values=at(inputs.truncated, value(inputs), inputs.next_values))

    return compute


def last_bootstrap(value: Callable[[GaeInputs], Tensor | float]) -> Callable[[GaeInputs], Tensor | None]:
    """Return GAE with these values, [T, B] or a number, after the last step, unless that ended its episode."""

    def compute(inputs: GaeInputs) -> Tensor | None:
        if bool(inputs.ended[-1].all()):
            return None
        last = torch.zeros_like(inputs.ended)
        last[-1] = ~inputs.ended[-1]
        return gae(inputs, next_values=at(last, value(inputs), inputs.next_values))

    return compute


def monte_carlo_cut(inputs: GaeInputs) -> Tensor:
    """Discounted rewards up to the end of the rollout or of the episode, less values."""
    next_values = inputs.next_values.clone()
    next_values[-1] *= inputs.ended[-1]
    return gae(replace(inputs, next_values=next_values), decay=inputs.gamma)


def rewards_to_go(inputs: GaeInputs) -> Tensor:
    """Discounted rewards without a baseline, with and without a bootstrap of the last value."""
    return closest_whole(
        inputs, monte_carlo_cut(inputs) + inputs.values, gae(inputs, decay=inputs.gamma) + inputs.values
    )


def v_trace(inputs: GaeInputs) -> Tensor:
    """Policy-gradient advantages of V-trace on-policy: r_t + gamma v_{t+1} - V_t, where v are lambda-returns."""
    ahead = torch.zeros_like(inputs.values)
    ahead[:-1] = gae(inputs)[1:]
    return gae(inputs, decay=0.0) + inputs.gamma * ahead * ~inputs.ended


# order and environments


def forward(inputs: GaeInputs) -> Tensor:
    """The recursion from the first step to the last: A_t = delta_t + gamma lambda A_{t-1}."""
    delta = gae(inputs, decay=0.0).flip(0)
    decay = (inputs.gamma * inputs.gae_lambda * ~inputs.ended).flip(0)
    return closest_whole(
        inputs, discounted_sums(delta, decay).flip(0), discounted_sums(delta, decay.roll(-1, 0)).flip(0)
    )  # what stands in the last row of a decay does not matter


@in_each_rollout
def axes_swapped(inputs: GaeInputs) -> Tensor | None:
    """GAE of which [T, B] was read as [B, T], or the other way round."""
    steps, envs = inputs.values.shape
    if 1 in (steps, envs):
        return None
    right = gae(inputs)
    return closest_whole(inputs, right.t().reshape(steps, envs), right.reshape(envs, steps).t())


@in_each_rollout
def along_environments(inputs: GaeInputs) -> Tensor | None:
    """The recursion over environments in place of steps."""
    if inputs.values.shape[1] == 1:
        return None
    delta = gae(inputs, decay=0.0)
    decay = inputs.gamma * inputs.gae_lambda * ~inputs.ended
    next_env = replace(inputs, next_values=_ahead(inputs, inputs.values.t()).t() * ~inputs.terminated)
    other = gae(next_env, decay=0.0)
    return closest_whole(inputs, discounted_sums(delta.t(), decay.t()).t(), discounted_sums(other.t(), decay.t()).t())


@in_each_rollout
def chained(inputs: GaeInputs) -> Tensor | None:
    """GAE of all environments as one sequence: those of a step after each other, or one environment after the other."""
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
    """Values of the next entry along the first axis; the last next value of the rollout ends them."""
    return torch.cat([values[1:], inputs.next_values[-1:, -1:].reshape(1).expand_as(values[:1])])


@in_each_rollout
def environment_mean(inputs: GaeInputs) -> Tensor | None:
    """GAE averaged over environments, the same number in each."""
    if inputs.values.shape[1] == 1:
        return None
    right = gae(inputs)
    return right.mean(1, keepdim=True).expand_as(right)


@in_each_rollout
def broadcast_mean(inputs: GaeInputs) -> Tensor | None:
    """Returns less the mean value, or the mean return less values: means over one axis of a matrix of all pairs."""
    returns = gae(inputs) + inputs.values
    if returns.numel() == 1:
        return None
    candidates = []
    for dims in ((0, 1), (1,), (0,)):
        means = returns.mean(dims, keepdim=True), inputs.values.mean(dims, keepdim=True)
        candidates += [means[0] - inputs.values, returns - means[1]]
    return closest_whole(inputs, *candidates)


# rewards


def rewards_late(inputs: GaeInputs) -> Tensor | None:
    """GAE from the rewards of the step before; the first row, whose reward is not in the rollout, is as claimed.

    None of constant rewards, which are the same in the step before: the first row alone would decide.
    """
    if _constant(inputs.rewards):
        return None
    shifted = [gae(inputs, rewards=rewards) for rewards in _of_stored(inputs, lambda rewards: rewards.roll(1, 0))]
    for one in shifted:
        one[0] = inputs.claimed[0]
    return closest_whole(inputs, *shifted)


def rewards_early(inputs: GaeInputs) -> Tensor | None:
    """GAE from the rewards of the step after; the reward after the last one is that which gives its row. None of constant rewards."""
    if _constant(inputs.rewards):
        return None
    shifted = _of_stored(inputs, lambda rewards: rewards.roll(-1, 0))
    for one in shifted:
        one[-1] = inputs.claimed[-1] - inputs.gamma * inputs.next_values[-1] + inputs.values[-1]
    return closest_whole(inputs, *(gae(inputs, rewards=one) for one in shifted))


def _constant(rewards: Tensor) -> bool:
    return torch.equal(rewards[1:], rewards[:-1])


def of_rewards(change: Callable[[Tensor], Tensor]) -> Callable[[GaeInputs], Tensor | None]:
    """Return GAE of changed rewards; None where only the values after time limits change, which other mistakes change as well."""

    def compute(inputs: GaeInputs) -> Tensor | None:
        if torch.equal(change(inputs.rewards), inputs.rewards):
            return None
        return closest_whole(inputs, *(gae(inputs, rewards=one) for one in _of_stored(inputs, change)))

    return compute


def _of_stored(inputs: GaeInputs, change: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Return changed rewards without the value of a time limit's last state, and those that were changed with it."""
    within = change(inputs.bootstrapped_rewards) - inputs.gamma * inputs.next_values * inputs.truncated
    return change(inputs.rewards), within


@in_each_rollout
def rewards_swapped(inputs: GaeInputs) -> Tensor | None:
    """GAE of rewards of which [T, B] was read as [B, T], or the other way round."""
    results = [of_rewards(reading)(inputs) for reading in _other_readings(inputs)]
    present = [result for result in results if result is not None]
    return closest_whole(inputs, *present) if present else None


@in_each_rollout
def ends_swapped(inputs: GaeInputs) -> Tensor | None:
    """GAE of ends, and perhaps of rewards, of which [T, B] was read as [B, T], or the other way round."""
    results = []
    for reading in _other_readings(inputs):
        ended = reading(inputs.ended)
        if not torch.equal(ended, inputs.ended):
            both = replace(inputs, rewards=reading(inputs.rewards))
            rewards = (one for base in (inputs, both) for one in (base.rewards, base.bootstrapped_rewards))
            results += [gae(inputs, rewards=one, next_values=inputs.following * ~ended, cut=ended) for one in rewards]
    return closest_whole(inputs, *results) if results else None


def _other_readings(inputs: GaeInputs) -> tuple[Callable[[Tensor], Tensor], ...]:
    """Return what changes a column [T, B] into that of exchanged axes; nothing of one step or one environment."""
    steps, envs = inputs.values.shape
    return () if 1 in (steps, envs) else (lambda x: x.t().reshape(steps, envs), lambda x: x.reshape(envs, steps).t())


# what is stored in their place


@in_each_rollout
def normalized(inputs: GaeInputs) -> Tensor:
    """GAE less its mean, over its standard deviation, biased or not, over all rows that count."""
    right = gae(inputs)
    rows = [right] if inputs.valid is None else [right[inputs.valid], right]
    return closest_whole(inputs, *(standard(right, *pair) for pair in product(rows, (0, 1))))


def moved_and_scaled(
    change: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Callable[[GaeInputs], Tensor | None]:
    """Return what `change` makes of GAE, the mean of all rows that count and their standard deviation, biased or not."""

    @in_each_rollout
    def compute(inputs: GaeInputs) -> Tensor:
        right = gae(inputs)
        rows = rows_that_count(right, inputs.valid)
        moments = [torch.std_mean(rows, correction=correction) for correction in (0, 1)]
        return closest_whole(inputs, *(change(right, mean, std + STD_EPS) for std, mean in moments))

    return compute


def without_signs(inputs: GaeInputs) -> Tensor:
    """GAE whose negative numbers have become positive, or 0."""
    right = gae(inputs)
    return closest_whole(inputs, right.abs(), right.square(), right.clamp(min=0.0))


def normalized_along(dim: int) -> Callable[[GaeInputs], Tensor | None]:
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


def rows_that_count(column: Tensor, valid: Tensor | None) -> Tensor:
    """Return the entries [R] of a column in the rows that count; all of them where `valid` is None."""
    return column.flatten() if valid is None else column[valid]


def is_standard(advantages: Tensor, valid: Tensor | None, *, error: float = 1e-2) -> bool:
    """Return True where the rows that count have a standard deviation of 1, biased or not, and a mean of 0, to a tenth of `error`."""
    rows = rows_that_count(advantages, valid)
    if len(rows) < 2 or abs(float(rows.mean())) > error / 10:
        return False
    return min(abs(float(rows.std(correction=correction)) - 1.0) for correction in (0, 1)) < error


def standard(values: Tensor, counted: Tensor, correction: int) -> Tensor:
    """Return the values less the mean of those that count, over their standard deviation; the values where too few count."""
    if counted.numel() <= correction:
        return values
    std, mean = torch.std_mean(counted, correction=correction)
    return (values - mean) / (std + STD_EPS)


def stale(inputs: GaeInputs) -> Tensor | None:
    """The advantages of the rollout before: as GAE gives them, or as the trainer claimed them; in the environments that are there."""
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
