"""Random rollouts, and loops that compute their advantages, correctly or with one mistake.

Everything is NumPy in float32, as trainers write it, so that the programs share no code with the package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
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


def random_rollout(seed: int, steps: int = 40, envs: int = 4, *, ends: float = 0.12, time_limits: float = 0.5) -> Columns:
    """A rollout in which a fraction `ends` of the steps ends episodes, a fraction `time_limits` of them by time limits."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> Array:
        return rng.normal(size=shape).astype(np.float32)

    done = rng.random((steps, envs)) < ends
    limited = rng.random((steps, envs)) < time_limits
    return Columns(
        rewards=normal(steps, envs) + 0.5,
        values=3 * normal(steps, envs) + 1,
        last=3 * normal(envs) + 1,
        final=3 * normal(steps, envs) + 1,
        terminated=done & ~limited,
        truncated=done & limited,
    )


def backward(delta: Array, decay: Array | float) -> Array:
    decay = np.broadcast_to(np.asarray(decay, np.float32), delta.shape)
    advantages, carried = np.zeros_like(delta), np.zeros_like(delta[0])
    for t in reversed(range(len(delta))):
        advantages[t] = carried = delta[t] + decay[t] * carried
    return advantages


def forward(delta: Array, decay: Array) -> Array:
    advantages, carried = np.zeros_like(delta), np.zeros_like(delta[0])
    for t in range(len(delta)):
        advantages[t] = carried = delta[t] + decay[t] * carried
    return advantages


def gae(
    c: Columns,
    next_values: Array | None = None,
    ends: Array | None = None,
    *,
    rewards: Array | None = None,
    gamma: float | None = None,
    decay: float | None = None,
) -> Array:
    """GAE with other columns or settings than the rollout's; `gamma` discounts next values alone, and `decay` the trace."""
    next_values = c.next_values if next_values is None else next_values
    delta = (c.rewards if rewards is None else rewards) + (c.gamma if gamma is None else gamma) * next_values - c.values
    return backward(delta, (c.gamma * c.lam if decay is None else decay) * ~(c.done if ends is None else ends))


right = gae


def cleanrl_style(c: Columns, done: Array, rewards: Array | None = None) -> Array:
    """Values of the next row, masked by `done`; the rewards include the values after time limits, as in Stable-Baselines3."""
    return gae(c, c.following * ~done, done, rewards=stored_rewards(c) if rewards is None else rewards)


def stored_rewards(c: Columns) -> Array:
    return c.rewards + c.gamma * c.final * c.truncated


def before(flags: Array) -> Array:
    """`dones[t]`, the flag before step t, instead of `dones[t + 1]`; no episode begins in the first row."""
    return np.concatenate([np.zeros_like(flags[:1]), flags[:-1]])


def with_last(column: Array, last: Array | float) -> Array:
    changed = column.copy()
    changed[-1] = last
    return changed


def with_last_value(c: Columns, last: Array | float) -> Array:
    return gae(c, with_last(c.next_values, np.where(c.done[-1], c.next_values[-1], last)))


def values_at_limits(c: Columns, limits: Array | float) -> Array:
    """The next row's values, 0 after termination, and `limits` after time limits."""
    return np.where(c.truncated, limits, np.where(c.terminated, 0, c.following)).astype(np.float32)


def current_value_inside(c: Columns) -> Array:
    """The last row uses the right value, and the reward includes the value after a time limit."""
    return gae(c, np.where(with_last(~c.done, False), c.values, c.next_values))


def delta(c: Columns) -> Array:
    return c.rewards + c.gamma * c.next_values - c.values


def settings(c: Columns, gamma: float, lam: float) -> Array:
    return right(replace(c, gamma=gamma, lam=lam))


def rewards_to_go(c: Columns) -> Array:
    return backward(stored_rewards(c), c.gamma * ~c.done)


def v_trace(c: Columns) -> Array:
    ahead = np.concatenate([(right(c) + c.values)[1:], c.last[None]])
    return c.rewards + c.gamma * np.where(c.done, c.next_values, ahead) - c.values


def weighted_v_trace(c: Columns) -> Array:
    weights = np.minimum(1.0, np.exp(0.5 * np.random.default_rng(3).standard_normal(c.rewards.shape)))
    advantages = np.zeros_like(c.rewards)
    ahead = np.zeros_like(c.last)  # v_{t+1} - V_{t+1}
    for t in reversed(range(len(advantages))):
        runs_on = np.where(c.done[t], 0.0, ahead)
        advantages[t] = ahead = weights[t] * (c.rewards[t] + c.gamma * (c.next_values[t] + runs_on) - c.values[t])
    return advantages


def chained(c: Columns, flat: Callable[[Array], Array]) -> Array:
    """The rollout was flattened first, so the next row belongs to another environment."""
    values, rewards, done = (flat(column) for column in (c.values, stored_rewards(c), c.done))
    following = np.concatenate([values[1:], c.last[-1:, None]])
    return backward(rewards + c.gamma * following * ~done - values, c.gamma * c.lam * ~done)


