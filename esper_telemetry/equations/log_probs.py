"""Equation of the log-probabilities at collection, of the stored actions under the distributions that they were drawn from.

Shapes: N rows, which may have several axes [T, B]; A choices, D action dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations

from esper_telemetry.core.arrays import ArrayLike, as_mask, as_tensor, by_head, masks_by_head
from esper_telemetry.core.lazy import Tensor, inference_mode, torch
from esper_telemetry.core.requirements import checked_arguments
from esper_telemetry.equations.comparison import EquationCheck, compare, unchecked
from esper_telemetry.equations.equation import Equation, mistake, variant
from esper_telemetry.metrics.statistics import same_shape

HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)

AMPLIFICATION = 1e-2
"""Share of |z| (|a| + |mean|) / std that counts as the magnitude of a Gaussian's log-probability, which float32 rounds to 1e-7."""

MAX_SQUASHED = 2.5
"""Magnitude of pre-tanh actions above which the stored tanh loses its digits, and an epsilon in its logarithm becomes visible."""

MAX_LOST_ROWS = 0.75
"""Share of such rows above which a tanh is not tried."""

MIN_TIES = 4
"""Number of draws equal to the largest, or to the smallest, that shows a clip at that number."""

MAX_CHOICES = 64
"""Largest number of choices for which permutations are tried."""

MAX_SUBSET_HEADS = 8
"""Largest number of heads for which sums over subsets are tried."""

ActionColumns = ArrayLike | Mapping[str, ArrayLike]


@dataclass(frozen=True, slots=True)
class LogProbInputs:
    """Actions and the distributions that they were drawn from, by head.

    Attributes:
        stored: [N] log-probabilities at collection.
        actions: per head [N], or [N, D] before a squash.
        logits: per categorical head [N, A].
        means, std: per Gaussian head [N, D].
        masks: per restricted head [N, A], bool: allowed choices.
        relevant: per head that is not always relevant [N], bool.
        squashed: names of the heads whose actions go through a tanh.
        bounds: per bounded head [2, D].
    """

    stored: Tensor
    actions: Mapping[str, Tensor]
    logits: Mapping[str, Tensor]
    means: Mapping[str, Tensor]
    std: Mapping[str, Tensor]
    masks: Mapping[str, Tensor] = field(default_factory=dict)
    relevant: Mapping[str, Tensor] = field(default_factory=dict)
    squashed: frozenset[str] = frozenset()
    bounds: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def heads(self) -> tuple[str, ...]:
        """Names of the heads."""
        return (*self.logits, *self.means)


def log_prob(inputs: LogProbInputs) -> Tensor:
    """Return the log-probability [N] of the actions: the sum over the heads that are relevant."""
    return _total(inputs, inputs.heads)


def _total(inputs: LogProbInputs, heads: Iterable[str]) -> Tensor:
    total = torch.zeros_like(inputs.stored)
    for head in heads:
        part = _categorical(inputs, head) if head in inputs.logits else _gaussian(inputs, head).sum(-1)
        relevant = inputs.relevant.get(head)
        total = total + (part if relevant is None else torch.where(relevant, part, 0.0))
    return total


def _categorical(inputs: LogProbInputs, head: str) -> Tensor:
    logits, mask = inputs.logits[head], inputs.masks.get(head)
    if mask is not None:
        logits = logits.masked_fill(~mask, torch.finfo(torch.float32).min)
    return logits.log_softmax(-1).gather(-1, inputs.actions[head].long().unsqueeze(-1)).squeeze(-1)


def _gaussian(inputs: LogProbInputs, head: str) -> Tensor:
    """Log-densities [N, D] of each dimension; if the head is squashed, the log-densities of the tanh."""
    draws, std = inputs.actions[head], inputs.std[head]
    z = (draws - inputs.means[head]) / std
    densities = -0.5 * z.square() - std.log() - HALF_LOG_TWO_PI
    return densities - log_slope(draws) if head in inputs.squashed else densities


def log_slope(draws: Tensor) -> Tensor:
    """Return log(1 - tanh² u), in the form that does not underflow (1801.01290, appendix C; openai/spinningup, sac/core.py)."""
    return 2.0 * (math.log(2.0) - draws - torch.nn.functional.softplus(-2.0 * draws))


