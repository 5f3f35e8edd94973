"""Gradients: the split backward, its parts, the written-out network and the NumPy network against plain torch."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from ppo_builders import cartpole, equal, pendulum, weights
from short_trainings import learned
from torch import Tensor

from esper_telemetry.core.event_parts import Shard
from esper_telemetry.events import BackwardEnd, HeadsBackward, MinibatchStart, TrunkBackward
from esper_telemetry.ppo import PPO, PPOConfig, networks
from esper_telemetry.ppo.collectors.inference import in_numpy, in_torch
from esper_telemetry.ppo.environments.cue_recall import CueRecall
from esper_telemetry.ppo.networks import MLP
from esper_telemetry.ppo.ppo_objective import TrunkOutputs, backward_losses, backward_trunks
from esper_telemetry.ppo.rollout import Batch, flatten

Make = Callable[..., PPO]


def first_batch(trainer: PPO) -> Batch:
    rollout = trainer.collector.collect()
    advantages = trainer.steps.advantages(rollout, 0.99, 0.95)
    return flatten(rollout, trainer.steps.normalize(advantages), advantages + rollout.values)


def gradients(trainer: PPO) -> list[Tensor]:
    gradients_or_none = [parameter.grad for parameter in trainer.policy.parameters()]
    trainer.optimizer.zero_grad()
    return [tensor.clone() for tensor in gradients_or_none if tensor is not None]


def split_backward(trainer: PPO, batch: Batch) -> list[Tensor]:
    outputs = trainer.policy.trunks(batch.observations, batch.grid())
    leaves = TrunkOutputs(outputs[0], outputs[-1]).leaves()
    backward_losses(trainer._losses(batch, leaves).losses, trainer._weights)
    backward_trunks(outputs, leaves)
    return gradients(trainer)


def plain_backward(trainer: PPO, batch: Batch) -> list[Tensor]:
    outputs = trainer.policy.trunks(batch.observations, batch.grid())
    losses = trainer._losses(batch, TrunkOutputs(outputs[0], outputs[-1])).losses
    total = sum(trainer._weights[name] * loss for name, loss in losses.items())
    assert isinstance(total, Tensor)
    total.backward()
    return gradients(trainer)


@pytest.mark.parametrize("make", [cartpole, pendulum])
@pytest.mark.parametrize("shared_trunk", [False, True])
@pytest.mark.parametrize("entropy_coef", [0.0, 0.01])
def test_the_split_backward_equals_the_plain_one_bit_for_bit(make: Make, shared_trunk: bool, entropy_coef: float) -> None:
    trainer = make(shared_trunk=shared_trunk, entropy_coef=entropy_coef)
    batch = first_batch(trainer)

    split, plain = split_backward(trainer, batch), plain_backward(trainer, batch)

    assert len(split) == len(list(trainer.policy.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(split, plain, strict=True))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("shared_trunk", [False, True])
def test_the_split_backward_of_memory_and_several_heads_is_the_plain_one(precision: str, shared_trunk: bool) -> None:
    """Heads add up in another order, so the last bit may differ."""
    trainer = recall(shared_trunk=shared_trunk, entropy_coef=0.01, precision=precision)
    (batch,) = trainer.steps.minibatches(first_batch(trainer), 1, trainer.generator)

    split, plain = split_backward(trainer, batch), plain_backward(trainer, batch)

    assert len(split) == len(list(trainer.policy.parameters()))
    for a, b in zip(split, plain, strict=True):
        assert float((a - b).norm()) <= 2e-7 * float(b.norm()) + 1e-12


@pytest.mark.parametrize("make", [cartpole, pendulum])
def test_the_critics_gradient_is_what_the_actors_leaves_of_the_whole(make: Make) -> None:
    """Computed by subtraction, and by a separate pass."""
    trainer = make(shared_trunk=True)
    batch = first_batch(trainer)
    outputs = trainer.policy.trunks(batch.observations)
    leaves = TrunkOutputs(outputs[0], outputs[-1]).leaves()
    backward_losses(trainer._losses(batch, leaves).losses, trainer._weights)
    shared = list(trainer.policy.actor.parameters())
    parts = [torch.autograd.grad(outputs[0], shared, grad_outputs=part, retain_graph=True) for part in leaves.gradients()]
    backward_trunks(outputs, leaves)

    for ours, theirs, parameter in zip(*parts, shared, strict=True):
        assert parameter.grad is not None
        assert float((parameter.grad - ours - theirs).norm()) <= 1e-6 * float(theirs.norm())


def test_the_leaves_give_exact_parameter_gradients_of_either_loss() -> None:
    """With a shared trunk, the gradient from the actor's leaf equals a backward pass of the actor's loss alone."""
    trainer = cartpole(shared_trunk=True)
    observed: list[tuple[Tensor, ...]] = []

    def measure(event: TrunkBackward) -> None:
        observed.append(torch.autograd.grad(event.outputs, event.shared, [event.actor], retain_graph=True))

    trainer.hooks.on(TrunkBackward, measure)
    batch = first_batch(trainer)
    alone = copy.deepcopy(trainer.policy)
    trainer._optimize(batch, 0, 0)
    normalized = alone.normalize(alone.scores(alone.trunks(batch.observations)[0]))
    log_ratio = alone.log_prob(normalized, batch.actions) - batch.log_probs
    trainer.steps.policy_loss(log_ratio, batch.advantages, 0.2).backward()

    for ours, parameter in zip(observed[0], alone.actor.parameters(), strict=True):
        assert parameter.grad is not None and torch.allclose(ours, parameter.grad, atol=1e-8)


@pytest.mark.parametrize("shared", [True, False])
def test_gradients_through_the_heads_are_those_of_one_head_at_a_time(shared: bool) -> None:
    """Their sum is the actor's gradient at the trunk's output. Detaching the other heads' scores leaves one head's gradient; the ratio of
    a factored policy is a product, so it keeps their values. The measurement does not change the weights.
    """
    config = PPOConfig(num_steps=16, num_minibatches=2, hidden_sizes=(8,), shared_trunk=shared, entropy_coef=0.1)
    watched, alone, bare = (PPO(CueRecall(8, seed=0), config) for _ in range(3))
    through: list[HeadsBackward] = []
    whole: list[Tensor] = []
    watched.hooks.on(HeadsBackward, through.append)
    watched.hooks.on(TrunkBackward, lambda event: whole.append(event.actor))
    alone.steps = replace(alone.steps, scores=lambda scores: {name: z if name == "op" else z.detach() for name, z in scores.items()})
    without: list[Tensor] = []
    alone.hooks.on(TrunkBackward, lambda event: without.append(event.actor))
    for trainer in (watched, alone, bare):
        trainer.learn(128)

    assert [set(event.heads) for event in through] == [{"op", "arg"}] * len(whole)
    for event, gradient in zip(through, whole, strict=True):
        torch.testing.assert_close(sum(event.heads.values()), gradient, rtol=0, atol=1e-7)
    torch.testing.assert_close(through[0].heads["op"], without[0], rtol=0, atol=1e-7)
    assert list(through[0].parameters) == [f"actor.{name}" for name, _ in watched.policy.actor.named_parameters()]
    assert all(map(torch.equal, watched.policy.parameters(), bare.policy.parameters()))


def test_separate_networks_share_nothing() -> None:
    emitted = learned(cartpole(), 128, TrunkBackward)

    event = emitted.events[0]
    assert len(event.outputs) == 2 and list(event.shared) == []
    assert event.actor.shape == event.critic.shape and event.actor.shape[1] == 16


@pytest.mark.parametrize("tile", [networks.TILE_ROWS, 8, 33])
@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_the_written_out_network_equals_plain_operations(activation: str, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its 33 rows are also backed up in five parts."""
    monkeypatch.setattr(networks, "TILE_ROWS", tile)
    torch.manual_seed(0)
    network = MLP(5, (16, 8), activation)
    rows = torch.randn(33, 5, requires_grad=True)
    upstream = torch.randn(33, 8)
    results = []
    for forward in (network.forward, network.plain):
        features = forward(rows)
        inputs = [rows, *network.parameters()]
        results.append([features.detach(), *torch.autograd.grad(features, inputs, upstream)])

    for ours, theirs in zip(*results, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_the_network_in_numpy_agrees_and_follows_the_weights(activation: str) -> None:
    torch.manual_seed(0)
    network = MLP(6, (64, 64), activation)
    rows = torch.randn(8, 2, 3)
    in_numpy = network.as_numpy()
    with torch.no_grad():
        network.get_parameter("layers.0.bias").add_(0.1)

    assert np.allclose(in_numpy(rows.numpy()), network(rows).detach().numpy(), atol=1e-6)


@pytest.mark.parametrize("make", [cartpole, pendulum])
def test_acting_in_numpy_agrees_with_acting_in_torch(make: Make) -> None:
    policy = make().policy
    rows = np.random.default_rng(0).normal(size=(8, policy.actor.inputs)).astype(np.float32)

    fast, slow = in_numpy(policy), in_torch(policy)
    assert np.allclose(fast.scores(fast.actor(rows))["action"], slow.scores(slow.actor(rows))["action"], atol=1e-6)
    assert np.allclose(fast.value(fast.critic(rows)), slow.value(slow.critic(rows)), atol=1e-6)


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
