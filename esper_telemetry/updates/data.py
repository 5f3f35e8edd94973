"""What one update leaves behind: tensors as they were, all minibatches joined, nothing computed yet.

Shapes: T steps, B environments, A actions; M minibatches, K gradients. All are tuples, because those travel to another process at a
fraction of what other objects cost.

Copies of what is made of tensors.

Minibatches of any sizes as rows of one grid, so that one call measures them all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch import Tensor

from esper_telemetry.metrics.actions import ActionTotal
from esper_telemetry.metrics.lstm.gates import LSTMWeights
from esper_telemetry.metrics.lstm.states import StateSize
from esper_telemetry.metrics.optimizer import AdamState

NONE: Final[Mapping[str, Any]] = {}
"""Of whatever is kept by name, where there is nothing of it."""


class ActionChoices(NamedTuple):
    """What a categorical head chose in a rollout.

    Attributes:
        actions: [T, B], indices.
        counted: [T, B], bool, where the head mattered; None where it always did.
    """

    actions: Tensor
    counted: Tensor | None


class Actions(NamedTuple):
    """What the heads chose, as far as it is looked at.

    Attributes:
        sizes: number of actions of each categorical head.
        chosen: per categorical head.
        previous: the same of the rollout before; empty after the first.
        action_masks: per head with masks [T, B, A], bool.
        continuous: what the Gaussian heads drew.
    """

    sizes: Mapping[str, int]
    chosen: Mapping[str, ActionChoices]
    previous: Mapping[str, ActionChoices]
    action_masks: Mapping[str, Tensor]
    continuous: Mapping[str, SampledActions] = NONE


class SampledActions(NamedTuple):
    """What a Gaussian head drew.

    Attributes:
        actions: [T, B, D].
        std: [T, B, D] or [D], under which they were drawn; None where nobody tells.
        bounds: [2, D], from where they count as at the bounds; None without any.
        counted: [T, B], bool, where the head mattered; None where it always did.
        previous: mean action of the rollout before; None after the first.
    """

    actions: Tensor
    std: Tensor | None
    bounds: Tensor | None
    counted: Tensor | None
    previous: ActionTotal | None


class Layer(NamedTuple):
    """One LSTM layer in the first b environments; see `metrics.lstm.gates_between`.

    Attributes:
        weights: as they were when the rollout was collected.
        inputs: [T, b, I].
        hidden, memory: [T, b, H], its states before each step.
    """

    weights: LSTMWeights
    inputs: Tensor
    hidden: Tensor
    memory: Tensor


class RecurrentState(NamedTuple):
    """What a recurrent policy remembered.

    Attributes:
        size: of the states in which the steps began.
        ages: [T, B], steps since memory began anew.
        layers: of an LSTM, where anyone looks at its gates.
    """

    size: StateSize
    ages: Tensor
    layers: tuple[Layer, ...] = ()


class Normalizer(NamedTuple):
    """Where a running normaliser stands, [D] each, now and ten updates ago (None before that), and how many of its entries it cut."""

    mean: Tensor
    std: Tensor
    previous: tuple[Tensor, Tensor] | None
    cut: Tensor
    entries: Tensor | int


class RolloutData(NamedTuple):
    """A rollout before anything is normalised, each [T, B], per head [T, B] or [T, B, D]; see `events.RolloutEnd`.

    Of the `observations` [T, B, ...], where they are few, it is asked which environments gave one all the time; where they are many,
    `constant` [B] says so already.
    """

    rewards: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor
    log_probs: Tensor
    next_values: Tensor
    ended: Tensor
    terminated: Tensor
    gamma: float
    valid: Tensor | None
    raw_rewards: Tensor | None = None
    actions: Actions | None = None
    memory: RecurrentState | None = None
    normalizers: Mapping[str, Normalizer] = NONE
    acted: Mapping[str, Tensor] = NONE
    head_log_probs: Mapping[str, Tensor] = NONE
    constant: Tensor | None = None
    observations: Tensor | None = None


class Episodes(NamedTuple):
    """Episodes that finished, and the last hundred of the run.

    Attributes:
        returns, lengths: of those that finished in this update.
        recent_returns: of the last hundred.
        recent_ends: when these ended, as numbers that grow over the run in the same way in all processes; None where there is one.
    """

    returns: tuple[float, ...]
    lengths: tuple[int, ...]
    recent_returns: tuple[float, ...]
    recent_ends: tuple[float, ...] | None = None


class Details(NamedTuple):
    """More of the rows of minibatches, where anyone looks at it: [R] each, unless said otherwise.

    Attributes:
        values, old_values, returns: the critic's estimates now and at collection, and its targets.
        raw_advantages: before normalisation; None where nobody tells which rows these are.
        actions: per categorical head.
        old_logits: per categorical head [R, A], that were acted on.
        means, old_means, old_log_std: per Gaussian head [R, D], now and as they were acted on.
    """

    values: Tensor
    old_values: Tensor
    returns: Tensor
    raw_advantages: Tensor | None = None
    actions: Mapping[str, Tensor] = NONE
    old_logits: Mapping[str, Tensor] = NONE
    means: Mapping[str, Tensor] = NONE
    old_means: Mapping[str, Tensor] = NONE
    old_log_std: Mapping[str, Tensor] = NONE


class Minibatches(NamedTuple):
    """The forward passes of an update: R rows, those of one minibatch after those of another.

    Attributes:
        epochs: epoch of each of the M minibatches.
        counts: rows of each, R in all.
        log_ratio, advantages: [R].
        valid: [R], bool; None where all rows count.
        losses: by name [M], as far as the trainer computes them.
        logits: per categorical head [R, A].
        action_masks: per categorical head with masks [R, A], bool.
        log_std: per Gaussian head [R, D].
        head_log_ratios: per head [R], where there are several: the parts of `log_ratio`.
        relevance: per head that is not always relevant [R], bool.
        rows: [R], which transitions of the rollout they are, counted time by time; None where nobody says.
        features: [n, F], what the heads read of the first rows of the first minibatch; None where nobody keeps them.
        details: in updates that are looked at closely.
    """

    epochs: tuple[int, ...]
    counts: tuple[int, ...]
    log_ratio: Tensor
    advantages: Tensor
    valid: Tensor | None
    losses: Mapping[str, Tensor]
    logits: Mapping[str, Tensor]
    action_masks: Mapping[str, Tensor]
    log_std: Mapping[str, Tensor]
    head_log_ratios: Mapping[str, Tensor] = NONE
    relevance: Mapping[str, Tensor] = NONE
    features: Tensor | None = None
    details: Details | None = None
    rows: Tensor | None = None


class LeafGradients(NamedTuple):
    """The two losses' gradients at a trunk output that both use: norms and dot products, each [M]."""

    actor: Tensor
    critic: Tensor
    dots: Tensor | None


