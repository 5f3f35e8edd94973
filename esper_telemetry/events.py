"""Events that trainers, environments and adapters emit, and `Hooks`, which hand them to listeners.

Order within one update: `RolloutEnd`, `RecurrentForward` (if the policy has an LSTM or a GRU), `EpisodeEnd` (if any episode finished),
`BeforeUpdate`, `MinibatchStart` (before the first step), then per minibatch `HeadsBackward` (of several heads), `TrunkBackward`,
`BackwardEnd`, `OptimizerStep`, `MinibatchEnd`, then `MinibatchesEnd`, `BackwardsEnd`, `AfterUpdate` and at last `UpdateEnd`.

Hooks write to nothing that an event holds. Tensors of an event stay as they are until the update ends, so hooks can keep references instead
of copies; a trainer that replays captured graphs has to emit copies. Weights change with every step, and `.grad` fields of parameters may
not be kept. A policy that does not learn emits no `RolloutEnd`: values and log-probabilities that do not exist would be reported as zeros.

Shapes: T steps, B environments, N rows of a minibatch, M minibatches of R rows in all, A actions, D action dimensions, K parameter
tensors, H width of a recurrent state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.nn import GRU, LSTM
    from torch.optim import Optimizer

Event = TypeVar("Event")
Remover = Callable[[], None]


class Hooks:
    """Functions to call with events, keyed by the type of the event.

    Hooks run in the trainer's thread, in the order of registration, those registered with `last` after all others. An event type
    without hooks costs a dictionary look-up: ask `wants` before building an event that is expensive to build.
    """

    def __init__(self) -> None:
        self._entries: dict[type, list[tuple[bool, Callable[[Any], None]]]] = {}
        self._hooks: dict[type, tuple[Callable[[Any], None], ...]] = {}

    def on(self, event_type: type[Event], hook: Callable[[Event], None], *, last: bool = False) -> Remover:
        """Call `hook` with every event of exactly that type; returns the function that ends this.

        Args:
            last: call it after the hooks registered without `last`, whenever these were registered.
        """
        entry = (last, hook)
        entries = self._entries.setdefault(event_type, [])
        entries.append(entry)
        self._sort(event_type)

        def remove() -> None:
            if entry in entries:
                entries.remove(entry)
                self._sort(event_type)

        return remove

    def _sort(self, event_type: type) -> None:
        self._hooks[event_type] = tuple(hook for _, hook in sorted(self._entries[event_type], key=itemgetter(0)))
        if not self._hooks[event_type]:
            del self._hooks[event_type]

    def wants(self, event_type: type) -> bool:
        """Return whether anything listens to events of that type."""
        return event_type in self._hooks

    def emit(self, event: object) -> None:
        """Call the hooks of the event's type that were registered when it came, whatever they change."""
        for hook in self._hooks.get(type(event), ()):
            hook(event)


class ObservedSource:
    """A source that is observed: `hooks` emit its events, and a call ends the observation."""

    def __init__(self, hooks: Hooks, remove: Remover) -> None:
        self.hooks = hooks
        self._remove = remove

    def __call__(self) -> None:
        """End the observation; harmless when repeated."""
        self._remove()


