"""Seeds: where they are in their lives, how they learn, and what they are worth. T steps, B environments, S slots.

Ids are those of esper-lite plus 1000 where the meaning is the same: TELE-514 there is TELE-1514 here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from esper_telemetry.core.group import MetricGroup
from esper_telemetry.core.metric import Metric, label, reports
from esper_telemetry.core.record import Level
from esper_telemetry.core.reduction import Max, Mean, Min, Moments, Sum
from esper_telemetry.metrics.actions import sample, spread, where_any

NO_SEED = "no seed learns"
NO_EFFECT = "no seed has an effect"
SLOTS = "slots per environment"


@dataclass(frozen=True, slots=True)
class SeedCounts(MetricGroup):
    """How many seeds there are, and what became of them."""

    active: Mean = reports(
        Metric(
            key="seed/active",
            number=1502,
            unit=SLOTS,
            question="How many seeds are alive, on average?",
            low=0.0,
            level=Level.MINIMAL,
        )
    )
    germinated: Sum = reports(
        Metric(
            key="seed/germinated",
            number=1505,
            unit="count",
            question="How many seeds were germinated?",
            low=0.0,
        )
    )
    fossilized: Sum = reports(
        Metric(
            key="seed/fossilized",
            number=1503,
            unit="count",
            question="How many seeds became part of their host for good?",
            low=0.0,
        )
    )
    pruned: Sum = reports(
        Metric(key="seed/pruned", number=1504, unit="count", question="How many seeds were given up?", low=0.0)
    )
    germination_rate: Mean = reports(
        Metric(
            key="seed/germination_rate",
            number=1508,
            unit="seeds per episode",
            question="How many seeds does an episode of one environment germinate?",
            low=0.0,
        )
    )
    fossilize_rate: Mean = reports(
        Metric(
            key="seed/fossilize_rate",
            number=1506,
            unit="seeds per episode",
            question="How many of an episode's seeds does it keep for good?",
            low=0.0,
        )
    )
    prune_rate: Mean = reports(
        Metric(
            key="seed/prune_rate",
            number=1507,
            unit="seeds per episode",
            question="How many seeds does an episode give up?",
            low=0.0,
        )
    )
    success: Mean = reports(
        Metric(
            key="seed/success_frac",
            number=1512,
            unit="fraction",
            question="Which share of the seeds whose fate was decided was kept?",
            low=0.0,
            high=1.0,
            undefined="no seed was fossilised or pruned",
        )
    )
    alpha: Mean = reports(
        Metric(
            key="seed/alpha",
            number=1551,
            unit="weight",
            question="With which weight do the seeds count that have an effect?",
            low=0.0,
            high=1.0,
            undefined=NO_EFFECT,
        )
    )
    life: Mean = reports(
        Metric(
            key="seed/life",
            number=1513,
            unit="epochs",
            question="How old are the seeds that are alive?",
            low=0.0,
            undefined="no seed is alive",
        )
    )


@dataclass(frozen=True, slots=True)
class SeedStages(MetricGroup):
    """How slots are spread over the stages of a seed's life."""

    stage: tuple[str, ...] = label()
    slots: Mean = reports(
        Metric(
            key="seed/stage/{stage}",
            number=1501,
            unit=SLOTS,
            question="How many slots are in this stage, on average?",
            low=0.0,
        )
    )


@dataclass(frozen=True, slots=True)
class SeedGradients(MetricGroup):
    """How strongly the losses pull at seeds, before each is clipped by itself."""

    norm: Mean = reports(
        Metric(
            key="seed/grad/norm",
            number=1581,
            unit="gradient norm",
            question="How large is a seed's gradient, on average over minibatches and seeds?",
            low=0.0,
            undefined=NO_SEED,
        )
    )
    exploding: Max = reports(
        Metric(
            key="seed/exploding",
            number=1514,
            unit="severity",
            question="How far beyond its clip limit was the largest gradient of any seed?",
            low=0.0,
            high=1.0,
            healthy="< 0.5",
            warn="≥ 0.5, ten times the clip limit",
            critical="≥ 0.75, 32 times the clip limit",
            source="TELE-514 of esper-lite is a flag from ten clip limits on; here over the whole epoch, before clipping",
            undefined=NO_SEED,
        )
    )
    exploding_share: Mean = reports(
        Metric(
            key="seed/exploding_frac",
            number=1582,
            unit="fraction",
            question="Which share of the seeds that learn has an exploding gradient?",
            low=0.0,
            high=1.0,
            undefined=NO_SEED,
        )
    )
    vanishing: Mean = reports(
        Metric(
            key="seed/vanishing",
            number=1515,
            unit="severity",
            question="How far have gradients of seeds vanished, on average?",
            low=0.0,
            high=1.0,
            healthy="< 0.5",
            warn="≥ 0.5, a 100,000th of the clip limit",
            source="three to seven decades below the clip limit",
            undefined=NO_SEED,
        )
    )
    ratio: Mean = reports(
        Metric(
            key="seed/intensity_ratio",
            number=1557,
            unit="ratio",
            question="How strong is a seed's gradient per parameter beside its host's?",
            low=0.0,
            undefined=NO_SEED,
        )
    )


@dataclass(frozen=True, slots=True)
class SeedCauses(MetricGroup):
    """Why seeds learn as they do."""

    cause: tuple[str, ...] = label()
    share: Mean = reports(
        Metric(
            key="seed/cause/{cause}",
            number=1583,
            unit="fraction",
            question="For which share of the seeds that learn is this why their gradient is as it is beside the host's?",
            low=0.0,
            high=1.0,
            undefined=NO_SEED,
        )
    )


