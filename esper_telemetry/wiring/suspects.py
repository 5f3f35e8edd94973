"""Where to look for the first non-finite tensor when training raises."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from esper_telemetry.events import BackwardEnd, MinibatchEnd, RolloutEnd


class Suspects:
    """The tensors of the update under way, in forward order."""

    def __init__(self) -> None:
        self._rollout: RolloutEnd | None = None
        self._minibatch: MinibatchEnd | None = None
        self._backward: BackwardEnd | None = None

    def keep_rollout(self, event: RolloutEnd) -> None:
        """A new update: its minibatches are still to come."""
        self._rollout, self._minibatch = event, None

    def keep_minibatch(self, event: MinibatchEnd) -> None:
        """The latest minibatch."""
        self._minibatch = event

    def keep_backward(self, event: BackwardEnd) -> None:
        """The latest gradients, and the parameters."""
        self._backward = event

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors: rollout, minibatch, gradient norms, parameters."""
        if self._rollout is not None:
            for name in ("rewards", "values", "log_probs", "next_values", "advantages", "returns"):
                yield name, getattr(self._rollout, name)
        if self._minibatch is not None:
            yield "log_ratio", self._minibatch.log_ratio
            yield from ((f"loss/{name}", loss) for name, loss in self._minibatch.losses.items())
        if self._backward is not None:
            norms = zip(self._backward.names, self._backward.norms, strict=True)
            yield from ((f"gradient of {name}", norm) for name, norm in norms)
            yield from self._backward.parameters.items()
