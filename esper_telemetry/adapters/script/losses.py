"""The losses that a script has computed, with the signs and factors of `MinibatchEnd`.

Scripts write the value loss with and without a half, and the entropy's term with either sign. Both conventions are read off the first
minibatch, where the numbers that the term is computed from are there too.
"""

from __future__ import annotations

import weakref

from torch import Tensor

from esper_telemetry.adapters.columns import HeadColumns
from esper_telemetry.adapters.script import variables as names
from esper_telemetry.adapters.script.variables import MinibatchVariables, Variables
from esper_telemetry.metrics.integrity.losses.entropy_loss import GAUSSIAN_ENTROPY

MAX_FACTOR_ERROR = 0.02
"""Relative difference up to which a value loss is half the squared error or all of it."""


class LossReader:
    """Reads the losses of a script's minibatches.

    A script with an optimizer for each network computes one of the losses after the other's step: at that step its variable holds the loss
    of the minibatch before. Such a loss is left out.
    """

    def __init__(self) -> None:
        self._value_factor: float | None = None
        self._entropy_factor: float | None = None
        self._count = 0
        self._earlier: dict[str, tuple[weakref.ref[Tensor], int]] = {}

    def pass_over(self, variables: Variables) -> None:
        """An optimizer has taken another step of the same minibatch."""
        rows = id(names.find_rows(variables))
        self._earlier |= {
            name: (weakref.ref(loss), rows) for name, loss in names.find_losses(variables, self._count).items()
        }

    def read(self, variables: Variables, minibatch: MinibatchVariables, heads: HeadColumns) -> dict[str, Tensor]:
        """Return the losses of a minibatch, 0-d each, by the names of `MinibatchEnd`."""
        self._count = len(minibatch.advantages) if minibatch.advantages is not None else 0
        present = names.find_losses(variables, self._count)
        rows = id(names.find_rows(variables))
        current = {name: loss for name, loss in present.items() if not self._is_earlier(name, loss, rows)}
        losses = {name: loss.detach().mean() for name, loss in current.items()}
        if "value" in losses:
            if self._value_factor is None:
                self._value_factor = half_square_factor(losses["value"], minibatch)
            losses["value"] = losses["value"] * (self._value_factor or 1.0)
        if "entropy" in losses:
            if self._entropy_factor is None:
                known = mean_entropy(variables, heads)
                self._entropy_factor = None if known is None else entropy_sign(losses["entropy"], known)
            losses["entropy"] = losses["entropy"] * (self._entropy_factor or -1.0)
        return losses

    def _is_earlier(self, name: str, loss: Tensor, rows: int) -> bool:
        earlier = self._earlier.get(name)
        return earlier is not None and earlier[0]() is loss and earlier[1] != rows


def half_square_factor(loss: Tensor, minibatch: MinibatchVariables) -> float | None:
    """Return the factor that makes a value loss half the mean squared error, from a minibatch before the first step; None where the numbers
    that it is computed from are not there.
    """
    if minibatch.values is None or minibatch.returns is None:
        return None
    square = float((minibatch.values - minibatch.returns).square().mean())
    halves = (
        factor for factor in (1.0, 0.5) if square and abs(2 * float(loss) * factor / square - 1) < MAX_FACTOR_ERROR
    )
    return next(halves, 1.0)


def entropy_sign(term: Tensor, entropy: float) -> float:
    """Return -1 where a script's term is its entropy, and 1 where it is the negative."""
    return -1.0 if abs(float(term) - entropy) <= abs(float(term) + entropy) else 1.0


def mean_entropy(variables: Variables, heads: HeadColumns) -> float | None:
    """Return the mean entropy of the recorded distributions, in nats, or of the script's entropies of each row; None without either."""
    means = [-float((logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()) for logits in heads.logits.values()]
    means += [float((log_std + GAUSSIAN_ENTROPY).sum(-1).mean()) for log_std in heads.log_std.values()]
    if means:
        return sum(means)
    rows = variables.find(names.ENTROPY, names.as_column())
    return None if rows is None else float(rows.mean())
