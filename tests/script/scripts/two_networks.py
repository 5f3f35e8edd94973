"""A Gaussian whose density the script computes, a list of transitions, and an optimizer for each network."""

import math, gymnasium as gym, torch
from torch import nn

torch.manual_seed(7)
env = gym.make("Pendulum-v1")
mu, crit, ls = (
    nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 1)),
    nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 1)),
    nn.Parameter(torch.zeros(1)),
)
oa, oc = torch.optim.Adam([*mu.parameters(), ls], 3e-4), torch.optim.Adam(crit.parameters(), 1e-3)


def density(m, s, x):
    return (-((x - m) ** 2) / (2 * s.exp() ** 2) - s - 0.5 * math.log(2 * math.pi)).sum(-1)


ob, _ = env.reset(seed=7)
ep = 0.0
for cycle in range(2):
    traj = []
    while len(traj) < 256:
        x = torch.as_tensor(ob)
        with torch.no_grad():
            m = mu(x)
            act = m + ls.exp() * torch.randn(1)
            d = density(m, ls, act)
            val = crit(x).squeeze()
        nob, rew, te, tr, _ = env.step(act.clamp(-2, 2).numpy())
        ep += rew
        with torch.no_grad():
            foll = crit(torch.as_tensor(nob)).squeeze()
        traj.append(dict(s=x, u=act, logp=d, v=val, r=float(rew), end=float(te or tr), nv=foll))
        ob = nob
        if te or tr:
            print(f"Episode return: {ep:.1f}")
            ep = 0.0
            ob, _ = env.reset()
    get = lambda k: (
        torch.stack([step[k] for step in traj]) if isinstance(traj[0][k], torch.Tensor) else torch.tensor([step[k] for step in traj])
    )
    s, u, logp, v, r, end, nxt = map(get, ("s", "u", "logp", "v", "r", "end", "nv"))
    td = r + 0.95 * nxt - v
    adv, acc = torch.empty_like(td), 0.0
    for t in range(255, -1, -1):
        acc = td[t] + 0.95 * 0.9 * (1 - end[t]) * acc
        adv[t] = acc
    target = v + adv
    adv = (adv - adv.mean()) / adv.std()
    for _ in range(4):
        perm = torch.randperm(256)
        for j in range(4):
            b = perm[64 * j : 64 * (j + 1)]
            rho = torch.exp(density(mu(s[b]), ls, u[b]) - logp[b])
            la = -torch.min(rho * adv[b], rho.clamp(0.8, 1.2) * adv[b]).mean() - 0.001 * (ls + 0.5 * math.log(2 * math.pi * math.e)).sum()
            oa.zero_grad()
            la.backward()
            oa.step()
            lc = ((crit(s[b]).squeeze(-1) - target[b]) ** 2).mean()
            oc.zero_grad()
            lc.backward()
            oc.step()
