"""Metrics of seeds: stages, gradients, gates and contributions, over T steps of B environments with S slots.

If esper-lite has a metric of the same meaning, its number plus 1000 is the number here: TELE-514, exploding gradients, is TELE-1514 here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from esper_telemetry.core.group import MetricGroup
from esper_telemetry.core.lazy import Tensor, inference_mode, torch
from esper_telemetry.core.metric import Metric, MetricFamily, label, reports
from esper_telemetry.core.record import Level
from esper_telemetry.core.reduction import Max, Mean, Min, Moments, OfLargest, Sum
from esper_telemetry.lab.morphogenesis.kinds import SEVERE, Stage
from esper_telemetry.metrics.statistics import sample, spread, where_any

SEEDS_FAMILY = MetricFamily(
    "seed",
    "Seeds",
    "Modules that a controller grows into networks while these are trained (`docs/morphogenesis.md`): their stages, "
    "the gradients that reach them, the decisions of gates, and their contribution to the accuracy, measured by "
    "switching them off.",
    place=180,
    question="Do seeds take root?",
    first=("seed/active", "seed/exploding", "seed/contribution"),
)


@dataclass(frozen=True, slots=True)
class SeedCounts(MetricGroup):
    """Numbers of seeds: alive, germinated, fossilised, pruned."""

    active: Mean = reports(
        Metric.magnitude("seed/active", 1502, "seeds alive", unit="slots per environment", level=Level.MINIMAL).asks(
            "How many seeds are alive, on average?"
        )
    )
    germinated: Sum = reports(Metric.count("seed/germinated", 1505, "seeds germinated").asks("How many seeds were germinated?"))
    fossilized: Sum = reports(
        Metric.count("seed/fossilized", 1503, "seeds fossilised").asks("How many seeds became a permanent part of their host?")
    )
    pruned: Sum = reports(Metric.count("seed/pruned", 1504, "seeds pruned").asks("How many seeds were given up?"))
    germination_rate: Mean = reports(
        Metric.magnitude("seed/germination_rate", 1508, "seeds germinated per episode", unit="seeds per episode").asks(
            "How many seeds does an episode of one environment germinate?"
        )
    )
    fossilize_rate: Mean = reports(
        Metric.magnitude("seed/fossilize_rate", 1506, "seeds fossilised per episode", unit="seeds per episode").asks(
            "How many of an episode's seeds does it keep permanently?"
        )
    )
    prune_rate: Mean = reports(
        Metric.magnitude("seed/prune_rate", 1507, "seeds pruned per episode", unit="seeds per episode").asks(
            "How many seeds does an episode give up?"
        )
    )
    success: Mean = reports(
        Metric.fraction("seed/success_frac", 1512, "share of seeds kept")
        .asks("What share of the seeds whose fate was decided was kept?")
        .changed("after 0.2.0: the largest of each parameter of a seed, not of the whole seed; critical from 1 on")
        .absent("no seed was fossilised or pruned")
    )
    alpha: Mean = reports(
        Metric.fraction("seed/alpha", 1551, "weight of seeds", unit="weight")
        .asks("What is the mean weight of the seeds with an effect?")
        .absent("no seed has an effect")
    )
    life: Mean = reports(
        Metric.magnitude("seed/life", 1513, "age of seeds", unit="epochs")
        .asks("How old are the seeds that are alive?")
        .absent("no seed is alive")
    )


@dataclass(frozen=True, slots=True)
class SeedStages(MetricGroup):
    """Slots by stage."""

    stage: tuple[str, ...] = label()
    slots: Mean = reports(
        Metric.magnitude("seed/stage/{stage}", 1501, "slots in a stage", unit="slots per environment").asks(
            "How many slots are in this stage, on average?"
        )
    )


@dataclass(frozen=True, slots=True)
class SeedGradients(MetricGroup, absent="no seed learns"):
    """Gradients of seeds, before each is clipped separately."""

    norm: Mean = reports(
        Metric.gradient_norm("seed/grad/norm", 1581, "gradient of seeds").asks(
            "How large is a seed's gradient, on average over minibatches and seeds?"
        )
    )
    exploding: Max = reports(
        Metric.severity("seed/exploding", 1514, "seed has exploding gradients")
        .asks("How far beyond its clip limit was the largest gradient of any parameter of a seed?")
        .bounds(
            healthy="< 0.5",
            warn="≥ 0.5, ten times the clip limit",
            critical="≥ 1, a hundred times the clip limit",
            source="TELE-514 of esper-lite is a flag from ten clip limits on; here over the whole epoch, before clipping; single "
            "minibatches of healthy runs exceed thirty",
        )
    )
    sustained: Max = reports(
        Metric.severity("seed/exploding_sustained", 1591, "seed has exploding gradients for three epochs")
        .asks("How far beyond its clip limit was the gradient of any seed in each of three epochs in a row?")
        .bounds(
            healthy="< 0.5",
            warn="≥ 0.5, ten times the clip limit",
            critical="≥ 0.75, 32 times the clip limit",
            source="heuristic: gradients of healthy seeds exceed ten clip limits in two epochs in a row at most",
        )
    )
    exploding_share: Mean = reports(
        Metric.fraction("seed/exploding_frac", 1582, "share of seeds with exploding gradients").asks(
            "What share of the seeds that learn has an exploding gradient?"
        )
    )
    vanishing: Mean = reports(
        Metric.severity("seed/vanishing", 1515, "seed has vanishing gradients")
        .asks("How far has the smallest gradient of a seed's parameters vanished, on average over seeds?")
        .bounds(healthy="< 0.5", warn="≥ 0.5, a 100,000th of the clip limit", source="three to seven decades below the clip limit")
        .changed("after 0.2.0: the smallest of each parameter of a seed, not of the whole seed")
    )
    ratio: Mean = reports(
        Metric.ratio("seed/intensity_ratio", 1557, "gradient intensity of seeds over hosts").asks(
            "How strong is a seed's gradient per parameter, relative to its host's?"
        )
    )


@dataclass(frozen=True, slots=True)
class SeedCauses(MetricGroup):
    """Causes of weak gradients of seeds."""

    cause: tuple[str, ...] = label()
    share: Mean = reports(
        Metric.fraction("seed/cause/{cause}", 1583, "share of seeds by cause")
        .asks("For what share of the seeds that learn does this explain their gradient relative to the host's?")
        .absent("no seed learns")
    )


@dataclass(frozen=True, slots=True)
class SeedWorth(MetricGroup, absent="no seed has an effect"):
    """Contributions of seeds to the accuracy, measured by switching them off."""

    contribution: Moments = reports(
        Metric.accuracy("seed/contribution", 1524, "contribution of a seed", low=-1.0).asks(
            "How much accuracy is lost when one seed is switched off?"
        )
    )
    worst: Min = reports(
        Metric.accuracy("seed/contribution_min", 1584, "contribution of the worst seed", low=-1.0).asks(
            "What does the worst seed contribute? Below 0 its host would be better off without it."
        )
    )
    shapley: Moments = reports(
        Metric.accuracy("seed/shapley/mean", 1533, "Shapley value of a seed", low=-1.0)
        .asks("What share of the seeds' joint contribution belongs to one seed, averaged over the orders of adding them?")
        .bounds(source="Shapley 1953, exact over all subsets"),
        Metric.accuracy("seed/shapley/std", 1534, "spread of Shapley values", high=None, of="std").asks(
            "How much do seeds differ in what they add?"
        ),
    )


@dataclass(frozen=True, slots=True)
class SeedGateStats(MetricGroup):
    """Results of the gates between stages."""

    gate: tuple[str, ...] = label()
    asked: Sum = reports(
        Metric.count("seed/gate/{gate}/asked", 1585, "questions to a gate of growth").asks("How often did a seed ask to pass this gate?")
    )
    passed: Mean = reports(
        Metric.fraction("seed/gate/{gate}/pass_frac", 1586, "share that a gate of growth lets pass")
        .asks("How often did this gate open when it was asked?")
        .absent("it was not requested")
    )


@inference_mode
def seed_stats(seeds: Mapping[str, Tensor], labels: Mapping[str, Sequence[str]], *, horizon: int) -> Iterator[MetricGroup]:
    """Yield the metrics of seeds.

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
    yield _largest(seeds)
    counted = cause[cause >= 0]
    of_cause = torch.bincount(counted, minlength=len(labels["cause"])).double()
    yield SeedCauses(tuple(labels["cause"]), Mean(of_cause, of_cause.sum().expand_as(of_cause)))
    worth, share = sample(seeds["contribution"]), sample(seeds["shapley"])
    least = Min(worth.where(torch.inf).amin(-1))
    yield SeedWorth(contribution=spread(worth), worst=least, shapley=spread(share))


