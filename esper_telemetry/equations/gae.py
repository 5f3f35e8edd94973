"""Generalised advantages [T, B] of T steps in B environments: their columns, and the recursion."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import wraps
from typing import Any

from esper_telemetry.core.lazy import Tensor, torch
from esper_telemetry.metrics.statistics import discounted_sums

NEAR = 1e-3
"""Largest difference of an accepted candidate from the claimed advantages, relative to the largest claimed advantage."""

STD_EPS = 1e-8
"""Added to the standard deviation before dividing by it, as in Stable-Baselines3 and CleanRL."""


@dataclass(frozen=True, slots=True)
class GaeInputs:
    """Columns of a rollout, [T, B] float64 or bool, and the settings of the estimate.

    Attributes:
        rewards: used for learning, without the value of a time limit's last state.
        values, next_values: of the states before and after each step; `next_values` is 0 after termination.
        ended, terminated: the step ended its episode; the episode ended by termination.
        following: values of the states in the next row. After the end of an episode this is the next episode's first state. If the last
            step ended its episode and the next state is unknown, the value that continues the claimed advantage.
        claimed: the trainer's advantages.
        valid: rows that count; None if all do.
        raw_rewards: before scaling; None if they are `rewards`.
        previous: the previous rollout, or its first environment; None if it is missing.
        rollouts: number of rollouts that are concatenated along the environments.
        last_known: the last row of `following` comes from the trainer.
        alone: the program has no critic: values are 0, and lambda is 1.
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
    alone: bool = False

    @property
    def has_critic(self) -> bool:
        """Whether the values are a critic's."""
        return not self.alone

    @property
    def counted(self) -> Tensor:
        """Rows that count."""
        return torch.ones_like(self.ended) if self.valid is None else self.valid

    @property
    def truncated(self) -> Tensor:
        """Steps that a time limit ended."""
        return self.ended & ~self.terminated

    @property
    def bootstrapped_rewards(self) -> Tensor:
        """Rewards that include the value of a time limit's last state, as Stable-Baselines3 stores them."""
        return self.rewards + self.gamma * self.next_values * self.truncated


def following_values(inputs: GaeInputs, last_values: Tensor | None) -> GaeInputs:
    """Return the inputs with `following` from the values of the next rows and, if known, the values after the last step, [B]."""
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
    """Return generalised advantages [T, B] (1506.02438, eq. 16); arguments replace the columns of the inputs. 0 in rows that do not count.

    Args:
        cut: steps at which the trace ends; the ends of episodes if it is None.
        gamma: discount of the next value; the trace keeps its own discount.
        decay: of the trace at each step; gamma times lambda if it is None.
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
    """Return, for each environment, the candidate that is closest to the trainer's advantages, [T, B]."""
    stacked = torch.stack(candidates)
    difference = (stacked - inputs.claimed).abs().nan_to_num(torch.inf)
    if inputs.valid is not None:
        difference = difference * inputs.valid
    best = difference.amax(1).argmin(0)
    return stacked.gather(0, best.expand(1, *inputs.claimed.shape)).squeeze(0)


def closest_whole(inputs: GaeInputs, *candidates: Tensor) -> Tensor:
    """Return the candidate, [T, B], that is closest to the trainer's advantages in all environments.

    If none is close, the fit may scale and shift the candidates, because the advantages may be normalised.
    """
    counted = inputs.counted.reshape(-1, 1)
    flat = replace(inputs, claimed=inputs.claimed.reshape(-1, 1), valid=counted)
    columns = [one.reshape(-1, 1) for one in candidates]
    best = closest(flat, *columns)
    if float((best - flat.claimed)[counted].abs().max()) > NEAR * float(flat.claimed[counted].abs().max()):
        rows = torch.stack([one[counted] for one in (flat.claimed, *columns)])
        best = columns[int(torch.corrcoef(rows)[0, 1:].nan_to_num(-1.0).argmax())]
    return best.view_as(inputs.claimed)


def in_each_rollout(estimate: Callable[[GaeInputs], Tensor | None]) -> Callable[[GaeInputs], Tensor | None]:
    """Apply an estimate that mixes environments to each rollout separately; None if it does not apply to any rollout."""

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


def is_standard(advantages: Tensor, valid: Tensor | None, *, error: float = 1e-2) -> bool:
    """Return True if the rows that count have a standard deviation of 1, biased or not, and a mean of 0, to a tenth of `error`."""
    rows = advantages.flatten() if valid is None else advantages[valid]
    if len(rows) < 2 or abs(float(rows.mean())) > error / 10:
        return False
    return min(abs(float(rows.std(correction=correction)) - 1.0) for correction in (0, 1)) < error


def standards(values: Tensor, *rows: Tensor) -> list[Tensor]:
    """Return the values normalised by the mean and the biased and the unbiased standard deviation of these rows, of several in turn.

    The values are unchanged for too few rows.
    """
    moments = [torch.std_mean(own, correction=c) if own.numel() > c else None for own in rows for c in (0, 1)]
    return [values if both is None else (values - both[1]) / (both[0] + STD_EPS) for both in moments]
