"""What a step tells whoever listens: plain tensors by name, nothing measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from esper_telemetry.lab.morphogenesis.actions import ActionOutcome
from esper_telemetry.lab.morphogenesis.causes import CAUSES
from esper_telemetry.lab.morphogenesis.colony import Colony, ColonyResult
from esper_telemetry.lab.morphogenesis.contributions import shapley_values
from esper_telemetry.lab.morphogenesis.gates import GATES
from esper_telemetry.lab.morphogenesis.lifecycle import FELT, Op, Stage, among
from esper_telemetry.lab.morphogenesis.observation import HostState
from esper_telemetry.lab.morphogenesis.rewards import REWARDS
from esper_telemetry.lab.morphogenesis.slots import Slots
from esper_telemetry.lab.morphogenesis.telemetry import GrowthStep

LABELS = {
    "stage": tuple(stage.name.lower() for stage in Stage),
    "op": tuple(op.name.lower() for op in Op),
    "cause": CAUSES,
}


class Report(NamedTuple):
    """A step as it went; `gone` [N, S]: seeds that were pruned; `cause` [N, S], see `causes`."""

    slots: Slots
    host: HostState
    result: ColonyResult
    outcome: ActionOutcome
    gone: Tensor
    cause: Tensor
    colony: Colony
    horizon: int


def report(
    found: Report, paid: Mapping[str, Tensor], masks: Mapping[str, Tensor], *, mode: str, last: bool
) -> GrowthStep:
    """The event of a step, after it; `paid` are the components of the reward, `masks` what could be chosen."""
    weights = REWARDS[mode]
    return GrowthStep(
        last=last,
        horizon=found.horizon,
        hosts=_hosts(found, masks),
        seeds=_seeds(found),
        rewards={name: weight * paid[name] for name, weight in weights.items()},
        gates={gate.name: found.outcome.gates[:, place] for place, gate in enumerate(GATES)},
        labels=LABELS,
    )


def _hosts(found: Report, masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    host, accuracy, verdict = found.host, found.result.accuracy, found.result.verdict
    alone = torch.where(among(found.slots.stage, FELT), found.slots.contribution.clamp(min=-1), 0.0).sum(1)
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


def _seeds(found: Report) -> dict[str, Tensor]:
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