def _counts(seeds: Mapping[str, Tensor], steps: float, horizon: int) -> SeedCounts:
    stage, episodes = seeds["stage"], steps / horizon
    alive = (stage >= Stage.GERMINATED) & (stage <= Stage.FOSSILIZED)
    born, fossilized, pruned = (seeds[name].double().sum() for name in ("born", "fossilized", "pruned"))
    return SeedCounts(
        active=Mean(alive.double().sum(), steps),
        germinated=Sum(born),
        fossilized=Sum(fossilized),
        pruned=Sum(pruned),
        germination_rate=Mean(born, episodes),
        fossilize_rate=Mean(fossilized, episodes),
        prune_rate=Mean(pruned, episodes),
        success=Mean(fossilized, fossilized + pruned),
        alpha=_mean(seeds["alpha"], seeds["alpha"] > 0),
        life=_mean(seeds["life"], alive),
    )


@dataclass(frozen=True, slots=True)
class LargestSeed(MetricGroup, absent="no seed learns"):
    """Place of the seed whose gradient is largest relative to its clip limit."""

    environment: OfLargest = reports(
        Metric.magnitude("seed/largest/environment", 1587, "environment of the largest gradient", unit="index").asks(
            "In which environment, counted within its rank, is the seed with the largest gradient?"
        )
    )
    slot: OfLargest = reports(
        Metric.magnitude("seed/largest/slot", 1588, "slot of the largest gradient", unit="index").asks("In which slot is it?")
    )
    stage: OfLargest = reports(
        Metric.magnitude("seed/largest/stage", 1589, "stage of the largest gradient", unit="index").asks(
            "In which stage is it, as a number of `slots.Stage`?"
        )
    )
    blueprint: OfLargest = reports(
        Metric.magnitude("seed/largest/blueprint", 1590, "blueprint of the largest gradient", unit="index").asks(
            "Which blueprint does it have?"
        )
    )


