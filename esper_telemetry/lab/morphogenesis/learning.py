"""One epoch of training for all hosts and seeds, and what accuracy came of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from esper_telemetry.lab.morphogenesis.network import Mixing, Network, Views
from esper_telemetry.lab.morphogenesis.optimizers import AdamMoments, Optimizer, clip
from esper_telemetry.lab.morphogenesis.tasks import Data, LearningTask

MAX_NORM = 1.0
"""Limit of the gradient norm of a host, and of each seed by itself."""


class Weights(NamedTuple):
    """All that is trained, and written to in place.

    Attributes:
        rows: [N, 1 + S, size], a host in the first row of each network, its seeds in the others; zero where nothing is.
        moments: what their optimizers remember.
    """

    rows: Tensor
    moments: AdamMoments


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


def gradients(network: Network, weights: Views, data: Data, mixing: Mixing, into: Views) -> tuple[Tensor, Tensor]:
    """Writes every network's gradients of its own mean cross-entropy over M rows of data.

    Returns the logarithms of the probabilities [N, classes, M], and the norms at the seeds' effects [N, S].
    """
    passed = network.forward(weights, data.inputs, mixing)
    logs = passed.logits.log_softmax(1)
    slope = logs.exp()
    slope.scatter_add_(1, _wide(data.targets, slope), torch.full_like(slope[:, :1], -1.0))
    return logs, network.backward(weights, passed, slope.div_(len(data.targets)), mixing, into)


def scores(logs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's loss, and whether it was told right, 1 or 0, [N, M], from log-probabilities [N, classes, M] and classes [M]."""
    own = logs.gather(1, _wide(targets, logs)).squeeze(1)
    return -own, (own >= logs.amax(1)).to(logs.dtype)


def minibatches(task: LearningTask, generator: torch.Generator) -> list[Data]:
    """Those of an epoch: windows in a random order, the same ones for all networks."""
    tokens, wanted = task.tokens, task.train_batches * task.batch
    windows = len(task.train.targets) // tokens
    order = torch.randperm(windows, generator=generator, device=generator.device)[:wanted]
    rows = (order.unsqueeze(1) * tokens + torch.arange(tokens, device=order.device)).flatten()
    parts = (task.train.inputs[rows].split(task.batch * tokens), task.train.targets[rows].split(task.batch * tokens))
    return [Data(*pair) for pair in zip(*parts, strict=True)]


@torch.no_grad()
def train_epoch(
    network: Network,
    weights: Weights,
    batches: Sequence[Data],
    mixing: Mixing,
    *,
    learning: Tensor,
    optimizer: Optimizer,
    rate: float,
) -> Epoch:
    """Trains the hosts, and the seeds where [N, S] `learning` is set, for one epoch; see `gradients` for the rest."""
    slopes = torch.zeros_like(weights.rows)
    views, into = network.views(weights.rows), network.views(slopes)
    where = torch.cat([torch.ones_like(learning[:, :1]), learning], 1)
    logs, norms, upstream = list[Tensor](), list[Tensor](), list[Tensor]()
    for data in batches:
        found, reached = gradients(network, views, data, mixing, into)
        norms.append(clip(slopes, MAX_NORM))
        optimizer(weights.rows, slopes, weights.moments, rate, where)
        logs.append(found)
        upstream.append(reached)
    loss, right = scores(torch.cat(logs, 2), torch.cat([data.targets for data in batches]))
    norm, peak = torch.stack(norms).mean(0), torch.stack(norms).amax(0)
    return Epoch(loss.mean(1), right.mean(1), norm[:, 0], norm[:, 1:], peak[:, 1:], torch.stack(upstream).mean(0))


@torch.no_grad()
def validate(network: Network, rows: Tensor, data: Data, mixing: Mixing) -> tuple[Tensor, Tensor]:
    """Loss and accuracy, [N, 2^S] each, with every subset of the seeds switched off: seed s where bit s of the column's number is set."""
    felt = [slot for slot, who in enumerate(mixing.who) if who]
    logits = network.forward(network.views(rows), data.inputs, mixing, subsets=True).logits
    found = scores(logits.log_softmax(1), data.targets.repeat(2 ** len(felt)))
    columns = [
        sum((subset >> slot & 1) << place for place, slot in enumerate(felt)) for subset in range(2**network.slots)
    ]
    loss, accuracy = (part.unflatten(1, (-1, len(data.targets))).mean(2)[:, columns] for part in found)
    return loss, accuracy


def _wide(targets: Tensor, like: Tensor) -> Tensor:
    """Classes [M] as an index [N, 1, M] into the classes of all networks."""
    return targets.expand(len(like), 1, -1)
