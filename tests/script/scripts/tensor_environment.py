"""Environments of tensors that begin their next episodes themselves and return a dictionary; a rollout is a tuple of flat columns."""

import torch
from torch import nn
from torch.distributions import Categorical

S, B = 48, 8


class Corridors:
    def reset(self):
        self.place, self.age = torch.randint(2, 6, (B,)), torch.zeros(B)
        return self.seen()

    def seen(self):
        return torch.cat([nn.functional.one_hot(self.place, 9), self.age[:, None] / 40], 1)

    def begin(self, over):
        self.place[over], self.age[over] = torch.randint(2, 6, (int(over.sum()),)), 0.0

    def step(self, actions):
        self.place = self.place + 2 * actions - 1
        self.age = self.age + 1
        over = (self.place == 0) | (self.place == 8) | (self.age >= 40)
        reward = 5.0 * (self.place == 8) - 0.1
        self.begin(over) if not over.all() else self.reset()
        return {"seen": self.seen(), "reward": reward, "over": over}


def collect(e, x):
    rows = []
    for _ in range(S):
        with torch.no_grad():
            d, v = Categorical(logits=w(x)), c(x)[:, 0]
        a = d.sample()
        out = e.step(a)
        rows.append((x, a, d.log_prob(a), v, out["reward"], out["over"]))
        x = out["seen"]
    x_, a, l, v, r, f = map(torch.stack, zip(*rows))
    with torch.no_grad():
        h = c(x)[:, 0]
    u, g = torch.zeros(B), torch.zeros(S, B)
    for t in reversed(range(S)):
        u = r[t] + 0.97 * h * ~f[t] - v[t] + 0.97 * 0.9 * u * ~f[t]
        g[t], h = u, v[t]
    return x, tuple(one.flatten(0, 1) for one in (x_, a, l, g + v, v))


def losses(d, v, a, l, g, t):
    g = (g - g.mean()) / (g.std() + 1e-8)
    ratio = (d.log_prob(a) - l).exp()
    gain = torch.min(ratio * g, ratio.clamp(0.8, 1.2) * g)
    return -gain.mean(), (v - t).pow(2).mean()


torch.manual_seed(7)
w = nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 2))
c = nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 1))
o = torch.optim.Adam([*w.parameters(), *c.parameters()], 5e-3)
e = Corridors()
x = e.reset()
for k in range(12):
    x, columns = collect(e, x)
    for _ in range(4):
        for rows in torch.randperm(S * B).split(96):
            z, a, l, t, v = (one[rows] for one in columns)
            d, g = Categorical(logits=w(z)), t - v
            policy, value = losses(d, c(z)[:, 0], a, l, g, t)
            loss = policy + 0.5 * value - 0.01 * d.entropy().mean()
            o.zero_grad()
            loss.backward()
            o.step()
