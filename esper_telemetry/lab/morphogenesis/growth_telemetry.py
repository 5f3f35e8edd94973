"""The event of a step of morphogenesis, its metrics, and the event `growth` of the journal: an entry point of `esper_telemetry.updates`.

The environment emits the event on its own hooks, which its trainer adopts, so `attach` remains one call, and the trainer needs no code for
it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from esper_telemetry.core.containment import Measurement
from esper_telemetry.core.record import Alarm, Level
from esper_telemetry.lab.morphogenesis.kinds import BLUEPRINTS, ROLLBACK_ALARM, ROLLBACK_REASONS, SEVERE, Op, Stage
from esper_telemetry.lab.morphogenesis.metrics.environment_metrics import each_stats, environment_stats, host_stats
from esper_telemetry.lab.morphogenesis.metrics.seeds import gate_stats, seed_stats
from esper_telemetry.updates.extensions import Capture

MAX_ENVIRONMENTS: Final = 64
TREND_EPOCHS, SHORT_TREND_EPOCHS, MAX_LONG_TRENDS = 40, 8, 16
"""Epochs of a trend in the event; the short trend is used for more than `MAX_LONG_TRENDS` environments, and within an update."""
RECENT_OPS: Final = 5
MAX_NAMED_SEEDS: Final = 5
"""Seeds that the evidence of an alarm names."""

STATUSES = ("init", "ok", "stalled", "degraded", "excellent")
STALLED_EPOCHS, DEGRADED_ACCURACY, DEGRADED_EPOCHS, TOP_SHARE, HYSTERESIS_EPOCHS = 10, 0.01, 3, 0.2, 3
"""A status lasts until another one has been due for `HYSTERESIS_EPOCHS`. Stalled: no improvement for more than `STALLED_EPOCHS`. Degraded:
accuracy more than `DEGRADED_ACCURACY` below the value `DEGRADED_EPOCHS` ago. Excellent: a new best among the best fifth of the
environments."""

HOST_COLUMNS: Final = {
    "accuracy": "val_accuracy",
    "loss": "val_loss",
    "best": "best",
    "stale": "stale",
    "growth": "growth",
    "synergy": "synergy",
    "seeds_gain": "seeds_gain",
    "op": "op",
    "host_parameters": "host_parameters",
}
SEED_COLUMNS: Final = (
    *("stage", "age", "life", "alpha", "tempo", "curve", "blueprint", "parameters"),
    *("ratio", "cause", "contribution", "shapley", "progress"),
)
INTEGERS: Final = frozenset(
    {
        *("stale", "op", "stage", "age", "life", "tempo", "curve", "blueprint", "parameters", "cause"),
        *("host_parameters", "epochs", "ops", "op_counts", "fates", "status"),
    }
)


class GrowthHistory(NamedTuple):
    """Course of the environments: in this episode, and counts since the run began or was resumed.

    Attributes:
        epochs: [B], of this episode.
        accuracy, reward: [B, TREND_EPOCHS], of the last epochs of this episode, NaN before its begin.
        paid: [B], sum of the rewards of this episode.
        ops: [B, RECENT_OPS], the last operations.
        op_counts: [B, operations], since the run began.
        fates: [B, blueprints, 3]: seeds germinated, fossilised and pruned since the run began.
        status, due, streak: [B]: indices into `STATUSES` of the status and of the last epoch's suggestion, and how many epochs in a row
            suggested it.
    """

    epochs: Tensor
    accuracy: Tensor
    reward: Tensor
    paid: Tensor
    ops: Tensor
    op_counts: Tensor
    fates: Tensor
    status: Tensor
    due: Tensor
    streak: Tensor

    @classmethod
    def fresh(cls, envs: int, device: torch.device) -> GrowthHistory:
        """Return the history before the first step."""
        trend, none = torch.full((envs, TREND_EPOCHS), torch.nan, device=device), torch.zeros(envs, device=device)
        counts = torch.zeros(envs, len(Op), device=device)
        fates = torch.zeros(envs, len(BLUEPRINTS), 3, device=device)
        ops = torch.full((envs, RECENT_OPS), -1, device=device)
        return cls(none.long(), trend, trend, none, ops, counts, fates, none.long(), none.long(), none.long())

    def next_episode(self, where: Tensor) -> GrowthHistory:
        """Return the history with new episodes in the selected environments [B]; operations and counts continue."""
        fresh = self.fresh(len(self.paid), self.paid.device)
        fresh = fresh._replace(ops=self.ops, op_counts=self.op_counts, fates=self.fates)
        pairs = zip(fresh, self, strict=True)
        return GrowthHistory(*(torch.where(where.view(-1, *[1] * (new.dim() - 1)), new, old) for new, old in pairs))

    def after(self, hosts: Mapping[str, Tensor], seeds: Mapping[str, Tensor], reward: Tensor) -> GrowthHistory:
        """Return the history with another step, with columns as in `telemetry.GrowthStep`."""
        accuracy = torch.cat([self.accuracy[:, 1:], hosts["val_accuracy"].unsqueeze(1)], 1)
        before = accuracy[:, -1 - DEGRADED_EPOCHS]
        top = max(1, int(TOP_SHARE * len(reward)))
        leads = accuracy[:, -1] >= accuracy[:, -1].nan_to_num(-1.0).topk(top).values[-1]
        due = torch.full_like(self.due, STATUSES.index("ok"))
        due[hosts["stale"] > STALLED_EPOCHS] = STATUSES.index("stalled")
        due[accuracy[:, -1] < before - DEGRADED_ACCURACY] = STATUSES.index("degraded")
        due[(hosts["stale"] == 0) & leads] = STATUSES.index("excellent")
        streak = torch.where(due == self.due, self.streak + 1, 1)
        events = torch.stack([seeds[name] for name in ("born", "fossilized", "pruned")], -1).float()
        kinds = F.one_hot(seeds["blueprint"], len(BLUEPRINTS)).float()
        return GrowthHistory(
            epochs=self.epochs + 1,
            accuracy=accuracy,
            reward=torch.cat([self.reward[:, 1:], reward.unsqueeze(1)], 1),
            paid=self.paid + reward,
            ops=torch.cat([self.ops[:, 1:], hosts["op"].unsqueeze(1)], 1),
            op_counts=self.op_counts + F.one_hot(hosts["op"], len(Op)),
            fates=self.fates + kinds.mT @ events,
            status=torch.where(streak >= HYSTERESIS_EPOCHS, due, self.status),
            due=due,
            streak=streak,
        )


def growth_event(steps: GrowthStep, *, is_brief: bool = False) -> dict[str, Any]:
    """Return the data of the event `growth`: the first `MAX_ENVIRONMENTS` environments, see docs/morphogenesis.md.

    Columns are lists with a leading environment axis; None for unknown numbers. There is one copy from a device.

    Args:
        steps: the last step, with the columns [T, ...] of the update, for its worst gradients and its roll-backs.
        is_brief: shorten the trends, which halves the size.
    """
    history, total = steps.history, len(steps.history.paid)
    count = min(MAX_ENVIRONMENTS, total)
    trend = SHORT_TREND_EPOCHS if is_brief or count > MAX_LONG_TRENDS else TREND_EPOCHS
    columns = {f"hosts/{name}": steps.hosts[column][-1] for name, column in HOST_COLUMNS.items()}
    columns |= {f"seeds/{name}": steps.seeds[name][-1] for name in SEED_COLUMNS}
    columns |= {f"seeds/{name}": severity for name, severity in worst_epoch(steps.seeds, history.epochs).items()}
    columns |= {f"rewards/{name}": reward[-1] for name, reward in steps.rewards.items()}
    columns |= {f"rollback/{name}": steps.hosts[name].sum(0) for name in ROLLBACK_REASONS}
    columns |= {"trend/accuracy": history.accuracy[:, -trend:], "trend/reward": history.reward[:, -trend:]}
    columns |= {f"course/{name}": getattr(history, name) for name in ("epochs", "paid", "ops", "op_counts", "fates", "status")}
    parts = [column[:count].double() for column in columns.values()]
    pieces = torch.cat([part.flatten() for part in parts]).cpu().split([part.numel() for part in parts])
    data: dict[str, Any] = {"environments": total, "horizon": steps.horizon, "mode": steps.mode}
    data |= {"statuses": STATUSES, "blueprints": [kind.name for kind in BLUEPRINTS], **steps.labels}
    for name, piece, part in zip(columns, pieces, parts, strict=True):
        family, _, column = name.partition("/")
        digits = 3 if family == "trend" else 4
        values = _rounded(piece.view(part.shape).tolist(), whole=column in INTEGERS, digits=digits)
        data.setdefault(family, {})[column] = values
    data["epoch"] = max(data["course"]["epochs"])
    reasons = data.pop("rollback")
    data["rollbacks"] = [
        ", ".join(name if times == 1 else f"{name} {times:.0f}x" for name, times in zip(reasons, row, strict=True) if times)
        for row in zip(*reasons.values(), strict=True)
    ]
    return data


def worst_epoch(seeds: Mapping[str, Tensor], epochs: Tensor) -> dict[str, Tensor]:
    """Return both severities [B, S] of each slot's seed, or of the last removed seed, in its worst epoch of this update.

    Both come from the same epoch: preferably one in which both are flags, else one in which the gradient explodes.
    """
    steps = len(seeds["life"])
    ago = torch.arange(steps - 1, -1, -1, device=seeds["life"].device).view(-1, 1, 1)
    belongs = (ago < seeds["life"][-1]) | ((seeds["stage"][-1] > Stage.FOSSILIZED) & (ago < epochs.unsqueeze(1)))
    up, down = (torch.where(belongs, seeds[name], torch.nan) for name in ("exploding", "vanishing"))
    explodes, vanishes = up >= SEVERE, down >= SEVERE
    badness = 4.0 * (explodes & vanishes) + 2.0 * explodes + torch.maximum(up, down)
    epoch = badness.nan_to_num(-1.0).argmax(0, keepdim=True)
    return {name: severity.gather(0, epoch).squeeze(0) for name, severity in (("exploding", up), ("vanishing", down))}


def _rounded(value: Any, *, whole: bool, digits: int = 4) -> Any:
    """Return nested lists with this many significant digits, or as integers; None for numbers that are not finite."""
    if isinstance(value, list):
        return [_rounded(item, whole=whole, digits=digits) for item in value]
    if value - value != 0:
        return None
    return int(value) if whole else float(f"{value:.{digits}g}")


def named_seeds(seeds: Mapping[str, Tensor], labels: Mapping[str, Sequence[str]], alarm: str) -> list[dict[str, Any]]:
    """Return the seeds that an alarm of that type is about, worst first: environment, slot, stage, blueprint, gradient and parameters.

    Args:
        seeds: [T, B, S] each, the columns of an update.
        labels: names of stages, causes and parameters.
        alarm: its type.
    """
    column = "vanishing" if alarm in ("seed/vanish", "seed/dormant") else "exploding"
    severity = seeds[column].nan_to_num(-1.0)
    worst = severity.amax(0)
    largest = worst.flatten().topk(min(MAX_NAMED_SEEDS, worst.numel()))
    named = []
    for value, place in zip(largest.values.tolist(), largest.indices.tolist(), strict=True):
        env, slot = divmod(place, worst.shape[1])
        at = (int(severity[:, env, slot].argmax()), env, slot)
        if value < 0:
            continue
        cause = int(seeds["cause"][at])
        tensors = {name: int(seeds[name][at]) for name in ("strongest", "weakest")}
        named.append(
            {
                "environment": env,
                "slot": slot,
                "stage": labels["stage"][int(seeds["stage"][at])],
                "blueprint": BLUEPRINTS[int(seeds["blueprint"][at])].name,
                "cause": labels["cause"][cause] if cause >= 0 else None,
                **{name: labels["parameter"][index] for name, index in tensors.items() if index >= 0},
                **{name: _rounded(float(seeds[name][at]), whole=False) for name in ("norm", "exploding", "vanishing")},
            }
        )
    return named


def named_hosts(hosts: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Return the hosts that were rolled back to older weights, most frequent first: environment, and counts by reason.

    Args:
        hosts: [T, B] each, the columns of an update.
    """
    times = torch.stack([hosts[name].sum(0) for name in ROLLBACK_REASONS], 1)
    order = times.sum(1).argsort(descending=True, stable=True)[:MAX_ENVIRONMENTS].tolist()
    counted = ((env, dict(zip(ROLLBACK_REASONS, times[env].tolist(), strict=True))) for env in order)
    return [{"environment": env, **counts} for env, counts in counted if any(counts.values())]


