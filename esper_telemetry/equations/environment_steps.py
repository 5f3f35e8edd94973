"""Equation of the environments: each step shows the state that its action led to, and each environment has its own random numbers.

Most observations are compared as checksums. Repeated numbers are evidence for vectors of real numbers only: a position on a grid may stay
the same, or come back, in a correct environment. Rewards are fitted by the observation and the action of their step and of its neighbours.

Shapes: T steps, B environments, D features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from esper_telemetry.core.lazy import Tensor, inference_mode, torch
from esper_telemetry.equations.comparison import EquationCheck, explained, unchecked
from esper_telemetry.equations.equation import Equation, alternatives, mistake
from esper_telemetry.equations.transitions import MIN_FROZEN_STEPS

MIN_STARTS: Final = 5
"""Episodes of a rollout from which on their first steps are compared."""

MAX_OTHER_REPEATS: Final = 0.05
"""Share of the other steps that may change nothing if only first steps are late."""

MIN_DISTINCT_STARTS: Final = 8
"""Starts of episodes that must all be different before equal starts of environments cannot be a coincidence."""

CAST_ERROR: Final = 0.01
"""Change of an observation by a cast, relative to its largest entry, above which it is more than rounding: 0.004 for pictures."""

MAX_STREAMS: Final = 8
STREAM_WINDOW: Final = (512, 8)
"""Steps and environments in which streams are sought."""

NEAR, STILL_NEAR, MOST_FEATURES = 0.5, 0.75, 0.75
"""Median change over n steps and over 2 n steps, relative to that over one step, in this share of the features, if n streams alternate. The
change of a single process grows with the number of steps."""


MIN_OPPOSITE: Final = 0.5
"""Share of the rewards with the opposite sign, above which wrappers do more than pay a bonus."""

SHIFTED: Final = 0.999
"""Correlation of rewards before and after wrappers, from which on they only scale and shift."""

MIN_CUT, CUT_SPREAD, AT_LIMIT = 0.5, 0.5, 0.01
"""Share of the rewards at one limit, above which most of what they say is lost, if the environments' rewards in these steps have this share
of the deviation of all of them; and the distance that still is at the limit, relative to the range."""

MIN_REWARDS: Final = 256
"""Fewest steps within episodes for a fit of the rewards."""

FITS, FITS_NOT = 0.8, 0.1
"""Shares of the variance of rewards, above the first of which they fit a step, and below the second of which they do not."""

MAX_TERMS: Final = 64
"""Largest number of terms of a fit; more need more rewards than a rollout has."""


class EnvironmentEquation(Equation):
    """An equation whose differences are described by what the environments do."""

    __slots__ = ()

    def sentence(self, error: float, explanations: Sequence[str] = ()) -> str:
        """Return what the environments do."""
        return alternatives(explanations) or super().sentence(error)


ENVIRONMENTS = EnvironmentEquation(
    name="environments",
    rank=9,
    quantity="the environments",
    equation="o_{t+1} shows the state after a_t; environments draw their random numbers independently",
    source="https://gymnasium.farama.org/api/env/",
    inputs="observations that are vectors of real numbers, at least 64 steps within episodes",
    shown_by="test_environment_steps",
    compute=lambda columns: columns,
    advice="Check the environment with `gymnasium.utils.env_checker.check_env`.",
    hypotheses=(
        mistake("cast", "the dtype of the observation space changes what `step` returns;")
        .given(parameter="largest change relative to the observation")
        .advises("Declare the observation space with the dtype of the observations: `Box(..., dtype=np.float32)`.")
        .cites("program: test_environment_faults"),
        mistake("same_observation", "`step` returns the observation that it was given: its action changes nothing")
        .advises("Compute the observation in `step` from the new state, and check that `step` updates the state.")
        .cites("program: test_environment_faults"),
        mistake("same_array", "`step` returns one array and changes it in place, so that all stored observations are the last one")
        .advises("Return a copy from `step` and `reset`: `return self.state.copy(), ...`.")
        .cites("program: test_environment_faults"),
        mistake("late", "`step` returns the state of one step ago: the first step after a reset changes nothing;")
        .given(parameter="episodes")
        .advises("Compute the observation at the end of `step`, after the state has been updated.")
        .cites("program: test_environment_faults"),
        mistake(
            "observation_behind",
            "`step` returns the observation of one step ago: rewards fit the action and the observation after it, not before it",
        ).advises(
            "Compute the observation at the end of `step`, after the state has been updated: the policy must see the state "
            "that the reward of its next action depends on."
        ),
        mistake(
            "reward_behind", "`step` returns the reward of one step ago: rewards fit the action and the observation of the previous step"
        ).advises("Return the reward of the action that `step` was given."),
        mistake("one_seed", "environments have the same random numbers: their episodes begin with the same observations;")
        .given(parameter="environments")
        .advises("Seed each environment differently: `env.reset(seed=seed + index)`, or `make_vec_env(..., seed=seed)`.")
        .cites("https://gymnasium.farama.org/api/vector/#gymnasium.vector.VectorEnv.reset"),
        mistake("opposite_rewards", "wrappers turn rewards into others of the opposite sign;")
        .given(parameter="share of the rewards")
        .advises(
            "Divide rewards by their scale, and subtract no mean, as `gymnasium.wrappers.NormalizeReward` does: what is "
            "subtracted from each reward changes the return of long episodes more than that of short ones."
        ),
        mistake("cut_rewards", "most rewards in training are cut off at one limit, and those of the environments differ there;")
        .given(parameter="share of the rewards")
        .advises(
            "Scale rewards until they lie within the limits, or choose wider ones: rewards that are all at a limit do not tell a better "
            "action from a worse one."
        ),
        mistake("interleaved", "the rows of one environment belong to several streams in turn;")
        .given(parameter="streams")
        .advises(
            "Give each stream its own environment column [T, B]: advantages add up along time. Check reshapes, and "
            "environments that step several agents in turn."
        )
        .cites("program: test_environment_faults"),
    ),
)


@inference_mode
def check_environments(
    inputs: Tensor,
    *,
    ended: Tensor,
    informative: bool,
    outcomes: Tensor | None = None,
    observations: Tensor | None = None,
    actions: Tensor | None = None,
    rewards: Tensor | None = None,
    raw_rewards: Tensor | None = None,
    trained: Tensor | None = None,
    terminated: Tensor | None = None,
    valid: Tensor | None = None,
    cast: float = 0.0,
    drifting: bool = False,
) -> EquationCheck:
    """Return the check of what the environments do.

    Args:
        inputs: checksums of the stored observations, [T, B].
        ended: [T, B], bool: the step ended its episode.
        informative: see `transitions.informative`.
        outcomes: checksums of what each step returned, [T, B]; None if it is not known.
        observations: [T, B, D]; None if they are not kept.
        actions: [T, B], choices in whole numbers, or [T, B, D]; None if there are several heads.
        rewards: [T, B], as the environments returned them; None if they are not known.
        raw_rewards: [T, B], before wrappers changed them; None if they have not, or these are not known.
        trained: [T, B], the rewards that are learned from; None if they are not known.
        terminated: [T, B], bool: the step ended its episode, and no time limit did; None if it is not known.
        valid: [T, B], bool; None if every row is valid.
        cast: largest relative change of an observation by the dtype of its space.
        drifting: observations are normalised by running statistics, so that equal states have other observations later.
    """
    if cast > CAST_ERROR:
        return explained(ENVIRONMENTS, "cast", fitted=cast)
    can_shift = terminated is not None and not bool(terminated.any())  # the same sum is added to all returns
    opposite = 0.0 if rewards is None or raw_rewards is None else _opposite_share(rewards, raw_rewards, can_shift=can_shift)
    if opposite > MIN_OPPOSITE:
        return explained(ENVIRONMENTS, "opposite_rewards", fitted=opposite)
    unchanged = rewards if raw_rewards is None else raw_rewards
    cut = 0.0 if trained is None or unchanged is None else _cut_share(trained, unchanged)
    if cut > MIN_CUT:
        return explained(ENVIRONMENTS, "cut_rewards", fitted=cut)
    ended = ended.to(inputs.device).bool()
    if observations is not None and actions is not None and rewards is not None and valid is None:
        behind = _behind(observations, actions, rewards, ~ended[:-1])
        if behind:
            return explained(ENVIRONMENTS, behind)
    if not informative:
        return unchecked(ENVIRONMENTS, "observations are not vectors of real numbers")
    within = ~ended[:-1] if valid is None else ~ended[:-1] & (valid[:-1] & valid[1:]).to(inputs.device)
    if int(within.sum()) < MIN_FROZEN_STEPS:
        return unchecked(ENVIRONMENTS, "there are too few steps within episodes")
    repeats = inputs[1:] == inputs[:-1]
    if bool((repeats | ~within).all()):
        if outcomes is None:
            return unchecked(ENVIRONMENTS, "observations never change, and what the environments returned is not known")
        if bool(((outcomes[:-1] == inputs[:-1]) | ~within).all()):
            return explained(ENVIRONMENTS, "same_observation")
        # otherwise the program stores an earlier observation in all rows
        last = bool(repeats.all()) and torch.equal(inputs[-1], outcomes[-1])
        return explained(ENVIRONMENTS, "same_array") if last else _correct()
    starts = ended[:-2] & within[1:]
    others = within.clone()
    others[1:] &= ~starts
    late = int(starts.sum()) >= MIN_STARTS and bool((repeats[1:] | ~starts).all())
    if late and float(repeats[others].double().mean()) < MAX_OTHER_REPEATS:
        return explained(ENVIRONMENTS, "late", fitted=int(starts.sum()))
    if valid is None and not drifting and _has_one_seed(inputs, ended):
        return explained(ENVIRONMENTS, "one_seed", fitted=inputs.shape[1])
    streams = 1 if observations is None or observations.dim() != 3 else stream_count(observations, within)
    return _correct() if streams == 1 else explained(ENVIRONMENTS, "interleaved", fitted=streams)


def _opposite_share(rewards: Tensor, raw: Tensor, *, can_shift: bool) -> float:
    """Return the share of rewards whose sign differs from all those before wrappers; 0 if these have both signs themselves.

    With `can_shift`, a shift adds the same sum to each episode's return, so it is 0, too, for rewards that are only scaled and shifted.
    """
    signs = raw.sign()
    paid = signs != 0
    if int(paid.sum()) < MIN_FROZEN_STEPS or bool(signs.min() * signs.max() < 0):
        return 0.0
    if can_shift and _is_line(rewards, raw):
        return 0.0
    return float((rewards.to(raw).sign()[paid] == -signs[paid]).double().mean())


def _is_line(rewards: Tensor, raw: Tensor) -> bool:
    """Return True if rewards are the raw ones, only scaled and shifted."""
    return float(torch.corrcoef(torch.stack([rewards.to(raw).flatten(), raw.flatten()]))[0, 1]) > SHIFTED


def _cut_share(trained: Tensor, raw: Tensor) -> float:
    """Return the share of the rewards in training that are at one limit, if the raw ones differ much in these steps; 0 otherwise."""
    trained, raw = trained.double().flatten(), raw.to(trained.device).double().flatten()
    if _is_line(trained, raw):
        return 0.0
    low, high = trained.min(), trained.max()
    distance = AT_LIMIT * (high - low)
    shares = [0.0]
    for at_limit, sign in ((trained <= low + distance, 1.0), (trained >= high - distance, -1.0)):
        there, others = sign * raw[at_limit], sign * raw[~at_limit]
        if len(there) < MIN_FROZEN_STEPS:  # none are at the limit if a reward is NaN
            continue
        is_beyond = not len(others) or bool(there.max() <= others.min())
        if is_beyond and bool(there.std() > CUT_SPREAD * raw.std()):
            shares.append(len(there) / len(trained))
    return max(shares)


def _correct() -> EquationCheck:
    return EquationCheck(ENVIRONMENTS, 0.0, ENVIRONMENTS.tolerance_at(None))


def _behind(observations: Tensor, actions: Tensor, rewards: Tensor, within: Tensor) -> str:
    """Return the mistake by which rewards belong to another step than their own, in both halves of a rollout; empty without one.

    Neither an observation that shows the reward without the action nor equal steps are such a mistake: they fit their own step, too.
    """
    device = within.device
    seen, paid = observations.to(device).flatten(2).double(), rewards.to(device).double()
    one_hot = torch.nn.functional.one_hot
    chosen = one_hot(actions.long()) if actions.dim() == 2 else actions
    chosen = chosen.to(seen)
    if (1 + seen.shape[-1]) * (1 + chosen.shape[-1]) > MAX_TERMS:
        return ""
    half = len(seen) // 2
    parts = (slice(half), slice(half, None))
    found = {_behind_in(seen[part], chosen[part], paid[part], within[part][: len(seen[part]) - 1]) for part in parts}
    return found.pop() if len(found) == 1 else ""


def _behind_in(seen: Tensor, chosen: Tensor, paid: Tensor, within: Tensor) -> str:
    if int(within.sum()) < MIN_REWARDS // 2:
        return ""
    here, there = slice(None, -1), slice(1, None)
    if _fit(paid[here][within], seen[here][within], chosen[here][within]) > FITS_NOT:
        return ""
    for name, paid_at, seen_at in (("observation_behind", here, there), ("reward_behind", there, here)):
        outcome, shown = paid[paid_at][within], seen[seen_at][within]
        if _fit(outcome, shown) < FITS_NOT and _fit(outcome, shown, chosen[here][within]) > FITS:
            return name
    return ""


def _fit(outcomes: Tensor, shown: Tensor, chosen: Tensor | None = None) -> float:
    """Return the share of the variance of outcomes [N] that is linear in what was shown [N, D], for each action [N, A] apart.

    Every second row determines the terms, and the others judge them.
    """
    shown = torch.nn.functional.pad(shown, (0, 1), value=1.0)
    acted = shown.new_ones(len(shown), 1) if chosen is None else torch.nn.functional.pad(chosen, (0, 1), value=1.0)
    terms = (shown.unsqueeze(2) * acted.unsqueeze(1)).flatten(1)
    known = terms[::2].T @ terms[::2]
    ridge = torch.eye(len(known), dtype=known.dtype, device=known.device) * (1e-9 * known.diagonal().mean() + 1e-30)
    weights = torch.linalg.solve(known + ridge, terms[::2].T @ outcomes[::2])
    rest = outcomes[1::2]
    varies = (rest - rest.mean()).square().sum()
    return float(1 - (rest - terms[1::2] @ weights).square().sum() / varies) if bool(varies > 0) else 1.0


def _has_one_seed(inputs: Tensor, ended: Tensor) -> bool:
    """Return True if all environments begin the rollout, or each of their next episodes, alike, and no environment begins two alike."""
    envs = inputs.shape[1]
    starts = [torch.cat([column[:1], column[1:][over[:-1]]]) for column, over in zip(inputs.t(), ended.t(), strict=True)]
    distinct = all(len(own.unique()) == len(own) for own in starts)
    if envs < 2 or not distinct or sum(map(len, starts)) < MIN_DISTINCT_STARTS + envs:
        return False
    shared = min(map(len, starts))
    first = bool((inputs[0] == inputs[0, 0]).all())
    return first or (shared > 2 and all(torch.equal(own[1:shared], starts[0][1:shared]) for own in starts))


def stream_count(observations: Tensor, within: Tensor) -> int:
    """Return the number of streams that alternate in the rows [T, B, D] of each environment; 1 if it is one process.

    `within` [T - 1, B] has the rows whose next one is of the same episode.
    """
    steps, envs = STREAM_WINDOW
    rows, inside = observations[:steps, :envs].double(), within[: steps - 1, :envs]

    def change(lag: int) -> Tensor:
        together = inside[: len(rows) - lag].clone()
        for step in range(1, lag):
            together &= inside[step : len(rows) - lag + step]
        moved = (rows[lag:] - rows[:-lag])[together].abs()
        return moved.median(0).values if len(moved) >= MIN_FROZEN_STEPS else moved.new_full(rows.shape[-1:], torch.inf)

    changes = [change(lag) for lag in range(1, 2 * MAX_STREAMS + 1) if lag < len(rows)]
    varies = changes[0] > 0
    if not bool(varies.any()):
        return 1
    for count in range(2, len(changes) // 2 + 1):
        once, twice = (changes[count * times - 1][varies] / changes[0][varies] for times in (1, 2))
        if float(((once < NEAR) & (twice < STILL_NEAR)).double().mean()) >= MOST_FEATURES:
            return count
    return 1