def _largest(seeds: Mapping[str, Tensor]) -> LargestSeed:
    exploding = seeds["exploding"]
    severity = exploding.nan_to_num(-1.0)
    place = severity.flatten().argmax()
    known = severity.flatten()[place] >= 0
    slots, environments = exploding.shape[-1], exploding.shape[-2]

    size = torch.where(known, severity.flatten()[place], -torch.inf)

    def at(index: Tensor) -> OfLargest:
        return OfLargest(index.double(), size)

    return LargestSeed(
        environment=at(place // slots % environments),
        slot=at(place % slots),
        stage=at(seeds["stage"].flatten()[place]),
        blueprint=at(seeds["blueprint"].flatten()[place]),
    )


def _gradients(seeds: Mapping[str, Tensor]) -> SeedGradients:
    exploding, sustained = sample(seeds["exploding"]), sample(seeds["sustained"])
    return SeedGradients(
        norm=_mean(seeds["norm"]),
        exploding=Max(where_any(exploding.values.amax(-1), exploding.count)),
        sustained=Max(where_any(sustained.values.amax(-1), sustained.count)),
        exploding_share=exploding.share(exploding.values >= SEVERE),
        vanishing=_mean(seeds["vanishing"]),
        ratio=_mean(seeds["ratio"]),
    )


@inference_mode
def gate_stats(gates: Mapping[str, Tensor]) -> SeedGateStats:
    """Return the results of gates; [T, B] per gate: -1 not asked, 0 refused, 1 passed."""
    answers = torch.stack([results.flatten() for results in gates.values()], -1)
    asked, passed = ((answers >= least).double().sum(0) for least in (0, 1))
    return SeedGateStats(tuple(gates), Sum(asked), Mean(passed, asked))


def _mean(x: Tensor, where: Tensor | None = None) -> Mean:
    """Return the mean of the finite values."""
    finite = sample(x, where)
    return finite.mean(finite.values)
