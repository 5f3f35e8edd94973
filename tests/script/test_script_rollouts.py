"""Rollouts, minibatches and distributions of scripts, found by the numbers that they hold."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import torch
from torch import Tensor
from torch.distributions import Categorical

from esper_telemetry.adapters.script.listener import ScriptListener
from esper_telemetry.adapters.script.loss_graph import graph_of
from esper_telemetry.adapters.script.recorders import DistributionLog
from esper_telemetry.adapters.script.rollouts import RowFinder
from esper_telemetry.adapters.script.taps import Taps
from esper_telemetry.adapters.script.variables import Variables, calling_variables


def columns(**changes: Tensor) -> dict[str, Tensor]:
    """Columns [64, 1] of a rollout, of which the log-probabilities are close together."""
    draw = torch.Generator().manual_seed(1)
    log_probs = -0.7 - 1e-6 * torch.rand(64, 1, generator=draw)
    numbers = {"log_probs": log_probs, "advantages": torch.randn(64, 1, generator=draw)}
    return numbers | changes


def test_rows_are_found_by_the_column_whose_numbers_lie_apart_and_not_by_one_of_other_numbers() -> None:
    rollout = columns(returns=torch.arange(64.0).reshape(64, 1))
    rows = torch.randperm(64, generator=torch.Generator().manual_seed(2))[:16]
    own = {name: column.flatten()[rows] for name, column in rollout.items()}

    assert torch.equal(RowFinder(rollout).rows_of(None, own | {"returns": own["returns"] + 100.5}), rows)  # type: ignore[arg-type]
    assert RowFinder(rollout).rows_of(None, {"advantages": own["advantages"] + 5}) is None


def test_equal_transitions_are_visited_in_turns() -> None:
    rollout = columns()
    for column in rollout.values():
        column[1::2] = column[::2]
    finder = RowFinder(rollout)
    visits = [finder.rows_of(None, {name: column.flatten() for name, column in rollout.items()}) for _ in range(2)]

    assert all(rows is not None and rows.sort().values.tolist() == list(range(64)) for rows in visits)


def test_distributions_that_a_loss_does_not_use_are_no_heads_of_its_minibatch() -> None:
    log, weights = DistributionLog(), torch.zeros(2, requires_grad=True)
    for place in range(2):
        policy = Categorical(logits=weights + torch.eye(2)[place])
        log_probs = policy.log_prob(torch.zeros(5).long())
        log.add(Categorical(logits=policy.logits.expand(5, 2)), log_probs)
    log.keep(graph_of(log_probs.mean()))

    heads = log.take_minibatch(5).logits
    assert list(heads) == ["action"]
    assert heads["action"][0].argmax() == 1


class Zipped(gym.Env[Any, Any]):
    """Two environments in one, which does not say so and returns an iterator."""

    def step(self, action: object) -> Any:
        return zip(*[(0.0, 1.0, True, False, {}), (1.0, 2.0, False, False, {})], strict=True)


def test_what_an_environment_returns_as_an_iterator_is_left_to_the_script() -> None:
    listener = ScriptListener(lambda _: None, lambda _: None)
    taps = Taps(lambda: listener, lambda _, callback: callback, lambda _: None)
    taps.script = listener
    taps.install()
    try:
        _, rewards, terminated, *_ = Zipped().step([0, 1])
    finally:
        taps.remove()

    assert taps.error is None
    assert rewards == (1.0, 2.0) and terminated == (True, False)
    ends = listener.environments.ends()
    assert ends is not None and ends.ended.tolist() == [[True, False]]


class Refuses(dict[str, Any]):
    """A dictionary whose members are its attributes."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


def test_variables_of_a_script_may_refuse_attributes() -> None:
    batch = Refuses(advantages=torch.ones(3))

    def variables() -> Variables:
        return calling_variables()

    found = variables()
    assert any(value is batch for value in found.values())
