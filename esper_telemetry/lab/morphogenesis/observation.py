"""What the controller sees: a named, versioned row of numbers, most of them between -1 and 1.

What a step tells whoever listens: plain tensors by name, nothing measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from esper_telemetry.lab.morphogenesis.actions import ActionOutcome
from esper_telemetry.lab.morphogenesis.colony import Colony, ColonyResult
from esper_telemetry.lab.morphogenesis.gradient_health import CAUSES, exploding
from esper_telemetry.lab.morphogenesis.network import BLUEPRINTS
from esper_telemetry.lab.morphogenesis.rewards import REWARDS, shapley_values
from esper_telemetry.lab.morphogenesis.slots import EFFECTIVE, GATES, LEARNING, Op, Slots, Stage, among
from esper_telemetry.lab.morphogenesis.telemetry import GrowthStep

VERSION = 1

HOST = (
    "epoch_frac",
    "train_loss",
    "train_accuracy",
    "val_loss",
    "val_accuracy",
    "val_accuracy_best",
    "val_accuracy_delta",
    "epochs_since_best",
    "host_gradient",
    "host_exploding",
    "seed_parameters",
    "learning_frac",
    "felt_frac",
    "fossilized_frac",
    *(f"last_op_{op.name.lower()}" for op in Op),
)

SEED = (
    *(f"stage_{stage.name.lower()}" for stage in Stage),
    "gradient_norm",
    "health",
    "vanishing",
    "exploding",
    "epochs_in_stage",
    "val_accuracy",
    "val_accuracy_delta",
    "alpha",
    "epoch_frac",
    "alpha_target",
    "alpha_moving",
    "alpha_epochs_total",
    "alpha_epochs_done",
    "alpha_epochs_left",
    "alpha_velocity",
    "alpha_curve",
)
"""The 26 features of a seed's telemetry; severities, not flags."""

SLOT = (*SEED, "contribution", *(f"blueprint_{kind.name}" for kind in BLUEPRINTS))


class HostState(NamedTuple):
    """How the hosts do, [N] each but `epoch`, the share of the episode that is over, and `op`, an index."""

    epoch: float
    train_loss: Tensor
    train_accuracy: Tensor
    val_loss: Tensor
    val_accuracy: Tensor
    best: Tensor
    delta: Tensor
    stale: Tensor
    norm: Tensor
    parameters: Tensor
    op: Tensor


def feature_names(slots: int) -> tuple[str, ...]:
    """Names of the entries of an observation, in order."""
    return (*HOST, *(f"slot_{slot}_{name}" for slot in range(slots) for name in SLOT))


def observe(host: HostState, slots: Slots, velocity: Tensor, horizon: int) -> Tensor:
    """[N, features]; what is not finite is shown as its limit.

    Args:
        host: how the hosts do.
        slots: the seeds.
        velocity: [N, S], what the last epoch added to the weights.
        horizon: epochs of an episode.
    """
    rows = torch.cat([_host(host, slots, horizon), _seeds(host, slots, velocity, horizon).flatten(1)], 1)
    return rows.nan_to_num(nan=1.0, posinf=1.0, neginf=-1.0).clamp(-1, 1)


def _host(host: HostState, slots: Slots, horizon: int) -> Tensor:
    shares = [among(slots.stage, part).float().mean(1) for part in (LEARNING, EFFECTIVE, (Stage.FOSSILIZED,))]
    columns = [
        torch.full_like(host.val_loss, host.epoch),
        _squeezed(host.train_loss) / 4,
        host.train_accuracy,
        _squeezed(host.val_loss) / 4,
        host.val_accuracy,
        host.best,
        host.delta * 10,
        host.stale / horizon,
        _squeezed(host.norm) / 7,
        exploding(host.norm),
        _squeezed(host.parameters) / 3,
        *shares,
    ]
    return torch.cat([torch.stack(columns, 1), F.one_hot(host.op, len(Op))], 1)


