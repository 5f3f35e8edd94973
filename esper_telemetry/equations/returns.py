"""The equation of the critic's targets, the mistakes that explain a difference, and `check_returns`.

Shapes: T steps, B environments.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from esper_telemetry.core.arrays import ArrayLike, as_mask, as_tensor
from esper_telemetry.core.lazy import Tensor, inference_mode, torch
from esper_telemetry.core.requirements import checked_arguments
from esper_telemetry.equations.comparison import EquationCheck, compare, distinguished, explained, other_readings, ranked, unchecked
from esper_telemetry.equations.equation import TOLERANCES, Equation, mistake, variant
from esper_telemetry.equations.gae import STD_EPS, is_standard, standards
from esper_telemetry.metrics.statistics import discounted_sums, same_shape

MIN_ROWS = 8
"""Rows above which the mean and standard deviation of a batch cannot fit the numbers by chance."""

MIN_MOVED = 1e-3
"""Difference of a target, as a share of the largest target, above which it has moved."""

MIN_UNRELATED_ROWS = 256
"""Rows above which a correlation within chance shows that targets are unrelated to their inputs."""

CHANCE = 4.0
"""Correlations below this many times 1 / √N are chance: real targets correlate almost perfectly with advantages and values."""

TINY_SPREAD = 1e-6
"""Standard deviation, as a share of the largest number, below which all numbers count as equal."""

TINY_LAMBDA = 1e-3
"""Allowed distance of a fitted lambda outside 0 to 1."""

OTHER_UNITS = 0.02
"""Difference of a factor from 1 above which numbers have other units."""

MIN_MOVED_ROWS = 64
"""Rows above which targets that moved with the values are no coincidence: values of successive steps are alike."""

MAX_MOVED = 2.0
"""Mean distance that targets moved, relative to the distance that values have moved later, up to which the values explain it."""

MIN_CORRELATION = 0.9
"""Correlation above which targets moved with the values of the minibatches: unrelated differences have a correlation of 0."""

MAX_DIFFERING = 0.9
"""Quantile of the sums, and of their negative, between which they must differ."""


@dataclass(frozen=True, slots=True)
class ReturnInputs:
    """Columns of a rollout or of some of its rows, float64; [T, B] if steps follow one another, else of any shape.

    Attributes:
        advantages: as they are stored.
        values: at collection.
        claimed: the trainer's returns.
        rewards, next_values: next values are 0 after termination; None if missing.
        ended: bool: the step ended its episode; None if rewards are missing.
        gamma: discount; None if rewards are missing.
        new_values: the critic's estimates after some optimizer steps; None if missing.
        valid: rows that count; None if all do.
    """

    advantages: Tensor
    values: Tensor
    claimed: Tensor
    rewards: Tensor | None = None
    next_values: Tensor | None = None
    ended: Tensor | None = None
    gamma: float | None = None
    new_values: Tensor | None = None
    valid: Tensor | None = None

    def counted(self, values: Tensor) -> Tensor:
        """The rows that count, [N]."""
        return values.flatten() if self.valid is None else values[self.valid]


def _with_normalized(inputs: ReturnInputs) -> list[Tensor] | None:
    counted = inputs.counted(inputs.advantages)
    normal = standards(inputs.advantages, counted, inputs.advantages)
    return None if len(counted) < 2 else [one + inputs.values for one in normal]


def _normalized_after(inputs: ReturnInputs) -> list[Tensor] | None:
    """Returns whose normalised difference from the values equals the stored advantages."""
    rest, stored = inputs.counted(inputs.claimed - inputs.values), inputs.counted(inputs.advantages)
    if len(rest) < MIN_ROWS or not 0.9 < float(stored.std()) < 1.1 or not abs(float(stored.mean())) < 0.1:
        return None
    if float(rest.std()) <= TINY_SPREAD * float(inputs.counted(inputs.claimed).abs().amax()):
        return None  # returns equal to the values are any advantages times 0
    candidates = []
    for rows, correction in product((rest, inputs.claimed - inputs.values), (0, 1)):
        std, mean = torch.std_mean(rows, correction=correction)
        candidates.append(inputs.advantages * (std + STD_EPS) + mean + inputs.values)
    return candidates


def _unrelated(inputs: ReturnInputs) -> Tensor | None:
    """The claimed returns, if they do not correlate with any input of targets and are not a permutation of an input.

    None if rewards are missing, because wrong advantages may be unrelated to correct returns.
    """
    if inputs.rewards is None:
        return None
    claimed, total = inputs.counted(inputs.claimed), inputs.counted(inputs.advantages + inputs.values)
    size = float(claimed.abs().amax())
    if len(claimed) < MIN_UNRELATED_ROWS or float(claimed.std()) <= TINY_SPREAD * size:
        return None
    if float((ranked(claimed, total) - claimed).abs().amax()) <= TOLERANCES["fp32"] * size:
        return None
    sums = (_discounted(inputs, bootstrap=False), inputs.next_values, inputs.rewards, inputs.new_values)
    others = [inputs.counted(one) for one in (inputs.advantages, inputs.values, *sums) if one is not None]
    columns = torch.stack([claimed, *(one for one in (total, *others) if float(one.std()) > 0)])
    ranks = torch.stack([one.argsort().argsort().double() for one in columns])
    bound = CHANCE * len(claimed) ** -0.5
    related = [torch.corrcoef(one)[0, 1:].abs().amax() for one in (columns, ranks) if len(one) > 1]
    return inputs.claimed if related and all(bool(one < bound) for one in related) else None


def _normalized_sum(inputs: ReturnInputs) -> list[Tensor] | None:
    total = inputs.advantages + inputs.values
    counted = inputs.counted(total)
    return None if len(counted) < MIN_ROWS else standards(total, counted)


def _fitted(inputs: ReturnInputs, *columns: Tensor) -> tuple[Tensor, list[float]] | None:
    """Least-squares fit of the claimed returns by the columns and a constant, and its coefficients; None for too few rows."""
    terms = [*columns, torch.ones_like(inputs.claimed)]
    rows, claimed = torch.stack([inputs.counted(one) for one in terms], 1), inputs.counted(inputs.claimed)
    if len(rows) < MIN_ROWS:
        return None
    factors = torch.linalg.lstsq(rows, claimed.unsqueeze(1)).solution.flatten()
    return torch.stack(terms, -1) @ factors, factors.tolist()


def _in_other_units(inputs: ReturnInputs) -> tuple[Tensor, float, bool] | None:
    """Advantages plus values, shifted and scaled to fit the returns, the scale, and whether the critic's estimates follow the returns.

    If targets are scaled by mistake, the critic's estimates are closer to the stored values.
    """
    fit = None if inputs.new_values is None else _fitted(inputs, inputs.advantages + inputs.values)
    if fit is None or inputs.new_values is None or fit[1][0] <= 0:
        return None
    total, (slope, offset) = fit
    # if nearly all sums are equal, a line through two points, such as the rewards and the last one, shows nothing
    sums = inputs.counted(total)
    if bool((sums.quantile(MAX_DIFFERING) - sums.quantile(1 - MAX_DIFFERING)).abs() <= TOLERANCES["fp32"] * sums.abs().amax()):
        return None
    values, estimates = inputs.counted(inputs.values), inputs.counted(inputs.new_values)
    moved, kept = (float((estimates - one).abs().median()) for one in (slope * values + offset, values))
    return total, slope, moved < kept


def _rescaled(inputs: ReturnInputs) -> Tensor | None:
    """Advantages plus values, shifted and scaled by running statistics, if the critic's estimates are shifted and scaled too."""
    units = _in_other_units(inputs)
    return units[0] if units is not None and units[2] else None


