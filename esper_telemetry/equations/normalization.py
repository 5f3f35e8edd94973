"""The equation of normalised advantages, the mistakes that explain a difference, and `check_normalized_advantages`.

Shapes: M minibatches of N rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, Literal

from esper_telemetry.core.arrays import ArrayLike, as_mask, as_tensor
from esper_telemetry.core.lazy import Tensor, inference_mode, torch
from esper_telemetry.core.requirements import checked_arguments
from esper_telemetry.equations.comparison import EquationCheck, compare, distinguished, ranked, unchecked
from esper_telemetry.equations.equation import Equation, mistake, variant
from esper_telemetry.equations.gae import STD_EPS
from esper_telemetry.equations.returns import MIN_ROWS
from esper_telemetry.metrics.statistics import same_shape

MIN_GROUP_ROWS = 3
"""Fewest rows of an informative normalised group: a single row becomes 0, and two rows become opposite numbers."""

Scope = Literal["minibatch", "rollout", "nothing"]


@dataclass(frozen=True, slots=True)
class NormalizedInputs:
    """Advantages of M minibatches, [M, N] float64, and how they are normalised.

    Attributes:
        advantages: before normalisation.
        claimed: as they multiply the ratio.
        valid: [M, N], bool: rows that count.
        rollout: of all rows of the rollout that count, [T, B] or any shape; None if missing.
        environments: [M, N], int: environment of each row; None if unknown.
        over: rows over which mean and standard deviation are computed.
        correction: 1 for an unbiased standard deviation, 0 for a biased one.
        floor: lower bound of the standard deviation before dividing by it.
        in_order: [M, N], before normalisation, of the rollout's rows in order; None if missing.
        of_others: [M, N], before normalisation, of the rows that they came from, if these are known to be other rows.
    """

    advantages: Tensor
    claimed: Tensor
    valid: Tensor
    rollout: Tensor | None = None
    environments: Tensor | None = None
    over: Scope = "minibatch"
    correction: int = 1
    floor: float = 0.0
    in_order: Tensor | None = None
    of_others: Tensor | None = None

    def moments(self, over: Scope | None = None, *, correction: int | None = None) -> tuple[Tensor, Tensor] | None:
        """Return mean and standard deviation, [M, 1] or 0-d; None if the rollout is missing."""
        correction = self.correction if correction is None else correction
        if (over or self.over) == "rollout":
            if self.rollout is None or self.rollout.numel() <= correction:
                return None
            std, mean = torch.std_mean(self.rollout, correction=correction)
            return mean, std.clamp(min=self.floor)
        count = self.valid.sum(-1, keepdim=True)
        mean = (self.advantages * self.valid).sum(-1, keepdim=True) / count
        squares = ((self.advantages - mean).square() * self.valid).sum(-1, keepdim=True)
        return mean, (squares / (count - correction).clamp(min=1)).sqrt().clamp(min=self.floor)

    def standard(self, over: Scope, *, correction: int | None = None) -> Tensor | None:
        """Return the advantages minus their mean, divided by their standard deviation; a single row is unchanged."""
        moments = self.moments(over, correction=correction)
        if moments is None:
            return None
        normal = (self.advantages - moments[0]) / (moments[1] + STD_EPS)
        return torch.where(self.valid.sum(-1, keepdim=True) < 2, self.advantages, normal) if over == "minibatch" else normal

    def sizes(self) -> Tensor:
        """Return the magnitudes of valid advantages divided by their standard deviation, which determine the rounding."""
        moments = self.moments("minibatch" if self.over == "nothing" else self.over)
        std = torch.ones_like(self.advantages[:1, :1]) if moments is None or self.over == "nothing" else moments[1]
        single = self.valid.sum(-1, keepdim=True) < 2
        return torch.where(single, self.advantages.abs(), self.advantages.abs() / (std + STD_EPS))[self.valid]


def normalized_advantages(inputs: NormalizedInputs) -> Tensor:
    """Return advantages normalised according to the settings."""
    normal = None if inputs.over == "nothing" else inputs.standard(inputs.over)
    return inputs.advantages if normal is None else normal


SCOPES: tuple[Scope, ...] = ("minibatch", "rollout")

Candidates = Sequence[Tensor | None]
"""Advantages [M, N] that a mistake may give; None for those that need a missing rollout."""


def _over(inputs: NormalizedInputs, scope: Scope) -> Candidates:
    """Advantages normalised over other rows than the settings name, by a biased or an unbiased standard deviation."""
    return [inputs.standard(scope, correction=correction) for correction in (0, 1) if scope != inputs.over]


def _by_moments(change: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[NormalizedInputs], Candidates]:
    """Return the result of `change` for advantages, mean and standard deviation, of the minibatch or of the rollout."""

    def compute(inputs: NormalizedInputs) -> Candidates:
        moments = [both for over in SCOPES for correction in (0, 1) if (both := inputs.moments(over, correction=correction))]
        return [change(inputs.advantages, *both) for both in moments]

    return compute


def _over_environments(inputs: NormalizedInputs) -> Candidates:
    """Each environment normalised over its own rows of the minibatch, of all minibatches, or of the rollout.

    The columns of a rollout [T, B] are its environments; a rollout of another shape is flattened by step or by environment.
    """
    index, valid = inputs.environments, inputs.valid
    if index is None or int(index.max()) == 0:
        return []
    count, rows = int(index.max()) + 1, inputs.advantages[valid]
    places = index + count * torch.arange(len(index), device=index.device).unsqueeze(1)
    candidates: list[Tensor | None] = [part for groups in (index, places) for part in _in_groups(inputs, groups, rows, groups[valid])]
    rollout = rows[:0] if inputs.rollout is None else inputs.rollout
    for envs in {count, max(count, rollout.shape[-1])} if rollout.numel() else ():
        if rollout.numel() % envs == 0:
            order = torch.arange(rollout.numel(), device=index.device)
            for groups in (order % envs, order // (rollout.numel() // envs)):
                candidates += _in_groups(inputs, index, rollout.flatten(), groups)
    return candidates


def _in_groups(inputs: NormalizedInputs, own: Tensor, rows: Tensor, groups: Tensor) -> list[Tensor]:
    """Return the advantages normalised over groups of rows, biased and unbiased; empty if every group has fewer than three rows.

    Args:
        own: [M, N], int: the group of each advantage.
        rows, groups: [R]: the numbers in mean and standard deviation, and the group of each number.
    """
    zeros = rows.new_zeros(max(int(own.max()), int(groups.max())) + 1)
    count = zeros.index_add(0, groups, torch.ones_like(rows))
    if int(count.max()) < MIN_GROUP_ROWS:
        return []
    mean = zeros.index_add(0, groups, rows) / count.clamp(min=1)
    squares = zeros.index_add(0, groups, (rows - mean[groups]).square())
    deviations = [(squares / (count - correction).clamp(min=1)).sqrt() for correction in (0, 1)]
    return [(inputs.advantages - mean[own]) / (std[own] + STD_EPS) for std in deviations]


def _without_signs(inputs: NormalizedInputs) -> Candidates:
    """Negative advantages made positive or 0; None if no advantage is negative."""
    candidates: list[Tensor | None] = []
    for change in (torch.abs, torch.square, torch.relu):
        rollout = None if inputs.rollout is None else change(inputs.rollout)
        changed = replace(inputs, advantages=change(inputs.advantages), rollout=rollout)
        candidates.append(changed.advantages)
        for scope, correction in product(SCOPES, (0, 1)):
            normal = inputs.standard(scope, correction=correction)
            candidates += [changed.standard(scope, correction=correction), None if normal is None else change(normal)]
    return candidates if bool((inputs.advantages < 0)[inputs.valid].any()) else []


def _over_padding(inputs: NormalizedInputs) -> Candidates:
    """Mean and standard deviation that include rows that do not count, as stored or as zeros."""
    if bool(inputs.valid.all()):
        return []
    candidates: list[Tensor | None] = []
    for filled in (inputs.advantages, inputs.advantages * inputs.valid):
        for correction in (0, 1):
            std, mean = torch.std_mean(filled, -1, correction=correction, keepdim=True)
            candidates.append((inputs.advantages - mean) / (std + STD_EPS))
    return candidates


def _reordered(inputs: NormalizedInputs) -> Candidates:
    """The numbers of known other rows, or the correct numbers in another order: within each minibatch, or within all of them."""
    if inputs.of_others is not None:
        return [normalized_advantages(replace(inputs, advantages=inputs.of_others))]
    if int(inputs.valid.sum(-1).amin()) < MIN_ROWS:
        return []
    right = normalized_advantages(inputs)
    within, across = inputs.claimed.clone(), inputs.claimed.clone()
    for own, numbers, counted in zip(within, right, inputs.valid, strict=True):
        own[counted] = ranked(own[counted], numbers[counted])
    across[inputs.valid] = ranked(across[inputs.valid], right[inputs.valid])
    return [within, across]


def _in_order(inputs: NormalizedInputs) -> Candidates:
    """The advantages of the rollout's rows in order, not normalised, or normalised over the minibatch or the rollout."""
    if inputs.in_order is None:
        return []
    other = replace(inputs, advantages=inputs.in_order)
    return [other.standard("minibatch"), other.standard("rollout"), inputs.in_order]


