"""Measure whether actions change the observations, and after which delay, from the exploration noise.

The noise in an action does not depend on anything before it. If the change of the observation some steps later correlates with the noise,
the action caused the change. This reveals even a delay inside the innermost environment, whose actions cannot be observed. The numbers
do not show whether the delay is a mistake or part of the environment. So it is reported and does not raise an alarm.

Shapes: T steps, B environments, D entries of the actions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from esper_telemetry.core.group import MetricGroup
from esper_telemetry.core.lazy import Tensor, inference_mode, torch
from esper_telemetry.core.metric import Metric, reports
from esper_telemetry.core.reduction import Max
from esper_telemetry.equations.calibration import ActionInputs
from esper_telemetry.equations.comparison import EquationCheck, explained, unchecked
from esper_telemetry.equations.transitions import EXECUTED

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
    if not rows or ROWS_PER_FEATURE * (size + 1) > rows:
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
