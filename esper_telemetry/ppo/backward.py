"""Backward through detached trunk outputs: the gradients of actor and critic, apart, for the price of one pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def leaf(output: Tensor) -> Tensor:
    """A trunk output, cut off from the trunk: what is computed from it leaves its gradient in `.grad`."""
    return output.detach().requires_grad_()


def gradient(tensor: Tensor) -> Tensor:
    """Gradient of a leaf; zero where no loss reached it."""
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def backward_losses(losses: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """Backs up the weighted sum of the losses, as far as they have a graph, without building the sum."""
    names = [name for name, loss in losses.items() if loss.requires_grad]
    torch.autograd.backward([losses[name] for name in names], [weights[name] for name in names])


def backward_trunks(outputs: Sequence[Tensor], actor: Tensor, critic: Tensor) -> None:
    """Takes the gradients at the trunk outputs on to the parameters: their sum where both read the same output.

    A trunk whose parameters are all frozen has no graph and is passed over.
    """
    gradients = [actor + critic] if len(outputs) == 1 else [actor, critic]
    reached = [(output, grad) for output, grad in zip(outputs, gradients, strict=True) if output.requires_grad]
    if reached:
        torch.autograd.backward([output for output, _ in reached], [grad for _, grad in reached])
