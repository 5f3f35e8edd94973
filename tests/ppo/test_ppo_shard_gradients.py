"""Gradients of parts of a minibatch: they add up to the whole gradient, and training does not change."""

from typing import Any

import pytest
import torch
from ppo_builders import cartpole, equal, pendulum, weights
from torch import Tensor

from esper_telemetry.core.event_parts import Shard
from esper_telemetry.events import BackwardEnd, MinibatchStart
from esper_telemetry.ppo import PPO, PPOConfig
from esper_telemetry.ppo.environments.cue_recall import CueRecall


def flat(parameters: dict[str, Tensor]) -> Tensor:
    zeros = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    return torch.cat([(zeros[name] if p.grad is None else p.grad).reshape(-1) for name, p in parameters.items()])


def recall(**settings: Any) -> PPO:
    config = PPOConfig(policy="lstm", num_steps=32, num_epochs=2, num_minibatches=2, lstm_size=8, **settings)
    return PPO(CueRecall(8, seed=0), config)


@pytest.mark.parametrize("make", [cartpole, pendulum, recall])
@pytest.mark.parametrize("shared_trunk", [False, True])
def test_the_parts_add_up_to_the_gradient_of_the_minibatch(make: Any, shared_trunk: bool) -> None:
    """The loss is a mean over rows, so the mean of the parts' gradients, weighted by rows, is the minibatch's gradient."""
    trainer = make(shared_trunk=shared_trunk, entropy_coef=0.01)
    parts: list[Shard] = []
    whole: list[Tensor] = []
    trainer.hooks.on(MinibatchStart, lambda event: parts.extend(event.shards(4)))
    trainer.hooks.on(BackwardEnd, lambda event: whole.append(flat(event.parameters)) if event.step == 0 else None)

    trainer.learn(1)

    assert len(parts) == 4
    share = torch.tensor([part.samples for part in parts], dtype=torch.float64)
    mean = (share / share.sum()) @ torch.stack([part.gradient for part in parts]).double()
    torch.testing.assert_close(mean, whole[0].double(), rtol=1e-4, atol=1e-6)


def test_sequences_are_the_samples_of_a_policy_with_memory() -> None:
    """Eight environments in two minibatches: four whole sequences each."""
    trainer, counts = recall(), []
    trainer.hooks.on(MinibatchStart, lambda event: counts.append([part.samples for part in event.shards(8)]))

    trainer.learn(1)

    assert counts == [[1, 1, 1, 1]]


@pytest.mark.parametrize("make", [cartpole, recall])
def test_asking_for_parts_leaves_no_trace(make: Any) -> None:
    bare, observed = make(), make()
    observed.hooks.on(MinibatchStart, lambda event: event.shards(3))

    bare.learn(500)
    observed.learn(500)

    assert equal(weights(bare), weights(observed))


def test_a_minibatch_announces_itself_before_the_first_step_only() -> None:
    trainer, steps = cartpole(), []
    trainer.hooks.on(MinibatchStart, lambda event: steps.append((event.epoch, event.step)))

    trainer.learn(400)

    assert len(steps) == trainer.updates > 1
    assert set(steps) == {(0, 0)}
