"""Parts of events: results of replays of the policy, and columns that belong together.

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
    """Responses of the actor's layers to some hundred transitions, evenly spread over a rollout.

    By name [n, D] after the nonlinearity, in order. `last` [n, F] is the last layer's response before its nonlinearity, None without such a
    layer.
    """

    layers: Mapping[str, Tensor]
    last: Tensor | None


class StateGradients(NamedTuple):
    """Gradients of the loss at the actor's h, in the environments that begin a rollout with memory.

    Before the first step [layers, envs, H], and for the last layer after the last step [envs, H].
    """

    first: Tensor
    last: Tensor


class Copy(NamedTuple):
    """A copy of the actor's trunk without memory, from observations [n, ...] to features [n, F], and its parameters.

    The parameters are its own, so it may be trained. The observations [n, ...] are evenly spread over a rollout.
    """

    network: Callable[[Tensor], Tensor]
    parameters: Sequence[Tensor]
    observations: Tensor


class PolicyReplay(Protocol):
    """Forward passes of the present policy over the rollout that it learns from.

    Every method takes forward passes, and some take a backward pass. They do not change weights, their `.grad`, the optimizer or a random
    generator, and are valid only during the event.
    """

    def stored(self) -> Outputs:
        """Return the outputs used for acting."""

    def outputs(self) -> Outputs:
        """Return the outputs now; memory runs through the whole rollout from the state in which training begins it."""

    def without_memory(self) -> Outputs | None:
        """Return the outputs now without memory, for the transitions of `stored_part`; None for a feed-forward policy."""

    def stored_part(self) -> Outputs:
        """Return the outputs used for acting in the transitions of `without_memory`, a few hundred."""

    def activations(self) -> Activations:
        """Return the responses of its layers, with memory as it was stored."""

    def state_gradients(self) -> StateGradients | None:
        """Return gradients through time, over the environments of one minibatch; None for a feed-forward policy."""

    def copy(self) -> Copy:
        """Return a copy of the actor's trunk."""


class Scale(NamedTuple):
    """Statistics of a running normaliser after a rollout, which do not change until the next rollout.

    Mean and standard deviation of each entry, [...], the magnitude at which normalised entries are clipped, and these entries after
    clipping, [T, B, ...].
    """

    mean: Tensor
    std: Tensor
    limit: float
    normalized: Tensor


class Transitions(NamedTuple):
    """Outcomes of the steps of a rollout, [T, B] each; observations as checksums, float64.

    Attributes:
        inputs: checksums of the stored observation of each step.
        outcomes: checksums of the observation that each step returned; after the end of an episode, the first one of the next episode.
        finals: checksums of the last observations of episodes, NaN for other steps.
        rewards: reward that each step returned.
        informative: whether the observations are vectors of real numbers, which change in every step of a usual environment.
        sent, received: checksums of the actions sent to the environments and of the actions that arrived there; None if the
            source does not see both.
        resets: how often other code has reset an environment since the previous recorded rollout, while the trainer
            acted on the observation from before the reset.
        cast: largest change of an observation by the dtype of its space, relative to the observation's largest entry.
        whole: checksums of the outcomes truncated to whole numbers; None if that changes nothing, or they are not known.
    """

    inputs: Tensor
    outcomes: Tensor
    finals: Tensor
    rewards: Tensor
    informative: bool
    sent: Tensor | None = None
    received: Tensor | None = None
    resets: int = 0
    cast: float = 0.0
    whole: Tensor | None = None


@dataclass(frozen=True, slots=True)
class RolloutActions:
    """Actions of a rollout whose targets are not known; the attributes are named as in `RolloutEnd`.

    Attributes:
        drawn: the distributions are certainly those that the actions were drawn from.
    """

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
    drawn: bool = False
    range_use: tuple[float, float] | None = None


class Shard(NamedTuple):
    """A part of a minibatch: its number of independent samples, and the gradient of its mean loss.

    The samples are rows, or whole sequences if the policy has memory. The gradient [d] has all parameters one after the other, zero for
    parameters without one.
    """

    samples: int
    gradient: Tensor


class CollectionReplay(NamedTuple):
    """Passes of the policy, as it collected a rollout, over that rollout's inputs, and over the inputs of known mistakes.

    Attributes:
        values, actions: [T, B], and by head [T, B] or [T, B, D], of the rollout.
        rows: [N], numbers of its transitions, counted time by time, in the order of the outputs.
        outputs: (name of a hypothesis of `equations.replayed_outputs`, or nothing for the stored inputs) -> outputs now, with `values`;
            None if the hypothesis does not apply.
        has_modes: whether the policy has layers that work differently in training.
    """

    values: Tensor
    actions: Mapping[str, Tensor]
    rows: Tensor
    outputs: Callable[[str], Outputs | None]
    has_modes: bool = False


class FirstMinibatch(NamedTuple):
    """The first minibatch of an update, evaluated by the trainer with the weights that collected its rollout, whose ratios should be 1.

    Attributes:
        stored, trained: [N], log-probabilities at collection, and as the trainer computes them now.
        passes: (name of a hypothesis of `equations.replayed_outputs`) -> [N], log-probabilities that this mistake in training
            would give; None if it does not apply. Valid only during the event.
    """

    stored: Tensor
    trained: Tensor
    passes: Callable[[str], Tensor | None]


class UsedAdvantages(NamedTuple):
    """Advantages of the first minibatch as they multiply its ratios of 1, from a trainer that does not expose them.

    Attributes:
        raw, used: [N], the rollout's advantages, and -N times the gradient of the mean loss at each log-probability.
        normalized: whether they should be normalised over the minibatch.
        valid: [N], bool: rows that are not padding; None if every row counts.
        rollout: advantages of all rows of the rollout, any shape.
        environments: [N], int: environment of each row; None if it is not known.
    """

    raw: Tensor
    used: Tensor
    normalized: bool
    valid: Tensor | None = None
    rollout: Tensor | None = None
    environments: Tensor | None = None
