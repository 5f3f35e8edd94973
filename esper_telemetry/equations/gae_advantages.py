"""The equation of a rollout's advantages, and `check_gae`.

Shapes: T steps, B environments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from esper_telemetry.core.arrays import ArrayLike, as_mask, as_number, as_tensor
from esper_telemetry.core.lazy import Tensor, inference_mode, torch
from esper_telemetry.core.requirements import checked_arguments
from esper_telemetry.equations.advantage_fits import ADVANTAGE_TOLERANCE, FITTED, normalized_whole
from esper_telemetry.equations.advantage_mistakes import MISTAKES, VARIANTS, normalized
from esper_telemetry.equations.comparison import EquationCheck, compare, distinguished, explained, unchecked
from esper_telemetry.equations.equation import Equation, Explanation
from esper_telemetry.equations.gae import GaeInputs, following_values, gae, is_standard, rows_that_count
from esper_telemetry.equations.rewards_to_go import SUMS, SUMS_MINUS_VALUES
from esper_telemetry.metrics.statistics import discounted_sums, same_shape

TINY_DEVIATION = 1e-12
"""Lower bound of the standard deviation before dividing by it."""

MAX_SCALE_PASSES = 60
"""Largest number of iterations that solve for the scale of normalised advantages and an unknown row; each is several times closer."""

ADVANTAGES = Equation(
    name="advantages",
    rank=20,
    quantity="the advantages",
    equation="A_t = δ_t + γλ (1 - end_t) A_{t+1}, δ_t = r_t + γ V(s_{t+1}) - V(s_t)",
    source="1506.02438, eq. 16",
    inputs="rewards, values, ends, and the value after the last step",
    check="check_gae",
    shown_by="gae_programs",
    compute=gae,
    tolerance=ADVANTAGE_TOLERANCE,
    hypotheses=(*MISTAKES, *SUMS_MINUS_VALUES, *VARIANTS, *FITTED, *SUMS),
    advice="Recompute one environment's advantages by hand, from the last step to the first.",
)


@checked_arguments(tolerance=0)
@inference_mode
def check_gae(
    rewards: ArrayLike,
    values: ArrayLike,
    advantages: ArrayLike,
    *,
    gamma: float,
    gae_lambda: float,
    ended: ArrayLike | None = None,
    terminated: ArrayLike | None = None,
    truncated: ArrayLike | None = None,
    next_values: ArrayLike | None = None,
    last_values: ArrayLike | None = None,
    raw_rewards: ArrayLike | None = None,
    valid: ArrayLike | None = None,
    precision: str | None = None,
    tolerance: float | None = None,
) -> EquationCheck:
    """Return the comparison of advantages, before normalisation, with GAE.

    Args:
        rewards, values, advantages: [T, B]; [T] for one environment, like all other columns. Rewards are used for learning and do not
                include the value of a time limit's last state.
        gamma, gae_lambda: settings of the estimate.
        ended: bool: the step taken at t ended its episode; `terminated` or `truncated` if it is None.
        terminated: bool: the episode ended by termination; if it is None, all ends that are not `truncated`. If both are None, ends with
            nonzero `next_values` may be time limits.
        truncated: bool: the episode ended by a time limit.
        next_values: the critic's estimate of the state that follows t; ignored after termination.
        last_values: [B], the critic's estimates of the states after the last step. Without `next_values`, values after time limits are
            unknown, and rows from the start of an episode to its time limit are left out. With `next_values`, they show how the trainer
            handled a last step that ended an episode.
        raw_rewards: before scaling; None if they are `rewards`.
        valid: bool; None if every entry counts.
        precision: of the trainer's arithmetic: fp32, tf32, bf16 or fp16.
        tolerance: largest relative error; by precision if it is None.

    Raises:
        ValueError: if shapes disagree, flags of the ends are missing, neither `next_values` nor `last_values` is given,
                or a setting is outside 0 to 1.
    """
    for name, setting in (("gamma", gamma), ("gae_lambda", gae_lambda)):
        if not 0 <= as_number(setting, name) <= 1:
            raise ValueError(f"{name} must be between 0 and 1, got {setting!r}")
    if next_values is None and last_values is None:
        raise ValueError("give next_values [T, B] or last_values [B]: the values of the states that follow")
    claimed = _grid("advantages", as_tensor(advantages).detach())

    def column(name: str, given: ArrayLike | None) -> Tensor | None:
        if given is None:
            return None
        grid = _grid(name, as_tensor(given, claimed).detach().to(claimed.device).double())
        same_shape(**{"advantages": claimed, name: grid})
        return grid

    flags = {
        name: _grid(name, mask.to(claimed.device))
        for name, given in (("ended", ended), ("terminated", terminated), ("truncated", truncated), ("valid", valid))
        if (mask := as_mask(given, claimed)) is not None
    }
    same_shape(advantages=claimed, **flags)
    paid, estimates = column("rewards", rewards), column("values", values)
    following = column("next_values", next_values)
    if not claimed.numel() or paid is None or estimates is None:
        return unchecked(ADVANTAGES, "there are no rows")
    ends, terminations = _ends(flags)
    last = None if last_values is None else as_tensor(last_values, claimed).detach().to(estimates).reshape(-1)
    if last is not None and len(last) != claimed.shape[1]:
        raise ValueError(f"last_values must have {claimed.shape[1]} entries, one for each environment, got {len(last)}")
    known = None
    if following is None:
        ahead = torch.cat([estimates[1:], last[None] if last is not None else estimates[:0]])
        following = torch.where(ends, 0.0, ahead)
        cut = (ends & ~terminations).double()  # the next value is unknown throughout an episode that ends in such a step
        known = discounted_sums(cut, (~ends).double()) <= 0
    inputs = GaeInputs(
        rewards=paid,
        values=estimates,
        next_values=torch.where(terminations, 0.0, following),
        ended=ends,
        terminated=terminations,
        following=following,
        claimed=claimed.double(),
        gamma=float(gamma),
        gae_lambda=float(gae_lambda),
        valid=flags.get("valid"),
        raw_rewards=column("raw_rewards", raw_rewards),
    )
    check = compare_advantages(following_values(inputs, last), known=known, precision=precision, tolerance=tolerance)
    if check.matches or next_values is None or "terminated" in flags or "truncated" in flags:
        return check
    # `ended` does not show which ends are time limits: an end with a nonzero next value may be one
    inputs = replace(inputs, next_values=following, terminated=ends & (following == 0))
    other = compare_advantages(following_values(inputs, last), precision=precision, tolerance=tolerance)
    # unless the values after the ends belong to the next episodes, not to last states
    of_next_episode = bool((following[:-1] == estimates[1:])[ends[:-1]].all())
    return check if not other.explained or (check.explanations and of_next_episode) else other


def compare_advantages(
    inputs: GaeInputs, *, known: Tensor | None = None, precision: str | None = None, tolerance: float | None = None
) -> EquationCheck:
    """Return the comparison of the claimed advantages with GAE in the rows that count.

    Args:
        known: [T, B], bool: rows whose advantage the columns determine; None if all rows are known.
    """
    counted = inputs.valid if known is None else known if inputs.valid is None else inputs.valid & known
    if counted is not None and not bool(counted.any()):
        reason = "no row counts" if known is None else "the values after time limits are not known"
        return unchecked(ADVANTAGES, reason)
    settings: dict[str, Any] = {"valid": counted, "precision": precision, "tolerance": tolerance}
    columns = (inputs.rewards, inputs.values, inputs.next_values)
    # not a constant, as every module constant that is an equation is listed as a separate equation
    equation = replace(ADVANTAGES, hypotheses=SUMS) if inputs.alone else ADVANTAGES
    check = compare(equation, inputs, inputs.claimed, magnitudes=columns, **settings)
    if inputs.alone and check.matches:
        return explained(ADVANTAGES, "alone")
    check = distinguished(check)
    if check.matches or check.explanations or inputs.alone or not is_standard(inputs.claimed, inputs.valid):
        return check
    std = rows_that_count(gae(inputs), inputs.valid).std(correction=0).clamp(min=TINY_DEVIATION)
    magnitudes = [column / std for column in columns]
    normalized = compare(_of_normalized(), inputs, inputs.claimed, magnitudes=magnitudes, **settings)
    if normalized.matches:  # values that are large next to the spread of the advantages are rounded by more
        return replace(check, explanations=(Explanation(ADVANTAGES["normalized"], normalized.error or 0.0),))
    return replace(check, explanations=distinguished(normalized).explanations)


def _normalized(compute: Callable[[GaeInputs], Tensor | None], *, has_unknown_rewards: bool) -> Callable[[GaeInputs], Tensor | None]:
    """Normalise the prediction of a hypothesis over all rows that count, by the biased or the unbiased standard deviation."""

    def normalized(inputs: GaeInputs) -> Tensor | None:
        # hypotheses choose the candidate closest to the claimed numbers, so the claimed numbers are put on the original scale
        claimed = rows_that_count(inputs.claimed, inputs.valid)
        std, mean = torch.std_mean(rows_that_count(gae(inputs), inputs.valid), correction=0)
        values = compute(replace(inputs, claimed=inputs.claimed * std + mean))
        for _ in range(MAX_SCALE_PASSES if has_unknown_rewards else 0):
            if values is None:
                break
            # a row with an unknown reward copies the claimed number, so it depends on the scale, and the scale depends on it
            rows, before = rows_that_count(values, inputs.valid), std
            std = ((claimed * rows).mean() - claimed.mean() * rows.mean()) / claimed.var(correction=0)
            mean = rows.mean() - std * claimed.mean()
            values = compute(replace(inputs, claimed=inputs.claimed * std + mean))
            if torch.isclose(before, std, rtol=1e-12, atol=0):
                break
        return None if values is None else normalized_whole(inputs, values)

    return normalized


@cache
def _of_normalized() -> Equation:
    """The equation of advantages that a program normalises over the whole batch without keeping the originals."""
    hypotheses = [
        replace(one, compute=_normalized(one.compute, has_unknown_rewards=one.unknown_row))
        for one in ADVANTAGES.hypotheses
        if one.compute is not None
    ]
    fits = [replace(one, fit=one.normalized_fit) for one in ADVANTAGES.hypotheses if one.normalized_fit is not None]
    return replace(ADVANTAGES, compute=normalized, hypotheses=(*hypotheses, *fits))


def _grid(name: str, column: Tensor) -> Tensor:
    """Return the column as [T, B]."""
    if column.dim() not in (1, 2):
        raise ValueError(f"{name} must have shape [T, B], or [T] for one environment, got {list(column.shape)}")
    return column.unsqueeze(1) if column.dim() == 1 else column


def _ends(flags: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Steps that ended an episode, and steps that ended it by termination."""
    ended, terminated, truncated = (flags.get(name) for name in ("ended", "terminated", "truncated"))
    given = [part for part in (terminated, truncated) if part is not None]
    if ended is None:
        if not given:
            raise ValueError("give ended, or terminated and truncated: the steps that ended an episode")
        ended = given[0] if len(given) == 1 else given[0] | given[1]
    if terminated is None:
        terminated = ended if truncated is None else ended & ~truncated
    return ended, terminated & ended
