"""Where to look for the first non-finite tensor when training raises."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from esper_telemetry.events import BackwardsEnd, MinibatchesEnd, RolloutEnd


def of_rollout(event: RolloutEnd) -> Iterator[tuple[str, Tensor]]:
    """What was collected and computed before the update."""
    for name in ("rewards", "values", "log_probs", "next_values", "advantages", "returns"):
        yield name, getattr(event, name)
    if event.states is not None:
        yield "states", event.states


def of_minibatches(event: MinibatchesEnd) -> Iterator[tuple[str, Tensor]]:
    """What the forward passes and the losses made of it."""
    yield "log_ratio", event.log_ratio
    yield from ((f"loss/{name}", loss) for name, loss in event.losses.items())


def of_backward(event: BackwardsEnd) -> Iterator[tuple[str, Tensor]]:
    """Gradients of the last pass, by their norms, and the parameters as they are now."""
    yield from ((f"gradient of {name}", norm) for name, norm in zip(event.names[-1], event.norms[-1], strict=True))
    yield from event.parameters.items()
