"""Hosts: how well they have learned, and how much larger they are than they were. T steps, B environments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from esper_telemetry.core.group import MetricGroup
from esper_telemetry.core.metric import Metric, reports
from esper_telemetry.core.record import Level
from esper_telemetry.core.reduction import Max, Mean, Moments
from esper_telemetry.metrics.actions import Sample, sample, spread, where_any


@dataclass(frozen=True, slots=True)
class HostStats(MetricGroup):
    """How hosts do, over all epochs of the update."""

    accuracy: Moments = reports(
        Metric(
            key="host/accuracy",
            number=1635,
            unit="accuracy",
            question="How well do hosts do on validation data, seeds included, on average over episodes?",
            low=0.0,
            high=1.0,
            level=Level.MINIMAL,
        ),
        Metric(
            key="host/accuracy_std",
            number=1687,
            unit="accuracy",
            question="How much do hosts, and epochs of an episode, differ in accuracy?",
            of="std",
            low=0.0,
        ),
    )
    best: Max = reports(
        Metric(
            key="host/accuracy_best",
            number=1636,
            unit="accuracy",
            question="What is the best accuracy that a host has had?",
            low=0.0,
            high=1.0,
        )
    )
    stale: Mean = reports(
        Metric(
            key="host/epochs_since_best",
            number=1637,
            unit="epochs",
            question="How long is it since hosts were at their best?",
            low=0.0,
        )
    )
    loss: Mean = reports(
        Metric(
            key="host/loss",
            number=1641,
            unit="nats",
            question="What is the loss on validation data?",
            low=0.0,
            undefined="no loss was finite",
        )
    )
    train_loss: Mean = reports(
        Metric(
            key="host/train_loss",
            number=1688,
            unit="nats",
            question="What is the loss on training data?",
            low=0.0,
            undefined="no loss was finite",
        )
    )
    train_accuracy: Mean = reports(
        Metric(
            key="host/train_accuracy",
            number=1689,
            unit="accuracy",
            question="How well do hosts do on training data? Far above `host/accuracy`: they learn by heart.",
            low=0.0,
            high=1.0,
        )
    )
    norm: Mean = reports(
        Metric(
            key="host/grad_norm",
            number=1690,
            unit="gradient norm",
            question="How large are the hosts' gradients before clipping?",
            low=0.0,
            undefined="no gradient was finite",
        )
    )
    growth: Mean = reports(
        Metric(
            key="host/growth_ratio",
            number=1644,
            unit="ratio",
            question="How many parameters do hosts have with their seeds, over those without?",
            low=1.0,
        )
    )
    gain: Mean = reports(
        Metric(
            key="host/seeds_gain",
            number=1522,
            unit="accuracy",
            question="How much accuracy is lost when all seeds are switched off?",
            low=-1.0,
            high=1.0,
        )
    )
    synergy: Mean = reports(
        Metric(
            key="host/synergy",
            number=1523,
            unit="accuracy",
            question="How much more do seeds add together than each by itself? Below 0 they do the same work twice.",
        )
    )


@torch.inference_mode()
def host_stats(hosts: Mapping[str, Tensor]) -> HostStats:
    """How hosts do; [T, B] each, see `telemetry.GrowthStep`."""
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
