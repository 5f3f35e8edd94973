"""All hosts with their seeds: weights, optimizers, data and the watchdog, for N environments at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from esper_telemetry.lab.morphogenesis import training as watchdog
from esper_telemetry.lab.morphogenesis.effects import INERT, Owners
from esper_telemetry.lab.morphogenesis.network import ANATOMY, Mixing, Network, anatomy, newborn, presence
from esper_telemetry.lab.morphogenesis.slots import ALIVE, LEARNING, Slots, Stage, among
from esper_telemetry.lab.morphogenesis.training import (
    OPTIMIZERS,
    AdamMoments,
    Epoch,
    LearningTask,
    Weights,
    minibatches,
    train_epoch,
    validate,
)


class ColonyResult(NamedTuple):
    """An epoch of all environments.

    Attributes:
        epoch: of training.
        loss, accuracy: [N, 2^S], in validation, with every subset of the seeds off; all are on in the first.
        verdict: of the watchdog.
    """

    epoch: Epoch
    loss: Tensor
    accuracy: Tensor
    verdict: watchdog.WatchdogVerdict


class Colony:
    """The networks of N environments.

    Attributes:
        network, task: what is trained on what.
        weights: what is trained.
    """

    def __init__(
        self, task: LearningTask, envs: int, slots: int, *, optimizer: str, generator: torch.Generator
    ) -> None:
        device = generator.device
        _keep_freed_memory()
        sizes = {"inputs": task.inputs, "width": task.width, "classes": task.classes, "tokens": task.tokens}
        self.network, self.task = Network(slots=slots, linear=task.linear, **sizes), task.to(device)
        self._envs, self._slots, self._generator = envs, slots, generator
        self._optimizer = OPTIMIZERS[optimizer]
        self._present, self._anatomy = presence(self.network.seed).to(device), anatomy().to(device)
        self._sizes = self._present.sum(-1)
        self.reset()

    def reset(self) -> None:
        """New hosts without seeds."""
        hosts = self.network.hosts(self._envs, self._generator)
        rows = hosts.new_zeros(self._envs, 1 + self._slots, self.network.size)
        self.weights = Weights(rows, AdamMoments.of(rows))
        self.hosts.copy_(hosts)
        self._watch = watchdog.TrainingWatchdog.fresh(self._envs, hosts.device)
        self._snapshot = rows.clone()

    @property
    def hosts(self) -> Tensor:
        """[N, size of a host]: their parameters, to read and to write."""
        return self.weights.rows[:, 0, : self.network.host.size]

    @property
    def seeds(self) -> Tensor:
        """[N, S, size of a seed]: their parameters, to read and to write; zero where a blueprint has none."""
        return self.weights.rows[:, 1:, : self.network.seed.size]

    def parameters(self, slots: Slots) -> Tensor:
        """[N, S]: how many parameters each seed has."""
        return self._sizes[slots.style, slots.blueprint] * among(slots.stage, ALIVE)

    def plant(self, slots: Slots, born: Tensor) -> None:
        """Draws the seeds that are born, [N, S]; the optimizers of the others remember all they did."""
        fresh = newborn(self.network.seed, (self._envs, self._slots), self._generator)
        if born.any():
            present = self._present[slots.style, slots.blueprint]
            self.seeds.copy_(torch.where(born.unsqueeze(-1), fresh * present, self.seeds))
            self._forget(born)

    def drop(self, gone: Tensor) -> None:
        """Forgets the seeds that are gone, [N, S], and what their optimizers remember."""
        if gone.any():
            self.seeds.masked_fill_(gone.unsqueeze(-1), 0.0)
            self._forget(gone)

    def train(self, slots: Slots) -> ColonyResult:
        """One epoch, its validation, and the watchdog's verdict."""
        epoch = train_epoch(
            self.network,
            self.weights,
            minibatches(self.task, self._generator),
            self._mixing(slots, training=True),
            learning=among(slots.stage, LEARNING) & ~slots.leaving,
            optimizer=self._optimizer,
            rate=self.task.learning_rate,
        )
        loss, accuracy = self.validate(slots)
        self._watch, verdict = watchdog.look(self._watch, loss[:, 0], self.task.classes)
        return ColonyResult(epoch, loss, accuracy, verdict)

    def validate(self, slots: Slots) -> tuple[Tensor, Tensor]:
        """Loss and accuracy [N, 2^S] with every subset of the seeds switched off; all are on in the first."""
        return validate(self.network, self.weights.rows, self.task.validation, self._mixing(slots, training=False))

    def keep(self, where: Tensor) -> None:
        """Remembers the weights of the environments where [N] is set, to go back to."""
        if where.any():
            self._snapshot = torch.where(where[:, None, None], self.weights.rows, self._snapshot)

    def roll_back(self, where: Tensor, pruned: Tensor) -> None:
        """Goes back where [N] is set, without the seeds that are `pruned` there, [N, S]; optimizers begin anew."""
        self.weights.rows.copy_(torch.where(where[:, None, None], self._snapshot, self.weights.rows))
        self.weights.moments.clear(where.unsqueeze(1).expand(-1, 1 + self._slots))
        self.drop(pruned)
        self._watch = self._watch.cleared(where)

    def state_dict(self) -> dict[str, list[Tensor]]:
        """Everything that the next epoch depends on, but the random generator."""
        weights = [part.clone() for part in (self.weights.rows, *self.weights.moments)]
        return {"weights": weights, "watch": list(self._watch), "snapshot": [self._snapshot]}

    def load_state_dict(self, state: Mapping[str, list[Tensor]]) -> None:
        """Goes on from a saved state."""
        device = self._generator.device
        rows, *moments = (tensor.to(device, copy=True) for tensor in state["weights"])
        self.weights = Weights(rows, AdamMoments(*moments))
        self._watch = watchdog.TrainingWatchdog(*(tensor.to(device) for tensor in state["watch"]))
        (self._snapshot,) = (tensor.to(device) for tensor in state["snapshot"])

    def _forget(self, seeds: Tensor) -> None:
        self.weights.moments.clear(torch.cat([torch.zeros_like(seeds[:, :1]), seeds], 1))

    def _mixing(self, slots: Slots, *, training: bool) -> Mixing:
        """How seeds take part; one that neither counts nor learns is left out."""
        isolated = slots.stage == Stage.TRAINING
        counts = (slots.alpha > 0) | isolated if training else slots.alpha > 0
        has = self._anatomy[slots.style, slots.blueprint] & counts.unsqueeze(-1)
        return Mixing(
            slots.alpha, isolated, [_who(has[:, slot], amounts) for slot, amounts in enumerate(has.sum(0).tolist())]
        )


def _keep_freed_memory() -> None:
    """Frees one large block, after which glibc keeps up to twice as much of what is freed, for the next step.

    It gives memory back at once otherwise; to fetch it page by page again takes a third of every step of 64 environments.
    """
    torch.empty(31 * 2**20, dtype=torch.uint8)


def _who(has: Tensor, amounts: list[int]) -> Owners:
    """Who has what, from [N, `ANATOMY`] and how many have it; all, where it is less work to include those who have zeros."""
    found = dict[str, Tensor | None]()
    for place, (name, amount) in enumerate(zip(ANATOMY, amounts, strict=True)):
        least = len(has) / 2 if name in INERT else len(has)
        if amount:
            found[name] = None if amount >= least else has[:, place].nonzero().squeeze(1)
    return found
