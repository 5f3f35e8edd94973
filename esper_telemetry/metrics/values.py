"""The critic: fit to the returns, movement in an update, Bellman errors, terminal steps, and complete episodes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from esper_telemetry.core.arrays import ArrayLike, as_mask, as_tensor
from esper_telemetry.core.group import MetricGroup
from esper_telemetry.core.lazy import Tensor, inference_mode, torch
from esper_telemetry.core.metric import Metric, MetricFamily, reports
from esper_telemetry.core.record import Level
from esper_telemetry.core.reduction import NAN, Array, Counts, Max, Mean, Moments, Reduction, Slot, Statistic, Sum
from esper_telemetry.core.requirements import checked_arguments
from esper_telemetry.metrics.statistics import (
    REWARDS,
    Quantiles,
    as_quantiles,
    ascending,
    deviations,
    discounted_sums,
    histogram,
    keep,
    levels_for,
    moments,
    quantiles,
    rows_of,
    same_shape,
    sample,
    spread,
)

_std = Moments.statistics["std"]


CRITIC_MOVED = "Lower the learning rate or the number of epochs; if values are clipped, match clip_value to the scale of the returns."
"""Advice that several metrics share."""

CRITIC_FAMILY = MetricFamily(
    "value",
    "Critic",
    "The critic predicts the return from each state. Explained variance compares its errors with the variation of "
    "the returns: 1 is perfect, 0 no better than a constant, below 0 worse. A critic that is wrong by a constant "
    "still explains all variance: read R² and the bias too.",
    place=50,
    question="Is the critic useful?",
    first=("value/explained_variance", "value/r2", "value/bias_over_std", "value/loss_norm"),
)


@dataclass(frozen=True, slots=True)
class ValueFit(MetricGroup, absent="no valid, finite pair of value and return"):
    """The critic's estimates compared with their regression targets; errors are V - R.

    Explained variance, R² and the normalised error are functions of `value/err/std`, `value/bias` and `ret/std`.
    """

    error: Moments = reports(
        Metric.quantity("value/bias", 401, "bias of the critic", unit="return", level=Level.MINIMAL)
        .asks("Does the critic promise too much (above 0) or too little? Explained variance cannot see this.")
        .bounds(
            healthy="|bias| < 0.1 of ret/std", warn="> 0.5 of ret/std", critical="> 1 of ret/std", source="heuristic; EV(V + c) = EV(V)"
        ),
        Metric.std("value/err/std", 402, "standard deviation of the critic's errors", unit="return", level=Level.MINIMAL)
        .asks("How widely do the critic's errors scatter around its bias?")
        .bounds(healthy="well below ret/std"),
        Metric.quantity("value/err/skew", 403, "skewness of the critic's errors", unit="1", of="skew")
        .asks("Are large errors one-sided: overestimates (above 0) or underestimates?")
        .absent("errors do not vary"),
    )
    estimate: Moments = reports(
        Metric.std("value/std", 404, "standard deviation of the critic's estimates", unit="return", level=Level.MINIMAL)
        .asks("How much do the critic's estimates differ between states? Near 0: it predicts the same everywhere.")
        .bounds(healthy="close to value/target/std")
    )
    target: Moments = reports(
        Metric.std("value/target/std", 405, "standard deviation of the critic's targets", unit="return", level=Level.MINIMAL).asks(
            "How much do the critic's targets vary?"
        )
    )
    quantiles: Quantiles = reports(
        Metric.quantity("value/err/p05", 406, "5 % quantile of the critic's errors", unit="return", of="p05")
        .asks("How large are the critic's worst 5 % of underestimates?")
        .bounds(healthy="|p95| / |p05| between 1/3 and 3", source="heuristic"),
        Metric.quantity("value/err/p25", 407, "25 % quantile of the critic's errors", unit="return", of="p25").asks(
            "Which error do a quarter of the estimates stay below?"
        ),
        Metric.quantity("value/err/p50", 408, "median of the critic's errors", unit="return", of="p50")
        .asks("What is the critic's typical (median) error?")
        .bounds(healthy="about 0"),
        Metric.quantity("value/err/p75", 409, "75 % quantile of the critic's errors", unit="return", of="p75").asks(
            "Which error do a quarter of the estimates exceed?"
        ),
        Metric.quantity("value/err/p95", 410, "95 % quantile of the critic's errors", unit="return", of="p95")
        .asks("How large are the critic's worst 5 % of overestimates?")
        .bounds(healthy="|p95| / |p05| between 1/3 and 3", source="heuristic"),
    )
    histogram: Counts = reports(
        Metric.quantity("value/err/hist", 413, "histogram of the critic's errors", unit="return").asks(
            "How are the critic's errors distributed?"
        )
    )
    absmax: Max = reports(
        Metric.magnitude("value/err/absmax", 411, "largest magnitude of the critic's errors", unit="return").asks(
            "What is the critic's largest single error?"
        )
    )
    nonfinite: Sum = reports(
        Metric.nonfinite("value/explained_variance_nonfinite", 412, "non-finite inputs of explained variance")
        .asks("How many valid pairs of value and return held a NaN or an infinity?")
        .absent("none did")
    )


@checked_arguments()
@inference_mode
def value_fit(values: ArrayLike, returns: ArrayLike, *, valid: ArrayLike | None = None) -> ValueFit:
    """Return moments and quantiles of the critic's errors, and the variation of its estimates and of the returns.

    Explained variance, R², correlation and related metrics need earlier updates; `history.critic` derives them on the host.

    Args:
        values: critic's estimates at collection, [T, B] or [N].
        returns: regression targets, same shape.
        valid: bool, same shape; None if every entry is valid.
    """
    values = as_tensor(values)
    returns, valid = as_tensor(returns, values), as_mask(valid, values)
    same_shape(values=values, returns=returns, valid=valid)
    both = torch.stack([rows_of(values, None), rows_of(returns, None)]).double()
    difference = both[0] - both[1]
    error = sample(difference, None if valid is None else rows_of(valid, None))
    means, d = deviations(error._replace(values=torch.where(error.mask, both, 0.0)))
    squares = torch.linalg.vecdot(d, d)
    at_levels = quantiles(ascending(error), error.count, levels_for(values))
    return ValueFit(
        error=moments(error),
        estimate=Moments(error.count, means[0], squares[0], math.nan, math.nan),
        target=Moments(error.count, means[1], squares[1], math.nan, math.nan),
        quantiles=as_quantiles(at_levels, error.count),
        histogram=histogram(error, REWARDS),
        absmax=Max(at_levels[:: len(at_levels) - 1].abs().amax()),
        nonfinite=Sum(error.nonfinite),
    )


@dataclass(frozen=True, slots=True)
class ScaledMean(Reduction):
    """Mean of `total`, relative to the standard deviation of other values of the same rows."""

    total: Slot
    count: Slot
    mean: Slot
    m2: Slot

    statistics: ClassVar[Mapping[str, Statistic]] = {"scaled": lambda s: s[0] / s[1] / std if s[1] and (std := _std(s[1:4])) > 0 else NAN}

    @staticmethod
    def merge(rows: Array) -> Array:
        """Add totals; merge the moments around the common mean."""
        return np.concatenate([rows[..., :1].sum(axis=0), merge_spreads(rows[..., 1:])], axis=-1)


def merge_spreads(rows: Array) -> Array:
    """Merge [rows, fields, (count, mean, m2)] around the common means into [fields, 3]."""
    padded = np.concatenate([rows, np.zeros((*rows.shape[:-1], 2))], axis=-1)
    return Moments.merge(padded)[..., :3]


@dataclass(frozen=True, slots=True)
class ValueMovement(MetricGroup):
    """Movement of the critic's estimates since collection."""

    clip_frac: Mean | None = reports(
        Metric.fraction("value/clip_frac", 421, "clip fraction of values")
        .asks("What share of the value estimates is held back by value clipping? Depends on the scale of returns.")
        .bounds(healthy="< 0.2", warn="> 0.5", source="SB3#1426")
        .absent("value clipping is off")
        .advises(CRITIC_MOVED)
    )
    move: ScaledMean = reports(
        Metric.magnitude("value/move_over_std", 422, "movement of the critic in standard deviations of returns", unit="σ_R", cost="sampled")
        .asks("How far did the update move the critic, in units of the returns' spread?")
        .bounds(healthy="< 0.2", warn="> 0.5", source="heuristic")
        .absent("returns do not vary")
        .advises(CRITIC_MOVED)
    )
    nonfinite: Sum = reports(
        Metric.nonfinite("value/clip_frac_nonfinite", 423, "non-finite inputs of clip fraction of values").asks(
            "How many valid new or old value estimates were NaN or infinite?"
        )
    )


