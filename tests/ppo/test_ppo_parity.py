"""One update of a minibatch by this trainer and by Stable-Baselines3, from the same weights and rows.

The losses are written here as `stable_baselines3.ppo.PPO.train` computes them, from its policy's `evaluate_actions`. Policy, distribution,
clipping and optimizer are Stable-Baselines3's.
"""

from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ppo_builders import EventLog, cartpole, pendulum
from stable_baselines3.common.policies import ActorCriticPolicy
from torch import Tensor

from esper_telemetry.events import BackwardEnd, MinibatchEnd
from esper_telemetry.ppo import PPO
from esper_telemetry.ppo.rollout import Batch, Rollout, flatten

TOLERANCE = 1e-6
"""Largest difference of any number, in its own units."""

NAMES = {
    "mlp_extractor.policy_net.0": "actor.layers.0",
    "mlp_extractor.policy_net.2": "actor.layers.1",
    "mlp_extractor.value_net.0": "critic.layers.0",
    "mlp_extractor.value_net.2": "critic.layers.1",
    "action_net": "heads.action.linear",
    "value_net": "value",
    "log_std": "heads.action.log_std",
}
"""Names of the parts of Stable-Baselines3's policy, and of ours."""


def ours_named(name: str) -> str:
    """Return our name of one of their parameters."""
    part = next(part for part in NAMES if name == part or name.startswith(f"{part}."))
    return NAMES[part] + name.removeprefix(part)


def assert_equal(ours: Any, theirs: Any, what: str = "") -> None:
    difference = torch.as_tensor(ours).detach() - torch.as_tensor(theirs).detach()
    assert difference.abs().max() <= TOLERANCE, what


def their_policy(env_id: str, trainer: PPO) -> ActorCriticPolicy:
    """Return a policy of Stable-Baselines3 with our weights."""
    env = gymnasium.make(env_id)
    sizes = list(trainer.config.hidden_sizes)
    policy = ActorCriticPolicy(
        env.observation_space, env.action_space, lambda _: trainer.config.learning_rate, net_arch={"pi": sizes, "vf": sizes}
    )
    ours = trainer.policy.state_dict()
    policy.load_state_dict({name: ours[ours_named(name)] for name in policy.state_dict()})
    return policy


def their_update(policy: ActorCriticPolicy, batch: Batch, trainer: PPO) -> dict[str, Any]:
    """Return losses, norm and parameters after one step."""
    config = trainer.config
    values, log_prob, entropy = policy.evaluate_actions(batch.observations, batch.actions["action"])
    ratio = torch.exp(log_prob - batch.log_probs)
    clipped = torch.clamp(ratio, 1 - config.clip, 1 + config.clip)
    assert entropy is not None
    losses: dict[str, Tensor] = {
        "policy": -torch.min(batch.advantages * ratio, batch.advantages * clipped).mean(),
        "value": F.mse_loss(batch.returns, values.flatten()),
        "entropy": -torch.mean(entropy),
    }
    # ours is half the mean square, so their vf_coef is half of ours
    loss = losses["policy"] + config.entropy_coef * losses["entropy"] + 0.5 * config.value_coef * losses["value"]
    policy.optimizer.zero_grad()
    loss.backward()
    assert config.max_grad_norm is not None
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), config.max_grad_norm)
    policy.optimizer.step()
    return {**losses, "norm": norm}


def moved(trainer: PPO) -> Batch:
    """Return rows whose ratios differ from 1 and are clipped in part."""
    rollout: Rollout = trainer.collector.collect()
    advantages = trainer.steps.advantages(rollout, 0.99, 0.95)
    batch = flatten(rollout, trainer.steps.normalize(advantages), advantages + rollout.values)
    shift = 0.3 * torch.randn(len(batch), generator=torch.Generator().manual_seed(0))
    return Batch(batch.observations, batch.actions, batch.log_probs + shift, batch.advantages, batch.returns, batch.values)


@pytest.mark.parametrize(("make", "env_id"), [(cartpole, "CartPole-v1"), (pendulum, "Pendulum-v1")])
def test_one_step_equals_that_of_stable_baselines(make: Any, env_id: str) -> None:
    trainer: PPO = make(entropy_coef=0.01)
    batch = moved(trainer)
    policy = their_policy(env_id, trainer)
    emitted = EventLog().listen(trainer, MinibatchEnd, BackwardEnd)

    trainer._optimize(batch, 0, 0)
    theirs = their_update(policy, batch, trainer)

    losses = emitted.of(MinibatchEnd)[0].losses
    assert_equal(losses["policy"], theirs["policy"])
    assert_equal(losses["value"] / theirs["value"], 0.5)
    assert_equal(losses["entropy"], theirs["entropy"])
    assert_equal(emitted.of(BackwardEnd)[0].norms.norm() / theirs["norm"], 1.0)
    for name, parameter in policy.named_parameters():
        assert_equal(trainer.policy.get_parameter(ours_named(name)), parameter, name)


@pytest.mark.parametrize(("make", "env_id"), [(cartpole, "CartPole-v1"), (pendulum, "Pendulum-v1")])
def test_gradients_equal_those_of_stable_baselines(make: Any, env_id: str) -> None:
    """After clipping to a norm of 0.5, so that the largest are of the order of 1."""
    trainer: PPO = make(max_grad_norm=0.5, entropy_coef=0.01)
    batch = moved(trainer)
    policy = their_policy(env_id, trainer)
    gradients: dict[str, Tensor] = {}

    def keep(optimizer: Any, *_: Any) -> None:
        named = trainer.policy.named_parameters()
        gradients.update({name: p.grad.clone() for name, p in named if p.grad is not None})

    trainer.optimizer.register_step_pre_hook(keep)
    trainer._optimize(batch, 0, 0)
    their_update(policy, batch, trainer)

    theirs = {ours_named(name): p.grad for name, p in policy.named_parameters() if p.grad is not None}
    assert gradients.keys() == theirs.keys()
    for name, gradient in gradients.items():
        assert gradient.any()
        assert_equal(gradient, theirs[name], name)


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_advantages_equal_those_of_stable_baselines(env_id: str) -> None:
    """Stable-Baselines3's buffer adds the value of a truncated episode's last state to its reward; ours keeps them separate.

    Both kinds of ends occur: an untrained policy drops the pole within 64 steps, and a pendulum's episode is cut after 200.
    """
    from stable_baselines3.common.buffers import RolloutBuffer

    steps, envs = (64, 4) if env_id == "CartPole-v1" else (256, 2)
    trainer = (cartpole if env_id == "CartPole-v1" else pendulum)(num_steps=steps)
    rollout = replace(trainer.collector.collect(), valid=None)  # theirs has no reset rows
    env = gymnasium.make(env_id)
    buffer = RolloutBuffer(steps, env.observation_space, env.action_space, gamma=0.98, gae_lambda=0.9, n_envs=envs)
    cut = (rollout.ended & ~rollout.terminated).numpy()
    assert cut.any() == (env_id == "Pendulum-v1") and rollout.ended.any()
    buffer.rewards[:] = rollout.rewards.numpy() + 0.98 * np.where(cut, rollout.next_values.numpy(), 0)
    buffer.values[:] = rollout.values.numpy()
    buffer.episode_starts[1:] = rollout.ended.numpy()[:-1]
    buffer.compute_returns_and_advantage(rollout.next_values[-1], rollout.ended[-1].numpy())

    ours = trainer.steps.advantages(rollout, 0.98, 0.9)

    scale = float(np.abs(buffer.advantages).max())
    assert scale > 1
    assert_equal(ours / scale, torch.from_numpy(buffer.advantages) / scale)
