"""Events that trainers, environments and adapters emit on their `Hooks`, the functions to call with events.

Order within one update: `RolloutEnd`, `RecurrentForward` (if the policy has an LSTM or a GRU), `EpisodeEnd` (if any episode finished),
`BeforeUpdate`, `MinibatchStart` (before the first step). Then, per minibatch, `HeadsBackward` (with several heads), `TrunkBackward`,
`BackwardEnd`, `OptimizerStep`, `MinibatchEnd`. Then `AfterUpdate`, and finally `UpdateEnd`. An evaluation comes between two updates.

Hooks must not write to anything in an event. Tensors of an event do not change until the update ends, so hooks can keep references instead
of copies; a trainer that replays captured graphs has to emit copies. Weights change with every step, and hooks may not keep the `.grad`
of a parameter. A policy that does not learn emits no `RolloutEnd`, since its missing values and log-probabilities would be reported as 0.

Shapes: T steps, B environments, N rows of a minibatch, M minibatches of R rows in all, A actions, D action dimensions, K parameter
tensors, H width of a recurrent state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

Event = TypeVar("Event")
Remover = Callable[[], None]


class _Entry(NamedTuple):
    last: bool
    late: bool
    hook: Callable[[Any], None]


_is_last = attrgetter("last")


class Hooks:
    """Functions to call with events, keyed by the type of the event.

    Hooks run in the trainer's thread, in the order of registration; hooks registered with `last` run after all others. An event type
    without hooks costs a dictionary look-up: ask `wants` before building an expensive event.
    """

    def __init__(self) -> None:
        self._entries: dict[type, list[_Entry]] = {}
        self._hooks: dict[type, tuple[Callable[[Any], None], ...]] = {}
        self._wanted_now: set[type] = set()

    def on(self, event_type: type[Event], hook: Callable[[Event], None], *, last: bool = False, late: bool = False) -> Remover:
        """Call `hook` with every event of exactly that type; returns a function that ends this.

        Args:
            last: call it after the hooks registered without `last`, regardless of when these were registered.
            late: allow calling it after the update. If all hooks allow this, a source may keep references
                and build all events after the update, in a loop, which takes a third of the time.
        """
        entry = _Entry(last, late, hook)
        entries = self._entries.setdefault(event_type, [])
        entries.append(entry)
        self._sort(event_type)

        def remove() -> None:
            if entry in entries:
                entries.remove(entry)
                self._sort(event_type)

        return remove

    def _sort(self, event_type: type) -> None:
        self._hooks[event_type] = tuple([one.hook for one in sorted(self._entries[event_type], key=_is_last)])
        if not self._hooks[event_type]:
            del self._hooks[event_type]
        if all(one.late for one in self._entries[event_type]):
            self._wanted_now.discard(event_type)
        else:
            self._wanted_now.add(event_type)

    def wants(self, event_type: type) -> bool:
        """Return whether anything listens to events of that type."""
        return event_type in self._hooks

    def wants_now(self, event_type: type) -> bool:
        """Return whether a hook wants events of that type immediately."""
        return event_type in self._wanted_now

    def emit(self, event: object) -> None:
        """Call the hooks of the event's type that were registered when it arrived, even if they change the hooks."""
        for hook in self._hooks.get(type(event), ()):
            hook(event)


if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.nn import GRU, LSTM
    from torch.optim import Optimizer

    from esper_telemetry.core.event_parts import CollectionReplay, PolicyReplay, RolloutActions, Scale, Shard, Transitions

NONE: Final[Mapping[str, Any]] = {}
"""An empty mapping of columns."""


@dataclass(frozen=True, slots=True)
class RunStart:
    """The start of a run, or of its continuation, before the first rollout.

    Attributes:
        config: settings of the trainer.
        facts: facts for the detectors: `precision`, `max_grad_norm`, `clip`, `normalize_advantages`, `total_steps`,
            `num_envs`, `num_steps`, `groups` and others as they apply.
        update, env_step, gradient_step: counts so far, 0 in a new run; None if the trainer does not know.
    """

    config: Mapping[str, Any]
    facts: Mapping[str, Any]
    update: int | None = None
    env_step: int | None = None
    gradient_step: int | None = None


