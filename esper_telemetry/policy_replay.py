"""What hooks may ask of a policy that is shown its rollout once more, before and after an update.

Shapes: N transitions of a rollout, n of them evenly spread, A actions, D action dimensions, F features, H width of a state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Outputs(NamedTuple):
    """What a policy says of the N transitions of a rollout.

    Attributes:
        logits: per categorical head [N, A]; masked actions hold a large negative finite number.
        means, log_std: per Gaussian head [N, D], [N, D] or [D].
        relevance: per head that is not always relevant [N], bool.
        memory: [N, H], h of the actor's last recurrent layer after each step; None for a feed-forward policy.
        features: [N, F], what the heads read; None where nobody kept it.
    """

    logits: Mapping[str, Tensor]
    means: Mapping[str, Tensor]
    log_std: Mapping[str, Tensor]
    relevance: Mapping[str, Tensor]
    memory: Tensor | None
    features: Tensor | None = None


class Activations(NamedTuple):
    """Responses of the actor's layers to some hundred transitions, evenly spread over a rollout.

    Attributes:
        layers: by name [n, D], after the nonlinearity, in order.
        last: [n, F], of the last layer before its nonlinearity; None where there is no such layer.
    """

    layers: Mapping[str, Tensor]
    last: Tensor | None


class StateGradients(NamedTuple):
    """Gradients of the loss at the actor's h, in the environments that begin a rollout with memory.

    Attributes:
        first: [layers, envs, H], before the first step.
        last: [envs, H], of the last layer after the last step.
    """

    first: Tensor
    last: Tensor


class Copy(NamedTuple):
    """A copy of the actor's trunk to play with, and observations.

    Attributes:
        network: [n, ...] to features [n, F], without memory.
        parameters: the copy's own.
        observations: [n, ...], evenly spread over a rollout.
    """

    network: Callable[[Tensor], Tensor]
    parameters: Sequence[Tensor]
    observations: Tensor


class Replay(Protocol):
    """The policy as it is, to be shown the rollout that it learns from once more.

    Every method takes forward passes, some a backward pass too. None touches weights, their `.grad`, the optimizer or a random
    generator, and all are valid during the event only.
    """

    def stored(self) -> Outputs:
        """What was acted on."""

    def outputs(self) -> Outputs:
        """What the policy says now; memory runs through the whole rollout from the state in which training begins it."""

    def without_memory(self) -> Outputs | None:
        """What it says now to some hundred transitions on their own, beside `stored_part`; None for a feed-forward policy."""

    def stored_part(self) -> Outputs:
        """What was acted on in the transitions of `without_memory`."""

    def activations(self) -> Activations:
        """How its layers respond, with memory as it was stored."""

    def state_gradients(self) -> StateGradients | None:
        """Through time, over the environments of one minibatch; None for a feed-forward policy."""

    def copy(self) -> Copy:
        """The actor's trunk, copied."""
