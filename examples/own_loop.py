"""A custom PPO loop with four lines of telemetry, marked 1 to 4.

python examples/own_loop.py && tensorboard --logdir runs
"""

from __future__ import annotations

import argparse

import gymnasium as gym
import torch
from torch import Tensor, nn
from torch.distributions import Categorical

from esper_telemetry import Telemetry, advantage_stats, ratio_diagnostics, value_fit
from esper_telemetry.metrics import episode_stats

NUM_ENVS, NUM_STEPS, EPOCHS, MINIBATCHES = 8, 128, 4, 4
GAMMA, LAMBDA, CLIP, MAX_NORM = 0.99, 0.95, 0.2, 0.5


class Agent(nn.Module):
    def __init__(self, observation_size: int, num_actions: int) -> None:
        super().__init__()
        self.actor = mlp(observation_size, num_actions)
        self.critic = mlp(observation_size, 1)

    def policy(self, observations: Tensor) -> Categorical:
        return Categorical(logits=self.actor(observations))

    def value(self, observations: Tensor) -> Tensor:
        values: Tensor = self.critic(observations).squeeze(-1)
        return values


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))


def advantages_of(rewards: Tensor, values: Tensor, dones: Tensor) -> Tensor:
    """Generalised advantages [T, B] from rewards and dones [T, B] and values [T + 1, B]."""
    advantages = torch.zeros_like(rewards)
    trace = torch.zeros(NUM_ENVS)
    for t in reversed(range(NUM_STEPS)):
        alive = 1 - dones[t]
        delta = rewards[t] + GAMMA * alive * values[t + 1] - values[t]
        trace = delta + GAMMA * LAMBDA * alive * trace
        advantages[t] = trace
    return advantages


def train(telemetry: Telemetry, total_steps: int) -> None:
    torch.manual_seed(1)
    envs = gym.make_vec(
        "CartPole-v1", num_envs=NUM_ENVS, vectorization_mode="sync", vector_kwargs={"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}
    )
    agent = Agent(4, 2)
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-3, eps=1e-5)

    telemetry.watch(agent, optimizer, actor=agent.actor, critic=agent.critic)  # 1: gradients, before and after clipping

    observation = torch.as_tensor(envs.reset(seed=1)[0])
    running = torch.zeros(2, NUM_ENVS)  # return and length so far of the current episodes
    for global_step in range(NUM_ENVS * NUM_STEPS, total_steps + 1, NUM_ENVS * NUM_STEPS):
        observations = torch.zeros(NUM_STEPS + 1, NUM_ENVS, 4)
        actions = torch.zeros(NUM_STEPS, NUM_ENVS, dtype=torch.long)
        rewards, dones = torch.zeros(NUM_STEPS, NUM_ENVS), torch.zeros(NUM_STEPS, NUM_ENVS)
        finished = [torch.zeros(2, 0)]  # return and length of the episodes that end in this rollout
        for t in range(NUM_STEPS):
            observations[t] = observation
            with torch.no_grad():
                actions[t] = agent.policy(observation).sample()
            state, reward, terminated, truncated, _ = envs.step(actions[t].numpy())
            observation = torch.as_tensor(state)
            rewards[t] = torch.as_tensor(reward)
            dones[t] = torch.as_tensor(terminated | truncated)
            running += torch.stack([rewards[t], torch.ones(NUM_ENVS)])
            finished.append(running[:, dones[t].bool()])
            running *= 1 - dones[t]
        observations[-1] = observation
        with torch.no_grad():
            values = agent.value(observations)
            log_probs = agent.policy(observations[:-1]).log_prob(actions)
        advantages = advantages_of(rewards, values, dones)
        returns = advantages + values[:-1]

        telemetry.observe(  # 2: after the rollout
            advantage_stats(advantages), value_fit(values[:-1], returns), episode_stats(*torch.cat(finished, dim=1))
        )

        batch = [x.flatten(0, 1) for x in (observations[:-1], actions, log_probs, advantages, returns)]
        for epoch in range(EPOCHS):
            for rows in torch.randperm(NUM_ENVS * NUM_STEPS).chunk(MINIBATCHES):
                obs, action, old_log_prob, advantage, target = (x[rows] for x in batch)
                advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                log_ratio = agent.policy(obs).log_prob(action) - old_log_prob
                ratio = log_ratio.exp()
                policy_loss = -torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()
                value_loss = 0.5 * (agent.value(obs) - target).square().mean()
                optimizer.zero_grad()
                (policy_loss + 0.5 * value_loss).backward()
                nn.utils.clip_grad_norm_(agent.parameters(), MAX_NORM)
                optimizer.step()

                telemetry.observe(ratio_diagnostics(log_ratio, advantage, clip=CLIP), epoch=epoch)  # 3: per minibatch

        telemetry.flush(env_step=global_step)  # 4: at the end of the update


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--total-steps", type=int, default=20_480)
    parser.add_argument("--run-dir", help="a new runs/own-loop-<time> by default")
    options = parser.parse_args()
    with Telemetry(["console", "tensorboard"], run_dir=options.run_dir or "auto", name="own-loop") as telemetry:
        train(telemetry, options.total_steps)


if __name__ == "__main__":
    main()
