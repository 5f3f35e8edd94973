"""Actions that take effect late are detected from the exploration noise alone; systems that respond slowly are not."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from esper_telemetry.equations.calibration import ActionInputs
from esper_telemetry.equations.comparison import EquationCheck
from esper_telemetry.equations.drawn_actions import action_effect, action_inputs, judge_effects, surprising_changes

STEPS, ENVS, LENGTH = 400, 4, 50
SEEDS = range(3)

System = Callable[[Tensor], Tensor]
"""Return the change of an observation in each step, [T, B], caused by the forces [T, B]."""


def velocity(force: Tensor) -> Tensor:
    return 0.3 * force


def position(force: Tensor) -> Tensor:
    """A point with inertia that shows only its position, which a force changes from the next step on."""
    return 0.1 * delayed(force.cumsum(0), 1)


def motor(force: Tensor) -> Tensor:
    """Three filters in series: the effect grows over several steps."""
    for _ in range(3):
        force = torch.stack([0.5 * force[: t + 1].flip(0).mul(0.5 ** torch.arange(t + 1).view(-1, 1)).sum(0) for t in range(STEPS)])
    return force


def delayed(column: Tensor, steps: int) -> Tensor:
    return torch.cat([torch.zeros(steps, column.shape[1]), column[:-steps]]) if steps else column


def case(system: System, delay: int, seed: int, *, discrete: bool = False) -> tuple[ActionInputs, Tensor, Tensor]:
    """A rollout of a policy that sees its actions: its mean is close to the previous step's action."""
    generator = torch.Generator().manual_seed(seed)
    ended = torch.zeros(STEPS, ENVS, dtype=torch.bool)
    ended[LENGTH - 1 :: LENGTH] = True
    noise = torch.randn(STEPS, ENVS, generator=generator)
    if discrete:
        logits = torch.randn(STEPS, ENVS, 3, generator=generator)
        actions = torch.distributions.Categorical(logits=logits).probs.flatten(0, 1).multinomial(1, generator=generator)
        actions = actions.view(STEPS, ENVS)
        force, columns = actions - 1.0, {"logits": logits, "means": None, "log_std": None}
    else:
        mean = 0.5 * delayed(noise, 1)
        force = mean + noise
        actions, columns = force.unsqueeze(-1), {"logits": None, "means": mean.unsqueeze(-1), "log_std": torch.zeros(1)}
    inputs = action_inputs(actions, columns, action_masks=None, relevant=None, bounds=None, valid=None)
    change = system(delayed(force, delay)) + 0.3 * torch.randn(STEPS, ENVS, generator=generator)
    return inputs, change.double(), ended


def check(system: System, delay: int, seed: int, *, discrete: bool = False) -> EquationCheck:
    return judge_effects(*case(system, delay, seed, discrete=discrete))


def effect(system: System, seed: int, *, discrete: bool = False) -> float:
    found = action_effect(*case(system, 0, seed, discrete=discrete))
    assert found is not None
    return found.values()["policy/action_effect"]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("delay", [3, 6, 12])
@pytest.mark.parametrize("discrete", [False, True])
def test_a_delay_is_named_with_its_steps(delay: int, discrete: bool, seed: int) -> None:
    (explanation,) = check(velocity, delay, seed, discrete=discrete).explanations

    assert (explanation.hypothesis.name, explanation.fitted) == ("late_effect", delay)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("system", [velocity, position, motor])
def test_what_responds_at_once_or_slowly_by_nature_is_right(system: System, seed: int) -> None:
    assert check(system, 0, seed).holds


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("system", "delay"), [(velocity, 4), (velocity, 0), (position, 0), (motor, 0)])
def test_a_delay_is_named_although_the_motion_of_the_state_is_larger(system: System, delay: int, seed: int) -> None:
    """A pendulum swings the observed point; its angle is observed, too."""
    inputs, change, ended = case(system, delay, seed)
    angle = 0.7 * torch.arange(STEPS + 1.0).view(-1, 1) + torch.arange(ENVS)
    pendulum = torch.stack([angle.sin(), angle.cos()], -1).double()
    point = torch.cat([torch.zeros(1, ENVS), change.cumsum(0)]) + 9 * pendulum[..., 0]
    observations = torch.cat([point.unsqueeze(-1), pendulum], -1)[:-1]

    surprises = surprising_changes(observations, ended)

    assert surprises is not None
    assert [one.fitted for one in judge_effects(inputs, surprises, ended[:-1]).explanations] == [delay] * (delay > 0)
    assert not judge_effects(inputs, observations.diff(dim=0), ended[:-1]).explanations  # without the fit none is visible


def test_observations_with_more_entries_than_steps_allow_are_not_fitted() -> None:
    assert surprising_changes(torch.randn(40, 1, 12), torch.zeros(40, 1, dtype=torch.bool)) is None


@pytest.mark.parametrize("seed", range(20))
def test_actions_without_any_effect_are_not_said_to_be_late(seed: int) -> None:
    assert check(torch.zeros_like, 0, seed).holds


@pytest.mark.parametrize("discrete", [False, True])
@pytest.mark.parametrize("system", [velocity, motor])
def test_the_effect_of_actions_is_several_times_that_of_chance(system: System, discrete: bool) -> None:
    """The largest random effect exceeds its expectation by a third in one of several dozen rollouts; its average never does."""
    without = [effect(torch.zeros_like, seed, discrete=discrete) for seed in range(20)]

    assert min(effect(system, seed, discrete=discrete) for seed in SEEDS) > 3
    assert sum(without) / len(without) < 1.2 and max(without) < 2


def test_an_effect_in_too_few_steps_is_not_measured() -> None:
    inputs, change, ended = case(velocity, 0, 0)

    assert action_effect(inputs, change, ended | (torch.arange(STEPS).view(-1, 1) >= 10)) is None
    assert action_effect(inputs, change, torch.ones_like(ended)) is None
