"""The hosts and seeds of N environments: weights, optimizers, data, and the state of each slot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from esper_telemetry.lab.morphogenesis.kinds import Stage
from esper_telemetry.lab.morphogenesis.network import ANATOMY, INERT, Mixing, Network, Owners, anatomy, newborn, presence
from esper_telemetry.lab.morphogenesis.slots import ALIVE, LEARNING, Slots, among
from esper_telemetry.lab.morphogenesis.training import (
    OPTIMIZERS,
    AdamMoments,
    Epoch,
    LearningTask,
    TrainingWatchdog,
    WatchdogVerdict,
    Weights,
    minibatches,
    train_epoch,
    validate,
    watch_losses,
)


class ColonyResult(NamedTuple):
    """Results of an epoch in all environments.

    Attributes:
        epoch: results of training.
        loss, accuracy: [N, 2^S], in validation, with every subset of the seeds off; the first column has all seeds on.
        verdict: verdict of the watchdog.
    """

    epoch: Epoch
    loss: Tensor
    accuracy: Tensor
    verdict: WatchdogVerdict


class Colony:
    """The networks of N environments.

    Attributes:
        network, task: architecture and data.
        weights: parameters and optimizer state.
    """

    def __init__(self, task: LearningTask, envs: int, slots: int, *, optimizer: str, generator: torch.Generator) -> None:
        device = generator.device
        # After one large block has been freed, glibc keeps up to twice as much freed memory for the next step. Otherwise fetching it again,
        # page by page, takes a third of every step of 64 environments.
        torch.empty(31 * 2**20, dtype=torch.uint8)
        sizes = {"inputs": task.inputs, "width": task.width, "classes": task.classes, "tokens": task.tokens}
        self.network, self.task = Network(slots=slots, linear=task.linear, **sizes), task.to(device)
        self._envs, self._slots, self._generator = envs, slots, generator
        self._optimizer = OPTIMIZERS[optimizer]
        self._present, self._anatomy = presence(self.network.seed).to(device), anatomy().to(device)
        self._sizes, self._tensors = self._present.sum(-1), self.network.seed.norms(self._present.float()) > 0
        self._snapshot = torch.zeros(envs, 1 + slots, self.network.size, device=device)
        self.weights = Weights(self._snapshot.clone(), AdamMoments.of(self._snapshot))
        self._watchdog = TrainingWatchdog.fresh(envs, device)
        self.reset(torch.ones(envs, dtype=torch.bool, device=device))

    def reset(self, where: Tensor) -> None:
        """Replace the networks of the environments selected by `where` [N] with new hosts without seeds."""
        new = torch.zeros_like(self._snapshot)
        new[:, 0, : self.network.host.size] = self.network.hosts(self._envs, self._generator)
        self._snapshot = torch.where(where[:, None, None], new, self._snapshot)
        self.roll_back(where, torch.zeros_like(where).unsqueeze(1))

    @property
    def hosts(self) -> Tensor:
        """Parameters of the hosts [N, size of a host], a writable view."""
        return self.weights.rows[:, 0, : self.network.host.size]

    @property
    def seeds(self) -> Tensor:
        """Parameters of the seeds [N, S, size of a seed], a writable view; zero for parameters that a blueprint lacks."""
        return self.weights.rows[:, 1:, : self.network.seed.size]

    def tensors(self, slots: Slots) -> Tensor:
        """Return which parameters each seed has, [N, S, parameters], bool."""
        return self._tensors[slots.style, slots.blueprint] & among(slots.stage, ALIVE).unsqueeze(-1)

    def parameters(self, slots: Slots) -> Tensor:
        """Return the number of parameters of each seed [N, S]."""
        return self._sizes[slots.style, slots.blueprint] * among(slots.stage, ALIVE)

    def plant(self, slots: Slots, born: Tensor) -> None:
        """Initialise the seeds that are germinated, [N, S]; the optimizer state of the others is kept."""
        fresh = newborn(self.network.seed, (self._envs, self._slots), self._generator)
        if born.any():
            present = self._present[slots.style, slots.blueprint]
            self.seeds.copy_(torch.where(born.unsqueeze(-1), fresh * present, self.seeds))
            self._clear_moments(born)

    def drop(self, gone: Tensor) -> None:
        """Remove the seeds that are gone, [N, S], and their optimizer state."""
        if gone.any():
            self.seeds.masked_fill_(gone.unsqueeze(-1), 0.0)
            self._clear_moments(gone)

    def train(self, slots: Slots) -> ColonyResult:
        """Train for one epoch, validate, and return the results with the watchdog's verdict."""
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
        self._watchdog, verdict = watch_losses(self._watchdog, loss[:, 0], self.task.classes)
        return ColonyResult(epoch, loss, accuracy, verdict)

    def validate(self, slots: Slots) -> tuple[Tensor, Tensor]:
        """Return loss and accuracy [N, 2^S] with every subset of the seeds switched off; the first column has all seeds on."""
        return validate(self.network, self.weights.rows, self.task.validation, self._mixing(slots, training=False))

    def snapshot(self, where: Tensor) -> None:
        """Copy the weights of the environments selected by `where` [N], for `roll_back`."""
        if where.any():
            self._snapshot = torch.where(where[:, None, None], self.weights.rows, self._snapshot)

    def roll_back(self, where: Tensor, pruned: Tensor) -> None:
        """Restore the snapshot of the selected environments [N], without `pruned` seeds [N, S]; clear optimizer state and watchdog."""
        self.weights.rows.copy_(torch.where(where[:, None, None], self._snapshot, self.weights.rows))
        self.weights.moments.clear(where.unsqueeze(1).expand(-1, 1 + self._slots))
        self.drop(pruned)
        self._watchdog = self._watchdog.cleared(where)

    def state_dict(self) -> dict[str, list[Tensor]]:
        """Return the state that the next epoch depends on, without the random generator."""
        weights = [part.clone() for part in (self.weights.rows, *self.weights.moments)]
        return {"weights": weights, "watch": list(self._watchdog), "snapshot": [self._snapshot]}

    def load_state_dict(self, state: Mapping[str, list[Tensor]]) -> None:
        """Continue from a saved state."""
        device = self._generator.device
        rows, *moments = (tensor.to(device, copy=True) for tensor in state["weights"])
        self.weights = Weights(rows, AdamMoments(*moments))
        self._watchdog = TrainingWatchdog(*(tensor.to(device) for tensor in state["watch"]))
        (self._snapshot,) = (tensor.to(device) for tensor in state["snapshot"])

    def _clear_moments(self, seeds: Tensor) -> None:
        self.weights.moments.clear(torch.cat([torch.zeros_like(seeds[:, :1]), seeds], 1))

    def _mixing(self, slots: Slots, *, training: bool) -> Mixing:
        """Return the seeds' part in a pass; a seed without weight that does not learn is left out."""
        isolated = slots.stage == Stage.TRAINING
        counts = (slots.alpha > 0) | isolated if training else slots.alpha > 0
        has = self._anatomy[slots.style, slots.blueprint] & counts.unsqueeze(-1)
        return Mixing(slots.alpha, isolated, [_owners(has[:, slot], amounts) for slot, amounts in enumerate(has.sum(0).tolist())])


def _owners(has: Tensor, amounts: list[int]) -> Owners:
    """Return the networks with each part, from [N, `ANATOMY`] and their counts; None for all, if including zeros is less work."""
    owners = dict[str, Tensor | None]()
    for place, (name, amount) in enumerate(zip(ANATOMY, amounts, strict=True)):
        least = len(has) / 2 if name in INERT else len(has)
        if amount:
            owners[name] = None if amount >= least else has[:, place].nonzero().squeeze(1)
    return owners