class BackwardGradients(NamedTuple):
    """Backward passes with gradients in the same parameters.

    Attributes:
        epochs: epoch of each of the M passes.
        names: of the K parameters with a gradient.
        numels: their numbers of entries.
        norms: [M, K] before clipping.
        max_norm: limit of the global norm; None where nothing is clipped.
        leaves: where actor and critic share a trunk.
        applied: [M, K] of the gradients that the optimizer used, where they were measured.
        heads: [M, H] of the policy's heads that share parameters; None where each has its own.
    """

    epochs: tuple[int, ...]
    names: tuple[str, ...]
    numels: tuple[int, ...]
    norms: Tensor
    max_norm: float | None
    leaves: LeafGradients | None
    applied: Tensor | None = None
    heads: Tensor | None = None


class GradientSample(NamedTuple):
    """Whole gradients and optimizer states of an update that is looked at closely: d entries of K parameters, one after the other.

    Attributes:
        names, numels: of the K parameters.
        minibatches: [d] of each minibatch of the first epoch, before clipping.
        shards: [d] of each part of the first minibatch.
        samples: independent samples in each part.
        actor, critic: [s]: gradients of the two losses with respect to the parameters that they share.
        states: of the optimizer after the steps that were looked at, and the names of their parameters.
        state_names: of the parameters that have a state.
        previous_steps: [K'], steps that the optimizer counted when it was looked at before.
        initial_norm: 0-d, of all weights when training began.
        measured: whether everything is measured already, and only evidence looks at it.
    """

    names: tuple[str, ...]
    numels: tuple[int, ...]
    minibatches: tuple[Tensor, ...] = ()
    shards: tuple[Tensor, ...] = ()
    samples: tuple[int, ...] = ()
    actor: Tensor | None = None
    critic: Tensor | None = None
    states: tuple[AdamState, ...] = ()
    state_names: tuple[str, ...] = ()
    previous_steps: Tensor | None = None
    initial_norm: Tensor | None = None
    measured: bool = False

    def for_evidence(self) -> GradientSample:
        """The first minibatch alone, when all is measured."""
        first = self.minibatches[:1]
        rest: dict[str, Any] = {"shards": (), "samples": (), "actor": None, "critic": None, "states": ()}
        return self._replace(minibatches=first, measured=True, **rest)

    @property
    def entries(self) -> int:
        """How many numbers it holds, about."""
        vectors = len(self.minibatches) + len(self.shards) + 4 * len(self.states) + 2 * (self.actor is not None)
        return vectors * sum(self.numels)


