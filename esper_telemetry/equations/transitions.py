"""Equations of the transitions: the policy acts next on the observation that a step returned, and the step's reward is stored.

Observations are compared by checksums, one number each, so that large observations need not be kept.

Shapes: T steps, B environments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache, partial

from esper_telemetry.core.arrays import ArrayLike, as_mask, as_tensor
from esper_telemetry.core.lazy import Tensor, inference_mode, torch
from esper_telemetry.core.requirements import checked_arguments
from esper_telemetry.equations.comparison import EquationCheck, compare, explained, other_readings, unchecked
from esper_telemetry.equations.equation import Equation, mistake, variant
from esper_telemetry.equations.log_probs import shifted
from esper_telemetry.metrics.statistics import same_shape

MAX_CHECKSUM_ENTRIES = 256
"""Number of evenly spaced entries of an observation in its checksum."""

MAX_DELAY_STEPS = 32
"""Delays in steps that are tried for an action's arrival."""

MIN_LATE_ACTIONS = 16
"""Actions that must arrive late: fewer choices between two actions agree by chance in one of some thousand updates."""

MIN_FROZEN_STEPS = 64
"""Steps within episodes without a change after which observations count as never updated."""


def checksums(observations: Tensor) -> Tensor:
    """Return a float64 checksum of each observation: [T, B] for [T, B, ...]. Equal observations have equal checksums."""
    rows = observations.reshape(*observations.shape[:2], -1)
    rows = rows[..., :: max(1, -(-rows.shape[-1] // MAX_CHECKSUM_ENTRIES))].double()
    return (rows * _weights(rows.shape[-1], rows.device)).sum(-1)


@lru_cache(maxsize=16)
def _weights(count: int, device: torch.device) -> Tensor:
    """Weights [count] of the entries of an observation; cached, because computing them costs four GPU operations in every update."""
    place = torch.arange(1, count + 1, dtype=torch.float64, device=device)
    return 1.0 + place.sin().abs()


def informative(observations: Tensor) -> bool:
    """Return whether observations [T, B, ...] are vectors of real numbers, which usually change in every step."""
    if not observations.is_floating_point() or observations.dim() != 3 or observations.shape[-1] < 2:
        return False
    return bool((observations != observations.round()).any())


@dataclass(frozen=True, slots=True)
class TransitionInputs:
    """Checksums of observations, [T, B] float64.

    Attributes:
        inputs: stored observation of each step.
        outcomes: observation that each step returned; after an end, the next episode's first observation.
        finals: last observation of the episode that ended in each step; NaN elsewhere.
        whole: outcomes truncated to whole numbers; None if that changes nothing, or they are not known.
    """

    inputs: Tensor
    outcomes: Tensor
    finals: Tensor
    whole: Tensor | None = None


def _final_observations(columns: TransitionInputs) -> Tensor | None:
    ended = ~columns.finals.isnan()
    return torch.where(ended, columns.finals, columns.outcomes)[:-1] if bool(ended[:-1].any()) else None


def _are_last(columns: TransitionInputs) -> bool:
    """Return whether observations that never change are those that the last steps returned, while the steps returned others."""
    inputs, outcomes, finals = columns.inputs, columns.outcomes, columns.finals
    if bool((outcomes == outcomes[:1]).all()):
        return False
    ended = ~finals.isnan()
    of_episodes = bool(ended.any()) and bool((inputs == finals)[ended].all())
    return of_episodes or any(bool((inputs == last).all()) for last in (outcomes[-1], finals[-1]))


def _never_updated(columns: TransitionInputs) -> Tensor | None:
    is_cut = columns.whole is not None and bool((columns.whole[:-1] == columns.inputs[1:]).all())
    return None if is_cut or _are_last(columns) else columns.inputs[:-1]


def _in_place(columns: TransitionInputs) -> Tensor | None:
    ended = ~columns.finals[:-1].isnan()
    return torch.where(ended, columns.inputs[1:], columns.inputs[:-1]) if _are_last(columns) else None


def _sometimes_updated(columns: TransitionInputs) -> Tensor | None:
    repeated = columns.inputs[1:] == columns.inputs[:-1]
    return None if bool(repeated.all()) else torch.where(repeated, columns.inputs[:-1], columns.outcomes[:-1])


def _other_environments(reference: Tensor) -> list[Tensor]:
    """The reference [T, B] in other orders of the environments."""
    orders = [reference[:, :1].expand_as(reference), reference.roll(1, 1), reference.roll(-1, 1), reference.flip(1)]
    return orders if reference.shape[1] > 1 else []


TRANSITIONS = Equation(
    name="transitions",
    rank=10,
    quantity="the observations",
    equation="o_{t+1} is what the environment returned after a_t, and a new episode's first observation after an end",
    source="Sutton and Barto 2018, figure 3.1",
    inputs="the stored observations, and the observations that the environments returned",
    check="check_transitions",
    shown_by="test_transitions",
    compute=lambda columns: columns.outcomes[:-1],
    tolerance=0.01,
    advice="Compare what `env.step` returns with what is stored and acted on.",
    hypotheses=(
        mistake("whole_numbers", "the environment's observations truncated to whole numbers")
        .predicts("o_t stored as a whole number", lambda columns: None if columns.whole is None else columns.whole[:-1])
        .advises(
            "Store observations as float32: an array of an integer type, or one with the `dtype` of an observation space of whole numbers, "
            "cuts numbers below 1 to 0."
        ),
        mistake("never_updated", "the previous step's observations: they are never updated")
        .predicts("o_{t+1} = o_t", _never_updated)
        .advises(
            "Assign what `env.step` returns to the observation that is acted on next, and look for wrappers that return an old observation."
        )
        .cites("program: loop-obs_never_updated"),
        mistake("in_place", "one array that later steps have changed: all rows are the last observation")
        .predicts("o_t is the last observation of the episode, or of the rollout", _in_place)
        .advises("Store copies: `step` and `reset` return `self.state.copy()`, or the program stores `observation.copy()`."),
        mistake("sometimes_updated", "the previous step's observations in some steps: they are not always updated")
        .predicts("o_{t+1} = o_t in some steps", _sometimes_updated)
        .advises("Assign what `env.step` returns to the observation that is acted on next, in every step."),
        mistake("stale", "the observations that the environment returned one step earlier")
        .predicts("o_{t+1} = outcome of a_{t-1}", lambda columns: shifted(columns.outcomes[:-1], -1, columns.inputs[1:]))
        .advises("Act on what the last `env.step` returned, not on what was returned before it.")
        .cites("program: loop-acts_on_stale_obs"),
        mistake("next_stored", "the observations after the action instead of the observations before it")
        .predicts("o_t = outcome of a_t", lambda columns: columns.outcomes[1:])
        .advises("Store the observation before it is replaced by the next one.", source="program: loop-obs_alias"),
        mistake("final_observation", "the last observations of ended episodes instead of the first observations of the next")
        .predicts("o_{t+1} = last observation of the episode that ended with a_t", _final_observations)
        .advises("After an end, act on what `reset` returns; keep the last observation for the bootstrap only.")
        .cites("https://gymnasium.farama.org/main/api/vector/autoreset/"),
        mistake("reset_elsewhere", "observations from before a reset that the rollout did not make: something else uses its environments;")
        .predicts("o_{t+1} = outcome of a_t, while the environment has begun another episode")
        .given(parameter="resets")
        .advises("Evaluate in separate environments, made by a second call of the function that makes the training environments.")
        .cites("https://stable-baselines3.readthedocs.io/en/master/guide/callbacks.html: a separate environment for evaluation"),
        mistake("other_environment", "another environment's observations")
        .predicts("o_{t+1,b} = outcome of a_{t,σ(b)}", lambda columns: _other_environments(columns.outcomes[:-1]))
        .advises("Keep the order of environments; check reshapes of [T, B]."),
    ),
)


def _any_order(columns: tuple[Tensor, Tensor]) -> Tensor | None:
    """The first column, if each step has the numbers of the reference in another order."""
    own, reference = columns
    same = own.shape[1] > 1 and bool((own.sort(1).values == reference.sort(1).values).all())
    return own if same else None


def _scaled(columns: tuple[Tensor, Tensor], arrived: Tensor) -> tuple[float, Tensor] | None:
    sent = columns[1]
    size = float(sent[::2].square().sum())
    factor = float((sent * arrived)[::2].sum()) / size if size else 0.0
    return (factor, factor * sent) if factor > 0 else None


def _clipped(columns: tuple[Tensor, ...], stored: Tensor) -> tuple[float, Tensor] | None:
    """Return the upper bound, and the environments' rewards clipped to the range of the stored rewards."""
    low, high = stored.min(), stored.max()
    paid = columns[1]
    return (float(high), paid.clamp(low, high)) if bool(((paid < low) | (paid > high)).any()) and high > low else None


MIN_CELL_COUNT = 20
"""Fewest actions per pair of choices for a test of independence."""

MAX_REPLACED_SHARE = 0.5
"""Share of replaced actions above which most actions are not the chosen actions."""

MAX_DEPENDENCE = 3.0
"""Standard deviations of the chi-square statistic below which choices count as independent."""

MIN_BOOTSTRAPS = 5
"""Steps with a bootstrap that tell it from a change of rewards."""


def _is_bootstrap(added: Tensor, values: Tensor, places: Tensor) -> bool:
    """Return True if numbers that resemble the estimates are added at these steps, and nothing elsewhere; a penalty is constant."""
    own = added[places]
    if len(own) < MIN_BOOTSTRAPS or not bool((own != 0).all()) or bool((added[~places].abs() > 1e-5 * (1 + added.abs().max())).any()):
        return False
    varies = float(own.std()) > 0.01 * float(own.abs().mean())
    return varies and float((own - values[places]).abs().median()) < 0.5 * float(own.abs().median())


STORED_REWARDS = Equation(
    name="stored_rewards",
    rank=12,
    quantity="the stored rewards",
    equation="r_t is the reward that the environment returned for a_t",
    source="Sutton and Barto 2018, figure 3.1",
    inputs="the stored rewards, and the rewards that the environments returned",
    check="check_rewards",
    shown_by="test_transitions",
    compute=lambda columns: columns[1],
    advice="Compare the rewards that `env.step` returns with the stored rewards.",
    hypotheses=(
        mistake("step_before", "the previous step's rewards")
        .predicts("r_t = reward of a_{t-1}", lambda columns: shifted(columns[1], -1, columns[0]))
        .advises("Store the reward in the row of the action that earned it.")
        .cites("program: loop-reward_before_obs"),
        mistake("step_after", "the next step's rewards")
        .predicts("r_t = reward of a_{t+1}", lambda columns: shifted(columns[1], 1, columns[0]))
        .advises("Store the reward in the row of the action that earned it."),
        mistake("other_environment", "another environment's rewards")
        .predicts("r_{t,b} = reward of a_{t,σ(b)}", lambda columns: _other_environments(columns[1]))
        .advises("Keep the order of environments; check reshapes of [T, B]."),
        mistake("axes_swapped", "the environments' rewards, reshaped with steps and environments swapped")
        .predicts(
            "r[t, b] = rewards.reshape(B, T)[b, t]", lambda columns: [reading(columns[1]) for reading in other_readings(columns[1].shape)]
        )
        .advises("Transpose before you reshape: `reshape` and `view` do not move entries."),
        variant("clipped", "the environments' rewards, clipped,")
        .fits("r_t = min(max(r, low), high)", "upper bound", _clipped)
        .cites("1312.5602, section 5: rewards clipped to -1, 0 and 1"),
        variant("scaled", "the environments' rewards, scaled,")
        .fits("r_t = c r", "factor", _scaled)
        .cites("1708.02596, section 4.2: reward scaling"),
        mistake("bootstrapped_terminations", "the environments' rewards, plus a bootstrap at terminations, but not at time limits")
        .predicts("r_t + γ V(s_{t+1}) where the episode terminates")
        .advises("Bootstrap where `truncated` is set: `obs, reward, terminated, truncated, info = env.step(action)`, in this order."),
        variant("bootstrapped_limits", "the environments' rewards, plus a bootstrap at time limits")
        .predicts("r_t + γ V(s_{t+1}) where a time limit ends the episode")
        .cites("1712.00378, section 3: bootstrapping at time limits"),
        mistake("raw", "the rewards before normalisation")
        .predicts("r_t is the reward before it is normalised", lambda columns: columns[2] if len(columns) > 2 else None)
        .advises("Store the normalised rewards that the environments return, or do not normalise them.")
        .cites("program: sb3_collection"),
    ),
)


def _steps_late(columns: tuple[Tensor, Tensor], arrived: Tensor) -> tuple[float, Tensor] | None:
    """Return the delay of at least two steps after which the actions arrive; the first arrivals were sent before the rollout."""
    for delay in range(2, min(MAX_DELAY_STEPS, len(arrived) // 2) + 1):
        later = arrived[delay:]
        if later.numel() >= MIN_LATE_ACTIONS and torch.allclose(later, columns[1][:-delay], atol=1e-6):
            return float(delay), torch.cat([arrived[:delay], columns[1][:-delay]])
    return None


def _unrelated(columns: tuple[Tensor, Tensor], arrived: Tensor) -> tuple[float, Tensor] | None:
    """Return the share of equal actions and the actions that arrived, if the arrivals do not depend on the actions that were sent.

    The test is a chi-square test of independence between a few choices.
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
    return (float((arrived == sent).double().mean()), arrived) if excess < MAX_DEPENDENCE * math.sqrt(2 * freedom) else None


def _replaced(columns: tuple[Tensor, Tensor], arrived: Tensor, *, sticky: bool) -> tuple[float, Tensor] | None:
    """Return the share of replaced actions and the actions that arrived, if choices are replaced at random.

    `sticky`: the previous arrival replaces a choice, as in published environments.
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
    # a choice that always becomes the same other choice is renamed, not replaced by chance
    random = len(choices) == 2 or min(others, default=0) > 1
    if len(frequent) < 2 or not all(0 < one < MAX_REPLACED_SHARE for one in shares) or not random:
        return None
    repeats = torch.equal(arrived[1:][differs[1:]], arrived[:-1][differs[1:]])
    return (share, arrived) if repeats == sticky else None


EXECUTED = Equation(
    name="executed_actions",
    rank=13,
    quantity="the actions that arrive in the environments",
    equation="executed a_t is the policy's choice for the same environment and step",
    source="Sutton and Barto 2018, figure 3.1",
    inputs="the actions that were sent to the environments, and the actions that arrived there",
    check="check_executed",
    shown_by="test_transitions",
    compute=lambda columns: columns[1],
    tolerance=0.01,
    advice="Follow the actions from the policy's output through all wrappers to `env.step`.",
    hypotheses=(
        mistake("other_environment", "other environments' actions")
        .predicts("executed a_{t,b} = a_{t,σ(b)}", _any_order)
        .advises("Keep the order of environments; check reshapes of [T, B]."),
        mistake("step_before", "the previous step's actions")
        .predicts(
            "executed a_t = a_{t-1}",
            lambda columns: shifted(columns[1], -1, columns[0]) if columns[1].numel() > MIN_LATE_ACTIONS else None,
        )
        .advises("Step the environments with the actions that were chosen for this step."),
        mistake("late", "the actions of earlier steps,")
        .fits("executed a_t = a_{t-k}", "delay", _steps_late)
        .advises(
            "Step the environments with the actions of this step; if the delay is intended, add the pending actions to the observation."
        )
        .cites("program: force-actions_late"),
        mistake("unrelated", "choices that do not depend on the policy's actions,")
        .fits("executed a_t independent of a_t", "share of equal actions", _unrelated)
        .advises("Step the environments with the same actions that the policy chose and the rollout stores.")
        .cites("program: script-actions_late"),
        mistake("replaced", "the policy's actions, some of them replaced by others,")
        .fits("executed a_t = a_t or another action, by chance", "share", partial(_replaced, sticky=False))
        .advises("Explore with the policy's own distribution: the stored log-probabilities belong to the actions that the policy chose."),
        variant("sticky", "the policy's actions or, by chance, the actions executed in the previous step,")
        .fits("executed a_t = a_t or executed a_{t-1}, by chance", "share", partial(_replaced, sticky=True))
        .cites("1709.06009, section 5.2: sticky actions"),
        variant("late_effect", "the actions of earlier steps, judging by their effects,")
        .predicts("o_{t+k+1} - o_{t+k} depends on a_t, and no earlier change does")
        .given(parameter="delay")
        .advises(
            "Follow the actions through all wrappers; if the delay is intended, add the actions that have not "
            "taken effect yet to the observation."
        )
        .cites("program: test_effects"),
        variant("scaled", "the policy's actions, scaled,")
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
    """Return the comparison of each observation with what the previous step returned.

    Args:
        observations: [T, B, ...], that the policy acted on.
        next_observations: [T, B, ...], that each step returned: after an end, the next episode's first observation. None if they were
            not kept: then the only mistake that is recognised is observations that never change.
        ended: [T, B], bool: the step taken at t ended its episode.
        final_observations: [T, B, ...], last observations of the episodes that ended, any numbers elsewhere.
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
        whole=None if returned is None or bool((returned == returned.round()).all()) else checksums(returned.trunc()),
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
    whole: Tensor | None = None,
) -> EquationCheck:
    """Return the comparison of checksums; see `check_transitions`.

    Args:
        inputs, outcomes: [T, B], of the stored observations and of the observations that each step returned.
        ended: [T, B], bool.
        finals: [T, B], of the last observations of episodes, NaN if no episode ended.
        valid: [T, B], bool.
        informative: observations that never change are a mistake, not a property of the environment.
        resets, whole: see `events.Transitions`.
    """
    if resets:
        return explained(TRANSITIONS, "reset_elsewhere", fitted=resets)
    ended, valid = ended.to(inputs.device), None if valid is None else valid.to(inputs.device)
    within = ~ended[:-1] if valid is None else ~ended[:-1] & valid[:-1] & valid[1:]
    frozen = bool(((inputs[1:] == inputs[:-1]) | ~within).all()) and int(within.sum()) >= MIN_FROZEN_STEPS
    none = torch.full_like(inputs, torch.nan)
    columns = None if outcomes is None else TransitionInputs(inputs, outcomes, none if finals is None else finals, whole)
    if frozen and informative:
        return explained(TRANSITIONS, "in_place" if columns is not None and _are_last(columns) else "never_updated")
    if columns is None or len(inputs) < 2:
        return unchecked(TRANSITIONS, "the observations that the environments returned are missing")
    return compare(TRANSITIONS, columns, inputs[1:], valid=None if valid is None else valid[1:] & valid[:-1])


@checked_arguments()
@inference_mode
def check_rewards(
    rewards: ArrayLike,
    paid: ArrayLike,
    *,
    raw_rewards: ArrayLike | None = None,
    values: ArrayLike | None = None,
    ended: ArrayLike | None = None,
    time_limits: ArrayLike | None = None,
    valid: ArrayLike | None = None,
) -> EquationCheck:
    """Return the comparison of stored rewards [T, B] with the rewards that the environments returned.

    Args:
        rewards: as stored, before anything is added to them.
        paid: rewards that the environments returned, same shape.
        raw_rewards: before normalisation in the environments, same shape; None if the environments do not normalise.
        values: the critic's estimates, same shape, which show a bootstrap that is added to the rewards.
        ended, time_limits: bool, same shape: ends of episodes, and those by a time limit.
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
    ends, limits = as_mask(ended, stored), as_mask(time_limits, stored)
    if values is not None and ends is not None:
        limits = torch.zeros_like(ends) if limits is None else limits
        lengths = {length for column in ends.t() for length in column.nonzero().flatten().diff().tolist()}  # of whole episodes
        added, estimates = stored - others[0], as_tensor(values).to(stored).detach()
        for name, places in (("bootstrapped_terminations", ends & ~limits), ("bootstrapped_limits", ends & limits)):
            if _is_bootstrap(added, estimates, places):
                # ends after equal numbers of steps are time limits, which some environments do not report as such
                is_limit = name == "bootstrapped_limits" or len(lengths) < 2
                return explained(STORED_REWARDS, "bootstrapped_limits" if is_limit else name, error=check.error or 1.0)
    # displaced rewards may also be scaled; rewards outside the rollout are not known
    inner = slice(1, -1)
    moved = [*(shifted(others[0], steps, stored) for steps in (-1, 1)), *(reading(others[0]) for reading in other_readings(stored.shape))]
    factors = (_scaled((stored[inner], to[inner]), stored[inner]) for to in moved if to is not None)
    scaled = (compared(stored / factor[0]) for factor in factors if factor is not None)
    return next((one for one in scaled if not one.matches and one.explanations), check)


@checked_arguments()
@inference_mode
def check_executed(sent: ArrayLike, received: ArrayLike) -> EquationCheck:
    """Return the comparison of the actions that arrived in the environments with the actions that were sent.

    Args:
        sent, received: [T, B], choices, or checksums of vectors.
    """
    reference = as_tensor(sent).detach().double()
    own = as_tensor(received, reference).detach().double()
    same_shape(sent=reference, received=own)
    return compare(EXECUTED, (own, reference), own)
