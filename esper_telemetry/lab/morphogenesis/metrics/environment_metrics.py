"""Metrics of the environments over T steps of B environments: rewards, operations, final scores of episodes, roll-backs, and their hosts.

Those of hosts are accuracy, loss and size; at DEBUG there are metrics of single hosts and seeds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from esper_telemetry.core.group import MetricGroup
from esper_telemetry.core.lazy import Tensor, inference_mode, torch
from esper_telemetry.core.metric import Metric, MetricFamily, label, reports
from esper_telemetry.core.record import Level
from esper_telemetry.core.reduction import Last, Max, Mean, Moments, Sum
from esper_telemetry.lab.morphogenesis.kinds import ROLLBACK_REASONS, Stage
from esper_telemetry.metrics.statistics import sample, spread, where_any

HOSTS_FAMILY = MetricFamily(
    "host",
    "Hosts",
    "Networks that seeds grow into: their accuracy, and how much larger they have become.",
    place=190,
    question="How well do the hosts learn?",
    first=("host/accuracy", "host/growth_ratio"),
)


@dataclass(frozen=True, slots=True)
class HostStats(MetricGroup):
    """Accuracy, loss, gradients and size of hosts, over all epochs of the update."""

    accuracy: Moments = reports(
        Metric.accuracy("host/accuracy", 1635, "accuracy of hosts", level=Level.MINIMAL).asks(
            "How well do hosts do on validation data, seeds included, on average over episodes?"
        ),
        Metric.accuracy("host/accuracy_std", 1687, "spread of the hosts' accuracy", high=None, of="std").asks(
            "How much do hosts, and epochs of an episode, differ in accuracy?"
        ),
    )
    best: Max = reports(
        Metric.accuracy("host/accuracy_best", 1636, "best accuracy of a host").asks("What is the best accuracy that a host has had?")
    )
    stale: Mean = reports(
        Metric.magnitude("host/epochs_since_best", 1637, "epochs since hosts were at their best", unit="epochs").asks(
            "How long is it since hosts were at their best?"
        )
    )
    loss: Mean = reports(
        Metric.nats("host/loss", 1641, "validation loss of hosts").asks("What is the loss on validation data?").absent("no loss was finite")
    )
    train_loss: Mean = reports(
        Metric.nats("host/train_loss", 1688, "training loss of hosts")
        .asks("What is the loss on training data?")
        .absent("no loss was finite")
    )
    train_accuracy: Mean = reports(
        Metric.accuracy("host/train_accuracy", 1689, "training accuracy of hosts").asks(
            "How well do hosts do on training data? Far above `host/accuracy`: they memorise."
        )
    )
    norm: Mean = reports(
        Metric.gradient_norm("host/grad_norm", 1690, "gradient of hosts")
        .asks("How large are the hosts' gradients before clipping?")
        .absent("no gradient was finite")
    )
    growth: Mean = reports(
        Metric.ratio("host/growth_ratio", 1644, "growth of hosts", low=1.0).asks(
            "How many times more parameters do hosts have with their seeds than without?"
        )
    )
    gain: Mean = reports(
        Metric.accuracy("host/seeds_gain", 1522, "accuracy that seeds add", low=-1.0).asks(
            "How much accuracy is lost when all seeds are switched off?"
        )
    )
    synergy: Mean = reports(
        Metric.accuracy("host/synergy", 1523, "synergy of seeds", low=None, high=None).asks(
            "How much more do seeds add together than separately? Below 0 they do the same work twice."
        )
    )


@inference_mode
def host_stats(hosts: Mapping[str, Tensor]) -> HostStats:
    """Return the metrics of hosts from columns [T, B], see `telemetry.GrowthStep`."""
    samples = {name: sample(x) for name, x in hosts.items()}
    best = samples["best"]

    def mean(name: str) -> Mean:
        return samples[name].mean(samples[name].values)

    return HostStats(
        accuracy=spread(samples["val_accuracy"]),
        best=Max(where_any(best.values.amax(-1), best.count)),
        stale=mean("stale"),
        loss=mean("val_loss"),
        train_loss=mean("train_loss"),
        train_accuracy=mean("train_accuracy"),
        norm=mean("norm"),
        growth=mean("growth"),
        gain=mean("seeds_gain"),
        synergy=mean("synergy"),
    )


MAX_SHOWN_ENVIRONMENTS = 64
"""Maximum number of environments with separate metrics; with more curves the views of backends are unusable."""


@dataclass(frozen=True, slots=True)
class SingleHosts(MetricGroup, absent="it is not known", level=Level.DEBUG):
    """Single hosts, of the first rank."""

    replicated: ClassVar[bool] = True
    env: tuple[str, ...] = label()
    accuracy: Last = reports(
        Metric.fraction("host/each/{env}/accuracy", 1694, "accuracy of a host").asks(
            "How accurate is this environment's host at the end of the update?"
        )
    )
    norm: Last = reports(
        Metric.gradient_norm("host/each/{env}/grad_norm", 1695, "gradient of a host").asks("How strong is its gradient, before clipping?")
    )
    growth: Last = reports(
        Metric.ratio("host/each/{env}/growth_ratio", 1696, "growth of a host", low=1.0).asks("How much larger has it become?").absent("")
    )
    rewards: Sum = reports(
        Metric.quantity("host/each/{env}/reward", 1697, "reward of a host", unit="reward").asks(
            "What reward did it bring during the update?"
        )
    )


@dataclass(frozen=True, slots=True)
class SingleSeeds(MetricGroup, level=Level.DEBUG):
    """Single slots, of the first rank; `0_1` is the second slot of the first environment."""

    replicated: ClassVar[bool] = True
    place: tuple[str, ...] = label()
    stage: Last = reports(
        Metric.quantity("seed/each/{place}/stage", 1500, "stage of a slot", unit="index", low=0.0, high=9.0).asks(
            "Which stage is this slot in, from 1, dormant, to 6, fossilised; 7 to 9 are on their way back?"
        )
    )
    alpha: Last = reports(
        Metric.fraction("seed/each/{place}/alpha", 1510, "weight of a seed", unit="weight").asks("What weight does its seed have?")
    )
    norm: Last = reports(
        Metric.gradient_norm("seed/each/{place}/grad_norm", 1511, "gradient of a seed")
        .asks("How strong is its gradient, before clipping?")
        .absent("the seed does not learn")
    )
    contribution: Last = reports(
        Metric.accuracy("seed/each/{place}/contribution", 1525, "contribution of one seed", low=-1.0)
        .asks("What accuracy would be lost without it?")
        .absent("the host is not affected by it")
    )


@inference_mode
def each_stats(hosts: Mapping[str, Tensor], seeds: Mapping[str, Tensor], rewards: Mapping[str, Tensor]) -> Iterator[MetricGroup]:
    """Yield the metrics of the first `MAX_SHOWN_ENVIRONMENTS` environments and their slots, at the last of T steps.

    Args:
        hosts, rewards: [T, B] each, see `telemetry.GrowthStep`.
        seeds: [T, B, S] each.
    """
    envs, slots = min(seeds["stage"].shape[1], MAX_SHOWN_ENVIRONMENTS), seeds["stage"].shape[2]
    paid = torch.stack(list(rewards.values())).double().sum((0, 1))[:envs]
    last = {name: hosts[name][-1, :envs].double() for name in ("val_accuracy", "norm", "growth")}
    yield SingleHosts(
        tuple(str(env) for env in range(envs)),
        accuracy=Last(last["val_accuracy"]),
        norm=Last(last["norm"]),
        growth=Last(last["growth"]),
        rewards=Sum(paid),
    )
    row = {name: seeds[name][-1, :envs].flatten().double() for name in ("stage", "alpha", "norm", "contribution")}
    yield SingleSeeds(
        tuple(f"{env}_{slot}" for env in range(envs) for slot in range(slots)), **{name: Last(values) for name, values in row.items()}
    )


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
        Metric.accuracy("env/final_accuracy", 1621, "final accuracy of hosts").asks("How accurate are hosts at the end of their episodes?")
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
        Metric.fraction("env/op/{op}", 1649, "share of an operation").asks("What share of all steps does this operation take?")
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
        .bounds(healthy="0", warn="> 0", source="a loss that is not finite, a host that has lost all it knew, a loss that runs away")
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
    yield _scores(hosts, (stages == Stage.FOSSILIZED).sum(-1))
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
    columns = {"score": hosts["score"], "final": hosts["val_accuracy"], "peak": hosts["best"], "growth": hosts["growth"]}
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
