"""Parts of events: what replays of the policy return, and columns that belong together.

Shapes: T steps, B environments, N rows, A actions, D action dimensions, H width of a recurrent state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Outputs(NamedTuple):
    """Outputs of a policy for the N transitions of a rollout.

    Attributes:
        logits: per categorical head [N, A]; masked actions hold a large negative finite number.
        means, log_std: per Gaussian head [N, D], [N, D] or [D].
        relevance: per head that is not always relevant [N], bool.
        memory: [N, H], h of the actor's last recurrent layer after each step; None for a feed-forward policy.
        features: [N, F], inputs of the heads; None if they were not kept.
        values: [N], the critic's estimates; None if they were not asked for.
    """

    logits: Mapping[str, Tensor]
    means: Mapping[str, Tensor]
    log_std: Mapping[str, Tensor]
    relevance: Mapping[str, Tensor]
    memory: Tensor | None
    features: Tensor | None = None
    values: Tensor | None = None


class Activations(NamedTuple):
    """Responses of the actor's layers to some hundred transitions, evenly spread over a rollout: by name [n, D] after the nonlinearity, in
    order; `last` [n, F] is the last layer's response before its nonlinearity, None if there is no such layer.
    """

    layers: Mapping[str, Tensor]
    last: Tensor | None


class StateGradients(NamedTuple):
    """Gradients of the loss at the actor's h in the environments that begin a rollout with memory: before the first step [layers, envs, H],
    and of the last layer after the last step [envs, H].
    """

    first: Tensor
    last: Tensor


class Copy(NamedTuple):
    """A copy of the actor's trunk without memory, from observations [n, ...] to features [n, F], its own parameters, which may be trained,
    and observations [n, ...] that are evenly spread over a rollout.
    """

    network: Callable[[Tensor], Tensor]
    parameters: Sequence[Tensor]
    observations: Tensor


class PolicyReplay(Protocol):
    """Forward passes of the policy, as it is now, over the rollout that it learns from.

    Every method takes forward passes, some a backward pass too. None touches weights, their `.grad`, the optimizer or a random
    generator, and all are valid during the event only.
    """

    def stored(self) -> Outputs:
        """Return the outputs that were acted on."""

    def outputs(self) -> Outputs:
        """Return the outputs now; memory runs through the whole rollout from the state in which training begins it."""

    def without_memory(self) -> Outputs | None:
        """Return the outputs now for some hundred transitions without memory, those of `stored_part`; None for a feed-forward policy."""

    def stored_part(self) -> Outputs:
        """Return the outputs that were acted on in the transitions of `without_memory`."""

    def activations(self) -> Activations:
        """Return the responses of its layers, with memory as it was stored."""

    def state_gradients(self) -> StateGradients | None:
        """Return gradients through time, over the environments of one minibatch; None for a feed-forward policy."""

    def copy(self) -> Copy:
        """Return a copy of the actor's trunk."""


class Scale(NamedTuple):
    """Statistics of a running normaliser after a rollout: mean and standard deviation of each entry, [...], the magnitude at which
    normalised entries are cut, and these entries after the cut, [T, B, ...]. All stay as they are until the next rollout.
    """

    mean: Tensor
    std: Tensor
    limit: float
    normalized: Tensor


class Transitions(NamedTuple):
    """Outcomes of the steps of a rollout, [T, B] each; observations as checksums, float64.

    Attributes:
        inputs: of the observations that were stored for each step.
        outcomes: of those that each step returned, after an end of the first one of the next episode.
        finals: of the last observations of episodes, NaN if none ended.
        rewards: that each step returned.
        informative: the observations are vectors of real numbers, which change in every step of a usual environment.
        sent, received: checksums of the actions that were sent to the environments, and of those that arrived there; None if the
            source does not see both.
        resets: how often something else has reset an environment since the rollout before whose transitions were recorded, and the trainer
            acted on the observation of before.
    """

    inputs: Tensor
    outcomes: Tensor
    finals: Tensor
    rewards: Tensor
    informative: bool
    sent: Tensor | None = None
    received: Tensor | None = None
    resets: int = 0


@dataclass(frozen=True, slots=True)
class RolloutActions:
    """Actions of a rollout whose targets are not known; the attributes are those of `RolloutEnd`."""

    log_probs: Tensor
    actions: Mapping[str, Tensor]
    ended: Tensor
    rewards: Tensor | None = None
    logits: Mapping[str, Tensor] = field(default_factory=dict)
    means: Mapping[str, Tensor] = field(default_factory=dict)
    log_std: Mapping[str, Tensor] = field(default_factory=dict)
    bounds: Mapping[str, Tensor] = field(default_factory=dict)
    relevance: Mapping[str, Tensor] = field(default_factory=dict)
    valid: Tensor | None = None
    observations: Tensor | None = None
    transitions: Transitions | None = None


class Shard(NamedTuple):
    """A part of a minibatch: its independent samples (rows, or whole sequences where the policy has memory), and the gradient [d] of its
    mean loss, all parameters one after the other, zero if one has none.
    """

    samples: int
    gradient: Tensor


class CollectionReplay(NamedTuple):
    """Passes of the policy, as it collected a rollout, over that rollout's inputs, and over those that a known mistake would use.

    Attributes:
        values, actions: [T, B], and by head [T, B] or [T, B, D], of the rollout.
        rows: [N], numbers of its transitions, counted time by time, in the order of the outputs.
        outputs: (name of a hypothesis of `equations.replayed_outputs`, or nothing for the stored inputs) -> outputs now, with `values`;
            None if the hypothesis does not apply.
        has_modes: the policy has layers that work differently in training.
    """

    values: Tensor
    actions: Mapping[str, Tensor]
    rows: Tensor
    outputs: Callable[[str], Outputs | None]
    has_modes: bool = False


class FirstMinibatch(NamedTuple):
    """The first minibatch of an update, evaluated by the trainer at the weights that collected its rollout, whose ratios are to be 1.

    Attributes:
        stored, trained: [N], log-probabilities at collection, and those of the trainer now.
        passes: (name of a hypothesis of `equations.replayed_outputs`) -> [N], log-probabilities that this mistake in training
            would give; None if it does not apply. Valid during the event only.
    """

    stored: Tensor
    trained: Tensor
    passes: Callable[[str], Tensor | None]


class UsedAdvantages(NamedTuple):
    """Advantages of the first minibatch as they multiply its ratios of 1, from a trainer that keeps them to itself.

    Attributes:
        raw, used: [N], those of the rollout, and -N times the gradient of the mean loss at each log-probability.
        normalized: they are to be normalised over the minibatch.
        valid: [N], bool: rows that are no padding; None if every row counts.
        rollout: of all rows of the rollout, any shape.
        environments: [N], int: environment of each row; None if it is not known.
    """

    raw: Tensor
    used: Tensor
    normalized: bool
    valid: Tensor | None = None
    rollout: Tensor | None = None
    environments: Tensor | None = None
