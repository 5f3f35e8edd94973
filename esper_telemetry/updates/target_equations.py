"""Checks of a rollout's targets that the columns of a sampled update allow: advantages, returns, normalised advantages.

Shapes: T steps, B environments; M minibatches of N rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from esper_telemetry.core.containment import Measurement
from esper_telemetry.core.facts import Facts
from esper_telemetry.core.group import MetricGroup
from esper_telemetry.equations.comparison import EquationCheck, explained, unchecked
from esper_telemetry.equations.gae import GaeInputs, following_values, gae, is_standard
from esper_telemetry.equations.gae_advantages import ADVANTAGES, compare_advantages
from esper_telemetry.equations.normalization import NORMALIZED_ADVANTAGES, Scope, check_normalized_advantages
from esper_telemetry.equations.replayed_outputs import FIRST_DIFFERENCE
from esper_telemetry.equations.returns import RETURNS, check_returns
from esper_telemetry.events import RolloutEnd
from esper_telemetry.updates.update import TARGET_COLUMNS, CollectedRows, JoinedMinibatches, Update, column_in_grid, in_grid, mapped

Held = Mapping[bool, set[str]]
"""Names of equations that have held in earlier rollouts, apart for rollouts whose last step ended the episodes of all environments."""

UNKNOWN_COLUMNS = "the variables that were found do not fit it, and their names may mean something else in this script"

ALIKE_VALUES = "the values are nearly equal, so that they do not show which variables of the script hold them"

ALIKE = 1e-3
"""Range of such values, relative to the largest one."""

MIN_LINE_ROWS = 3
"""Rows of a minibatch from which advantages need not equal others up to a factor and an offset."""

SAME_LINE = 1e-3
"""Largest difference of such advantages, relative to the largest one."""

MIN_NORMALIZED_ROWS, NORMALIZED_ERROR = 32, 1e-4
"""Rows above which a standard deviation of 1, up to this error, and a mean of 0 show that advantages are normalised."""


OTHER_FACTOR = 1e-3
"""Distance from 1 of a factor that is no rounding."""


def target_checks(update: Update, facts: Facts, held: Held | None = None) -> Iterator[Measurement]:
    """Yield the checks of a rollout's targets; `facts` are the run's. `held` also receives the equations that hold in this update."""
    rollout, minibatches, collected = update.rollout, update.minibatches, update.collected
    if rollout is None or not rollout.advantages.numel():
        return
    values = rollout.values
    if facts.columns_by_name and facts.has_critic and bool(values.max() - values.min() <= ALIKE * values.abs().max()):
        yield from (partial(unchecked, equation, ALIKE_VALUES) for equation in (ADVANTAGES, RETURNS))
        return
    gae_lambda, discount = facts.gae_lambda if facts.has_critic else 1.0, facts.gamma
    inputs: GaeInputs | None = None
    if (gae_lambda is not None or facts.columns_by_name) and discount is not None and rollout.ends_known:
        previous = update.context.previous_targets
        inputs = _gae_inputs(rollout, gae_lambda or 0.0, previous)
        inputs = inputs if inputs is None or facts.has_critic else replace(inputs, alone=True)
        targets = _targets(rollout, minibatches)
        check = partial(_advantages, rollout, inputs, targets, facts)
        if gae_lambda is None:
            inputs, check = None, partial(_advantages_at_own_lambda, rollout, previous, targets, facts)
        # flags may be for the step before or after, unless the environments report them; a script may shuffle all of its columns
        # flags that tell time limits from terminations are the environments'
        flags = rollout.time_limits is not None or not torch.equal(rollout.ended, rollout.terminated)
        shown = {
            "flags": flags,
            "order": _values_in_order(rollout, inputs),
            "values": minibatches is None or first_values(rollout, minibatches)[2] <= FIRST_DIFFERENCE,
        }
        proves = None
        if held is not None and flags and bool(rollout.ended[:-1].any()) and not _reads_returns(rollout):
            proves = held[bool(rollout.ended[-1].all())]
        yield partial(certain, facts, check, *(name for name, known in shown.items() if not known), held=proves)
    # before statistics of targets have moved, the critic's outputs have the units of the returns
    missing = () if update.context.previous_targets is not None else ("history",)
    if rollout.returns_known:
        yield partial(certain, facts, partial(_returns, rollout, inputs, minibatches, facts), *missing)
    if minibatches is not None and collected is not None:
        if facts.recomputes_advantages or (facts.columns_by_name and _recomputes_advantages(minibatches, collected)):
            minibatches, collected = _first_pass(minibatches, collected)
        yield partial(certain, facts, partial(_returns_in_use, rollout, minibatches, collected, facts), *missing)
        if NORMALIZED_ADVANTAGES.name not in facts.unchecked_equations and facts.ranks == 1:
            yield partial(certain, facts, partial(_normalized, rollout, minibatches, collected, facts))


def certain(facts: Facts, check: Callable[[], EquationCheck | None], *missing: str, held: set[str] | None = None) -> Iterable[MetricGroup]:
    """Return the check, if there is one. If columns were found by name, a difference without a certain explanation is inconclusive,
    unless the equation has held before.

    `missing` names data that the script does not show; some hypotheses are doubtful without them. `held` are equations that have held
    in rollouts of this kind.
    """
    result = check()
    if result is None:
        return ()
    doubtful = {one.doubtful_without for one in result.hypotheses}.intersection(missing)
    uncertain = "history" in doubtful or bool(facts.columns_by_name and (doubtful or not result.explained))
    if held is not None and result.holds and not uncertain:
        held.add(result.equation.name)
    uncertain = uncertain and (result.error is None or result.equation.name not in (held or ()))
    return unchecked(result.equation, UNKNOWN_COLUMNS) if uncertain else result


def first_values(rollout: RolloutEnd, minibatches: JoinedMinibatches) -> tuple[Tensor, Tensor, float]:
    """Return the rollout's values and the critic's outputs [N] in the first minibatch, before any step, and their largest difference,
    relative to the largest value; empty, and 0, if they are not known.
    """
    rows, values = minibatches.rows, minibatches.values
    first = slice(minibatches.counts[0] if minibatches.counts else 0)
    if rows is None or values is None or not len(rows[first]) or int(rows[first].max()) >= rollout.values.numel():
        return rollout.values.new_empty(0), rollout.values.new_empty(0), 0.0
    stored, outputs = rollout.values.flatten()[rows[first]].double(), values[first].double()
    size = max(1.0, float(stored.abs().amax()), float(outputs.abs().amax()))
    return stored, outputs, float((stored - outputs).abs().amax()) / size


def _recomputes_advantages(minibatches: JoinedMinibatches, collected: CollectedRows) -> bool:
    """Return True for advantages that the first pass has, perhaps normalised, and most minibatches of later passes do not have."""
    parts = zip(minibatches.epochs, *(one.split(minibatches.counts) for one in (collected.advantages, minibatches.advantages)), strict=True)
    same = {True: list[bool](), False: list[bool]()}
    for epoch, stored, used in parts:
        if len(used) >= MIN_LINE_ROWS:
            line = torch.stack([stored.double(), torch.ones_like(stored, dtype=torch.float64)], 1)
            rest = used.double() - line @ torch.linalg.lstsq(line, used.double()).solution
            same[epoch == minibatches.epochs[0]].append(float(rest.abs().amax()) <= SAME_LINE * float(used.abs().amax()))
    first, later = same[True], same[False]
    return bool(first and later) and all(first) and 2 * sum(later) < len(later)


def _values_in_order(rollout: RolloutEnd, inputs: GaeInputs | None) -> bool:
    """Return whether the returns are the advantages, or GAE, plus the values in their own order: only advantages were shuffled then."""
    if not rollout.returns_known or inputs is None or inputs.rollouts > 1:
        return False
    return any(
        torch.allclose((rollout.returns - advantages).to(rollout.values), rollout.values, rtol=1e-3, atol=1e-4)
        for advantages in (rollout.advantages, gae(inputs))
    )


def _count(rollout: RolloutEnd) -> int:
    """Number of rollouts that the record joins."""
    return 1 if rollout.last_values is None else len(rollout.last_values)


def _side_by_side(column: Tensor, parts: int) -> Tensor:
    """Return rollouts one after the other, [K T, B], as [T, K B]."""
    placed: Tensor = column.unflatten(0, (parts, -1)).transpose(0, 1).flatten(1)
    return placed


def _gae_inputs(rollout: RolloutEnd, gae_lambda: float, previous: Tensor | None) -> GaeInputs | None:
    """Return the columns of all rollouts that the record joins, side by side; None if they differ in length."""
    parts = _count(rollout)
    if len(rollout.rewards) % parts:
        return None
    side_by_side = partial(_side_by_side, parts=parts)
    next_values = side_by_side(rollout.next_values).double()
    raw = None if rollout.raw_rewards is None else side_by_side(rollout.raw_rewards).double()
    ended, terminated = side_by_side(rollout.ended), side_by_side(rollout.terminated)
    if rollout.time_limits is not None:
        limits = side_by_side(rollout.time_limits)
        next_values, terminated = next_values.where(~limits, 0.0), terminated & ~limits
    inputs = GaeInputs(
        rewards=side_by_side(rollout.rewards).double(),
        values=side_by_side(rollout.values).double(),
        next_values=next_values,
        ended=ended,
        terminated=terminated,
        following=next_values,
        claimed=side_by_side(rollout.advantages).double(),
        gamma=float(rollout.gamma),
        gae_lambda=gae_lambda,
        valid=None if rollout.valid is None else side_by_side(rollout.valid),
        raw_rewards=raw,
        previous=_previous(previous, rollout, gae_lambda),
        rollouts=parts,
    )
    return following_values(inputs, _last_values(rollout))


def _last_values(rollout: RolloutEnd) -> Tensor | None:
    return None if rollout.last_values is None else rollout.last_values.double().reshape(-1)


def _advantages(rollout: RolloutEnd, inputs: GaeInputs | None, targets: Tensor | None, facts: Facts) -> EquationCheck:
    """Check the advantages, and whether the returns in them have the units of the critic's targets."""
    check = _advantages_beside_limits(rollout, inputs, facts)
    if inputs is not None and targets is not None and facts.columns_by_name and not (check.matches or check.explained):
        check = _as_sums(targets, inputs, facts) or check
    names = {one.hypothesis.name for one in check.explanations}
    instead = ""
    if names == {"normalized_returns"} and rollout.returns_known and not is_standard(rollout.returns.double(), rollout.valid):
        instead = "other_units"
    elif "few_without_bootstrap" in names and not facts.columns_by_name:  # programs omit it, a trainer's buffer does not
        instead = "no_last_bootstrap"
    return replace(check, explanations=explained(ADVANTAGES, instead).explanations) if instead else check


