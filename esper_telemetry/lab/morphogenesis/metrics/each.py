"""Single hosts and single seeds, as they stand at the end of an update: detail for DEBUG, where aggregates leave a question open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from esper_telemetry.core.group import MetricGroup
from esper_telemetry.core.metric import Metric, label, reports
from esper_telemetry.core.record import Level
from esper_telemetry.core.reduction import Last, Sum

MOST = 64
"""Environments of which each is shown, the first ones; a backend with more curves than that shows none."""

UNKNOWN = "it is not known"


@dataclass(frozen=True, slots=True)
class EachHost(MetricGroup):
    """Hosts one by one; of several ranks those of the first one."""

    replicated: ClassVar[bool] = True
    env: tuple[str, ...] = label()
    accuracy: Last = reports(
        Metric(
            key="host/each/{env}/accuracy",
            number=1694,
            unit="fraction",
            question="How accurate is this environment's host at the end of the update?",
            low=0.0,
            high=1.0,
            level=Level.DEBUG,
            undefined=UNKNOWN,
        )
    )
    norm: Last = reports(
        Metric(
            key="host/each/{env}/grad_norm",
            number=1695,
            unit="gradient norm",
            question="How strong is its gradient, before clipping?",
            low=0.0,
            level=Level.DEBUG,
            undefined=UNKNOWN,
        )
    )
    growth: Last = reports(
        Metric(
            key="host/each/{env}/growth_ratio",
            number=1696,
            unit="ratio",
            question="How much larger has it become?",
            low=1.0,
            level=Level.DEBUG,
        )
    )
    rewards: Sum = reports(
        Metric(
            key="host/each/{env}/reward",
            number=1697,
            unit="reward",
            question="What was paid for it during the update?",
            level=Level.DEBUG,
            undefined=UNKNOWN,
        )
    )


@dataclass(frozen=True, slots=True)
class EachSeed(MetricGroup):
    """Slots one by one, of the first rank; `0_1` is the second slot of the first environment."""

    replicated: ClassVar[bool] = True
    place: tuple[str, ...] = label()
    stage: Last = reports(
        Metric(
            key="seed/each/{place}/stage",
            number=1500,
            unit="index",
            question="Where does this slot stand, from 1, dormant, to 6, fossilised; 7 to 9 are on their way back?",
            low=0.0,
            high=9.0,
            level=Level.DEBUG,
        )
    )
    alpha: Last = reports(
        Metric(
            key="seed/each/{place}/alpha",
            number=1510,
            unit="weight",
            question="With which weight does its seed count?",
            low=0.0,
            high=1.0,
            level=Level.DEBUG,
        )
    )
    norm: Last = reports(
        Metric(
            key="seed/each/{place}/grad_norm",
            number=1511,
            unit="gradient norm",
            question="How strong is its gradient, before clipping?",
            low=0.0,
            level=Level.DEBUG,
            undefined="the seed does not learn",
        )
    )
    contribution: Last = reports(
        Metric(
            key="seed/each/{place}/contribution",
            number=1525,
            unit="accuracy",
            question="What accuracy would be lost without it?",
            low=-1.0,
            high=1.0,
            level=Level.DEBUG,
            undefined="the host does not feel it",
        )
    )


@torch.inference_mode()
def each_stats(
    hosts: Mapping[str, Tensor], seeds: Mapping[str, Tensor], rewards: Mapping[str, Tensor]
) -> Iterator[MetricGroup]:
    """The first `MOST` environments and their slots one by one, at the last of T steps.

    Args:
        hosts, rewards: [T, B] each, see `telemetry.GrowthStep`.
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
