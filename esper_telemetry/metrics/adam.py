"""Adam's state: what the optimizer remembers of the gradients, as it is and free of the bias of its start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

SINGLE_BYTES = 4


class AdamState(NamedTuple):
    """What the optimizer holds of one parameter after a step.

    Attributes:
        weights: the parameter, after the step.
        gradient: that the step used, clipped if it was; None where it has gone since.
        exp_avg, exp_avg_sq: first and second moment, as the optimizer keeps them.
        step: number of steps so far, 0-d.
        lr, betas, eps: as in the optimizer.
    """

    weights: Tensor
    gradient: Tensor | None
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor
    lr: float | Tensor
    betas: tuple[float, float]
    eps: float

    def copied(self) -> AdamState:
        """Copies that no later step changes, in at least single precision."""
        gradient = None if self.gradient is None else _copy(self.gradient)
        moments = (_copy(self.exp_avg), _copy(self.exp_avg_sq))
        lr = _copy(self.lr) if isinstance(self.lr, Tensor) else self.lr
        return AdamState(_copy(self.weights), gradient, *moments, _copy(self.step), lr, self.betas, self.eps)

    def corrected(self) -> AdamTensor:
        """The same without the bias of the first steps."""
        beta1, beta2 = self.betas
        step = self.step.double().to(self.weights.device, non_blocking=True)
        return AdamTensor(
            weights=self.weights,
            gradient=self.gradient,
            m=self.exp_avg.double() / (1.0 - beta1**step),
            v=self.exp_avg_sq.double() / (1.0 - beta2**step),
            step=step,
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
        )

    def before(self) -> Tensor:
        """The first moment before the step, of any length: m minus what the step's gradient added to it."""
        assert self.gradient is not None
        return self.exp_avg.double() - (1.0 - self.betas[0]) * self.gradient.double()


class AdamTensor(NamedTuple):
    """One parameter after an Adam step.

    Attributes:
        weights: the parameter, after the step.
        gradient: that the step used, clipped if it was; None where it has gone since.
        m, v: bias-corrected first and second moment, float64, the shape of the parameter.
        step: number of steps so far, 0-d.
        lr, betas, eps: as in the optimizer.
    """

    weights: Tensor
    gradient: Tensor | None
    m: Tensor
    v: Tensor
    step: Tensor
    lr: float | Tensor
    betas: tuple[float, float]
    eps: float

    def update(self) -> Tensor:
        """What the step added to the weights, weight decay aside."""
        return -self.lr * self.m / (self.v.sqrt() + self.eps)


def adam_states(optimizer: Optimizer) -> Iterator[AdamState]:
    """Every parameter that has Adam state, in the optimizer's order."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if "exp_avg" in state and "exp_avg_sq" in state:
                yield _adam_state(parameter, state, group)


def adam_tensors(optimizer: Optimizer) -> Iterator[AdamTensor]:
    """The same without the bias of the first steps."""
    return (state.corrected() for state in adam_states(optimizer))


def _adam_state(parameter: Tensor, state: Mapping[str, Any], group: Mapping[str, Any]) -> AdamState:
    return AdamState(
        weights=parameter,
        gradient=parameter.grad,
        exp_avg=state["exp_avg"],
        exp_avg_sq=state["exp_avg_sq"],
        step=torch.as_tensor(state["step"]),
        lr=group["lr"],
        betas=tuple(group["betas"]),
        eps=group["eps"],
    )


def _copy(tensor: Tensor) -> Tensor:
    copied = tensor.detach().clone()
    return copied.float() if copied.is_floating_point() and copied.dtype.itemsize < SINGLE_BYTES else copied


def stable_rms(tensor: AdamTensor) -> Tensor:
    """RMS of the gradient over Adam's denominator, 0-d: √mean(g²/max(v, ε²)), about 1 when stationary."""
    assert tensor.gradient is not None
    squares = tensor.gradient.double().square() / tensor.v.clamp(min=tensor.eps**2)
    return squares.mean().sqrt()


def first_moment_weight(beta: float, step: Tensor) -> Tensor:
    """Sum κ of the squared weights with which past gradients enter the bias-corrected first moment, 0-d."""
    decay = beta**step
    return (1.0 - beta) / (1.0 + beta) * (1.0 + decay) / (1.0 - decay)
