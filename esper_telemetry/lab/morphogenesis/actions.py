"""The controller's eight heads, what they may choose, and what their choice does to the slots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from esper_telemetry.lab.morphogenesis.network import BLUEPRINTS, STYLES
from esper_telemetry.lab.morphogenesis.slots import (
    ADVANCES,
    ALPHA_TARGETS,
    BLOCKING,
    CURVES,
    GATES,
    MIN_PRUNE_AGE,
    OP_STAGES,
    SPEED_EPOCHS,
    TEMPO_EPOCHS,
    Op,
    Slots,
    Stage,
    TransitionGates,
    among,
    look_up,
)
from esper_telemetry.ppo.environments.protocol import ActionSpec

NOT_ASKED, REFUSED, PASSED = -1, 0, 1
"""What a gate answers."""

SIGMOID_STYLE, SIGMOID_CURVE = STYLES.index("sigmoid_add"), CURVES.index("sigmoid")


def specs(slots: int) -> dict[str, ActionSpec]:
    """The heads, and the operations for which each matters."""
    sized = {
        "slot": (slots, tuple(op for op in Op if op is not Op.WAIT)),
        "blueprint": (len(BLUEPRINTS), (Op.GERMINATE,)),
        "style": (len(STYLES), (Op.GERMINATE,)),
        "tempo": (len(TEMPO_EPOCHS), (Op.GERMINATE,)),
        "alpha_target": (len(ALPHA_TARGETS), (Op.GERMINATE, Op.SET_ALPHA)),
        "alpha_speed": (len(SPEED_EPOCHS), (Op.SET_ALPHA, Op.PRUNE)),
        "alpha_curve": (len(CURVES), (Op.SET_ALPHA, Op.PRUNE)),
    }
    parts = {
        name: ActionSpec("categorical", size, given="op", relevant_for=tuple(map(int, ops)))
        for name, (size, ops) in sized.items()
    }
    return {"op": ActionSpec("categorical", len(Op)), **parts}


def slot_masks(slots: Slots) -> Tensor:
    """[N, operations, S], bool: the slots on which each operation is possible; all for WAIT, which needs none."""
    still = ~slots.moving & ~slots.leaving
    free = ~among(slots.stage, BLOCKING).any(1, keepdim=True)
    extra = {
        Op.GERMINATE: free,
        Op.SET_ALPHA: still,
        Op.PRUNE: still & (slots.age >= MIN_PRUNE_AGE),
        Op.ADVANCE: ~slots.leaving,
        Op.FOSSILIZE: still,
    }
    rows = [among(slots.stage, OP_STAGES[op]) & extra[op] for op in list(Op)[1:]]
    return torch.stack([torch.ones_like(rows[0]), *rows], 1)


def action_masks(slots: Slots, *, tokens: int) -> dict[str, Tensor]:
    """What may be chosen: `op` [N, 6], `slot` by operation [N, 6, S], `blueprint` [N, 4] by what the host has."""
    by_op = slot_masks(slots)
    fitting = torch.tensor([tokens > 1 or not kind.attends for kind in BLUEPRINTS], device=by_op.device)
    return {"op": by_op.any(-1), "slot": by_op, "blueprint": fitting.expand(len(by_op), -1)}


class ActionOutcome(NamedTuple):
    """What an action did.

    Attributes:
        op: [N], the operation; WAIT where it was not possible.
        born, pruned, fossilized: [N, S], bool: what has become of slots at once.
        gates: [N, gates], `NOT_ASKED`, `REFUSED` or `PASSED`.
    """

    op: Tensor
    born: Tensor
    pruned: Tensor
    fossilized: Tensor
    gates: Tensor


def act(slots: Slots, actions: Mapping[str, Tensor], gates: TransitionGates, accuracy: Tensor) -> ActionOutcome:
    """Does what was chosen, [N] per head, where it is possible; `accuracy` [N] is that of the epoch before."""
    rows = torch.arange(len(accuracy), device=accuracy.device)
    possible = slot_masks(slots)[rows, actions["op"], actions["slot"]]
    op = torch.where(possible, actions["op"], int(Op.WAIT))
    hit = F.one_hot(actions["slot"], slots.stage.shape[1]).bool()
    on = {wanted: (op == wanted).unsqueeze(1) & hit for wanted in Op}
    answers, moved = _ask(slots, gates, accuracy, on)
    chosen = {name: choice.unsqueeze(1) for name, choice in actions.items()}
    pruned = _fade(slots, on[Op.PRUNE], chosen)
    _aim(slots, on[Op.SET_ALPHA], chosen)
    _germinate(slots, moved[Stage.GERMINATED], chosen)
    curve = torch.where(slots.style == SIGMOID_STYLE, SIGMOID_CURVE, 0)
    slots.head_for(moved[Stage.BLENDING], slots.goal, slots.tempo, curve)
    again = on[Op.SET_ALPHA] & (slots.stage == Stage.HOLDING)
    for stage, where in (*moved.items(), (Stage.BLENDING, again), (Stage.PRUNED, pruned)):
        slots.enter(where, stage, accuracy)
    slots.empty_out(pruned)
    return ActionOutcome(op, moved[Stage.GERMINATED], pruned, moved[Stage.FOSSILIZED], answers)


def _ask(
    slots: Slots, gates: TransitionGates, accuracy: Tensor, on: Mapping[Op, Tensor]
) -> tuple[Tensor, dict[Stage, Tensor]]:
    """What every gate says of the slots that want through, and those that it lets through."""
    answers, moved = [], {}
    for gate in GATES:
        wanting = _wanting(gate.to, slots, on)
        moved[gate.to] = passing = wanting & gates.passed(gate, slots, accuracy) if wanting.any() else wanting
        answer = torch.where(passing.any(1), PASSED, REFUSED)
        answers.append(torch.where(wanting.any(1), answer, NOT_ASKED))
    return torch.stack(answers, 1), moved


def advanceable(slots: Slots, gates: TransitionGates, accuracy: Tensor) -> Tensor:
    """Where [N, S] ADVANCE would lead on."""
    everywhere = dict.fromkeys(Op, torch.ones_like(slots.leaving))
    forward = [gate for gate in GATES if gate.to in ADVANCES.values()]
    asking = [(gate, _wanting(gate.to, slots, everywhere)) for gate in forward]
    found = [wanting & gates.passed(gate, slots, accuracy) for gate, wanting in asking if wanting.any()]
    return torch.stack([torch.zeros_like(slots.leaving), *found]).any(0)


def _wanting(to: Stage, slots: Slots, on: Mapping[Op, Tensor]) -> Tensor:
    """Slots that an operation would bring to that stage."""
    if to is Stage.GERMINATED:
        return on[Op.GERMINATE]
    if to is Stage.FOSSILIZED:
        return on[Op.FOSSILIZE]
    return on[Op.ADVANCE] & among(slots.stage, tuple(stage for stage, after in ADVANCES.items() if after is to))


def _germinate(slots: Slots, where: Tensor, chosen: Mapping[str, Tensor]) -> None:
    slots.empty_out(where)
    tempo, goal = look_up(TEMPO_EPOCHS, chosen["tempo"]), look_up(ALPHA_TARGETS, chosen["alpha_target"])
    slots.set(where, blueprint=chosen["blueprint"], style=chosen["style"], tempo=tempo, goal=goal)


def _fade(slots: Slots, where: Tensor, chosen: Mapping[str, Tensor]) -> Tensor:
    """Begins to fade seeds out; returns those that are pruned at once, having no weight to lose or no time."""
    speed = look_up(SPEED_EPOCHS, chosen["alpha_speed"])
    at_once = where & ((slots.alpha == 0) | (speed == 0))
    fading = where & ~at_once
    slots.head_for(fading, 0.0, speed, chosen["alpha_curve"])
    slots.set(fading, leaving=True)
    return at_once


def _aim(slots: Slots, where: Tensor, chosen: Mapping[str, Tensor]) -> None:
    """Gives seeds another weight to move to."""
    target, speed = look_up(ALPHA_TARGETS, chosen["alpha_target"]), look_up(SPEED_EPOCHS, chosen["alpha_speed"])
    slots.head_for(where, target, speed, chosen["alpha_curve"])
