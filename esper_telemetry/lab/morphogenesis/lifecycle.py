"""What a seed goes through, as data: stages, the transitions between them, and what a controller may do in each.

How a seed's weight moves from one value to another: curves over a number of epochs.
"""

from __future__ import annotations

from collections.abc import Mapping
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

OPEN_TO: Mapping[Op, tuple[Stage, ...]] = {
    Op.GERMINATE: (Stage.DORMANT,),
    Op.SET_ALPHA: (Stage.BLENDING, Stage.HOLDING),
    Op.PRUNE: (Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING),
    Op.FOSSILIZE: (Stage.HOLDING,),
    Op.ADVANCE: tuple(ADVANCES),
}
"""The stages in which an operation on a slot makes sense."""

BUSY = (Stage.GERMINATED, Stage.TRAINING, Stage.PRUNED, Stage.EMBARGOED, Stage.RESETTING)
"""While any slot is in one of these, nothing is germinated."""

ALIVE = (Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED)
LEARNING = (Stage.TRAINING, Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED)
FELT = (Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED)
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

TARGETS = (0.5, 0.7, 1.0)
TEMPOS = (2, 3, 5)
SPEEDS = (0, 2, 3, 5)
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
