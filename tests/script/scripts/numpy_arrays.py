"""A rollout in NumPy arrays, minibatches by `torch.from_numpy`, and one network for policy and critic."""

import gymnasium as gym, numpy as np, torch

rng = np.random.default_rng(4)
torch.manual_seed(4)
world = gym.make("CartPole-v1")
brain = torch.nn.Sequential(torch.nn.Linear(4, 48), torch.nn.Tanh(), torch.nn.Linear(48, 3))
adam = torch.optim.Adam(brain.parameters(), lr=1e-3)
ob, _ = world.reset(seed=4)
score, scores = 0.0, []
for it in range(2):
    N = 256
    X, C, B, W, Y, Z = (
        np.zeros((N, 4), np.float32),
        np.zeros(N, np.int64),
        np.zeros(N, np.float32),
        np.zeros(N, np.float32),
        np.zeros(N, np.float32),
        np.zeros(N + 1, np.float32),
    )
    for i in range(N):
        with torch.no_grad():
            out = brain(torch.from_numpy(ob)).numpy()
        p = np.exp(out[:2] - out[:2].max())
        p /= p.sum()
        c = rng.choice(2, p=p.astype(float) / p.astype(float).sum())
        X[i], C[i], B[i], Z[i] = ob, c, np.log(p[c]), out[2]
        ob, rew, fin, cut, _ = world.step(int(c))
        W[i], Y[i] = rew, fin or cut
        score += rew
        if fin or cut:
            scores.append(score)
            score = 0.0
            ob, _ = world.reset()
    with torch.no_grad():
        Z[N] = brain(torch.from_numpy(ob))[2].item()
    gain, acc = np.zeros(N, np.float32), 0.0
    for i in range(N - 1, -1, -1):
        delta = W[i] + 0.99 * Z[i + 1] * (1 - Y[i]) - Z[i]
        acc = delta + 0.99 * 0.97 * (1 - Y[i]) * acc
        gain[i] = acc
    goal = gain + Z[:N]
    gain = (gain - gain.mean()) / (gain.std() + 1e-8)
    for k in range(5):
        order = rng.permutation(N)
        for part in np.split(order, 4):
            out = brain(torch.from_numpy(X[part]))
            lp = torch.log_softmax(out[:, :2], 1)
            own = lp[np.arange(len(part)), C[part]]
            q = torch.exp(own - torch.from_numpy(B[part]))
            g = torch.from_numpy(gain[part])
            loss = (
                -torch.min(q * g, torch.clamp(q, 0.9, 1.1) * g).mean()
                + torch.nn.functional.mse_loss(out[:, 2], torch.from_numpy(goal[part])) * 0.25
                - 0.005 * torch.distributions.Categorical(logits=out[:, :2]).entropy().mean()
            )
            adam.zero_grad()
            loss.backward()
            adam.step()
    print(f"[{it}] mean score of last 20 episodes: {np.mean(scores[-20:]):.2f}")
