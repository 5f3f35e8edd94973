"""The equation of a rollout's advantages, and `check_gae`.

Shapes: T steps, B environments.
"""

from __future__ import annotations

from typing import Any

from esper_telemetry.core.arrays import ArrayLike, as_mask, as_number, as_tensor
from esper_telemetry.core.equations.equation import Equation
from esper_telemetry.core.lazy import Tensor, inference_mode, torch
from esper_telemetry.metrics.integrity.equations import EquationCheck, compare, told_apart, unchecked
from esper_telemetry.metrics.integrity.targets.advantage_fits import ADVANTAGE_TOLERANCE, FITTED
from esper_telemetry.metrics.integrity.targets.advantage_mistakes import MISTAKES, VARIANTS
from esper_telemetry.metrics.integrity.targets.gae import GaeInputs, accumulated, following_values, gae
from esper_telemetry.metrics.statistics import same_shape

ADVANTAGES = Equation(
    name="advantages",
    rank=20,
    quantity="the advantages",
    equation="A_t = δ_t + γλ (1 - end_t) A_{t+1}, δ_t = r_t + γ V(s_{t+1}) - V(s_t)",
    source="1506.02438, eq. 16",
    inputs="rewards, values, ends, and the value after the last step",
    compute=gae,
    tolerance=ADVANTAGE_TOLERANCE,
    hypotheses=(*MISTAKES, *VARIANTS, *FITTED),
    advice="Recompute one environment's advantages by hand, from the last step to the first.",
)


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
        rewards, values, advantages: [T, B]; [T] for one environment, like all other columns. Rewards are those that are learned from,
            without the value of a time limit's last state.
        gamma, gae_lambda: settings of the estimate.
        ended: bool: the step taken at t ended its episode; `terminated` or `truncated` where it is None.
        terminated: bool: it ended by termination; where it is None, all ends but those `truncated`.
        truncated: bool: it ended by a time limit.
        next_values: the critic's estimate of the state that follows t, whatever it is after termination.
        last_values: [B], its estimates of the states after the last step. In place of `next_values`, values after time limits are
            unknown: rows from the start of an episode to its time limit are left out. Beside them, they tell what was done where
            the last step ended an episode.
        raw_rewards: before scaling; None where they are `rewards`.
        valid: bool; None where every entry is.
        precision: of the trainer's arithmetic: fp32, tf32, bf16 or fp16.
        tolerance: largest relative error; by precision where it is None.

    Raises:
        ValueError: where shapes disagree, no flag says where episodes end, neither `next_values` nor `last_values` is given,
            or a setting lies outside 0 to 1.
    """
    for name, setting in (("gamma", gamma), ("gae_lambda", gae_lambda)):
        if not 0 <= as_number(setting, name) <= 1:
            raise ValueError(f"{name} must lie between 0 and 1, got {setting!r}")
    if next_values is None and last_values is None:
        raise ValueError("give next_values [T, B] or last_values [B]: the values of the states that follow")
    claimed = _grid("advantages", as_tensor(advantages).detach())
    columns: dict[str, Any] = {
        name: _grid(name, as_tensor(column, claimed).detach().to(claimed.device))
        for name, column in (("rewards", rewards), ("values", values), ("raw_rewards", raw_rewards))
        if column is not None
    }
    flags = {
        name: _grid(name, mask.to(claimed.device))
        for name, column in (("ended", ended), ("terminated", terminated), ("truncated", truncated), ("valid", valid))
        if (mask := as_mask(column, claimed)) is not None
    }
    same_shape(advantages=claimed, **columns, **flags)
    if not claimed.numel():
        return unchecked(ADVANTAGES, "there are no rows")
    ends, terminations = _ends(flags)
    estimates: Tensor = columns["values"].double()
    last = None if last_values is None else as_tensor(last_values, claimed).detach().to(estimates).reshape(-1)
    if last is not None and len(last) != claimed.shape[1]:
        raise ValueError(f"last_values must have {claimed.shape[1]} entries, one for each environment, got {len(last)}")
    known = None
    if next_values is not None:
        following = _grid("next_values", as_tensor(next_values, claimed).detach().to(estimates))
        same_shape(advantages=claimed, next_values=following)
    else:
        following = torch.cat([estimates[1:], last[None] if last is not None else estimates[:0]])
        following = torch.where(ends, 0.0, following)
        known = ~_leads_to(ends & ~terminations, ends)
    mask = flags.get("valid")
    inputs = GaeInputs(
        rewards=columns["rewards"].double(),
        values=estimates,
        next_values=torch.where(terminations, 0.0, following),
        ended=ends,
        terminated=terminations,
        following=following,
        claimed=claimed.double(),
        gamma=float(gamma),
        gae_lambda=float(gae_lambda),
        valid=mask,
        raw_rewards=None if raw_rewards is None else columns["raw_rewards"].double(),
    )
    return compare_advantages(following_values(inputs, last), known=known, precision=precision, tolerance=tolerance)


def compare_advantages(
    inputs: GaeInputs, *, known: Tensor | None = None, precision: str | None = None, tolerance: float | None = None
) -> EquationCheck:
    """Return the comparison of the claimed advantages with GAE in the rows that count.

    Args:
        known: [T, B], bool: rows whose advantage the columns determine; None where they do everywhere.
    """
    counted = inputs.valid if known is None else known if inputs.valid is None else inputs.valid & known
    if counted is not None and not bool(counted.any()):
        reason = "no row counts" if known is None else "the values after time limits are not known"
        return unchecked(ADVANTAGES, reason)
    check = compare(
        ADVANTAGES,
        inputs,
        inputs.claimed,
        magnitudes=(inputs.rewards, inputs.values, inputs.next_values),
        valid=counted,
        precision=precision,
        tolerance=tolerance,
    )
    return told_apart(check)


def _grid(name: str, column: Tensor) -> Tensor:
    """The column as [T, B]."""
    if column.dim() not in (1, 2):
        raise ValueError(f"{name} must have shape [T, B], or [T] for one environment, got {list(column.shape)}")
    return column.unsqueeze(1) if column.dim() == 1 else column


def _ends(flags: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Steps that ended an episode, and those that did so by termination."""
    ended, terminated, truncated = (flags.get(name) for name in ("ended", "terminated", "truncated"))
    given = [part for part in (terminated, truncated) if part is not None]
    if ended is None:
        if not given:
            raise ValueError("give ended, or terminated and truncated: the steps that ended an episode")
        ended = given[0] if len(given) == 1 else given[0] | given[1]
    if terminated is None:
        terminated = ended if truncated is None else ended & ~truncated
    return ended, terminated & ended


def _leads_to(marks: Tensor, ends: Tensor) -> Tensor:
    """Rows of episodes that end in a marked step, [T, B]."""
    return accumulated(marks.double(), (~ends).double()) > 0