def _clipped(inputs: NormalizedInputs, claimed: Tensor) -> tuple[float, Tensor] | None:
    right = normalized_advantages(inputs)
    limit = float(claimed[inputs.valid][::2].abs().amax()) if int(inputs.valid.sum()) >= MIN_ROWS else 0.0
    if limit <= 0 or int((right.abs() > limit)[inputs.valid].sum()) < 2:
        return None
    return limit, right.clamp(-limit, limit)


NORMALIZED_ADVANTAGES = Equation(
    name="normalized_advantages",
    rank=30,
    quantity="the advantages in use",
    equation="(A - mean) / std over the rows that the settings name",
    source="Huang et al. 2022, The 37 implementation details of PPO",
    inputs="advantages before and after normalisation, and the rows of each minibatch",
    check="check_normalized_advantages",
    shown_by="test_returns",
    compute=normalized_advantages,
    tolerance=1.0,  # errors in float32 reach 3e-7 of the largest |A| / std
    advice="Check every line that changes advantages between the rollout and the loss.",
    hypotheses=(
        mistake("over_minibatch", "advantages normalised over each minibatch")
        .predicts("(A - mean_minibatch) / std_minibatch", partial(_over, scope="minibatch"))
        .advises("Configure in one place over which rows advantages are normalised."),
        mistake("over_rollout", "advantages normalised over the whole rollout")
        .predicts("(A - mean_rollout) / std_rollout", partial(_over, scope="rollout"))
        .advises("Configure in one place over which rows advantages are normalised."),
        mistake("over_environments", "advantages normalised over each environment")
        .predicts("(A - mean_b) / std_b", _over_environments)
        .advises("Compute the mean and the standard deviation over both axes."),
        mistake("over_padding", "advantages normalised over all rows, including padding")
        .predicts("mean and std over all N rows", _over_padding)
        .advises("Compute the mean and the standard deviation over the rows of the mask.", source="NovaSky-AI/SkyRL#1305"),
        mistake("not_normalized", "advantages before normalisation")
        .predicts("A", lambda inputs: inputs.advantages)
        .given(doubtful_without="setting")
        .advises("Normalise the advantages, or switch normalisation off in the settings.", source="program: subclass-norm_none"),
        mistake("std_alone", "advantages divided by their standard deviation, without subtracting their mean")
        .predicts("A / std", _by_moments(lambda advantages, mean, std: advantages / (std + STD_EPS)))
        .advises("Subtract the mean.", source="program: subclass-norm_no_mean"),
        mistake("mean_alone", "advantages minus their mean, not divided by their standard deviation")
        .predicts("A - mean", _by_moments(lambda advantages, mean, std: advantages - mean))
        .advises("Divide by the standard deviation.", source="program: script-norm_no_std"),
        mistake("variance", "advantages minus their mean, divided by their variance")
        .predicts("(A - mean) / std²", _by_moments(lambda advantages, mean, std: (advantages - mean) / (std.square() + STD_EPS)))
        .given(of="loss")
        .advises("Divide by the standard deviation."),
        mistake("precedence", "advantages minus the ratio of mean and standard deviation")
        .predicts("A - mean / std", _by_moments(lambda advantages, mean, std: advantages - mean / (std + STD_EPS)))
        .advises("Put `advantages - mean` in parentheses."),
        mistake("sign", "normalised advantages with the opposite sign")
        .predicts("-(A - mean) / std", lambda inputs: -normalized_advantages(inputs))
        .given(of="loss")
        .advises("Keep the sign: it decides which actions become more likely."),
        mistake("absolute", "advantages with negative numbers made positive, or 0, before or after normalisation")
        .predicts("|A|, A² or max(A, 0)", _without_signs)
        .advises("Keep the signs: an action that is worse than expected must become less likely.")
        .cites("program: script-abs_before_norm"),
        mistake("other_rows", "normalised advantages of other rows")
        .predicts("A_j in row i", _reordered)
        .advises("Index advantages with the rows of the observations and actions.")
        .cites("program: subclass-pg_rows"),
        mistake("in_order", "advantages of the rollout's rows in order, instead of the rows of the minibatch")
        .predicts("A_k for the k-th row taken, ignoring its index", _in_order)
        .advises("Index advantages with the rows of the observations and actions.", source="program: loop-pg_rows"),
        variant("other_std", "advantages normalised with the biased standard deviation instead of the unbiased, or the reverse")
        .predicts(
            "std over N instead of N - 1, or the reverse",
            lambda inputs: None if inputs.over == "nothing" else inputs.standard(inputs.over, correction=1 - inputs.correction),
        )
        .given(of="loss")
        .cites("NumPy's std is biased, torch's is not"),
        variant("rms", "advantages divided by their root mean square").predicts(
            "A / sqrt(mean A²)", _by_moments(lambda advantages, mean, std: advantages / ((mean.square() + std.square()).sqrt() + STD_EPS))
        ),
        variant("clipped", "normalised advantages clipped to [-c, c],").fits("clip((A - mean) / std, -c, c)", "c", _clipped),
    ),
)