def _targets(rollout: RolloutEnd, minibatches: JoinedMinibatches | None) -> Tensor | None:
    """Return the critic's targets [T, B], as the source or the losses show them; None if neither shows all."""
    if rollout.returns_known:
        return rollout.returns
    rows, returns = (None, None) if minibatches is None else (minibatches.rows, minibatches.returns)
    if rows is None or returns is None or len(rows) != len(returns) or len(rows.unique()) != rollout.returns.numel():
        return None
    return rollout.returns.flatten().index_copy(0, rows, returns.to(rollout.returns)).view_as(rollout.returns)


def _as_sums(targets: Tensor, inputs: GaeInputs, facts: Facts) -> EquationCheck | None:
    """Check the targets of a program with a baseline as sums of rewards, perhaps scaled after they were summed; None without a result."""
    zero = torch.zeros_like(inputs.rewards)
    claimed = _side_by_side(targets, inputs.rollouts).double()
    sums = replace(inputs, values=zero, next_values=zero, following=zero, claimed=claimed, gae_lambda=1.0, alone=True)
    size = float(gae(sums)[inputs.counted].abs().sum())
    factor = float(claimed[inputs.counted].abs().sum()) / size if size else 0.0
    if not factor > 0:
        return None
    check = compare_advantages(replace(sums, rewards=factor * inputs.rewards), precision=facts.precision)
    is_right = check.matches or any(one.hypothesis.variant for one in check.explanations)
    if not is_right:
        return check if check.explained else None
    return explained(ADVANTAGES, "reward_scale", fitted=factor) if abs(factor - 1) > OTHER_FACTOR else None


