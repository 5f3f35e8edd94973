"""Random rollouts, and loops that compute their advantages, correctly or with one mistake.

Everything is NumPy in float32, as trainers write it, so that the programs share no code with the package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

GAMMA, LAMBDA = 0.97, 0.9


@dataclass
class Columns:
    """A rollout [T, B] as a trainer has it: `final` holds values of the last states of episodes, `last` [B] values after the rollout."""

    rewards: Array
    values: Array
    last: Array
    final: Array
    terminated: Array
    truncated: Array
    gamma: float = GAMMA
    lam: float = LAMBDA

    @property
    def done(self) -> Array:
        return self.terminated | self.truncated

    @property
    def following(self) -> Array:
        return np.concatenate([self.values[1:], self.last[None]])

    @property
    def next_values(self) -> Array:
        """Values of the state that follows, 0 after termination."""
        return np.where(self.truncated, self.final, np.where(self.terminated, 0, self.following)).astype(np.float32)


def random_rollout(
    seed: int, steps: int = 40, envs: int = 4, *, ends: float = 0.12, time_limits: float = 0.5, noise: float = 1.0
) -> Columns:
    """A rollout in which a fraction `ends` of the steps ends episodes, a fraction `time_limits` of them by time limits."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> Array:
        return rng.normal(size=shape).astype(np.float32)

    done = rng.random((steps, envs)) < ends
    limited = rng.random((steps, envs)) < time_limits
    return Columns(
        rewards=normal(steps, envs) * noise + 0.5,
        values=3 * normal(steps, envs) + 1,
        last=3 * normal(envs) + 1,
        final=3 * normal(steps, envs) + 1,
        terminated=done & ~limited,
        truncated=done & limited,
    )


def backward(c: Columns, delta: Array, decay: Array | float) -> Array:
    decay = np.broadcast_to(np.asarray(decay, np.float32), delta.shape)
    advantages = np.zeros_like(delta)
    carried = np.zeros(delta.shape[1:], np.float32)
    for t in reversed(range(len(delta))):
        carried = delta[t] + decay[t] * carried
        advantages[t] = carried
    return advantages


def right(c: Columns) -> Array:
    delta = c.rewards + c.gamma * c.next_values - c.values
    return backward(c, delta, c.gamma * c.lam * ~c.done)


def cleanrl_style(c: Columns, done: Array, rewards: Array | None = None) -> Array:
    """Values of the next row, masked by `done`; the rewards include the values after time limits, as in Stable-Baselines3."""
    rewards = stored_rewards(c) if rewards is None else rewards
    delta = rewards + c.gamma * c.following * ~done - c.values
    return backward(c, delta, c.gamma * c.lam * ~done)


def stored_rewards(c: Columns) -> Array:
    return c.rewards + c.gamma * c.final * c.truncated


def ends_late(c: Columns) -> Array:
    """`dones[t]`, the flag before step t, instead of `dones[t + 1]`; no episode begins in the first row."""
    return cleanrl_style(c, np.concatenate([np.zeros_like(c.done[:1]), c.done[:-1]]))


def ends_late_but_for_the_last(c: Columns) -> Array:
    done = np.concatenate([np.zeros_like(c.done[:1]), c.done[:-1]])
    done[-1] = c.done[-1]
    return cleanrl_style(c, done)


def ends_early(c: Columns) -> Array:
    return cleanrl_style(c, np.concatenate([c.done[1:], c.done[-1:]]))


def ends_ignored(c: Columns) -> Array:
    return cleanrl_style(c, np.zeros_like(c.done))


def terminations_ignored(c: Columns) -> Array:
    next_values = np.where(c.truncated, c.final, c.following)
    return backward(c, c.rewards + c.gamma * next_values - c.values, c.gamma * c.lam * ~c.truncated)


def trace_runs_on(c: Columns) -> Array:
    return backward(c, c.rewards + c.gamma * c.next_values - c.values, c.gamma * c.lam)


def ends_inverted(c: Columns) -> Array:
    return cleanrl_style(c, ~c.done)


def ends_of_any(c: Columns) -> Array:
    return cleanrl_style(c, np.broadcast_to(c.done.any(1, keepdims=True), c.done.shape))


def ends_of_first(c: Columns) -> Array:
    return cleanrl_style(c, np.broadcast_to(c.done[:, :1], c.done.shape))


def ends_in_other_steps(c: Columns) -> Array:
    """The flags of a step in random order."""
    order = np.random.default_rng(11).permutation(len(c.done))
    return cleanrl_style(c, c.done[order])


def last_end_ignored(c: Columns) -> Array:
    done = c.done.copy()
    done[-1] = False
    return cleanrl_style(c, done)