@dataclass(frozen=True, slots=True)
class SeedWorth(MetricGroup):
    """What seeds add to accuracy, told by switching them off."""

    contribution: Moments = reports(
        Metric(
            key="seed/contribution",
            number=1524,
            unit="accuracy",
            question="How much accuracy is lost when one seed is switched off?",
            low=-1.0,
            high=1.0,
            undefined=NO_EFFECT,
        )
    )
    worst: Min = reports(
        Metric(
            key="seed/contribution_min",
            number=1584,
            unit="accuracy",
            question="What does the worst seed contribute? Below 0 its host would be better off without it.",
            low=-1.0,
            high=1.0,
            undefined=NO_EFFECT,
        )
    )
    shapley: Moments = reports(
        Metric(
            key="seed/shapley/mean",
            number=1533,
            unit="accuracy",
            question="Which share of what all seeds add is a seed's own, averaged over the orders in which they might come?",
            low=-1.0,
            high=1.0,
            source="Shapley 1953, exact over all subsets",
            undefined=NO_EFFECT,
        ),
        Metric(
            key="seed/shapley/std",
            number=1534,
            unit="accuracy",
            question="How much do seeds differ in what they add?",
            of="std",
            low=0.0,
            undefined=NO_EFFECT,
        ),
    )


@dataclass(frozen=True, slots=True)
class SeedGateStats(MetricGroup):
    """What the gates between stages answer."""

    gate: tuple[str, ...] = label()
    asked: Sum = reports(
        Metric(
            key="seed/gate/{gate}/asked",
            number=1585,
            unit="count",
            question="How often did a seed ask to pass this gate?",
            low=0.0,
        )
    )
    passed: Mean = reports(
        Metric(
            key="seed/gate/{gate}/pass_frac",
            number=1586,
            unit="fraction",
            question="How often did this gate open for those that asked?",
            low=0.0,
            high=1.0,
            undefined="nobody asked",
        )
    )


ALIVE = slice(2, 7)
"""Stages, by index, in which a seed is alive: germinated to fossilised."""


@torch.inference_mode()
def seed_stats(
    seeds: Mapping[str, Tensor], labels: Mapping[str, Sequence[str]], *, horizon: int
) -> Iterator[MetricGroup]:
    """Everything about seeds.

    Args:
        seeds: [T, B, S] each, see `telemetry.GrowthStep`.
        labels: names of the values of `stage` and `cause`.
        horizon: steps of an episode.
    """
    stage, cause, slots = seeds["stage"], seeds["cause"], seeds["stage"].shape[-1]
    steps = float(stage.numel() // slots)
    yield _counts(seeds, steps, horizon)
    of_stage = torch.bincount(stage.flatten(), minlength=len(labels["stage"])).double()
    yield SeedStages(tuple(labels["stage"]), Mean(of_stage, torch.full_like(of_stage, steps)))
    yield _gradients(seeds)
    counted = cause[cause >= 0]
    of_cause = torch.bincount(counted, minlength=len(labels["cause"])).double()
    yield SeedCauses(tuple(labels["cause"]), Mean(of_cause, of_cause.sum().expand_as(of_cause)))
    worth, share = sample(seeds["contribution"]), sample(seeds["shapley"])
    least = Min(worth.where(torch.inf).amin(-1))
    yield SeedWorth(contribution=spread(worth), worst=least, shapley=spread(share))


def _counts(seeds: Mapping[str, Tensor], steps: float, horizon: int) -> SeedCounts:
    stage, episodes = seeds["stage"], steps / horizon
    alive = (stage >= ALIVE.start) & (stage < ALIVE.stop)
    born, kept, gone = (seeds[name].double().sum() for name in ("born", "fossilized", "pruned"))
    return SeedCounts(
        active=Mean(alive.double().sum(), steps),
        germinated=Sum(born),
        fossilized=Sum(kept),
        pruned=Sum(gone),
        germination_rate=Mean(born, episodes),
        fossilize_rate=Mean(kept, episodes),
        prune_rate=Mean(gone, episodes),
        success=Mean(kept, kept + gone),
        alpha=_mean(seeds["alpha"], seeds["alpha"] > 0),
        life=_mean(seeds["life"], alive),
    )


def _gradients(seeds: Mapping[str, Tensor]) -> SeedGradients:
    exploding = sample(seeds["exploding"])
    return SeedGradients(
        norm=_mean(seeds["norm"]),
        exploding=Max(where_any(exploding.values.amax(-1), exploding.count)),
        exploding_share=exploding.share(exploding.values >= 0.5),
        vanishing=_mean(seeds["vanishing"]),
        ratio=_mean(seeds["ratio"]),
    )


@torch.inference_mode()
def gate_stats(gates: Mapping[str, Tensor]) -> SeedGateStats:
    """How often each gate was asked and opened; [T, B] per gate: -1 not asked, 0 refused, 1 passed."""
    answers = torch.stack([found.flatten() for found in gates.values()], -1)
    asked, passed = ((answers >= least).double().sum(0) for least in (0, 1))
    return SeedGateStats(tuple(gates), Sum(asked), Mean(passed, asked))


def _mean(x: Tensor, where: Tensor | None = None) -> Mean:
    """Mean of the finite values that count."""
    found = sample(x, where)
    return found.mean(found.values)
