"""The state of all slots of all environments: [N, S] tensors, and what time and operations do to them."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from esper_telemetry.lab.morphogenesis.alpha import progress
from esper_telemetry.lab.morphogenesis.lifecycle import TICKS, Stage


@dataclass(slots=True)
class Slots:
    """One tensor [N, S] per fact; replaced, never written to.

    Attributes:
        stage, age: the `Stage`, and epochs in it.
        life: epochs since germination.
        blueprint, style, tempo, goal: as chosen at germination: two indices, epochs that blending takes, and the weight it leads to.
        alpha, start, target: weight of the seed, where its change began and where it leads.
        done, total, curve: epochs of that change behind, in all, and along which curve.
        leaving: whether the seed is being faded out to be pruned; its parameters rest meanwhile.
        anchor: validation accuracy when the stage began.
        norm: mean norm of the last epoch's gradients; -1 where nothing was measured.
        exploding, vanishing: severities of these gradients, see `severity`.
        ratio: running mean of the intensity ratio to the host; -1 where nothing was measured.
        contribution: accuracy that is lost when the seed alone is switched off; -1 where it has no effect.
    """

    stage: Tensor
    age: Tensor
    life: Tensor
    blueprint: Tensor
    style: Tensor
    tempo: Tensor
    goal: Tensor
    alpha: Tensor
    start: Tensor
    target: Tensor
    done: Tensor
    total: Tensor
    curve: Tensor
    leaving: Tensor
    anchor: Tensor
    norm: Tensor
    exploding: Tensor
    vanishing: Tensor
    ratio: Tensor
    contribution: Tensor

    @classmethod
    def empty(cls, envs: int, slots: int, device: torch.device) -> Slots:
        """Dormant slots."""
        types = dict.fromkeys(("stage", "age", "life", "blueprint", "style", "tempo"), torch.int64)
        types |= dict.fromkeys(("done", "total", "curve"), torch.int64) | {"leaving": torch.bool}
        names = [item.name for item in fields(cls)]
        found = {name: torch.zeros(envs, slots, dtype=types.get(name, torch.float32), device=device) for name in names}
        unmeasured = {name: found[name] - 1 for name in ("norm", "ratio", "contribution")}
        return cls(**{**found, **unmeasured, "stage": found["stage"] + Stage.DORMANT})

    def tensors(self) -> dict[str, Tensor]:
        """All by name."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    def set(self, where: Tensor, **values: Tensor | float) -> None:
        """Sets facts of the slots where [N, S] is set."""
        if not where.any():
            return
        for name, value in values.items():
            old = getattr(self, name)
            new = (
                torch.where(where, value.to(old.dtype), old)
                if isinstance(value, Tensor)
                else old.masked_fill(where, value)
            )
            setattr(self, name, new)

    def enter(self, where: Tensor, stage: Stage | Tensor, accuracy: Tensor) -> None:
        """Moves slots to a stage; the accuracy [N] is what they are measured from."""
        self.set(where, stage=stage, age=0, anchor=accuracy.unsqueeze(1))

    def head_for(self, where: Tensor, target: Tensor | float, epochs: Tensor, curve: Tensor) -> None:
        """Begins to move the weight to a target over so many epochs; over none, it is there at once."""
        at_once = where & (epochs == 0)
        self.set(where, start=self.alpha, target=target, done=0, total=epochs, curve=curve)
        self.set(at_once, alpha=self.target)

    @property
    def health(self) -> Tensor:
        """1 less the worse of the two severities, [N, S]."""
        return 1 - torch.maximum(self.exploding, self.vanishing)

    @property
    def moving(self) -> Tensor:
        """Whether the weight is on its way, [N, S]."""
        return self.done < self.total

    def empty_out(self, where: Tensor) -> None:
        """Forgets the seed that was there."""
        self.set(where, alpha=0, start=0, target=0, done=0, total=0, leaving=False, life=0)
        self.set(where, norm=-1, exploding=0, vanishing=0, ratio=-1, contribution=-1)

    def move_weights(self) -> None:
        """One epoch of every schedule that runs."""
        running = self.moving
        self.done = self.done + running
        way = progress(self.done, self.total, self.curve)
        self.set(running, alpha=self.start + (self.target - self.start) * way)

    def tick(self, accuracy: Tensor) -> Tensor:
        """What happens by itself at the end of an epoch; returns where [N, S] a seed has faded out and is pruned."""
        before, age = self.stage, self.age
        faded = self.leaving & ~self.moving & (before != Stage.PRUNED)
        self.enter(faded, Stage.PRUNED, accuracy)
        self.empty_out(faded)
        for stage, (after, epochs) in TICKS.items():
            self.enter((before == stage) & (age >= epochs), after, accuracy)
        self.age = self.age + 1
        self.life = self.life + (self.stage >= Stage.GERMINATED) * (self.stage <= Stage.FOSSILIZED)
        return faded