def _mean_over_dimensions(inputs: LogProbInputs) -> Tensor | None:
    if not inputs.means:
        return None
    sizes = {head: inputs.means[head].shape[-1] for head in inputs.means}
    parts = [_total(inputs, [head]) / sizes.get(head, 1) for head in inputs.heads]
    return torch.stack(parts).sum(0)


def _with_log_det(inputs: LogProbInputs) -> Tensor | None:
    """Log-probabilities of a tanh of the stored actions, for a trainer that does not declare its tanh."""
    if inputs.squashed or not inputs.means:
        return None
    return log_prob(replace(inputs, squashed=frozenset(inputs.means)))


def _scale(actions: Tensor, bounds: Tensor | None) -> tuple[Tensor | float, Tensor | float]:
    """Return the middle and the half range of actions after a tanh: 0 and 1, or those of the bounds for actions beyond 1."""
    if bounds is None or not bool(bounds.isfinite().all()) or actions.abs().max() <= 1:
        return 0.0, 1.0
    return bounds.sum(0) / 2, (bounds[1] - bounds[0]).clamp(min=1e-9) / 2


def _of_atanh(inputs: LogProbInputs, *, slope: bool) -> Tensor | None:
    """Log-probabilities of the draws whose tanh, scaled or not, is stored; the stored numbers if the tanh has lost its digits."""
    if not inputs.means or inputs.squashed:
        return None
    lost = torch.zeros_like(inputs.stored, dtype=torch.bool)
    drawn, stretch = {}, torch.zeros_like(inputs.stored)
    for head in inputs.means:
        actions = inputs.actions[head]
        middle, half = _scale(actions, inputs.bounds.get(head))
        tanh = (actions - middle) / half
        if tanh.abs().max() > 1 + 1e-6:
            return None
        lost |= (tanh.abs() > math.tanh(MAX_SQUASHED)).any(-1)
        drawn[head] = tanh.clamp(-1 + 1e-9, 1 - 1e-9).atanh()
        stretch += torch.as_tensor(half).expand(actions.shape[-1:]).log().sum()
    if lost.double().mean() > MAX_LOST_ROWS:
        return None
    squashed = frozenset(drawn) if slope else frozenset()
    numbers = log_prob(replace(inputs, actions={**inputs.actions, **drawn}, squashed=squashed))
    if slope and (inputs.stored - numbers).median().abs() > (inputs.stored - numbers + stretch).median().abs():
        numbers = numbers - stretch  # many leave out the slope of the scaling, which is constant
    return torch.where(lost, inputs.stored, numbers)


def cut_bounds(actions: Tensor, bounds: Tensor | None) -> Tensor | None:
    """Return the bounds [2, D] that some actions [..., D] equal exactly, or None.

    Bounds that are not given are extremes that several draws share; a dimension without a bound has an infinite one.
    """
    rows = actions.reshape(-1, actions.shape[-1])
    if bounds is not None and bool((rows.unsqueeze(0) == bounds.to(rows).unsqueeze(1)).any()):
        return bounds.to(rows)
    ends = torch.stack([rows.amin(0), rows.amax(0)])
    shared = ((rows.unsqueeze(0) == ends.unsqueeze(1)).sum(1) >= MIN_TIES) & (ends[0] < ends[1])
    beyond = torch.tensor([[-torch.inf], [torch.inf]], dtype=rows.dtype, device=rows.device)
    return torch.where(shared, ends, beyond) if bool(shared.any()) else None


def _clipped_actions(inputs: LogProbInputs) -> Tensor | None:
    """The stored numbers if an action equals a bound exactly, because its draw is unknown; the reference otherwise."""
    cut = torch.zeros_like(inputs.stored, dtype=torch.bool)
    for head in inputs.means:
        bounds = cut_bounds(inputs.actions[head], inputs.bounds.get(head))
        if bounds is not None and head not in inputs.squashed:
            cut |= ((inputs.actions[head] == bounds[0]) | (inputs.actions[head] == bounds[1])).any(-1)
    reference = log_prob(inputs)
    differs = (inputs.stored - reference).abs() > 1e-3
    # a draw exactly at a bound has probability 0, so nearly all actions at a bound were clipped
    if not cut.any() or (differs & cut).sum() < 0.5 * cut.sum():
        return None
    return torch.where(cut, inputs.stored, reference)