@checked_arguments(clip=0)
@inference_mode
def value_movement(
    values: ArrayLike,
    old_values: ArrayLike,
    returns: ArrayLike,
    *,
    clip: float | None = None,
    valid: ArrayLike | None = None,
    dim: int | None = None,
) -> ValueMovement:
    """Return the share of clipped value estimates, and their mean movement relative to the returns' standard deviation.

    Args:
        values: critic's estimates now, [N] or [M, N].
        old_values, returns: at collection, same shape.
        clip: ε of the value clip; None if values are not clipped.
        valid: bool, same shape; None if every entry is valid.
        dim: axis to reduce; None reduces all axes to one row, -1 keeps the leading axis as optimizer steps.
    """
    values = as_tensor(values)
    old_values, returns, valid = as_tensor(old_values, values), as_tensor(returns, values), as_mask(valid, values)
    same_shape(values=values, old_values=old_values, returns=returns, valid=valid)
    move = sample(values.detach().double() - old_values.detach().double(), valid, dim=dim)
    distance = move.values.abs()
    mean, d = deviations(keep(rows_of(returns, dim).double(), move.mask))
    return ValueMovement(
        clip_frac=None if clip is None else Mean((distance > clip).sum(-1), move.count),
        move=ScaledMean(distance.sum(-1), move.count, mean, torch.linalg.vecdot(d, d)),
        nonfinite=Sum(move.nonfinite),
    )