@dataclass(frozen=True, slots=True)
class RolloutEnd:
    """A collected rollout with its advantages, before normalisation.

    Attributes:
        update: index of the update that this rollout feeds, from 1.
        env_step: environment steps collected so far, including this rollout.
        rewards, values, advantages, returns, log_probs: [T, B], float; the rewards that are learned from, which are scaled
            if the trainer normalises them.
        ended: [T, B], bool: the step taken at t ended its episode.
        terminated: [T, B], bool: it ended by termination, not by a time limit.
        valid: [T, B], bool; None if every row is.
        next_values: [T, B]: the critic's estimate of the state that follows t, 0 after termination.
        actions: per head [T, B] (categorical) or [T, B, D] (continuous).
        gamma: discount factor.
        raw_rewards: [T, B] as the environment gave them; None if they equal `rewards`.
        head_log_probs: the parts of `log_probs`, per head [T, B], 0 if the head is irrelevant; empty if there is one head.
        action_masks: allowed choices, per restricted head [T, B, A], bool; other heads are left out.
        relevance: per head that is not always relevant [T, B], bool.
        logits: per categorical head [T, B, A], as used for acting; masked actions hold a large negative finite number.
        means: per Gaussian head [T, B, D], as used for acting.
        log_std: per Gaussian head [T, B, D] or [D], as used for acting.
        bounds: per bounded Gaussian head [2, D]: the environment clips actions to them; in the units of `actions`,
            before any squashing.
        states: recurrent state of the actor at the beginning of each step, [T, layers, parts, B, H], zero if an episode
            began; parts are h and c for an LSTM, h for a GRU. None for a feed-forward policy.
        scales: scales of the running normalisers that are on: `obs` and `ret`.
        observations: [T, B, ...] as used for acting; None if the source does not provide them.
        transitions: the returned values of the environments; None if the source does not provide them.
        last_values: [K, B], estimates of the states after the last step. If that step ended an episode, the state is the first one of the
            next episode. K rollouts of equal length, each with its bootstrap, are joined; None if there is one, or K is not known.
        time_limits: [T, B], bool: steps that a time limit ended, from a source that does not see the critic's estimates of the states
            after them; `next_values` then hold 0 there, or the trainer's substitute. None from other sources.
        ends_known: False if the source does not see which episodes ended and why, so that advantages cannot be checked.
        returns_known: False if the source does not see the returns; they are then the advantages plus the values.
        seen_difference: name of the hypothesis why training and acting compute different log-probabilities, or what the advantages are,
            if the source has observed this itself; else None.
        range_use: of actions that the environment received, if `bounds` are not those of the stored ones: standard deviation over half the
            range, mean over dimensions, and largest distance from the middle over half the range.
    """

    update: int
    env_step: int
    rewards: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor
    log_probs: Tensor
    ended: Tensor
    terminated: Tensor
    next_values: Tensor
    actions: Mapping[str, Tensor]
    gamma: float
    valid: Tensor | None = None
    raw_rewards: Tensor | None = None
    head_log_probs: Mapping[str, Tensor] = field(default_factory=dict)
    action_masks: Mapping[str, Tensor] = field(default_factory=dict)
    relevance: Mapping[str, Tensor] = field(default_factory=dict)
    logits: Mapping[str, Tensor] = field(default_factory=dict)
    means: Mapping[str, Tensor] = field(default_factory=dict)
    log_std: Mapping[str, Tensor] = field(default_factory=dict)
    bounds: Mapping[str, Tensor] = field(default_factory=dict)
    states: Tensor | None = None
    scales: Mapping[str, Scale] = field(default_factory=dict)
    observations: Tensor | None = None
    transitions: Transitions | None = None
    last_values: Tensor | None = None
    time_limits: Tensor | None = None
    ends_known: bool = True
    returns_known: bool = True
    seen_difference: str | None = None
    range_use: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class UpdateStart:
    """The start of an update whose rollout is not known, instead of `RolloutEnd`; `actions` holds the actions that are known.

    Without actions, the rollout may follow while the update is under way. An update that is not `traced` has only its start and end.
    """

    update: int
    env_step: int
    actions: RolloutActions | None = None
    traced: bool = True


