"""The lifecycle of seeds: stages, transitions and operations as data, the state of all slots, and the gates between stages.

The state is one tensor [N, S] per fact, for N environments with S slots. A seed's weight moves along a curve over a number of epochs. Gates
are named conditions on tensors; strict gates require more than permissive ones.

The controller acts through eight heads with masks, and its actions change the slots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from math import exp
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from esper_telemetry.lab.morphogenesis.kinds import BLUEPRINTS, STYLES, Op, Stage
from esper_telemetry.ppo.environments.environment_protocol import ActionSpec

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
"""The stages that may follow each; a new episode begins with new slots."""

ADVANCES: Mapping[Stage, Stage] = {Stage.GERMINATED: Stage.TRAINING, Stage.TRAINING: Stage.BLENDING, Stage.BLENDING: Stage.HOLDING}
"""Target of ADVANCE, if its gate opens."""

TICKS: Mapping[Stage, tuple[Stage, int]] = {
    Stage.PRUNED: (Stage.EMBARGOED, 1),
    Stage.EMBARGOED: (Stage.RESETTING, 2),
    Stage.RESETTING: (Stage.DORMANT, 1),
}
"""Automatic transitions, and the epochs after which they happen."""

OP_STAGES: Mapping[Op, tuple[Stage, ...]] = {
    Op.GERMINATE: (Stage.DORMANT,),
    Op.SET_ALPHA: (Stage.BLENDING, Stage.HOLDING),
    Op.PRUNE: (Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING),
    Op.FOSSILIZE: (Stage.HOLDING,),
    Op.ADVANCE: tuple(ADVANCES),
}
"""Stages in which an operation on a slot is possible."""

BLOCKING = (Stage.GERMINATED, Stage.TRAINING, Stage.PRUNED, Stage.EMBARGOED, Stage.RESETTING)
"""No seed is germinated while any slot is in one of these stages."""

ALIVE = (Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED)
LEARNING = (Stage.TRAINING, Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED)
EFFECTIVE = (Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED)
"""Stages in which a seed has parameters (`ALIVE`), trains them (`LEARNING`), and has an effect on the host (`EFFECTIVE`)."""

MIN_PRUNE_AGE = 2
"""Epochs in its stage before a seed may be pruned."""

POTENTIALS: Mapping[Stage, float] = {
    Stage.GERMINATED: 1.0,
    Stage.TRAINING: 2.0,
    Stage.BLENDING: 3.5,
    Stage.HOLDING: 5.5,
    Stage.FOSSILIZED: 6.0,
}
"""Potential of a seed for the shaping of rewards; 0 elsewhere."""


def among(stage: Tensor, stages: tuple[Stage, ...]) -> Tensor:
    """Return a mask of the stages that are one of these."""
    return look_up(tuple(one in stages for one in Stage), stage)


def look_up(values: tuple[float, ...], index: Tensor) -> Tensor:
    """Return the value at each index."""
    return _table(values, type(values[0]).__name__, index.device)[index]


@cache
def _table(values: tuple[float, ...], _: str, device: torch.device) -> Tensor:
    """Return the values as a tensor; the name of their type distinguishes 1 from True in the cache."""
    return torch.tensor(values, device=device)


CURVES = ("linear", "cosine", "sigmoid_soft", "sigmoid", "sigmoid_steep")
STEEPNESS = (6.0, 12.0, 24.0)
"""Steepness of the three sigmoid curves."""

ALPHA_TARGETS = (0.5, 0.7, 1.0)
TEMPO_EPOCHS = (2, 3, 5)
SPEED_EPOCHS = (0, 2, 3, 5)
"""Epochs of blending, and of a change of the weight; 0 is immediate."""


def progress(done: Tensor, total: Tensor, curve: Tensor) -> Tensor:
    """Progress, 0 to 1, after `done` of `total` epochs along a curve (an index into `CURVES`).

    Every curve is monotonic from 0 to 1; sigmoids are stretched to reach both ends.
    """
    t = torch.where(total > 0, (done / total.clamp(min=1)).clamp(0, 1), 1.0)
    shapes = [t, (1 - torch.cos(torch.pi * t)) / 2]
    for steepness in STEEPNESS:
        low, high = (1 / (1 + exp(-end * steepness / 2)) for end in (-1.0, 1.0))
        shapes.append((torch.sigmoid(steepness * (t - 0.5)) - low) / (high - low))
    return torch.stack(shapes, -1).gather(-1, curve.unsqueeze(-1)).squeeze(-1)


@dataclass(slots=True)
class Slots:
    """State of all slots, one tensor [N, S] per fact; tensors are replaced, never written to.

    Attributes:
        stage, age: the `Stage`, and epochs in it.
        life: epochs since germination.
        blueprint, style, tempo, goal: chosen at germination: two indices, epochs of blending, and the final weight.
        alpha, start, target: weight of the seed, and the ends of its current change.
        done, total, curve: finished and total epochs of that change, and its curve.
        leaving: the seed is being faded out to be pruned; its parameters are not trained.
        anchor: validation accuracy when the stage began.
        norm: mean norm of the last epoch's gradients; -1 if not measured.
        exploding, vanishing: severities of these gradients, see `gradient_health`.
        ratio: running mean of the intensity ratio to the host; -1 if not measured.
        contribution: accuracy lost when only this seed is switched off; -1 without an effect.
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
        """Return dormant slots."""
        types = dict.fromkeys(("stage", "age", "life", "blueprint", "style", "tempo"), torch.int64)
        types |= dict.fromkeys(("done", "total", "curve"), torch.int64) | {"leaving": torch.bool}
        names = [item.name for item in fields(cls)]
        tensors = {name: torch.zeros(envs, slots, dtype=types.get(name, torch.float32), device=device) for name in names}
        unmeasured = {name: tensors[name] - 1 for name in ("norm", "ratio", "contribution")}
        return cls(**{**tensors, **unmeasured, "stage": tensors["stage"] + Stage.DORMANT})

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    def set(self, where: Tensor, **values: Tensor | float) -> None:
        """Set facts of the selected slots [N, S]."""
        if not where.any():
            return
        for name, value in values.items():
            old = getattr(self, name)
            new = torch.where(where, value.to(old.dtype), old) if isinstance(value, Tensor) else old.masked_fill(where, value)
            setattr(self, name, new)

    def enter(self, where: Tensor, stage: Stage | Tensor, accuracy: Tensor) -> None:
        """Move slots to a stage; their progress is measured from the accuracy [N]."""
        self.set(where, stage=stage, age=0, anchor=accuracy.unsqueeze(1))

    def restart(self, where: Tensor) -> None:
        """Make the slots of the selected environments [N] dormant."""
        envs, slots = self.stage.shape
        for name, value in Slots.empty(envs, slots, self.stage.device).tensors().items():
            setattr(self, name, torch.where(where.unsqueeze(1), value, getattr(self, name)))

    def head_for(self, where: Tensor, target: Tensor | float, epochs: Tensor, curve: Tensor) -> None:
        """Move the weight to a target over that many epochs; over 0, at once."""
        at_once = where & (epochs == 0)
        self.set(where, start=self.alpha, target=target, done=0, total=epochs, curve=curve)
        self.set(at_once, alpha=self.target)

    @property
    def health(self) -> Tensor:
        """1 minus the larger of the two severities, [N, S]."""
        return 1 - torch.maximum(self.exploding, self.vanishing)

    @property
    def moving(self) -> Tensor:
        """True while the weight is changing, [N, S]."""
        return self.done < self.total

    def empty_out(self, where: Tensor) -> None:
        """Clear the facts of a removed seed."""
        self.set(where, alpha=0, start=0, target=0, done=0, total=0, leaving=False, life=0)
        self.set(where, norm=-1, exploding=0, vanishing=0, ratio=-1, contribution=-1)

    def move_weights(self) -> None:
        """Advance every change of a weight by one epoch."""
        running = self.moving
        self.done = self.done + running
        way = progress(self.done, self.total, self.curve)
        self.set(running, alpha=self.start + (self.target - self.start) * way)

    def tick(self, accuracy: Tensor) -> Tensor:
        """Make the automatic transitions at the end of an epoch; return a mask [N, S] of seeds that have faded out and are pruned."""
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
"""Epochs, accuracy, intensity ratio (0.01 is the low bound of `grad/pair`), health and accuracy that the checks require."""