@dataclass(frozen=True, slots=True)
class TdErrors(MetricGroup, absent="no valid, finite step"):
    """Bellman errors δ = r + γ V(next) - V."""

    delta: Moments = reports(
        Metric.quantity("value/td/mean", 431, "mean of one-step surprises", unit="reward")
        .asks("Does the critic's next estimate contradict it on average? Above 0: it promises too little.")
        .bounds(healthy="about 0"),
        Metric.std("value/td/std", 432, "standard deviation of one-step surprises", unit="reward").asks(
            "How noisy are the critic's one-step surprises?"
        ),
    )
    magnitude: Mean = reports(
        Metric.magnitude("value/td/absmean", 433, "mean magnitude of one-step surprises", unit="reward")
        .asks("How large is the critic's typical one-step surprise?")
        .bounds(healthy="falls, then flattens")
    )
    nonfinite: Sum = reports(
        Metric.nonfinite("value/td/mean_nonfinite", 434, "non-finite inputs of mean of one-step surprises").asks(
            "How many valid Bellman errors were NaN or infinite?"
        )
    )


@inference_mode
def td_errors(rewards: Tensor, values: Tensor, next_values: Tensor, *, gamma: float, valid: Tensor | None = None) -> TdErrors:
    """Return mean, spread and mean magnitude of the Bellman errors.

    Args:
        rewards, values: [T, B].
        next_values: critic's estimate of the state that follows, 0 after termination, [T, B].
        gamma: discount factor.
        valid: bool, same shape; None if every entry is valid.
    """
    same_shape(rewards=rewards, values=values, next_values=next_values, valid=valid)
    s = sample(rewards.detach().double() + gamma * next_values.detach().double() - values.detach().double(), valid)
    return TdErrors(spread(s), s.mean(s.values.abs()), Sum(s.nonfinite))


@dataclass(frozen=True, slots=True)
class TerminalError(MetricGroup):
    """Error of the critic at terminal steps."""

    error: Mean = reports(
        Metric.magnitude("value/terminal_err", 435, "error at terminal steps", unit="reward")
        .asks("Does the critic know the reward of an episode's last step, the easiest thing it can learn?")
        .bounds(healthy="falls to 0 early", source="Jones 2021, terminal correlation")
        .absent("no episode terminated")
    )


@inference_mode
def terminal_error(values: Tensor, rewards: Tensor, terminated: Tensor, *, valid: Tensor | None = None) -> TerminalError:
    """Return the mean |V - r| over the steps that terminated an episode; a time limit does not count.

    Args:
        values, rewards: [T, B].
        terminated: [T, B] bool.
        valid: bool, same shape; None if every entry is valid.
    """
    same_shape(values=values, rewards=rewards, terminated=terminated, valid=valid)
    last = terminated.bool() if valid is None else terminated.bool() & valid.bool()
    s = sample(values.detach().double() - rewards.detach().double(), last)
    return TerminalError(s.mean(s.values.abs()))


