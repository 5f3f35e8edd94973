"""The state of all slots of all environments: [N, S] tensors, and what time and operations do to them.

Gates: what a seed must show before a stage, as named checks on tensors. Strict gates ask for more than permissive ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from esper_telemetry.lab.morphogenesis.lifecycle import TICKS, Stage, progress


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


MIN_TRAINING = 3
MIN_HOLDING_BLEND = 3
MIN_IMPROVEMENT = 0.005
MIN_RATIO = 0.01
MIN_HEALTH = 0.7
MIN_CONTRIBUTION = 0.01
"""Epochs, accuracy, intensity ratio (`grad/pair` calls 0.01 low), health and accuracy that the checks ask for."""

Test = Callable[[Slots, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Check:
    """One condition: from the slots and the validation accuracy [N, 1] to where it holds, [N, S].

    Attributes:
        strict: asked by strict gates only.
        permissive: asked by permissive gates only.
    """

    name: str
    test: Test
    strict: bool = False
    permissive: bool = False


@dataclass(frozen=True, slots=True)
class Gate:
    """What stands before a stage."""

    name: str
    to: Stage
    checks: tuple[Check, ...]


GATES = (
    Gate("g0", Stage.GERMINATED, (Check("slot_empty", lambda s, _: s.stage == Stage.DORMANT),)),
    Gate("g1", Stage.TRAINING, (Check("germinated", lambda s, _: s.stage == Stage.GERMINATED),)),
    Gate(
        "g2",
        Stage.BLENDING,
        (
            Check("trained_long_enough", lambda s, _: s.age >= MIN_TRAINING),
            Check("gradient_measured", lambda s, _: s.norm >= 0),
            Check("improved", lambda s, accuracy: accuracy - s.anchor >= MIN_IMPROVEMENT, strict=True),
            Check("gradient_strong_enough", lambda s, _: s.ratio >= MIN_RATIO, strict=True),
            Check("not_exploding", lambda s, _: s.exploding < 0.5, permissive=True),
            Check("healthy", lambda s, _: s.health >= MIN_HEALTH, permissive=True),
        ),
    ),
    Gate(
        "g3",
        Stage.HOLDING,
        (
            Check("full_weight", lambda s, _: (s.target == 1) & ~s.leaving),
            Check("weight_settled", lambda s, _: ~s.moving),
            Check("blended_long_enough", lambda s, _: s.age >= MIN_HOLDING_BLEND, strict=True),
        ),
    ),
    Gate(
        "g5",
        Stage.FOSSILIZED,
        (
            Check("contribution_known", lambda s, _: s.contribution > -1),
            Check("healthy", lambda s, _: s.health >= MIN_HEALTH),
            Check("contributes", lambda s, _: s.contribution >= MIN_CONTRIBUTION, strict=True),
        ),
    ),
)


class TransitionGates:
    """All gates, strict or permissive."""

    def __init__(self, *, strict: bool = False) -> None:
        self.checks: Mapping[str, tuple[Check, ...]] = {
            gate.name: tuple(c for c in gate.checks if not (c.permissive if strict else c.strict)) for gate in GATES
        }

    def passed(self, gate: Gate, slots: Slots, accuracy: Tensor) -> Tensor:
        """Where [N, S] every check of a gate holds, for an accuracy [N]."""
        found = [check.test(slots, accuracy.unsqueeze(1)) for check in self.checks[gate.name]]
        return torch.stack(found).all(0)
