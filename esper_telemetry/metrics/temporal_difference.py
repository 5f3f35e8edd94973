"""The critic step by step: Bellman errors, terminal steps, and complete episodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from esper_telemetry.group import Mean, MetricGroup, Moments, Sum, reports
from esper_telemetry.metric import Metric
from esper_telemetry.metrics.masking import keep, rows_of, same_shape, sample, spread
from esper_telemetry.metrics.values import merge_spreads
from esper_telemetry.record import Level
from esper_telemetry.reduction import NAN, Array, Reduction, Slot, Statistic

NO_ROWS = "no valid, finite step"


@dataclass(frozen=True, slots=True)
class TdErrors(MetricGroup):
    """Bellman errors δ = r + γ V(next) - V."""

    delta: Moments = reports(
        Metric(
            key="value/td/mean",
            number=431,
            unit="reward",
            question="Does the critic's next step contradict it on average? Above 0: it promises too little.",
            healthy="about 0",
            undefined=NO_ROWS,
        ),
        Metric(
            key="value/td/std",
            number=432,
            unit="reward",
            question="How noisy are the critic's one-step surprises?",
            of="std",
            low=0.0,
            undefined=NO_ROWS,
        ),
    )
    magnitude: Mean = reports(
        Metric(
            key="value/td/absmean",
            number=433,
            unit="reward",
            question="How large is the critic's typical one-step surprise?",
            low=0.0,
            healthy="falls, then flattens",
            undefined=NO_ROWS,
        )
    )
    nonfinite: Sum = reports(
        Metric(
            key="value/td/mean_nonfinite",
            number=434,
            unit="count",
            question="How many valid Bellman errors were NaN or infinite?",
            low=0.0,
            level=Level.MINIMAL,
            healthy="absent",
            critical="> 0",
            undefined="none was",
            when_positive=True,
        )
    )


@torch.inference_mode()
def td_errors(
    rewards: Tensor, values: Tensor, next_values: Tensor, *, gamma: float, valid: Tensor | None = None
) -> TdErrors:
    """Mean, spread and mean magnitude of the Bellman errors.

    Args:
        rewards, values: [T, B].
        next_values: critic's estimate of the state that follows, 0 after termination, [T, B].
        gamma: discount factor.
        valid: bool, same shape; None where every entry is.
    """
    same_shape(rewards=rewards, values=values, next_values=next_values, valid=valid)
    s = sample(rewards.detach().double() + gamma * next_values.detach().double() - values.detach().double(), valid)
    return TdErrors(spread(s), s.mean(s.values.abs()), Sum(s.nonfinite))


@dataclass(frozen=True, slots=True)
class TerminalError(MetricGroup):
    """The critic where nothing can follow."""

    error: Mean = reports(
        Metric(
            key="value/terminal_err",
            number=435,
            unit="reward",
            question="Does the critic know the reward of an episode's last step, the easiest thing it can learn?",
            low=0.0,
            healthy="falls to 0 early",
            source="Jones 2021, terminal correlation",
            undefined="no episode terminated",
        )
    )


@torch.inference_mode()
def terminal_error(
    values: Tensor, rewards: Tensor, terminated: Tensor, *, valid: Tensor | None = None
) -> TerminalError:
    """Mean |V - r| over the steps that terminated an episode; a time limit does not count.

    Args:
        values, rewards: [T, B].
        terminated: [T, B] bool.
        valid: bool, same shape; None where every entry is.
    """
    same_shape(values=values, rewards=rewards, terminated=terminated, valid=valid)
    last = terminated.bool() if valid is None else terminated.bool() & valid.bool()
    s = sample(values.detach().double() - rewards.detach().double(), last)
    return TerminalError(s.mean(s.values.abs()))


@dataclass(frozen=True, slots=True)
class EndingBias(MetricGroup):
    """The critic's bias where episodes end, by how they end."""

    truncated: Mean = reports(
        Metric(
            key="value/bias_truncated",
            number=437,
            unit="return",
            question="Does the critic promise too much where a time limit cuts an episode? Far above value/bias: what would have followed"
            " is left out of the returns, as if the episode had ended.",
            healthy="near value/bias",
            warn="> value/bias + 0.5 of ret/std",
            source="heuristic; V - R is V - r where the value of the final observation is missing",
            undefined="no episode was cut by a time limit",
        )
    )
    terminated: Mean = reports(
        Metric(
            key="value/bias_terminated",
            number=438,
            unit="return",
            question="Does the critic promise too much where an episode ends by itself? Far below value/bias: something is said to follow"
            " where nothing can.",
            healthy="near value/bias",
            warn="< value/bias - 0.5 of ret/std",
            source="heuristic; V - R is V - r - γ V(next) where a termination is taken for a time limit",
            undefined="no episode terminated",
        )
    )


@torch.inference_mode()
def ending_bias(
    values: Tensor, returns: Tensor, ended: Tensor, terminated: Tensor, *, valid: Tensor | None = None
) -> EndingBias:
    """Mean V - R over the steps at which a time limit cut an episode, and over those at which one terminated.

    Args:
        values: critic's estimates at collection, [T, B].
        returns: regression targets, [T, B].
        ended, terminated: [T, B] bool: the step ended its episode; it did so by termination.
        valid: bool, same shape; None where every entry is.
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
        """Both parts merge as spreads do."""
        error = merge_spreads(rows[..., :3])
        target = merge_spreads(rows[..., [0, 3, 4]])
        return np.concatenate([error, target[..., 1:]], axis=-1)


@dataclass(frozen=True, slots=True)
class MonteCarloFit(MetricGroup):
    """The critic against returns that do not contain it."""

    fit: Explained = reports(
        Metric(
            key="value/ev_mc",
            number=436,
            unit="1",
            question="Does the critic explain the returns of complete episodes, which unlike its targets do not contain itself?",
            high=1.0,
            cost="update",
            healthy="at least value/explained_variance - 0.2",
            source="λ-returns contain the critic",
            undefined="no episode terminated in the rollout, or their returns do not vary",
        )
    )


@torch.inference_mode()
def monte_carlo_fit(
    values: Tensor,
    rewards: Tensor,
    ended: Tensor,
    terminated: Tensor,
    *,
    gamma: float,
    valid: Tensor | None = None,
) -> MonteCarloFit:
    """Explained variance against the Monte-Carlo returns of the steps whose episode terminates inside the rollout.

    Args:
        values, rewards: [T, B].
        ended, terminated: [T, B] bool: the step ended its episode; it did so by termination.
        gamma: discount factor.
        valid: bool, same shape; None where every entry is.
    """
    same_shape(values=values, rewards=rewards, ended=ended, terminated=terminated, valid=valid)
    goes_on = (~ended.bool()).double()
    returns = discounted_sums(rewards.detach().double(), gamma * goes_on)
    complete = discounted_sums(terminated.double(), goes_on) > 0
    allowed = complete if valid is None else complete & valid.bool()
    v = values.detach().double()
    s = sample(v - returns, allowed)
    error, target = spread(s), spread(keep(rows_of(returns, None), s.kept))
    return MonteCarloFit(Explained(s.count, error.mean, error.m2, target.mean, target.m2))


def discounted_sums(x: Tensor, factors: Tensor) -> Tensor:
    """y_t = x_t + factors_t y_{t+1}, [T, ..], with nothing after the last step: log2 T passes over all steps at once."""
    step, length = 1, len(x)
    while step < length:
        x = torch.cat([x[:-step] + factors[:-step] * x[step:], x[-step:]])
        factors = torch.cat([factors[:-step] * factors[step:], factors[-step:]])
        step *= 2
    return x
