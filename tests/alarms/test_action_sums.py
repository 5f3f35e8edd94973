"""Sums over a run's actions: a small excess in every update raises an alarm, chance does not."""

from collections.abc import Iterator, Mapping

import pytest
import torch

from esper_telemetry.alarms.alarm_bounds import Limits
from esper_telemetry.alarms.baselines import Baselines
from esper_telemetry.alarms.rule import View
from esper_telemetry.alarms.rules.equation_alarms import CalibrationJudge, sum_bound
from esper_telemetry.equations.drawn_actions import action_inputs, action_totals, check_actions


def record(logits: torch.Tensor, actions: torch.Tensor) -> dict[str, float]:
    """Record with the values of one update."""
    inputs = action_inputs(
        actions, {"logits": logits, "means": None, "log_std": None}, action_masks=None, relevant=None, bounds=None, valid=None
    )
    groups = [*check_actions(actions, logits=logits), *action_totals(inputs)]
    return {key: value for group in groups for key, value in group.values().items()}


def severities(records: Iterator[Mapping[str, float]]) -> Iterator[float]:
    """Severities of a run with these records."""
    judge, view = CalibrationJudge(), View({}, Limits({}), Baselines(()))
    for values in records:
        view.look(values)
        yield from (finding.severity for finding in judge(view))


def rollouts(updates: int, sharpness: float, *, uniform: bool) -> Iterator[dict[str, float]]:
    """Records of rollouts of 8 steps in 4 environments, too small to test one rollout alone."""
    for _ in range(updates):
        logits = sharpness * torch.randn(8, 4, 3)
        drawn = torch.distributions.Categorical(logits=logits).sample()
        yield record(logits, torch.randint(0, 3, drawn.shape) if uniform else drawn)


@pytest.mark.system
@pytest.mark.parametrize("sharpness", [0.3, 1.0, 4.0, 20.0])
def test_draws_raise_nothing_over_many_updates(sharpness: float) -> None:
    torch.manual_seed(0)

    assert max(severities(rollouts(600, sharpness, uniform=False))) == 0.0


def test_actions_that_ignore_a_soft_policy_are_raised_by_their_sum() -> None:
    torch.manual_seed(0)
    values = list(rollouts(120, 0.6, uniform=True))

    assert all(value["integrity/equation/actions"] < 1 for value in values)
    assert max(severities(iter(values))) == 1.0


def test_an_update_whose_actions_are_explained_is_left_to_their_equation() -> None:
    values = {"integrity/equation/actions": 3.0, "integrity/actions/mode": 1e6, "integrity/actions_variance/mode": 1.0}

    assert list(severities(iter([values]))) == []


def test_the_bound_of_a_sum_grows_like_its_root() -> None:
    """log(4 / 1e-7) = 17.5, and 17.5 / 3 + √((17.5 / 3)² + 2 x 17.5) = 14.1."""
    assert sum_bound(0.0) == sum_bound(1.0) == pytest.approx(14.15, abs=0.05)
    assert 6e3 < sum_bound(1e6) < 9e3
