"""Minibatches that losses are means over, hypotheses and fits that all losses share, and the equation of the total loss.

Shapes: M minibatches of R rows in all, one minibatch after the other; N rows of one minibatch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from esper_telemetry.core.arrays import ArrayLike, as_mask, as_tensor, shown
from esper_telemetry.core.borders import checked_arguments
from esper_telemetry.core.lazy import Tensor, inference_mode, torch
from esper_telemetry.equations.comparison import EquationCheck, compare, unchecked
from esper_telemetry.equations.equation import Equation, Hypothesis
from esper_telemetry.metrics.statistics import same_shape

LOSS_TOLERANCE: Final = 0.05
"""Factor of the tolerances for losses: 5e-6 in single precision. Eleven healthy runs of the bundled trainer reach 1.5e-7."""

MIN_FITTED_MINIBATCHES: Final = 4
"""Minibatches from which a parameter is fitted: half of them give it, and the others confirm it."""

INFORMATIVE_ERROR: Final = 1e-5
"""Relative difference from the reference from which a minibatch tells something about a parameter."""

BISECTIONS: Final = 60
"""Halvings of the interval that a parameter lies in."""

MAX_ACCUMULATED: Final = 64
"""Most parts of a minibatch whose gradients are accumulated, each with its share of the loss."""


@dataclass(frozen=True, slots=True)
class Minibatches:
    """Division of R rows into M minibatches.

    Attributes:
        index: [R], the minibatch of each row.
        valid: [R], bool: rows that count.
        number: M.
    """

    index: Tensor
    valid: Tensor
    number: int

    def sum(self, rows: Tensor) -> Tensor:
        """Return the sums [M] of the valid ones of rows [R]."""
        zeros = rows.new_zeros(self.number, dtype=torch.float64)
        return zeros.index_add_(0, self.index, torch.where(self.valid, rows, 0.0).double())

    def mean(self, rows: Tensor) -> Tensor:
        """Return the means [M] over the valid ones of rows [R]; 0 of a minibatch without any."""
        return self.sum(rows) / self.counts

    @property
    def counts(self) -> Tensor:
        """Number of valid rows of each minibatch [M], at least 1."""
        return self.sum(self.valid.double()).clamp(min=1)

    def normalized(self, rows: Tensor) -> Tensor:
        """Return rows [R] less the mean of their minibatch, over its unbiased standard deviation."""
        centred = rows - self.mean(rows)[self.index]
        std = (self.sum(centred.square()) / (self.counts - 1).clamp(min=1)).sqrt()
        return centred / (std[self.index] + 1e-8)

    def followers(self, step: int) -> Tensor:
        """Return the places [R] of the rows `step` later in the same minibatch; after its last row comes its first."""
        sizes = torch.bincount(self.index, minlength=self.number)
        starts = (sizes.cumsum(0) - sizes)[self.index]
        place = torch.arange(len(self.index), device=self.index.device) - starts
        return starts + (place + step) % sizes[self.index]

    def reversed(self) -> Tensor:
        """Return the places [R] of the rows in the reverse order of each minibatch."""
        sizes = torch.bincount(self.index, minlength=self.number)
        starts = (sizes.cumsum(0) - sizes)[self.index]
        return 2 * starts + sizes[self.index] - 1 - torch.arange(len(self.index), device=self.index.device)

    def with_padding(self) -> Minibatches:
        """Return the same with every row valid."""
        return replace(self, valid=torch.ones_like(self.valid))


def divided(
    loss: Tensor, counts: Sequence[int] | None, valid: ArrayLike | None, **columns: Tensor | None
) -> tuple[Tensor, Minibatches, dict[str, Tensor]]:
    """Return the losses [M], the minibatches, and the columns [R] in float64; columns that are None are left out.

    Args:
        loss: 0-d or [M].
        counts: rows of each minibatch, where columns are [R]; None where they are [M, N], or of one minibatch in any shape.
        valid: bool, of the shape of the columns; None where every row counts.
        columns: of one shape.

    Raises:
        ValueError: shapes do not fit.
    """
    same_shape(**columns)
    present = {name: column for name, column in columns.items() if column is not None}
    name, first = next(iter(present.items()))
    claimed = loss.detach().reshape(-1).to(first.device)
    if loss.dim() > 1 or not len(claimed):
        raise ValueError(f"the loss must be one number, or one number per minibatch [M], got {shown(loss)}")
    number = len(claimed)
    sizes = torch.as_tensor(counts if counts is not None else [first.numel() // number] * number)
    whole = counts is not None or number == 1 or first.shape[0] == number
    if len(sizes) != number or not whole or int(sizes.sum()) != first.numel() or int(sizes.min()) < 1:
        raise ValueError(
            f"{number} losses need {name} of shape [{number}, N], or [R] with `counts`, got shape {list(first.shape)}"
            f"{'' if counts is None else f' and counts {list(counts)}'}"
        )
    index = torch.repeat_interleave(torch.arange(number, device=first.device), sizes.to(first.device))
    mask = as_mask(valid, first)
    same_shape(valid=mask, **{name: None if mask is None else first})
    flags = torch.ones_like(index, dtype=torch.bool) if mask is None else mask.reshape(-1)
    rows = {name: column.detach().reshape(-1).double() for name, column in present.items()}
    return claimed, Minibatches(index, flags, number), rows


Loss = Callable[[float], Tensor]


def informative(claimed: Tensor, reference: Tensor) -> bool:
    """Return True where enough minibatches differ from the reference to fit a parameter and to confirm it by others."""
    if len(claimed) < MIN_FITTED_MINIBATCHES:
        return False
    differs = (claimed - reference).abs() > INFORMATIVE_ERROR * torch.maximum(claimed.abs(), reference.abs()).max()
    return int(differs[::2].sum()) >= 1 and int(differs[1::2].sum()) >= 2


def bisected(loss: Loss, claimed: Tensor, low: float, high: float) -> tuple[float, Tensor] | None:
    """Return the parameter at which a monotone loss has the sum of every second claimed loss, and all its losses [M]; None
    where there is none between the bounds.
    """
    target = claimed[::2].sum()

    def excess(parameter: float) -> float:
        return float(loss(parameter)[::2].sum() - target)

    first, last = excess(low), excess(high)
    if not first * last < 0:
        return None
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if excess(middle) * first > 0:
            low = middle
        else:
            high = middle
    return high, loss(high)


def proportional(reference: Tensor, claimed: Tensor) -> tuple[float, Tensor] | None:
    """Return the factor that takes every second reference loss to the claimed one, and all predicted losses [M]."""
    square = float(reference[::2] @ reference[::2])
    if not square or not informative(claimed, reference):
        return None
    factor = float(claimed[::2] @ reference[::2]) / square
    return factor, factor * reference


def accumulated(reference: Tensor, claimed: Tensor) -> tuple[float, Tensor] | None:
    """Return the same for the inverse of a whole number of parts, which is the parameter; None for any other factor."""
    result = proportional(reference, claimed)
    parts = 0.0 if result is None or not result[0] else 1 / result[0]
    whole = round(parts)
    if not 2 <= whole <= MAX_ACCUMULATED or abs(parts - whole) > 1e-4 * whole:
        return None
    return float(whole), reference / whole


def scaled(reference: Tensor, claimed: Tensor) -> tuple[float, Tensor] | None:
    """Return the same as `proportional` for a factor that no number of accumulated parts gives."""
    return None if accumulated(reference, claimed) is not None else proportional(reference, claimed)


def rescaled(
    loss: Callable[[Any], Tensor], says: str, equation: str, *, variant: bool
) -> tuple[Hypothesis, Hypothesis]:
    """Return the hypotheses that a loss is divided by a number of accumulated parts, and that it has another factor, a `variant` or not."""
    return (
        Hypothesis(
            name="accumulated",
            says=f"{says}, divided by a number of accumulated parts:",
            equation=f"L = ({equation}) / k",
            fit=lambda inputs, claimed: accumulated(loss(inputs), claimed),
            parameter="k",
            variant=True,
        ),
        Hypothesis(
            name="scaled",
            says=f"{says} times a factor,",
            equation=f"L = c ({equation})",
            fit=lambda inputs, claimed: scaled(loss(inputs), claimed),
            parameter="c",
            variant=variant,
            advice="Look for a weight that is not the setting, or a division by another number than the rows.",
        ),
    )


def with_padding(
    loss: Callable[[Any], Tensor],
    equation: str,
    nearest: Callable[[Any, Tensor], Tensor] = lambda inputs, values: values,
) -> tuple[Hypothesis, Hypothesis]:
    """Return the hypotheses of a mean over padding too, and of a sum over the valid rows that is divided by all of them.

    Args:
        loss: (inputs with `minibatches`) -> losses [M].
        equation: of the sum over the rows.
        nearest: (inputs, losses) -> the losses with the factor that is nearest to the claimed ones.
    """

    def included(inputs: Any) -> Tensor | None:
        batches: Minibatches = inputs.minibatches
        if bool(batches.valid.all()):
            return None
        return nearest(inputs, loss(replace(inputs, minibatches=batches.with_padding())))

    def counted(inputs: Any) -> Tensor | None:
        batches: Minibatches = inputs.minibatches
        if bool(batches.valid.all()):
            return None
        return nearest(inputs, loss(inputs) * batches.counts / batches.with_padding().counts)

    source = "https://github.com/Stable-Baselines-Team/stable-baselines3-contrib/issues/75"
    return (
        Hypothesis(
            "padding_included",
            "the mean over all rows, padding included",
            f"L = mean_{{all rows}} {equation}",
            included,
            source=source,
            advice="Take the mean over the valid rows.",
        ),
        Hypothesis(
            "padding_counted",
            "the sum over the valid rows, divided by the number of all rows, padding included",
            f"L = Σ_{{valid}} {equation} / N",
            counted,
            source=source,
            advice="Divide by the number of valid rows.",
        ),
    )


def added(reference: Tensor, term: Tensor, claimed: Tensor) -> tuple[float, Tensor] | None:
    """Return the weight with which a term [M] is added to every second reference loss, and all predicted losses [M]."""
    square = float(term[::2] @ term[::2])
    if not square or not informative(claimed, reference):
        return None
    weight = float((claimed - reference)[::2] @ term[::2]) / square
    return weight, reference + weight * term


@dataclass(frozen=True, slots=True)
class TotalLossInputs:
    """Terms of the total loss [M] in float64, and their weights; `entropy` is the negative mean entropy."""

    policy: Tensor
    value: Tensor
    entropy: Tensor
    value_weight: float
    entropy_weight: float

    def total(self, *, policy: float = 1.0, value: float | None = None, entropy: float | None = None) -> Tensor:
        """Return the sum of the terms [M], with the set weights unless others are given."""
        value_weight = self.value_weight if value is None else value
        entropy_weight = self.entropy_weight if entropy is None else entropy
        return policy * self.policy + value_weight * self.value + entropy_weight * self.entropy


def total_loss(inputs: TotalLossInputs) -> Tensor:
    """Return the total loss [M] (1707.06347, eq. 9)."""
    return inputs.total()


def _with_bonus(compute: Callable[[TotalLossInputs], Tensor]) -> Callable[[TotalLossInputs], Tensor | None]:
    """Apply a hypothesis where there is a bonus for entropy."""
    return lambda inputs: compute(inputs) if inputs.entropy_weight else None


def _other_weight(inputs: TotalLossInputs, claimed: Tensor, term: Tensor, rest: Tensor) -> tuple[float, Tensor] | None:
    return added(rest, term, claimed) if informative(claimed, total_loss(inputs)) else None


TOTAL_LOSS = Equation(
    name="total_loss",
    rank=58,
    quantity="the total losses",
    equation="L = L_policy + c_value L_value + c_entropy L_entropy, L_entropy = -mean H",
    source="1707.06347, eq. 9",
    inputs="the total loss, its terms, and their weights",
    compute=total_loss,
    tolerance=LOSS_TOLERANCE,
    hypotheses=(
        Hypothesis(
            name="entropy_sign",
            says="the sum with the entropy added in place of subtracted: the bonus punishes exploring",
            equation="L = L_policy + c_value L_value + c_entropy mean H",
            compute=_with_bonus(lambda x: x.total(entropy=-x.entropy_weight)),
            advice="Subtract the weighted entropy.",
        ),
        Hypothesis(
            name="value_sign",
            says="the sum with the value loss subtracted: the critic climbs its error",
            equation="L = L_policy - c_value L_value + c_entropy L_entropy",
            compute=lambda x: x.total(value=-x.value_weight),
            advice="Add the weighted value loss: the minus sign of eq. 9 belongs to an objective that is maximised.",
        ),
        Hypothesis(
            name="policy_sign",
            says="the sum with the policy loss subtracted",
            equation="L = -L_policy + c_value L_value + c_entropy L_entropy",
            compute=lambda x: x.total(policy=-1.0),
            advice="Add the policy loss, which is the negative surrogate.",
        ),
        Hypothesis(
            name="sign",
            says="the sum with the opposite sign",
            equation="L = -(L_policy + c_value L_value + c_entropy L_entropy)",
            compute=lambda x: -x.total(),
            advice="Minimise the loss.",
        ),
        Hypothesis(
            name="entropy_missing",
            says="the sum without the entropy bonus that the settings ask for",
            equation="L = L_policy + c_value L_value",
            compute=_with_bonus(lambda x: x.total(entropy=0.0)),
            advice="Add the entropy loss times its weight.",
        ),
        Hypothesis(
            name="value_missing",
            says="the sum without the value loss",
            equation="L = L_policy + c_entropy L_entropy",
            compute=lambda x: x.total(value=0.0),
            variant=True,
            source="separate optimizers of actor and critic",
        ),
        Hypothesis(
            name="policy_missing",
            says="the sum without the policy loss",
            equation="L = c_value L_value + c_entropy L_entropy",
            compute=lambda x: x.total(policy=0.0),
            advice="Add the policy loss.",
        ),
        Hypothesis(
            name="value_doubled",
            says="the sum with the value loss as the mean squared error without the factor ½",
            equation="L = L_policy + 2 c_value L_value + c_entropy L_entropy",
            compute=lambda x: x.total(value=2 * x.value_weight),
            variant=True,
            source="Stable-Baselines3, PPO.train",
        ),
        Hypothesis(
            name="value_halved",
            says="the sum with one more factor ½ of the value loss",
            equation="L = L_policy + ½ c_value L_value + c_entropy L_entropy",
            compute=lambda x: x.total(value=x.value_weight / 2),
            variant=True,
        ),
        Hypothesis(
            name="value_unweighted",
            says="the sum with the value loss without its weight",
            equation="L = L_policy + L_value + c_entropy L_entropy",
            compute=lambda x: x.total(value=1.0),
            variant=True,
        ),
        Hypothesis(
            name="entropy_unweighted",
            says="the sum with the entropy without its weight",
            equation="L = L_policy + c_value L_value + L_entropy",
            compute=_with_bonus(lambda x: x.total(entropy=1.0)),
            advice="Multiply the entropy by its weight.",
        ),
        Hypothesis(
            name="weights_swapped",
            says="the sum with the two weights exchanged",
            equation="L = L_policy + c_entropy L_value + c_value L_entropy",
            compute=_with_bonus(lambda x: x.total(value=x.entropy_weight, entropy=x.value_weight)),
            advice="Compare the weights with the terms that they multiply.",
        ),
        Hypothesis(
            name="entropy_alone_weighted",
            says="the value loss and the entropy, both times the weight of the entropy",
            equation="L = L_policy + c_entropy (L_value + L_entropy)",
            compute=_with_bonus(lambda x: x.total(value=x.entropy_weight)),
            advice="Compare the weights with the terms that they multiply.",
        ),
        Hypothesis(
            name="entropy_weight",
            says="the sum with another weight of the entropy than the setting, annealed or set elsewhere,",
            equation="L = L_policy + c_value L_value + c L_entropy",
            fit=lambda x, claimed: _other_weight(x, claimed, x.entropy, x.total(entropy=0.0)),
            parameter="c",
            variant=True,
        ),
        Hypothesis(
            name="value_weight",
            says="the sum with another weight of the value loss than the setting,",
            equation="L = L_policy + c L_value + c_entropy L_entropy",
            fit=lambda x, claimed: _other_weight(x, claimed, x.value, x.total(value=0.0)),
            parameter="c",
            variant=True,
        ),
        *rescaled(total_loss, "the sum", "L_policy + c_value L_value + c_entropy L_entropy", variant=True),
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

    A difference that no known mistake explains is that of further terms: then the total is not checked.

    Args:
        loss: 0-d, or [M], one per minibatch.
        policy, value: of the same shape, without weights.
        entropy: of the same shape: the negative mean entropy; it may be None where `entropy_coef` is 0.
        value_coef, entropy_coef: weights.
        precision: of the trainer's arithmetic: fp32, tf32, bf16 or fp16.
        tolerance: largest relative error; by precision where it is None.

    Raises:
        ValueError: shapes differ, or the entropy has a weight and is not given.
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
    # terms of opposite signs are rounded at their own size
    magnitudes = (inputs.policy, value_coef * inputs.value, entropy_coef * inputs.entropy)
    total = claimed.detach().reshape(-1)
    check = compare(TOTAL_LOSS, inputs, total, magnitudes=magnitudes, precision=precision, tolerance=tolerance)
    if check.error is None or check.matches or check.explanations:
        return check
    return unchecked(TOTAL_LOSS, "it has further terms, or other weights than the settings")
