"""Means of losses over minibatches, and the hypotheses and fits that all losses share.

Shapes: M minibatches with R rows in total, concatenated; N rows of one minibatch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from esper_telemetry.core.arrays import ArrayLike, as_mask, as_tensor, shown
from esper_telemetry.core.lazy import Tensor, torch
from esper_telemetry.equations.equation import Hypothesis, mistake, variant
from esper_telemetry.metrics.statistics import same_shape

LOSS_TOLERANCE: Final = 0.05
"""Factor of the tolerances for losses: 5e-6 in single precision. Eleven healthy runs of the bundled trainer reach 1.5e-7."""

MIN_FITTED_MINIBATCHES: Final = 4
"""Fewest minibatches for a fitted parameter: half of them determine it, and the others confirm it."""

INFORMATIVE_ERROR: Final = 1e-5
"""Relative difference from the reference above which a minibatch is evidence about a parameter."""

BISECTIONS: Final = 60
"""Bisections of the interval that contains a parameter."""

STD_EPS: Final = 1e-8
"""Added to the standard deviation before dividing by it, as in Stable-Baselines3 and CleanRL."""

MAX_ACCUMULATED: Final = 64
"""Largest number of parts of a minibatch whose gradients are accumulated, each with its share of the loss."""


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
        """Return the sums [M] over the valid rows [R]."""
        zeros = rows.new_zeros(self.number, dtype=torch.float64)
        return zeros.index_add_(0, self.index, torch.where(self.valid, rows, 0.0).double())

    def mean(self, rows: Tensor) -> Tensor:
        """Return the means [M] over the valid rows [R]; 0 for a minibatch without valid rows."""
        return self.sum(rows) / self.counts

    @property
    def counts(self) -> Tensor:
        """Number of valid rows of each minibatch [M], at least 1."""
        return self.sum(self.valid.double()).clamp(min=1)

    def normalized(self, rows: Tensor) -> Tensor:
        """Return rows [R], normalised by the mean and the unbiased standard deviation of their minibatch."""
        centred = rows - self.mean(rows)[self.index]
        std = (self.sum(centred.square()) / (self.counts - 1).clamp(min=1)).sqrt()
        return centred / (std[self.index] + STD_EPS)

    def followers(self, step: int) -> Tensor:
        """Return the indices [R] of the rows `step` later in the same minibatch; its last row is followed by its first."""
        sizes = torch.bincount(self.index, minlength=self.number)
        starts = (sizes.cumsum(0) - sizes)[self.index]
        place = torch.arange(len(self.index), device=self.index.device) - starts
        return starts + (place + step) % sizes[self.index]

    def reversed(self) -> Tensor:
        """Return the indices [R] of the rows in the reverse order of each minibatch."""
        sizes = torch.bincount(self.index, minlength=self.number)
        starts = (sizes.cumsum(0) - sizes)[self.index]
        return 2 * starts + sizes[self.index] - 1 - torch.arange(len(self.index), device=self.index.device)

    def with_padding(self) -> Minibatches:
        """Return the same division with every row valid."""
        return replace(self, valid=torch.ones_like(self.valid))


class OneMinibatch(Minibatches):
    """A minibatch of N valid rows in the trainer's own precision and with its kernels; its losses are 0-d and have a graph."""

    @classmethod
    def like(cls, column: Tensor) -> OneMinibatch:
        """Return the minibatch of a column [N]."""
        return cls(torch.zeros_like(column, dtype=torch.long), torch.ones_like(column, dtype=torch.bool), 1)

    def mean(self, rows: Tensor) -> Tensor:
        """Return the mean, 0-d."""
        return rows.mean()

    def normalized(self, rows: Tensor) -> Tensor:
        """Return rows [N], normalised by their mean and unbiased standard deviation; a single row is unchanged."""
        return (rows - rows.mean()) / (rows.std() + STD_EPS) if len(rows) > 1 else rows


def divided(
    loss: ArrayLike, counts: Sequence[int] | None, valid: ArrayLike | None, **columns: ArrayLike | None
) -> tuple[Tensor, Minibatches, dict[str, Any]]:
    """Return the losses [M], the minibatches, and the columns [R] in float64, on the first one's device, without columns that are None.

    Args:
        loss: 0-d or [M].
        counts: rows of each minibatch, if columns are [R]; None if they are [M, N], or one minibatch in any shape.
        valid: bool, of the shape of the columns; None if every row counts.
        columns: of one shape.

    Raises:
        ValueError: shapes do not fit.
    """
    name, first = next((name, as_tensor(column)) for name, column in columns.items() if column is not None)
    present = {name: as_tensor(column, first) for name, column in columns.items() if column is not None}
    same_shape(**present)
    losses = as_tensor(loss)
    claimed = losses.detach().reshape(-1).to(first.device)
    if losses.dim() > 1 or not len(claimed):
        raise ValueError(f"the loss must be one number, or one number per minibatch [M], got {shown(losses)}")
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
    """Return True if enough minibatches differ from the reference to fit a parameter and to confirm it."""
    if len(claimed) < MIN_FITTED_MINIBATCHES:
        return False
    differs = (claimed - reference).abs() > INFORMATIVE_ERROR * torch.maximum(claimed.abs(), reference.abs()).max()
    return int(differs[::2].sum()) >= 1 and int(differs[1::2].sum()) >= 2


