"""Time limits are bootstrapped with the value of the last observation: as a next value, or as a part of the reward."""

import gymnasium as gym
import torch
from torch import nn
from torch.distributions import Categorical

PLACE, TERMINATED, TRUNCATED = "next", 2, 3
gamma, gae_lambda = 0.99, 0.95

torch.manual_seed(3)
env = gym.make("CartPole-v1", max_episode_steps=30)
actor = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
critic = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], 3e-3)
state = torch.as_tensor(env.reset(seed=1)[0])
for _ in range(4):
    steps = []
    for _ in range(256):
        with torch.no_grad():
            policy = Categorical(logits=actor(state))
            action = policy.sample()
            result = env.step(action.item())
            following = torch.as_tensor(result[0])
            value, next_value = critic(state)[0], critic(following)[0]
        terminated, truncated, reward = result[TERMINATED], result[TRUNCATED], result[1]
        if PLACE == "reward":
            reward += gamma * next_value.item() * truncated
        steps.append((state, action, policy.log_prob(action), reward, terminated, truncated, value, next_value))
        state = torch.as_tensor(env.reset()[0]) if terminated or truncated else following
    states, actions, log_probs, rewards, ends, limits, values, next_values = (
        torch.stack(one) if torch.is_tensor(one[0]) else torch.tensor(one) for one in zip(*steps)
    )
    over = ends | limits
    advantages, carried = torch.zeros(256), torch.tensor(0.0)
    for t in reversed(range(256)):
        bootstrapped = ~ends[t] if PLACE == "next" else ~over[t]
        delta = rewards[t] + gamma * next_values[t] * bootstrapped - values[t]
        carried = delta + gamma * gae_lambda * ~over[t] * carried
        advantages[t] = carried
    returns = advantages + values
    for _ in range(2):
        for rows in torch.randperm(256).split(64):
            policy = Categorical(logits=actor(states[rows]))
            ratio = (policy.log_prob(actions[rows]) - log_probs[rows]).exp()
            weights = advantages[rows]
            loss = -torch.min(ratio * weights, ratio.clamp(0.8, 1.2) * weights).mean()
            loss = loss + 0.5 * (critic(states[rows]).squeeze(-1) - returns[rows]).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
