"""What the controller sees: a named, versioned row of numbers, most of them between -1 and 1."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from esper_telemetry.lab.morphogenesis.gradient_health import exploding
from esper_telemetry.lab.morphogenesis.lifecycle import FELT, LEARNING, Op, Stage, among
from esper_telemetry.lab.morphogenesis.network import BLUEPRINTS
from esper_telemetry.lab.morphogenesis.slots import Slots

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
    shares = [among(slots.stage, part).float().mean(1) for part in (LEARNING, FELT, (Stage.FOSSILIZED,))]
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
