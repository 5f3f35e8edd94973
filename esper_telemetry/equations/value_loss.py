"""Equation of the value loss: half the squared error, clipped if the settings enable it.

Some programs omit the factor ½, and some include the weight of the loss. So every hypothesis about the terms is tried with and without
both factors.

Shapes: M minibatches with R rows in total, concatenated; N rows of one minibatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from esper_telemetry.core.arrays import ArrayLike
from esper_telemetry.core.lazy import Tensor, inference_mode, torch
from esper_telemetry.core.minibatch_objective import LossRows
from esper_telemetry.core.requirements import checked_arguments
from esper_telemetry.equations.comparison import EquationCheck, compare
from esper_telemetry.equations.equation import Equation, mistake, variant
from esper_telemetry.equations.minibatch_losses import (
    LOSS_TOLERANCE,
    Minibatches,
    OneMinibatch,
    bisected,
    divided,
    informative,
    rescaled,
    with_padding,
)

MAX_PAIRS: Final = 1 << 24
"""Largest number of pairs of rows in a minibatch for which a clipped loss over all pairs is computed."""


@dataclass(frozen=True, slots=True)
class ValueLossInputs:
    """Rows [R] that the value loss is computed from: float64, or one minibatch with its graph.

    Attributes:
        values, returns: the critic's current estimates, and its targets.
        old_values: estimates at collection.
        clip: largest difference of a clipped value from the old value; None if values are not clipped.
        advantages: as they multiply the ratio.
        raw_advantages: before normalisation.
        weight: of the value loss in the total.
        policy_clip: clip range of the ratio, which some programs also use for values.
        clip_maximum: the loss of a row is the larger of the value's error and the clipped value's error.
    """

    values: Tensor
    returns: Tensor
    minibatches: Minibatches
    old_values: Tensor | None = None
    clip: float | None = None
    advantages: Tensor | None = None
    raw_advantages: Tensor | None = None
    weight: float | None = None
    policy_clip: float | None = None
    clip_maximum: bool = True

    @classmethod
    def of(cls, rows: LossRows) -> ValueLossInputs:
        """Return the rows of one minibatch."""
        return cls(
            values=rows.values,
            returns=rows.returns,
            minibatches=OneMinibatch.like(rows.values),
            old_values=rows.old_values,
            clip=rows.clip_value,
            advantages=rows.advantages,
            raw_advantages=rows.raw_advantages,
            policy_clip=rows.clip,
            clip_maximum=rows.clip_maximum,
        )

    @property
    def range(self) -> float | None:
        """Clip range of the values; the clip range of the ratio if it is None."""
        return self.policy_clip if self.clip is None else self.clip

    def multiples(self) -> tuple[float, ...]:
        """Return factors that programs apply to the loss."""
        return (1.0, 2.0) if not self.weight else (1.0, 2.0, self.weight, 2 * self.weight)

    def half(self, squares: Tensor) -> Tensor:
        """Return half the mean [M] of rows [R]."""
        return 0.5 * self.minibatches.mean(squares)

    def error(self) -> Tensor:
        """Return the error [R] of the values."""
        return self.values - self.returns

    def near_error(self, clip: float | None = None) -> Tensor:
        """Return the error [R] of values clipped to their range around the old values, or to another range."""
        limit = self.range if clip is None else clip
        assert self.old_values is not None and limit is not None
        return self.old_values + (self.values - self.old_values).clamp(-limit, limit) - self.returns

    def normalized(self) -> Tensor | None:
        """Return the normalised advantages; normalise over the minibatch if the settings do not enable it."""
        raw, own = self.raw_advantages, self.advantages
        plain = raw is not None and own is not None and torch.equal(raw, own)
        return self.minibatches.normalized(own) if plain and own is not None else own

    def raw(self) -> Tensor | None:
        """Return the advantages before normalisation, computed from the returns if a program keeps only normalised advantages."""
        raw, old_values = self.raw_advantages, self.old_values
        kept = raw is not None and (self.advantages is None or not torch.equal(raw, self.advantages))
        return raw if kept or old_values is None else self.returns - old_values


def value_loss(x: ValueLossInputs) -> Tensor:
    """Return half the mean squared error [M]; if values are clipped, the larger error of the value and the clipped value."""
    if x.clip_maximum or x.clip is None:
        return clipped_at(x, x.clip)
    return x.half(x.near_error().square())


def clipped_at(x: ValueLossInputs, clip: float | None) -> Tensor:
    """Return the loss [M] with this clip range; without clipping if it is None."""
    squares = x.error().square()
    clipped = clip is not None and x.old_values is not None
    return x.half(torch.maximum(squares, x.near_error(clip).square()) if clipped else squares)


def _to(x: ValueLossInputs, target: Tensor | None) -> Tensor | None:
    return None if target is None else value_loss(replace(x, returns=target))


def _to_estimates(x: ValueLossInputs, advantages: Tensor | None, estimates: Tensor | None) -> Tensor | None:
    return None if advantages is None or estimates is None else _to(x, advantages + estimates.detach())


def _of_all_pairs(x: ValueLossInputs) -> Tensor | tuple[Tensor, ...] | None:
    """Half the mean over all pairs of a value and a return; values are clipped to the old values of either row."""
    values, returns, mean = x.values, x.returns, x.minibatches.mean
    if x.clip is None or x.old_values is None:
        return 0.5 * (mean(values.square()) - 2 * mean(values) * mean(returns) + mean(returns.square()))
    sizes = torch.bincount(x.minibatches.index).tolist()
    if max(sizes) ** 2 > MAX_PAIRS or not bool(x.minibatches.valid.all()):
        return None
    parts = list(zip(values.split(sizes), x.old_values.split(sizes), returns.split(sizes), strict=True))
    losses = [[_pairs(*rows, x.clip, across=across) for rows in parts] for across in (True, False)]
    return tuple([torch.stack(one) for one in losses])


def _pairs(values: Tensor, old_values: Tensor, returns: Tensor, clip: float, *, across: bool) -> Tensor:
    """Return half the mean over all pairs, 0-d; old values belong to the returns' rows, or (not `across`) to the values' rows."""
    old = old_values if across else old_values.unsqueeze(1)
    near = old + (values.unsqueeze(1) - old).clamp(-clip, clip)
    error = torch.maximum((values.unsqueeze(1) - returns).abs(), (near - returns).abs())
    return 0.5 * error.square().mean()


def _huber(x: ValueLossInputs, *, delta: float = 1.0) -> Tensor:
    error = x.error().abs()
    return x.minibatches.mean(torch.where(error < delta, 0.5 * error.square(), delta * (error - 0.5 * delta)))


def _other_range(x: ValueLossInputs, claimed: Tensor) -> tuple[float, Tensor] | None:
    """Fit the clip range for each factor that programs apply."""
    if x.old_values is None or not informative(claimed, value_loss(x)):
        return None
    widest = float((x.values - x.old_values).abs().max())
    for factor in (1.0, 2.0):
        fit = bisected(lambda clip, factor=factor: factor * clipped_at(x, clip), claimed, 0.0, widest)  # type: ignore[misc]
        if fit is not None and float((fit[1] - claimed).abs().max()) <= 1e-4 * float(claimed.abs().max()):
            return fit
    return None


VALUE_LOSS = Equation(
    name="value_loss",
    rank=54,
    quantity="the value losses",
    equation="L = ½ mean (V - R)², or ½ mean max((V - R)², (clip(V, V_old ± ε) - R)²) if values are clipped",
    source="1707.06347, eq. 9",
    inputs="value losses, values and returns of the minibatches, and old values if values are clipped",
    check="check_value_loss",
    shown_by="test_losses",
    compute=value_loss,
    multiples=ValueLossInputs.multiples,
    tolerance=LOSS_TOLERANCE,
    advice="Compare the line that computes the value loss with the equation, term by term.",
    hypotheses=(
        variant("mean_square", "the mean squared error without the factor ½")
        .predicts("L = mean (V - R)²", lambda x: 2 * value_loss(x))
        .given(exact=True)
        .cites("Stable-Baselines3, PPO.train"),
        variant("weighted", "the squared error times the weight of the value loss")
        .predicts("L = c ½ mean (V - R)²", lambda x: x.weight * value_loss(x))
        .given(needs="weight", of="weight"),
        variant("clipped", "the squared error of clipped values although the settings do not enable clipping")
        .predicts("L = ½ mean max((V - R)², (clip(V, V_old ± ε) - R)²)", lambda x: clipped_at(x, x.policy_clip) if x.clip is None else None)
        .given(needs="policy_clip", gradient="value_clipped")
        .cites("Huang et al. 2022, The 37 implementation details of PPO"),
        variant("huber", "the Huber loss")
        .predicts("L = mean of ½ d² if |d| < 1, |d| - ½ otherwise, d = V - R", _huber)
        .given(gradient="value_huber")
        .cites("2006.05990 (Andrychowicz et al.), 3.4"),
        mistake("sign", "the squared error with a minus sign")
        .predicts("L = -½ mean (V - R)²", lambda x: -value_loss(x))
        .advises("Minimise the squared error."),
        mistake("sum", "the sum of the squared errors instead of the mean")
        .predicts("L = ½ Σ (V - R)²", lambda x: value_loss(x) * x.minibatches.counts)
        .advises("Take the mean, so that the step does not grow with the minibatch.")
        .cites("program: script-v_sum"),
        mistake("advantage_target", "the squared error to the advantages instead of the returns")
        .predicts("L = ½ mean (V - A)²", lambda x: _to(x, x.raw()))
        .given(gradient="target_advantages")
        .advises("Regress on returns = advantages + values.", source="program: script-v_advantage"),
        mistake("normalized_advantage_target", "the squared error to the normalised advantages instead of the returns")
        .predicts("L = ½ mean (V - Â)²", lambda x: _to(x, x.normalized()))
        .given(needs="advantages", gradient="target_normalized")
        .advises("Regress on returns = advantages + values, with the advantages before normalisation.")
        .cites("program: loop-v_advantage"),
        mistake("normalized_advantages_in_target", "the squared error to normalised advantages plus old values")
        .predicts("L = ½ mean (V - Â - V_old)²", lambda x: _to_estimates(x, x.advantages, x.old_values))
        .advises("Compute the returns before the advantages are normalised."),
        mistake("moving_target", "the squared error to advantages plus current values: a target that moves with the critic")
        .predicts("L = ½ mean (V - (A + V))²", lambda x: _to_estimates(x, x.raw(), x.values))
        .given(gradient="target_moving")
        .advises("Add the values at collection to the advantages once per rollout."),
        mistake("old_value_target", "the squared error to the values at collection")
        .predicts("L = ½ mean (V - V_old)²", lambda x: x.half((x.values - x.old_values).square()))
        .given(needs="old_values", gradient="target_old_values")
        .advises("Regress on the returns.", source="program: loop-v_old_values"),
        mistake("old_values", "the squared error of the values at collection, which do not depend on the weights")
        .predicts("L = ½ mean (V_old - R)²", lambda x: x.half((x.old_values - x.returns).square()))
        .given(needs="old_values")
        .advises("Use the values of this forward pass."),
        variant("unclipped", "the squared error without clipping although the settings enable it")
        .predicts("L = ½ mean (V - R)²", lambda x: clipped_at(x, None))
        .given(needs="clip")
        .cites("2006.05990 (Andrychowicz et al.), 3.4: no clipping of values is better"),
        mistake("no_maximum", "the squared error of only the clipped value, without the maximum")
        .predicts("L = ½ mean (clip(V, V_old ± ε) - R)²", lambda x: x.half(x.near_error().square()))
        .given(needs="clip")
        .advises("Take the maximum with the unclipped value's error: beyond the range, a clipped value has a gradient of 0.")
        .cites("Huang et al. 2022, The 37 implementation details of PPO"),
        mistake("minimum", "the smaller of the two squared errors instead of the larger")
        .predicts(
            "L = ½ mean min((V - R)², (clip(V, V_old ± ε) - R)²)",
            lambda x: x.half(torch.minimum(x.error().square(), x.near_error().square())),
        )
        .given(needs="range", gradient="value_clip_minimum")
        .advises("Take the maximum of the errors.")
        .cites("Huang et al. 2022, The 37 implementation details of PPO"),
        mistake("broadcast", "the mean over all pairs of a value and a return: [N] was broadcast against [N, 1]")
        .predicts("L = ½ mean_ij (V_i - R_j)²", _of_all_pairs)
        .given(gradient="values_broadcast")
        .advises("Flatten both values and returns to [N].", source="RLinf/RLinf#1568"),
        mistake("absolute", "the absolute error")
        .predicts("L = mean |V - R|", lambda x: x.half(x.error().abs()))
        .given(gradient="value_absolute")
        .advises("Take the square: the absolute error regresses on the median."),
        mistake("root", "the root of the mean squared error")
        .predicts("L = √ mean (V - R)²", lambda x: 0.5 * (2 * clipped_at(x, None)).sqrt())
        .given(gradient="value_root")
        .advises("Take the mean squared error itself."),
        mistake("squared_mean", "the square of the mean error")
        .predicts("L = ½ (mean (V - R))²", lambda x: 0.5 * x.minibatches.mean(x.error()).square())
        .advises("Square each row's error before the mean."),
        mistake("normalized_returns", "the squared error to returns normalised over the minibatch")
        .predicts("L = ½ mean (V - (R - mean R) / std R)²", lambda x: _to(x, x.minibatches.normalized(x.returns)))
        .given(gradient="target_normalized_returns")
        .advises("Regress on the raw returns, or use the same statistics for the values in the advantages."),
        mistake("shifted_rows", "the squared error to the previous row's return")
        .predicts("L = ½ mean (V_i - R_{i-1})²", lambda x: _to(x, x.returns[x.minibatches.followers(-1)]))
        .given(gradient="target_shifted")
        .advises("Index values and returns with the same rows."),
        mistake("following_rows", "the squared error to the next row's return")
        .predicts("L = ½ mean (V_i - R_{i+1})²", lambda x: _to(x, x.returns[x.minibatches.followers(1)]))
        .given(gradient="target_following")
        .advises("Index values and returns with the same rows."),
        variant("clip_range", "the squared error with a different clip range of the values than the setting,")
        .fits("L = ½ mean max((V - R)², (clip(V, V_old ± ε') - R)²)", "ε", _other_range)
        .cites("Huang et al. 2022, The 37 implementation details of PPO"),
        *with_padding(value_loss, "½ (V - R)²"),
        *rescaled(value_loss, "the squared error", "½ mean (V - R)²"),
    ),
)


@checked_arguments(clip_value=0, clip=0, tolerance=0)
@inference_mode
def check_value_loss(
    loss: ArrayLike,
    values: ArrayLike,
    returns: ArrayLike,
    *,
    old_values: ArrayLike | None = None,
    clip_value: float | None = None,
    valid: ArrayLike | None = None,
    counts: Sequence[int] | None = None,
    advantages: ArrayLike | None = None,
    raw_advantages: ArrayLike | None = None,
    weight: float | None = None,
    clip: float | None = None,
    precision: str | None = None,
    tolerance: float | None = None,
) -> EquationCheck:
    """Return the comparison of value losses with half the mean squared error, of clipped values if `clip_value` is given.

    Args:
        loss: 0-d, or [M], one per minibatch, without its weight.
        values: [N], or [M, N], or [R] with `counts`: the critic's current estimates.
        returns: of the same shape: the critic's targets.
        old_values: of the same shape: estimates at collection.
        clip_value: largest difference of a clipped value from the old value; None if values are not clipped.
        valid: bool, of the same shape; None if every row counts.
        counts: rows of each minibatch, if the columns are [R].
        advantages, raw_advantages: of the same shape: after and before normalisation, for the mistakes that involve them.
        weight: of the value loss in the total; None if it is not known.
        clip: clip range of the ratio, which some programs also use for values.
        precision: of the trainer's arithmetic: fp32, tf32, bf16 or fp16.
        tolerance: largest relative error; by precision if it is None.

    Raises:
        ValueError: shapes do not fit, values are clipped but old values are missing, or the clip range is not above 0.
    """
    if clip_value is not None and (old_values is None or not clip_value > 0):
        raise ValueError(f"clipped values need old_values and a clip_value above 0, got clip_value {clip_value!r}")
    columns = {"values": values, "returns": returns, "old_values": old_values, "advantages": advantages, "raw_advantages": raw_advantages}
    claimed, minibatches, rows = divided(loss, counts, valid, **columns)
    inputs = ValueLossInputs(minibatches=minibatches, clip=clip_value, weight=weight, policy_clip=clip, **rows)
    # a clipped value is rounded when its difference is added to the old value
    error = inputs.error().abs()
    rounding = 0.0 if inputs.clip is None or inputs.old_values is None else 0.1 * inputs.old_values.abs()
    terms = minibatches.mean(0.5 * error.square() + error * rounding)
    return compare(VALUE_LOSS, inputs, claimed, magnitudes=(terms,), precision=precision, tolerance=tolerance)
