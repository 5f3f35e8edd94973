"""A typical policy gradient in one file: REINFORCE, or with `--critic` an actor-critic whose critic learns from the advantages.

python policy_gradient.py --env-id tasks:Drift-v0 --critic
"""

from __future__ import annotations

import argparse
import hashlib

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
from torch.distributions import Categorical

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--env-id", default="tasks:Drift-v0")
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--total-timesteps", type=int, default=2048)
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--learning-rate", type=float, default=1e-3)
parser.add_argument("--gamma", type=float, default=0.98)
parser.add_argument("--critic", action="store_true")
args = parser.parse_args()

torch.manual_seed(args.seed)
env = gym.make(args.env_id)
inputs, choices = env.observation_space.shape[0], int(env.action_space.n)
features = nn.Sequential(nn.Linear(inputs, 32), nn.Tanh())
policy_head = nn.Linear(32, choices)
network = nn.ModuleList([features, policy_head])
if args.critic:
    value_head = nn.Linear(32, 1)
    network.append(value_head)
optimizer = torch.optim.Adam(network.parameters(), lr=args.learning_rate)

observation, _ = env.reset(seed=args.seed)
for _update in range(args.total_timesteps // args.steps):
    observations, actions, rewards, ends = [], [], [], []
    while len(rewards) < args.steps or not ends[-1]:
        state = torch.tensor(observation, dtype=torch.float32)
        with torch.no_grad():
            action = Categorical(logits=policy_head(features(state))).sample()
        observation, reward, terminated, truncated, _ = env.step(action.item())
        observations.append(state)
        actions.append(action)
        rewards.append(reward)
        ends.append(terminated or truncated)
        if ends[-1]:
            observation, _ = env.reset()

    returns, total = [], 0.0
    for reward, end in zip(reversed(rewards), reversed(ends), strict=True):
        total = reward + args.gamma * total * (not end)
        returns.insert(0, total)
    returns = torch.tensor(returns, dtype=torch.float32)

    states, chosen = torch.stack(observations), torch.stack(actions)
    optimizer.zero_grad()
    hidden = features(states)
    log_probs = Categorical(logits=policy_head(hidden)).log_prob(chosen)
    if args.critic:
        values = value_head(hidden).squeeze(-1)
        advantages = returns - values
        critic_loss = advantages.pow(2).mean()
        actor_loss = -(log_probs * advantages.detach()).mean()
        loss = actor_loss + 0.5 * critic_loss
    else:
        loss = -(log_probs * returns).mean()
    loss.backward()
    optimizer.step()
    print(f"mean reward {np.mean(rewards):.3f}")

parameters = torch.cat([p.detach().flatten() for p in network.parameters()])
print("weights", hashlib.sha256(parameters.numpy().tobytes()).hexdigest()[:12])