@dataclass(frozen=True, slots=True)
class RecurrentForward:
    """Inputs and states of the actor's LSTM or GRU in a part of the rollout, before the update changes its weights.

    Attributes:
        cells: its layers, first to last; their weights are valid only during the call.
        inputs: per layer [T, b, I], in the first b environments.
        states: per layer, h and c before each step, [T, 2, b, H], or for a GRU h, [T, 1, b, H]; zero if an episode began.
    """

    cells: Sequence[LSTM | GRU]
    inputs: Sequence[Tensor]
    states: Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class EpisodeEnd:
    """Episodes that finished in this rollout, in order.

    Attributes:
        returns: undiscounted sums of raw rewards.
        lengths: steps per episode.
        times: the step of the rollout, from 0, at which each finished, to order episodes of several processes; may be empty.
    """

    env_step: int
    returns: Sequence[float]
    lengths: Sequence[int]
    times: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class MinibatchStart:
    """The start of the first minibatch of an update; valid only during the event. `shards` splits the minibatch into that many equal parts
    (fewer if it has fewer samples) and returns their gradients at the present parameters. Each part costs a forward and a backward pass and
    changes nothing.
    """

    epoch: int
    step: int
    shards: Callable[[int], Sequence[Shard]]


@dataclass(frozen=True, slots=True)
class BeforeUpdate:
    """The moment before the first minibatch, before any weight has changed.

    `collection` shows the policy the inputs that it acted on. It is valid only during the event, and None if the source cannot do this.
    `network` is the policy behind both; if it is given, telemetry works on a copy of it. `modes` says which of its modules were in
    training mode during collection, in the order of `modules()`; None if they still are.
    """

    update: int
    policy: PolicyReplay
    collection: CollectionReplay | None = None
    network: nn.Module | None = None
    modes: tuple[bool, ...] | None = None


@dataclass(frozen=True, slots=True)
class AfterUpdate:
    """The moment after the last optimizer step of an update; `network` as in `BeforeUpdate`."""

    update: int
    policy: PolicyReplay
    network: nn.Module | None = None


@dataclass(frozen=True, slots=True)
class TrunkBackward:
    """Gradients of the losses at the trunk outputs, before they are propagated further.

    Attributes:
        outputs: trunk outputs with graph: one if actor and critic share a trunk, else the actor's and the critic's.
        actor: gradient of the actor's loss (entropy bonus included) with respect to the actor's trunk output.
        critic: gradient of the critic's loss, times its coefficient, with respect to the critic's trunk output.
        shared: parameters that both losses train; empty for separate networks.
        valid: rows of the outputs that are not padding, [N], bool; None if the minibatch's own flags apply.
    """

    epoch: int
    step: int
    outputs: tuple[Tensor, ...]
    actor: Tensor
    critic: Tensor
    shared: Sequence[Tensor]
    valid: Tensor | None = None


@dataclass(frozen=True, slots=True)
class HeadsBackward:
    """Gradients of the actor's loss at the trunk's output through each of several heads, before they are propagated further.

    Attributes:
        output: output of the actor's trunk, [N, ...], with its graph.
        heads: per head, with the shape of the output; they add up to the gradient of the actor's loss, entropy bonus included.
        parameters: parameters below the output, which all heads share, by name.
    """

    epoch: int
    step: int
    output: Tensor
    heads: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]


class BackwardEnd(NamedTuple):
    """All gradients of a minibatch; they may or may not be clipped already.

    Attributes:
        parameters: trainable parameters by name; their `.grad` is valid only during the call.
        norms: [K] L2 norms before clipping, in the order of the parameters that have a gradient.
        names: names of these parameters.
        max_norm: limit of the norm; None if nothing is clipped.
        heads: [H] L2 norms of the parts of shared parameters that belong to each head, in the order of the fact `heads`; None if
            each head has its own parameters, in a group `head:<name>`.
        clipped_apart: names of the parameters in each part of the network that is clipped by its own norm, in the order of the clips;
            empty if all gradients are clipped together.
    """

    epoch: int
    step: int
    parameters: Mapping[str, Tensor]
    names: tuple[str, ...]
    norms: Tensor
    max_norm: float | None
    heads: Tensor | None = None
    clipped_apart: tuple[frozenset[str], ...] = ()


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """A step that the optimizer has taken. The trainable parameters, by name, their `.grad` (clipped if the trainer clips) and the
    optimizer's state are valid only during the call.
    """

    epoch: int
    step: int
    optimizer: Optimizer
    parameters: Mapping[str, Tensor]