def _outputs_rescaled(inputs: ReturnInputs) -> Tensor | None:
    """Advantages plus values in other units, if the values were scaled back for the advantages and the critic's outputs were stored."""
    fit, plain = _fitted(inputs, inputs.advantages, inputs.values), _fitted(inputs, inputs.advantages + inputs.values)
    if is_standard(inputs.advantages, inputs.valid):  # of an unknown scale
        return None
    if fit is None or plain is None or min(fit[1][:2]) <= 0 or any(abs(one - 1) < OTHER_UNITS for one in fit[1][:2]):
        return None
    claimed = inputs.counted(inputs.claimed).abs().amax()
    is_sum = float(inputs.counted((plain[0] - inputs.claimed).abs()).amax()) <= TOLERANCES["fp32"] * float(claimed)
    return None if is_sum else fit[0]


def _other_units(inputs: ReturnInputs) -> Tensor | None:
    """Scaled sums of advantages and values although the critic's estimates keep the units of the values."""
    units = _in_other_units(inputs)
    return units[0] if units is not None and not units[2] and abs(units[1] - 1) > OTHER_UNITS else None


def _discounted(inputs: ReturnInputs, *, bootstrap: bool) -> Tensor | None:
    """Discounted sums of rewards, with or without the value after the last step."""
    if inputs.rewards is None or inputs.next_values is None or inputs.ended is None or inputs.gamma is None:
        return None
    goes_on = ~inputs.ended if inputs.valid is None else ~inputs.ended & inputs.valid
    after = torch.where(inputs.ended, inputs.next_values, 0.0)
    if bootstrap:
        after[-1] = inputs.next_values[-1]
    rewards = inputs.rewards + inputs.gamma * after
    counted = rewards if inputs.valid is None else torch.where(inputs.valid, rewards, 0.0)
    return discounted_sums(counted, inputs.gamma * goes_on)