def _permuted_choices(inputs: LogProbInputs) -> Tensor | None:
    """Log-probabilities under a renaming of the choices: the closest for each stored choice; None unless all of them differ."""
    if len(inputs.heads) != 1 or not inputs.logits:
        return None
    numbers = _masked_logits(inputs, inputs.heads[0]).log_softmax(-1).flatten(0, -2)
    chosen, size = inputs.actions[inputs.heads[0]].long().flatten(), numbers.shape[-1]
    if size > MAX_CHOICES or len(chosen) < 2 * size:
        return None
    errors = (numbers - inputs.stored.reshape(-1, 1)).abs().clamp(max=1.0)
    other = numbers.new_zeros(size, size).index_add_(0, chosen, errors).argmin(1)
    present = chosen.unique()
    if len(other[present].unique()) < len(present) or bool((other[present] == present).all()):
        return None
    return numbers.gather(1, other[chosen].unsqueeze(1)).view_as(inputs.stored)


def _other_choices(inputs: LogProbInputs, stored: Tensor) -> tuple[float, Tensor] | None:
    """Return the share of rows with the log-probability of another choice, and the nearest log-probability of any choice.

    None if the choices are renamed, or are the likeliest ones.
    """
    if len(inputs.heads) != 1 or not inputs.logits:
        return None
    numbers, chosen = _masked_logits(inputs, inputs.heads[0]).log_softmax(-1), inputs.actions[inputs.heads[0]].long()
    nearest = (numbers - stored.unsqueeze(-1)).abs().argmin(-1)
    renamed = _permuted_choices(inputs)
    predicted = numbers.gather(-1, nearest.unsqueeze(-1)).squeeze(-1)
    known = renamed is not None and torch.equal(renamed, predicted)
    if numbers.shape[-1] > MAX_CHOICES or known or torch.equal(nearest, numbers.argmax(-1)):
        return None
    return float((nearest != chosen).double().mean()), predicted


def _of_likeliest(inputs: LogProbInputs) -> Tensor:
    likeliest = {head: _masked_logits(inputs, head).argmax(-1) for head in inputs.logits}
    return log_prob(replace(inputs, actions={**likeliest, **inputs.means}))


def _masked_logits(inputs: LogProbInputs, head: str) -> Tensor:
    mask = inputs.masks.get(head)
    return inputs.logits[head] if mask is None else inputs.logits[head].masked_fill(~mask, -torch.inf)


def _of_some_heads(inputs: LogProbInputs) -> list[Tensor] | None:
    """All sums that leave heads out."""
    heads = inputs.heads
    if not 1 < len(heads) <= MAX_SUBSET_HEADS:
        return None
    parts = {head: _total(inputs, [head]) for head in heads}
    return [torch.stack([parts[head] for head in some]).sum(0) for size in range(1, len(heads)) for some in combinations(heads, size)]


def _under_next_distribution(inputs: LogProbInputs) -> Tensor | None:
    """Log-probabilities of each choice [T, B] under the next step's distribution; the stored one in the last step."""
    if inputs.means or inputs.stored.dim() < 2 or len(inputs.stored) < 3:
        return None
    logits, masks = ({head: one.roll(-1, 0) for head, one in heads.items()} for heads in (inputs.logits, inputs.masks))
    return torch.cat([log_prob(replace(inputs, logits=logits, masks=masks))[:-1], inputs.stored[-1:]])


def shifted(column: Tensor, steps: int, filler: Tensor) -> Tensor | None:
    """Return column [T, B] of the step `steps` later, `filler` if there is no such step; None if the column has no time axis."""
    if column.dim() < 2 or len(column) < 2 + abs(steps):
        return None
    rest = filler[-steps:] if steps > 0 else filler[:-steps]
    return torch.cat([column[steps:], rest] if steps > 0 else [rest, column[:steps]])


