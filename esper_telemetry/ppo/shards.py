"""Gradients of parts of a minibatch, at the same parameters: what tells the noise of a gradient from its signal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from esper_telemetry.events import Shard
from esper_telemetry.ppo.rollout import Batch


def shard_gradients(
    batch: Batch, count: int, loss: Callable[[Batch], Tensor], parameters: Sequence[Tensor]
) -> list[Shard]:
    """Gradient of the mean loss of each of `count` parts; `.grad` fields stay as they are.

    Args:
        batch: the minibatch.
        count: how many parts, fewer where it has fewer samples.
        loss: 0-d, of a part.
        parameters: K tensors.
    """
    return [Shard(samples, _gradient(loss(part), parameters)) for samples, part in _parts(batch, count)]


def _parts(batch: Batch, count: int) -> list[tuple[int, Batch]]:
    """Parts with the number of independent samples in each: rows, or for sequences the environments."""
    if batch.sequences is None:
        return [(len(part), part) for part in batch.split(count)]
    envs = batch.sequences.environments()
    count = max(1, min(count, len(envs)))
    cuts = [len(envs) * part // count for part in range(count + 1)]
    return [(stop - start, batch.whole(envs[start:stop])) for start, stop in pairwise(cuts)]


def _gradient(loss: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """[d]: all gradients one after the other, zero of what is frozen or not reached."""
    trained = [parameter for parameter in parameters if parameter.requires_grad] if loss.requires_grad else []
    found = torch.autograd.grad(loss, trained, allow_unused=True) if trained else ()
    by_parameter = {id(parameter): gradient for parameter, gradient in zip(trained, found, strict=True)}
    gradients = (by_parameter.get(id(parameter)) for parameter in parameters)
    return torch.cat(
        [
            (torch.zeros_like(parameter) if gradient is None else gradient).reshape(-1)
            for parameter, gradient in zip(parameters, gradients, strict=True)
        ]
    )
