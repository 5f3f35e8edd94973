"""Equations of the transitions: the observation that a step returned is the next one acted on, with the reward of that step.

Observations are compared by checksums, one number each, so that large ones need not be kept.

Shapes: T steps, B environments.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

from esper_telemetry.core.arrays import ArrayLike, as_mask, as_tensor
from esper_telemetry.core.borders import checked_arguments
from esper_telemetry.core.lazy import Tensor, inference_mode, torch
from esper_telemetry.equations.comparison import EquationCheck, compare, explained, unchecked
from esper_telemetry.equations.equation import Equation, mistake, variant
from esper_telemetry.equations.log_probs import shifted
from esper_telemetry.metrics.statistics import same_shape

MAX_CHECKSUM_ENTRIES = 256
"""Entries of an observation that its checksum is taken of, evenly spread."""

MAX_DELAY_STEPS = 32
"""Steps after which an action may arrive."""

MIN_FROZEN_STEPS = 64
"""Steps within episodes without any change from which on observations count as never updated."""


def checksums(observations: Tensor) -> Tensor:
    """Return a number for each observation, float64: of [T, B, ...] in [T, B]. Equal observations have equal ones."""
    rows = observations.reshape(*observations.shape[:2], -1)
    rows = rows[..., :: max(1, -(-rows.shape[-1] // MAX_CHECKSUM_ENTRIES))].double()
    return (rows * _weights(rows.shape[-1], rows.device)).sum(-1)


@lru_cache(maxsize=16)
def _weights(count: int, device: torch.device) -> Tensor:
    """Weights [count] of the entries of an observation; kept, because each would be four more operations of a GPU in every update."""
    place = torch.arange(1, count + 1, dtype=torch.float64, device=device)
    return 1.0 + place.sin().abs()


def informative(observations: Tensor) -> bool:
    """Return whether observations [T, B, ...] are vectors of real numbers, which stay the same in no step of a usual environment."""
    if not observations.is_floating_point() or observations.dim() != 3 or observations.shape[-1] < 2:
        return False
    return bool((observations != observations.round()).any())


@dataclass(frozen=True, slots=True)
class TransitionInputs:
    """Checksums of observations, [T, B] float64.

    Attributes:
        inputs: that were stored for each step.
        outcomes: that each step returned: after an end the first one of the next episode.
        finals: last ones of the episodes that ended in each step; NaN elsewhere.
    """

    inputs: Tensor
    outcomes: Tensor
    finals: Tensor


def _final_observations(columns: TransitionInputs) -> Tensor | None:
    ended = ~columns.finals.isnan()
    return torch.where(ended, columns.finals, columns.outcomes)[:-1] if bool(ended[:-1].any()) else None


def _sometimes_updated(columns: TransitionInputs) -> Tensor | None:
    repeated = columns.inputs[1:] == columns.inputs[:-1]
    return None if bool(repeated.all()) else torch.where(repeated, columns.inputs[:-1], columns.outcomes[:-1])


def _other_environment(columns: TransitionInputs) -> Tensor | None:
    """The outcomes of the order of environments that comes closest to the inputs."""
    envs = columns.inputs.shape[1]
    if envs < 2:
        return None
    place = torch.arange(envs, device=columns.inputs.device)
    orders = [torch.zeros_like(place), place.roll(1), place.roll(-1), place.flip(0)]
    rows = columns.outcomes[:-1]
    return min((rows[:, order] for order in orders), key=lambda x: float((x - columns.inputs[1:]).abs().sum()))


TRANSITIONS = Equation(
    name="transitions",
    rank=10,
    quantity="the observations",
    equation="o_{t+1} is what the environment returned after a_t, and the first one of a new episode after an end",
    source="Sutton and Barto 2018, figure 3.1",
    inputs="the observations that were stored, and those that the environments returned",
    compute=lambda columns: columns.outcomes[:-1],
    tolerance=0.01,
    advice="Compare what `env.step` returns with what is stored and acted on.",
    hypotheses=(
        mistake("never_updated", "those of the step before: they are never updated")
        .predicts("o_{t+1} = o_t", lambda columns: columns.inputs[:-1])
        .advises(
            "Assign what `env.step` returns to the observation that is acted on next, and look for wrappers "
            "that return an old one."
        )
        .cites("program: loop-obs_never_updated"),
        mistake("sometimes_updated", "those of the step before in some steps, in which they are not updated")
        .predicts("o_{t+1} = o_t in some steps", _sometimes_updated)
        .advises("Assign what `env.step` returns to the observation that is acted on next, in every step.")
        .cites("program: test_transitions"),
        mistake("stale", "those that the environment returned one step earlier")
        .predicts(
            "o_{t+1} = outcome of a_{t-1}", lambda columns: shifted(columns.outcomes[:-1], -1, columns.inputs[1:])
        )
        .advises("Act on what the last `env.step` returned, not on what was returned before it.")
        .cites("program: loop-acts_on_stale_obs"),
        mistake("next_stored", "those that the action led to, in place of those that it was chosen on")
        .predicts("o_t = outcome of a_t", lambda columns: columns.outcomes[1:])
        .advises("Store the observation before it is replaced by the next one.", source="program: loop-obs_alias"),
        mistake(
            "final_observation", "the last ones of the episodes that ended, where the first ones of the next belong"
        )
        .predicts("o_{t+1} = last observation of the episode that ended with a_t", _final_observations)
        .advises("After an end act on what `reset` returns; keep the last observation for the bootstrap only.")
        .cites("https://gymnasium.farama.org/main/api/vector/autoreset/"),
        mistake(
            "reset_elsewhere",
            "those from before a reset that the rollout did not make: something else uses its environments;",
        )
        .predicts("o_{t+1} = outcome of a_t, while the environment has begun another episode")
        .given(parameter="resets")
        .advises("Evaluate in environments of their own, made by a second call of the function that makes the first.")
        .cites(
            "https://stable-baselines3.readthedocs.io/en/master/guide/callbacks.html: a separate environment "
            "for evaluation"
        ),
        mistake("other_environment", "those of another environment")
        .predicts("o_{t+1,b} = outcome of a_{t,σ(b)}", _other_environment)
        .advises("Keep the order of environments; check reshapes of [T, B].", source="program: test_transitions"),
    ),
)


def _best_order(columns: tuple[Tensor, ...]) -> Tensor | None:
    """The reference in the order of environments that comes closest to the first column."""
    own, reference = columns[:2]
    if reference.shape[1] < 2:
        return None
    orders = [reference.roll(1, 1), reference.roll(-1, 1), reference.flip(1), reference[:, :1].expand_as(reference)]
    return min(orders, key=lambda x: float((x - own).abs().sum()))


def _axes_swapped(columns: tuple[Tensor, ...]) -> Tensor | None:
    """The reference [T, B] as it is when it was read as [B, T], or the other way round; the nearer of both."""
    own, reference = columns[:2]
    steps, envs = reference.shape
    if 1 in (steps, envs):
        return None
    swapped = [reference.t().reshape(steps, envs), reference.reshape(envs, steps).t()]
    return min(swapped, key=lambda x: float((x - own).abs().sum()))


def _any_order(columns: tuple[Tensor, Tensor]) -> Tensor | None:
    """The first column, where each step has the numbers of the reference in another order."""
    own, reference = columns
    same = own.shape[1] > 1 and bool((own.sort(1).values == reference.sort(1).values).all())
    return own if same else None


def _other_step(steps: int) -> Callable[[tuple[Tensor, ...]], Tensor | None]:
    def compute(columns: tuple[Tensor, ...]) -> Tensor | None:
        return shifted(columns[1], steps, columns[0])

    return compute


def _scaled(columns: tuple[Tensor, Tensor], arrived: Tensor) -> tuple[float, Tensor] | None:
    sent = columns[1]
    size = float(sent[::2].square().sum())
    factor = float((sent * arrived)[::2].sum()) / size if size else 0.0
    return (factor, factor * sent) if factor > 0 else None


def _clipped(columns: tuple[Tensor, ...], stored: Tensor) -> tuple[float, Tensor] | None:
    """Return the upper bound, and the rewards of the environments between the smallest and the largest stored one."""
    low, high = stored.min(), stored.max()
    paid = columns[1]
    return (float(high), paid.clamp(low, high)) if bool(((paid < low) | (paid > high)).any()) and high > low else None


MIN_CELL_COUNT = 20
"""Actions for each pair of choices from which on their independence is tested."""

MAX_REPLACED_SHARE = 0.5
"""Share of replaced actions from which on they are no longer mostly those that were chosen."""

MAX_DEPENDENCE = 3.0
"""Standard deviations of the chi-square statistic up to which choices count as independent."""

MOVES = (_other_step(-1), _other_step(1), _axes_swapped)
"""Other places of rewards, which may be scaled as well."""

STORED_REWARDS = Equation(
    name="stored_rewards",
    rank=12,
    quantity="the stored rewards",
    equation="r_t is what the environment paid for a_t",
    source="Sutton and Barto 2018, figure 3.1",
    inputs="the rewards that were stored, and those that the environments returned",
    compute=lambda columns: columns[1],
    advice="Compare the rewards that `env.step` returns with those that are stored.",
    hypotheses=(
        mistake("step_before", "those of the step before")
        .predicts("r_t = reward of a_{t-1}", _other_step(-1))
        .advises("Store the reward in the row of the action that earned it.")
        .cites("program: loop-reward_before_obs"),
        mistake("step_after", "those of the step after")
        .predicts("r_t = reward of a_{t+1}", _other_step(1))
        .advises("Store the reward in the row of the action that earned it.", source="program: test_transitions"),
        mistake("other_environment", "those of another environment")
        .predicts("r_{t,b} = reward of a_{t,σ(b)}", _best_order)
        .advises("Keep the order of environments; check reshapes of [T, B].", source="program: test_transitions"),
        mistake(
            "axes_swapped", "those of the environments with steps and environments exchanged when they were reshaped"
        )
        .predicts("r[t, b] = rewards.reshape(B, T)[b, t]", _axes_swapped)
        .advises("Transpose before you reshape: `reshape` and `view` do not move entries.")
        .cites("program: test_transitions"),
        variant("clipped", "those of the environments, clipped,")
        .fits("r_t = min(max(r, low), high)", "upper bound", _clipped)
        .cites("1312.5602, section 5: rewards clipped to -1, 0 and 1"),
        variant("scaled", "those of the environments, scaled,")
        .fits("r_t = c r", "factor", _scaled)
        .cites("1708.02596, section 4.2: reward scaling"),
        mistake("raw", "those before normalisation")
        .predicts("r_t is the reward before it is normalised", lambda columns: columns[2] if len(columns) > 2 else None)
        .advises("Store the normalised rewards that the environments return, or do not normalise them.")
        .cites("program: sb3_collection"),
    ),
)


def _steps_late(columns: tuple[Tensor, Tensor], arrived: Tensor) -> tuple[float, Tensor] | None:
    """Return the delay, from two steps on, after which the actions arrive; the first ones to arrive are older than the rollout."""
    for delay in range(2, min(MAX_DELAY_STEPS, len(arrived) // 2) + 1):
        if torch.allclose(arrived[delay:], columns[1][:-delay], atol=1e-6):
            return float(delay), torch.cat([arrived[:delay], columns[1][:-delay]])
    return None


def _unrelated(columns: tuple[Tensor, Tensor], arrived: Tensor) -> tuple[float, Tensor] | None:
    """Return the share of equal actions, and those that arrived, where these do not depend on those that were sent: the test is that of
    independence of a few choices.
    """
    sent = columns[1]
    rows, row = sent.reshape(-1).unique(return_inverse=True)
    cells, cell = arrived.reshape(-1).unique(return_inverse=True)
    count, size = len(rows) * len(cells), sent.numel()
    if min(len(rows), len(cells)) < 2 or size < MIN_CELL_COUNT * count:
        return None
    table = torch.bincount(row * len(cells) + cell, minlength=count).reshape(len(rows), len(cells)).double()
    expected = table.sum(1, keepdim=True) * table.sum(0, keepdim=True) / size
    freedom = (len(rows) - 1) * (len(cells) - 1)
    excess = float(((table - expected).square() / expected).sum()) - freedom
    return (
        (float((arrived == sent).double().mean()), arrived)
        if excess < MAX_DEPENDENCE * math.sqrt(2 * freedom)
        else None
    )


def _replaced(columns: tuple[Tensor, Tensor], arrived: Tensor, *, sticky: bool) -> tuple[float, Tensor] | None:
    """Return the share of replaced actions, and those that arrived, where some of a few choices are replaced whatever they were.

    `sticky`: each by the one that arrived before it, as published environments do.
    """
    sent = columns[1]
    differs = arrived != sent
    choices, counts = sent.unique(return_counts=True)
    share = float(differs.double().mean())
    if len(choices) < 2 or len(choices) * MIN_CELL_COUNT > sent.numel() or not 0 < share < MAX_REPLACED_SHARE:
        return None
    frequent = choices[counts >= MIN_CELL_COUNT / share]
    shares = [float(differs[sent == one].double().mean()) for one in frequent]
    others = [len(arrived[differs & (sent == one)].unique()) for one in frequent]
    # a choice that always becomes the same other one is renamed, not replaced by chance
    random = len(choices) == 2 or min(others, default=0) > 1
    if len(frequent) < 2 or not all(0 < one < MAX_REPLACED_SHARE for one in shares) or not random:
        return None
    repeats = torch.equal(arrived[1:][differs[1:]], arrived[:-1][differs[1:]])
    return (share, arrived) if repeats == sticky else None


EXECUTED = Equation(
    name="executed_actions",
    rank=13,
    quantity="the actions that arrive in the environments",
    equation="those that the policy chose for these environments in this step",
    source="Sutton and Barto 2018, figure 3.1",
    inputs="the actions that were sent to the environments, and those that arrived there",
    compute=lambda columns: columns[1],
    tolerance=0.01,
    advice="Follow the actions from the policy's output through all wrappers to `env.step`.",
    hypotheses=(
        mistake("other_environment", "those of other environments")
        .predicts("executed a_{t,b} = a_{t,σ(b)}", _any_order)
        .advises("Keep the order of environments; check reshapes of [T, B].", source="program: test_transitions"),
        mistake("step_before", "those of the step before")
        .predicts("executed a_t = a_{t-1}", _other_step(-1))
        .advises("Step the environments with the actions that were chosen for this step.")
        .cites("program: test_transitions"),
        mistake("late", "those of earlier steps,")
        .fits("executed a_t = a_{t-k}", "delay", _steps_late)
        .advises(
            "Step the environments with the actions of this step; where the delay is intended, show the agent "
            "those to come."
        )
        .cites("program: force-actions_late"),
        mistake("unrelated", "choices that do not depend on them,")
        .fits("executed a_t independent of a_t", "share of equal ones", _unrelated)
        .advises("Step the environments with the actions that the policy chose and the rollout stores.")
        .cites("program: script-actions_late"),
        mistake("replaced", "those that the policy chose, some of them replaced by others,")
        .fits("executed a_t = a_t or another action, by chance", "share", partial(_replaced, sticky=False))
        .advises(
            "Explore by the policy's own distribution: the log-probabilities are those of the actions that the "
            "policy chose."
        )
        .cites("program: test_transitions"),
        variant("sticky", "those that the policy chose, or by chance those that arrived in the step before,")
        .fits("executed a_t = a_t or executed a_{t-1}, by chance", "share", partial(_replaced, sticky=True))
        .cites("1709.06009, section 5.2: sticky actions"),
        variant("late_effect", "those of earlier steps, as far as what they change shows,")
        .predicts("o_{t+k+1} - o_{t+k} depends on a_t, and no earlier change does")
        .given(parameter="delay")
        .advises(
            "Follow the actions through all wrappers; where the delay is intended, show the agent those still "
            "to take effect."
        )
        .cites("program: test_effects"),
        variant("scaled", "those that the policy chose, scaled,")
        .fits("executed a_t = c a_t", "factor", _scaled)
        .cites("policies that act in [-1, 1], in environments with other bounds"),
    ),
)


@checked_arguments()
@inference_mode
def check_transitions(
    observations: ArrayLike,
    next_observations: ArrayLike | None = None,
    *,
    ended: ArrayLike,
    final_observations: ArrayLike | None = None,
    valid: ArrayLike | None = None,
) -> EquationCheck:
    """Return the comparison of each observation with what the step before it returned.

    Args:
        observations: [T, B, ...], that were acted on.
        next_observations: [T, B, ...], that each step returned, the first one of the next episode after an end; None if they were not
            kept: then only observations that never change are named.
        ended: [T, B], bool: the step taken at t ended its episode.
        final_observations: [T, B, ...], last ones of the episodes that ended, any numbers elsewhere.
        valid: [T, B], bool: rows that are transitions; None if every row is.

    Raises:
        ValueError: if shapes do not fit together.
    """
    own = as_tensor(observations)
    if own.dim() < 2:
        raise ValueError(f"observations have the shape [T, B, ...], got {list(own.shape)}")
    ends = as_mask(ended, own)
    returned = None if next_observations is None else as_tensor(next_observations, own)
    finals = None if final_observations is None else as_tensor(final_observations, own)
    same_shape(observations=own, next_observations=returned, final_observations=finals)
    assert ends is not None
    same_shape(ended=ends, observations=own.flatten(2)[..., 0] if own.dim() > 2 else own)
    sums = checksums(own)
    return compare_transitions(
        sums,
        None if returned is None else checksums(returned),
        ended=ends,
        finals=None if finals is None else torch.where(ends, checksums(finals), torch.nan),
        valid=as_mask(valid, sums),
        informative=informative(own),
    )


def compare_transitions(
    inputs: Tensor,
    outcomes: Tensor | None,
    *,
    ended: Tensor,
    finals: Tensor | None,
    valid: Tensor | None,
    informative: bool,
    resets: int = 0,
) -> EquationCheck:
    """Return the comparison of checksums; see `check_transitions`.

    Args:
        inputs, outcomes: [T, B], of the observations and of those that each step returned.
        ended: [T, B], bool.
        finals: [T, B], of the last observations of episodes, NaN where none ended.
        valid: [T, B], bool.
        informative: observations that do not change in any step are a mistake, and no property of the environment.
        resets: see `events.Transitions`.
    """
    if resets:
        return explained(TRANSITIONS, "reset_elsewhere", fitted=resets)
    ended, valid = ended.to(inputs.device), None if valid is None else valid.to(inputs.device)
    within = ~ended[:-1] if valid is None else ~ended[:-1] & valid[:-1] & valid[1:]
    frozen = bool(((inputs[1:] == inputs[:-1]) | ~within).all()) and int(within.sum()) >= MIN_FROZEN_STEPS
    if frozen and informative:
        return explained(TRANSITIONS, "never_updated")
    if outcomes is None or len(inputs) < 2:
        return unchecked(TRANSITIONS, "what the environments returned is not there")
    columns = TransitionInputs(inputs, outcomes, torch.full_like(inputs, torch.nan) if finals is None else finals)
    return compare(TRANSITIONS, columns, inputs[1:], valid=None if valid is None else valid[1:] & valid[:-1])


@checked_arguments()
@inference_mode
def check_rewards(
    rewards: ArrayLike, paid: ArrayLike, *, raw_rewards: ArrayLike | None = None, valid: ArrayLike | None = None
) -> EquationCheck:
    """Return the comparison of stored rewards [T, B] with those that each step of the environments returned.

    Args:
        rewards: that were stored, before anything is added to them.
        paid: that the environments returned, same shape.
        raw_rewards: before the environments normalised them, same shape; None if they do not.
        valid: same shape, bool; None if every entry counts.
    """
    stored = as_tensor(rewards).detach().double()
    others = [as_tensor(one).to(stored).detach() for one in (paid, raw_rewards) if one is not None]
    for one in others:
        same_shape(rewards=stored, paid=one)
    mask = as_mask(valid, stored)

    def compared(own: Tensor) -> EquationCheck:
        return compare(STORED_REWARDS, (own, *others), own, valid=mask)

    check = compared(stored)
    if check.explained:
        return check
    inner = slice(1, -1)  # what comes from outside the rollout is not known
    moved = (move((stored, others[0])) for move in MOVES)
    factors = (_scaled((stored[inner], to[inner]), stored[inner]) for to in moved if to is not None)
    scaled = (compared(stored / factor[0]) for factor in factors if factor is not None)
    return next((one for one in scaled if not one.matches and one.explanations), check)


@checked_arguments()
@inference_mode
def check_executed(sent: ArrayLike, received: ArrayLike) -> EquationCheck:
    """Return the comparison of the actions that arrived in the environments with those that were sent there.

    Args:
        sent, received: [T, B], choices, or checksums of vectors.
    """
    reference = as_tensor(sent).detach().double()
    own = as_tensor(received, reference).detach().double()
    same_shape(sent=reference, received=own)
    return compare(EXECUTED, (own, reference), own)