@dataclass(frozen=True, slots=True)
class EndingBias(MetricGroup):
    """Bias of the critic at the ends of episodes, by time limit or termination."""

    truncated: Mean = reports(
        Metric.quantity("value/bias_truncated", 437, "bias of the critic at time limits", unit="return")
        .asks(
            "Does the critic promise too much when a time limit cuts an episode? Far above value/bias: the rewards that would "
            "have followed are left out of the returns, as if the episode had ended."
        )
        .bounds(
            healthy="near value/bias",
            warn="> value/bias + 0.5 of ret/std",
            source="heuristic; V - R is V - r if the value of the final observation is missing",
        )
        .absent("no episode was cut by a time limit")
    )
    terminated: Mean = reports(
        Metric.quantity("value/bias_terminated", 438, "bias of the critic at terminations", unit="return")
        .asks(
            "Does the critic promise too much when an episode terminates? Far below value/bias: the returns wrongly continue after the end."
        )
        .bounds(
            healthy="near value/bias",
            warn="< value/bias - 0.5 of ret/std",
            source="heuristic; V - R is V - r - γ V(next) if a termination is treated as a time limit",
        )
        .absent("no episode terminated")
        .advises("Do not bootstrap when an episode terminates: check that the environment separates terminated from truncated.")
    )


@inference_mode
def ending_bias(values: Tensor, returns: Tensor, ended: Tensor, terminated: Tensor, *, valid: Tensor | None = None) -> EndingBias:
    """Return the mean V - R over the steps at which a time limit cut an episode, and over the steps that terminated one.

    Args:
        values: critic's estimates at collection, [T, B].
        returns: regression targets, [T, B].
        ended, terminated: [T, B] bool: the step ended its episode, and did so by termination.
        valid: bool, same shape; None if every entry is valid.
    """
    same_shape(values=values, returns=returns, ended=ended, terminated=terminated, valid=valid)
    error, by_itself = values.detach().double() - returns.detach().double(), terminated.bool()
    flags = torch.stack([ended.bool() & ~by_itself, by_itself])
    s = sample(error.expand_as(flags).flatten(1), (flags if valid is None else flags & valid.bool()).flatten(1), dim=-1)
    totals, counts = s.values.sum(-1), s.count
    return EndingBias(Mean(totals[0], counts[0]), Mean(totals[1], counts[1]))


@dataclass(frozen=True, slots=True)
class Explained(Reduction):
    """1 - Var(error) / Var(target), from the count, mean and centred squares of each; merged around the common means."""

    count: Slot
    error_mean: Slot
    error_m2: Slot
    target_mean: Slot
    target_m2: Slot

    statistics: ClassVar[Mapping[str, Statistic]] = {
        "explained_variance": lambda s: 1 - s[2] / s[4] if Moments.statistics["std"]((s[0], s[3], s[4])) > 0 else NAN
    }

    @staticmethod
    def merge(rows: Array) -> Array:
        """Merge both parts as spreads."""
        error = merge_spreads(rows[..., :3])
        target = merge_spreads(rows[..., [0, 3, 4]])
        return np.concatenate([error, target[..., 1:]], axis=-1)


@dataclass(frozen=True, slots=True)
class MonteCarloFit(MetricGroup):
    """The critic against returns that do not contain it."""

    fit: Explained = reports(
        Metric.quantity("value/ev_mc", 436, "explained variance of finished episodes", unit="1", high=1.0, cost="update")
        .asks("Does the critic explain the returns of complete episodes, which, unlike its targets, do not contain its own estimates?")
        .bounds(healthy="at least value/explained_variance - 0.2", source="λ-returns contain the critic")
        .absent("no episode terminated in the rollout, or their returns do not vary")
    )


@inference_mode
def monte_carlo_fit(
    values: Tensor, rewards: Tensor, ended: Tensor, terminated: Tensor, *, gamma: float, valid: Tensor | None = None
) -> MonteCarloFit:
    """Return the explained variance against the Monte-Carlo returns of the steps whose episode terminates inside the rollout.

    Args:
        values, rewards: [T, B].
        ended, terminated: [T, B] bool: the step ended its episode, and did so by termination.
        gamma: discount factor.
        valid: bool, same shape; None if every entry is valid.
    """
    same_shape(values=values, rewards=rewards, ended=ended, terminated=terminated, valid=valid)
    goes_on = (~ended.bool()).double()
    columns = torch.stack([rewards.detach().double(), terminated.double()])
    returns, ends = discounted_sums(columns.transpose(0, 1), torch.stack([gamma * goes_on, goes_on]).transpose(0, 1)).unbind(1)
    complete = ends > 0
    allowed = complete if valid is None else complete & valid.bool()
    v = values.detach().double()
    s = sample(v - returns, allowed)
    error, target = spread(s), spread(keep(rows_of(returns, None), s.mask))
    return MonteCarloFit(Explained(s.count, error.mean, error.m2, target.mean, target.m2))
