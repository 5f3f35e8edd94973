"""PPO in one file with a mistake in its update, which --bug names: none, min, sign, broadcast, bonus, sample, replace, slice."""

import argparse

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
from torch.distributions.categorical import Categorical

parser = argparse.ArgumentParser()
parser.add_argument("--bug", default="none")
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--total-timesteps", type=int, default=512)
parser.add_argument("--learning-rate", type=float, default=1e-2)
parser.add_argument("--num-envs", type=int, default=4)
parser.add_argument("--num-steps", type=int, default=64)
parser.add_argument("--gamma", type=float, default=0.99)
parser.add_argument("--gae-lambda", type=float, default=0.95)
parser.add_argument("--num-minibatches", type=int, default=4)
parser.add_argument("--update-epochs", type=int, default=4)
parser.add_argument("--norm-adv", type=bool, default=True)
parser.add_argument("--clip-coef", type=float, default=0.2)
parser.add_argument("--ent-coef", type=float, default=0.02)
parser.add_argument("--vf-coef", type=float, default=0.5)
parser.add_argument("--max-grad-norm", type=float, default=0.5)


def network(outputs):
    return nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, outputs))


def main():
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    np.random.seed(args.seed)
    batch_size = args.num_envs * args.num_steps
    minibatch_size = batch_size // args.num_minibatches
    envs = gym.make_vec("CartPole-v1", num_envs=args.num_envs, vectorization_mode="sync")
    actor, critic = network(2), network(1)
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=args.learning_rate)
    shape = (args.num_steps, args.num_envs)
    obs, actions = torch.zeros((*shape, 4)), torch.zeros(shape)
    logprobs, rewards, dones, values = (torch.zeros(shape) for _ in range(4))
    next_obs = torch.tensor(envs.reset(seed=args.seed)[0])
    next_done = torch.zeros(args.num_envs)
    for _ in range(args.total_timesteps // batch_size):
        for step in range(args.num_steps):
            obs[step], dones[step] = next_obs, next_done
            with torch.no_grad():
                probs = Categorical(logits=actor(next_obs))
                action = probs.sample()
                actions[step], logprobs[step] = action, probs.log_prob(action)
                values[step] = critic(next_obs).flatten()
            observed, reward, terminated, truncated, _ = envs.step(action.numpy())
            next_obs, rewards[step] = torch.tensor(observed), torch.tensor(reward)
            next_done = torch.tensor(np.logical_or(terminated, truncated)).float()
        with torch.no_grad():
            next_value = critic(next_obs).reshape(1, -1)
            advantages = torch.zeros(shape)
            carried = 0
            for t in reversed(range(args.num_steps)):
                last = t == args.num_steps - 1
                going = 1.0 - (next_done if last else dones[t + 1])
                delta = rewards[t] + args.gamma * (next_value if last else values[t + 1]) * going - values[t]
                advantages[t] = carried = delta + args.gamma * args.gae_lambda * going * carried
            returns = advantages + values
        b_obs, b_actions = obs.reshape(-1, 4), actions.reshape(-1)
        b_logprobs, b_advantages = logprobs.reshape(-1), advantages.reshape(-1)
        b_returns = returns.reshape(-1)
        b_inds = np.arange(batch_size)
        for epoch in range(args.update_epochs):
            np.random.shuffle(b_inds)
            for start in range(0, batch_size, minibatch_size):
                mb_inds = b_inds[start : start + minibatch_size]
                if args.bug == "replace":
                    mb_inds = np.random.randint(0, batch_size, minibatch_size)
                if args.bug == "slice":
                    mb_inds = b_inds[:minibatch_size]
                probs = Categorical(logits=actor(b_obs[mb_inds]))
                newlogprob, entropy = probs.log_prob(b_actions[mb_inds]), probs.entropy()
                newvalue = critic(b_obs[mb_inds])
                ratio = (newlogprob - b_logprobs[mb_inds]).exp()
                mb_advantages = b_advantages[mb_inds]
                if args.norm_adv:
                    mb_advantages = (mb_advantages - mb_advantages.mean()) / (mb_advantages.std() + 1e-8)
                pg_loss1 = -mb_advantages * ratio
                pg_loss2 = -mb_advantages * torch.clamp(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
                pg_loss = torch.max(pg_loss1, pg_loss2).mean()
                if args.bug == "min":
                    pg_loss = torch.min(pg_loss1, pg_loss2).mean()
                if args.bug == "sign":
                    pg_loss = -pg_loss
                if args.bug != "broadcast":
                    newvalue = newvalue.view(-1)
                v_loss = 0.5 * ((newvalue - b_returns[mb_inds]) ** 2).mean()
                entropy_loss = -newlogprob.mean() if args.bug == "sample" else entropy.mean()
                bonus = args.ent_coef * entropy_loss
                loss = pg_loss + v_loss * args.vf_coef + (bonus if args.bug == "bonus" else -bonus)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_([*actor.parameters(), *critic.parameters()], args.max_grad_norm)
                optimizer.step()


if __name__ == "__main__":
    main()
