"""Gates: what a seed must show before a stage, as named checks on tensors. Strict gates ask for more than permissive ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from esper_telemetry.lab.morphogenesis.lifecycle import Stage
from esper_telemetry.lab.morphogenesis.slots import Slots

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
