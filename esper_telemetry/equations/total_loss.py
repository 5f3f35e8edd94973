"""Equation of the total loss: the sum of its terms. Shapes: M minibatches."""

from __future__ import annotations

from dataclasses import dataclass

from esper_telemetry.core.arrays import ArrayLike, as_tensor
from esper_telemetry.core.lazy import Tensor, inference_mode, torch
from esper_telemetry.core.requirements import checked_arguments
from esper_telemetry.equations.comparison import EquationCheck, compare, unchecked
from esper_telemetry.equations.equation import Equation, mistake, variant
from esper_telemetry.equations.minibatch_losses import LOSS_TOLERANCE, added, informative, rescaled
from esper_telemetry.metrics.statistics import same_shape


@dataclass(frozen=True, slots=True)
class TotalLossInputs:
    """Terms of the total loss [M] in float64, and their weights; `entropy` is the negative mean entropy."""

    policy: Tensor
    value: Tensor
    entropy: Tensor
    value_weight: float
    entropy_weight: float

    def total(self, *, policy: float = 1.0, value: float | None = None, entropy: float | None = None) -> Tensor:
        """Return the sum of the terms [M]; arguments replace the weights of the settings."""
        value_weight = self.value_weight if value is None else value
        entropy_weight = self.entropy_weight if entropy is None else entropy
        return policy * self.policy + value_weight * self.value + entropy_weight * self.entropy


def total_loss(inputs: TotalLossInputs) -> Tensor:
    """Return the total loss [M] (1707.06347, eq. 9)."""
    return inputs.total()


def _other_weight(inputs: TotalLossInputs, claimed: Tensor, term: Tensor, rest: Tensor) -> tuple[float, Tensor] | None:
    return added(rest, term, claimed) if informative(claimed, total_loss(inputs)) else None


TOTAL_LOSS = Equation(
    name="total_loss",
    rank=58,
    quantity="the total losses",
    equation="L = L_policy + c_value L_value + c_entropy L_entropy, L_entropy = -mean H",
    source="1707.06347, eq. 9",
    inputs="the total loss, its terms, and their weights",
    check="check_total_loss",
    shown_by="test_entropy_and_total",
    compute=total_loss,
    tolerance=LOSS_TOLERANCE,
    hypotheses=(
        mistake("entropy_sign", "the sum with the entropy added instead of subtracted: the bonus punishes exploration")
        .predicts("L = L_policy + c_value L_value + c_entropy mean H", lambda x: x.total(entropy=-x.entropy_weight))
        .given(needs="entropy_weight")
        .advises("Subtract the weighted entropy.", source="program: loop-entropy_sign"),
        mistake("value_sign", "the sum with the value loss subtracted: the critic increases its error")
        .predicts("L = L_policy - c_value L_value + c_entropy L_entropy", lambda x: x.total(value=-x.value_weight))
        .advises("Add the weighted value loss: eq. 9 subtracts it because its objective is maximised."),
        mistake("policy_sign", "the sum with the policy loss subtracted")
        .predicts("L = -L_policy + c_value L_value + c_entropy L_entropy", lambda x: x.total(policy=-1.0))
        .advises("Add the policy loss, which is the negative surrogate."),
        mistake("sign", "the sum with the opposite sign")
        .predicts("L = -(L_policy + c_value L_value + c_entropy L_entropy)", lambda x: -x.total())
        .advises("Minimise the loss."),
        mistake("entropy_missing", "the sum without the entropy bonus of the settings")
        .predicts("L = L_policy + c_value L_value", lambda x: x.total(entropy=0.0))
        .given(needs="entropy_weight")
        .advises("Add the entropy loss times its weight."),
        variant("value_missing", "the sum without the value loss")
        .predicts("L = L_policy + c_entropy L_entropy", lambda x: x.total(value=0.0))
        .cites("separate optimizers of actor and critic"),
        mistake("policy_missing", "the sum without the policy loss")
        .predicts("L = c_value L_value + c_entropy L_entropy", lambda x: x.total(policy=0.0))
        .advises("Add the policy loss."),
        variant("value_doubled", "the sum with the value loss as the mean squared error without the factor ½")
        .predicts("L = L_policy + 2 c_value L_value + c_entropy L_entropy", lambda x: x.total(value=2 * x.value_weight))
        .cites("Stable-Baselines3, PPO.train"),
        variant("value_halved", "the sum with an additional factor ½ of the value loss").predicts(
            "L = L_policy + ½ c_value L_value + c_entropy L_entropy", lambda x: x.total(value=x.value_weight / 2)
        ),
        variant("value_unweighted", "the sum with an unweighted value loss")
        .predicts("L = L_policy + L_value + c_entropy L_entropy", lambda x: x.total(value=1.0))
        .cites("program: loop-value_weight"),
        mistake("entropy_unweighted", "the sum with an unweighted entropy")
        .predicts("L = L_policy + c_value L_value + L_entropy", lambda x: x.total(entropy=1.0))
        .given(needs="entropy_weight")
        .advises("Multiply the entropy by its weight."),
        mistake("weights_swapped", "the sum with the two weights swapped")
        .predicts("L = L_policy + c_entropy L_value + c_value L_entropy", lambda x: x.total(value=x.entropy_weight, entropy=x.value_weight))
        .given(needs="entropy_weight")
        .advises("Compare the weights with the terms that they multiply."),
        mistake("entropy_alone_weighted", "the sum with the entropy's weight for the value loss too")
        .predicts("L = L_policy + c_entropy (L_value + L_entropy)", lambda x: x.total(value=x.entropy_weight))
        .given(needs="entropy_weight")
        .advises("Compare the weights with the terms that they multiply."),
        variant("entropy_weight", "the sum with a different entropy weight than the setting, annealed or set elsewhere,")
        .fits(
            "L = L_policy + c_value L_value + c L_entropy",
            "c",
            lambda x, claimed: _other_weight(x, claimed, x.entropy, x.total(entropy=0.0)),
        )
        .cites("program: loop-entropy_weight"),
        variant("value_weight", "the sum with a different weight of the value loss than the setting,").fits(
            "L = L_policy + c L_value + c_entropy L_entropy", "c", lambda x, claimed: _other_weight(x, claimed, x.value, x.total(value=0.0))
        ),
        *rescaled(total_loss, "the sum", "L_policy + c_value L_value + c_entropy L_entropy", scale=variant),
    ),
)