def with_next(c: Columns, next_values: Array, cut: Array | None = None, gamma: float | None = None) -> Array:
    delta = c.rewards + (c.gamma if gamma is None else gamma) * next_values - c.values
    return backward(c, delta, c.gamma * c.lam * ~(c.done if cut is None else cut))


def next_episode_bootstrap(c: Columns) -> Array:
    return with_next(c, c.following)


def time_limit_as_termination(c: Columns) -> Array:
    return with_next(c, np.where(c.done, 0, c.following))


def time_limit_no_end(c: Columns) -> Array:
    """`done = terminated`: values of the next row, masked by termination alone."""
    return with_next(c, np.where(c.terminated, 0, c.following), cut=c.terminated)


def time_limit_trace(c: Columns) -> Array:
    return with_next(c, c.next_values, cut=c.terminated)


def time_limit_next_episode(c: Columns) -> Array:
    return with_next(c, np.where(c.terminated, 0, c.following))


def time_limit_twice(c: Columns) -> Array:
    delta = stored_rewards(c) + c.gamma * c.next_values - c.values
    return backward(c, delta, c.gamma * c.lam * ~c.done)


def time_limit_current_value(c: Columns) -> Array:
    """RSL-RL: `rewards += gamma * values * time_outs`."""
    return cleanrl_style(c, c.done, c.rewards + c.gamma * c.values * c.truncated)


def termination_bootstrapped(c: Columns) -> Array:
    return with_next(c, np.where(c.done, c.final, c.following))


def ends_exchanged(c: Columns) -> Array:
    """The flags of terminations and of time limits are swapped."""
    next_values = np.where(c.terminated, c.final, np.where(c.truncated, 0, c.following)).astype(np.float32)
    return with_next(c, next_values)


def terminal_penalty(c: Columns) -> Array:
    return cleanrl_style(c, c.done, stored_rewards(c) - 5.0 * c.terminated)


def last_row_alone(c: Columns) -> Array:
    """Clears the last row after the loop."""
    advantages = right(c)
    advantages[-1] = 0.0
    return advantages


def without_last_row(c: Columns) -> Array:
    """Begins the loop at the step before the last."""
    delta = c.rewards + c.gamma * c.next_values - c.values
    delta[-1] = 0.0
    return backward(c, delta, c.gamma * c.lam * ~c.done)


def with_last(c: Columns, last: Array | float) -> Array:
    next_values = c.next_values.copy()
    next_values[-1] = np.where(c.done[-1], next_values[-1], last)
    return with_next(c, next_values)


def current_value(c: Columns) -> Array:
    return with_next(c, c.values * ~c.terminated)


def current_value_inside(c: Columns) -> Array:
    """The last row uses the right value, and the reward includes the value after a time limit."""
    inside = ~c.done
    inside[-1] = False
    return with_next(c, np.where(inside, c.values, c.next_values))


def values_exchanged(c: Columns) -> Array:
    return backward(c, c.rewards + c.gamma * c.values - c.next_values, c.gamma * c.lam * ~c.done)


def forward(c: Columns) -> Array:
    delta = c.rewards + c.gamma * c.next_values - c.values
    advantages = np.zeros_like(delta)
    carried = np.zeros_like(delta[0])
    for t in range(len(delta)):
        carried = delta[t] + c.gamma * c.lam * ~c.done[t] * carried
        advantages[t] = carried
    return advantages


def forward_returns(c: Columns) -> Array:
    returns, carried = np.zeros_like(c.rewards), np.zeros_like(c.rewards[0])
    for t in range(len(returns)):
        returns[t] = carried = c.rewards[t] + c.gamma * carried * (~c.done[t - 1] if t else 0)
    return returns - c.values


def forward_with_ends(c: Columns) -> Array:
    delta = c.rewards + c.gamma * c.next_values - c.values
    advantages = np.zeros_like(delta)
    carried = np.zeros_like(delta[0])
    for t in range(len(delta)):
        carried = delta[t] + c.gamma * c.lam * (~c.done[t - 1] if t else 1.0) * carried
        advantages[t] = carried
    return advantages


def with_rewards(c: Columns, rewards: Array) -> Array:
    return backward(c, rewards + c.gamma * c.next_values - c.values, c.gamma * c.lam * ~c.done)


def rewards_late(c: Columns) -> Array:
    return with_rewards(c, np.concatenate([np.full_like(c.rewards[:1], 0.7), c.rewards[:-1]]))


def rewards_early(c: Columns) -> Array:
    return with_rewards(c, np.roll(c.rewards, -1, 0))


