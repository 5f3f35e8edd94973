"""All hosts with their seeds: weights, optimizers, data and the watchdog, for N environments at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from esper_telemetry.environments.morphogenesis import watchdog
from esper_telemetry.environments.morphogenesis.blueprints import newborn, presence
from esper_telemetry.environments.morphogenesis.learning import (
    Epoch,
    Weights,
    minibatches,
    train_epoch,
    validate,
)
from esper_telemetry.environments.morphogenesis.lifecycle import ALIVE, LEARNING, Stage, among
from esper_telemetry.environments.morphogenesis.network import Mixing, Network
from esper_telemetry.environments.morphogenesis.optimizers import OPTIMIZERS, Moments
from esper_telemetry.environments.morphogenesis.slots import Slots
from esper_telemetry.environments.morphogenesis.tasks import Task


class Result(NamedTuple):
    """An epoch of all environments.

    Attributes:
        epoch: of training.
        loss, accuracy: [N, 2^S], in validation, with every subset of the seeds off; all are on in the first.
        verdict: of the watchdog.
    """

    epoch: Epoch
    loss: Tensor
    accuracy: Tensor
    verdict: watchdog.Verdict


class Colony:
    """The networks of N environments.

    Attributes:
        network, task: what is trained on what.
        weights: what is trained.
    """

    weights: Weights

    def __init__(self, task: Task, envs: int, slots: int, *, optimizer: str, generator: torch.Generator) -> None:
        device = generator.device
        sizes = {"inputs": task.inputs, "width": task.width, "classes": task.classes, "tokens": task.tokens}
        self.network, self.task = Network(slots=slots, linear=task.linear, **sizes), task.to(device)
        self._envs, self._slots, self._generator = envs, slots, generator
        self._optimizer = OPTIMIZERS[optimizer]
        self._table = presence(self.network.seed).to(device)
        self.reset()

    def reset(self) -> None:
        """New hosts without seeds."""
        hosts = self.network.hosts(self._envs, self._generator)
        seeds = hosts.new_zeros(self._envs, self._slots, self.network.seed.size)
        self.weights = Weights(hosts, seeds, Moments.of(hosts), Moments.of(seeds))
        self._watch = watchdog.Watch.fresh(self._envs, hosts.device)
        self._snapshot = (hosts, seeds)

    def present(self, slots: Slots) -> Tensor:
        """[N, S, size], bool: the parameters that seeds have."""
        return self._table[slots.style, slots.blueprint] & among(slots.stage, ALIVE).unsqueeze(-1)

    def plant(self, slots: Slots, born: Tensor) -> None:
        """Draws the seeds that are born, [N, S]; the optimizers of the others remember all they did."""
        fresh = newborn(self.network.seed, (self._envs, self._slots), self._generator) * self.present(slots)
        seeds = torch.where(born.unsqueeze(-1), fresh, self.weights.seeds)
        self.weights = self.weights._replace(seeds=seeds, seed_moments=self.weights.seed_moments.cleared(born))

    def drop(self, gone: Tensor) -> None:
        """Forgets the seeds that are gone, [N, S], and what their optimizers remember."""
        seeds, moments = self.weights.seeds.masked_fill(gone.unsqueeze(-1), 0.0), self.weights.seed_moments
        self.weights = self.weights._replace(seeds=seeds, seed_moments=moments.cleared(gone))

    def train(self, slots: Slots) -> Result:
        """One epoch, its validation, and the watchdog's verdict."""
        present, mixing = self.present(slots), _mixing(slots)
        self.weights, epoch = train_epoch(
            self.network,
            self.weights,
            minibatches(self.task, self._generator),
            mixing,
            present=present,
            learning=among(slots.stage, LEARNING) & ~slots.leaving,
            optimizer=self._optimizer,
            rate=self.task.learning_rate,
        )
        loss, accuracy = self.validate(slots)
        self._watch, verdict = watchdog.look(self._watch, loss[:, 0], self.task.classes)
        return Result(epoch, loss, accuracy, verdict)

    def validate(self, slots: Slots) -> tuple[Tensor, Tensor]:
        """Loss and accuracy [N, 2^S] with every subset of the seeds switched off; all are on in the first."""
        present, mixing = self.present(slots), _mixing(slots)
        return validate(self.network, self.weights, self.task.validation, mixing, present)

    def keep(self, where: Tensor) -> None:
        """Remembers the weights of the environments where [N] is set, to go back to."""
        hosts, seeds = self._snapshot
        self._snapshot = (_choose(where, self.weights.hosts, hosts), _choose(where, self.weights.seeds, seeds))

    def roll_back(self, where: Tensor, pruned: Tensor) -> None:
        """Goes back where [N] is set, without the seeds that are `pruned` there, [N, S]; optimizers begin anew."""
        pairs = zip(self._snapshot, (self.weights.hosts, self.weights.seeds), strict=True)
        hosts, seeds = (_choose(where, old, new) for old, new in pairs)
        lost = pruned | where.unsqueeze(1)
        host_moments, seed_moments = self.weights.host_moments.cleared(where), self.weights.seed_moments.cleared(lost)
        self.weights = Weights(hosts, seeds.masked_fill(pruned.unsqueeze(-1), 0.0), host_moments, seed_moments)
        fresh = watchdog.Watch.fresh(self._envs, where.device)
        losses, strikes = (_choose(where, new, old) for new, old in zip(fresh, self._watch, strict=True))
        self._watch = watchdog.Watch(losses, strikes)

    def state_dict(self) -> dict[str, list[Tensor]]:
        """Everything that the next epoch depends on, but the random generator."""
        weights = [self.weights.hosts, self.weights.seeds, *self.weights.host_moments, *self.weights.seed_moments]
        return {"weights": weights, "watch": list(self._watch), "snapshot": list(self._snapshot)}

    def load_state_dict(self, state: Mapping[str, list[Tensor]]) -> None:
        """Goes on from a saved state."""
        device = self._generator.device
        hosts, seeds, *moments = (tensor.to(device) for tensor in state["weights"])
        self.weights = Weights(hosts, seeds, Moments(*moments[:3]), Moments(*moments[3:]))
        self._watch = watchdog.Watch(*(tensor.to(device) for tensor in state["watch"]))
        first, second = (tensor.to(device) for tensor in state["snapshot"])
        self._snapshot = (first, second)


def _mixing(slots: Slots) -> Mixing:
    return Mixing(slots.alpha, slots.stage == Stage.TRAINING, slots.style)


def _choose(where: Tensor, chosen: Tensor, other: Tensor) -> Tensor:
    """The rows of one tensor where [N] is set, those of the other elsewhere."""
    return torch.where(where.view(-1, *[1] * (other.dim() - 1)), chosen, other)
