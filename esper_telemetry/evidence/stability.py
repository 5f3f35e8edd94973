"""Where numbers stopped being finite: the first tensor in forward order, and how far the others have come."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from esper_telemetry.summary import Snapshot

MOST_INDICES = 100


@dataclass(frozen=True, slots=True)
class Offender:
    """A tensor that is not finite everywhere.

    Attributes:
        name: of the tensor.
        shape: its shape.
        nan, infinite: how many entries are NaN, and how many infinite.
        indices: of the first hundred of them.
    """

    name: str
    shape: tuple[int, ...]
    nan: int
    infinite: int
    indices: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class StabilityReport:
    """What is not finite in an update.

    Attributes:
        first: name of the first tensor in forward order that is not finite; empty if all are.
        offenders: it and those after it.
        largest: largest finite |entry| of every tensor, by name.
    """

    first: str
    offenders: tuple[Offender, ...]
    largest: dict[str, float]


def stability_report(snapshot: Snapshot) -> StabilityReport:
    """Looks at everything that an update left behind, in the order in which it was computed."""
    tensors = [(name, tensor) for name, tensor in _tensors(snapshot) if tensor.numel()]
    offenders = [offender for name, tensor in tensors for offender in _offences(name, tensor)]
    largest = {name: _largest(tensor) for name, tensor in tensors}
    return StabilityReport(
        offenders[0].name if offenders else "",
        tuple(offenders),
        {name: size for name, size in largest.items() if size is not None},
    )


def _tensors(snapshot: Snapshot) -> Iterator[tuple[str, Tensor]]:
    if snapshot.rollout is not None:
        for name in ("rewards", "values", "log_probs", "next_values", "advantages", "returns"):
            yield name, getattr(snapshot.rollout, name)
    minibatches = snapshot.minibatches
    if minibatches is not None:
        yield from ((f"logits of {head}", logits) for head, logits in minibatches.logits.items())
        yield from ((f"log_std of {head}", log_std) for head, log_std in minibatches.log_std.items())
        yield "log_ratio", minibatches.log_ratio
        yield "normalized advantages", minibatches.advantages
        yield from ((f"loss {name}", loss) for name, loss in minibatches.losses.items())
    for part in snapshot.gradients:
        yield from ((f"gradient norms of {name}", part.norms[:, k]) for k, name in enumerate(part.names))
    if snapshot.sample is not None and snapshot.sample.states:
        weights = snapshot.sample.states[-1].tensors()
        yield from ((f"weights of {name}", w) for name, w in zip(snapshot.sample.state_names, weights, strict=True))


def _offences(name: str, tensor: Tensor) -> Iterator[Offender]:
    bad = ~torch.isfinite(tensor)
    if not bad.any():
        return
    nan = int(torch.isnan(tensor).sum())
    indices = tuple(tuple(index) for index in bad.nonzero()[:MOST_INDICES].tolist())
    yield Offender(name, tuple(tensor.shape), nan, int(bad.sum()) - nan, indices)


def _largest(tensor: Tensor) -> float | None:
    finite = tensor[torch.isfinite(tensor)]
    return float(finite.abs().max()) if len(finite) else None