class Outputs(NamedTuple):
    """Outputs of a policy for the N transitions of a rollout.

    Attributes:
        logits: per categorical head [N, A]; masked actions hold a large negative finite number.
        means, log_std: per Gaussian head [N, D], [N, D] or [D].
        relevance: per head that is not always relevant [N], bool.
        memory: [N, H], h of the actor's last recurrent layer after each step; None for a feed-forward policy.
        features: [N, F], inputs of the heads; None where they were not kept.
        values: [N], the critic's estimates; None where they were not asked for.
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
    order; `last` [n, F] is that of the last layer before its nonlinearity, None where there is no such layer.
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


NONE: Final[Mapping[str, Any]] = {}
"""Empty columns by name."""


@dataclass(frozen=True, slots=True)
class RunStart:
    """The start of a run, or of its continuation, before the first rollout.

    Attributes:
        config: settings of the trainer.
        facts: that detectors need: `precision`, `max_grad_norm`, `clip`, `normalize_advantages`, `total_steps`,
            `num_envs`, `num_steps`, `groups` and others as they apply.
        update, env_step, gradient_step: counts so far, 0 in a run that begins; None where the trainer does not know.
    """

    config: Mapping[str, Any]
    facts: Mapping[str, Any]
    update: int | None = None
    env_step: int | None = None
    gradient_step: int | None = None


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
        finals: of the last observations of episodes, NaN where none ended.
        rewards: that each step returned.
        informative: the observations are vectors of real numbers, which change in every step of a usual environment.
        sent, received: checksums of the actions that were sent to the environments, and of those that arrived there; None where the
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
class RolloutEnd:
    """A collected rollout with its advantages; nothing is normalised yet.

    Attributes:
        update: index of the update that this rollout feeds, from 1.
        env_step: environment steps collected so far, this rollout included.
        rewards, values, advantages, returns, log_probs: [T, B], float; rewards as they are learned from, that is scaled
            where the trainer normalises them.
        ended: [T, B], bool: the step taken at t ended its episode.
        terminated: [T, B], bool: it ended by termination, not by a time limit.
        valid: [T, B], bool; None where every row is.
        next_values: [T, B]: the critic's estimate of the state that follows t, 0 after termination.
        actions: per head [T, B] (categorical) or [T, B, D] (continuous).
        gamma: discount factor.
        raw_rewards: [T, B] as the environment gave them; None where they are the `rewards`.
        head_log_probs: per head [T, B], 0 where it is irrelevant: the parts of `log_probs`; empty where there is one head.
        action_masks: per restricted head [T, B, A], bool: allowed choices; other heads are left out.
        relevance: per head that is not always relevant [T, B], bool.
        logits: per categorical head [T, B, A] that were acted on; masked actions hold a large negative finite number.
        means: per Gaussian head [T, B, D] that were acted on.
        log_std: per Gaussian head [T, B, D] or [D] that was acted on.
        bounds: per bounded Gaussian head [2, D]: an action beyond these counts as at its lower or upper bound; in the units of
            `actions`, which are those before a squash.
        states: recurrent state of the actor in which each step began, [T, layers, parts, B, H], zero where an episode
            began; parts are h and c of an LSTM, h of a GRU. None for a feed-forward policy.
        scales: of the running normalisers that are on: `obs` and `ret`.
        observations: [T, B, ...] that were acted on; None where the source does not give them.
        transitions: what the environments returned; likewise.
        last_values: [K, B], estimates of the states after the last step, also where that ended its episode: then of the next one's first
            state. K rollouts of equal length, with a bootstrap after each, are joined; None where there is one, or it is not known.
        time_limits: [T, B], bool: steps that a time limit ended, from a source that does not see the critic's estimates of the states
            after them: their `next_values` are 0, or what the trainer takes instead; else None.
        ends_known: False where the source does not see which episodes ended and why, so that advantages cannot be checked.
        returns_known: False where the source does not see the returns: they are the advantages plus the values.
        seen_difference: name of the hypothesis why training computes other log-probabilities than acting, where the source has seen it
            itself; None where it has not.
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


@dataclass(frozen=True, slots=True)
class UpdateStart:
    """The start of an update whose rollout is not known, in place of `RolloutEnd`; `actions` are what is known of it."""

    update: int
    env_step: int
    actions: RolloutActions | None = None


@dataclass(frozen=True, slots=True)
class RecurrentForward:
    """Inputs and states of the actor's LSTM or GRU in a part of the rollout, before the update changes its weights.

    Attributes:
        cells: its layers, the first one first; their weights are valid during the call only.
        inputs: per layer [T, b, I], in the first b environments.
        states: per layer [T, 2, b, H]: its h and c before each step, zero where an episode began; of a GRU [T, 1, b, H], its h.
    """

    cells: Sequence[LSTM | GRU]
    inputs: Sequence[Tensor]
    states: Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class EpisodeEnd:
    """Episodes that finished in this rollout, in order.

    Attributes:
        returns: undiscounted sums of raw rewards.
        lengths: steps.
        times: steps of the rollout, from 0, with which they finished, to order episodes of several processes; may be empty.
    """

    env_step: int
    returns: Sequence[float]
    lengths: Sequence[int]
    times: Sequence[int] = ()


class Shard(NamedTuple):
    """A part of a minibatch: its independent samples (rows, or whole sequences where the policy has memory), and the gradient [d] of its
    mean loss, all parameters one after the other, zero where one has none.
    """

    samples: int
    gradient: Tensor