def _td_targets(inputs: ReturnInputs) -> Tensor | None:
    if inputs.rewards is None or inputs.next_values is None or inputs.gamma is None:
        return None
    return inputs.rewards + inputs.gamma * inputs.next_values


def _new_values(inputs: ReturnInputs) -> Tensor | None:
    """Advantages plus new values; the claimed returns if their difference correlates with the values of a later step."""
    if inputs.new_values is None:
        return None
    exact, rescaled = inputs.advantages + inputs.new_values, _rescaled(inputs)
    if rescaled is not None:
        error = float(inputs.counted(rescaled - inputs.claimed).abs().amax())
        if error <= TOLERANCES["fp32"] * float(inputs.counted(inputs.claimed).abs().amax()):
            return exact  # the critic's estimates explain shifted and scaled targets as well
    moved, later = inputs.counted(inputs.claimed - inputs.advantages - inputs.values), inputs.counted(exact)
    later = later - inputs.counted(inputs.advantages + inputs.values)
    differs = moved.abs() > MIN_MOVED * moved.abs().max()
    if int(differs.sum()) < MIN_MOVED_ROWS or float(moved.abs().mean()) > MAX_MOVED * float(later.abs().mean()):
        return exact
    together = torch.corrcoef(torch.stack([moved[differs], later[differs]]))[0, 1]
    return inputs.claimed if bool(together > MIN_CORRELATION) else exact


def _swapped(inputs: ReturnInputs) -> list[Tensor]:
    readings = other_readings(inputs.values.shape) if inputs.values.dim() == 2 else ()
    return [inputs.advantages + reading(inputs.values) for reading in readings]


def _mean_value(inputs: ReturnInputs) -> Tensor | None:
    mean = inputs.counted(inputs.values)
    return inputs.advantages + mean.mean() if len(mean) > 1 else None


def _other_rows(inputs: ReturnInputs) -> Tensor | None:
    counted = inputs.counted(inputs.claimed)
    if len(counted) < MIN_ROWS:
        return None
    moved = ranked(counted, inputs.counted(inputs.advantages + inputs.values))
    if inputs.valid is None:
        return moved.view_as(inputs.claimed)
    result = inputs.claimed.clone()
    result[inputs.valid] = moved
    return result


def _lambda_returns(inputs: ReturnInputs) -> Tensor | None:
    """Values plus GAE at the lambda that fits the claimed returns best; None if no row determines a lambda from 0 to 1."""
    deltas = _td_targets(inputs)
    if deltas is None or inputs.ended is None or inputs.gamma is None:
        return None
    goes_on = ~inputs.ended if inputs.valid is None else ~inputs.ended & inputs.valid
    decay = inputs.gamma * goes_on
    deltas, rest = deltas - inputs.values, inputs.claimed - inputs.values
    if inputs.valid is not None:
        deltas, rest = torch.where(inputs.valid, deltas, 0.0), torch.where(inputs.valid, rest, 0.0)
    ahead, step = (decay[:-1] * rest[1:]), (rest - deltas)[:-1]
    squares = float(ahead.square().sum())
    gae_lambda = float((ahead * step).sum()) / squares if squares > 0 else -1.0
    if int((ahead != 0).sum()) < MIN_ROWS or not -TINY_LAMBDA < gae_lambda < 1 + TINY_LAMBDA:
        return None
    return inputs.values + discounted_sums(deltas, min(max(gae_lambda, 0.0), 1.0) * decay)


def _only_rewards(inputs: ReturnInputs) -> bool:
    """Return True if the returns are rewards of single steps, which equal advantages plus values if the advantages use them too."""
    if inputs.rewards is None or inputs.ended is None or not inputs.gamma or inputs.claimed.dim() != 2:
        return False
    goes_on = ~inputs.ended[:-1] if inputs.valid is None else ~inputs.ended[:-1] & inputs.valid[1:]
    apart = inputs.counted((inputs.claimed - inputs.rewards).abs()).amax()
    return bool(inputs.rewards[1:][goes_on].any()) and float(apart) <= TOLERANCES["fp32"] * float(inputs.rewards.abs().amax())


