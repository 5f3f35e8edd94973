"""State of the environments and seeds after an update: the journal's event `growth`, and the seeds that alarms name.

Trends, counts and the status of an environment need more than one update. `GrowthHistory` follows them where the environment steps, so a
reader of the last event has everything, whenever it begins to read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from esper_telemetry.lab.morphogenesis.kinds import BLUEPRINTS, Op

if TYPE_CHECKING:
    from esper_telemetry.lab.morphogenesis.telemetry import GrowthStep

MAX_ENVIRONMENTS: Final = 64
TREND_EPOCHS, SHORT_TREND_EPOCHS, MAX_LONG_TRENDS = 40, 8, 16
"""Epochs of a trend in the event, and in that of more than `MAX_LONG_TRENDS` environments."""
RECENT_OPS: Final = 5
MAX_NAMED_SEEDS: Final = 5
"""Seeds that the evidence of an alarm names."""

STATUSES = ("init", "ok", "stalled", "degraded", "excellent")
STALLED_EPOCHS, DEGRADED_ACCURACY, DEGRADED_EPOCHS, TOP_SHARE, HYSTERESIS_EPOCHS = 10, 0.01, 3, 0.2, 3
"""A status lasts until another one has been due for `HYSTERESIS_EPOCHS`: no improvement for more than `STALLED_EPOCHS`; accuracy more than
`DEGRADED_ACCURACY` below that of `DEGRADED_EPOCHS` ago; better than ever and among the best fifth of the environments."""

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
    *("exploding", "vanishing", "ratio", "cause", "contribution", "shapley", "progress"),
)
ROLLBACKS: Final = ("nonfinite", "lobotomy", "divergence")
INTEGERS: Final = frozenset(
    {
        *("stale", "op", "stage", "age", "life", "tempo", "curve", "blueprint", "parameters", "cause"),
        *("host_parameters", "ops", "op_counts", "fates", "status"),
    }
)


class GrowthHistory(NamedTuple):
    """Course of the environments: in this episode, and counts since the run began or was resumed.

    Attributes:
        epochs: of this episode.
        accuracy, reward: [B, TREND_EPOCHS], of the last epochs of this episode, NaN before its begin.
        paid: [B], sum of the rewards of this episode.
        ops: [B, RECENT_OPS], the last operations.
        op_counts: [B, operations], since the run began.
        fates: [B, blueprints, 3]: seeds germinated, fossilised and pruned since the run began.
        status, due, streak: [B], indices into `STATUSES`: as it is, as the last epoch suggests, and epochs in a row that did.
    """

    epochs: int
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
        return cls(0, trend, trend, none, ops, counts, fates, none.long(), none.long(), none.long())

    def next_episode(self) -> GrowthHistory:
        """Return the history at the begin of new episodes: operations and counts go on."""
        fresh = self.fresh(len(self.paid), self.paid.device)
        return fresh._replace(ops=self.ops, op_counts=self.op_counts, fates=self.fates)

    def after(self, hosts: Mapping[str, Tensor], seeds: Mapping[str, Tensor], reward: Tensor) -> GrowthHistory:
        """Return the history with one step, whose columns are those of `telemetry.GrowthStep`."""
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


def growth_event(step: GrowthStep, history: GrowthHistory) -> dict[str, Any]:
    """Return the data of the event `growth`: the first `MAX_ENVIRONMENTS` environments after a step, see docs/morphogenesis.md.

    Columns are lists with a leading environment axis; None where a number is not known. There is one copy from a device.
    """
    total = len(history.paid)
    count = min(MAX_ENVIRONMENTS, total)
    trend = TREND_EPOCHS if count <= MAX_LONG_TRENDS else SHORT_TREND_EPOCHS
    columns = {f"hosts/{name}": step.hosts[column] for name, column in HOST_COLUMNS.items()}
    columns |= {f"seeds/{name}": step.seeds[name] for name in SEED_COLUMNS}
    columns |= {f"rewards/{name}": reward for name, reward in step.rewards.items()}
    columns |= {f"rollback/{name}": step.hosts[name] for name in ROLLBACKS}
    columns |= {"trend/accuracy": history.accuracy[:, -trend:], "trend/reward": history.reward[:, -trend:]}
    columns |= {f"course/{name}": getattr(history, name) for name in ("paid", "ops", "op_counts", "fates", "status")}
    parts = [column[:count].double() for column in columns.values()]
    pieces = torch.cat([part.flatten() for part in parts]).cpu().split([part.numel() for part in parts])
    data: dict[str, Any] = {"environments": total, "epoch": history.epochs, "horizon": step.horizon, "mode": step.mode}
    data |= {"statuses": STATUSES, "blueprints": [kind.name for kind in BLUEPRINTS], **step.labels}
    for name, piece, part in zip(columns, pieces, parts, strict=True):
        family, _, column = name.partition("/")
        data.setdefault(family, {})[column] = _rounded(piece.view(part.shape).tolist(), whole=column in INTEGERS)
    reasons = data.pop("rollback")
    rows = zip(*reasons.values(), strict=True)
    data["rollbacks"] = [next((name for name, hit in zip(reasons, row, strict=True) if hit), "") for row in rows]
    return data


def _rounded(value: Any, *, whole: bool) -> Any:
    """Return nested lists with four significant digits, or as integers; None where a number is not finite."""
    if isinstance(value, list):
        return [_rounded(item, whole=whole) for item in value]
    if value - value != 0:
        return None
    return int(value) if whole else float(f"{value:.4g}")


def named_seeds(seeds: Mapping[str, Tensor], labels: Mapping[str, Sequence[str]], alarm: str) -> list[dict[str, Any]]:
    """Return the seeds that an alarm of that type is about, the worst first: environment, slot, stage, blueprint and gradient.

    Args:
        seeds: [T, B, S] each, the columns of an update.
        labels: names of stages and causes.
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
        named.append(
            {
                "environment": env,
                "slot": slot,
                "stage": labels["stage"][int(seeds["stage"][at])],
                "blueprint": BLUEPRINTS[int(seeds["blueprint"][at])].name,
                "cause": labels["cause"][cause] if cause >= 0 else None,
                **{name: _rounded(float(seeds[name][at]), whole=False) for name in ("norm", "exploding", "vanishing")},
            }
        )
    return named