@dataclass(frozen=True, slots=True)
class MinibatchStart:
    """The start of the first minibatch of an update. `shards` returns the gradients of that many equal parts of it, fewer where it has
    fewer samples, at the present parameters; each costs a forward and a backward pass and changes nothing. Valid during the event only.
    """

    epoch: int
    step: int
    shards: Callable[[int], Sequence[Shard]]


class CollectionReplay(NamedTuple):
    """Passes of the policy, as it collected a rollout, over that rollout's inputs, and over those that a known mistake would use.

    Attributes:
        rollout: that was collected.
        rows: [N], numbers of its transitions, counted time by time, in the order of the outputs.
        outputs: (name of a hypothesis of `metrics.integrity.collection`, or nothing for the stored inputs) -> outputs now, with `values`;
            None where the hypothesis does not apply.
        has_modes: the policy has layers that work differently in training.
    """

    rollout: RolloutEnd
    rows: Tensor
    outputs: Callable[[str], Outputs | None]
    has_modes: bool = False


class FirstMinibatch(NamedTuple):
    """The first minibatch of an update, evaluated by the trainer at the weights that collected its rollout, whose ratios are to be 1.

    Attributes:
        stored, trained: [N], log-probabilities at collection, and those of the trainer now.
        passes: (name of a hypothesis of `metrics.integrity.rollouts.collection`) -> [N], log-probabilities that this mistake in training
            would give; None where it does not apply. Valid during the event only.
    """

    stored: Tensor
    trained: Tensor
    passes: Callable[[str], Tensor | None]


class UsedAdvantages(NamedTuple):
    """Advantages of the first minibatch as they multiply its ratios of 1, from a trainer that keeps them to itself.

    Attributes:
        raw, used: [N], those of the rollout, and -N times the gradient of the mean loss at each log-probability.
        normalized: they are to be normalised over the minibatch.
        valid: [N], bool: rows that are no padding; None where every row counts.
        rollout: of all rows of the rollout, any shape.
        environments: [N], int: environment of each row; None where it is not known.
    """

    raw: Tensor
    used: Tensor
    normalized: bool
    valid: Tensor | None = None
    rollout: Tensor | None = None
    environments: Tensor | None = None


@dataclass(frozen=True, slots=True)
class BeforeUpdate:
    """The moment before the first minibatch; the weights are those that training begins with. `collection` shows the policy what it
    acted on, and is valid during the event only; None from a source that cannot. `network` is the policy of both, which are then asked with
    a copy of it; without it they are asked as they are. `modes` says which of its modules were in training mode when it acted, in the order
    of `modules()`; None if they still are.
    """

    update: int
    policy: PolicyReplay
    collection: CollectionReplay | None = None
    network: nn.Module | None = None
    modes: tuple[bool, ...] | None = None


@dataclass(frozen=True, slots=True)
class AfterUpdate:
    """The moment after the last optimizer step of an update; `network` as of `BeforeUpdate`."""

    update: int
    policy: PolicyReplay
    network: nn.Module | None = None