def _without_mistakes(check: EquationCheck, inputs: ReturnInputs) -> EquationCheck:
    """Return the check without mistakes as explanations, if the returns are lambda-returns of rewards and values.

    Such returns are correct, so the advantages are wrong.
    """
    variants = tuple(one for one in check.explanations if one.hypothesis.variant)
    right = None if len(variants) == len(check.explanations) else _lambda_returns(inputs)
    if right is None:
        return check
    size = max(float(inputs.counted(one).abs().amax()) for one in (inputs.claimed, inputs.values))
    error = float(inputs.counted(right - inputs.claimed).abs().amax())
    return replace(check, explanations=variants) if error <= check.tolerance * size else check


RETURNS = Equation(
    name="returns",
    rank=25,
    quantity="the returns",
    equation="R_t = A_t + V(s_t)",
    source="1506.02438, eq. 16; Huang et al. 2022, The 37 implementation details of PPO",
    inputs="advantages before normalisation, values and returns",
    check="check_returns",
    shown_by="test_returns",
    compute=lambda inputs: inputs.advantages + inputs.values,
    tolerance=1.0,  # sums in float32 have a relative error of 1e-7
    advice="Check that advantages, values and returns are indexed and masked in the same way.",
    hypotheses=(
        mistake("normalized", "values plus normalised advantages")
        .predicts("R = (A - mean) / std + V", _with_normalized)
        .advises("Compute the returns before you normalise advantages.")
        .cites("Huang et al. 2022: returns are computed before advantages are normalised"),
        mistake("values_missing", "advantages: the values were not added")
        .predicts("R = A", lambda inputs: inputs.advantages)
        .advises("Add the values, or the critic learns the advantage.")
        .cites("program: subclass-returns_are_advantages"),
        mistake("values_alone", "values: the advantages were not added")
        .predicts("R = V", lambda inputs: inputs.values)
        .advises("Add the advantages, or the critic learns nothing."),
        mistake("values_subtracted", "advantages minus values, or values minus advantages")
        .predicts("R = ±(A - V)", lambda inputs: [inputs.advantages - inputs.values, inputs.values - inputs.advantages])
        .advises("Returns are advantages plus values."),
        mistake("next_values", "advantages plus the values of the next states")
        .predicts("R_t = A_t + V(s_{t+1})", lambda inputs: inputs.advantages + inputs.next_values)
        .given(needs="next_values")
        .advises("Add the value of the state that the action was taken in."),
        mistake("new_values", "advantages plus the values of a critic that the update has already changed")
        .predicts("R = A + V_new", _new_values)
        .advises("Add the values stored at collection once, before the first epoch.")
        .cites("program: script-returns_new_values"),
        mistake("rewards", "the rewards").predicts("R_t = r_t", lambda inputs: inputs.rewards).advises("Store advantages plus values."),
        mistake("monte_carlo_cut", "discounted rewards to the end of the rollout, without a bootstrap after the last step")
        .predicts("R_t = Σ_k γ^k r_{t+k}", partial(_discounted, bootstrap=False))
        .advises("Bootstrap the last step with the value of the state that follows the rollout.")
        .cites("program: script-returns_mc_cut"),
        mistake("axes_swapped", "advantages plus values with steps and environments swapped")
        .predicts("R[t, b] = A[t, b] + V.reshape(B, T)[b, t]", _swapped)
        .advises("Transpose before you reshape: `reshape` and `view` do not move entries."),
        mistake("mean_value", "advantages plus the mean value of all rows")
        .predicts("R_i = A_i + mean_j V_j", _mean_value)
        .advises("Print the shapes of advantages and values: [N] plus [N, 1] is [N, N].")
        .cites("PacktPublishing/Deep-Reinforcement-Learning-Hands-On#74"),
        mistake("other_rows", "other rows' advantages plus values")
        .predicts("R_i = A_j + V_j", _other_rows)
        .advises("Index advantages, values and returns with the same rows."),
        mistake("unrelated", "numbers that are unrelated to advantages, values and rewards")
        .predicts("R_i independent of A, V and r", _unrelated)
        .advises("Check where the targets are assigned: the critic cannot learn them.")
        .cites("program: bundled-returns_shuffled"),
        mistake(
            "other_units",
            "shifted and scaled sums of advantages and values, while the advantages are made of the critic's outputs as they are",
        )
        .predicts("R = (A + V - m) / s, A made of V", _other_units)
        .given(doubtful_without="history", of="units")
        .advises("Scale the critic's outputs back to the units of the rewards before the advantages are computed.")
        .cites("van Hasselt et al. 2016, 1602.07714 (PopArt)"),
        variant("normalized_after", "values plus advantages from before normalisation over the whole batch")
        .predicts("A = (R - V - mean) / std", _normalized_after)
        .cites("openai/spinningup, PPOBuffer.get; leggedrobotics/rsl_rl, RolloutStorage.compute_returns"),
        variant("normalized_returns", "advantages plus values, normalised over the batch")
        .predicts("R = (A + V - mean) / std", _normalized_sum)
        .cites("2006.05990, section 3.3, value function normalisation"),
        variant("rescaled", "advantages plus values, shifted and scaled like the critic's estimates")
        .predicts("R = (A + V - m) / s", _rescaled)
        .given(of="units")
        .cites("van Hasselt et al. 2016, 1602.07714 (PopArt); marlbenchmark/on-policy, ValueNorm"),
        variant("outputs_rescaled", "shifted and scaled sums of advantages and values in other units than the critic's outputs")
        .predicts("R = (A + s' V + m' - m) / s", _outputs_rescaled)
        .given(of="units")
        .cites("van Hasselt et al. 2016, 1602.07714 (PopArt); marlbenchmark/on-policy, ValueNorm"),
        variant("monte_carlo", "discounted rewards with the last value (lambda = 1)")
        .predicts("R_t = Σ_k γ^k r_{t+k} + γ^n V(s_{t+n})", partial(_discounted, bootstrap=True))
        .cites("openai/spinningup ppo: rewards-to-go are the targets of the value function"),
        variant("td_targets", "one-step targets (lambda = 0)")
        .predicts("R_t = r_t + γ V(s_{t+1})", _td_targets)
        .cites("Sutton & Barto 2018, section 13.5"),
    ),
)