def _seeds(host: HostState, slots: Slots, velocity: Tensor, horizon: int) -> Tensor:
    """[N, S, features of a slot]."""
    wide = torch.ones_like(slots.alpha)
    accuracy = host.val_accuracy.unsqueeze(1)
    alive = slots.life > 0
    columns = [
        slots.norm.clamp(0, 10) / 10,
        slots.health,
        slots.vanishing,
        slots.exploding,
        slots.age / horizon,
        accuracy * wide,
        torch.where(alive, (accuracy - slots.anchor) * 10, 0.0),
        slots.alpha,
        wide * host.epoch,
        slots.target,
        slots.moving.float(),
        slots.total / horizon,
        slots.done / horizon,
        (slots.total - slots.done) / horizon,
        velocity,
        slots.curve / 4,
        torch.where(slots.contribution > -1, slots.contribution, 0.0),
    ]
    kind = F.one_hot(slots.blueprint, len(BLUEPRINTS)) * alive.unsqueeze(-1)
    return torch.cat([F.one_hot(slots.stage, len(Stage)), torch.stack(columns, -1), kind], -1)


def _squeezed(x: Tensor) -> Tensor:
    return x.sign() * x.abs().log1p()


LABELS = {
    "stage": tuple(stage.name.lower() for stage in Stage),
    "op": tuple(op.name.lower() for op in Op),
    "cause": CAUSES,
}


class StepReport(NamedTuple):
    """A step as it went; `gone` [N, S]: seeds that were pruned; `cause` [N, S], see `causes`."""

    slots: Slots
    host: HostState
    result: ColonyResult
    outcome: ActionOutcome
    gone: Tensor
    cause: Tensor
    colony: Colony
    horizon: int


def step_event(
    found: StepReport, paid: Mapping[str, Tensor], masks: Mapping[str, Tensor], *, mode: str, last: bool
) -> GrowthStep:
    """The event of a step, after it; `paid` are the components of the reward, `masks` what could be chosen."""
    weights = REWARDS[mode]
    return GrowthStep(
        last=last,
        horizon=found.horizon,
        hosts=_hosts(found, masks),
        seeds=_step_report_seeds(found),
        rewards={name: weight * paid[name] for name, weight in weights.items()},
        gates={gate.name: found.outcome.gates[:, place] for place, gate in enumerate(GATES)},
        labels=LABELS,
    )


def _hosts(found: StepReport, masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    host, accuracy, verdict = found.host, found.result.accuracy, found.result.verdict
    alone = torch.where(among(found.slots.stage, EFFECTIVE), found.slots.contribution.clamp(min=-1), 0.0).sum(1)
    unseeded = accuracy[:, -1]
    return {
        "train_loss": host.train_loss,
        "train_accuracy": host.train_accuracy,
        "val_loss": host.val_loss,
        "val_accuracy": host.val_accuracy,
        "best": host.best,
        "stale": host.stale,
        "norm": host.norm,
        "growth": 1 + host.parameters,
        "score": host.val_accuracy - found.colony.task.price * host.parameters,
        "seeds_gain": accuracy[:, 0] - unseeded,
        "synergy": accuracy[:, 0] - unseeded - alone,
        "op": host.op,
        "decides": masks["op"].sum(1) > 1,
        "nonfinite": verdict.nonfinite,
        "lobotomy": verdict.lobotomy,
        "divergence": verdict.divergence,
    }


def _step_report_seeds(found: StepReport) -> dict[str, Tensor]:
    slots, outcome, accuracy = found.slots, found.outcome, found.result.accuracy
    measured = slots.norm != -1
    felt = slots.contribution > -1
    return {
        "stage": slots.stage,
        "life": slots.life,
        "alpha": slots.alpha,
        "blueprint": slots.blueprint,
        "born": outcome.born,
        "pruned": found.gone,
        "fossilized": outcome.fossilized,
        "norm": torch.where(measured, slots.norm, torch.nan),
        "exploding": torch.where(measured, slots.exploding, torch.nan),
        "vanishing": torch.where(measured, slots.vanishing, torch.nan),
        "ratio": torch.where(slots.ratio >= 0, slots.ratio, torch.nan),
        "contribution": torch.where(felt, slots.contribution, torch.nan),
        "shapley": torch.where(felt, shapley_values(accuracy), torch.nan),
        "cause": found.cause,
    }
