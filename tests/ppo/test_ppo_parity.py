"""One update of a minibatch by this trainer and by Stable-Baselines3, from the same weights and the same rows.

The losses are written here as `stable_baselines3.ppo.PPO.train` computes them, from what its policy's
`evaluate_actions` returns; policy, distribution, clipping and optimizer are its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ppo_builders import Seen, cartpole, pendulum
from stable_baselines3.common.policies import ActorCriticPolicy
from torch import Tensor

from esper_telemetry.events import BackwardEnd, MinibatchEnd
from esper_telemetry.ppo import PPO
from esper_telemetry.ppo.rollout import Batch, Rollout, flatten

TOLERANCE = 1e-6


def their_policy(env_id: str, trainer: PPO) -> ActorCriticPolicy:
    """A policy of Stable-Baselines3 with our weights."""
    env = gymnasium.make(env_id)
    sizes = list(trainer.config.hidden_sizes)
    policy = ActorCriticPolicy(
        env.observation_space,
        env.action_space,
        lambda _: trainer.config.learning_rate,
        net_arch={"pi": sizes, "vf": sizes},
    )
    ours = trainer.policy.state_dict()
    pairs = {
        "mlp_extractor.policy_net.0": "actor.layers.0",
        "mlp_extractor.policy_net.2": "actor.layers.1",
        "mlp_extractor.value_net.0": "critic.layers.0",
        "mlp_extractor.value_net.2": "critic.layers.1",
        "action_net": "heads.action.linear",
        "value_net": "value",
    }
    state = {
        f"{theirs}.{part}": ours[f"{mine}.{part}"] for theirs, mine in pairs.items() for part in ("weight", "bias")
    }
    if "heads.action.log_std" in ours:
        state["log_std"] = ours["heads.action.log_std"]
    policy.load_state_dict(state)
    return policy


def their_update(policy: ActorCriticPolicy, batch: Batch, trainer: PPO) -> dict[str, Any]:
    """Losses, norm and parameters after one step."""
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
    """Rows whose ratios differ from 1 and are clipped in part."""
    rollout: Rollout = trainer.collector.collect()
    advantages = trainer.steps.advantages(rollout, 0.99, 0.95)
    batch = flatten(rollout, trainer.steps.normalize(advantages), advantages + rollout.values)
    shift = 0.3 * torch.randn(len(batch), generator=torch.Generator().manual_seed(0))
    return Batch(
        batch.observations, batch.actions, batch.log_probs + shift, batch.advantages, batch.returns, batch.values
    )


@pytest.mark.parametrize(("make", "env_id"), [(cartpole, "CartPole-v1"), (pendulum, "Pendulum-v1")])
def test_one_step_equals_that_of_stable_baselines(make: Any, env_id: str) -> None:
    trainer: PPO = make(entropy_coef=0.01)
    batch = moved(trainer)
    policy = their_policy(env_id, trainer)
    seen = Seen().listen(trainer, MinibatchEnd, BackwardEnd)

    trainer._optimize(batch, 0, 0)
    theirs = their_update(policy, batch, trainer)

    losses = seen.of(MinibatchEnd)[0].losses
    assert torch.allclose(losses["policy"], theirs["policy"], atol=TOLERANCE)
    assert torch.allclose(2 * losses["value"], theirs["value"], rtol=TOLERANCE)
    assert torch.allclose(losses["entropy"], theirs["entropy"], atol=TOLERANCE)
    assert torch.allclose(seen.of(BackwardEnd)[0].norms.norm(), theirs["norm"], rtol=1e-5)
    for name, parameter in their_policy(env_id, trainer).named_parameters():
        assert torch.allclose(parameter, policy.get_parameter(name), atol=TOLERANCE), name


@pytest.mark.parametrize(("make", "env_id"), [(cartpole, "CartPole-v1"), (pendulum, "Pendulum-v1")])
def test_gradients_equal_those_of_stable_baselines(make: Any, env_id: str) -> None:
    trainer: PPO = make(max_grad_norm=0.5)
    batch = moved(trainer)
    policy = their_policy(env_id, trainer)
    gradients: list[Tensor] = []

    def keep(optimizer: Any, *_: Any) -> None:
        gradients.extend(p.grad.clone() for p in trainer.policy.parameters() if p.grad is not None)

    trainer.optimizer.register_step_pre_hook(keep)
    trainer._optimize(batch, 0, 0)
    their_update(policy, batch, trainer)

    theirs = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    total_ours = torch.cat([gradient.flatten() for gradient in gradients]).sort().values
    total_theirs = torch.cat([gradient.flatten() for gradient in theirs.values()]).sort().values
    assert torch.allclose(total_ours, total_theirs, atol=TOLERANCE)


def test_advantages_equal_those_of_stable_baselines() -> None:
    """Their buffer adds the value of a truncated episode's last state to its reward; ours keeps it apart."""
    from stable_baselines3.common.buffers import RolloutBuffer

    trainer = cartpole(num_steps=64)
    rollout = trainer.collector.collect()
    env = gymnasium.make("CartPole-v1")
    buffer = RolloutBuffer(64, env.observation_space, env.action_space, gamma=0.98, gae_lambda=0.9, n_envs=4)
    cut = (rollout.ended & ~rollout.terminated).numpy()
    buffer.rewards[:] = rollout.rewards.numpy() + 0.98 * np.where(cut, rollout.next_values.numpy(), 0)
    buffer.values[:] = rollout.values.numpy()
    buffer.episode_starts[1:] = rollout.ended.numpy()[:-1]
    buffer.compute_returns_and_advantage(rollout.next_values[-1], rollout.ended[-1].numpy())

    ours = trainer.steps.advantages(replace(rollout, valid=None), 0.98, 0.9)

    assert np.allclose(ours.numpy(), buffer.advantages, atol=TOLERANCE * 10)