@dataclass(frozen=True, slots=True)
class GrowthStep:
    """One step of B environments: an epoch of training of every host, with S slots for seeds in each.

    Attributes:
        last: whether the episodes of all environments end with this step.
        horizon: maximum number of steps of an episode.
        hosts: [B] each: `train_loss`, `train_accuracy`, `val_loss`, `val_accuracy`, `best` (accuracy so far), `stale` (epochs since the
            best), `norm` (gradient before clipping), `growth` (ratio of all parameters to the host's), `score` (accuracy minus the price of
            the parameters), `seeds_gain` (accuracy that all seeds add), `synergy` (`seeds_gain` minus the sum of the contributions), `op`
            (an index), `decides` (there was a choice), `host_parameters` (a number), `ended` (the episode), and the watchdog's
            `nonfinite`, `lobotomy` and `divergence`.
        seeds: [B, S] each: `stage` (an index), `age` and `life` (epochs in the stage and of the seed), `alpha`, `tempo` (epochs of
            blending), `curve` and `blueprint` (indices), `parameters` (a number), `progress` (accuracy since the stage began), `born`,
            `pruned`, `fossilized` (bool, in this step). NaN if it was not measured: gradient `norm`, `ratio` (gradient intensity relative
            to the host's), `contribution`, `shapley`, severities `exploding` and `vanishing` (of the parameters with the largest and the
            smallest gradient) and `sustained` (of the whole gradient, exceeded in three epochs in a row). Indices, -1 for a seed that
            does not learn: `cause`, `strongest` and `weakest` (parameters).
        rewards: [B] per component, weighted; their sum is the reward.
        gates: [B] per gate: -1 not asked, 0 refused, 1 passed.
        labels: names of the values of `stage`, `op`, `cause`, `curve` and of indices of parameters (`parameter`).
        mode: mode of the reward.
        history: course of the environments, including this step.
    """

    last: bool
    horizon: int
    hosts: Mapping[str, Tensor]
    seeds: Mapping[str, Tensor]
    rewards: Mapping[str, Tensor]
    gates: Mapping[str, Tensor]
    labels: Mapping[str, tuple[str, ...]]
    mode: str
    history: GrowthHistory


