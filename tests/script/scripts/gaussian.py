"""PPO for continuous actions as a class, without gradient clipping, in a single environment."""

import hashlib

import gymnasium as gym
import torch
from torch import nn
from torch.distributions import Normal


class PPO:
    def __init__(self):
        torch.manual_seed(3)
        self.env = gym.make("Pendulum-v1")
        self.clip_ratio, self.gamma, self.lam = 0.2, 0.9, 0.95
        self.pi, self.v = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1)), nn.Linear(3, 1)
        self.log_std = nn.Parameter(torch.zeros(1))
        self.optimizer = torch.optim.Adam([*self.pi.parameters(), *self.v.parameters(), self.log_std], lr=3e-3)

    def dist(self, obs):
        return Normal(self.pi(obs), self.log_std.exp())

    def learn(self, updates, n_steps=250):
        obs = torch.as_tensor(self.env.reset(seed=3)[0])
        for _ in range(updates):
            observations, actions = torch.zeros(n_steps + 1, 1, 3), torch.zeros(n_steps, 1, 1)
            rewards, dones = torch.zeros(n_steps, 1), torch.zeros(n_steps, 1)
            for t in range(n_steps):
                observations[t] = obs
                with torch.no_grad():
                    actions[t] = self.dist(obs.view(1, 3)).sample()
                obs, reward, terminated, truncated, _ = self.env.step(actions[t, 0].numpy())
                rewards[t], dones[t] = float(reward), float(terminated or truncated)
                obs = torch.as_tensor(self.env.reset()[0] if dones[t] else obs)
            observations[-1] = obs
            with torch.no_grad():
                values = self.v(observations).squeeze(-1)
                logp_old = self.dist(observations[:-1]).log_prob(actions).sum(-1)
            log_probs = logp_old
            advantages, last = torch.zeros(n_steps, 1), 0.0
            for t in reversed(range(n_steps)):
                alive = 1 - dones[t]
                last = rewards[t] + self.gamma * alive * values[t + 1] - values[t] + self.gamma * self.lam * alive * last
                advantages[t] = last
            returns = advantages + values[:-1]
            for _epoch in range(3):
                ratio = (self.dist(observations[:-1]).log_prob(actions).sum(-1) - log_probs).exp()
                adv = (advantages - advantages.mean()) / advantages.std()
                pi_loss = -torch.min(ratio * adv, ratio.clamp(1 - self.clip_ratio, 1 + self.clip_ratio) * adv).mean()
                loss_v = (self.v(observations[:-1]).squeeze(-1) - returns).square().mean()
                self.optimizer.zero_grad()
                (pi_loss + 0.01 * loss_v).backward()
                self.optimizer.step()
            print("reward", rewards.mean().item(), loss_v.item())
        weights = [*self.pi.parameters(), *self.v.parameters(), self.log_std]
        print(hashlib.sha256(b"".join(w.detach().numpy().tobytes() for w in weights)).hexdigest())


if __name__ == "__main__":
    PPO().learn(updates=3)
