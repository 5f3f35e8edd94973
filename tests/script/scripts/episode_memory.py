"""A memory of several episodes, ended by a loop bound; returns to go; no value at collection."""

import gymnasium as gym, torch
from torch import nn
from torch.distributions import Categorical


class Memory:
    def __init__(self):
        self.states, self.acts, self.lps, self.rews, self.terms = [], [], [], [], []

    def clear(self):
        self.__init__()


class AC(nn.Module):
    def __init__(self):
        super().__init__()
        self.pi = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2), nn.Softmax(dim=-1))
        self.v = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))

    def act(self, s, mem):
        d = Categorical(self.pi(s))
        a = d.sample()
        mem.states.append(s)
        mem.acts.append(a)
        mem.lps.append(d.log_prob(a))
        return a.item()

    def evaluate(self, s, a):
        d = Categorical(self.pi(s))
        return d.log_prob(a), self.v(s).squeeze(), d.entropy()


torch.manual_seed(5)
env = gym.make("CartPole-v1").unwrapped
new, old = AC(), AC()
old.load_state_dict(new.state_dict())
opt = torch.optim.Adam(new.parameters(), lr=2e-3)
mem, count, total = Memory(), 0, 0
for ep in range(40):
    s, _ = env.reset(seed=ep)
    total = 0
    for t in range(100):
        count += 1
        with torch.no_grad():
            a = old.act(torch.from_numpy(s), mem)
        s, r, done, _, _ = env.step(a)
        mem.rews.append(r)
        mem.terms.append(done or t == 99)
        total += r
        if done:
            break
    print("episode", ep, "reward", total)
    if count >= 300:
        count = 0
        R, ret = [], 0
        for r, e in zip(reversed(mem.rews), reversed(mem.terms)):
            ret = r + 0.97 * (0 if e else ret)
            R.insert(0, ret)
        R = torch.tensor(R, dtype=torch.float32)
        R = (R - R.mean()) / (R.std() + 1e-5)
        S, A, LP = (torch.stack(x).detach() for x in (mem.states, mem.acts, mem.lps))
        for _ in range(4):
            lp, v, ent = new.evaluate(S, A)
            ratios = torch.exp(lp - LP)
            adv = R - v.detach()
            loss = -torch.min(ratios * adv, torch.clamp(ratios, 0.8, 1.2) * adv) + 0.5 * nn.MSELoss()(v, R) - 0.01 * ent
            opt.zero_grad()
            loss.mean().backward()
            opt.step()
        old.load_state_dict(new.state_dict())
        mem.clear()
