"""Equation of the value loss: half the squared error, clipped where the settings say so.

Some programs take the squared error without the half, and some multiply it by its weight at once. So every hypothesis about the terms is
tried with and without both factors.

Shapes: M minibatches of R rows in all, one minibatch after the other; N rows of one minibatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from esper_telemetry.core.arrays import ArrayLike, as_tensor
from esper_telemetry.core.borders import checked_arguments
from esper_telemetry.core.lazy import Tensor, inference_mode, torch
from esper_telemetry.equations.comparison import EquationCheck, compare
from esper_telemetry.equations.equation import Equation, Hypothesis
from esper_telemetry.equations.total_loss import (
    LOSS_TOLERANCE,
    Minibatches,
    bisected,
    divided,
    informative,
    rescaled,
    with_padding,
)

MAX_PAIRS: Final = 1 << 22
"""Pairs of rows of a minibatch up to which a clipped loss over all pairs is computed."""


@dataclass(frozen=True, slots=True)
class ValueLossInputs:
    """Rows [R] that the value loss is computed from, float64.

    Attributes:
        values, returns: the critic's estimates now, and its targets.
        old_values: estimates at collection.
        clip: largest difference of a clipped value from the old one; None where values are not clipped.
        advantages: as they multiply the ratio.
        raw_advantages: before normalisation.
        weight: of the value loss in the total.
        policy_clip: clip range of the ratio, which some programs take for values too.
        claimed: the losses [M], from which the factor ½ or the weight of a hypothesis is taken.
    """

    values: Tensor
    returns: Tensor
    minibatches: Minibatches
    claimed: Tensor
    old_values: Tensor | None = None
    clip: float | None = None
    advantages: Tensor | None = None
    raw_advantages: Tensor | None = None
    weight: float | None = None
    policy_clip: float | None = None

    def nearest(self, loss: Tensor) -> Tensor:
        """Return a loss [M], or its double, also times the weight, whichever is the nearest to the claimed losses."""
        weights = (1.0, 2.0) if not self.weight else (1.0, 2.0, self.weight, 2 * self.weight)
        candidates = [weight * loss for weight in weights]
        return min(candidates, key=lambda candidate: float((candidate - self.claimed).abs().max()))

    def half_square(self, difference: Tensor) -> Tensor:
        """Return half the mean square [M] of differences [R]."""
        return 0.5 * self.minibatches.mean(difference.square())

    def near(self, clip: float | None = None) -> Tensor | None:
        """Return the values [R] within `clip` of the old ones; None where these or the range are not known."""
        limit = self.clip if clip is None else clip
        if self.old_values is None or limit is None:
            return None
        return self.old_values + (self.values - self.old_values).clamp(-limit, limit)


def value_loss(inputs: ValueLossInputs) -> Tensor:
    """Return half the mean squared error [M], of the worse of value and clipped value where values are clipped."""
    return clipped_at(inputs, inputs.clip)


def clipped_at(inputs: ValueLossInputs, clip: float | None) -> Tensor:
    """Return the loss [M] with that clip range; without clipping where it is None."""
    error = (inputs.values - inputs.returns).abs()
    near = None if clip is None else inputs.near(clip)
    return inputs.half_square(error if near is None else torch.maximum(error, (near - inputs.returns).abs()))


def _with_target(inputs: ValueLossInputs, target: Tensor | None) -> Tensor | None:
    return None if target is None else inputs.nearest(value_loss(replace(inputs, returns=target)))


def _of_difference(inputs: ValueLossInputs, difference: Tensor | None) -> Tensor | None:
    return None if difference is None else inputs.nearest(inputs.half_square(difference))


def _raw_advantages(inputs: ValueLossInputs) -> Tensor | None:
    """Return the advantages before normalisation: by the returns, where a program keeps normalised ones alone."""
    raw, old_values = inputs.raw_advantages, inputs.old_values
    kept = raw is not None and (inputs.advantages is None or not torch.equal(raw, inputs.advantages))
    return raw if kept or old_values is None else inputs.returns - old_values


def _with_estimates(inputs: ValueLossInputs, advantages: Tensor | None, estimates: Tensor | None) -> Tensor | None:
    target = None if advantages is None or estimates is None else advantages + estimates
    return _with_target(inputs, target)


def _of_all_pairs(inputs: ValueLossInputs) -> Tensor | None:
    """Half the mean over all pairs of a value and a return, clipped values beside the old values of either row."""
    values, returns, mean = inputs.values, inputs.returns, inputs.minibatches.mean
    if inputs.near() is None:
        square = mean(values.square()) - 2 * mean(values) * mean(returns) + mean(returns.square())
        return inputs.nearest(0.5 * square)
    sizes = torch.bincount(inputs.minibatches.index).tolist()
    old_values, clip = inputs.old_values, inputs.clip
    if old_values is None or clip is None:
        return None
    if max(sizes) ** 2 > MAX_PAIRS or not bool(inputs.minibatches.valid.all()):
        return None
    parts = list(zip(values.split(sizes), old_values.split(sizes), returns.split(sizes), strict=True))
    losses = [torch.stack([_pairs(*rows, clip, across=across) for rows in parts]) for across in (True, False)]
    return min(map(inputs.nearest, losses), key=lambda loss: float((loss - inputs.claimed).abs().max()))


def _pairs(values: Tensor, old_values: Tensor, returns: Tensor, clip: float, *, across: bool) -> Tensor:
    """Return half the mean over all pairs, 0-d; old values belong to the rows of the returns, or (not `across`) to those of the values."""
    old = old_values if across else old_values.unsqueeze(1)
    near = old + (values.unsqueeze(1) - old).clamp(-clip, clip)
    error = torch.maximum((values.unsqueeze(1) - returns).abs(), (near - returns).abs())
    return 0.5 * error.square().mean()


def _huber(inputs: ValueLossInputs, *, delta: float = 1.0) -> Tensor:
    error = (inputs.values - inputs.returns).abs()
    rows = torch.where(error < delta, 0.5 * error.square(), delta * (error - 0.5 * delta))
    return inputs.nearest(inputs.minibatches.mean(rows))


def _clipped_elsewhere(inputs: ValueLossInputs) -> Tensor | None:
    unknown = inputs.clip is not None or inputs.policy_clip is None or inputs.old_values is None
    return None if unknown else inputs.nearest(clipped_at(inputs, inputs.policy_clip))


def _other_range(inputs: ValueLossInputs, claimed: Tensor) -> tuple[float, Tensor] | None:
    """Fit the clip range, with the factor of each program."""
    if inputs.old_values is None or not informative(claimed, value_loss(inputs)):
        return None
    widest = float((inputs.values - inputs.old_values).abs().max())
    for factor in (1.0, 2.0):
        fit = bisected(lambda clip, factor=factor: factor * clipped_at(inputs, clip), claimed, 0.0, widest)  # type: ignore[misc]
        if fit is not None and float((fit[1] - claimed).abs().max()) <= 1e-4 * float(claimed.abs().max()):
            return fit
    return None


def _weighted(inputs: ValueLossInputs) -> Tensor | None:
    return inputs.nearest(inputs.weight * value_loss(inputs)) if inputs.weight else None


def _normalized_returns(inputs: ValueLossInputs) -> Tensor | None:
    return _with_target(inputs, inputs.minibatches.normalized(inputs.returns))


DETAILS_SOURCE: Final = "Huang et al. 2022, The 37 implementation details of PPO"

VALUE_LOSS = Equation(
    name="value_loss",
    rank=54,
    quantity="the value losses",
    equation="L = ½ mean (V - R)², or ½ mean max((V - R)², (clip(V, V_old ± ε) - R)²) where values are clipped",
    source="1707.06347, eq. 9",
    inputs="value losses, values and returns of the minibatches, and old values where values are clipped",
    compute=value_loss,
    tolerance=LOSS_TOLERANCE,
    advice="Compare the line of the value loss with the equation, term by term.",
    hypotheses=(
        Hypothesis(
            name="mean_square",
            says="the mean squared error without the factor ½",
            equation="L = mean (V - R)²",
            compute=lambda x: 2 * value_loss(x),
            variant=True,
            source="Stable-Baselines3, PPO.train",
        ),
        Hypothesis(
            name="weighted",
            says="the squared error times the weight of the value loss",
            equation="L = c ½ mean (V - R)²",
            compute=_weighted,
            variant=True,
        ),
        Hypothesis(
            name="clipped",
            says="the squared error of values that are clipped, which the settings do not say",
            equation="L = ½ mean max((V - R)², (clip(V, V_old ± ε) - R)²)",
            compute=_clipped_elsewhere,
            variant=True,
            source=DETAILS_SOURCE,
        ),
        Hypothesis(
            name="huber",
            says="the Huber loss",
            equation="L = mean of ½ d² where |d| < 1, |d| - ½ elsewhere, d = V - R",
            compute=_huber,
            variant=True,
            source="2006.05990 (Andrychowicz et al.), 3.4",
        ),
        Hypothesis(
            name="sign",
            says="the squared error with a minus sign",
            equation="L = -½ mean (V - R)²",
            compute=lambda x: x.nearest(-value_loss(x)),
            advice="Minimise the squared error.",
        ),
        Hypothesis(
            name="sum",
            says="the sum of the squared errors in place of the mean",
            equation="L = ½ Σ (V - R)²",
            compute=lambda x: x.nearest(value_loss(x) * x.minibatches.counts),
            advice="Take the mean, so that the step does not grow with the minibatch.",
        ),
        Hypothesis(
            name="advantage_target",
            says="the squared error to the advantages in place of the returns",
            equation="L = ½ mean (V - A)²",
            compute=lambda x: _with_target(x, _raw_advantages(x)),
            advice="Regress on returns = advantages + values.",
        ),
        Hypothesis(
            name="normalized_advantage_target",
            says="the squared error to the normalised advantages in place of the returns",
            equation="L = ½ mean (V - Â)²",
            compute=lambda x: _with_target(x, x.advantages),
            advice="Regress on returns = advantages + values, with the advantages before normalisation.",
        ),
        Hypothesis(
            name="normalized_advantages_in_target",
            says="the squared error to normalised advantages plus old values",
            equation="L = ½ mean (V - Â - V_old)²",
            compute=lambda x: _with_estimates(x, x.advantages, x.old_values),
            advice="Compute the returns before the advantages are normalised.",
        ),
        Hypothesis(
            name="moving_target",
            says="the squared error to advantages plus the values of now, which are never reached",
            equation="L = ½ mean (V - (A + V))²",
            compute=lambda x: _with_estimates(x, _raw_advantages(x), x.values),
            advice="Add the values at collection to the advantages, once per rollout.",
        ),
        Hypothesis(
            name="old_value_target",
            says="the squared error to the values at collection",
            equation="L = ½ mean (V - V_old)²",
            compute=lambda x: _of_difference(x, None if x.old_values is None else x.values - x.old_values),
            advice="Regress on the returns.",
        ),
        Hypothesis(
            name="old_values",
            says="the squared error of the values at collection, which do not depend on the weights",
            equation="L = ½ mean (V_old - R)²",
            compute=lambda x: _of_difference(x, None if x.old_values is None else x.old_values - x.returns),
            advice="Use the values of this forward pass.",
        ),
        Hypothesis(
            name="unclipped",
            says="the squared error without clipping, which the settings ask for",
            equation="L = ½ mean (V - R)²",
            compute=lambda x: None if x.clip is None else x.nearest(clipped_at(x, None)),
            variant=True,
            source="2006.05990 (Andrychowicz et al.), 3.4: no clipping of values is better",
        ),
        Hypothesis(
            name="no_maximum",
            says="the squared error of the clipped value alone, without the maximum",
            equation="L = ½ mean (clip(V, V_old ± ε) - R)²",
            compute=lambda x: _of_difference(x, None if (near := x.near()) is None else near - x.returns),
            source=DETAILS_SOURCE,
            advice="Take the maximum with the error of the value: the clipped one alone has no gradient beyond the range.",
        ),
        Hypothesis(
            name="minimum",
            says="the smaller of the two squared errors in place of the larger",
            equation="L = ½ mean min((V - R)², (clip(V, V_old ± ε) - R)²)",
            compute=lambda x: (
                None
                if (near := x.near()) is None
                else _of_difference(x, torch.minimum((x.values - x.returns).abs(), (near - x.returns).abs()))
            ),
            source=DETAILS_SOURCE,
            advice="Take the maximum of the errors.",
        ),
        Hypothesis(
            name="broadcast",
            says="the mean over all pairs of a value and a return: [N] was broadcast against [N, 1]",
            equation="L = ½ mean_ij (V_i - R_j)²",
            compute=_of_all_pairs,
            source="RLinf/RLinf#1568",
            advice="Flatten values and returns to [N] both.",
        ),
        Hypothesis(
            name="absolute",
            says="the absolute error",
            equation="L = mean |V - R|",
            compute=lambda x: x.nearest(0.5 * x.minibatches.mean((x.values - x.returns).abs())),
            advice="Take the square: the absolute error regresses on the median.",
        ),
        Hypothesis(
            name="root",
            says="the root of the mean squared error",
            equation="L = √ mean (V - R)²",
            compute=lambda x: x.nearest(0.5 * (2 * clipped_at(x, None)).sqrt()),
            advice="Take the mean squared error itself.",
        ),
        Hypothesis(
            name="squared_mean",
            says="the square of the mean error",
            equation="L = ½ (mean (V - R))²",
            compute=lambda x: x.nearest(0.5 * x.minibatches.mean(x.values - x.returns).square()),
            advice="Square each row's error before the mean.",
        ),
        Hypothesis(
            name="normalized_returns",
            says="the squared error to returns that are normalised over the minibatch",
            equation="L = ½ mean (V - (R - mean R) / std R)²",
            compute=_normalized_returns,
            advice="Regress on the returns themselves, or use the same statistics for values in the advantages.",
        ),
        Hypothesis(
            name="shifted_rows",
            says="the squared error to the return of the row before",
            equation="L = ½ mean (V_i - R_{i-1})²",
            compute=lambda x: _with_target(x, x.returns[x.minibatches.followers(-1)]),
            advice="Index values and returns with the same rows.",
        ),
        Hypothesis(
            name="following_rows",
            says="the squared error to the return of the row after",
            equation="L = ½ mean (V_i - R_{i+1})²",
            compute=lambda x: _with_target(x, x.returns[x.minibatches.followers(1)]),
            advice="Index values and returns with the same rows.",
        ),
        Hypothesis(
            name="clip_range",
            says="the squared error with another clip range of the values than the setting,",
            equation="L = ½ mean max((V - R)², (clip(V, V_old ± ε') - R)²)",
            fit=_other_range,
            parameter="ε",
            variant=True,
            source=DETAILS_SOURCE,
        ),
        *with_padding(value_loss, "½ (V - R)²", ValueLossInputs.nearest),
        *rescaled(value_loss, "the squared error", "½ mean (V - R)²", variant=False),
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
    """Return the comparison of value losses with half the mean squared error, of clipped values where `clip_value` is given.

    Args:
        loss: 0-d, or [M], one per minibatch, without its weight.
        values: [N], or [M, N], or [R] with `counts`: the critic's estimates now.
        returns: of the same shape: its targets.
        old_values: of the same shape: estimates at collection.
        clip_value: largest difference of a clipped value from the old one; None where values are not clipped.
        valid: bool, of the same shape; None where every row counts.
        counts: rows of each minibatch, where the columns are [R].
        advantages, raw_advantages: of the same shape: after and before normalisation, for the mistakes that involve them.
        weight: of the value loss in the total; None where it is not known.
        clip: clip range of the ratio, which some programs take for values too.
        precision: of the trainer's arithmetic: fp32, tf32, bf16 or fp16.
        tolerance: largest relative error; by precision where it is None.

    Raises:
        ValueError: shapes do not fit, values are clipped and there are no old ones, or the clip range is not above 0.
    """
    if clip_value is not None and (old_values is None or not clip_value > 0):
        raise ValueError(f"clipped values need old_values and a clip_value above 0, got clip_value {clip_value!r}")
    now = as_tensor(values)
    given = {"returns": returns, "old_values": old_values, "advantages": advantages, "raw_advantages": raw_advantages}
    columns = {name: as_tensor(column, now) for name, column in given.items() if column is not None}
    claimed, minibatches, rows = divided(as_tensor(loss), counts, valid, values=now, **columns)
    inputs = ValueLossInputs(
        values=rows["values"],
        returns=rows["returns"],
        minibatches=minibatches,
        claimed=claimed.double(),
        old_values=rows.get("old_values"),
        clip=clip_value,
        advantages=rows.get("advantages"),
        raw_advantages=rows.get("raw_advantages"),
        weight=weight,
        policy_clip=clip,
    )
    # a clipped value is rounded where it is added to the old one
    error = (inputs.values - inputs.returns).abs()
    rounding = 0.0 if inputs.clip is None or inputs.old_values is None else 0.1 * inputs.old_values.abs()
    terms = minibatches.mean(0.5 * error.square() + error * rounding)
    return compare(VALUE_LOSS, inputs, claimed, magnitudes=(terms,), precision=precision, tolerance=tolerance)