@dataclass(frozen=True, slots=True)
class TrunkBackward:
    """Gradients of the losses at the trunk outputs, before they go further.

    Attributes:
        outputs: trunk outputs with graph: one where actor and critic share a trunk, else the actor's and the critic's.
        actor: gradient of the actor's loss (entropy bonus included) with respect to the actor's trunk output.
        critic: gradient of the critic's loss, times its coefficient, with respect to the critic's trunk output.
        shared: parameters that both losses train; empty for separate networks.
        valid: rows of the outputs that are no padding, [N], bool; None where the minibatch's own flags say so.
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
    """Gradients of the actor's loss at the trunk's output through each head of a policy with several, before they go further.

    Attributes:
        output: of the actor's trunk, [N, ...], with its graph.
        heads: by head, of the shape of the output; they add up to the gradient of the actor's loss, entropy bonus included.
        parameters: by name, those below the output, which all heads share.
    """

    epoch: int
    step: int
    output: Tensor
    heads: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]


class BackwardEnd(NamedTuple):
    """All gradients of a minibatch; they may or may not be clipped already.

    Attributes:
        parameters: trainable parameters by name; their `.grad` is valid during the call only.
        norms: [K] L2 norms before clipping, in the order of the parameters that have a gradient.
        names: names of these parameters.
        max_norm: limit of the global norm; None where nothing is clipped, and where parts of the network are clipped apart.
        heads: [H] L2 norms of the parts of shared parameters that belong to each head, in the order of the fact `heads`; None where
            each head has parameters of its own, in a group `head:<name>`.
        applied: [K] L2 norms after clipping, from a source that does not clip all gradients by one global norm; else None.
    """

    epoch: int
    step: int
    parameters: Mapping[str, Tensor]
    names: tuple[str, ...]
    norms: Tensor
    max_norm: float | None
    heads: Tensor | None = None
    applied: Tensor | None = None


class BackwardsEnd(NamedTuple):
    """All backward passes of an update: their `BackwardEnd`s, joined, also where the update breaks off.

    Attributes:
        epochs: epoch of each of the M passes.
        names, norms: of each pass.
        parameters: trainable parameters by name.
        max_norm: limit of the global norm; None as in `BackwardEnd`.
        heads, applied: of each pass; empty where none has any.
    """

    epochs: tuple[int, ...]
    names: tuple[tuple[str, ...], ...]
    norms: tuple[Tensor, ...]
    parameters: Mapping[str, Tensor]
    max_norm: float | None
    heads: tuple[Tensor | None, ...] = ()
    applied: tuple[Tensor | None, ...] = ()


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """A step that the optimizer has taken. The trainable parameters, by name, their `.grad`, clipped where it was, and the optimizer's
    state are valid during the call only.
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
        advantages: [N] the values that multiply the ratio (normalised where normalisation is on).
        values: [N] critic's estimates now; None where the source does not give them.
        old_values, returns: [N] at collection; likewise.
        losses: 0-d tensors `policy`, `value` (0.5 MSE, unscaled), and `entropy` (its negative mean) and `total` where the trainer
            computes them anyway.
        logits: per categorical head [N, A]; masked actions hold a large negative finite number.
        action_masks: per categorical head [N, A], bool; heads without masks are left out.
        log_std: per Gaussian head [N, D] or [D].
        valid: [N], bool; None where every row is. The bundled trainer emits no other rows, recurrent or not.
        head_log_ratios: per head [N], 0 where it is irrelevant: the parts of `log_ratio`.
        relevance: per head that is not always relevant [N], bool.
        means: per Gaussian head [N, D].
        rows: [N], which transitions of the rollout they are, counted time by time: t B + b; None where the trainer does not say.
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


class MinibatchesEnd(NamedTuple):
    """All minibatches of an update: their `MinibatchEnd`s, joined, also where the update breaks off.

    Building it once costs a third of building each of them. Columns are those of `MinibatchEnd` with R rows in place of N, those of one
    minibatch after those of another; `losses` are [M] by name, and `log_std` is [R, D].

    Attributes:
        epochs: epoch of each of the M minibatches.
        counts: rows of each, R in all.
        head_log_ratios: empty where there is one head.
        values, old_values, returns, means: from a source that emits no `MinibatchEnd`s beside it; None and empty from others.
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
    values: Tensor | None = None
    old_values: Tensor | None = None
    returns: Tensor | None = None
    means: Mapping[str, Tensor] = NONE


@dataclass(frozen=True, slots=True)
class UpdateEnd:
    """The end of an update, at which telemetry writes its record.

    Attributes:
        env_step: environment steps at which this update's data were collected.
        gradient_step: optimizer steps taken so far.
        learning_rate: as used in this update.
        seconds: wall time by phase: `environment`, `inference`, `update` and others as they apply.
        epochs: passes over the rollout; None where the source does not count them.
        coefficients: weights of the losses `value` and `entropy` in this update, where they are not constant facts of the run.
        cpu_seconds: processor time of this process by phase: `rollout`, its parts `environment` and `inference`, `update`.
        beta2: of Adam in this update; None for other optimizers, and where the source does not give it.
        learning_rates: by name, if optimizers or parameter groups differ in it; see `core.rates.rates_by_name`.
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
    """An evaluation between two updates: whole episodes with the likeliest actions; none of their steps count in `env_step`.

    Attributes:
        returns: undiscounted sums of raw rewards.
        lengths: steps.
    """

    env_step: int
    returns: Sequence[float]
    lengths: Sequence[int]


@dataclass(frozen=True, slots=True)
class Rollback:
    """An update that left weights that were not finite and is undone: the weights before it are restored, the optimizer's moments reset;
    `rollbacks` counts those of the run, this one included.
    """

    update: int
    env_step: int
    rollbacks: int
