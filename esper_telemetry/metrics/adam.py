"""Adam's state: what the optimizer remembers of the gradients.

Parameters lie one behind the other in a few long vectors. A network has dozens of them, most of them small, and to go through them one by
one takes up to twice as long.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

MOST_TOGETHER = 1 << 18
"""Numbers whose step is reckoned in one piece, if a parameter has no more: what that takes in memory is this many, not a network's."""


class Held(NamedTuple):
    """What an optimizer holds of a parameter."""

    parameter: Tensor
    state: dict[str, Any]
    group: dict[str, Any]


class AdamState(NamedTuple):
    """A copy of what Adam holds of K parameters after a step, d numbers in all, parameter behind parameter.

    Attributes:
        shapes: of the K parameters.
        weights: [d], after the step.
        gradient: [d], that the step used, clipped if it was; NaN for parameters whose own has gone since, None where all have.
        exp_avg, exp_avg_sq: [d], first and second moment, as the optimizer keeps them.
        step: [K], number of steps so far, float64.
        lr, beta1, beta2, eps: [K] each, as in the optimizer, float64.
    """

    shapes: tuple[tuple[int, ...], ...]
    weights: Tensor
    gradient: Tensor | None
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor
    lr: Tensor
    beta1: Tensor
    beta2: Tensor
    eps: Tensor

    @property
    def numels(self) -> list[int]:
        """Numbers that each parameter has, [K]."""
        return [math.prod(shape) for shape in self.shapes]

    def tensors(self) -> list[Tensor]:
        """The K weights in their shapes."""
        return [part.view(shape) for part, shape in zip(self.weights.split(self.numels), self.shapes, strict=True)]

    def denominator(self) -> tuple[Tensor, Tensor]:
        """[d] each: √exp_avg_sq, and ε as it stands beside it where √v + ε is multiplied by √(1 - β₂ᵗ)."""
        return self.exp_avg_sq.sqrt(), self.spread(self.eps * self.bias(self.beta2).sqrt())

    def update(self) -> Tensor:
        """[d]: what the step added to the weights, -lr m / (√v + ε), weight decay aside."""
        root, floor = self.denominator()
        rate = self.lr * self.bias(self.beta2).sqrt() / self.bias(self.beta1)
        return -self.spread(rate) * self.exp_avg / (root + floor)

    def moment_before(self) -> Tensor:
        """[d], float64, of any length: the first moment before the step, exp_avg minus what the step's gradient added to it."""
        assert self.gradient is not None
        return self.exp_avg.double() - self.spread(1.0 - self.beta1).double() * self.gradient.double()

    def bias(self, beta: Tensor) -> Tensor:
        """[K]: the weights that an average of this decay has given out so far, 1 where it began long ago."""
        return 1.0 - beta**self.step

    def spread(self, column: Tensor) -> Tensor:
        """[d] from [K]: for every number what stands for its parameter, in the numbers' type."""
        counts = torch.tensor(self.numels).to(column.device, non_blocking=True)
        return column.to(self.weights.dtype).repeat_interleave(counts, output_size=len(self.weights))

    def pieces(self) -> Iterator[AdamState]:
        """The same in pieces of at most `MOST_TOGETHER` numbers, or of one parameter."""
        numels = self.numels
        begin = 0
        for first, last in _together(numels):
            end = begin + sum(numels[first:last])
            gradient = None if self.gradient is None else self.gradient[begin:end]
            vectors = (self.weights[begin:end], gradient, self.exp_avg[begin:end], self.exp_avg_sq[begin:end])
            columns = [column[first:last] for column in self[5:]]
            yield AdamState(self.shapes[first:last], *vectors, *columns)
            begin = end


def adam_held(optimizer: Optimizer) -> list[Held]:
    """Every parameter that has Adam state, in the optimizer's order."""
    held = [
        Held(parameter, optimizer.state.get(parameter, {}), group)
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]
    return [entry for entry in held if "exp_avg" in entry.state and "exp_avg_sq" in entry.state]


def adam_state(held: Sequence[Held]) -> AdamState:
    """Copies that no later step changes, in at least single precision.

    Args:
        held: from `adam_held`, at least one.
    """
    device = held[0].parameter.device
    gradients = [parameter.grad for parameter, _, _ in held]
    missing = [gradient is None for gradient in gradients]
    known = [
        torch.full_like(entry.parameter, torch.nan) if gradient is None else gradient
        for entry, gradient in zip(held, gradients, strict=True)
    ]
    return AdamState(
        shapes=tuple([tuple(entry.parameter.shape) for entry in held]),
        weights=flat([entry.parameter.detach() for entry in held]),
        gradient=None if all(missing) else flat(known),
        exp_avg=flat([entry.state["exp_avg"] for entry in held]),
        exp_avg_sq=flat([entry.state["exp_avg_sq"] for entry in held]),
        step=_column([entry.state["step"] for entry in held], device),
        lr=_column([entry.group["lr"] for entry in held], device),
        beta1=_column([entry.group["betas"][0] for entry in held], device),
        beta2=_column([entry.group["betas"][1] for entry in held], device),
        eps=_column([entry.group["eps"] for entry in held], device),
    )


def adam_pieces(optimizer: Optimizer) -> Iterator[AdamState]:
    """The optimizer's whole state in pieces of at most `MOST_TOGETHER` numbers, or of one parameter, each copied when it is asked for."""
    held = adam_held(optimizer)
    for first, last in _together([entry.parameter.numel() for entry in held]):
        yield adam_state(held[first:last])


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """[d], in at least single precision: a copy of the tensors, one behind the other."""
    joined = torch.cat([tensor.reshape(-1) for tensor in tensors])
    return joined.float() if joined.dtype.itemsize < torch.float32.itemsize else joined


def first_moment_weight(beta: Tensor, step: Tensor) -> Tensor:
    """Sum κ of the squared weights with which past gradients enter the bias-corrected first moment, of the arguments' shape."""
    decay = beta**step
    return (1.0 - beta) / (1.0 + beta) * (1.0 + decay) / (1.0 - decay)


def _together(numels: Sequence[int]) -> Iterator[tuple[int, int]]:
    """From which parameter up to which: as many as have `MOST_TOGETHER` numbers together, at least one."""
    first = total = 0
    for place, numel in enumerate(numels):
        if place > first and total + numel > MOST_TOGETHER:
            yield first, place
            first, total = place, 0
        total += numel
    if first < len(numels):
        yield first, len(numels)


def _column(values: Sequence[float | Tensor], device: torch.device) -> Tensor:
    """[K], float64, of numbers of which any may be 0-d tensors; never waits for a device."""
    if not any(isinstance(value, Tensor) for value in values):
        return torch.tensor(values, dtype=torch.float64).to(device, non_blocking=True)
    tensors = [torch.as_tensor(value, dtype=torch.float64).to(device, non_blocking=True) for value in values]
    return torch.stack(tensors)