@dataclass(frozen=True, slots=True)
class GrowthUpdate:
    """T steps of the environments; an `updates.extensions.UpdateExtension`.

    Attributes:
        steps: the last step, with the columns of all steps: T is their first dimension.
    """

    event_type: ClassVar[type] = GrowthStep

    steps: GrowthStep

    @classmethod
    def from_events(cls, events: Sequence[GrowthStep]) -> GrowthUpdate:
        """Stack the steps of an update."""

        def stacked(field: str) -> dict[str, Tensor]:
            parts = [getattr(step, field) for step in events]
            return {name: torch.stack([part[name] for part in parts]) for name in parts[0]}

        last = events[-1]
        hosts, seeds, rewards, gates = map(stacked, ("hosts", "seeds", "rewards", "gates"))
        return cls(replace(last, hosts=hosts, seeds=seeds, rewards=rewards, gates=gates))

    @property
    def on_device(self) -> bool:
        """True if the hosts are not trained on the CPU."""
        return not self.steps.hosts["score"].is_cpu

    def measure(self, _: Mapping[str, Any], level: Level) -> Iterator[Measurement]:
        """Yield the measurements of hosts, seeds and rewards; at DEBUG also of single environments and slots."""
        hosts, seeds, rewards, labels = self.steps.hosts, self.steps.seeds, self.steps.rewards, self.steps.labels
        yield partial(host_stats, hosts)
        yield partial(seed_stats, seeds, labels, horizon=self.steps.horizon)
        yield partial(gate_stats, self.steps.gates)
        yield partial(environment_stats, hosts, rewards, seeds["stage"], ops=labels["op"])
        if level >= Level.DEBUG:
            yield partial(each_stats, hosts, seeds, rewards)

    def evidence(self, _: Mapping[str, Any]) -> Iterator[Capture]:
        """Yield nothing: every update has the event `growth`."""
        yield from ()

    def events(self, _: Mapping[str, Any]) -> Iterator[Capture]:
        """Yield the event `growth`: the environments and their seeds after the last step."""
        yield Capture("growth", growth_event(self.steps))

    def progress(self, _: Mapping[str, Any]) -> Iterator[Capture]:
        """Yield the event `growth` in its brief form."""
        yield Capture("growth", growth_event(self.steps, is_brief=True))

    def alarm_evidence(self, alarm: Alarm) -> dict[str, Any]:
        """Return the seeds that an alarm is about, by environment and slot, or the hosts that a roll-back alarm is about."""
        if alarm.type == ROLLBACK_ALARM:
            return {"hosts": named_hosts(self.steps.hosts)}
        if not alarm.type.startswith("seed/"):
            return {}
        return {"seeds": named_seeds(self.steps.seeds, self.steps.labels, alarm.type)}
