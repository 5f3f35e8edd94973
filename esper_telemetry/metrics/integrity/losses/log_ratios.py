"""Equation of the log-ratios: log-probabilities of the actions now, less those at collection, in the same rows.

Shapes: R rows of all minibatches of an update.
"""

from __future__ import annotations

from dataclasses import dataclass

from esper_telemetry.core.arrays import ArrayLike, as_mask, as_tensor
from esper_telemetry.core.equations.equation import Equation, Hypothesis
from esper_telemetry.core.lazy import Tensor, inference_mode
from esper_telemetry.metrics.integrity.equations import EquationCheck, compare
from esper_telemetry.metrics.statistics import same_shape

RATIO_TOLERANCE = 0.5
"""Factor of the tolerances: 5e-5 in single precision, of the largest log-probability. Healthy runs of the bundled trainer reach 3e-7."""


@dataclass(frozen=True, slots=True)
class LogRatioInputs:
    """Log-probabilities of the actions [R], float64.

    Attributes:
        now: under the policy of the minibatch.
        stored: at collection.
        in_order: at collection, in the order of the rollout instead of that of the minibatches.
        swapped: at collection, in the rows that steps and environments give when they change places.
    """

    now: Tensor
    stored: Tensor
    in_order: Tensor | None = None
    swapped: Tensor | None = None

    def to(self, stored: Tensor | None) -> Tensor | None:
        """Return the log-ratios to other stored log-probabilities."""
        return None if stored is None else self.now - stored


LOG_RATIOS = Equation(
    name="log_ratios",
    quantity="the log-ratios",
    equation="log r = log π(a|s) - log π_old(a|s)",
    source="1707.06347, eq. 6",
    inputs="log-ratios, the distributions of the minibatches, and the actions and log-probabilities of the rollout",
    compute=lambda x: x.now - x.stored,
    tolerance=RATIO_TOLERANCE,
    rank=48,
    advice="Compare the rows and the order of the two log-probabilities.",
    hypotheses=(
        Hypothesis(
            name="inverted",
            says="the old log-probabilities less the new ones: the ratio is inverted",
            equation="log r = log π_old - log π",
            compute=lambda x: x.stored - x.now,
            source="1707.06347, eq. 6",
            advice="Take exp(new log-probability - old log-probability).",
        ),
        Hypothesis(
            name="recomputed",
            says="zeros: the old log-probabilities are those of now",
            equation="log r = log π - log π",
            compute=lambda x: 0 * x.now,
            advice="Store the log-probabilities at collection, once: otherwise nothing is ever clipped.",
        ),
        Hypothesis(
            name="no_old",
            says="the new log-probabilities, without the old ones",
            equation="log r = log π",
            compute=lambda x: x.now,
            source="1707.06347, eq. 6",
            advice="Subtract the log-probabilities at collection.",
        ),
        Hypothesis(
            name="quotient",
            says="the quotient of the log-probabilities in place of that of the probabilities",
            equation="r = log π / log π_old",
            compute=lambda x: (x.now / x.stored).log(),
            source="1707.06347, eq. 6",
            advice="Take the exponential of the difference.",
        ),
        Hypothesis(
            name="rows_in_order",
            says="the new log-probabilities less old ones in the order of the rollout: they are not indexed with the minibatch",
            equation="log r_i = log π_i - log π_old,start+i",
            compute=lambda x: x.to(x.in_order),
            advice="Index the old log-probabilities with the rows of the minibatch.",
        ),
        Hypothesis(
            name="axes_swapped",
            says="the new log-probabilities less old ones that are flattened with steps and environments exchanged",
            equation="log r = log π_tb - log π_old,bt",
            compute=lambda x: x.to(x.swapped),
            advice="Flatten all columns of the rollout in the same order.",
        ),
        Hypothesis(
            name="shifted_rows",
            says="the new log-probabilities less the old ones of the row before",
            equation="log r_i = log π_i - log π_old,i-1",
            compute=lambda x: x.now - x.stored.roll(1),
            advice="Index both log-probabilities with the same rows.",
        ),
    ),
)


@inference_mode
def check_log_ratios(
    log_ratio: ArrayLike,
    log_probs: ArrayLike,
    old_log_probs: ArrayLike,
    *,
    valid: ArrayLike | None = None,
    in_order: ArrayLike | None = None,
    swapped: ArrayLike | None = None,
    precision: str | None = None,
    tolerance: float | None = None,
) -> EquationCheck:
    """Return the comparison of log-ratios with the difference of new and old log-probabilities.

    Args:
        log_ratio: any shape.
        log_probs: of the same shape: of the actions under the policy of the minibatch.
        old_log_probs: of the same shape: at collection, in the same rows.
        valid: bool, of the same shape; None where every row counts.
        in_order, swapped: of the same shape: those at collection in the order of the rollout, and in rows that steps and environments give
            when they change places, for the mistakes that involve them.
        precision: of the trainer's arithmetic: fp32, tf32, bf16 or fp16.
        tolerance: largest relative error; by precision where it is None.

    Raises:
        ValueError: shapes differ.
    """
    claimed = as_tensor(log_ratio)
    given = {"log_probs": log_probs, "old_log_probs": old_log_probs, "in_order": in_order, "swapped": swapped}
    columns = {name: as_tensor(column, claimed) for name, column in given.items() if column is not None}
    mask = as_mask(valid, claimed)
    same_shape(log_ratio=claimed, valid=mask, **columns)
    exact = {name: column.detach().double() for name, column in columns.items()}
    inputs = LogRatioInputs(exact["log_probs"], exact["old_log_probs"], exact.get("in_order"), exact.get("swapped"))
    magnitudes = (inputs.now, inputs.stored)
    return compare(
        LOG_RATIOS, inputs, claimed, magnitudes=magnitudes, valid=mask, precision=precision, tolerance=tolerance
    )