def bisected(loss: Loss, claimed: Tensor, low: float, high: float) -> tuple[float, Tensor] | None:
    """Return the parameter at which a monotone loss fits the sum of every second claimed loss, and all its losses [M].

    None if there is no such parameter between the bounds.
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
    """Return the ratio of claimed to reference losses, fitted on every second minibatch, and all predicted losses [M]."""
    square = float(reference[::2] @ reference[::2])
    if not square or not informative(claimed, reference):
        return None
    factor = float(claimed[::2] @ reference[::2]) / square
    return factor, factor * reference


def accumulated(reference: Tensor, claimed: Tensor) -> tuple[float, Tensor] | None:
    """Return the number of parts whose inverse is that ratio, and the predicted losses; None if it is not a whole number."""
    result = proportional(reference, claimed)
    parts = 0.0 if result is None or not result[0] else 1 / result[0]
    whole = round(parts)
    if not 2 <= whole <= MAX_ACCUMULATED or abs(parts - whole) > 1e-4 * whole:
        return None
    return float(whole), reference / whole


def scaled(reference: Tensor, claimed: Tensor) -> tuple[float, Tensor] | None:
    """Return the result of `proportional`; None if a number of accumulated parts explains the factor."""
    return None if accumulated(reference, claimed) is not None else proportional(reference, claimed)


def rescaled(
    loss: Callable[[Any], Tensor], says: str, equation: str, *, scale: Callable[[str, str], Hypothesis] = mistake
) -> tuple[Hypothesis, ...]:
    """Return the hypotheses that a loss is divided by a number of accumulated parts, or has another factor.

    Args:
        loss: (inputs) -> losses [M].
        says, equation: of the loss.
        scale: whether another factor is a `mistake` or a `variant`.
    """
    return (
        variant("accumulated", f"{says}, divided by a number of accumulated parts:")
        .fits(f"L = ({equation}) / k", "k", lambda inputs, claimed: accumulated(loss(inputs), claimed))
        .cites("program: test_losses"),
        scale("scaled", f"{says} times a factor,")
        .fits(f"L = c ({equation})", "c", lambda inputs, claimed: scaled(loss(inputs), claimed))
        .advises("Look for a weight that differs from the setting, or a division by a number other than the number of rows.")
        .cites("program: test_losses"),
    )


def with_padding(loss: Callable[[Any], Tensor], equation: str) -> tuple[Hypothesis, ...]:
    """Return the hypotheses that the mean includes padding, or that the sum over valid rows is divided by the number of all rows.

    Args:
        loss: (inputs with `minibatches`) -> losses [M].
        equation: of the sum over the rows.
    """

    def padded(change: Callable[[Any, Minibatches], Tensor]) -> Callable[[Any], Tensor | None]:
        """Apply `compute` only to minibatches with padding."""
        return lambda x: None if bool(x.minibatches.valid.all()) else change(x, x.minibatches.with_padding())

    source = "https://github.com/Stable-Baselines-Team/stable-baselines3-contrib/issues/75"
    return (
        mistake("padding_included", "the mean over all rows, including padding")
        .predicts(f"L = mean_{{all rows}} {equation}", padded(lambda x, everything: loss(replace(x, minibatches=everything))))
        .advises("Take the mean over the valid rows.", source=source),
        mistake("padding_counted", "the sum over the valid rows, divided by the number of all rows, including padding")
        .predicts(f"L = Σ_{{valid}} {equation} / N", padded(lambda x, everything: loss(x) * x.minibatches.counts / everything.counts))
        .advises("Divide by the number of valid rows.", source=source),
    )


def added(reference: Tensor, term: Tensor, claimed: Tensor) -> tuple[float, Tensor] | None:
    """Return the weight of an added term [M], fitted on every second minibatch, and all predicted losses [M]."""
    square = float(term[::2] @ term[::2])
    if not square or not informative(claimed, reference):
        return None
    weight = float((claimed - reference)[::2] @ term[::2]) / square
    return weight, reference + weight * term