class MinibatchEnd(NamedTuple):
    """A minibatch whose gradients are applied.

    Attributes:
        epoch: pass over the rollout, from 0.
        step: optimizer step within the update, from 0.
        log_ratio: [N] log-probability now minus at collection, summed over the heads that are relevant.
        advantages: [N] the values that multiply the ratio, after any normalisation.
        values: [N] critic's estimates now; None if the source does not provide them.
        old_values, returns: [N] at collection; None if the source does not provide them.
        losses: 0-d tensors `policy` and `value` (0.5 MSE, unscaled); also `entropy` (its negative mean) and `total` if the trainer
            computes them anyway.
        logits: per categorical head [N, A]; masked actions hold a large negative finite number.
        action_masks: per categorical head [N, A], bool; heads without masks are left out.
        log_std: per Gaussian head [N, D] or [D].
        valid: [N], bool; None if every row is. The bundled trainer emits only valid rows, recurrent or not.
        head_log_ratios: the parts of `log_ratio`, per head [N], 0 if the head is irrelevant.
        relevance: per head that is not always relevant [N], bool.
        means: per Gaussian head [N, D].
        rows: [N], their transitions in the rollout, counted time by time: t B + b; None if the trainer does not provide them.
        advantage_rows: [N], transitions that the advantages are of, if they are known to be others.
        earlier: [N], bool: rows that an earlier update was trained on, too; None if there are none, or the source does not know.
    """

    epoch: int
    step: int
    log_ratio: Tensor
    advantages: Tensor
    values: Tensor | None = None
    old_values: Tensor | None = None
    returns: Tensor | None = None
    losses: Mapping[str, Tensor] = NONE
    logits: Mapping[str, Tensor] = NONE
    action_masks: Mapping[str, Tensor] = NONE
    log_std: Mapping[str, Tensor] = NONE
    valid: Tensor | None = None
    head_log_ratios: Mapping[str, Tensor] = NONE
    relevance: Mapping[str, Tensor] = NONE
    means: Mapping[str, Tensor] = NONE
    rows: Tensor | None = None
    advantage_rows: Tensor | None = None
    earlier: Tensor | None = None


@dataclass(frozen=True, slots=True)
class UpdateEnd:
    """The end of an update, at which telemetry writes its record.

    Attributes:
        env_step: number of environment steps when this update's data had been collected.
        gradient_step: optimizer steps taken so far.
        learning_rate: as used in this update.
        seconds: wall time by phase: `environment`, `inference`, `update` and others as they apply.
        epochs: passes over the rollout; None if the source does not count them.
        coefficients: weights of the losses `value` and `entropy` in this update, and `clip`, the range of the ratio, if they are not
            constant facts of the run.
        cpu_seconds: processor time of this process by phase: `rollout`, its parts `environment` and `inference`, `update`.
        beta2: beta2 of Adam in this update; None for other optimizers, and if the source does not provide it.
        learning_rates: by name, if optimizers or parameter groups have different rates; see `core.rate_schedule.rates_by_name`.
    """

    update: int
    env_step: int
    gradient_step: int
    learning_rate: float
    seconds: Mapping[str, float]
    epochs: int | None = None
    coefficients: Mapping[str, float] = field(default_factory=dict)
    cpu_seconds: Mapping[str, float] = field(default_factory=dict)
    beta2: float | None = None
    learning_rates: Mapping[str, float | Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EvaluationEnd:
    """An evaluation between two updates: whole episodes with the most likely actions. Its steps do not count in `env_step`.

    Attributes:
        returns: undiscounted sums of raw rewards.
        lengths: steps per episode.
    """

    env_step: int
    returns: Sequence[float]
    lengths: Sequence[int]


@dataclass(frozen=True, slots=True)
class Rollback:
    """An update that was undone because it left non-finite weights: the weights before it are restored and the optimizer's moments reset.

    `rollbacks` counts the rollbacks of the run, including this one.
    """

    update: int
    env_step: int
    rollbacks: int
