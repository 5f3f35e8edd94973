"""Equation of the actions, each of which is drawn from the distribution that is stored with it, and their effects on the observations.

The noise in an action does not depend on anything before it. If the change of the observation some steps later correlates with the noise,
the action caused the change. This reveals even a delay inside the innermost environment, whose actions cannot be observed. The numbers
do not show whether the delay is a mistake or part of the environment. So it is reported and does not raise an alarm.

Shapes: T steps, B environments, A choices, D action dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from esper_telemetry.core.arrays import ArrayLike, as_mask, as_tensor, by_head, masks_by_head
from esper_telemetry.core.group import MetricGroup
from esper_telemetry.core.lazy import Tensor, inference_mode, torch
from esper_telemetry.core.metric import Metric, label, reports
from esper_telemetry.core.reduction import Max, Sum
from esper_telemetry.core.requirements import checked_arguments
from esper_telemetry.equations import calibration
from esper_telemetry.equations.calibration import Z_BOUND, Z_EXPLAINED, ActionInputs
from esper_telemetry.equations.comparison import EquationCheck, explained, unchecked
from esper_telemetry.equations.equation import Equation, Explanation, mistake, variant
from esper_telemetry.equations.log_probs import ActionColumns, named_columns
from esper_telemetry.equations.transitions import EXECUTED
from esper_telemetry.metrics.statistics import same_shape

MAX_SQUASHED = 5.0
"""Magnitude of pre-tanh actions that float32 cannot resolve: a rollout with such actions cannot be checked."""

SMALLEST_STD = 1e-5
"""Standard deviation, relative to the size of the actions, below which rounding to float32 is part of the noise."""

MIN_DELAY = 3
"""Delay in steps that counts as late. Positions without velocities, and motors, naturally respond one or two steps late."""

MAX_DELAY = 16
"""Largest delay in steps that is tested."""

MIN_ROWS = 128
"""Fewest consecutive steps of one episode, with an outcome, for a test of a delay."""

STRONG_Z, WEAK_Z = 7.0, 4.5
"""Standard deviations above the first number are an effect; below the second number the effect is absent."""

MAX_EARLIER_SHARE = 0.4
"""Largest effect at a shorter delay, relative to the effect at the delay: a system that is slow by nature responds gradually."""

ROWS_PER_FEATURE = 4
"""Fewest steps for each number by which changes of observations are predicted: otherwise the fit includes the effects of actions."""

EARLY_STEPS = 4
"""Steps in which `ActionEffect` looks for an effect: more steps add chance correlations and, in usual tasks, nothing else."""


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
                "mixed",
                "independent",
            )
        )
        .advises("Sample actions while training (`deterministic=False`); take the most likely action in evaluations only.")
        .cites("program: force-mean_action"),
        mistake("permuted", "another environment's actions")
        .predicts("a_{t,b} ~ π(· | s_{t,σ(b)})", calibration.permuted)
        .given(hides=("independent", "mixed", "shuffled"))
        .advises("Keep the order of environments from the policy's output to `env.step` and to the buffer; check reshapes of [T, B]."),
        mistake("step_before", "drawn from the previous step's distribution")
        .predicts("a_t ~ π(· | s_{t-1})", partial(calibration.displaced, steps=-1))
        .given(hides=("independent", "mixed", "shuffled"))
        .advises("Store the observation, distribution and action of a step in the same row."),
        mistake("step_after", "drawn from the next step's distribution")
        .predicts("a_t ~ π(· | s_{t+1})", partial(calibration.displaced, steps=1))
        .given(hides=("independent", "mixed", "shuffled"))
        .advises("Store the observation, distribution and action of a step in the same row."),
        mistake("repeated", "repeated from the previous step")
        .predicts("a_t = a_{t-1}, else a_t ~ π(· | s_t)", calibration.repeated)
        .advises("Query the policy in every step; if actions are repeated on purpose, store one transition for all repetitions.")
        .cites("program: loop-sticky"),
        mistake("cut_at_bounds", "clipped at their bounds before they were stored")
        .predicts("a_t = clip(u, low, high), u ~ π(· | s_t)", calibration.cut_at_bounds)
        .given(hides=("independent", "mixed", "shuffled"))
        .advises("Store the action as it was drawn, and clip only the copy that the environment receives.")
        .cites("program: force-clipped_before_log_prob"),
        variant("squashed", "the tanh of draws")
        .predicts("a_t = tanh u, u ~ π(· | s_t)", calibration.squashed)
        .given(hides=("independent", "mixed", "shuffled"))
        .cites("1801.01290, appendix C"),
        mistake("same_noise", "drawn with the same noise in all environments")
        .predicts("a_{t,b} = F_b⁻¹(ε_t)", calibration.same_noise)
        .advises("Draw separate noise for every environment; seed each process differently.")
        .cites("program: script-repeated_env"),
        mistake("constant_noise", "drawn with the same noise in every step")
        .predicts("a_t = μ_t + σ_t ε", calibration.constant_noise)
        .given(hides=("same_noise", "coloured_noise", "cut_at_bounds", "independent"))
        .advises("Create the random generator once: one that is seeded again in each step repeats its first numbers.")
        .cites("program: test_action_calibration"),
        variant("coloured_noise", "drawn with noise that is correlated in time")
        .predicts("ε_t = ρ ε_{t-1} + √(1 - ρ²) η_t", calibration.coloured_noise)
        .cites("2312.11091; 2005.05719"),
        mistake("shuffled", "the same step's actions in shuffled environments")
        .predicts("a_{t,b} ~ π(· | s_{t,σ_t(b)})", calibration.shuffled)
        .advises("Keep the order of environments from the policy's output to `env.step` and to the buffer.")
        .cites("program: loop-independent"),
        mistake("mixed", "often random choices")
        .predicts("a_t ~ (1 - ε) π(· | s_t) + ε / A", calibration.mixed)
        .given(hides=("independent",))
        .advises("Draw every action from the policy, which explores by its entropy, or store log-probabilities of the mixture.")
        .cites("program: test_action_calibration"),
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


@dataclass(frozen=True, slots=True)
class ActionEffect(MetricGroup):
    """Effect of actions on the observations of the next steps. Rank 0 reports the effect in its own rows."""

    replicated = True

    effect: Max = reports(
        Metric.ratio("policy/action_effect", 176, "effect of actions on observations", cost="sampled")
        .asks(
            "Do observations change with the actions? The largest correlation between the part of an action that was drawn by chance and "
            "the change of the observation within four steps, divided by the largest that chance alone gives: about 1 without an effect."
        )
        .bounds(healthy="> 1.7", source="15 tasks of Gymnasium have 1.4 to 21, and 0.2 to 1.7 if no action arrives")
        .absent("no transition was recorded, the policy acted on other distributions, or observations are not vectors of real numbers")
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


@inference_mode
def action_effect(inputs: ActionInputs, change: Tensor, ended: Tensor) -> ActionEffect | None:
    """Return the effect of the actions; None if there are too few steps. For the arguments see `judge_effects`."""
    sizes = [size for size, _ in zip(_sizes(inputs, change, ended), range(EARLY_STEPS), strict=False)]
    entries = sum([*(mean.shape[-1] for mean in inputs.means.values()), *(one.shape[-1] for one in inputs.log_probs.values())])
    if not sizes:
        return None
    return ActionEffect(Max(torch.tensor(max(sizes) / math.sqrt(2 * math.log(max(2, EARLY_STEPS * entries))))))


@inference_mode
def judge_effects(inputs: ActionInputs, change: Tensor, ended: Tensor) -> EquationCheck:
    """Return the test that actions do not take effect several steps late.

    Args:
        inputs: actions and the distributions that they were drawn from.
        change: [T, B] or [T, B, K], change in each step of numbers computed from the observations, or of the observations.
        ended: [T, B], bool: the step ended its episode, so the action did not cause the change.
    """
    earlier = 0.0
    for delay, size in enumerate(_sizes(inputs, change, ended)):
        if size > WEAK_Z:
            if delay < MIN_DELAY or size < STRONG_Z or earlier > MAX_EARLIER_SHARE * size:
                return EquationCheck(EXECUTED, 0.0, EXECUTED.tolerance_at(None))
            return explained(EXECUTED, "late_effect", fitted=float(delay))
        earlier = max(earlier, size)
    return unchecked(EXECUTED, "the effect of the actions on the observations is not visible")


@inference_mode
def surprising_changes(observations: Tensor, ended: Tensor) -> Tensor | None:
    """Return what the observations [T, B, D] do not show of their next changes, [T - 1, B, D]; None if D is too large for the steps.

    A least-squares fit of the changes by the entries and their products is subtracted. Without it the motion of the state itself hides the
    effect of an action.
    """
    states = observations.double().flatten(2)
    change, inside, size = states.diff(dim=0), ~ended[:-1].to(states.device), states.shape[-1]
    rows = int(inside.sum())
    if not rows or ROWS_PER_FEATURE * (size + 1) > rows or not bool(torch.isfinite(states).all()):
        return None
    scaled = (states[:-1] - states[:-1][inside].mean(0)) / states[:-1][inside].std(0).clamp(min=torch.finfo().eps)
    features = [torch.ones_like(scaled[..., :1]), scaled]
    if ROWS_PER_FEATURE * (size + 1) * (size + 2) // 2 <= rows:
        first, second = torch.triu_indices(size, size)
        features.append(scaled[..., first] * scaled[..., second])
    known = torch.cat(features, -1)
    surprises: Tensor = change - known @ torch.linalg.lstsq(known[inside], change[inside], driver="gelsd").solution
    return surprises


def _sizes(inputs: ActionInputs, change: Tensor, ended: Tensor) -> Iterator[float]:
    """Yield the effect after 0, 1, ... steps, in standard deviations of chance, while there are enough steps."""
    noise = _noise(inputs).to(change.device)
    ended = ended.to(change.device)
    alive = ~ended
    for delay in range(min(MAX_DELAY, len(change) - 1) + 1):
        if delay:
            alive = alive[:-1] & ~ended[delay:]
        size = _effect(noise[: len(change) - delay], change[delay:], alive)
        if size is None:
            return
        yield size


def _noise(inputs: ActionInputs) -> Tensor:
    """Actions minus their means, [T, B, D]; 0 in rows that do not count."""
    parts = [(inputs.actions[head] - mean) * inputs.counted[head].unsqueeze(-1) for head, mean in inputs.means.items()]
    for head, log_probs in inputs.log_probs.items():
        chosen = torch.nn.functional.one_hot(inputs.actions[head], log_probs.shape[-1])
        parts.append((chosen - log_probs.exp()) * inputs.counted[head].unsqueeze(-1))
    return torch.cat(parts, -1)


def _effect(noise: Tensor, change: Tensor, counted: Tensor) -> float | None:
    """Return the largest correlation of an entry of the noise with one of the change, in standard deviations; None for too few rows."""
    rows = noise[counted].unsqueeze(-1)
    if len(rows) < MIN_ROWS:
        return None
    outcome = change[counted].reshape(len(rows), 1, -1)
    products = rows * (outcome - outcome.mean(0))
    spread = products.square().sum(0).sqrt()
    return float((products.sum(0).abs() / spread.clamp(min=1e-300)).amax()) if bool(spread.any()) else None
