"""Single hosts and single seeds, as they stand at the end of an update: detail for DEBUG, where aggregates leave a question open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from esper_telemetry.core.group import MetricGroup
from esper_telemetry.core.lazy import Tensor, inference_mode, torch
from esper_telemetry.core.metric import Metric, label, reports
from esper_telemetry.core.record import Level
from esper_telemetry.core.reduction import Last, Sum

MOST = 64
"""Environments of which each is shown, the first ones; a backend with more curves than that shows none."""


@dataclass(frozen=True, slots=True)
class EachHost(MetricGroup):
    """Hosts one by one; of several ranks those of the first one."""

    replicated: ClassVar[bool] = True
    env: tuple[str, ...] = label()
    accuracy: Last = reports(
        Metric.fraction("host/each/{env}/accuracy", 1694, "accuracy of a host", level=Level.DEBUG)
        .asks("How accurate is this environment's host at the end of the update?")
        .absent("it is not known")
    )
    norm: Last = reports(
        Metric.gradient_norm("host/each/{env}/grad_norm", 1695, "gradient of a host", level=Level.DEBUG)
        .asks("How strong is its gradient, before clipping?")
        .absent("it is not known")
    )
    growth: Last = reports(
        Metric.ratio("host/each/{env}/growth_ratio", 1696, "growth of a host", low=1.0, level=Level.DEBUG).asks(
            "How much larger has it become?"
        )
    )
    rewards: Sum = reports(
        Metric.quantity("host/each/{env}/reward", 1697, "reward of a host", unit="reward", level=Level.DEBUG)
        .asks("What was paid for it during the update?")
        .absent("it is not known")
    )


@dataclass(frozen=True, slots=True)
class EachSeed(MetricGroup):
    """Slots one by one, of the first rank; `0_1` is the second slot of the first environment."""

    replicated: ClassVar[bool] = True
    place: tuple[str, ...] = label()
    stage: Last = reports(
        Metric.quantity(
            "seed/each/{place}/stage", 1500, "stage of a slot", unit="index", low=0.0, high=9.0, level=Level.DEBUG
        ).asks("Where does this slot stand, from 1, dormant, to 6, fossilised; 7 to 9 are on their way back?")
    )
    alpha: Last = reports(
        Metric.quantity(
            "seed/each/{place}/alpha", 1510, "weight of a seed", unit="weight", low=0.0, high=1.0, level=Level.DEBUG
        ).asks("With which weight does its seed count?")
    )
    norm: Last = reports(
        Metric.gradient_norm("seed/each/{place}/grad_norm", 1511, "gradient of a seed", level=Level.DEBUG)
        .asks("How strong is its gradient, before clipping?")
        .absent("the seed does not learn")
    )
    contribution: Last = reports(
        Metric.accuracy("seed/each/{place}/contribution", 1525, "contribution of one seed", low=-1.0, level=Level.DEBUG)
        .asks("What accuracy would be lost without it?")
        .absent("the host does not feel it")
    )


@inference_mode
def each_stats(
    hosts: Mapping[str, Tensor], seeds: Mapping[str, Tensor], rewards: Mapping[str, Tensor]
) -> Iterator[MetricGroup]:
    """The first `MOST` environments and their slots one by one, at the last of T steps.

    Args:
        hosts, rewards: [T, B] each, see `events.GrowthStep`.
        seeds: [T, B, S] each.
    """
    envs, slots = min(seeds["stage"].shape[1], MOST), seeds["stage"].shape[2]
    paid = torch.stack(list(rewards.values())).double().sum((0, 1))[:envs]
    last = {name: hosts[name][-1, :envs].double() for name in ("val_accuracy", "norm", "growth")}
    yield EachHost(
        tuple(str(env) for env in range(envs)),
        accuracy=Last(last["val_accuracy"]),
        norm=Last(last["norm"]),
        growth=Last(last["growth"]),
        rewards=Sum(paid),
    )
    row = {name: seeds[name][-1, :envs].flatten().double() for name in ("stage", "alpha", "norm", "contribution")}
    yield EachSeed(
        tuple(f"{env}_{slot}" for env in range(envs) for slot in range(slots)),
        **{name: Last(values) for name, values in row.items()},
    )
