"""One epoch of training for all hosts and seeds, and what accuracy came of it."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from esper_telemetry.environments.morphogenesis.network import Mixing, Network
from esper_telemetry.environments.morphogenesis.optimizers import Moments, Optimizer, clipped
from esper_telemetry.environments.morphogenesis.tasks import Data, Task

MAX_NORM = 1.0
"""Limit of the gradient norm of a host, and of each seed by itself."""


class Weights(NamedTuple):
    """All that is trained: hosts [N, size], seeds [N, S, size], and what their optimizers remember."""

    hosts: Tensor
    seeds: Tensor
    host_moments: Moments
    seed_moments: Moments


class Epoch(NamedTuple):
    """What happened in an epoch, over all its minibatches; norms are those before clipping.

    Attributes:
        loss, accuracy: [N], on the training data as they were seen.
        host_norm: [N], mean.
        seed_norm, seed_peak: [N, S], mean and largest.
        upstream: [N, S], mean norm of the loss's gradient with respect to a seed's effect.
    """

    loss: Tensor
    accuracy: Tensor
    host_norm: Tensor
    seed_norm: Tensor
    seed_peak: Tensor
    upstream: Tensor


class Gradients(NamedTuple):
    """Of one minibatch: losses and accuracies [N], gradients [N, size] and [N, S, size], norms at the effects [N, S]."""

    loss: Tensor
    accuracy: Tensor
    hosts: Tensor
    seeds: Tensor
    upstream: Tensor


def gradients(
    network: Network, weights: tuple[Tensor, Tensor], present: Tensor, data: Data, mixing: Mixing
) -> Gradients:
    """Every network's gradients of its own mean cross-entropy; networks share nothing, so the sum's gradient is each one's own.

    Args:
        network: their shape.
        weights: hosts [N, size] and seeds [N, S, size].
        present: [N, S, size], bool: parameters that the seeds have.
        data: M rows.
        mixing: how the seeds take part.
    """
    with torch.enable_grad():
        hosts, seeds = (rows.detach().requires_grad_() for rows in weights)
        out = network.forward(hosts, seeds * present, data.inputs, mixing)
        targets = data.targets.expand(len(hosts), -1)
        loss = F.cross_entropy(out.logits.transpose(1, 2), targets, reduction="none").mean(1)
        found = torch.autograd.grad(loss.sum(), [hosts, seeds, *out.effects])
    upstream = torch.stack([part.flatten(1).norm(dim=1) for part in found[2:]], 1)
    accuracy = (out.logits.detach().argmax(-1) == targets).float().mean(1)
    return Gradients(loss.detach(), accuracy, found[0], found[1], upstream)


def minibatches(task: Task, generator: torch.Generator) -> list[Data]:
    """Those of an epoch: windows in a random order, the same ones for all networks."""
    tokens, wanted = task.tokens, task.train_batches * task.batch
    windows = len(task.train.targets) // tokens
    order = torch.randperm(windows, generator=generator, device=generator.device)[:wanted]
    rows = (order.unsqueeze(1) * tokens + torch.arange(tokens, device=order.device)).flatten()
    return [Data(task.train.inputs[part], task.train.targets[part]) for part in rows.split(task.batch * tokens)]


@torch.no_grad()
def train_epoch(
    network: Network,
    weights: Weights,
    batches: list[Data],
    mixing: Mixing,
    *,
    present: Tensor,
    learning: Tensor,
    optimizer: Optimizer,
    rate: float,
) -> tuple[Weights, Epoch]:
    """Trains the hosts, and the seeds where [N, S] `learning` is set, for one epoch; see `gradients` for the rest."""
    everywhere = torch.ones_like(learning[:, 0])
    steps: list[tuple[Tensor, ...]] = []
    for data in batches:
        found = gradients(network, (weights.hosts, weights.seeds), present, data, mixing)
        host_gradients, host_norm = clipped(found.hosts, MAX_NORM)
        seed_gradients, seed_norm = clipped(found.seeds, MAX_NORM)
        hosts, host_moments = optimizer(weights.hosts, host_gradients, weights.host_moments, rate, everywhere)
        seeds, seed_moments = optimizer(weights.seeds, seed_gradients, weights.seed_moments, rate, learning)
        weights = Weights(hosts, seeds, host_moments, seed_moments)
        steps.append((found.loss, found.accuracy, host_norm, seed_norm, found.upstream))
    loss, accuracy, host_norm, seed_norm, upstream = (torch.stack(part) for part in zip(*steps, strict=True))
    means = (loss.mean(0), accuracy.mean(0), host_norm.mean(0), seed_norm.mean(0))
    return weights, Epoch(*means, seed_norm.amax(0), upstream.mean(0))


@torch.no_grad()
def validate(network: Network, weights: Weights, data: Data, mixing: Mixing, present: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and accuracy, [N, 2^S] each, with every subset of the seeds switched off, see `Network.forward`."""
    blocks, rows = 2**network.slots, len(data.targets)
    logits = network.forward(weights.hosts, weights.seeds * present, data.inputs, mixing, subsets=True).logits
    targets = data.targets.repeat(blocks).expand(len(logits), -1)
    loss = logits.logsumexp(-1) - logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    right = (logits.argmax(-1) == targets).float()
    return loss.unflatten(1, (blocks, rows)).mean(2), right.unflatten(1, (blocks, rows)).mean(2)
