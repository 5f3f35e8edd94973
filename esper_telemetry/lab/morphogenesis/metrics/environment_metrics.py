"""Metrics of the environments: rewards, operations of the controller, final scores of episodes, roll-backs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from esper_telemetry.core.group import MetricGroup
from esper_telemetry.core.lazy import Tensor, inference_mode, torch
from esper_telemetry.core.metric import Metric, MetricFamily, label, reports
from esper_telemetry.core.record import Level
from esper_telemetry.core.reduction import Max, Mean, Moments, Sum
from esper_telemetry.lab.morphogenesis.metrics.hosts import MAX_SHOWN_ENVIRONMENTS
from esper_telemetry.metrics.statistics import sample, spread, where_any

ROLLBACK_REASONS = ("nonfinite", "lobotomy", "divergence")
"""Reasons for a roll-back by the watchdog."""


GROWTH_FAMILY = MetricFamily(
    "env",
    "Growing",
    "Rewards of environments in which networks grow, the controller's actions, and the final worth of hosts.",
    place=170,
    question="What are the grown networks worth?",
    axis="axis/env_step",
    first=("env/score", "env/final_accuracy"),
)


@dataclass(frozen=True, slots=True)
class EpisodeScores(MetricGroup, absent="no episode ended"):
    """Final scores of the episodes that ended."""

    score: Moments = reports(
        Metric.accuracy("env/score", 1691, "final score of hosts", low=None, high=None, level=Level.MINIMAL).asks(
            "What are hosts worth in the end: accuracy minus the price of the parameters in their seeds?"
        ),
        Metric.accuracy("env/score_std", 1692, "spread of final scores", high=None, of="std").asks(
            "How much do episodes differ in what their hosts are worth?"
        ),
    )
    best: Max = reports(
        Metric.accuracy("env/score_best", 1626, "best final score", low=None, high=None).asks(
            "What is the best host worth at the end of its episode?"
        )
    )
    final: Mean = reports(
        Metric.accuracy("env/final_accuracy", 1621, "final accuracy of hosts").asks(
            "How accurate are hosts at the end of their episodes?"
        )
    )
    peak: Mean = reports(
        Metric.accuracy("env/peak_accuracy", 1620, "peak accuracy of hosts").asks(
            "How accurate were hosts at their best, in the episodes that ended?"
        )
    )
    growth: Mean = reports(
        Metric.ratio("env/final_growth_ratio", 1623, "final growth of hosts", low=1.0).asks(
            "How many times larger are hosts with their seeds than alone when episodes end?"
        )
    )
    fossilized: Mean = reports(
        Metric.magnitude("env/final_fossilized", 1628, "seeds fossilised in the end", unit="seeds").asks(
            "How many seeds have become part of their host when an episode ends?"
        )
    )


@dataclass(frozen=True, slots=True)
class RewardParts(MetricGroup):
    """Components of the reward."""

    component: tuple[str, ...] = label()
    mean: Mean = reports(
        Metric.quantity("env/reward/{component}", 1655, "component of the growth reward", unit="reward per step").asks(
            "How much does this part of the reward pay per step? All parts add up to the reward."
        )
    )


@dataclass(frozen=True, slots=True)
class Operations(MetricGroup):
    """Operations of the controller."""

    op: tuple[str, ...] = label()
    share: Mean = reports(
        Metric.fraction("env/op/{op}", 1649, "share of an operation").asks(
            "What share of all steps does this operation take?"
        )
    )


@dataclass(frozen=True, slots=True)
class Decisions(MetricGroup):
    """Steps with a choice, and roll-backs."""

    density: Mean = reports(
        Metric.fraction("env/decision_density", 1693, "share of steps with a choice").asks(
            "In what share of the steps can the controller do anything but wait?"
        )
    )
    rollbacks: Sum = reports(
        Metric.count("env/rollbacks", 1632, "hosts given back older weights")
        .asks("How often did the watchdog restore older weights of a host?")
        .bounds(
            healthy="0",
            warn="> 0",
            source="a loss that is not finite, a host that has lost all it knew, a loss that runs away",
        )
    )


@dataclass(frozen=True, slots=True)
class RollbackReasons(MetricGroup):
    """Roll-backs by reason."""

    reason: tuple[str, ...] = label()
    count: Sum = reports(
        Metric.count("env/rollback/{reason}", 1633, "roll-backs by reason", when_positive=True)
        .asks("How often was this the reason for restoring older weights of a host?")
        .absent("it never was")
    )


@dataclass(frozen=True, slots=True)
class HostRollbacks(MetricGroup):
    """Roll-backs of single hosts, of the first rank."""

    replicated: ClassVar[bool] = True
    env: tuple[str, ...] = label()
    count: Sum = reports(
        Metric.count("host/each/{env}/rollbacks", 1698, "roll-backs of a host", when_positive=True)
        .asks("How often was this environment's host given older weights?")
        .absent("it never was")
    )


FOSSILIZED = 6
"""Index of the stage `fossilized`."""


@inference_mode
def environment_stats(
    hosts: Mapping[str, Tensor], rewards: Mapping[str, Tensor], stages: Tensor, *, ops: Sequence[str]
) -> Iterator[MetricGroup]:
    """Yield the metrics of the environments.

    Args:
        hosts: [T, B] each, see `telemetry.GrowthStep`.
        rewards: weighted components, [T, B] each.
        stages: [T, B, S], indices.
        ops: names of the operations.
    """
    yield _scores(hosts, (stages == FOSSILIZED).sum(-1))
    parts = torch.stack([part.double().nan_to_num().sum() for part in rewards.values()])
    steps = float(stages[..., 0].numel())
    yield RewardParts(tuple(rewards), Mean(parts, torch.full_like(parts, steps)))
    taken = torch.bincount(hosts["op"].flatten(), minlength=len(ops)).double()
    yield Operations(tuple(ops), Mean(taken, torch.full_like(taken, steps)))
    reasons = torch.stack([hosts[name].double().sum() for name in ROLLBACK_REASONS])
    back = torch.stack([hosts[name] for name in ROLLBACK_REASONS]).any(0).double()
    yield Decisions(density=Mean(hosts["decides"].double().sum(), steps), rollbacks=Sum(back.sum()))
    yield RollbackReasons(ROLLBACK_REASONS, Sum(reasons))
    times = back.sum(0)[:MAX_SHOWN_ENVIRONMENTS]
    yield HostRollbacks(tuple(str(env) for env in range(len(times))), Sum(times))


def _scores(hosts: Mapping[str, Tensor], fossilized: Tensor) -> EpisodeScores:
    columns = {
        "score": hosts["score"],
        "final": hosts["val_accuracy"],
        "peak": hosts["best"],
        "growth": hosts["growth"],
    }
    columns["fossils"] = fossilized
    samples = {name: sample(x, hosts["ended"]) for name, x in columns.items()}
    score = samples["score"]
    means = {name: s.mean(s.values) for name, s in samples.items()}
    return EpisodeScores(
        score=spread(score),
        best=Max(where_any(score.where(-torch.inf).amax(-1), score.count)),
        final=means["final"],
        peak=means["peak"],
        growth=means["growth"],
        fossilized=means["fossils"],
    )