def _advantages_beside_limits(rollout: RolloutEnd, inputs: GaeInputs | None, facts: Facts) -> EquationCheck:
    """Check the advantages; if a script hides the values after time limits, only the other steps."""
    if rollout.seen_difference is not None and rollout.seen_difference in ADVANTAGES:
        return explained(ADVANTAGES, rollout.seen_difference)
    if inputs is None:
        return unchecked(ADVANTAGES, "the rollouts of the record differ in length")
    check = compare_advantages(inputs, precision=facts.precision)
    if rollout.time_limits is None or (check.explained and not check.matches) or not inputs.gamma:
        return check
    limits = _side_by_side(rollout.time_limits, inputs.rollouts)
    if not bool(limits.any()):
        return check
    if check.matches and facts.columns_by_name and not inputs.alone:  # the values after limits are 0 in the inputs
        return explained(ADVANTAGES, "time_limits_end")
    # the values after time limits that the claimed advantages imply, or the returns if the advantages were normalised, may explain them
    sums = [inputs.claimed + inputs.values]
    if _reads_returns(rollout):
        sums.insert(0, _side_by_side(rollout.returns, inputs.rollouts).double())
    for one in sums:
        implied = (one - inputs.rewards) / inputs.gamma
        bootstrapped = replace(inputs, next_values=torch.where(limits, implied, inputs.next_values))
        bootstrapped = following_values(bootstrapped, _last_values(rollout))
        other = compare_advantages(bootstrapped, precision=facts.precision)
        if other.explained:
            return other
    return check


