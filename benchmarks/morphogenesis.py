"""Host epochs per second: all environments as one set of tensors, against one `nn.Module` and one optimizer per environment.

python benchmarks/morphogenesis.py [--num-envs 1 8 64 256] [--rounds 3]

Both train the same host, with two seeds of the largest blueprint, on the same minibatches, and clip and optimise host and seeds
separately. They measure loss, accuracy and norms in training, and loss and accuracy in validation with every subset of the seeds switched
off. The environment's steps also include lifecycle, observations, rewards and watchdog. Times are processor seconds of one thread, and
medians over alternating rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from itertools import pairwise, product

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper_telemetry.lab.morphogenesis.controllers import SCRIPTS
from esper_telemetry.lab.morphogenesis.environment import Morphogenesis
from esper_telemetry.lab.morphogenesis.kinds import MAX_HIDDEN_UNITS
from esper_telemetry.lab.morphogenesis.training import MAX_GRADIENT_NORM, LearningTask, minibatches


class Seed(nn.Module):
    """A residual two-layer network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(width, MAX_HIDDEN_UNITS), nn.Linear(MAX_HIDDEN_UNITS, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the seed's output, which the host adds to its own."""
        output: Tensor = self.leave(F.relu(self.enter(x)))
        return output


class Plain(nn.Module):
    """One host with two seeds."""

    def __init__(self, task: LearningTask) -> None:
        super().__init__()
        sizes = [task.inputs, task.width, task.width]
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(sizes))
        self.seeds = nn.ModuleList(Seed(task.width) for _ in self.layers)
        self.out, self.linear = nn.Linear(task.width, task.classes), task.linear

    def forward(self, x: Tensor, alphas: tuple[float, ...] = (1.0, 1.0)) -> Tensor:
        """Return logits, with the seeds' weights applied."""
        for layer, seed, alpha in zip(self.layers, self.seeds, alphas, strict=True):
            x = layer(x) if self.linear else F.relu(layer(x))
            x = x + alpha * seed(x)
        found: Tensor = self.out(x)
        return found

    def parts(self) -> list[list[nn.Parameter]]:
        """Return the parameters of the host and of each seed, which are clipped and optimised separately."""
        return [[*self.layers.parameters(), *self.out.parameters()], *(list(seed.parameters()) for seed in self.seeds)]


class Alone:
    """One network and its optimizers, written for a single environment."""

    def __init__(self, task: LearningTask) -> None:
        self.net, self.task = Plain(task), task
        self.parts = self.net.parts()
        self.optimizers = [torch.optim.Adam(part, lr=task.learning_rate) for part in self.parts]

    def epoch(self, generator: torch.Generator) -> tuple[list[Tensor], list[float]]:
        """Train and validate; return the measurements."""
        measured = list[Tensor]()
        for batch in minibatches(self.task, generator):
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            logits = self.net(batch.inputs)
            loss = F.cross_entropy(logits, batch.targets)
            loss.backward()
            norms = [nn.utils.clip_grad_norm_(part, MAX_GRADIENT_NORM) for part in self.parts]
            for optimizer in self.optimizers:
                optimizer.step()
            measured += [loss.detach(), (logits.argmax(-1) == batch.targets).float().mean(), *norms]
        return measured, self.validate()

    @torch.no_grad()
    def validate(self) -> list[float]:
        """Return loss and accuracy with every subset of the seeds switched off."""
        found, data = list[float](), self.task.validation
        for alphas in product((1.0, 0.0), repeat=2):
            logits = self.net(data.inputs, alphas)
            right = (logits.argmax(-1) == data.targets).float().mean()
            found += [F.cross_entropy(logits, data.targets).item(), right.item()]
        return found


def seconds_plain(task: LearningTask, count: int, epochs: int) -> float:
    """Return the seconds per environment and epoch."""
    networks, generator = [Alone(task) for _ in range(count)], torch.Generator().manual_seed(0)
    for network in networks:
        network.epoch(generator)
    start = time.process_time()
    for _ in range(epochs):
        for network in networks:
            network.epoch(generator)
    return (time.process_time() - start) / (epochs * count)


def seconds_batched(env: Morphogenesis, epochs: int) -> float:
    """Return the seconds per environment and epoch, from the middle of an episode in which the oracle grows seeds."""
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
    print("environments  batched ms  plain ms  ratio  epochs/s")
    for count in options.num_envs:
        env = Morphogenesis(count, task=options.task, seed=0)
        pairs = [(seconds_batched(env, 8), seconds_plain(env.colony.task, min(count, 4), 2)) for _ in range(options.rounds)]
        batched, plain = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratio = statistics.median(b / a for a, b in pairs)
        print(f"{count:12d}  {1e3 * batched:10.2f}  {1e3 * plain:8.2f}  {ratio:5.1f}  {1 / batched:8.0f}")


if __name__ == "__main__":
    main()
