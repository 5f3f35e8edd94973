"""The critic's outputs that are kept while a script acts and trains."""

from __future__ import annotations

import torch

from esper_telemetry.adapters.script.network_logs import EstimateLog


def test_the_last_estimates_of_acting_survive_a_loss_that_is_computed_step_by_step() -> None:
    """A recurrent policy calls its critic once for each step of a chunk before the first optimizer step."""
    log, critic = EstimateLog(), torch.nn.Linear(3, 1)
    with torch.no_grad():
        before, last = critic(torch.randn(4, 3)), critic(torch.randn(4, 3))
    log.add(critic, before)
    log.after_env_step()
    log.add(critic, last)
    for _ in range(20):
        log.add(critic, critic(torch.randn(4, 3)))

    (estimate,) = log.take_last()

    assert estimate.before is not None
    assert torch.equal(estimate.output, last[:, 0]) and torch.equal(estimate.before, before[:, 0])


def test_a_critic_may_be_asked_after_each_step_of_the_environments() -> None:
    """The last output is of the state after the rollout."""
    log, critic = EstimateLog(), torch.nn.Linear(3, 1)
    with torch.no_grad():
        outputs = [critic(torch.randn(2, 3)) for _ in range(6)]
    for output in outputs[:-1]:
        log.after_env_step()
        log.add(critic, output)
    log.add(critic, outputs[-1])

    values, *_ = log.of_critic((), 5, 2)

    assert torch.equal(values, torch.stack(outputs[:-1]).squeeze(-1))


def test_a_layer_with_one_unit_may_be_a_critic() -> None:
    """Unless it is the policy's, such as one of two actions."""
    log, layer = EstimateLog(), torch.nn.Linear(3, 1)
    log.add(torch.nn.Linear(3, 2), torch.zeros(4, 2))
    assert not log.has_critic(())
    log.add(layer, torch.zeros(4, 1))
    assert log.has_critic(()) and not log.has_critic({id(layer.weight)})
