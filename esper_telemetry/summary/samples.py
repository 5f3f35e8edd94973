"""What whole gradients and the optimizer's state tell of an update that was looked at closely."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from esper_telemetry.metrics.gradients import (
    concentration,
    gradient_decades,
    gradient_signs,
    gradient_zeros,
    minibatch_alignment,
    parameter_interference,
    shard_noise,
    successive_alignment,
)
from esper_telemetry.metrics.optimizer import adam_steps, state_reset, weight_growth
from esper_telemetry.record import Level
from esper_telemetry.summary.containment import Measurement
from esper_telemetry.summary.snapshot import GradientSample


def gradient_sample(sample: GradientSample, level: Level) -> Iterator[Measurement]:
    """Everything that is measured of a sample."""
    if sample.minibatches:
        yield from _first_minibatch(sample, level)
    if len(sample.minibatches) > 1:
        yield partial(minibatch_alignment, torch.stack(sample.minibatches))
    if len(sample.shards) > 1:
        yield partial(shard_noise, torch.stack(sample.shards), sample.samples)
    if sample.actor is not None and sample.critic is not None:
        yield partial(parameter_interference, [sample.actor], [sample.critic])
    if sample.states:
        yield from _optimizer(sample)


def _first_minibatch(sample: GradientSample, level: Level) -> Iterator[Measurement]:
    """How the entries of the gradient are spread over the network."""
    gradients = sample.minibatches[0].split(list(sample.numels))
    yield partial(gradient_zeros, gradients, sample.names)
    yield partial(gradient_signs, gradients)
    yield partial(concentration, gradients)
    if level >= Level.DEBUG:
        yield partial(gradient_decades, gradients, sample.names)


def _optimizer(sample: GradientSample) -> Iterator[Measurement]:
    """What the optimizer made of the gradients; its first step also tells whether the update goes on where the last one went."""
    first = sample.states[0]
    for state in sample.states:
        yield partial(adam_steps, state, sample.state_names)
    yield partial(state_reset, first.step, sample.previous_steps)
    if sample.initial_norm is not None:
        yield partial(weight_growth, [sample.states[-1].weights], sample.initial_norm)
    if sample.previous_steps is not None and first.gradient is not None:
        yield partial(successive_alignment, first.gradient, first.moment_before())