def _reads_returns(rollout: RolloutEnd) -> bool:
    """Return True if only the returns tell the values after time limits, because the advantages were normalised."""
    has_limits = rollout.time_limits is not None and bool(rollout.time_limits.any())
    return has_limits and rollout.returns_known and is_standard(rollout.advantages.double(), rollout.valid, error=NORMALIZED_ERROR)


def _advantages_at_own_lambda(rollout: RolloutEnd, previous: Tensor | None, targets: Tensor | None, facts: Facts) -> EquationCheck:
    """Check the advantages of a program whose lambda is unknown: at 1, else at the lambda that gives its advantages."""
    check = _advantages(rollout, _gae_inputs(rollout, 1.0, previous), targets, facts)
    own = [one.fitted for one in check.explanations if one.hypothesis.of == "gae_lambda" and one.fitted is not None]
    return _advantages(rollout, _gae_inputs(rollout, round(own[0], 6), previous), targets, facts) if own else check


def _previous(columns: Tensor | None, rollout: RolloutEnd, gae_lambda: float) -> GaeInputs | None:
    """The first environment of the previous rollout."""
    if columns is None or _count(rollout) > 1:
        return None
    named = {name: row.unsqueeze(1) for name, row in zip(TARGET_COLUMNS, columns.double(), strict=True)}
    ended = named["ended"] > 0
    return GaeInputs(
        rewards=named["rewards"],
        values=named["values"],
        next_values=named["next_values"],
        ended=ended,
        terminated=ended,
        following=named["next_values"],
        claimed=named["advantages"],
        gamma=float(rollout.gamma),
        gae_lambda=gae_lambda,
        valid=named["valid"] > 0,
    )