def swapped(column: Array) -> Array:
    """[T, B] in the order of [B, T]."""
    return column.T.reshape(column.shape)


def swapped_back(column: Array) -> Array:
    return column.reshape(column.T.shape).T.copy()


def broadcast(c: Columns) -> Array:
    """`(returns - values).mean(1)` with returns [N] and values [N, 1]."""
    returns = (right(c) + c.values).reshape(-1)
    result: Array = (returns - c.values.reshape(-1, 1)).mean(1).reshape(c.values.shape)
    return result


def normalize(x: Array, axis: int | None = None, ddof: int = 0) -> Array:
    result: Array = (x - x.mean(axis, keepdims=True)) / (x.std(axis, keepdims=True, ddof=ddof) + 1e-8)
    return result


PROGRAMS: dict[str, list[Callable[[Columns], Array]]] = {
    "ends_ignored": [lambda c: cleanrl_style(c, np.zeros_like(c.done)), lambda c: gae(c, ends=np.zeros_like(c.done))],
    "terminations_ignored": [lambda c: gae(c, np.where(c.truncated, c.final, c.following), c.truncated)],
    "ends_late": [lambda c: cleanrl_style(c, before(c.done)), lambda c: cleanrl_style(c, with_last(before(c.done), c.done[-1]))],
    "ends_early": [lambda c: cleanrl_style(c, np.concatenate([c.done[1:], c.done[-1:]]))],
    "ends_inverted": [lambda c: cleanrl_style(c, ~c.done)],
    "ends_shared": [
        lambda c: cleanrl_style(c, np.broadcast_to(c.done.any(1, keepdims=True), c.done.shape)),
        lambda c: cleanrl_style(c, np.broadcast_to(c.done[:, :1], c.done.shape)),
    ],
    "ends_of_others": [
        lambda c: cleanrl_style(c, np.roll(c.done, 1, 1)),
        lambda c: cleanrl_style(c, np.roll(c.done, -1, 1)),
        lambda c: gae(c, ends=c.done[:, ::-1]),
    ],
    "other_ends": [lambda c: cleanrl_style(c, np.random.default_rng(11).permutation(c.done))],
    "zero": [lambda c: 0 * right(c)],
    "absolute": [lambda c: np.abs(right(c)), lambda c: right(c) ** 2, lambda c: right(c).clip(0)],
    "last_end_ignored": [lambda c: cleanrl_style(c, with_last(c.done, False))],
    "next_episode_bootstrap": [lambda c: gae(c, c.following)],
    "time_limit_as_termination": [lambda c: gae(c, np.where(c.done, 0, c.following))],
    "time_limit_no_end": [  # `done = terminated`
        lambda c: gae(c, values_at_limits(c, c.following), c.terminated),
        lambda c: gae(c, ends=c.terminated),
    ],
    "time_limit_next_episode": [lambda c: gae(c, values_at_limits(c, c.following))],
    "time_limit_twice": [lambda c: gae(c, rewards=stored_rewards(c))],
    "time_limit_current_value": [  # RSL-RL: `rewards += gamma * values * time_outs`
        lambda c: cleanrl_style(c, c.done, c.rewards + c.gamma * c.values * c.truncated)
    ],
    "termination_bootstrapped": [lambda c: gae(c, np.where(c.done, c.final, c.following))],
    "ends_exchanged": [lambda c: gae(replace(c, terminated=c.truncated, truncated=c.terminated))],
    "terminal_reward": [lambda c: cleanrl_style(c, c.done, stored_rewards(c) - 5.0 * c.terminated)],
    "no_last_bootstrap": [lambda c: with_last_value(c, 0.0)],
    "last_row_zero": [
        lambda c: with_last(right(c), 0.0),
        lambda c: backward(with_last(delta(c), 0.0), c.gamma * c.lam * ~c.done),
    ],
    "old_last_bootstrap": [lambda c: with_last_value(c, c.values[-1])],
    "other_last_value": [lambda c: with_last_value(c, c.last + 1.5)],
    "current_value_bootstrap": [lambda c: gae(c, c.values * ~c.terminated), current_value_inside],
    "values_exchanged": [lambda c: backward(c.rewards + c.gamma * c.values - c.next_values, c.gamma * c.lam * ~c.done)],
    "rewards_discounted": [lambda c: backward(c.gamma * c.rewards + c.next_values - c.values, c.lam * ~c.done)],
    "not_flipped": [lambda c: right(c)[::-1].copy()],
    "forward": [
        lambda c: forward(delta(c), c.gamma * c.lam * ~c.done),
        lambda c: forward(delta(c), c.gamma * c.lam * ~before(c.done)),
        lambda c: forward(c.rewards, c.gamma * ~before(c.done)) - c.values,
    ],
    "exchanged": [lambda c: gae(c, gamma=c.lam)],
    "undiscounted_bootstrap": [lambda c: gae(c, gamma=1.0)],
    "trace_without_gamma": [lambda c: gae(c, decay=c.lam)],
    "sign": [lambda c: -right(c)],
    "rewards_late": [
        lambda c: gae(c, rewards=np.concatenate([np.full_like(c.rewards[:1], 0.7), c.rewards[:-1]])),
        lambda c: cleanrl_style(c, c.done, stored_rewards(c)[np.r_[0, : len(c.values) - 1]]),
    ],
    "rewards_early": [
        lambda c: gae(c, rewards=np.roll(c.rewards, -1, 0)),
        lambda c: cleanrl_style(c, c.done, np.roll(stored_rewards(c), -1, 0)),
    ],
    "rewards_swapped": [
        lambda c: gae(c, rewards=swapped(c.rewards)),
        lambda c: cleanrl_style(c, c.done, swapped_back(stored_rewards(c))),
    ],
    "ends_swapped": [
        lambda c: cleanrl_style(c, swapped(c.done)),
        lambda c: cleanrl_style(c, swapped_back(c.done), swapped_back(c.rewards) + c.gamma * c.final * c.truncated),
    ],
    "rewards_negated": [lambda c: gae(c, rewards=-c.rewards)],
    "rewards_clipped": [lambda c: gae(c, rewards=c.rewards.clip(-1, 1))],
    "reward_signs": [lambda c: gae(c, rewards=np.sign(c.rewards))],
    "rewards_zero": [lambda c: gae(c, rewards=0 * c.rewards)],
    "rewards_constant": [lambda c: gae(c, rewards=np.full_like(c.rewards, 0.7))],
    "reward_clip": [lambda c: gae(c, rewards=c.rewards.clip(-0.8, 0.8))],
    "scaled": [lambda c: 100 * right(c), lambda c: 0.1 * right(c)],
    "reward_scale": [lambda c: gae(c, rewards=c.rewards * 0.1)],
    "returns_stored": [lambda c: right(c) + c.values],
    "immediate_rewards": [lambda c: c.rewards - c.values, lambda c: c.rewards],
    "values_missing": [lambda c: backward(c.rewards, c.gamma * c.lam * ~c.done)],
    "monte_carlo_cut": [lambda c: rewards_to_go(c) - c.values],
    "rewards_to_go": [rewards_to_go],
    "axes_swapped": [lambda c: swapped(right(c)), lambda c: swapped_back(right(c))],
    "returns_swapped": [lambda c: swapped(right(c) + c.values) - c.values, lambda c: swapped_back(right(c) + c.values) - c.values],
    "along_environments": [lambda c: backward(delta(c).T.copy(), (c.gamma * c.lam * ~c.done).T).T],
    "chained": [
        lambda c: chained(c, lambda column: column.reshape(-1, 1)).reshape(c.values.shape),
        lambda c: chained(c, lambda column: column.T.reshape(-1, 1)).reshape(c.values.T.shape).T,
    ],
    "environment_mean": [lambda c: np.broadcast_to(right(c).mean(1, keepdims=True), c.values.shape).copy()],
    "broadcast_mean": [broadcast],
    "normalized_parts": [lambda c: normalize(right(c), 0), lambda c: normalize(right(c), 0, 1)],
    "normalized_steps": [lambda c: normalize(right(c), 1)],
    "normalized": [lambda c: normalize(right(c)), lambda c: normalize(right(c), ddof=1)],
    "lambda_one": [lambda c: settings(c, c.gamma, 1.0)],
    "lambda_zero": [lambda c: settings(c, c.gamma, 0.0)],
    "v_trace": [v_trace],
    "importance_weights": [weighted_v_trace],
    "other_gamma": [lambda c: settings(c, 0.9, c.lam), lambda c: cleanrl_style(replace(c, gamma=0.9), c.done, stored_rewards(c))],
    "time_limit_gamma": [lambda c: cleanrl_style(c, c.done, c.rewards + 0.8 * c.final * c.truncated)],
    "other_lambda": [lambda c: settings(c, c.gamma, 0.7)],
    "step_gamma": [lambda c: gae(c, gamma=0.5)],
    "both_gamma": [lambda c: settings(c, 0.9, 0.7)],
    "std_alone": [lambda c: right(c) / (right(c).std() + 1e-8), lambda c: right(c) / right(c).std(ddof=1)],
    "mean_alone": [lambda c: right(c) - right(c).mean()],
    "variance": [lambda c: (right(c) - right(c).mean()) / right(c).var()],
    "precedence": [lambda c: right(c) - right(c).mean() / right(c).std()],
    "other_rows": [lambda c: np.random.default_rng(0).permutation(right(c).ravel()).reshape(right(c).shape)],
}
"""Programs by the hypothesis that names them."""
