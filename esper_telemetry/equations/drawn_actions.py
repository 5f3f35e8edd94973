"""Equation of the actions: each action is drawn from the distribution that is stored with it.

Shapes: T steps, B environments, A choices, D action dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from esper_telemetry.core.arrays import ArrayLike, as_mask, as_tensor, by_head, masks_by_head
from esper_telemetry.core.group import MetricGroup
from esper_telemetry.core.lazy import Tensor, inference_mode, torch
from esper_telemetry.core.metric import Metric, label, reports
from esper_telemetry.core.reduction import Sum
from esper_telemetry.core.requirements import checked_arguments
from esper_telemetry.equations import calibration
from esper_telemetry.equations.calibration import Z_BOUND, Z_EXPLAINED, ActionInputs
from esper_telemetry.equations.comparison import EquationCheck, unchecked
from esper_telemetry.equations.equation import Equation, Explanation, mistake, variant
from esper_telemetry.equations.log_probs import ActionColumns, named_columns
from esper_telemetry.metrics.statistics import same_shape

MAX_SQUASHED = 5.0
"""Magnitude of pre-tanh actions that float32 cannot resolve: a rollout with such actions cannot be checked."""

SMALLEST_STD = 1e-5
"""Standard deviation, relative to the size of the actions, below which rounding to float32 is part of the noise."""


class CalibrationEquation(Equation):
    """An equation between distributions: errors are standard scores over `Z_BOUND`, in any precision."""

    __slots__ = ()

    def tolerance_at(self, precision: str | None) -> float:
        """Return 1, the score at which chance is ruled out."""
        return 1.0

    def healthy(self, precision: str | None) -> str:
        """Return the scores that chance explains, in words."""
        return f"<= 1: the largest standard score over {Z_BOUND:g}, which chance does not exceed"

    def size(self, error: float) -> str:
        """Return the score and its bound: it is not an error, and grows with no rounding."""
        return f"score {Z_BOUND * error:.1f} (<= {Z_BOUND:g})"

    def sentence(self, error: float, explanations: Sequence[str] = ()) -> str:
        """Return a difference in one clause."""
        size = f"by {Z_BOUND * error:.3g} standard errors in one rollout (chance explains {Z_BOUND:.3g})"
        if not explanations:
            return f"{self.quantity} do not follow their stored distributions, {size}, and no known mistake explains it"
        return f"{self.quantity} are {' or '.join(explanations)}, not drawn from their stored distributions: they differ {size}"


ACTIONS = CalibrationEquation(
    name="actions",
    rank=14,
    quantity="the actions",
    equation="a_t ~ π(· | s_t), independently of everything before, given s_t",
    source="policy gradient theorem (Sutton 1999); scores: Freedman 1975, theorem 1.6",
    inputs="actions, and the distributions that they were drawn from",
    check="check_actions",
    shown_by="test_action_calibration",
    compute=lambda inputs: calibration.largest(calibration.scores(inputs)),
    advice="Take the actions from the distribution whose parameters are stored, in the same step and environment.",
    hypotheses=(
        mistake("deterministic", "always the most likely actions")
        .predicts("a_t = argmax π(· | s_t)", calibration.deterministic)
        .given(
            hides=(
                "permuted",
                "step_before",
                "step_after",
                "repeated",
                "cut_at_bounds",
                "squashed",
                "same_noise",
                "coloured_noise",
                "shuffled",
                "independent",
            )
        )
        .advises("Sample actions while training (`deterministic=False`); take the most likely action in evaluations only.")
        .cites("program: force-mean_action"),
        mistake("permuted", "another environment's actions")
        .predicts("a_{t,b} ~ π(· | s_{t,σ(b)})", calibration.permuted)
        .given(hides=("independent", "shuffled"))
        .advises("Keep the order of environments from the policy's output to `env.step` and to the buffer; check reshapes of [T, B]."),
        mistake("step_before", "drawn from the previous step's distribution")
        .predicts("a_t ~ π(· | s_{t-1})", partial(calibration.displaced, steps=-1))
        .given(hides=("independent", "shuffled"))
        .advises("Store the observation, distribution and action of a step in the same row."),
        mistake("step_after", "drawn from the next step's distribution")
        .predicts("a_t ~ π(· | s_{t+1})", partial(calibration.displaced, steps=1))
        .given(hides=("independent", "shuffled"))
        .advises("Store the observation, distribution and action of a step in the same row."),
        mistake("repeated", "repeated from the previous step")
        .predicts("a_t = a_{t-1}, else a_t ~ π(· | s_t)", calibration.repeated)
        .advises("Query the policy in every step; if actions are repeated on purpose, store one transition for all repetitions.")
        .cites("program: loop-sticky"),
        mistake("cut_at_bounds", "clipped at their bounds before they were stored")
        .predicts("a_t = clip(u, low, high), u ~ π(· | s_t)", calibration.cut_at_bounds)
        .given(hides=("independent", "shuffled"))
        .advises("Store the action as it was drawn, and clip only the copy that the environment receives.")
        .cites("program: force-clipped_before_log_prob"),
        variant("squashed", "the tanh of draws")
        .predicts("a_t = tanh u, u ~ π(· | s_t)", calibration.squashed)
        .given(hides=("independent", "shuffled"))
        .cites("1801.01290, appendix C"),
        mistake("same_noise", "drawn with the same noise in all environments")
        .predicts("a_{t,b} = F_b⁻¹(ε_t)", calibration.same_noise)
        .advises("Draw separate noise for every environment; seed each process differently.")
        .cites("program: script-repeated_env"),
        variant("coloured_noise", "drawn with noise that is correlated in time")
        .predicts("ε_t = ρ ε_{t-1} + √(1 - ρ²) η_t", calibration.coloured_noise)
        .cites("2312.11091; 2005.05719"),
        mistake("shuffled", "the same step's actions in shuffled environments")
        .predicts("a_{t,b} ~ π(· | s_{t,σ_t(b)})", calibration.shuffled)
        .advises("Keep the order of environments from the policy's output to `env.step` and to the buffer.")
        .cites("program: loop-independent"),
        mistake("independent", "independent of the distributions")
        .predicts("a_t ~ q(·)", calibration.independent)
        .advises("Step the environments with the policy's actions, and store the same actions.")
        .cites("program: force-independent"),
    ),
)


@dataclass(frozen=True, slots=True)
class ActionTotals(MetricGroup):
    """Sums of the tests that actions were drawn from their distributions. They can be added over the rollouts of a run."""

    test: tuple[str, ...] = label()
    excess: Sum = reports(
        Metric.quantity("integrity/actions/{test}", 840, "excess of a test of the actions", unit="terms", cost="sampled")
        .asks(
            "By how much do the actions exceed the predictions of their distributions: in log-probability, in most likely choices "
            "or squares, in agreement with the previous step, with the next environment?"
        )
        .bounds(healthy="within 7 roots of its variance, also summed over a run", source="a martingale, Freedman 1975, theorem 1.6")
        .absent("the distributions are missing, or the update was not sampled")
    )


@dataclass(frozen=True, slots=True)
class ActionVariances(MetricGroup):
    """Variances of the sums of `ActionTotals`."""

    test: tuple[str, ...] = label()
    variance: Sum = reports(
        Metric.magnitude(
            "integrity/actions_variance/{test}", 841, "variance of a test of the actions", unit="terms squared", cost="sampled"
        )
        .asks("How much would the excess vary if the actions were drawn from their distributions?")
        .absent("the distributions are missing, or the update was not sampled")
    )


@checked_arguments()
@inference_mode
def check_actions(
    actions: ActionColumns,
    *,
    logits: ActionColumns | None = None,
    means: ActionColumns | None = None,
    log_std: ActionColumns | None = None,
    action_masks: ActionColumns | None = None,
    relevant: ActionColumns | None = None,
    bounds: ActionColumns | None = None,
    valid: ArrayLike | None = None,
) -> EquationCheck:
    """Return the test that actions were drawn from their stored distributions.

    If there are several heads, each column is a mapping from the head's name.

    Args:
        actions: choices [T, B], or real numbers [T, B, D] as they were drawn, before a squash.
        logits: per categorical head [T, B, A].
        means: per Gaussian head [T, B, D].
        log_std: per Gaussian head [T, B, D] or [D].
        action_masks: per restricted head [T, B, A], bool: allowed choices.
        relevant: per head that is not always relevant [T, B], bool.
        bounds: per bounded Gaussian head [2, D]: lower and upper.
        valid: [T, B], bool; None if every row counts.

    Raises:
        ValueError: if there is no distribution, or shapes do not fit together.
    """
    inputs = action_inputs(
        actions,
        {"logits": logits, "means": means, "log_std": log_std},
        action_masks=action_masks,
        relevant=relevant,
        bounds=bounds,
        valid=valid,
    )
    return judge_actions(inputs)


def judge_actions(inputs: ActionInputs) -> EquationCheck:
    """Return the test of actions, with the hypotheses that explain a difference."""
    if not any(bool(counted.any()) for counted in inputs.counted.values()):
        return unchecked(ACTIONS, "no row counts")
    for head, mean in inputs.means.items():
        drawn = inputs.actions[head].abs().amax()
        if not bool(mean.isfinite().all() & inputs.actions[head].isfinite().all()):
            return unchecked(ACTIONS, "some of the numbers are NaN or infinite")
        if float(inputs.std[head].amin()) < SMALLEST_STD * max(1.0, float(drawn)):
            return unchecked(ACTIONS, "the noise is as small as the rounding of the actions")
    error = float(ACTIONS.compute(inputs)) / Z_BOUND
    if error <= 1:
        return EquationCheck(ACTIONS, error, 1.0)
    candidates = [
        Explanation(one, score / Z_EXPLAINED)
        for one in ACTIONS.hypotheses
        if one.compute is not None
        if (score := one.compute(inputs)) is not None and score <= Z_EXPLAINED
    ]
    hidden = {name for one in candidates for name in one.hypothesis.hides}
    return EquationCheck(ACTIONS, error, 1.0, tuple([one for one in candidates if one.hypothesis.name not in hidden]))


@inference_mode
def action_totals(inputs: ActionInputs) -> Iterator[MetricGroup]:
    """Yield the sum of each test's terms over all heads, and the sum of their variances, in units of the largest magnitude.

    Both can be added over rollouts, and the first sum remains a martingale.
    """
    parts = [calibration.categorical_terms(inputs.log_probs[h], inputs.actions[h], inputs.counted[h]) for h in inputs.log_probs]
    parts += [calibration.gaussian_terms(calibration.z_of(inputs, h), inputs.counted[h]) for h in inputs.means]
    totals: dict[str, Tensor] = {}
    for name, terms in (one for part in parts for one in part.items()):
        total = torch.where(terms.counted, terms.residuals, 0.0).sum() / terms.bound
        variance = torch.where(terms.counted, terms.variances, 0.0).sum() / terms.bound**2
        totals[name] = totals.get(name, torch.zeros_like(total)) + torch.stack([total, variance])
    if totals:
        sums, variances = torch.stack(list(totals.values())).unbind(-1)
        yield ActionTotals(tuple(totals), Sum(sums.unsqueeze(0)))
        yield ActionVariances(tuple(totals), Sum(variances.unsqueeze(0)))


def action_inputs(
    actions: ActionColumns,
    columns: Mapping[str, ActionColumns | None],
    *,
    action_masks: ActionColumns | None,
    relevant: ActionColumns | None,
    bounds: ActionColumns | None,
    valid: ArrayLike | None,
) -> ActionInputs:
    """Return the columns of a rollout as float64; `columns` are `logits`, `means` and `log_std`. See `check_actions`."""
    logits, means, log_std = (named_columns(columns[name]) for name in ("logits", "means", "log_std"))
    chosen, masks = named_columns(actions), masks_by_head(named_columns(action_masks))
    relevance = masks_by_head(named_columns(relevant))
    counted: dict[str, Tensor] = {}
    for head, part in {**logits, **means}.items():
        if head not in chosen:
            raise ValueError(f"head {head!r} has a distribution but no actions")
        own = chosen[head] if head in logits else chosen[head][..., 0]
        if own.dim() != 2:
            raise ValueError(f"the actions of head {head!r} must have shape [T, B], got shape {list(chosen[head].shape)}")
        rows = [x for x in (as_mask(valid, own), relevance.get(head)) if x is not None]
        same_shape(actions=own, distributions=part[..., 0], **{f"rows_{place}": x for place, x in enumerate(rows)})
        counted[head] = torch.stack([torch.ones_like(own, dtype=torch.bool), *rows]).all(0)
    if not counted:
        raise ValueError("actions are checked against logits, or means and log_std; got neither")
    missing = [head for head in means if head not in log_std]
    if missing:
        raise ValueError(f"head {missing[0]!r} has means but no log_std")
    masked = {
        head: x.double().masked_fill(~masks[head], torch.finfo(torch.float32).min) if head in masks else x.double()
        for head, x in logits.items()
    }
    return ActionInputs(
        actions={head: chosen[head].long() if head in logits else chosen[head].double() for head in counted},
        log_probs={head: x.log_softmax(-1) for head, x in masked.items()},
        means={head: x.double() for head, x in means.items()},
        std={head: log_std[head].double().exp().expand_as(x) for head, x in means.items()},
        counted=counted,
        bounds={head: as_tensor(x).double() for head, x in by_head(named_columns(bounds)).items()},
    )
