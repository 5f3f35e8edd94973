"""PPO with an LSTM in one piece, as single-file implementations write it: CartPole without its velocities."""

import argparse
import hashlib
import random
import time

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim
from torch.distributions.categorical import Categorical
from torch.utils.tensorboard import SummaryWriter


def parse_args():
    parser = argparse.ArgumentParser()
    integers = {"seed": 1, "total-timesteps": 1024, "num-envs": 4, "num-steps": 64, "num-minibatches": 2, "update-epochs": 2}
    numbers = {"learning-rate": 2.5e-4, "gamma": 0.99, "gae-lambda": 0.95, "clip-coef": 0.2}
    for name, default in {**integers, **numbers, "ent-coef": 0.01, "vf-coef": 0.5, "max-grad-norm": 0.5}.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    args = parser.parse_args()
    args.batch_size = args.num_envs * args.num_steps
    return args


class Positions(gym.ObservationWrapper):
    def __init__(self, env):
        super().__init__(env)
        self.observation_space = gym.spaces.Box(-5, 5, (2,), np.float32)

    def observation(self, observation):
        return observation[::2]


class Agent(nn.Module):
    def __init__(self, hidden=24):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(2, hidden), nn.Tanh())
        self.lstm = nn.LSTM(hidden, hidden)
        self.actor = nn.Linear(hidden, 2)
        self.critic = nn.Linear(hidden, 1)

    def get_states(self, x, lstm_state, done):
        batch_size = lstm_state[0].shape[1]
        hidden = self.network(x).reshape(-1, batch_size, self.lstm.input_size)
        new_hidden = []
        for h, d in zip(hidden, done.reshape(-1, batch_size), strict=True):
            alive = (1.0 - d).view(1, -1, 1)
            h, lstm_state = self.lstm(h.unsqueeze(0), (alive * lstm_state[0], alive * lstm_state[1]))
            new_hidden.append(h)
        return torch.cat(new_hidden).flatten(0, 1), lstm_state

    def get_value(self, x, lstm_state, done):
        return self.critic(self.get_states(x, lstm_state, done)[0])

    def get_action_and_value(self, x, lstm_state, done, action=None):
        hidden, lstm_state = self.get_states(x, lstm_state, done)
        probs = Categorical(logits=self.actor(hidden))
        action = probs.sample() if action is None else action
        return action, probs.log_prob(action), probs.entropy(), self.critic(hidden), lstm_state


if __name__ == "__main__":
    args = parse_args()
    writer = SummaryWriter(f"runs/{int(time.time())}")
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    envs = gym.vector.SyncVectorEnv([lambda: Positions(gym.make("CartPole-v1")) for _ in range(args.num_envs)])
    agent = Agent()
    optimizer = optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)

    obs = torch.zeros((args.num_steps, args.num_envs, 2))
    actions, logprobs, rewards, dones, values = (torch.zeros((args.num_steps, args.num_envs)) for _ in range(5))
    global_step = 0
    next_obs = torch.Tensor(envs.reset(seed=args.seed)[0])
    next_done = torch.zeros(args.num_envs)
    next_lstm_state = (torch.zeros(1, args.num_envs, 24), torch.zeros(1, args.num_envs, 24))
    returned = 0.0

    for update in range(1, args.total_timesteps // args.batch_size + 1):
        initial_lstm_state = (next_lstm_state[0].clone(), next_lstm_state[1].clone())
        for step in range(args.num_steps):
            global_step += args.num_envs
            obs[step], dones[step] = next_obs, next_done
            with torch.no_grad():
                action, logprob, _, value, next_lstm_state = agent.get_action_and_value(next_obs, next_lstm_state, next_done)
            values[step], actions[step], logprobs[step] = value.flatten(), action, logprob
            next_obs, reward, terminations, truncations, infos = envs.step(action.numpy())
            rewards[step] = torch.tensor(reward)
            returned += float(reward.sum())
            next_obs, next_done = torch.Tensor(next_obs), torch.Tensor(terminations | truncations)

        with torch.no_grad():
            next_value = agent.get_value(next_obs, next_lstm_state, next_done).reshape(1, -1)
            advantages = torch.zeros_like(rewards)
            lastgaelam = 0
            for t in reversed(range(args.num_steps)):
                nextnonterminal = 1.0 - (next_done if t == args.num_steps - 1 else dones[t + 1])
                nextvalues = next_value if t == args.num_steps - 1 else values[t + 1]
                delta = rewards[t] + args.gamma * nextvalues * nextnonterminal - values[t]
                advantages[t] = lastgaelam = delta + args.gamma * args.gae_lambda * nextnonterminal * lastgaelam
            returns = advantages + values

        b_obs, b_dones, b_actions = obs.flatten(0, 1), dones.flatten(), actions.flatten()
        b_logprobs, b_values = logprobs.flatten(), values.flatten()
        b_advantages, b_returns = advantages.flatten(), returns.flatten()

        envsperbatch = args.num_envs // args.num_minibatches
        envinds = np.arange(args.num_envs)
        flatinds = np.arange(args.batch_size).reshape(args.num_steps, args.num_envs)
        for epoch in range(args.update_epochs):
            np.random.shuffle(envinds)
            for start in range(0, args.num_envs, envsperbatch):
                mbenvinds = envinds[start : start + envsperbatch]
                mb_inds = flatinds[:, mbenvinds].ravel()
                _, newlogprob, entropy, newvalue, _ = agent.get_action_and_value(
                    b_obs[mb_inds],
                    (initial_lstm_state[0][:, mbenvinds], initial_lstm_state[1][:, mbenvinds]),
                    b_dones[mb_inds],
                    b_actions.long()[mb_inds],
                )
                logratio = newlogprob - b_logprobs[mb_inds]
                ratio = logratio.exp()
                mb_advantages = b_advantages[mb_inds]
                mb_advantages = (mb_advantages - mb_advantages.mean()) / (mb_advantages.std() + 1e-8)
                clipped = torch.clamp(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
                pg_loss = torch.max(-mb_advantages * ratio, -mb_advantages * clipped).mean()
                v_loss = 0.5 * ((newvalue.view(-1) - b_returns[mb_inds]) ** 2).mean()
                entropy_loss = entropy.mean()
                loss = pg_loss - args.ent_coef * entropy_loss + v_loss * args.vf_coef
                optimizer.zero_grad()
                loss.backward()
                norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()
                print("norm", norm.item(), "kl", ((ratio - 1) - logratio).mean().item())
        writer.add_scalar("losses/value_loss", v_loss.item(), global_step)
        writer.add_scalar("charts/reward", returned, global_step)

    envs.close()
    writer.close()
    print(hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in agent.parameters())).hexdigest())