Test = Callable[[Slots, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition, from the slots and the validation accuracy [N, 1] to a mask [N, S].

    Attributes:
        strict: required by strict gates only.
        permissive: required by permissive gates only.
    """

    name: str
    test: Test
    strict: bool = False
    permissive: bool = False


@dataclass(frozen=True, slots=True)
class Gate:
    """The conditions for entering a stage."""

    name: str
    to: Stage
    checks: tuple[Condition, ...]

    def passed(self, slots: Slots, accuracy: Tensor, *, strict: bool) -> Tensor:
        """Return where [N, S] every check of the strict or the permissive gate holds, for an accuracy [N]."""
        checks = [check for check in self.checks if not (check.permissive if strict else check.strict)]
        return torch.stack([check.test(slots, accuracy.unsqueeze(1)) for check in checks]).all(0)


GATES = (
    Gate("g0", Stage.GERMINATED, (Condition("slot_empty", lambda s, _: s.stage == Stage.DORMANT),)),
    Gate("g1", Stage.TRAINING, (Condition("germinated", lambda s, _: s.stage == Stage.GERMINATED),)),
    Gate(
        "g2",
        Stage.BLENDING,
        (
            Condition("trained_long_enough", lambda s, _: s.age >= MIN_TRAINING),
            Condition("gradient_measured", lambda s, _: s.norm >= 0),
            Condition("improved", lambda s, accuracy: accuracy - s.anchor >= MIN_IMPROVEMENT, strict=True),
            Condition("gradient_strong_enough", lambda s, _: s.ratio >= MIN_RATIO, strict=True),
            Condition("not_exploding", lambda s, _: s.exploding < 0.5, permissive=True),
            Condition("healthy", lambda s, _: s.health >= MIN_HEALTH, permissive=True),
        ),
    ),
    Gate(
        "g3",
        Stage.HOLDING,
        (
            Condition("full_weight", lambda s, _: (s.target == 1) & ~s.leaving),
            Condition("weight_settled", lambda s, _: ~s.moving),
            Condition("blended_long_enough", lambda s, _: s.age >= MIN_HOLDING_BLEND, strict=True),
        ),
    ),
    Gate(
        "g5",
        Stage.FOSSILIZED,
        (
            Condition("contribution_known", lambda s, _: s.contribution > -1),
            Condition("healthy", lambda s, _: s.health >= MIN_HEALTH),
            Condition("contributes", lambda s, _: s.contribution >= MIN_CONTRIBUTION, strict=True),
        ),
    ),
)


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
    parts = {name: ActionSpec("categorical", size, given="op", relevant_for=tuple(map(int, ops))) for name, (size, ops) in sized.items()}
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


def act(slots: Slots, actions: Mapping[str, Tensor], accuracy: Tensor, *, strict: bool) -> ActionOutcome:
    """Apply the choices, [N] per head, in environments in which they are possible; `accuracy` [N] is the previous epoch's."""
    rows = torch.arange(len(accuracy), device=accuracy.device)
    possible = slot_masks(slots)[rows, actions["op"], actions["slot"]]
    op = torch.where(possible, actions["op"], int(Op.WAIT))
    hit = F.one_hot(actions["slot"], slots.stage.shape[1]).bool()
    on = {wanted: (op == wanted).unsqueeze(1) & hit for wanted in Op}
    answers, moved = _pass_gates(slots, accuracy, on, strict=strict)
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


def _pass_gates(slots: Slots, accuracy: Tensor, on: Mapping[Op, Tensor], *, strict: bool) -> tuple[Tensor, dict[Stage, Tensor]]:
    """Return the result of every gate, and the slots that pass, by stage."""
    answers, moved = [], {}
    for gate in GATES:
        candidates = _candidates(gate.to, slots, on)
        moved[gate.to] = passing = candidates & gate.passed(slots, accuracy, strict=strict) if candidates.any() else candidates
        answer = torch.where(passing.any(1), PASSED, REFUSED)
        answers.append(torch.where(candidates.any(1), answer, NOT_ASKED))
    return torch.stack(answers, 1), moved


def advanceable(slots: Slots, accuracy: Tensor, *, strict: bool) -> Tensor:
    """Return the slots [N, S] in which ADVANCE would pass the gate."""
    everywhere = dict.fromkeys(Op, torch.ones_like(slots.leaving))
    forward = [gate for gate in GATES if gate.to in ADVANCES.values()]
    candidates = [(gate, _candidates(gate.to, slots, everywhere)) for gate in forward]
    passing = [mask & gate.passed(slots, accuracy, strict=strict) for gate, mask in candidates if mask.any()]
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
