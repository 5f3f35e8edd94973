"""Candidates for the first non-finite tensor when training raises."""

from __future__ import annotations

from collections.abc import Iterator

from esper_telemetry.events import BackwardsEnd, MinibatchesEnd, RolloutEnd
from esper_telemetry.failure import Candidate


def of_rollout(event: RolloutEnd) -> Iterator[Candidate]:
    """The rollout, collected and computed before the update."""
    if event.observations is not None:
        yield Candidate("observations", event.observations, environments=1)
    for name in ("rewards", "values", "log_probs", "next_values", "advantages", "returns"):
        yield Candidate(name, getattr(event, name), environments=1)
    if event.states is not None:
        yield Candidate("states", event.states)


def of_minibatches(event: MinibatchesEnd) -> Iterator[Candidate]:
    """Results of the forward passes, and the losses."""
    for name, scores in event.logits.items():
        yield Candidate(f"logits of {name}", scores)
    yield Candidate("log_ratio", event.log_ratio)
    yield from (Candidate(f"loss/{name}", loss) for name, loss in event.losses.items())


def of_backward(event: BackwardsEnd) -> Iterator[Candidate]:
    """Gradients of the last pass, by their norms, and the parameters as they are now."""
    yield from (
        Candidate(f"gradient of {name}", norm) for name, norm in zip(event.names[-1], event.norms[-1], strict=True)
    )
    yield from (Candidate(name, parameter) for name, parameter in event.parameters.items())
