"""A PPO script without telemetry.

esper-telemetry run examples/unedited.py --total-steps 20480
"""

from __future__ import annotations

import argparse

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Categorical


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
        self.critic = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))

    def act(self, obs: Tensor, action: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        probs = Categorical(logits=self.actor(obs))
        action = probs.sample() if action is None else action
        return action, probs.log_prob(action), probs.entropy(), self.critic(obs).squeeze(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--total-steps", type=int, default=20_480, dest="total_timesteps")
    args = parser.parse_args()
    num_envs, num_steps, gamma, lam, clip_coef = 8, 128, 0.99, 0.95, 0.2
    torch.manual_seed(1)
    envs = gym.make_vec("CartPole-v1", num_envs=num_envs, vectorization_mode="sync")
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-3)
    obs, actions = torch.zeros(num_steps, num_envs, 4), torch.zeros(num_steps, num_envs, dtype=torch.long)
    logprobs, rewards, dones, values = (torch.zeros(num_steps, num_envs) for _ in range(4))
    next_obs, next_done = torch.as_tensor(envs.reset(seed=1)[0]), torch.zeros(num_envs)
    global_step = 0
    while global_step < args.total_timesteps:
        for t in range(num_steps):
            global_step += num_envs
            obs[t], dones[t] = next_obs, next_done
            with torch.no_grad():
                actions[t], logprobs[t], _, values[t] = agent.act(next_obs)
            state, reward, terminated, truncated, _ = envs.step(actions[t].numpy())
            next_obs, next_done = torch.as_tensor(state), torch.as_tensor(terminated | truncated).float()
            rewards[t] = torch.as_tensor(reward)
        with torch.no_grad():
            next_value = agent.act(next_obs)[3]
        advantages, last = torch.zeros_like(rewards), torch.zeros(num_envs)
        for t in reversed(range(num_steps)):
            alive = 1 - (next_done if t == num_steps - 1 else dones[t + 1])
            following = next_value if t == num_steps - 1 else values[t + 1]
            last = rewards[t] + gamma * alive * following - values[t] + gamma * lam * alive * last
            advantages[t] = last
        returns = advantages + values
        b_obs, b_actions, b_logprobs, b_advantages, b_returns = (x.flatten(0, 1) for x in (obs, actions, logprobs, advantages, returns))
        for _epoch in range(4):
            for mb_inds in np.array_split(np.random.default_rng(global_step).permutation(num_steps * num_envs), 4):
                _, newlogprob, entropy, newvalue = agent.act(b_obs[mb_inds], b_actions[mb_inds])
                ratio = (newlogprob - b_logprobs[mb_inds]).exp()
                mb_advantages = b_advantages[mb_inds]
                mb_advantages = (mb_advantages - mb_advantages.mean()) / (mb_advantages.std() + 1e-8)
                clipped = ratio.clamp(1 - clip_coef, 1 + clip_coef)
                pg_loss = -torch.min(ratio * mb_advantages, clipped * mb_advantages).mean()
                v_loss = 0.5 * (newvalue - b_returns[mb_inds]).square().mean()
                optimizer.zero_grad()
                (pg_loss + 0.5 * v_loss - 0.01 * entropy.mean()).backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
        print(f"{global_step} steps, mean value {float(values.mean()):.1f}")


if __name__ == "__main__":
    main()
