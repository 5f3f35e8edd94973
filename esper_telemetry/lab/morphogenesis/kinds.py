"""Stages of seeds, operations on them, and their blueprints: names and numbers for alarms and views, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Stage(IntEnum):
    """Stage of a slot."""

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
    """Operation of a step."""

    WAIT = 0
    GERMINATE = 1
    SET_ALPHA = 2
    PRUNE = 3
    FOSSILIZE = 4
    ADVANCE = 5


SEVERE = 0.5
"""Minimum severity of an exploding or vanishing gradient."""

ROLLBACK_ALARM = "env/rollback"
"""Type of the alarm about roll-backs, whose evidence names the hosts."""

ROLLBACK_REASONS = ("nonfinite", "lobotomy", "divergence")
"""Reasons for a roll-back by the watchdog."""

MAX_HIDDEN_UNITS = 24
"""Hidden units of the largest seed."""


@dataclass(frozen=True, slots=True)
class Blueprint:
    """One kind of seed; all are residual, and the identity after germination.

    Attributes:
        scales: scales and shifts the normalised features.
        units: hidden units of its two-layer network.
        attends: attends to earlier tokens, so the host must have tokens.
    """

    name: str
    scales: bool = False
    units: int = 0
    attends: bool = False


BLUEPRINTS = (
    Blueprint("norm", scales=True),
    Blueprint("bottleneck", units=4),
    Blueprint("mlp", units=MAX_HIDDEN_UNITS),
    Blueprint("attention", attends=True),
)

STYLES = ("add", "sigmoid_add", "multiply", "gated")
"""Ways to blend a seed's effect: added with a linear or a sigmoid schedule, as a factor, or through a learned gate."""
