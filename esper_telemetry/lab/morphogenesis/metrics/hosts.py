"""Hosts: how well they have learned, and how much larger they are than they were. T steps, B environments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from esper_telemetry.core.group import MetricGroup
from esper_telemetry.core.lazy import Tensor, inference_mode
from esper_telemetry.core.metric import Metric, MetricFamily, reports
from esper_telemetry.core.record import Level
from esper_telemetry.core.reduction import Max, Mean, Moments
from esper_telemetry.metrics.statistics import Sample, sample, spread, where_any

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
    """How hosts do, over all epochs of the update."""

    accuracy: Moments = reports(
        Metric.accuracy("host/accuracy", 1635, "accuracy of hosts", level=Level.MINIMAL).asks(
            "How well do hosts do on validation data, seeds included, on average over episodes?"
        ),
        Metric.accuracy("host/accuracy_std", 1687, "spread of the hosts' accuracy", high=None, of="std").asks(
            "How much do hosts, and epochs of an episode, differ in accuracy?"
        ),
    )
    best: Max = reports(
        Metric.accuracy("host/accuracy_best", 1636, "best accuracy of a host").asks(
            "What is the best accuracy that a host has had?"
        )
    )
    stale: Mean = reports(
        Metric.quantity(
            "host/epochs_since_best", 1637, "epochs since hosts were at their best", unit="epochs", low=0.0
        ).asks("How long is it since hosts were at their best?")
    )
    loss: Mean = reports(
        Metric.nats("host/loss", 1641, "validation loss of hosts")
        .asks("What is the loss on validation data?")
        .absent("no loss was finite")
    )
    train_loss: Mean = reports(
        Metric.nats("host/train_loss", 1688, "training loss of hosts")
        .asks("What is the loss on training data?")
        .absent("no loss was finite")
    )
    train_accuracy: Mean = reports(
        Metric.accuracy("host/train_accuracy", 1689, "training accuracy of hosts").asks(
            "How well do hosts do on training data? Far above `host/accuracy`: they learn by heart."
        )
    )
    norm: Mean = reports(
        Metric.gradient_norm("host/grad_norm", 1690, "gradient of hosts")
        .asks("How large are the hosts' gradients before clipping?")
        .absent("no gradient was finite")
    )
    growth: Mean = reports(
        Metric.ratio("host/growth_ratio", 1644, "growth of hosts", low=1.0).asks(
            "How many parameters do hosts have with their seeds, over those without?"
        )
    )
    gain: Mean = reports(
        Metric.accuracy("host/seeds_gain", 1522, "accuracy that seeds add", low=-1.0).asks(
            "How much accuracy is lost when all seeds are switched off?"
        )
    )
    synergy: Mean = reports(
        Metric.accuracy("host/synergy", 1523, "synergy of seeds", low=None, high=None).asks(
            "How much more do seeds add together than each by itself? Below 0 they do the same work twice."
        )
    )


@inference_mode
def host_stats(hosts: Mapping[str, Tensor]) -> HostStats:
    """How hosts do; [T, B] each, see `events.GrowthStep`."""
    found = {name: sample(x) for name, x in hosts.items()}
    best = found["best"]

    def mean(name: str) -> Mean:
        return _mean(found[name])

    return HostStats(
        accuracy=spread(found["val_accuracy"]),
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


def _mean(s: Sample) -> Mean:
    return s.mean(s.values)
