"""PPO with an LSTM that is stepped in a loop, written as functions; settings are a dictionary."""

import hashlib

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
from torch.distributions import Categorical

config = {"num_envs": 4, "num_steps": 32, "gamma": 0.99, "gae_lambda": 0.95, "clip_eps": 0.2, "updates": 4, "lr": 1e-3}


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(4, 16), nn.Tanh())
        self.lstm = nn.LSTM(16, 16)
        self.actor = nn.Linear(16, 2)
        self.critic = nn.Linear(16, 1)

    def states(self, x, lstm_state, done):
        size = lstm_state[0].shape[1]
        hidden = self.network(x).reshape((-1, size, 16))
        found = []
        for h, d in zip(hidden, done.reshape((-1, size)), strict=True):
            keep = (1.0 - d).view(1, -1, 1)
            h, lstm_state = self.lstm(h.unsqueeze(0), (keep * lstm_state[0], keep * lstm_state[1]))
            found.append(h)
        return torch.flatten(torch.cat(found), 0, 1), lstm_state

    def act(self, x, lstm_state, done, action=None):
        hidden, lstm_state = self.states(x, lstm_state, done)
        dist = Categorical(logits=self.actor(hidden))
        action = dist.sample() if action is None else action
        return action, dist.log_prob(action), dist.entropy(), self.critic(hidden).flatten(), lstm_state


def advantages_of(rewards, values, dones, next_value, next_done):
    advantages, last = torch.zeros_like(rewards), 0
    for t in reversed(range(len(rewards))):
        alive = 1 - (next_done if t == len(rewards) - 1 else dones[t + 1])
        following = next_value if t == len(rewards) - 1 else values[t + 1]
        delta = rewards[t] + config["gamma"] * following * alive - values[t]
        advantages[t] = last = delta + config["gamma"] * config["gae_lambda"] * alive * last
    return advantages


def update(agent, optimizer, rollout, advantages, initial):
    obs, actions, log_probs, rewards, dones, values, next_done, next_value = rollout
    returns = advantages + values
    for epoch in range(2):
        for columns in np.array_split(np.random.permutation(config["num_envs"]), 2):
            state = tuple(part[:, columns] for part in initial)
            picked = obs[:, columns], state, dones[:, columns], actions[:, columns].reshape(-1)
            _, new_log_prob, entropy, new_values, _ = agent.act(*picked)
            log_ratio = new_log_prob - log_probs[:, columns].reshape(-1)
            mb_adv = advantages[:, columns].reshape(-1)
            clipped = log_ratio.exp().clamp(1 - config["clip_eps"], 1 + config["clip_eps"])
            policy_loss = -torch.min(log_ratio.exp() * mb_adv, clipped * mb_adv).mean()
            value_loss = (new_values - returns[:, columns].reshape(-1)).square().mean()
            optimizer.zero_grad()
            (policy_loss + 0.25 * value_loss - 0.01 * entropy.mean()).backward()
            nn.utils.clip_grad_norm_(agent.parameters(), max_norm=0.5)
            optimizer.step()
        print("epoch", epoch, policy_loss.item(), value_loss.item(), float(rewards.sum()), float(next_value.sum() + next_done.sum()))


def train():
    torch.manual_seed(1)
    np.random.seed(1)
    size, length = config["num_envs"], config["num_steps"]
    envs = gym.make_vec("CartPole-v1", num_envs=size, vectorization_mode="sync")
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=config["lr"])
    next_obs, next_done = torch.Tensor(envs.reset(seed=1)[0]), torch.zeros(size)
    state = torch.zeros(1, size, 16), torch.zeros(1, size, 16)
    obs, actions = torch.zeros(length, size, 4), torch.zeros(length, size, dtype=torch.long)
    log_probs, rewards, dones, values = (torch.zeros(length, size) for _ in range(4))
    for _ in range(config["updates"]):
        initial = state
        for t in range(length):
            obs[t], dones[t] = next_obs, next_done
            with torch.no_grad():
                actions[t], log_probs[t], _, values[t], state = agent.act(next_obs, state, next_done)
            next_obs, reward, terminated, truncated, _ = envs.step(actions[t].numpy())
            next_obs, next_done = torch.Tensor(next_obs), torch.Tensor(terminated | truncated)
            rewards[t] = torch.as_tensor(reward)
        with torch.no_grad():
            next_value = agent.act(next_obs, state, next_done)[3]
        advantages = advantages_of(rewards, values, dones, next_value, next_done)
        rollout = obs, actions, log_probs, rewards, dones, values, next_done, next_value
        update(agent, optimizer, rollout, advantages, initial)
    print(hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in agent.parameters())).hexdigest())


if __name__ == "__main__":
    train()
