"""Equations of a rollout's targets: advantages, returns, and normalised advantages.

Shapes: T steps, B environments.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from esper_telemetry.core.arrays import ArrayLike, as_mask, as_tensor
from esper_telemetry.core.equation import Equation, Hypothesis
from esper_telemetry.core.lazy import Tensor, inference_mode, torch
from esper_telemetry.metrics.integrity.equations import EquationCheck, compare
from esper_telemetry.metrics.statistics import same_shape


@dataclass(frozen=True, slots=True)
class GaeInputs:
    """Columns of a rollout, [T, B] float64 or bool, and the settings of the estimate.

    Attributes:
        rewards: as they are learned from, without the value of a time limit's last state.
        values, next_values: of the states before and after each step; `next_values` is 0 after termination.
        ended, terminated: the step ended its episode; it did so by termination.
    """

    rewards: Tensor
    values: Tensor
    next_values: Tensor
    ended: Tensor
    terminated: Tensor
    gamma: float
    gae_lambda: float


def gae(inputs: GaeInputs) -> Tensor:
    """Return generalised advantages [T, B] by the reference equation (1506.02438, eq. 16)."""
    delta = inputs.rewards + inputs.gamma * inputs.next_values - inputs.values
    return accumulated(delta, inputs.gamma * inputs.gae_lambda * ~inputs.ended)


def accumulated(delta: Tensor, decay: Tensor) -> Tensor:
    """Return A_t = delta_t + decay_t A_{t+1}, [T, B]."""
    advantages = torch.empty_like(delta)
    following = torch.zeros_like(delta[0])
    for t in range(len(delta) - 1, -1, -1):
        following = delta[t] + decay[t] * following
        advantages[t] = following
    return advantages


ADVANTAGES = Equation(
    name="advantages",
    quantity="the advantages",
    equation="A_t = δ_t + γλ (1 - end_t) A_{t+1}, δ_t = r_t + γ V(s_{t+1}) - V(s_t)",
    source="1506.02438, eq. 16",
    inputs="rewards, values, ends, and the value after the last step",
    compute=gae,
    hypotheses=(
        Hypothesis(
            name="ends_ignored",
            says="GAE that runs on over the ends of episodes",
            equation="A_t = δ_t + γλ A_{t+1}",
            compute=lambda inputs: gae(replace(inputs, ended=torch.zeros_like(inputs.ended))),
            advice="Multiply the trace by 1 - done.",
        ),
    ),
)


@inference_mode
def check_gae(
    rewards: ArrayLike,
    values: ArrayLike,
    advantages: ArrayLike,
    *,
    ended: ArrayLike,
    next_values: ArrayLike,
    gamma: float,
    gae_lambda: float,
    terminated: ArrayLike | None = None,
    valid: ArrayLike | None = None,
    precision: str | None = None,
    tolerance: float | None = None,
) -> EquationCheck:
    """Return the comparison of advantages, before normalisation, with GAE.

    Args:
        rewards, values, advantages: [T, B].
        ended: [T, B], bool: the step taken at t ended its episode.
        next_values: [T, B], the critic's estimate of the state that follows t, 0 after termination.
        terminated: [T, B], bool: it ended by termination, not by a time limit; `ended` where it is None.
        valid: [T, B], bool; None where every entry is.
        precision: of the trainer's arithmetic.
        tolerance: largest relative error; by precision where it is None.
    """
    claimed = as_tensor(advantages)
    rewards, values, next_values = (as_tensor(x, claimed).detach().double() for x in (rewards, values, next_values))
    ends = as_tensor(ended, claimed).bool()
    inputs = GaeInputs(
        rewards=rewards,
        values=values,
        next_values=next_values,
        ended=ends,
        terminated=ends if terminated is None else as_tensor(terminated, claimed).bool(),
        gamma=gamma,
        gae_lambda=gae_lambda,
    )
    same_shape(advantages=claimed, rewards=rewards, values=values, next_values=next_values, ended=ends)
    magnitudes = (rewards, values)
    return compare(
        ADVANTAGES,
        inputs,
        claimed,
        magnitudes=magnitudes,
        valid=as_mask(valid, claimed),
        precision=precision,
        tolerance=tolerance,
    )
