"""Environments in worker processes, one-letter names, literals for all settings, and returns that only the script knows."""

import multiprocessing as mp
import gymnasium as gym, numpy as np, torch
from torch import nn


def w(c, s):
    e = gym.make("CartPole-v1")
    o, _ = e.reset(seed=s)
    g = 0.0
    c.send(o)
    while True:
        a = c.recv()
        if a is None:
            break
        o, r, d, t, _ = e.step(a)
        g += r
        z = None
        if d or t:
            z, g = g, 0.0
            o, _ = e.reset()
        c.send((o, r * 0.01, d or t, z))


def main():
    torch.manual_seed(1)
    np.random.seed(1)
    n, k = 8, 64
    p = [mp.Pipe() for _ in range(n)]
    q = [mp.Process(target=w, args=(b, i), daemon=True) for i, (_, b) in enumerate(p)]
    for x in q:
        x.start()
    m = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    f, h = nn.Linear(64, 2), nn.Linear(64, 1)
    y = torch.optim.Adam([*m.parameters(), *f.parameters(), *h.parameters()], lr=1e-3)
    s = np.stack([a.recv() for a, _ in p])
    L = []
    for u in range(2):
        S, A, P, V, R, D = [], [], [], [], [], []
        for _ in range(k):
            x = torch.as_tensor(s, dtype=torch.float32)
            with torch.no_grad():
                b = m(x)
                l = f(b).log_softmax(-1)
                v = h(b)[:, 0]
            a = torch.multinomial(l.exp(), 1)[:, 0]
            for (c, _), i in zip(p, a.tolist()):
                c.send(i)
            z = [c.recv() for c, _ in p]
            S.append(x)
            A.append(a)
            P.append(l.gather(1, a[:, None])[:, 0])
            V.append(v)
            R.append(torch.tensor([i[1] for i in z]))
            D.append(torch.tensor([float(i[2]) for i in z]))
            s = np.stack([i[0] for i in z])
            L += [i[3] for i in z if i[3] is not None]
        with torch.no_grad():
            v = h(m(torch.as_tensor(s, dtype=torch.float32)))[:, 0]
        G, g = [None] * k, torch.zeros(n)
        for t in reversed(range(k)):
            d = R[t] + 0.99 * v * (1 - D[t]) - V[t]
            g = d + 0.99 * 0.95 * (1 - D[t]) * g
            G[t], v = g, V[t]
        S, A, P, V, G = (torch.cat(i) for i in (S, A, P, V, G))
        T = G + V
        for _ in range(4):
            j = torch.randperm(n * k)
            for i in range(0, n * k, 128):
                b = j[i : i + 128]
                c = m(S[b])
                l = f(c).log_softmax(-1)
                v = h(c)[:, 0]
                e = (l.gather(1, A[b][:, None])[:, 0] - P[b]).exp()
                g = G[b]
                g = (g - g.mean()) / (g.std() + 1e-8)
                o = -torch.min(e * g, e.clamp(0.8, 1.2) * g).mean() + 0.5 * ((v - T[b]) ** 2).mean() - 0.01 * -(l.exp() * l).sum(1).mean()
                y.zero_grad()
                o.backward()
                nn.utils.clip_grad_norm_([*m.parameters(), *f.parameters(), *h.parameters()], 0.5)
                y.step()
        print(u, "return", round(float(np.mean(L[-50:] or [0])), 1), flush=True)
    for c, _ in p:
        c.send(None)


if __name__ == "__main__":
    main()
