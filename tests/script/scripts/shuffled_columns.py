"""Probabilities chosen from a softmax, NumPy buffers, networks with an optimizer each, and columns that are shuffled before each pass."""

import numpy as np, gymnasium as gym, torch
from torch import nn
from torch.distributions import Categorical

torch.manual_seed(5)
np.random.seed(5)
N, GAMMA, LAMBDA, ENT_COEF = 256, 0.97, 0.9, 0.01
env = gym.make("CartPole-v1")
actor = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
critic = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
actor_opt, critic_opt = torch.optim.Adam(actor.parameters(), 1e-3), torch.optim.Adam(critic.parameters(), 1e-3)
s_buf, next_buf, a_buf = np.zeros((N, 4), np.float32), np.zeros((N, 4), np.float32), np.zeros((N, 1), np.int64)
r_buf, p_buf = np.zeros((N, 1), np.float32), np.zeros((N, 1), np.float32)
done_buf, dead_buf = np.zeros((N, 1), bool), np.zeros((N, 1), bool)
seen, _ = env.reset(seed=5)
for _ in range(3):
    for i in range(N):
        with torch.no_grad():
            pi = actor(torch.from_numpy(seen)).softmax(0)
            choice = Categorical(pi).sample().item()
        after, reward, dead, late, _ = env.step(choice)
        s_buf[i], next_buf[i], a_buf[i], r_buf[i], p_buf[i] = seen, after, choice, reward, pi[choice].item()
        done_buf[i], dead_buf[i] = dead or late, dead
        seen = env.reset()[0] if dead or late else after
    s, a, r, old = (torch.from_numpy(one) for one in (s_buf, a_buf, r_buf, p_buf))
    with torch.no_grad():
        now, ahead = critic(s), critic(torch.from_numpy(next_buf))
        deltas = (r + GAMMA * ahead * ~torch.from_numpy(dead_buf) - now).flatten().numpy()
        trace = [0.0]
        for delta, done in zip(deltas[::-1], done_buf[::-1, 0]):
            trace.append(delta + GAMMA * LAMBDA * trace[-1] * (not done))
        gain = torch.tensor(trace[:0:-1]).unsqueeze(1).float()
        target = gain + now
    for _ in range(2):
        perm = torch.from_numpy(np.random.permutation(N))
        s, a, target, gain, old = (one[perm].clone() for one in (s, a, target, gain, old))
        for k in range(0, N, 64):
            rows = slice(k, k + 64)
            probs = actor(s[rows]).softmax(1)
            bonus = Categorical(probs).entropy().mean()
            ratio = (probs.gather(1, a[rows]).log() - old[rows].log()).exp()
            surrogate = torch.min(ratio * gain[rows], ratio.clamp(0.8, 1.2) * gain[rows])
            actor_opt.zero_grad()
            (-surrogate - ENT_COEF * bonus).mean().backward()
            actor_opt.step()
            critic_opt.zero_grad()
            (critic(s[rows]) - target[rows]).pow(2).mean().backward()
            critic_opt.step()