@checked_arguments(tolerance=0)
@inference_mode
def check_total_loss(
    loss: ArrayLike,
    policy: ArrayLike,
    value: ArrayLike,
    entropy: ArrayLike | None = None,
    *,
    value_coef: float,
    entropy_coef: float = 0.0,
    precision: str | None = None,
    tolerance: float | None = None,
) -> EquationCheck:
    """Return the comparison of total losses with the weighted sum of their terms.

    A difference that no known mistake explains comes from further terms: then the total is not checked.

    Args:
        loss: 0-d, or [M], one per minibatch.
        policy, value: of the same shape, without weights.
        entropy: of the same shape: the negative mean entropy; it may be None if `entropy_coef` is 0.
        value_coef, entropy_coef: weights.
        precision: of the trainer's arithmetic: fp32, tf32, bf16 or fp16.
        tolerance: largest relative error; by precision if it is None.

    Raises:
        ValueError: shapes differ, or the entropy has a weight but is not given.
    """
    if entropy is None and entropy_coef:
        raise ValueError(f"an entropy_coef of {entropy_coef!r} needs the entropy loss")
    claimed = as_tensor(loss)
    terms = [as_tensor(term, claimed) for term in (policy, value, *([] if entropy is None else [entropy]))]
    same_shape(loss=claimed, policy=terms[0], value=terms[1], entropy=None if entropy is None else terms[2])
    columns = [term.detach().reshape(-1).double() for term in terms]
    inputs = TotalLossInputs(
        policy=columns[0],
        value=columns[1],
        entropy=torch.zeros_like(columns[0]) if entropy is None else columns[2],
        value_weight=value_coef,
        entropy_weight=entropy_coef,
    )
    # if terms have opposite signs, rounding follows their magnitude, not the magnitude of the sum
    magnitudes = (inputs.policy, value_coef * inputs.value, entropy_coef * inputs.entropy)
    total = claimed.detach().reshape(-1)
    check = compare(TOTAL_LOSS, inputs, total, magnitudes=magnitudes, precision=precision, tolerance=tolerance)
    if check.error is None or check.matches or check.explanations:
        return check
    return unchecked(TOTAL_LOSS, "it has further terms, or other weights than the settings")