@checked_arguments(tolerance=0)
@inference_mode
def check_returns(
    advantages: ArrayLike,
    values: ArrayLike,
    returns: ArrayLike,
    *,
    rewards: ArrayLike | None = None,
    next_values: ArrayLike | None = None,
    ended: ArrayLike | None = None,
    gamma: float | None = None,
    new_values: ArrayLike | None = None,
    valid: ArrayLike | None = None,
    precision: str | None = None,
    tolerance: float | None = None,
) -> EquationCheck:
    """Return the comparison of the critic's targets with advantages plus values.

    Args:
        advantages: as they are stored, before minibatches are normalised, [T, B] or any shape.
        values, returns: same shape; values at collection.
        rewards, next_values, ended, gamma: to recognise Monte-Carlo returns and TD targets, [T] or [T, B]; `next_values` is 0 after
                termination.
        new_values: the critic's estimates after some optimizer steps.
        valid: bool; None if every entry counts.
        precision: of the trainer's arithmetic.
        tolerance: largest relative error; by precision if it is None.

    Raises:
        ValueError: if shapes disagree.
    """
    claimed = as_tensor(returns).detach()
    given = {"advantages": advantages, "values": values, "rewards": rewards, "next_values": next_values, "new_values": new_values}
    columns = {
        name: as_tensor(column, claimed).detach().to(claimed.device).double() for name, column in given.items() if column is not None
    }
    flags = [None if mask is None else mask.to(claimed.device) for mask in (as_mask(ended), as_mask(valid))]
    same_shape(returns=claimed, ended=flags[0], valid=flags[1], **columns)
    if not claimed.numel() or (flags[1] is not None and not bool(flags[1].any())):
        return unchecked(RETURNS, "no row counts")
    inputs = ReturnInputs(claimed=claimed.double(), ended=flags[0], valid=flags[1], gamma=gamma, **columns)
    magnitudes = (inputs.counted(inputs.advantages), inputs.counted(inputs.values))
    check = compare(*(RETURNS, inputs, claimed), magnitudes=magnitudes, valid=inputs.valid, precision=precision, tolerance=tolerance)
    if check.matches and _only_rewards(inputs):
        return replace(explained(RETURNS, "rewards"), tolerance=check.tolerance)
    return _without_mistakes(distinguished(check), inputs)
