"""The state of the hosts after an epoch: as the controller's observation, a named and versioned row, and as the event of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from esper_telemetry.lab.morphogenesis.actions import ActionOutcome
from esper_telemetry.lab.morphogenesis.colony import Colony, ColonyResult
from esper_telemetry.lab.morphogenesis.gradient_health import CAUSES, exploding
from esper_telemetry.lab.morphogenesis.kinds import BLUEPRINTS, Op, Stage
from esper_telemetry.lab.morphogenesis.rewards import REWARDS, shapley_values
from esper_telemetry.lab.morphogenesis.slots import CURVES, EFFECTIVE, GATES, LEARNING, Slots, among
from esper_telemetry.lab.morphogenesis.snapshot import GrowthHistory
from esper_telemetry.lab.morphogenesis.telemetry import GrowthStep

VERSION = 1

HOST_FEATURES = (
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

SEED_FEATURES = (
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
"""The 26 features of a seed; gradient health as severities, not flags."""

SLOT_FEATURES = (*SEED_FEATURES, "contribution", *(f"blueprint_{kind.name}" for kind in BLUEPRINTS))


class HostState(NamedTuple):
    """State of the hosts, [N] each except `epoch`, the elapsed fraction of the episode; `op` is an index."""

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
    """Return the names of the entries of an observation, in order."""
    return (*HOST_FEATURES, *(f"slot_{slot}_{name}" for slot in range(slots) for name in SLOT_FEATURES))


def observe(host: HostState, slots: Slots, velocity: Tensor, horizon: int) -> Tensor:
    """Return the observations [N, features], most of them between -1 and 1; non-finite values become their limits.

    Args:
        host: state of the hosts.
        slots: state of the seeds.
        velocity: [N, S], change of the weights in the last epoch.
        horizon: epochs of an episode.
    """
    rows = torch.cat([_host(host, slots, horizon), _seeds(host, slots, velocity, horizon).flatten(1)], 1)
    return rows.nan_to_num(nan=1.0, posinf=1.0, neginf=-1.0).clamp(-1, 1)


def _host(host: HostState, slots: Slots, horizon: int) -> Tensor:
    shares = [among(slots.stage, part).float().mean(1) for part in (LEARNING, EFFECTIVE, (Stage.FOSSILIZED,))]
    columns = [
        torch.full_like(host.val_loss, host.epoch),
        _signed_log1p(host.train_loss) / 4,
        host.train_accuracy,
        _signed_log1p(host.val_loss) / 4,
        host.val_accuracy,
        host.best,
        host.delta * 10,
        host.stale / horizon,
        _signed_log1p(host.norm) / 7,
        exploding(host.norm),
        _signed_log1p(host.parameters) / 3,
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


def _signed_log1p(x: Tensor) -> Tensor:
    return x.sign() * x.abs().log1p()


LABELS = {
    "stage": tuple(stage.name.lower() for stage in Stage),
    "op": tuple(op.name.lower() for op in Op),
    "cause": CAUSES,
    "curve": CURVES,
}


class StepReport(NamedTuple):
    """A step and its results, from which its event is made.

    Attributes:
        slots, host: states after the step.
        result, outcome: results of the epoch and of the action.
        pruned: [N, S], bool: seeds that were pruned.
        cause: [N, S], see `gradient_health.diagnose`.
        colony: the networks.
        horizon: epochs of an episode.
        history: course of the environments before the step.
    """

    slots: Slots
    host: HostState
    result: ColonyResult
    outcome: ActionOutcome
    pruned: Tensor
    cause: Tensor
    colony: Colony
    horizon: int
    history: GrowthHistory

    def event(
        self, components: Mapping[str, Tensor], masks: Mapping[str, Tensor], *, mode: str, last: bool
    ) -> GrowthStep:
        """Return the event of the step; `components` are those of the reward, `masks` the action masks before it."""
        hosts, seeds = _host_columns(self, masks), _seed_columns(self)
        rewards = {name: weight * components[name] for name, weight in REWARDS[mode].items()}
        return GrowthStep(
            last=last,
            horizon=self.horizon,
            hosts=hosts,
            seeds=seeds,
            rewards=rewards,
            gates={gate.name: self.outcome.gates[:, place] for place, gate in enumerate(GATES)},
            labels=LABELS,
            mode=mode,
            history=self.history.after(hosts, seeds, torch.stack([*rewards.values()]).sum(0)),
        )


def _host_columns(report: StepReport, masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    host, accuracy, verdict = report.host, report.result.accuracy, report.result.verdict
    alone = torch.where(among(report.slots.stage, EFFECTIVE), report.slots.contribution.clamp(min=-1), 0.0).sum(1)
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
        "score": host.val_accuracy - report.colony.task.price * host.parameters,
        "seeds_gain": accuracy[:, 0] - unseeded,
        "synergy": accuracy[:, 0] - unseeded - alone,
        "op": host.op,
        "decides": masks["op"].sum(1) > 1,
        "host_parameters": torch.full_like(host.val_loss, report.colony.network.host.size),
        "nonfinite": verdict.nonfinite,
        "lobotomy": verdict.lobotomy,
        "divergence": verdict.divergence,
    }


def _seed_columns(report: StepReport) -> dict[str, Tensor]:
    slots, outcome, accuracy = report.slots, report.outcome, report.result.accuracy
    measured = slots.norm != -1
    effective = slots.contribution > -1
    return {
        "stage": slots.stage,
        "age": slots.age,
        "life": slots.life,
        "alpha": slots.alpha,
        "tempo": slots.tempo,
        "curve": slots.curve,
        "parameters": report.colony.parameters(slots),
        "progress": torch.where(slots.life > 0, report.host.val_accuracy.unsqueeze(1) - slots.anchor, torch.nan),
        "blueprint": slots.blueprint,
        "born": outcome.born,
        "pruned": report.pruned,
        "fossilized": outcome.fossilized,
        "norm": torch.where(measured, slots.norm, torch.nan),
        "exploding": torch.where(measured, slots.exploding, torch.nan),
        "vanishing": torch.where(measured, slots.vanishing, torch.nan),
        "ratio": torch.where(slots.ratio >= 0, slots.ratio, torch.nan),
        "contribution": torch.where(effective, slots.contribution, torch.nan),
        "shapley": torch.where(effective, shapley_values(accuracy), torch.nan),
        "cause": report.cause,
    }