LOG_PROBS = Equation(
    name="log_probs",
    rank=15,
    quantity="the log-probabilities at collection",
    equation="log π(a | s) = Σ over heads and dimensions of log π_i(a_i | s), under the distribution that a was drawn from",
    source="1707.06347, eq. 6; 1801.01290, appendix C, for a tanh",
    inputs="actions, their log-probabilities, and the distributions that they were drawn from",
    check="check_log_probs",
    shown_by="test_log_probs",
    compute=log_prob,
    tolerance=2.0,  # healthy runs in single precision reach 2e-7, or 2e-5 with an epsilon inside the logarithm of a tanh
    advice="Compute the log-probability of the same action that is stored, under the distribution that it was drawn from.",
    hypotheses=(
        mistake("clipped_actions", "the log-probabilities of unclipped actions, while the stored actions are clipped")
        .predicts("log π(u), a = clip(u, low, high)", _clipped_actions)
        .advises("Store the action as it was drawn, and clip only the copy that the environment receives.")
        .cites("https://github.com/thu-ml/tianshou/issues/312"),
        mistake("mean_over_dimensions", "means over the action dimensions instead of sums")
        .predicts("1/D Σ_i log π(a_i | s)", _mean_over_dimensions)
        .advises("Sum the log-probabilities over the action dimensions."),
        mistake("log_det_missing", "the log-probabilities of the Gaussian before its tanh")
        .predicts("log N(u; μ, σ), a = tanh u", lambda inputs: log_prob(replace(inputs, squashed=frozenset())))
        .given(needs="squashed")
        .advises("Subtract Σ log(1 - tanh² u).", source="1801.01290, appendix C, eq. 21"),
        variant("squashed_gaussian", "the log-probabilities of a tanh-squashed Gaussian")
        .predicts("log N(u; μ, σ) - Σ log(1 - tanh² u), stored u", _with_log_det)
        .cites("1801.01290, appendix C, eq. 21"),
        variant("squashed_actions", "the log-probabilities of a tanh-squashed Gaussian at the actions after the tanh")
        .predicts("log N(u; μ, σ) - Σ log(1 - a²), u = atanh a", partial(_of_atanh, slope=True))
        .cites("1801.01290, appendix C, eq. 21"),
        mistake("squashed_before_storing", "the log-probabilities of the actions before a tanh, while the stored actions are after it")
        .predicts("log N(u; μ, σ), a = tanh u", partial(_of_atanh, slope=False))
        .advises("Store the action before the tanh, or subtract Σ log(1 - a²).")
        .cites("1801.01290, appendix C, eq. 21"),
        mistake("mask_missing", "the log-probabilities under distributions without masks")
        .predicts("log softmax(logits)[a] over all choices", lambda inputs: log_prob(replace(inputs, masks={})))
        .given(needs="masks")
        .advises("Mask the logits before the log-probability is computed.", source="2006.14171"),
        mistake("likeliest_action", "the log-probabilities of the most likely action instead of the stored action")
        .predicts("max_a log π(a | s)", _of_likeliest)
        .advises("Compute the log-probability of the action that was drawn."),
        mistake("permuted_choices", "the log-probabilities of renamed choices: each stored choice means another")
        .predicts("log π(σ(a) | s), σ a permutation of the choices", _permuted_choices)
        .advises("Use one numbering of the choices for the distribution, the environment and the buffer.")
        .cites("program: loop-action_permuted_stored"),
        mistake("other_choices", "the log-probabilities of other choices than the stored ones, such as of other rows;")
        .fits("log π(a_j | s_i)", "share of the rows", _other_choices)
        .advises("Take the states and the actions of the loss from the same rows, with one index for both."),
        mistake("heads_left_out", "sums that leave heads out")
        .predicts("Σ over some heads of log π_i(a_i | s)", _of_some_heads)
        .given(doubtful_without="heads")
        .advises("Add the log-probabilities of all heads."),
        mistake("irrelevant_heads", "sums over all heads, including irrelevant heads")
        .predicts("Σ over all heads of log π_i(a_i | s)", lambda inputs: log_prob(replace(inputs, relevant={})))
        .given(needs="relevant")
        .advises("Leave a head out of the sum in rows in which its choice does not matter."),
        mistake("not_stored", "zeros, as in a buffer that was never written")
        .predicts("0", lambda inputs: torch.zeros_like(inputs.stored))
        .advises("Store the log-probability of each step; otherwise the ratio divides the new probability by 1.")
        .cites("https://github.com/AI4Finance-Foundation/ElegantRL/blob/master/helloworld/helloworld_PPO_single_file.py"),
        mistake("probabilities", "probabilities, without a logarithm")
        .predicts("π(a | s)", lambda inputs: log_prob(inputs).exp())
        .advises("Store the logarithm."),
        mistake("next_distribution", "the log-probabilities of each choice under the distribution of the next one")
        .predicts("log π(a_t | s_{t+1})", _under_next_distribution)
        .advises("Shift by one: the logits at a position are of the token after it."),
        mistake("step_before", "the previous step's log-probabilities")
        .predicts("log π(a_{t-1} | s_{t-1})", lambda inputs: shifted(log_prob(inputs), -1, inputs.stored))
        .advises("Store action and log-probability in the same row."),
        mistake("step_after", "the next step's log-probabilities")
        .predicts("log π(a_{t+1} | s_{t+1})", lambda inputs: shifted(log_prob(inputs), 1, inputs.stored))
        .advises("Store action and log-probability in the same row."),
    ),
)