def of_stored(c: Columns, rewards: Array, gamma: float) -> Array:
    """Rewards include the values after time limits, as Stable-Baselines3 stores them."""
    delta = rewards + gamma * np.where(c.done, 0, c.following) - c.values
    return backward(c, delta.astype(np.float32), gamma * c.lam * ~c.done)


def trace_by_lambda(c: Columns) -> Array:
    return backward(c, c.rewards + c.gamma * c.next_values - c.values, c.lam * ~c.done)


def settings(c: Columns, gamma: float, lam: float) -> Array:
    return right(Columns(c.rewards, c.values, c.last, c.final, c.terminated, c.truncated, gamma, lam))


def without_values(c: Columns) -> Array:
    return backward(c, c.rewards, c.gamma * c.lam * ~c.done)


def rewards_to_go(c: Columns) -> Array:
    return backward(c, stored_rewards(c), c.gamma * ~c.done)


def monte_carlo_cut(c: Columns) -> Array:
    return rewards_to_go(c) - c.values


def v_trace(c: Columns) -> Array:
    returns = right(c) + c.values
    ahead = np.concatenate([returns[1:], c.last[None]])
    return c.rewards + c.gamma * np.where(c.done, c.next_values, ahead) - c.values


def chained_by_step(c: Columns) -> Array:
    """The rollout was flattened first, so the next row belongs to the next environment."""
    values, rewards, done = (x.reshape(-1, 1) for x in (c.values, stored_rewards(c), c.done))
    following = np.concatenate([values[1:], c.last[-1:, None]])
    delta = rewards + c.gamma * following * ~done - values
    return backward(c, delta, c.gamma * c.lam * ~done).reshape(c.values.shape)


def chained_by_environment(c: Columns) -> Array:
    values, rewards, done = (x.T.reshape(-1, 1) for x in (c.values, stored_rewards(c), c.done))
    following = np.concatenate([values[1:], c.last[-1:, None]])
    delta = rewards + c.gamma * following * ~done - values
    return backward(c, delta, c.gamma * c.lam * ~done).reshape(c.values.T.shape).T


def along_environments(c: Columns) -> Array:
    delta = c.rewards + c.gamma * c.next_values - c.values
    return backward(c, delta.T.copy(), (c.gamma * c.lam * ~c.done).T).T


def broadcast(c: Columns) -> Array:
    """`(returns - values).mean(1)` with returns [N] and values [N, 1]."""
    returns = (right(c) + c.values).reshape(-1)
    result: Array = (returns - c.values.reshape(-1, 1)).mean(1).reshape(c.values.shape)
    return result


def normalize(x: Array, axis: int | None = None, ddof: int = 0) -> Array:
    result: Array = (x - x.mean(axis, keepdims=True)) / (x.std(axis, keepdims=True, ddof=ddof) + 1e-8)
    return result


