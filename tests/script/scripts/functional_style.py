"""Stateless functions: dictionaries of columns, and gradients by `torch.autograd.grad`."""

import gymnasium as gym, torch, torch.nn.functional as F


def init(sizes):
    return [
        (torch.nn.init.orthogonal_(torch.empty(o, i)).requires_grad_(), torch.zeros(o, requires_grad=True))
        for i, o in zip(sizes, sizes[1:])
    ]


def apply(params, x):
    for w, b in params[:-1]:
        x = torch.tanh(F.linear(x, w, b))
    return F.linear(x, *params[-1])


def policy(params, x):
    return F.log_softmax(apply(params["pi"], x), -1)


def value(params, x):
    return apply(params["v"], x).squeeze(-1)


def collect(params, envs, obs, length):
    out = {"x": [], "a": [], "lp": [], "r": [], "end": [], "v": []}
    for _ in range(length):
        with torch.no_grad():
            lp = policy(params, obs)
            a = torch.distributions.Categorical(logits=lp).sample()
            v = value(params, obs)
        nxt, rew, term, trunc, info = envs.step(a.numpy())
        for key, item in zip(
            out, (obs, a, lp[torch.arange(len(a)), a], torch.as_tensor(rew).float(), torch.as_tensor(term | trunc).float(), v)
        ):
            out[key].append(item)
        obs = torch.as_tensor(nxt)
    return obs, {key: torch.stack(items) for key, items in out.items()}


def gae(data, bootstrap, discount, smoothing):
    def step(carry, row):
        acc, after = carry
        r, end, v = row
        acc = r + discount * (1 - end) * after - v + discount * smoothing * (1 - end) * acc
        return acc, v

    carry, result = (torch.zeros_like(bootstrap), bootstrap), []
    for row in reversed(list(zip(data["r"], data["end"], data["v"]))):
        carry = step(carry, row)
        result.append(carry[0])
    return torch.stack(result[::-1])


def objective(params, batch, eps):
    lp = policy(params, batch["x"])
    chosen = lp.gather(-1, batch["a"].unsqueeze(-1)).squeeze(-1)
    ratio = torch.exp(chosen - batch["lp"])
    gain = torch.minimum(ratio * batch["adv"], torch.clip(ratio, 1 - eps, 1 + eps) * batch["adv"]).mean()
    error = 0.5 * F.mse_loss(value(params, batch["x"]), batch["target"])
    ent = -(lp.exp() * lp).sum(-1).mean()
    return -gain + 0.5 * error - 0.01 * ent


def train():
    torch.manual_seed(2)
    envs = gym.vector.SyncVectorEnv([lambda: gym.make("CartPole-v1") for _ in range(4)], autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
    params = {"pi": init([4, 32, 2]), "v": init([4, 32, 1])}
    leaves = [t for net in params.values() for pair in net for t in pair]
    opt = torch.optim.Adam(leaves, lr=2e-3)
    obs = torch.as_tensor(envs.reset(seed=0)[0])
    for it in range(2):
        obs, data = collect(params, envs, obs, 64)
        with torch.no_grad():
            adv = gae(data, value(params, obs), 0.98, 0.9)
        data = {**data, "adv": adv, "target": adv + data["v"]}
        data["adv"] = (data["adv"] - data["adv"].mean()) / (data["adv"].std() + 1e-8)
        flat = {key: item.reshape(-1, *item.shape[2:]) for key, item in data.items()}
        for _ in range(3):
            for idx in torch.randperm(256).split(64):
                loss = objective(params, {key: item[idx] for key, item in flat.items()}, 0.2)
                grads = torch.autograd.grad(loss, leaves)
                for leaf, g in zip(leaves, grads):
                    leaf.grad = g
                opt.step()


train()