class TrainingProgress(NamedTuple):
    """Where training stands.

    Attributes:
        update: which one.
        env_steps: steps collected for it.
        learning_rate: as used in it.
        elapsed: seconds of wall time, of the whole update.
        seconds: of wall time, by phase.
        coefficients: weights of the losses.
        cpu_seconds: of processor time, by phase.
        collected: the update that its data were collected for; None where nobody told.
        sample_every: every how many updates one is looked at closely; None where none is.
        beta2: of Adam, as used in it; None where nobody told.
    """

    update: int
    env_steps: int
    learning_rate: float
    elapsed: float
    seconds: Mapping[str, float]
    coefficients: Mapping[str, float] = NONE
    collected: int | None = None
    cpu_seconds: Mapping[str, float] = NONE
    sample_every: int | None = None
    beta2: float | None = None


class Growth(NamedTuple):
    """Networks that grew in T steps of the environments, see `events.GrowthStep`.

    Attributes:
        hosts, rewards, gates: [T, B] each.
        seeds: [T, B, S] each.
        last: per step, whether episodes ended with it.
        horizon: steps of an episode.
        labels: names of the values of what is an index.
    """

    hosts: Mapping[str, Tensor]
    seeds: Mapping[str, Tensor]
    rewards: Mapping[str, Tensor]
    gates: Mapping[str, Tensor]
    last: tuple[bool, ...]
    horizon: int
    labels: Mapping[str, tuple[str, ...]]


class Snapshot(NamedTuple):
    """One update, as far as it got; what did not happen is None or empty.

    Its tensors may be the trainer's own: they stay as they are until the next rollout is collected, and `copied` gives some that last.
    """

    rollout: RolloutData | None = None
    episodes: Episodes | None = None
    minibatches: Minibatches | None = None
    gradients: tuple[BackwardGradients, ...] = ()
    progress: TrainingProgress | None = None
    sample: GradientSample | None = None
    growth: Growth | None = None

    def __bool__(self) -> bool:
        """Whether anything happened."""
        return bool(self.rollout or self.minibatches or self.gradients or self.progress)

    @property
    def on_device(self) -> bool:
        """Whether its tensors would have to be copied to the host before another process can have them."""
        rollout = [] if self.rollout is None else [self.rollout.rewards]
        minibatches = [] if self.minibatches is None else [self.minibatches.log_ratio]
        growth = [] if self.growth is None else [self.growth.hosts["score"]]
        return not all(tensor.is_cpu for tensor in rollout + minibatches + growth)

    @property
    def gradient_steps(self) -> int:
        """Optimizer steps that the update took."""
        return sum(len(part.epochs) for part in self.gradients)


KINDS: Final = (
    *(
        ActionChoices,
        Actions,
        SampledActions,
        Layer,
        RecurrentState,
        Normalizer,
        RolloutData,
        Episodes,
        Details,
        Minibatches,
        LeafGradients,
        BackwardGradients,
    ),
    *(GradientSample, TrainingProgress, Growth, Snapshot, ActionTotal, AdamState, LSTMWeights, StateSize),
)
"""What snapshots are made of here."""


Tree = TypeVar("Tree")


def copied(tree: Tree) -> Tree:
    """Tuples, mappings and whatever else they hold, with every tensor copied."""
    copy: Any = tree
    match tree:
        case Tensor():
            copy = tree.clone()
        case tuple():
            parts = map(copied, tree)
            copy = type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
        case Mapping():
            copy = {name: copied(part) for name, part in tree.items()}
    found: Tree = copy
    return found


Table = TypeVar("Table", Minibatches, Details)

OTHER = {"losses", "features", "details"}
"""What of minibatches is no column of rows."""


def in_grid(joined: Minibatches) -> Minibatches:
    """The same with [M, N, ...] in place of [R, ...], N the rows of the longest; shorter ones end in rows that do not count."""
    counts = joined.counts
    if joined.valid is None and len(set(counts)) > 1:
        joined = joined._replace(valid=torch.ones_like(joined.log_ratio, dtype=torch.bool))
    details = None if joined.details is None else _laid_out(joined.details, counts)
    return _laid_out(joined, counts)._replace(details=details)


def _laid_out(table: Table, counts: tuple[int, ...]) -> Table:
    columns = {name: column for name, column in table._asdict().items() if name not in OTHER}
    return table._replace(**{name: _column(column, counts) for name, column in columns.items()})


def _column(column: Any, counts: tuple[int, ...]) -> Any:
    """A column, or one per head; anything else as it is."""
    if isinstance(column, Mapping):
        return {head: _grid(part, counts) for head, part in column.items()}
    return _grid(column, counts) if isinstance(column, Tensor) else column


def _grid(column: Tensor, counts: tuple[int, ...]) -> Tensor:
    if len(set(counts)) == 1:
        return column.view(len(counts), -1, *column.shape[1:])
    return torch.nn.utils.rnn.pad_sequence(list(column.split(list(counts))), batch_first=True)
