"""Records of one update: its events as they came, all minibatches joined, nothing measured yet.

`Update` holds the events `RolloutEnd` and `UpdateEnd` themselves, so their columns are declared once. The other records are named
tuples, which are built and pickled for the worker in half the time of frozen dataclasses.

Shapes: T steps, B environments, A actions; M minibatches of R rows in all, K parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch import Tensor

from esper_telemetry.core.event_parts import Transitions
from esper_telemetry.equations.optimizer_step import StepSettings
from esper_telemetry.events import NONE, RolloutEnd, UpdateEnd
from esper_telemetry.metrics.actions import ActionTotal
from esper_telemetry.metrics.gradients.actor_critic import LeafGradients
from esper_telemetry.metrics.lstm.gates import GRUWeights, LSTMWeights
from esper_telemetry.metrics.lstm.states import StateSize
from esper_telemetry.metrics.optimizer import AdamState
from esper_telemetry.updates.extensions import UpdateExtension
from esper_telemetry.updates.pickles import PolicyPickle
from esper_telemetry.updates.replays import UpdateReplay
from esper_telemetry.updates.steps import CheckedStep, LossTermGradients, PolicyPass

TARGET_COLUMNS: Final = ("rewards", "values", "next_values", "advantages", "ended", "valid")
"""Columns of a rollout from which advantages follow, and the advantages."""


class JoinedMinibatches(NamedTuple):
    """All minibatches of an update, joined: columns of `events.MinibatchEnd` with R rows instead of N, one minibatch after the other.

    Attributes:
        epochs: epoch of each of the M minibatches.
        counts: rows of each, R in all.
        losses: [M] by name.
        log_std: per Gaussian head [R, D].
        head_log_ratios: empty if the policy has one head.
        values, old_values, returns, means: in sampled updates, and if values are clipped; else None and empty.
    """

    epochs: tuple[int, ...]
    counts: tuple[int, ...]
    log_ratio: Tensor
    advantages: Tensor
    valid: Tensor | None
    losses: Mapping[str, Tensor]
    logits: Mapping[str, Tensor] = NONE
    action_masks: Mapping[str, Tensor] = NONE
    log_std: Mapping[str, Tensor] = NONE
    head_log_ratios: Mapping[str, Tensor] = NONE
    relevance: Mapping[str, Tensor] = NONE
    rows: Tensor | None = None
    advantage_rows: Tensor | None = None
    earlier: Tensor | None = None
    values: Tensor | None = None
    old_values: Tensor | None = None
    returns: Tensor | None = None
    means: Mapping[str, Tensor] = NONE

    @property
    def has_critic(self) -> bool:
        """True if the critic's columns are known."""
        return self.values is not None and self.old_values is not None and self.returns is not None


class ActionChoices(NamedTuple):
    """Choices of a categorical head in a rollout.

    Attributes:
        actions: [T, B], indices.
        counted: [T, B], bool: steps in which the head mattered; None if it always did.
    """

    actions: Tensor
    counted: Tensor | None

    def to(self, device: torch.device) -> ActionChoices:
        """Return the choices on that device: a checkpoint may restore them on another."""
        return ActionChoices(self.actions.to(device), None if self.counted is None else self.counted.to(device))


class Layer(NamedTuple):
    """One layer of an LSTM or a GRU in the first b environments; see `metrics.lstm.gates`.

    Attributes:
        weights: as they were when the rollout was collected.
        inputs: [T, b, I].
        hidden, memory: [T, b, H], its states h and c before each step; a GRU has h only.
    """

    weights: LSTMWeights | GRUWeights
    inputs: Tensor
    hidden: Tensor
    memory: Tensor | None = None


class RecurrentState(NamedTuple):
    """States of a recurrent policy in a rollout.

    Attributes:
        size: of the states in which the steps began.
        ages: [T, B], steps since the memory was reset.
        layers: of an LSTM or a GRU, in sampled updates.
    """

    size: StateSize
    ages: Tensor
    layers: tuple[Layer, ...] = ()


class Normalizer(NamedTuple):
    """Statistics of a running normaliser, [D] each, now and ten updates ago (None before that), and the number of entries that it cut."""

    mean: Tensor
    std: Tensor
    previous: tuple[Tensor, Tensor] | None
    cut: Tensor
    entries: Tensor | int


class RolloutContext(NamedTuple):
    """Earlier rollouts that a rollout is compared with, and sums over columns that are too large to send.

    Attributes:
        previous_choices: choices of each categorical head in the previous rollout; empty after the first.
        mean_actions: mean action of each Gaussian head in the previous rollout; None after the first.
        memory: of a recurrent policy.
        normalizers: running normalisers that are on.
        constant: [B], bool: environments that always gave the same observation; None if the observations are sent themselves.
        window: [t, B, d], the first steps of observations that are not sent; see `metrics.rollout.observation_window`.
        previous_targets: `TARGET_COLUMNS` of the first environment in the previous rollout, [6, T]; None after the first rollout,
            or if the update is not sampled.
    """

    previous_choices: Mapping[str, ActionChoices] = NONE
    mean_actions: Mapping[str, ActionTotal | None] = NONE
    memory: RecurrentState | None = None
    normalizers: Mapping[str, Normalizer] = NONE
    constant: Tensor | None = None
    window: Tensor | None = None
    previous_targets: Tensor | None = None


