"""Host epochs per second, all environments as one set of tensors against one `nn.Module` and one optimizer per environment.

python benchmarks/morphogenesis.py [--num-envs 1 8 64 256] [--rounds 3]

Both train the same host with two seeds of the largest blueprint in place on the same minibatches, clip host and seeds apart, and measure
validation accuracy with every subset of the seeds switched off. The plain loop has no lifecycle, observations, rewards or watchdog,
which the environment's steps include. Seconds are those of the processor, one thread. Rounds alternate; the median counts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise, product

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper_telemetry.environments import Morphogenesis
from esper_telemetry.environments.morphogenesis.blueprints import UNITS
from esper_telemetry.environments.morphogenesis.learning import MAX_NORM, minibatches
from esper_telemetry.environments.morphogenesis.policies import SCRIPTS
from esper_telemetry.environments.morphogenesis.tasks import Task

OLDER = 0.023
"""Seconds per environment and epoch of the older system, with its policy and telemetry, as measured on another machine."""


class Seed(nn.Module):
    """A residual two-layer network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(width, UNITS), nn.Linear(UNITS, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """What it adds."""
        found: Tensor = self.leave(F.relu(self.enter(x)))
        return found


class Plain(nn.Module):
    """One host with two seeds."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        sizes = [task.inputs, task.width, task.width]
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(sizes))
        self.seeds = nn.ModuleList(Seed(task.width) for _ in self.layers)
        self.out, self.linear = nn.Linear(task.width, task.classes), task.linear

    def forward(self, x: Tensor, alphas: tuple[float, ...] = (1.0, 1.0)) -> Tensor:
        """Logits, with seeds weighed."""
        for layer, seed, alpha in zip(self.layers, self.seeds, alphas, strict=True):
            x = layer(x) if self.linear else F.relu(layer(x))
            x = x + alpha * seed(x)
        found: Tensor = self.out(x)
        return found


def plain_epoch(task: Task, nets: list[Plain], optimizers: Sequence[torch.optim.Optimizer], g: torch.Generator) -> None:
    for net, optimizer in zip(nets, optimizers, strict=True):
        for batch in minibatches(task, g):
            optimizer.zero_grad()
            F.cross_entropy(net(batch.inputs), batch.targets).backward()
            for part in (nn.ModuleList([net.layers, net.out]), *net.seeds):
                nn.utils.clip_grad_norm_(part.parameters(), MAX_NORM)
            optimizer.step()
        with torch.no_grad():
            for alphas in product((1.0, 0.0), repeat=2):
                logits = net(task.validation.inputs, alphas)
                (logits.argmax(-1) == task.validation.targets).float().mean().item()


def seconds_plain(task: Task, count: int, epochs: int) -> float:
    """Per environment and epoch."""
    nets, g = [Plain(task) for _ in range(count)], torch.Generator().manual_seed(0)
    optimizers = [torch.optim.Adam(net.parameters(), lr=task.learning_rate) for net in nets]
    plain_epoch(task, nets, optimizers, g)
    start = time.process_time()
    for _ in range(epochs):
        plain_epoch(task, nets, optimizers, g)
    return (time.process_time() - start) / (epochs * count)


def seconds_batched(env: Morphogenesis, epochs: int) -> float:
    """Per environment and epoch, from the middle of an episode in which the oracle grows seeds."""
    env.reset()
    choose = SCRIPTS["oracle"](0)
    for _ in range(12):
        env.step(choose(env))
    start = time.process_time()
    for _ in range(epochs):
        env.step(choose(env))
    return (time.process_time() - start) / (epochs * env.num_envs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-envs", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--task", default="synthetic")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("environments  batched ms  plain ms  ratio  epochs/s  over 23 ms")
    for count in options.num_envs:
        env = Morphogenesis(count, task=options.task, seed=0)
        pairs = [
            (seconds_batched(env, 8), seconds_plain(env.colony.task, min(count, 4), 2)) for _ in range(options.rounds)
        ]
        batched, plain = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratio = statistics.median(b / a for a, b in pairs)
        print(
            f"{count:12d}  {1e3 * batched:10.2f}  {1e3 * plain:8.2f}  {ratio:5.1f}  {1 / batched:8.0f}  {OLDER / batched:10.1f}"
        )


if __name__ == "__main__":
    main()
