"""A typical PPO script in one file that logs only a line per update.

python script.py --env-id tasks:Drift-v0
"""

from __future__ import annotations

import argparse
import hashlib
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
from torch.distributions import Categorical

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--env-id", default="tasks:Drift-v0")
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--total-timesteps", type=int, default=2048)
parser.add_argument("--learning-rate", type=float, default=1e-3)
parser.add_argument("--num-envs", type=int, default=6)
parser.add_argument("--num-steps", type=int, default=64)
parser.add_argument("--num-minibatches", type=int, default=4)
parser.add_argument("--update-epochs", type=int, default=3)
parser.add_argument("--gamma", type=float, default=0.98)
parser.add_argument("--gae-lambda", type=float, default=0.9)
parser.add_argument("--clip-coef", type=float, default=0.2)
parser.add_argument("--clip-vloss", action="store_true")
parser.add_argument("--norm-adv", action=argparse.BooleanOptionalAction, default=True)
parser.add_argument("--anneal-lr", action=argparse.BooleanOptionalAction, default=True)
parser.add_argument("--ent-coef", type=float, default=0.02)
parser.add_argument("--vf-coef", type=float, default=0.5)
parser.add_argument("--max-grad-norm", type=float, default=0.5)
args = parser.parse_args()


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, outputs))


class Agent(nn.Module):
    def __init__(self, obs_size: int, num_actions: int) -> None:
        super().__init__()
        self.actor = mlp(obs_size, num_actions)
        self.critic = mlp(obs_size, 1)

    def get_value(self, x: Any) -> Any:
        return self.critic(x)

    def get_action_and_value(self, x: Any, action: Any = None) -> Any:
        logits = 3 * self.actor(x)
        probs = Categorical(logits=logits)
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


batch_size = args.num_envs * args.num_steps
minibatch_size = batch_size // args.num_minibatches
num_iterations = args.total_timesteps // batch_size
np.random.seed(args.seed)
torch.manual_seed(args.seed)

envs = gym.vector.SyncVectorEnv(
    [lambda: gym.make(args.env_id) for _ in range(args.num_envs)], autoreset_mode=gym.vector.AutoresetMode.SAME_STEP
)
obs_shape, action_shape = envs.single_observation_space.shape, envs.single_action_space.shape
num_outputs = int(envs.single_action_space.n)
agent = Agent(obs_shape[0], num_outputs)
optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)

obs = torch.zeros((args.num_steps, args.num_envs, *obs_shape))
actions = torch.zeros((args.num_steps, args.num_envs, *action_shape))
logprobs = torch.zeros((args.num_steps, args.num_envs))
rewards = torch.zeros((args.num_steps, args.num_envs))
dones = torch.zeros((args.num_steps, args.num_envs))
values = torch.zeros((args.num_steps, args.num_envs))

global_step = 0
next_obs = torch.tensor(envs.reset(seed=args.seed)[0], dtype=torch.float32)
next_done = torch.zeros(args.num_envs)

for iteration in range(1, num_iterations + 1):
    if args.anneal_lr:
        frac = 1.0 - (iteration - 1.0) / num_iterations
        optimizer.param_groups[0]["lr"] = frac * args.learning_rate

    for step in range(args.num_steps):
        global_step += args.num_envs
        obs[step] = next_obs
        dones[step] = next_done
        with torch.no_grad():
            action, logprob, _, value = agent.get_action_and_value(next_obs)
            values[step] = value.flatten()
        actions[step] = action
        logprobs[step] = logprob
        state, reward, terminations, truncations, infos = envs.step(action.numpy())
        rewards[step] = torch.tensor(reward, dtype=torch.float32)
        next_obs = torch.tensor(state, dtype=torch.float32)
        next_done = torch.tensor(np.logical_or(terminations, truncations), dtype=torch.float32)

    with torch.no_grad():
        next_value = agent.get_value(next_obs).reshape(1, -1)
        advantages = torch.zeros_like(rewards)
        lastgaelam = torch.zeros(args.num_envs)
        for t in reversed(range(args.num_steps)):
            if t == args.num_steps - 1:
                nextnonterminal = 1.0 - next_done
                nextvalues = next_value[0]
            else:
                nextnonterminal = 1.0 - dones[t + 1]
                nextvalues = values[t + 1]
            delta = rewards[t] + args.gamma * nextvalues * nextnonterminal - values[t]
            advantages[t] = lastgaelam = delta + args.gamma * args.gae_lambda * nextnonterminal * lastgaelam
        returns = advantages + values

    b_obs = obs.reshape((-1, *obs_shape))
    b_logprobs = logprobs.reshape(-1)
    b_actions = actions.reshape((-1, *action_shape))
    b_advantages = advantages.reshape(-1)
    b_returns = returns.reshape(-1)
    b_values = values.reshape(-1)

    b_inds = np.arange(batch_size)
    for epoch in range(args.update_epochs):
        np.random.shuffle(b_inds)
        for start in range(0, batch_size, minibatch_size):
            mb_inds = b_inds[start : start + minibatch_size]
            _, newlogprob, entropy, newvalue = agent.get_action_and_value(b_obs[mb_inds], b_actions[mb_inds])
            logratio = newlogprob - b_logprobs[mb_inds]
            ratio = logratio.exp()

            mb_advantages = b_advantages[mb_inds]
            if args.norm_adv:
                mb_advantages = (mb_advantages - mb_advantages.mean()) / (mb_advantages.std() + 1e-8)

            pg_loss1 = -mb_advantages * ratio
            pg_loss2 = -mb_advantages * torch.clamp(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
            pg_loss = torch.max(pg_loss1, pg_loss2).mean()

            newvalue = newvalue.view(-1)
            if args.clip_vloss:
                v_loss_unclipped = (newvalue - b_returns[mb_inds]) ** 2
                v_change = torch.clamp(newvalue - b_values[mb_inds], -args.clip_coef, args.clip_coef)
                v_loss_clipped = (b_values[mb_inds] + v_change - b_returns[mb_inds]) ** 2
                v_loss = 0.5 * torch.max(v_loss_unclipped, v_loss_clipped).mean()
            else:
                v_loss = 0.5 * ((newvalue - b_returns[mb_inds]) ** 2).mean()

            entropy_loss = entropy.mean()
            loss = pg_loss - args.ent_coef * entropy_loss + args.vf_coef * v_loss

            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
            optimizer.step()

    print(f"step {global_step}, mean reward {rewards.mean():.3f}")

parameters = torch.cat([p.detach().flatten() for p in agent.parameters()])
print("weights", hashlib.sha256(parameters.numpy().tobytes()).hexdigest()[:12])
