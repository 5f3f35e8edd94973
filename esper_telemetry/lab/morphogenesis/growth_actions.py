"""The controller's eight heads, their masks, and the effect of an action on the slots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from esper_telemetry.lab.morphogenesis.kinds import BLUEPRINTS, STYLES, Op, Stage
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
    Slots,
    TransitionGates,
    among,
    look_up,
)
from esper_telemetry.ppo.environments.environment_protocol import ActionSpec

NOT_ASKED, REFUSED, PASSED = -1, 0, 1
"""Results of a gate."""

SIGMOID_STYLE, SIGMOID_CURVE = STYLES.index("sigmoid_add"), CURVES.index("sigmoid")


def specs(slots: int) -> dict[str, ActionSpec]:
    """Return the heads, with the operations for which each is relevant."""
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
    """Return the slots for which each operation is possible [N, operations, S], bool; all for WAIT, which does not use one."""
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
    """Return the masks `op` [N, 6], `slot` by operation [N, 6, S], and `blueprint` [N, 4] (attention needs tokens)."""
    by_op = slot_masks(slots)
    fitting = torch.tensor([tokens > 1 or not kind.attends for kind in BLUEPRINTS], device=by_op.device)
    return {"op": by_op.any(-1), "slot": by_op, "blueprint": fitting.expand(len(by_op), -1)}


class ActionOutcome(NamedTuple):
    """The results of an action.

    Attributes:
        op: [N], the operation; WAIT if it was impossible.
        born, pruned, fossilized: [N, S], bool: slots that changed at once.
        gates: [N, gates], `NOT_ASKED`, `REFUSED` or `PASSED`.
    """

    op: Tensor
    born: Tensor
    pruned: Tensor
    fossilized: Tensor
    gates: Tensor


def act(slots: Slots, actions: Mapping[str, Tensor], gates: TransitionGates, accuracy: Tensor) -> ActionOutcome:
    """Apply the choices, [N] per head, in environments in which they are possible; `accuracy` [N] is the previous epoch's."""
    rows = torch.arange(len(accuracy), device=accuracy.device)
    possible = slot_masks(slots)[rows, actions["op"], actions["slot"]]
    op = torch.where(possible, actions["op"], int(Op.WAIT))
    hit = F.one_hot(actions["slot"], slots.stage.shape[1]).bool()
    on = {wanted: (op == wanted).unsqueeze(1) & hit for wanted in Op}
    answers, moved = _pass_gates(slots, gates, accuracy, on)
    chosen = {name: choice.unsqueeze(1) for name, choice in actions.items()}
    pruned = _fade(slots, on[Op.PRUNE], chosen)
    target, speed = look_up(ALPHA_TARGETS, chosen["alpha_target"]), look_up(SPEED_EPOCHS, chosen["alpha_speed"])
    slots.head_for(on[Op.SET_ALPHA], target, speed, chosen["alpha_curve"])
    born, tempo = moved[Stage.GERMINATED], look_up(TEMPO_EPOCHS, chosen["tempo"])
    slots.empty_out(born)
    slots.set(born, blueprint=chosen["blueprint"], style=chosen["style"], tempo=tempo, goal=target)
    curve = torch.where(slots.style == SIGMOID_STYLE, SIGMOID_CURVE, 0)
    slots.head_for(moved[Stage.BLENDING], slots.goal, slots.tempo, curve)
    again = on[Op.SET_ALPHA] & (slots.stage == Stage.HOLDING)
    for stage, where in (*moved.items(), (Stage.BLENDING, again), (Stage.PRUNED, pruned)):
        slots.enter(where, stage, accuracy)
    slots.empty_out(pruned)
    return ActionOutcome(op, born, pruned, moved[Stage.FOSSILIZED], answers)


def _pass_gates(
    slots: Slots, gates: TransitionGates, accuracy: Tensor, on: Mapping[Op, Tensor]
) -> tuple[Tensor, dict[Stage, Tensor]]:
    """Return the result of every gate, and the slots that pass, by stage."""
    answers, moved = [], {}
    for gate in GATES:
        candidates = _candidates(gate.to, slots, on)
        moved[gate.to] = passing = candidates & gates.passed(gate, slots, accuracy) if candidates.any() else candidates
        answer = torch.where(passing.any(1), PASSED, REFUSED)
        answers.append(torch.where(candidates.any(1), answer, NOT_ASKED))
    return torch.stack(answers, 1), moved


def advanceable(slots: Slots, gates: TransitionGates, accuracy: Tensor) -> Tensor:
    """Return the slots [N, S] in which ADVANCE would pass the gate."""
    everywhere = dict.fromkeys(Op, torch.ones_like(slots.leaving))
    forward = [gate for gate in GATES if gate.to in ADVANCES.values()]
    candidates = [(gate, _candidates(gate.to, slots, everywhere)) for gate in forward]
    passing = [mask & gates.passed(gate, slots, accuracy) for gate, mask in candidates if mask.any()]
    return torch.stack([torch.zeros_like(slots.leaving), *passing]).any(0)


def _candidates(to: Stage, slots: Slots, on: Mapping[Op, Tensor]) -> Tensor:
    """Return the slots that an operation would move to that stage."""
    if to is Stage.GERMINATED:
        return on[Op.GERMINATE]
    if to is Stage.FOSSILIZED:
        return on[Op.FOSSILIZE]
    return on[Op.ADVANCE] & among(slots.stage, tuple(stage for stage, after in ADVANCES.items() if after is to))


def _fade(slots: Slots, where: Tensor, chosen: Mapping[str, Tensor]) -> Tensor:
    """Fade seeds out; return the seeds that are pruned at once, because their weight or the time is zero."""
    speed = look_up(SPEED_EPOCHS, chosen["alpha_speed"])
    at_once = where & ((slots.alpha == 0) | (speed == 0))
    fading = where & ~at_once
    slots.head_for(fading, 0.0, speed, chosen["alpha_curve"])
    slots.set(fading, leaving=True)
    return at_once