class Episodes(NamedTuple):
    """Episodes that finished, and the last hundred of the run.

    Attributes:
        returns, lengths: of episodes that finished in this update.
        recent_returns: of the last hundred.
        recent_ends: numbers that order their ends and increase over the run equally in all processes; None with one process.
    """

    returns: tuple[float, ...]
    lengths: tuple[int, ...]
    recent_returns: tuple[float, ...]
    recent_ends: tuple[float, ...] | None = None


class CollectedRows(NamedTuple):
    """Rollout columns in the rows of the minibatches, kept in sampled updates: [R] each, unless said otherwise.

    Attributes:
        advantages: before normalisation.
        actions: per categorical head.
        logits: per categorical head [R, A], that were acted on.
        means, log_std: per Gaussian head [R, D], that were acted on.
    """

    advantages: Tensor
    actions: Mapping[str, Tensor] = NONE
    logits: Mapping[str, Tensor] = NONE
    means: Mapping[str, Tensor] = NONE
    log_std: Mapping[str, Tensor] = NONE


class BackwardGradients(NamedTuple):
    """Backward passes with gradients in the same parameters, stacked: pickling one tensor is much faster than one per pass. The
    parameters of `BackwardEnd` are not sent.

    Attributes:
        epochs: epoch of each of the M passes.
        names: of the K parameters with a gradient.
        numels: their numbers of entries.
        norms: [M, K] before clipping.
        max_norm: limit of the global norm; None without clipping.
        leaves: if actor and critic share a trunk.
        applied: [M, K] of the gradients that the optimizer used, if they were measured.
        heads: [M, H] of the policy's heads that share parameters; None if each has its own.
    """

    epochs: tuple[int, ...]
    names: tuple[str, ...]
    numels: tuple[int, ...]
    norms: Tensor
    max_norm: float | None
    leaves: LeafGradients | None = None
    applied: Tensor | None = None
    heads: Tensor | None = None


class GradientSample(NamedTuple):
    """Complete gradients and optimizer states of a sampled update: d entries of K parameters, one after the other.

    Attributes:
        names, numels: of the K parameters.
        minibatches: [d] of each minibatch of the first epoch, before clipping.
        shards: [d] of each part of the first minibatch.
        samples: independent samples in each part.
        actor, critic: [s]: gradients of the two losses with respect to the parameters that they share.
        shared: names and numbers of entries of these parameters.
        heads: at DEBUG, per head of the policy [t]: gradient of the actor's loss through it, with respect to the trunk's parameters.
        trunk: names and numbers of entries of these parameters.
        states: of the optimizer after the sampled steps.
        state_names: parameters with a state.
        previous_steps: [K'], steps that the optimizer had counted in the previous sampled update.
        initial_norm: 0-d, of all weights when training began.
        measured: everything is measured already, and only evidence needs it.
    """

    names: tuple[str, ...]
    numels: tuple[int, ...]
    minibatches: tuple[Tensor, ...] = ()
    shards: tuple[Tensor, ...] = ()
    samples: tuple[int, ...] = ()
    actor: Tensor | None = None
    critic: Tensor | None = None
    shared: tuple[tuple[str, int], ...] = ()
    heads: Mapping[str, Tensor] = NONE
    trunk: tuple[tuple[str, int], ...] = ()
    states: tuple[AdamState, ...] = ()
    state_names: tuple[str, ...] = ()
    previous_steps: Tensor | None = None
    initial_norm: Tensor | None = None
    measured: bool = False

    def for_evidence(self) -> GradientSample:
        """Return the first minibatch alone, once all is measured."""
        first = self.minibatches[:1]
        rest: dict[str, Any] = {"shards": (), "samples": (), "actor": None, "critic": None, "heads": NONE, "states": ()}
        return self._replace(minibatches=first, measured=True, **rest)

    @property
    def entries(self) -> int:
        """Approximate number of entries in all its vectors."""
        vectors = len(self.minibatches) + len(self.shards) + 4 * len(self.states) + 2 * (self.actor is not None) + len(self.heads)
        return vectors * sum(self.numels)


class TrainingProgress(NamedTuple):
    """Progress of training with an update.

    Attributes:
        end: the event that ended it.
        env_steps: steps collected for it.
        elapsed: seconds of wall time, of the whole update.
        collected: the update that its data were collected for; None if the source does not say.
        sample_every: one update in so many is sampled; None if none is.
    """

    end: UpdateEnd
    env_steps: int
    elapsed: float
    collected: int | None = None
    sample_every: int | None = None


