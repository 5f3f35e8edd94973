"""What a seed goes through, as data: stages, the transitions between them, and what a controller may do in each.

How a seed's weight moves from one value to another: curves over a number of epochs.

The state of all slots of all environments: [N, S] tensors, and what time and operations do to them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from enum import IntEnum
from functools import cache
from math import exp

import torch
from torch import Tensor


class Stage(IntEnum):
    """Where a slot stands."""

    UNKNOWN = 0
    DORMANT = 1
    GERMINATED = 2
    TRAINING = 3
    BLENDING = 4
    HOLDING = 5
    FOSSILIZED = 6
    PRUNED = 7
    EMBARGOED = 8
    RESETTING = 9


class Op(IntEnum):
    """What the controller does in a step."""

    WAIT = 0
    GERMINATE = 1
    SET_ALPHA = 2
    PRUNE = 3
    FOSSILIZE = 4
    ADVANCE = 5


TRANSITIONS: Mapping[Stage, tuple[Stage, ...]] = {
    Stage.UNKNOWN: (Stage.DORMANT,),
    Stage.DORMANT: (Stage.GERMINATED,),
    Stage.GERMINATED: (Stage.TRAINING, Stage.PRUNED),
    Stage.TRAINING: (Stage.BLENDING, Stage.PRUNED),
    Stage.BLENDING: (Stage.HOLDING, Stage.PRUNED),
    Stage.HOLDING: (Stage.FOSSILIZED, Stage.BLENDING, Stage.PRUNED),
    Stage.FOSSILIZED: (),
    Stage.PRUNED: (Stage.EMBARGOED,),
    Stage.EMBARGOED: (Stage.RESETTING,),
    Stage.RESETTING: (Stage.DORMANT,),
}
"""The stages that may follow each, one step at a time; a new episode begins with new slots instead."""

ADVANCES: Mapping[Stage, Stage] = {
    Stage.GERMINATED: Stage.TRAINING,
    Stage.TRAINING: Stage.BLENDING,
    Stage.BLENDING: Stage.HOLDING,
}
"""Where ADVANCE leads, if the gate there opens."""

TICKS: Mapping[Stage, tuple[Stage, int]] = {
    Stage.PRUNED: (Stage.EMBARGOED, 1),
    Stage.EMBARGOED: (Stage.RESETTING, 2),
    Stage.RESETTING: (Stage.DORMANT, 1),
}
"""What follows by itself, after how many epochs."""

OP_STAGES: Mapping[Op, tuple[Stage, ...]] = {
    Op.GERMINATE: (Stage.DORMANT,),
    Op.SET_ALPHA: (Stage.BLENDING, Stage.HOLDING),
    Op.PRUNE: (Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING),
    Op.FOSSILIZE: (Stage.HOLDING,),
    Op.ADVANCE: tuple(ADVANCES),
}
"""The stages in which an operation on a slot makes sense."""

BLOCKING = (Stage.GERMINATED, Stage.TRAINING, Stage.PRUNED, Stage.EMBARGOED, Stage.RESETTING)
"""While any slot is in one of these, nothing is germinated."""

ALIVE = (Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED)
LEARNING = (Stage.TRAINING, Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED)
EFFECTIVE = (Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED)
"""Stages in which a seed has parameters, trains them, and changes what the host computes."""

MIN_PRUNE_AGE = 2
"""Epochs in its stage before a seed may be pruned."""

POTENTIALS: Mapping[Stage, float] = {
    Stage.GERMINATED: 1.0,
    Stage.TRAINING: 2.0,
    Stage.BLENDING: 3.5,
    Stage.HOLDING: 5.5,
    Stage.FOSSILIZED: 6.0,
}
"""How far a seed has come, for potential-based shaping; 0 elsewhere."""


def among(stage: Tensor, stages: tuple[Stage, ...]) -> Tensor:
    """Whether each stage is one of these."""
    return look_up(tuple(one in stages for one in Stage), stage)


def potential(stage: Tensor) -> Tensor:
    """The potential of each stage."""
    return look_up(tuple(POTENTIALS.get(one, 0.0) for one in Stage), stage)


def look_up(values: tuple[float, ...], index: Tensor) -> Tensor:
    """The value that stands at each index."""
    return _table(values, type(values[0]).__name__, index.device)[index]


@cache
def _table(values: tuple[float, ...], _: str, device: torch.device) -> Tensor:
    """As a tensor; the name of their type tells 1 from True."""
    return torch.tensor(values, device=device)


CURVES = ("linear", "cosine", "sigmoid_soft", "sigmoid", "sigmoid_steep")
STEEPNESS = (6.0, 12.0, 24.0)
"""Of the three sigmoid curves."""

ALPHA_TARGETS = (0.5, 0.7, 1.0)
TEMPO_EPOCHS = (2, 3, 5)
SPEED_EPOCHS = (0, 2, 3, 5)
"""Epochs that blending takes, and that a change of it takes; 0 is at once."""


def progress(done: Tensor, total: Tensor, curve: Tensor) -> Tensor:
    """How much of the way is behind, 0 to 1, after `done` of `total` epochs along a curve (an index into `CURVES`).

    Every curve begins at 0, ends at 1 and never turns back; sigmoids are stretched so that they do.
    """
    t = torch.where(total > 0, (done / total.clamp(min=1)).clamp(0, 1), 1.0)
    shapes = [t, (1 - torch.cos(torch.pi * t)) / 2, *(_sigmoid(t, steepness) for steepness in STEEPNESS)]
    return torch.stack(shapes, -1).gather(-1, curve.unsqueeze(-1)).squeeze(-1)


def _sigmoid(t: Tensor, steepness: float) -> Tensor:
    low, high = (1 / (1 + exp(-end * steepness / 2)) for end in (-1.0, 1.0))
    return (torch.sigmoid(steepness * (t - 0.5)) - low) / (high - low)


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
