"""Whether anything in a whole update is NaN or infinite."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from esper_telemetry.group import Sum
from esper_telemetry.metrics.integrity import Numerics, nonfinite_count
from esper_telemetry.summary.snapshot import Snapshot


def nonfinite_in(snapshot: Snapshot) -> Numerics:
    """Entries that are not finite in the rollout, the forward passes, the losses, the gradients and, where kept, the weights.

    Of gradients whose norms alone are known, each tensor counts once per step.
    """
    total: Tensor | float = 0.0
    for tensors, valid in _parts(snapshot):
        total = total + nonfinite_count(tensors, valid=valid).nonfinite.value
    return Numerics(Sum(total))


def _parts(snapshot: Snapshot) -> Iterator[tuple[list[Tensor], Tensor | None]]:
    """Tensors, with the rows of them that count."""
    rollout, minibatches, sample = snapshot.rollout, snapshot.minibatches, snapshot.sample
    if rollout is not None:
        yield [rollout.rewards, rollout.log_probs, rollout.values, rollout.advantages], rollout.valid
    if minibatches is not None:
        yield [minibatches.log_ratio, minibatches.advantages], minibatches.valid
        yield list(minibatches.losses.values()), None
    yield [part.norms for part in snapshot.gradients], None
    if sample is not None and sample.states:
        yield [sample.states[-1].weights], None
