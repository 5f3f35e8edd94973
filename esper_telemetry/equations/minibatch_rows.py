"""Equations of the minibatches (each pass over a rollout visits every row once) and of the log-ratios in their rows.

Shapes: E passes, M minibatches with R rows in total, S rows of the rollout, in B environments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from esper_telemetry.core.arrays import ArrayLike, as_mask, as_tensor
from esper_telemetry.core.lazy import Tensor, inference_mode, torch
from esper_telemetry.core.requirements import checked_arguments
from esper_telemetry.equations.comparison import EquationCheck, compare, unchecked
from esper_telemetry.equations.equation import Equation, mistake, variant
from esper_telemetry.metrics.statistics import same_shape

MAX_ROWS = 1 << 24
"""Largest number of row visits, over all passes, that are counted."""


@dataclass(frozen=True, slots=True)
class RolloutPass:
    """Rows of one pass, concatenated over its minibatches, and the number of rows of each minibatch."""

    rows: Tensor
    counts: tuple[int, ...]

    def minibatches(self) -> tuple[Tensor, ...]:
        """Return the rows of each minibatch."""
        return tuple(self.rows.split(list(self.counts)))

    def parts(self) -> set[tuple[int, ...]]:
        """Return the minibatches as sorted rows."""
        return {tuple(rows.sort().values.tolist()) for rows in self.minibatches()}


@dataclass(frozen=True, slots=True)
class PassInputs:
    """Passes over the valid rows of a rollout.

    Attributes:
        passes: E of them.
        valid: [S], bool.
        environments: B; rows are counted time by time, t B + b.
        visits: [E, S], number of times that each pass takes each row.
        alike: 1 if all passes are split into the same minibatches, or if a single pass is not shuffled; else 0.
    """

    passes: tuple[RolloutPass, ...]
    valid: Tensor
    environments: int
    visits: Tensor
    alike: float

    @property
    def claimed(self) -> Tensor:
        """The visits of valid and of other rows, and whether the passes are equal, in one vector."""
        return torch.cat([self.visits.flatten(), self.visits.new_tensor([self.alike])])

    @property
    def repeats(self) -> bool:
        """True if a pass takes a row more than once."""
        return bool((self.visits > 1).any())

    @property
    def missing(self) -> int:
        """Largest number of valid rows that a pass leaves out."""
        return int(((self.visits == 0) & self.valid).sum(1).max())

    @property
    def outside(self) -> bool:
        """True if a pass takes a row that is not valid."""
        return bool((self.visits[:, ~self.valid] > 0).any())


def _where(condition: Callable[[PassInputs], bool]) -> Callable[[PassInputs], Tensor | None]:
    """Explain the visits if a condition holds: mistakes in drawing rows predict kinds of visits, not numbers."""
    return lambda inputs: inputs.claimed if condition(inputs) else None


def _whole(x: PassInputs) -> bool:
    return not x.repeats and not x.missing and not x.outside


def _repeats_within(x: PassInputs) -> bool:
    return any(len(rows.unique()) < len(rows) for one in x.passes for rows in one.minibatches())


def _same_visits(x: PassInputs) -> bool:
    return len(x.passes) > 1 and bool((x.visits == x.visits[0]).all())


def _same_minibatch(x: PassInputs) -> bool:
    return all(len(one.counts) > 1 and len(one.parts()) == 1 for one in x.passes)


def _one_minibatch_short(x: PassInputs) -> bool:
    return not x.repeats and not x.outside and 0 < x.missing < max(max(one.counts) for one in x.passes)


def _environments_left_out(x: PassInputs) -> bool:
    """Each pass leaves out all rows of some environments, and takes all rows of the others once."""
    if x.repeats or x.outside or x.environments < 2 or len(x.valid) % x.environments:
        return False
    visited = x.visits.view(len(x.passes), -1, x.environments)
    valid = x.valid.view(-1, x.environments)
    taken = (visited > 0).any(1)
    whole = ((visited > 0) | ~valid | ~taken.unsqueeze(1)).all()
    return bool(whole) and x.missing > 0


def _times_left_out(x: PassInputs) -> bool:
    """Each pass takes the same first steps of the rollout and leaves out the others."""
    if x.repeats or x.outside or not x.missing:
        return False
    count = int(x.visits[0].sum())
    return bool((x.visits[:, :count] > 0).all()) and bool((x.visits[:, count:] == 0).all())


def _one_minibatch(x: PassInputs) -> bool:
    short = not x.repeats and not x.outside and all(len(one.counts) == 1 for one in x.passes)
    return short and 2 * x.missing >= int(x.valid.sum()) and not _times_left_out(x)


def _left_out(x: PassInputs) -> bool:
    named = _one_minibatch_short(x) or _environments_left_out(x) or _times_left_out(x) or _one_minibatch(x)
    return not x.repeats and not x.outside and x.missing > 0 and not named


def _in_order(x: PassInputs) -> bool:
    """Rows come time by time, or environment by environment, in every pass."""
    if not x.alike or not _whole(x):
        return False
    times = torch.arange(len(x.valid), device=x.valid.device)
    by_environment = times.view(-1, x.environments).T.flatten() if len(times) % x.environments == 0 else times
    return any(all(torch.equal(one.rows, order[x.valid[order]]) for one in x.passes) for order in (times, by_environment))


MINIBATCHES = Equation(
    name="minibatches",
    rank=45,
    quantity="the rows of the minibatches",
    equation="a permutation of the rollout, drawn again for each pass",
    source="1707.06347, algorithm 1",
    inputs="the rows of each minibatch",
    check="check_minibatches",
    shown_by="test_minibatches",
    compute=lambda x: torch.cat([x.valid.double().expand(len(x.passes), -1).flatten(), x.visits.new_zeros(1)]),  # each valid row once
    advice="Draw one permutation per pass and split it into minibatches.",
    hypotheses=(
        variant("same_order", "one permutation that is used in every pass")
        .predicts("the same minibatches in each pass", _where(lambda x: bool(x.alike) and _whole(x) and not _in_order(x)))
        .cites("https://github.com/leggedrobotics/rsl_rl, RolloutStorage.mini_batch_generator"),
        variant("unshuffled", "the rows in the order of the rollout, which are not shuffled")
        .predicts("rows 1 to N, N + 1 to 2N, ...", _where(_in_order))
        .advises("Shuffle the rows: neighbours in time are correlated.")
        .cites("https://github.com/leggedrobotics/rsl_rl, RolloutStorage.recurrent_mini_batch_generator"),
        variant("last_dropped", "a permutation without its last rows, fewer than a minibatch")
        .predicts("the last, smaller minibatch is dropped", _where(_one_minibatch_short))
        .cites("torch.utils.data, drop_last"),
        variant("with_replacement", "rows that are drawn with replacement within a minibatch")
        .predicts("row ~ uniform, independently", _where(lambda x: _repeats_within(x) and not _same_visits(x)))
        .advises("Draw a permutation per pass: rows that are drawn independently leave out a third of the rollout.")
        .cites("https://github.com/higgsfield/RL-Adventure-2, 3.ppo.ipynb, ppo_iter"),
        mistake("overlapping", "minibatches that have rows in common, and leave out other rows")
        .predicts(
            "each minibatch drawn independently",
            _where(lambda x: x.repeats and not (_repeats_within(x) or _same_visits(x) or _same_minibatch(x))),
        )
        .advises("Split one permutation per pass into minibatches that do not have rows in common.")
        .cites("program: loop-overlapping"),
        mistake("same_rows", "the same rows several times in each pass, and others never")
        .predicts(
            "equal visits in each pass, but not one for each row",
            _where(lambda x: x.repeats and _same_visits(x) and not _same_minibatch(x)),
        )
        .advises("Compare the bounds of each minibatch with its size: they overlap, or the rows are drawn once for all passes."),
        mistake("same_minibatch", "the same minibatch several times in each pass")
        .predicts("rows 1 to N, rows 1 to N, ...", _where(lambda x: x.repeats and not _repeats_within(x) and _same_minibatch(x)))
        .advises("Advance the bounds of the minibatch by its size.", source="program: bundled-repeated_minibatches"),
        mistake("one_minibatch", "one minibatch per pass, without the other rows")
        .predicts("the first minibatch of a permutation", _where(_one_minibatch))
        .advises("Use all minibatches of the permutation: look for a break or a return in the loop.")
        .cites("program: subclass-first_minibatch_only"),
        mistake("environments_left_out", "the rows of some environments, without the other environments")
        .predicts("all t of some b", _where(_environments_left_out))
        .advises("Flatten time and environments, and draw rows from all of them."),
        mistake("times_left_out", "the first rows of the rollout, without the later ones")
        .predicts("rows 1 to K of R", _where(_times_left_out))
        .advises("Draw indices up to steps times environments."),
        mistake("left_out", "a permutation without some of its rows, at least one minibatch of them")
        .predicts("each row at most once", _where(_left_out))
        .advises("Compare the number of minibatches times their size with the size of the rollout.")
        .cites("program: loop-rows_left_out"),
        mistake("earlier_rows", "also rows of earlier updates, which are in the loss again;")
        .given(parameter="rows")
        .predicts("rows of the rollouts before")
        .advises("Clear the memory after each update: `memory.clear()`, or new lists before the next rollout.")
        .cites("program: test_minibatches"),
        mistake("step_left_out", "rows that leave out one step of every sequence and not the later ones;")
        .given(parameter="step")
        .predicts("no weight in step t of all sequences")
        .advises("Shift the mask: the log-probability of a token is at the position before it.")
        .cites("program: test_script_rollouts"),
        mistake("padding", "rows that are padding or resets instead of transitions")
        .predicts("rows that do not count", _where(lambda x: x.outside and not x.repeats and not x.missing))
        .advises("Draw minibatches from the valid rows."),
    ),
)


@checked_arguments(size=0, environments=1)
@inference_mode
def check_minibatches(
    rows: Sequence[Sequence[ArrayLike]], size: int, *, environments: int = 1, valid: ArrayLike | None = None, shuffled: bool = True
) -> EquationCheck:
    """Return the comparison of the rows of minibatches with a permutation of the rollout in each pass.

    If there are several passes, a last pass that leaves rows out is not counted: training may have stopped in it.

    Args:
        rows: for each pass a list of its minibatches, each of them [N] whole numbers from 0.
        size: S, number of rows of the rollout.
        environments: B, if rows are counted time by time: row t B + b is step t in environment b.
        valid: [S] or [T, B], bool: rows that are transitions; None if every row is.
        shuffled: also compare the order of the passes; False if minibatches hold whole sequences.

    Raises:
        ValueError: passes or minibatches are missing, or a row is not in the rollout.
    """
    if not rows or not all(len(one) for one in rows):
        raise ValueError(f"expected at least one pass, and one minibatch in each, got {[len(one) for one in rows]}")
    passes = []
    for one in rows:
        batches = [as_tensor(batch).reshape(-1) for batch in one]
        joined = torch.cat([batch.to(batches[0].device) for batch in batches])
        if joined.is_floating_point() or joined.dtype is torch.bool:
            raise ValueError(f"rows must be whole numbers, got {joined.dtype}")
        passes.append(RolloutPass(joined.long(), tuple(len(batch) for batch in batches)))
    everything = torch.cat([one.rows for one in passes])
    if len(everything) and not 0 <= int(everything.min()) <= int(everything.max()) < size:
        raise ValueError(f"rows must be from 0 to {size - 1}, got {int(everything.min())} to {int(everything.max())}")
    mask = as_mask(valid, everything)
    counted = torch.ones(size, dtype=torch.bool, device=everything.device) if mask is None else mask.reshape(-1)
    if len(counted) != size:
        raise ValueError(f"valid must have {size} entries, got {len(counted)}")
    if len(passes) * size > MAX_ROWS:
        return unchecked(MINIBATCHES, f"{len(passes)} passes over {size} rows are too many")
    visits = torch.stack([torch.bincount(one.rows, minlength=size) for one in passes]).double()
    if len(passes) > 1 and bool((visits[-1] <= 1).all()) and bool(((visits[-1] == 0) & counted).any()):
        passes, visits = passes[:-1], visits[:-1]
    alike = shuffled and _alike(passes)
    inputs = PassInputs(tuple(passes), counted, environments, visits, float(alike))
    return compare(MINIBATCHES, inputs, inputs.claimed)


def _alike(passes: Sequence[RolloutPass]) -> bool:
    """Return True if several passes are split into the same minibatches, of which there are several."""
    if any(len(one.counts) < 2 or max(one.counts) < 2 for one in passes):
        return False
    if len(passes) == 1:
        return bool((passes[0].rows.diff() == 1).all())
    if all(torch.equal(one.rows, passes[0].rows) for one in passes[1:]):
        return True
    return all(one.counts == passes[0].counts for one in passes) and all(one.parts() == passes[0].parts() for one in passes[1:])


@dataclass(frozen=True, slots=True)
class LogRatioInputs:
    """Log-probabilities of the actions [R], float64.

    Attributes:
        now: under the policy of the minibatch.
        stored: at collection.
        in_order: at collection, in the order of the rollout instead of the order of the minibatches.
        swapped: at collection, in the rows that result from swapping steps and environments.
        now_swapped: under the policy of the minibatch, of the actions in the swapped rows.
        claimed: the program's.
        dimensions: number of parts that the log-probabilities are summed over.
    """

    now: Tensor
    stored: Tensor
    in_order: Tensor | None = None
    swapped: Tensor | None = None
    now_swapped: Tensor | None = None
    claimed: Tensor | None = None
    dimensions: int = 1

    def to(self, stored: Tensor | None) -> Tensor | None:
        """Return the log-ratios to other stored log-probabilities."""
        return None if stored is None else self.now - stored

    def as_difference(self) -> Tensor | None:
        """Return the logarithms of the differences; the claimed ones of differences that are hardly above their rounding."""
        difference = (self.now - self.stored).abs()
        large = difference > MIN_DIFFERENCE
        return torch.where(large, difference.log(), self.claimed) if self.claimed is not None and bool(large.any()) else None


def _clamped(inputs: LogRatioInputs, numbers: Tensor) -> tuple[float, Tensor] | None:
    """Return the larger bound and the log-ratios between the claimed extremes; None unless several rows are at one of them."""
    ends = [end for end in (numbers.amin(), numbers.amax()) if int((numbers == end).sum()) >= MIN_CLAMPED_ROWS]
    if not ends or numbers.amin() == numbers.amax():
        return None
    return float(max(end.abs() for end in ends)), (inputs.now - inputs.stored).clamp(numbers.amin(), numbers.amax())


MIN_CLAMPED_ROWS = 3
"""Rows with the largest or the smallest log-ratio that show a bound."""

MIN_DIFFERENCE = 0.01
"""Smallest difference of log-probabilities whose logarithm is compared."""

MAX_EXPONENT = 87.0
"""Largest log-ratio that counts: in single precision the ratio of a larger one is 0 or infinite, or has lost its digits."""

LOG_RATIOS = Equation(
    name="log_ratios",
    quantity="the log-ratios",
    equation="log r = log π(a|s) - log π_old(a|s)",
    source="1707.06347, eq. 6",
    inputs="log-ratios, the distributions of the minibatches, and the actions and log-probabilities of the rollout",
    check="check_log_ratios",
    shown_by="test_log_ratios",
    compute=lambda x: x.now - x.stored,
    tolerance=0.5,  # 5e-5 in single precision, relative to the largest log-probability or to 1; healthy runs reach 3e-7
    rank=48,
    advice="Compare the rows and the order of the two log-probabilities.",
    hypotheses=(
        mistake("inverted", "the old log-probabilities minus the new: the ratio is inverted")
        .predicts("log r = log π_old - log π", lambda x: x.stored - x.now)
        .advises("Take exp(new log-probability - old log-probability).", source="program: loop-pg_ratio_inverted"),
        mistake("recomputed", "zeros: the old log-probabilities are recomputed with the new policy")
        .predicts("log r = log π - log π", lambda x: 0 * x.now)
        .advises("Store the log-probabilities once, at collection; otherwise nothing is ever clipped."),
        mistake("no_old", "the new log-probabilities without subtracting the old")
        .predicts("log r = log π", lambda x: x.now)
        .advises("Subtract the log-probabilities at collection."),
        mistake("quotient", "the quotient of the log-probabilities instead of the quotient of the probabilities")
        .predicts("r = log π / log π_old", lambda x: (x.now / x.stored).abs().log())
        .advises("Take the exponential of the difference."),
        mistake("mixed_quotient", "the new probability divided by the old log-probability")
        .predicts("r = π / log π_old", lambda x: x.now - x.stored.abs().log())
        .advises("Take the exponential of both, or of the difference.", source="program: script-pg_ratio_quotient"),
        mistake("no_exponential", "the difference of the log-probabilities without its exponential")
        .predicts("r = log π - log π_old", LogRatioInputs.as_difference)
        .advises("Take the exponential of the difference.", source="program: script-pg_ratio_difference"),
        mistake("mean_over_dimensions", "means over the action dimensions minus the old log-probabilities, which are sums")
        .predicts(
            "log r = 1/D Σ_i log π(a_i|s) - Σ_i log π_old(a_i|s)", lambda x: x.now / x.dimensions - x.stored if x.dimensions > 1 else None
        )
        .advises("Sum the new log-probabilities over the action dimensions, as at collection."),
        mistake("clamped", "log-ratios that are clamped before the surrogate,")
        .fits("log r = clip(log π - log π_old, low, c)", "c", _clamped)
        .advises("Clip only the ratio in the second term: a clamped log-ratio has a gradient of 0 on both sides of the minimum.")
        .cites("program: script-pg_log_ratio_clamped"),
        mistake("linear", "1 plus the difference of the log-probabilities instead of its exponential")
        .predicts("r = 1 + log π - log π_old", lambda x: (1 + x.now - x.stored).abs().log())
        .advises("Take the exponential of the difference.", source="program: script-pg_ratio_linear"),
        mistake(
            "rows_in_order", "the new minus the old log-probabilities in the order of the rollout: they are not indexed with the minibatch"
        )
        .predicts("log r_i = log π_i - log π_old,start+i", lambda x: x.to(x.in_order))
        .advises("Index the old log-probabilities with the rows of the minibatch."),
        mistake("axes_swapped", "the new minus the old log-probabilities, flattened with steps and environments swapped")
        .predicts("log r = log π_tb - log π_old,bt", lambda x: x.to(x.swapped))
        .advises("Flatten all columns of the rollout in the same order."),
        mistake(
            "actions_swapped",
            "the log-probabilities of actions flattened with steps and environments swapped, minus the old log-probabilities",
        )
        .predicts("log r = log π(a_bt|s_tb) - log π_old,tb", lambda x: None if x.now_swapped is None else x.now_swapped - x.stored)
        .advises("Flatten all columns of the rollout in the same order."),
        mistake("shifted_rows", "the new log-probabilities minus the previous row's old log-probabilities")
        .predicts("log r_i = log π_i - log π_old,i-1", lambda x: x.now - x.stored.roll(1))
        .advises("Index both log-probabilities with the same rows."),
    ),
)


@checked_arguments(dimensions=1, tolerance=0)
@inference_mode
def check_log_ratios(
    log_ratio: ArrayLike,
    log_probs: ArrayLike,
    old_log_probs: ArrayLike,
    *,
    valid: ArrayLike | None = None,
    in_order: ArrayLike | None = None,
    swapped: ArrayLike | None = None,
    now_swapped: ArrayLike | None = None,
    dimensions: int = 1,
    precision: str | None = None,
    tolerance: float | None = None,
) -> EquationCheck:
    """Return the comparison of log-ratios with the difference of new and old log-probabilities.

    Args:
        log_ratio: any shape.
        log_probs: of the same shape: of the actions under the policy of the minibatch.
        old_log_probs: of the same shape: at collection, in the same rows.
        valid: bool, of the same shape; None if every row counts.
        in_order, swapped: of the same shape: at collection, in the order of the rollout, and in the rows that result from swapping steps
                and environments, for the mistakes that involve them.
            now_swapped: of the same shape: under the policy of the minibatch, of the actions in the swapped rows.
        dimensions: number of action dimensions or heads that the log-probabilities are summed over.
        precision: of the trainer's arithmetic: fp32, tf32, bf16 or fp16.
        tolerance: largest relative error; by precision if it is None.

    Raises:
        ValueError: shapes differ.
    """
    claimed = as_tensor(log_ratio)
    given = {"log_probs": log_probs, "old_log_probs": old_log_probs, "in_order": in_order, "swapped": swapped, "now_swapped": now_swapped}
    columns = {name: as_tensor(column, claimed) for name, column in given.items() if column is not None}
    mask = as_mask(valid, claimed)
    same_shape(log_ratio=claimed, valid=mask, **columns)
    exact = {name: column.detach().double() for name, column in columns.items()}
    kept = ~claimed.isfinite() | (claimed.abs() < MAX_EXPONENT)
    mask = kept if mask is None else mask & kept
    if not bool(mask.any()):
        return unchecked(LOG_RATIOS, "all probability ratios are 0 or infinite in single precision")
    inputs = LogRatioInputs(
        exact["log_probs"],
        exact["old_log_probs"],
        exact.get("in_order"),
        exact.get("swapped"),
        exact.get("now_swapped"),
        claimed.detach().double(),
        dimensions,
    )
    # if an action is certain, both are about 0 and rounded like a probability of 1
    magnitudes = (inputs.now, inputs.stored, torch.ones(1))
    return compare(LOG_RATIOS, inputs, claimed, magnitudes=magnitudes, valid=mask, precision=precision, tolerance=tolerance)