def _returns(rollout: RolloutEnd, inputs: GaeInputs | None, minibatches: JoinedMinibatches | None, facts: Facts) -> EquationCheck:
    """Check the returns of the rollout; several rollouts in one record are side by side.

    Advantages may be stored after a transformation. Returns are right if they equal GAE plus values, and wrong if they are made of
    normalised GAE. `inputs` are GAE's inputs; None if GAE is not known.
    """
    count, precision = _count(rollout), facts.precision
    several, side_by_side = count > 1, partial(_side_by_side, parts=count)
    settings: dict[str, Any] = {
        "rewards": side_by_side(rollout.rewards),
        "next_values": side_by_side(rollout.next_values),
        "ended": side_by_side(rollout.ended),
        "gamma": rollout.gamma,
        "valid": None if rollout.valid is None else side_by_side(rollout.valid),
        "precision": precision,
    }
    targets = [side_by_side(column) for column in (rollout.advantages, rollout.values, rollout.returns)]
    check = check_returns(*targets, **settings)
    if several and not check.explained:
        check = _in_each_rollout(check, targets, settings, count)
    if check.matches and inputs is None and not several and rollout.advantages.numel() >= MIN_NORMALIZED_ROWS:
        if not is_standard(rollout.advantages.double(), rollout.valid, error=NORMALIZED_ERROR):
            return check
        return replace(explained(RETURNS, "normalized"), tolerance=check.tolerance)
    if check.error is None:
        return check
    units = None
    if not (check.matches or several or minibatches is None):
        units = _units_of_returns(rollout, inputs, minibatches, facts)
    if units is not None and (not check.explanations or not units.holds):
        return units
    if inputs is None:
        return check
    valid = rollout.valid
    each = zip(rollout.advantages.chunk(count), [None] * count if valid is None else valid.chunk(count), strict=True)
    if check.matches and all(is_standard(*one) for one in each):
        made_of = compare_advantages(inputs, precision=precision).explanations
        if any(one.hypothesis.of == "scale" for one in made_of):
            targets[0] = gae(inputs)
            made = check_returns(*targets, **settings)
            return _in_each_rollout(made, targets, settings, count) if several and not made.explanations else made
    if not check.matches and not check.holds:
        of_gae = check_returns(gae(inputs), inputs.values, side_by_side(rollout.returns), valid=inputs.valid, precision=precision)
        return of_gae if of_gae.matches else check
    return check


def _units_of_returns(rollout: RolloutEnd, inputs: GaeInputs | None, minibatches: JoinedMinibatches, facts: Facts) -> EquationCheck | None:
    """Return the check of returns with explanations about their units only, if the last pass has the critic's estimates of all rows.

    GAE takes the place of advantages that were normalised. None without such an explanation.
    """
    rows, values = minibatches.rows, minibatches.values
    if rows is None or values is None or int(rows.max()) >= rollout.values.numel():
        return None
    estimates = torch.full_like(rollout.values, torch.nan).flatten().index_copy(0, rows, values.to(rollout.values))
    valid = estimates.isfinite() if rollout.valid is None else ~rollout.valid.flatten() | estimates.isfinite()
    if not bool(valid.all()):
        return None
    is_raw = inputs is None or not is_standard(rollout.advantages.double(), rollout.valid)
    check = check_returns(
        *(rollout.advantages if is_raw or inputs is None else gae(inputs), rollout.values, rollout.returns),
        new_values=estimates.nan_to_num().view_as(rollout.values),
        valid=rollout.valid,
        precision=facts.precision,
    )
    own = tuple(one for one in check.explanations if one.hypothesis.of == "units")
    return replace(check, explanations=own) if own else None


