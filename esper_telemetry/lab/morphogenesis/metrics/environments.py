"""What environments in which networks grow pay for, what the controller does in them, and how episodes end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from esper_telemetry.core.group import MetricGroup
from esper_telemetry.core.metric import Metric, label, reports
from esper_telemetry.core.record import Level
from esper_telemetry.core.reduction import Max, Mean, Moments, Sum
from esper_telemetry.metrics.actions import sample, spread, where_any

NO_END = "no episode ended"
REASONS = ("nonfinite", "lobotomy", "divergence")
"""Why a watchdog puts older weights back."""


@dataclass(frozen=True, slots=True)
class EpisodeScores(MetricGroup):
    """How episodes ended: the scoreboard."""

    score: Moments = reports(
        Metric(
            key="env/score",
            number=1691,
            unit="accuracy",
            question="What are hosts worth in the end: accuracy less the price of the parameters in their seeds?",
            level=Level.MINIMAL,
            undefined=NO_END,
        ),
        Metric(
            key="env/score_std",
            number=1692,
            unit="accuracy",
            question="How much do episodes differ in what their hosts are worth?",
            of="std",
            low=0.0,
            undefined=NO_END,
        ),
    )
    best: Max = reports(
        Metric(
            key="env/score_best",
            number=1626,
            unit="accuracy",
            question="What is the best host worth at the end of its episode?",
            undefined=NO_END,
        )
    )
    final: Mean = reports(
        Metric(
            key="env/final_accuracy",
            number=1621,
            unit="accuracy",
            question="How accurate are hosts at the end of their episodes?",
            low=0.0,
            high=1.0,
            undefined=NO_END,
        )
    )
    peak: Mean = reports(
        Metric(
            key="env/peak_accuracy",
            number=1620,
            unit="accuracy",
            question="How accurate were hosts at their best, in the episodes that ended?",
            low=0.0,
            high=1.0,
            undefined=NO_END,
        )
    )
    growth: Mean = reports(
        Metric(
            key="env/final_growth_ratio",
            number=1623,
            unit="ratio",
            question="How many times as large as alone are hosts with their seeds when episodes end?",
            low=1.0,
            undefined=NO_END,
        )
    )
    fossilized: Mean = reports(
        Metric(
            key="env/final_fossilized",
            number=1628,
            unit="seeds",
            question="How many seeds have become part of their host when an episode ends?",
            low=0.0,
            undefined=NO_END,
        )
    )


@dataclass(frozen=True, slots=True)
class RewardParts(MetricGroup):
    """What the reward is made of."""

    component: tuple[str, ...] = label()
    mean: Mean = reports(
        Metric(
            key="env/reward/{component}",
            number=1655,
            unit="reward per step",
            question="How much does this part of the reward pay per step? All parts add up to the reward.",
        )
    )


@dataclass(frozen=True, slots=True)
class Operations(MetricGroup):
    """What the controller does."""

    op: tuple[str, ...] = label()
    share: Mean = reports(
        Metric(
            key="env/op/{op}",
            number=1649,
            unit="fraction",
            question="Which share of all steps does this operation take?",
            low=0.0,
            high=1.0,
        )
    )


@dataclass(frozen=True, slots=True)
class Decisions(MetricGroup):
    """How often there is a choice."""

    density: Mean = reports(
        Metric(
            key="env/decision_density",
            number=1693,
            unit="fraction",
            question="In which share of the steps may the controller do anything but wait?",
            low=0.0,
            high=1.0,
        )
    )
    rollbacks: Sum = reports(
        Metric(
            key="env/rollbacks",
            number=1632,
            unit="count",
            question="How often did a watchdog give a host its older weights back?",
            low=0.0,
            healthy="0",
            warn="> 0",
            source="weights that are not finite, a host that has lost all it knew, a loss that runs away",
        )
    )


@dataclass(frozen=True, slots=True)
class RollbackReasons(MetricGroup):
    """Why watchdogs intervened."""

    reason: tuple[str, ...] = label()
    count: Sum = reports(
        Metric(
            key="env/rollback/{reason}",
            number=1633,
            unit="count",
            question="How often was this why a watchdog gave a host its older weights back?",
            low=0.0,
            undefined="it never was",
            when_positive=True,
        )
    )


FOSSILIZED = 6
"""Index of the stage."""


@torch.inference_mode()
def environment_stats(
    hosts: Mapping[str, Tensor],
    rewards: Mapping[str, Tensor],
    stages: Tensor,
    last: Tensor,
    *,
    ops: Sequence[str],
) -> Iterator[MetricGroup]:
    """Everything about environments.

    Args:
        hosts: [T, B] each, see `telemetry.GrowthStep`.
        rewards: per component [T, B], as they are paid.
        stages: [T, B, S], indices.
        last: [T], bool: steps that end episodes.
        ops: names of the operations.
    """
    yield _scores(hosts, (stages == FOSSILIZED).sum(-1), last)
    parts = torch.stack([part.double().nan_to_num().sum() for part in rewards.values()])
    steps = float(last.numel() * stages.shape[1])
    yield RewardParts(tuple(rewards), Mean(parts, torch.full_like(parts, steps)))
    taken = torch.bincount(hosts["op"].flatten(), minlength=len(ops)).double()
    yield Operations(tuple(ops), Mean(taken, torch.full_like(taken, steps)))
    reasons = torch.stack([hosts[name].double().sum() for name in REASONS])
    back = torch.stack([hosts[name] for name in REASONS]).any(0)
    yield Decisions(density=Mean(hosts["decides"].double().sum(), steps), rollbacks=Sum(back.double().sum()))
    yield RollbackReasons(REASONS, Sum(reasons))


def _scores(hosts: Mapping[str, Tensor], fossilized: Tensor, last: Tensor) -> EpisodeScores:
    kept = {"score": hosts["score"], "final": hosts["val_accuracy"], "peak": hosts["best"], "growth": hosts["growth"]}
    found = {name: sample(x, last.unsqueeze(1).expand_as(x)) for name, x in (kept | {"fossils": fossilized}).items()}
    score = found["score"]
    means = {name: s.mean(s.values) for name, s in found.items()}
    return EpisodeScores(
        score=spread(score),
        best=Max(where_any(score.where(-torch.inf).amax(-1), score.count)),
        final=means["final"],
        peak=means["peak"],
        growth=means["growth"],
        fossilized=means["fossils"],
    )
