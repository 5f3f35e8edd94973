"""The delay after which actions change what the environment shows, by the noise of exploration.

The part of an action that the policy drew by chance depends on nothing before it. If the change of the observation some steps later goes
with it, the action caused it. So a delay shows that lies beneath all wrappers, where no tap sees the action. Whether it is a mistake or
the environment's own does not show: it is named and raises no alarm.

Shapes: T steps, B environments, D entries of the actions.
"""

from __future__ import annotations

from esper_telemetry.core.lazy import Tensor, inference_mode, torch
from esper_telemetry.metrics.integrity.equations import EquationCheck, Explanation, unchecked
from esper_telemetry.metrics.integrity.rollouts.calibration import ActionInputs
from esper_telemetry.metrics.integrity.rollouts.transitions import EXECUTED

MIN_DELAY = 3
"""Steps from which on an effect is late: positions without velocities, and motors, respond one or two steps late by nature."""

MAX_DELAY = 16
"""Steps up to which effects are looked for."""

MIN_ROWS = 128
"""Steps of one episode in a row, with an outcome, from which on effects of a delay are tested."""

STRONG_Z, WEAK_Z = 7.0, 4.5
"""Standard deviations from which on there is an effect, and up to which there is none."""

MAX_EARLIER_SHARE = 0.4
"""Largest effect of fewer steps next to that of the delay: what a system does slowly by nature grows from step to step."""


@inference_mode
def judge_effects(inputs: ActionInputs, change: Tensor, ended: Tensor) -> EquationCheck:
    """Return the test that no action takes effect several steps late, and none before.

    Args:
        inputs: actions and the distributions that they were drawn from.
        change: [T, B], of a number that the observations give, in each step.
        ended: [T, B], bool: the step ended its episode, so that its change is not the action's.
    """
    noise = _noise(inputs).to(change.device)
    ended = ended.to(change.device)
    alive, earlier = ~ended, 0.0
    for delay in range(min(MAX_DELAY, len(change) - 1) + 1):
        if delay:
            alive = alive[:-1] & ~ended[delay:]
        size = _effect(noise[: len(change) - delay], change[delay:], alive)
        if size is None:
            break
        if size > WEAK_Z:
            if delay < MIN_DELAY or size < STRONG_Z or earlier > MAX_EARLIER_SHARE * size:
                return EquationCheck(EXECUTED, 0.0, EXECUTED.tolerance_at(None))
            late = next(one for one in EXECUTED.hypotheses if one.name == "late_effect")
            return EquationCheck(EXECUTED, 1.0, EXECUTED.tolerance_at(None), (Explanation(late, 0.0, float(delay)),))
        earlier = max(earlier, size)
    return unchecked(EXECUTED, "no effect of the actions on the observations shows")


def _noise(inputs: ActionInputs) -> Tensor:
    """Actions less their means, [T, B, D]; 0 in rows that do not count."""
    parts = [(inputs.actions[head] - mean) * inputs.counted[head].unsqueeze(-1) for head, mean in inputs.means.items()]
    for head, log_probs in inputs.log_probs.items():
        chosen = torch.nn.functional.one_hot(inputs.actions[head], log_probs.shape[-1])
        parts.append((chosen - log_probs.exp()) * inputs.counted[head].unsqueeze(-1))
    return torch.cat(parts, -1)


def _effect(noise: Tensor, change: Tensor, counted: Tensor) -> float | None:
    """Return the largest correlation of any entry of the noise with the change, in standard deviations; None of too few rows."""
    rows, outcome = noise[counted], change[counted].unsqueeze(-1)
    if len(rows) < MIN_ROWS:
        return None
    products = rows * (outcome - outcome.mean())
    spread = products.square().sum(0).sqrt()
    return float((products.sum(0).abs() / spread.clamp(min=1e-300)).amax()) if bool(spread.any()) else None