PROGRAMS: dict[str, list[Callable[[Columns], Array]]] = {
    "ends_ignored": [ends_ignored, trace_runs_on],
    "terminations_ignored": [terminations_ignored],
    "ends_late": [ends_late, ends_late_but_for_the_last],
    "ends_early": [ends_early],
    "ends_inverted": [ends_inverted],
    "ends_shared": [ends_of_any, ends_of_first],
    "ends_of_others": [
        lambda c: cleanrl_style(c, np.roll(c.done, 1, 1)),
        lambda c: cleanrl_style(c, np.roll(c.done, -1, 1)),
        lambda c: backward(c, c.rewards + c.gamma * c.next_values - c.values, c.gamma * c.lam * ~c.done[:, ::-1]),
    ],
    "other_ends": [ends_in_other_steps],
    "zero": [lambda c: 0 * right(c)],
    "absolute": [lambda c: np.abs(right(c)), lambda c: right(c) ** 2, lambda c: right(c).clip(0)],
    "last_end_ignored": [last_end_ignored],
    "next_episode_bootstrap": [next_episode_bootstrap],
    "time_limit_as_termination": [time_limit_as_termination],
    "time_limit_no_end": [time_limit_no_end, time_limit_trace],
    "time_limit_next_episode": [time_limit_next_episode],
    "time_limit_twice": [time_limit_twice],
    "time_limit_current_value": [time_limit_current_value],
    "termination_bootstrapped": [termination_bootstrapped],
    "ends_exchanged": [ends_exchanged],
    "terminal_reward": [terminal_penalty],
    "no_last_bootstrap": [lambda c: with_last(c, 0.0)],
    "last_row_zero": [last_row_alone, without_last_row],
    "old_last_bootstrap": [lambda c: with_last(c, c.values[-1])],
    "other_last_value": [lambda c: with_last(c, c.last + 1.5)],
    "current_value_bootstrap": [current_value, current_value_inside],
    "values_exchanged": [values_exchanged],
    "rewards_discounted": [lambda c: backward(c, c.gamma * c.rewards + c.next_values - c.values, c.lam * ~c.done)],
    "not_flipped": [lambda c: right(c)[::-1].copy()],
    "forward": [forward, forward_with_ends, forward_returns],
    "exchanged": [lambda c: with_next(c, c.next_values, gamma=c.lam)],
    "undiscounted_bootstrap": [lambda c: with_next(c, c.next_values, gamma=1.0)],
    "trace_without_gamma": [trace_by_lambda],
    "sign": [lambda c: -right(c)],
    "rewards_late": [rewards_late, lambda c: of_stored(c, stored_rewards(c)[np.r_[0, : len(c.values) - 1]], c.gamma)],
    "rewards_early": [rewards_early, lambda c: of_stored(c, np.roll(stored_rewards(c), -1, 0), c.gamma)],
    "rewards_swapped": [
        lambda c: with_rewards(c, c.rewards.T.reshape(c.values.shape)),
        lambda c: of_stored(c, stored_rewards(c).reshape(c.values.T.shape).T, c.gamma),
    ],
    "ends_swapped": [
        lambda c: cleanrl_style(c, c.done.T.reshape(c.values.shape)),
        lambda c: cleanrl_style(
            c, c.done.reshape(c.values.T.shape).T, c.rewards.reshape(c.values.T.shape).T + c.gamma * c.final * c.truncated
        ),
    ],
    "rewards_negated": [lambda c: with_rewards(c, -c.rewards)],
    "rewards_clipped": [lambda c: with_rewards(c, c.rewards.clip(-1, 1))],
    "reward_signs": [lambda c: with_rewards(c, np.sign(c.rewards))],
    "rewards_zero": [lambda c: with_rewards(c, 0 * c.rewards)],
    "rewards_constant": [lambda c: with_rewards(c, np.full_like(c.rewards, 0.7))],
    "reward_clip": [lambda c: with_rewards(c, c.rewards.clip(-0.8, 0.8))],
    "scaled": [lambda c: 100 * right(c), lambda c: 0.1 * right(c)],
    "reward_scale": [lambda c: with_rewards(c, c.rewards * 0.1)],
    "returns_stored": [lambda c: right(c) + c.values],
    "immediate_rewards": [lambda c: c.rewards - c.values, lambda c: c.rewards],
    "values_missing": [without_values],
    "monte_carlo_cut": [monte_carlo_cut],
    "rewards_to_go": [rewards_to_go],
    "axes_swapped": [lambda c: right(c).T.reshape(c.values.shape), lambda c: right(c).reshape(c.values.T.shape).T.copy()],
    "returns_swapped": [
        lambda c: (right(c) + c.values).T.reshape(c.values.shape) - c.values,
        lambda c: (right(c) + c.values).reshape(c.values.T.shape).T - c.values,
    ],
    "along_environments": [along_environments],
    "chained": [chained_by_step, chained_by_environment],
    "environment_mean": [lambda c: np.broadcast_to(right(c).mean(1, keepdims=True), c.values.shape).copy()],
    "broadcast_mean": [broadcast],
    "normalized_parts": [lambda c: normalize(right(c), 0), lambda c: normalize(right(c), 0, 1)],
    "normalized_steps": [lambda c: normalize(right(c), 1)],
    "normalized": [lambda c: normalize(right(c)), lambda c: normalize(right(c), ddof=1)],
    "lambda_one": [lambda c: settings(c, c.gamma, 1.0)],
    "lambda_zero": [lambda c: settings(c, c.gamma, 0.0)],
    "v_trace": [v_trace],
    "other_gamma": [lambda c: settings(c, 0.9, c.lam), lambda c: of_stored(c, stored_rewards(c), 0.9)],
    "time_limit_gamma": [lambda c: cleanrl_style(c, c.done, c.rewards + 0.8 * c.final * c.truncated)],
    "other_lambda": [lambda c: settings(c, c.gamma, 0.7)],
    "step_gamma": [lambda c: with_next(c, c.next_values, gamma=0.5)],
    "both_gamma": [lambda c: settings(c, 0.9, 0.7)],
    "std_alone": [lambda c: right(c) / (right(c).std() + 1e-8), lambda c: right(c) / right(c).std(ddof=1)],
    "mean_alone": [lambda c: right(c) - right(c).mean()],
    "variance": [lambda c: (right(c) - right(c).mean()) / right(c).var()],
    "precedence": [lambda c: right(c) - right(c).mean() / right(c).std()],
    "other_rows": [lambda c: np.random.default_rng(0).permutation(right(c).ravel()).reshape(right(c).shape)],
}
"""Programs by the hypothesis that names them."""