def named_columns(columns: ActionColumns | None) -> dict[str, Tensor]:
    """Return columns by head; a single column belongs to the head `action`."""
    return {} if columns is None else by_head(columns if isinstance(columns, Mapping) else {"action": columns})


@checked_arguments(tolerance=0)
@inference_mode
def check_log_probs(
    actions: ActionColumns,
    log_probs: ArrayLike,
    *,
    logits: ActionColumns | None = None,
    means: ActionColumns | None = None,
    log_std: ActionColumns | None = None,
    action_masks: ActionColumns | None = None,
    relevant: ActionColumns | None = None,
    squashed: Iterable[str] | bool = False,
    bounds: ActionColumns | None = None,
    valid: ArrayLike | None = None,
    precision: str | None = None,
    tolerance: float | None = None,
) -> EquationCheck:
    """Return the comparison of stored log-probabilities with the stored actions' log-probabilities under their distributions.

    If there are several heads, each column is a mapping from the head's name.

    Args:
        actions: choices [T, B] or [N], or real numbers [T, B, D] or [N, D] as they were drawn, before a squash.
        log_probs: [T, B] or [N], summed over heads and dimensions.
        logits: per categorical head [..., A].
        means: per Gaussian head [..., D].
        log_std: per Gaussian head [..., D] or [D].
        action_masks: per restricted head [..., A], bool: allowed choices.
        relevant: per head that is not always relevant [...], bool.
        squashed: names of the Gaussian heads whose actions go through a tanh; True for all of them.
        bounds: per bounded Gaussian head [2, D]: lower and upper.
        valid: [...], bool; None if every row counts.
        precision: of the trainer's arithmetic.
        tolerance: largest relative error; by precision if it is None.

    Raises:
        ValueError: if there is no distribution, or shapes do not fit together.
    """
    stored = as_tensor(log_probs).detach().double()
    columns = {name: named_columns(part) for name, part in (("logits", logits), ("means", means), ("log_std", log_std))}
    chosen = {head: column.detach().double() for head, column in named_columns(actions).items()}
    if not (columns["logits"] or columns["means"]):
        raise ValueError("log-probabilities are checked against logits, or means and log_std; got neither")
    for head in (*columns["logits"], *columns["means"]):
        if head not in chosen:
            raise ValueError(f"head {head!r} has a distribution but no actions")
    for head, mean in columns["means"].items():
        if head not in columns["log_std"]:
            raise ValueError(f"head {head!r} has means but no log_std")
        same_shape(actions=chosen[head], means=mean)
    for head, part in columns["logits"].items():
        same_shape(actions=chosen[head], logits=part[..., 0], log_probs=stored)
    inputs = LogProbInputs(
        stored=stored,
        actions=chosen,
        logits={head: part.detach().double() for head, part in columns["logits"].items()},
        means={head: part.detach().double() for head, part in columns["means"].items()},
        std={head: columns["log_std"][head].detach().double().exp().expand_as(mean) for head, mean in columns["means"].items()},
        masks=masks_by_head(named_columns(action_masks)),
        relevant=masks_by_head(named_columns(relevant)),
        squashed=frozenset(columns["means"] if squashed is True else () if squashed is False else squashed),
        bounds={head: part.double() for head, part in named_columns(bounds).items()},
    )
    counted = as_mask(valid, stored)
    for head in inputs.squashed:
        exact = (inputs.actions[head].abs() < MAX_SQUASHED).all(-1)
        counted = exact if counted is None else counted & exact
    if counted is not None and not counted.any():
        return unchecked(LOG_PROBS, "every squashed action is so close to its bounds that its tanh has lost its digits")
    magnitudes = [torch.ones(1)]
    for head, mean in inputs.means.items():  # magnitudes of the terms whose rounded difference is a Gaussian's log-probability
        drawn, std = inputs.actions[head], inputs.std[head]
        size = AMPLIFICATION * (drawn - mean).abs() / std * (drawn.abs() + mean.abs()) / std
        magnitudes.append(size.nan_to_num(0.0, 0.0, 0.0))
    return compare(LOG_PROBS, inputs, stored, magnitudes=magnitudes, valid=counted, precision=precision, tolerance=tolerance)