@checked_arguments(correction=0, floor=0, tolerance=0)
@inference_mode
def check_normalized_advantages(
    advantages: ArrayLike,
    normalized: ArrayLike,
    *,
    over: Scope | None = "minibatch",
    rollout: ArrayLike | None = None,
    environments: ArrayLike | None = None,
    in_order: ArrayLike | None = None,
    of_others: ArrayLike | None = None,
    correction: int = 1,
    floor: float = 0.0,
    valid: ArrayLike | None = None,
    precision: str | None = None,
    tolerance: float | None = None,
) -> EquationCheck:
    """Return the comparison of the advantages that multiply the ratio with the rollout's normalised advantages.

    Normalising twice gives the same numbers, except for rounding, and matches.

    Args:
        advantages: before normalisation, [N] of one minibatch or [M, N] of several.
        normalized: as they multiply the ratio, same shape.
        over: rows over which mean and standard deviation are computed: `minibatch`, `rollout`, or `nothing` if advantages are not
                normalised; None if the settings do not say, and then each of the three matches.
        rollout: advantages of all rows of the rollout that count, [T, B] or any shape; needed for `rollout`.
        environments: environment of each row, int, same shape.
        in_order: before normalisation, of the rollout's rows in order, same shape, to recognise advantages of these rows.
        of_others: before normalisation, of other rows that they came from, same shape.
        correction: 1 for an unbiased standard deviation, 0 for a biased one.
        floor: lower bound of the standard deviation before dividing by it.
        valid: bool, same shape: rows that are not padding; None if every row counts.
        precision: of the trainer's arithmetic.
        tolerance: largest relative error; by precision if it is None.

    Raises:
        ValueError: if shapes disagree, `over` is something else, or the rollout is missing.
    """
    if over not in ("minibatch", "rollout", "nothing", None):
        raise ValueError(f"over must be 'minibatch', 'rollout', 'nothing' or None, got {over!r}")
    if over == "rollout" and rollout is None:
        raise ValueError("over='rollout' needs rollout, the advantages of all its rows")
    claimed = as_tensor(normalized).detach().double()
    raw = as_tensor(advantages, claimed).detach().to(claimed)
    mask = as_mask(valid, claimed)
    rows = None if environments is None else as_tensor(environments, claimed).long()
    same_shape(advantages=raw, normalized=claimed, environments=rows, valid=mask)
    if claimed.dim() not in (1, 2):
        raise ValueError(f"advantages must have shape [N] or [M, N], got {list(claimed.shape)}")
    claimed, raw = torch.atleast_2d(claimed), torch.atleast_2d(raw)
    counted = torch.ones_like(claimed, dtype=torch.bool) if mask is None else torch.atleast_2d(mask.to(claimed.device))
    if not bool(counted.any()):
        return unchecked(NORMALIZED_ADVANTAGES, "no row counts")
    if over is None:
        scopes: tuple[Scope, ...] = ("minibatch", "nothing") if rollout is None else ("minibatch", "rollout", "nothing")
    else:
        scopes = (over,)
    whole = None if rollout is None else as_tensor(rollout, claimed).detach().to(claimed)
    inputs = NormalizedInputs(
        advantages=torch.where(counted, raw, raw if mask is None else raw.nan_to_num()),
        claimed=claimed,
        valid=counted,
        rollout=whole,
        environments=None if rows is None else torch.atleast_2d(rows.to(claimed.device)),
        correction=correction,
        floor=floor,
        in_order=None if in_order is None else torch.atleast_2d(as_tensor(in_order, claimed).detach().to(claimed)),
        of_others=None if of_others is None else torch.atleast_2d(as_tensor(of_others, claimed).detach().to(claimed)),
    )
    settings: dict[str, Any] = {"valid": counted, "precision": precision, "tolerance": tolerance}
    checks = []
    for scoped in (replace(inputs, over=scope) for scope in scopes):
        check = compare(NORMALIZED_ADVANTAGES, scoped, claimed, magnitudes=(scoped.sizes(),), **settings)
        checks.append(distinguished(check))
        if checks[-1].matches:
            return checks[-1]
    if over is None and any(one.doubtful_without == "setting" for one in checks[0].hypotheses):
        return unchecked(NORMALIZED_ADVANTAGES, "the settings do not say whether advantages are normalised")
    return next((one for one in checks if one.holds), next((one for one in checks if one.explanations), checks[0]))