class Update(NamedTuple):
    """One update, complete or not. Missing parts are None or empty.

    Its tensors may be the trainer's own, which do not change until the next rollout is collected. `copied` returns lasting copies.

    Attributes:
        rollout: without columns that no metric reads or that `context` sums up: distributions, states, scales, many observations.
        context: earlier rollouts and sums that the rollout is compared with.
        episodes: that finished.
        minibatches: `values`, `old_values`, `returns` and `means` only in sampled updates and if values are clipped.
        features: [n, F], inputs of the heads in the first rows of the first minibatch.
        collected: rollout columns of the minibatches' rows, in sampled updates.
        gradients: of the backward passes.
        sample: whole gradients and optimizer states, in sampled updates.
        replay: the policy before and after the update; None if it was not sampled, or is measured already.
        step: of the optimizer, whose equations are to be checked; None without such a step, or if it is checked already.
        progress: None if the update did not end.
        extensions: records of plugins.
        sampled: the update was sampled: the rollout has all its columns, unless they are too large to send.
        origin: the first variable of a script or an own loop that was not finite, with its place and count; empty if all are.
    """

    rollout: RolloutEnd | None = None
    context: RolloutContext = RolloutContext()
    episodes: Episodes | None = None
    minibatches: JoinedMinibatches | None = None
    features: Tensor | None = None
    collected: CollectedRows | None = None
    gradients: tuple[BackwardGradients, ...] = ()
    sample: GradientSample | None = None
    replay: UpdateReplay | None = None
    step: CheckedStep | None = None
    progress: TrainingProgress | None = None
    extensions: tuple[UpdateExtension, ...] = ()
    sampled: bool = False
    origin: str = ""

    def __bool__(self) -> bool:
        """Return whether anything happened."""
        return bool(self.rollout or self.minibatches or self.gradients or self.progress)

    @property
    def is_counted(self) -> bool:
        """True if the update has ended, and its source has shown nothing else of it than episodes."""
        return self.progress is not None and not (self.rollout or self.minibatches or self.gradients or self.extensions)

    @property
    def on_device(self) -> bool:
        """True if tensors must be copied to the host before another process can receive them."""
        rollout = [] if self.rollout is None else [self.rollout.rewards]
        minibatches = [] if self.minibatches is None else [self.minibatches.log_ratio]
        backwards = [part.norms for part in self.gradients]
        on_host = all(tensor.is_cpu for tensor in rollout + minibatches + backwards)
        return not on_host or any(extension.on_device for extension in self.extensions)

    @property
    def gradient_steps(self) -> int:
        """Number of optimizer steps in the update."""
        return sum(len(part.epochs) for part in self.gradients)


KINDS: Final = (
    *(RolloutEnd, JoinedMinibatches, UpdateEnd, ActionChoices, Layer, RecurrentState, Normalizer, RolloutContext),
    *(Episodes, CollectedRows, LeafGradients, BackwardGradients, GradientSample, TrainingProgress, Update),
    *(ActionTotal, AdamState, CheckedStep, GRUWeights, LSTMWeights, PolicyPass, PolicyPickle, StateSize, StepSettings),
    *(LossTermGradients, Transitions, UpdateReplay),
)
"""Types of the records and of their parts, which pickles for the worker need not describe."""

Tree = TypeVar("Tree")


def mapped(tree: Tree, change: Callable[[Tensor], Tensor]) -> Tree:
    """Return the same tuples, mappings and dataclasses with `change` applied to every tensor."""
    copy: Any = tree
    match tree:
        case Tensor():
            copy = change(tree)
        case tuple():
            parts = [mapped(part, change) for part in tree]
            copy = type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
        case Mapping():
            copy = {name: mapped(part, change) for name, part in tree.items()}
        case _ if is_dataclass(tree) and not isinstance(tree, type):
            copy = replace(tree, **{field.name: mapped(getattr(tree, field.name), change) for field in fields(tree)})
    result: Tree = copy
    return result


def copied(tree: Tree) -> Tree:
    """Return the same tuples, mappings and dataclasses with every tensor copied."""
    return mapped(tree, Tensor.clone)


Table = TypeVar("Table", JoinedMinibatches, CollectedRows)


def in_grid(minibatches: JoinedMinibatches) -> JoinedMinibatches:
    """Return the same with [M, N, ...] instead of [R, ...], N the rows of the longest; shorter ones are padded with rows that do
    not count.
    """
    if minibatches.valid is None and len(set(minibatches.counts)) > 1:
        minibatches = minibatches._replace(valid=torch.ones_like(minibatches.log_ratio, dtype=torch.bool))
    return columns_in_grid(minibatches, minibatches.counts)


def column_in_grid(column: Tensor, counts: Sequence[int]) -> Tensor:
    """Return a column [R, ...] as a grid [M, N, ...] of minibatches with `counts` rows."""
    if len(set(counts)) == 1:
        return column.view(len(counts), -1, *column.shape[1:])
    return torch.nn.utils.rnn.pad_sequence(list(column.split(list(counts))), batch_first=True)


def columns_in_grid(table: Table, counts: tuple[int, ...]) -> Table:
    """Return the same with every column of rows, alone or one per head, as a grid of minibatches with `counts` rows."""

    def grid(column: Any) -> Any:
        if isinstance(column, Mapping):
            return {head: grid(part) for head, part in column.items()}
        return column_in_grid(column, counts) if isinstance(column, Tensor) else column

    return table._replace(**{name: grid(column) for name, column in table._asdict().items() if name != "losses"})