def _in_each_rollout(check: EquationCheck, targets: Sequence[Tensor], settings: Mapping[str, Any], count: int) -> EquationCheck:
    """Return a check of `count` rollouts side by side, with an explanation of each rollout that differs, for example if each is
    normalised.
    """

    def part(value: Any, place: int) -> Any:
        return value.chunk(count, 1)[place] if isinstance(value, Tensor) else value

    parts = [
        check_returns(*(part(one, place) for one in targets), **{name: part(one, place) for name, one in settings.items()})
        for place in range(count)
    ]
    differing = [each for each in parts if not each.matches]
    common = [
        one for one in (differing[0].explanations if differing else ()) if all(one.hypothesis in each.hypotheses for each in differing)
    ]
    return replace(check, explanations=tuple(common))


def _returns_in_use(rollout: RolloutEnd, minibatches: JoinedMinibatches, collected: CollectedRows, facts: Facts) -> EquationCheck:
    """Check the minibatches' targets against the rollout's advantages and values in the same rows, if they differ from the
    rollout's targets.
    """
    old_values, returns, rows = minibatches.old_values, minibatches.returns, minibatches.rows
    if old_values is None or returns is None or rows is None:
        return unchecked(RETURNS, "the minibatches do not show their targets and rows")
    if int(rows.max()) >= rollout.returns.numel():
        return unchecked(RETURNS, "the rows of the minibatches are not from the rollout")
    stored = rollout.returns.flatten()[rows]
    if torch.equal(returns, stored):
        return unchecked(RETURNS, "the minibatches use the rollout's targets")
    valid = minibatches.valid
    if rollout.returns_known and _returns(rollout, None, None, facts).holds:
        # a published variant need not be the sum of advantages and values
        old_values = (stored - collected.advantages).to(old_values)
    compared = partial(check_returns, collected.advantages, old_values, returns, new_values=minibatches.values)
    check = compared(valid=valid, precision=facts.precision)
    if check.explained:
        return check
    # only a pass's first minibatch has the values from before the pass
    counts = torch.tensor(minibatches.counts, device=returns.device)
    passes = torch.tensor([-1, *minibatches.epochs], device=returns.device).diff() != 0
    first = torch.repeat_interleave(passes, counts)
    return compared(valid=first if valid is None else first & valid, precision=facts.precision)


def _first_pass(minibatches: JoinedMinibatches, collected: CollectedRows) -> tuple[JoinedMinibatches, CollectedRows]:
    """Return the first pass's columns, without losses."""
    count = minibatches.epochs.count(minibatches.epochs[0])
    rows = slice(sum(minibatches.counts[:count]))

    def cut(column: Tensor) -> Tensor:
        return column[rows]

    first = mapped(minibatches._replace(losses={}), cut)._replace(epochs=minibatches.epochs[:count], counts=minibatches.counts[:count])
    return first, mapped(collected, cut)


def _normalized(rollout: RolloutEnd, minibatches: JoinedMinibatches, collected: CollectedRows, facts: Facts) -> EquationCheck:
    """Check the advantages in use against the rollout's advantages in the same rows."""
    normalizes, own = facts.normalize_advantages, facts.normalize_minibatches
    over: Scope | None = "nothing" if normalizes is False else None
    if normalizes and own is not None and not facts.columns_by_name:  # scripts do not show over which rows
        over = "minibatch" if own else "rollout"
    counts, rows = minibatches.counts, minibatches.rows
    grid, in_columns = in_grid(minibatches), partial(column_in_grid, counts=counts)
    environments = in_order = None
    if rows is not None:
        environments = in_columns(rows % rollout.rewards.shape[1])
        places = torch.arange(len(rows), device=rollout.advantages.device) % rollout.advantages.numel()
        in_order = in_columns(rollout.advantages.flatten()[places])
    others = minibatches.advantage_rows
    whole = rollout.advantages if rollout.valid is None else rollout.advantages[rollout.valid]
    return check_normalized_advantages(
        in_columns(collected.advantages),
        grid.advantages,
        over=over,
        rollout=whole,
        environments=environments,
        in_order=in_order,
        of_others=None if others is None else in_columns(rollout.advantages.flatten()[others]),
        correction=facts.advantage_correction,
        floor=facts.advantage_std_floor or 0.0,
        valid=grid.valid,
        precision=facts.precision,
    )
