"""Mistakes in collecting rollouts and in their targets, in a script."""

from __future__ import annotations

from equation_bugs import ACT, ADV, GRAD, ISSUES, LOGP, NORM, PG, RET, TRANS, VAL, VF, force, script

ALIVE_LAST, ALIVE = "nextnonterminal = 1.0 - next_done", "nextnonterminal = 1.0 - dones[t + 1]"
RETURNS = "        returns = advantages + values\n"
DONE = "        next_done = torch.tensor(np.logical_or(terminations, truncations), dtype=torch.float32)\n"
STATE = "        next_obs = torch.tensor(state, dtype=torch.float32)\n"
REWARD = "        rewards[step] = torch.tensor(reward, dtype=torch.float32)\n"
NORMALISE = "mb_advantages = (mb_advantages - mb_advantages.mean()) / (mb_advantages.std() + 1e-8)"
SAMPLE = "action = probs.sample()"
MONTE_CARLO = """        returns, following = torch.zeros_like(rewards), {last}
        for t in reversed(range(args.num_steps)):
            alive = 1.0 - (next_done if t == args.num_steps - 1 else dones[t + 1])
            returns[t] = following = rewards[t] + args.gamma * alive * following
"""
OBS_STATISTICS = (
    (
        "        self.critic = mlp(obs_size, 1)\n",
        "        self.critic = mlp(obs_size, 1)\n        self.mean, self.var, self.count = torch.zeros(obs_size), torch.ones(obs_size), 1.0\n",
    ),
    (
        "        logits = 3 * self.actor(x)\n",
        "        x = (x - self.mean) / self.var.sqrt()\n        logits = 3 * self.actor(x)\n",
    ),
    ("        return self.critic(x)\n\n", "        return self.critic((x - self.mean) / self.var.sqrt())\n\n"),
    (
        STATE,
        STATE
        + """        agent.count += args.num_envs
        agent.mean += args.num_envs / agent.count * (next_obs.mean(0) - agent.mean)
        agent.var += args.num_envs / agent.count * (((next_obs - agent.mean) ** 2).mean(0) - agent.var)
""",
    ),
)
SQUASH = (
    (
        "            action = probs.sample()\n        return action, probs.log_prob(action).sum(1), ",
        """            raw = probs.sample()
            return torch.tanh(raw), probs.log_prob(raw).sum(1), probs.entropy().sum(1), self.critic(x)
        raw = torch.atanh(action.clamp(-0.999999, 0.999999))
        logprob = (probs.log_prob(raw) - torch.log(1 - action**2 + 1e-6)).sum(1)
        return action, logprob, """,
    ),
)

SCRIPT_TARGETS = (
    script(
        "forward", (ADV,), "revers|forward|order of time", ("reversed(range(args.num_steps))", "range(args.num_steps)")
    ),
    script(
        "ends_ignored",
        (ADV,),
        "ignor|over the ends",
        (ALIVE_LAST, "nextnonterminal = torch.ones(args.num_envs)"),
        (ALIVE, "nextnonterminal = torch.ones(args.num_envs)"),
    ),
    script("ends_late", (ADV,), "late", (ALIVE, "nextnonterminal = 1.0 - dones[t]")),
    script("ends_neighbour", (ADV,), "other environments", (DONE, DONE.replace("\n", ".roll(1)\n"))),
    script("ends_reversed", (ADV,), "other environments", (DONE, DONE.replace("\n", ".flip(0)\n"))),
    script(
        "ends_shuffled",
        (ADV,),
        "other steps|other environments",
        (DONE, DONE.replace("\n", "[torch.randperm(args.num_envs)]\n")),
    ),
    script(
        "ends_of_rollout_before",
        (ADV,),
        "other steps|late",
        (
            "    with torch.no_grad():\n        next_value",
            "    held = dones.clone() if iteration == 1 else held\n    dones, held = held, dones.clone()\n"
            "    with torch.no_grad():\n        next_value",
        ),
    ),
    script("abs", (ADV,), "positive", (RETURNS, RETURNS + "        advantages = advantages.abs()\n"), follows=(RET,)),
    script("abs_both", (ADV,), "positive", (RETURNS, "        advantages = advantages.abs()\n" + RETURNS)),
    script(
        "abs_minibatch",
        (NORM, PG, GRAD),
        "positive",
        (NORMALISE, NORMALISE + "\n                mb_advantages = mb_advantages.abs()"),
    ),
    script(
        "abs_before_norm",
        (NORM, PG, GRAD),
        "positive",
        (NORMALISE, "mb_advantages = mb_advantages.abs()\n                " + NORMALISE),
    ),
    script("returns_noise", (RET,), "unrelated", (RETURNS, "        returns = torch.randn_like(advantages)\n")),
    script(
        "returns_noise_minibatch",
        (RET, VF),
        "unrelated",
        ("b_returns = returns.reshape(-1)", "b_returns = 3 * torch.rand(batch_size)"),
    ),
    script(
        "dones_after_step",
        (ADV, TRANS),
        "early",
        ("        dones[step] = next_done\n", ""),
        (STATE, STATE + "        dones[step] = torch.tensor(np.logical_or(terminations, truncations))\n"),
        source=ISSUES.format("DLR-RM/stable-baselines3", 105),
    ),
    script(
        "no_bootstrap",
        (ADV,),
        "no_last|without the value after",
        ("nextvalues = next_value[0]", "nextvalues = torch.zeros(args.num_envs)"),
    ),
    script(
        "bootstrap_old_value",
        (ADV,),
        "old value|own value|same state|previous|state before",
        ("nextvalues = next_value[0]", "nextvalues = values[t]"),
        source=ISSUES.format("DLR-RM/stable-baselines3", 183),
    ),
    script(
        "gamma",
        (ADV,),
        r"γ|gamma",
        ("args.gamma * nextvalues", "0.9 * nextvalues"),
        ("args.gamma * args.gae_lambda", "0.9 * args.gae_lambda"),
    ),
    script("lambda", (ADV,), r"λ|lambda", ("args.gamma * args.gae_lambda", "args.gamma * 0.6")),
    script(
        "reward_shift",
        (ADV,),
        "late|step before",
        ("delta = rewards[t] +", "delta = (rewards[t - 1] if t else 0.0 * rewards[0]) +"),
    ),
    script(
        "reward_clip",
        (ADV,),
        "reward.*(clip|cut)|clip.*reward",
        ("delta = rewards[t] +", "delta = rewards[t].clamp(-1, 1) +"),
    ),
    script(
        "reward_sign", (ADV,), "reward.*sign|sign.*reward", ("delta = rewards[t] +", "delta = torch.sign(rewards[t]) +")
    ),
    script(
        "sign", (ADV,), "sign|negat|minus", (RETURNS, RETURNS + "        advantages = -advantages\n"), follows=(RET,)
    ),
    script("sign_both", (ADV,), "sign|negat|minus", (RETURNS, "        advantages = -advantages\n" + RETURNS)),
    script(
        "stale",
        (ADV, NORM, PG, GRAD),
        "stale|previous|last rollout|rows|permut",
        (
            "b_advantages = advantages.reshape(-1)",
            "b_advantages = (stale if iteration > 1 else advantages).reshape(-1)\n    stale = advantages",
        ),
    ),
    script(
        "axes",
        (ADV, NORM, PG, GRAD),
        "axes|swap|environment|rows|permut",
        ("b_advantages = advantages.reshape(-1)", "b_advantages = advantages.T.reshape(-1)"),
    ),
    script(
        "axes_gae",
        (ADV,),
        "axes|swap|environment",
        (RETURNS, "        advantages = advantages.T.reshape(advantages.shape)\n" + RETURNS),
    ),
    script(
        "last_row_zero",
        (ADV,),
        "last|bootstrap",
        (RETURNS, "        advantages[-1] = 0\n" + RETURNS),
        source="https://github.com/PufferAI/PufferLib/pull/445",
        listed=False,
    ),
    script(
        "returns_normalized",
        (RET,),
        "normali",
        (RETURNS, "        returns = (advantages - advantages.mean()) / (advantages.std() + 1e-8) + values\n"),
    ),
    script("returns_mc", (RET,), "monte|λ = 1|discounted", (RETURNS, MONTE_CARLO.format(last="next_value[0]"))),
    script(
        "returns_mc_cut", (RET,), "monte|discounted", (RETURNS, MONTE_CARLO.format(last="torch.zeros(args.num_envs)"))
    ),
    script(
        "returns_new_values",
        (RET, VF),
        "after|new value|moving|values of now",
        (
            "        np.random.shuffle(b_inds)\n",
            "        np.random.shuffle(b_inds)\n        b_returns = b_advantages + agent.get_value(b_obs).detach().flatten()\n",
        ),
        source=ISSUES.format("michaelnny/deep_rl_zoo", 5),
    ),
    script(
        "norm_no_mean",
        (NORM, PG, GRAD),
        "mean|centr",
        (NORMALISE, "mb_advantages = mb_advantages / (mb_advantages.std() + 1e-8)"),
    ),
    script(
        "norm_no_std",
        (NORM, PG, GRAD),
        "mean|std|scale",
        (NORMALISE, "mb_advantages = mb_advantages - mb_advantages.mean()"),
        listed=False,
    ),
    script(
        "norm_env",
        (NORM, ADV, PG, GRAD),
        "environment",
        (RETURNS, RETURNS + "        advantages = (advantages - advantages.mean(0)) / (advantages.std(0) + 1e-8)\n"),
        (NORMALISE, "pass"),
        follows=(ADV, RET),
    ),
)

SCRIPT_COLLECTING = (
    script(
        "obs_statistics",
        (LOGP, VAL),
        "statistic|normali",
        *OBS_STATISTICS,
        source="https://github.com/leggedrobotics/rsl_rl/pull/225",
        follows=(ADV,),
    ),
    script(
        "dropout",
        (LOGP, VAL),
        "dropout|mode",
        ("nn.Linear(inputs, 32), nn.Tanh(), nn", "nn.Linear(inputs, 32), nn.Tanh(), nn.Dropout(0.2), nn"),
        source=ISSUES.format("huggingface/trl", 454),
    ),
    script(
        "stale_weights",
        (LOGP, VAL),
        "stale|older|weights",
        ("import hashlib\n", "import copy\nimport hashlib\n"),
        (
            "    for step in range(args.num_steps):\n",
            "    if iteration % 2:\n        behaviour = copy.deepcopy(agent)\n    for step in range(args.num_steps):\n",
        ),
        ("= agent.get_action_and_value(next_obs)", "= behaviour.get_action_and_value(next_obs)"),
    ),
    script(
        "values_next",
        (VAL, ADV),
        "next|after|shift",
        (
            STATE,
            STATE + "        with torch.no_grad():\n            values[step] = agent.get_value(next_obs).flatten()\n",
        ),
    ),
    script("argmax", (ACT,), "arg-?max|greedy|likel", (SAMPLE, "action = probs.logits.argmax(-1)")),
    script(
        "independent", (ACT,), "independent|uniform", (SAMPLE, "action = torch.randint(0, num_outputs, x.shape[:1])")
    ),
    script("repeated_env", (ACT,), "repeat|same|environment", (SAMPLE, "action = probs.sample()[:1].expand(len(x))")),
    script(
        "sticky",
        (ACT,),
        "repeat|sticky|previous",
        (
            SAMPLE,
            "action = self.last = torch.where(torch.rand(len(x)) < 0.6, getattr(self, 'last', probs.sample()), probs.sample())",
        ),
    ),
    script(
        "action_permuted_env",
        (ACT, TRANS),
        "permut",
        ("envs.step(action.numpy())", "envs.step((num_outputs - 1 - action).numpy())"),
        listed=False,
    ),
    script(
        "actions_late",
        (ACT,),
        "late",
        ("envs.step(action.numpy())", "envs.step(actions[max(0, step - 6)].long().numpy())"),
    ),
    script(
        "effects_late",
        (ACT,),
        "late",
        ('--env-id", default="tasks:Drift-v0', '--env-id", default="Acrobot-v1'),
        (
            "[lambda: gym.make(args.env_id) for _ in range(args.num_envs)]",
            "[lambda: Late(gym.make(args.env_id)) for _ in range(args.num_envs)]",
        ),
        (
            "envs = gym.vector.SyncVectorEnv(\n",
            """class Late(gym.Wrapper):
    def reset(self, **settings: Any) -> Any:
        self.waiting = [1] * 4
        return self.env.reset(**settings)

    def step(self, action: Any) -> Any:
        self.waiting.append(action)
        return self.env.step(self.waiting.pop(0))


envs = gym.vector.SyncVectorEnv(
""",
        ),
    ),
    force(
        "actions_late",
        (ACT,),
        "late",
        ("envs.step(action.numpy())", "envs.step(actions[max(0, step - 3)].numpy())"),
    ),
    script(
        "action_permuted_stored",
        (ACT, LOGP),
        "permut",
        ("actions[step] = action", "actions[step] = num_outputs - 1 - action"),
        follows=(LOGP, ACT),
    ),
    script(
        "acts_on_stale_obs",
        (TRANS,),
        "stale|one step|late|previous",
        (STATE, "        next_obs, waiting = waiting, torch.tensor(state, dtype=torch.float32)\n"),
        ("next_done = torch.zeros(args.num_envs)\n", "next_done = torch.zeros(args.num_envs)\nwaiting = next_obs\n"),
    ),
    script(
        "obs_never_updated",
        (TRANS,),
        "never|constant|not change|same",
        (STATE, "        last_obs = torch.tensor(state)\n"),
    ),
    script(
        "final_obs_after_reset",
        (TRANS,),
        "final|last observation|reset",
        (
            STATE,
            """        for index in np.flatnonzero(np.logical_or(terminations, truncations)):
            state[index] = infos["final_obs"][index]
"""
            + STATE,
        ),
    ),
    script(
        "reward_before_obs",
        (TRANS,),
        "before|late|shift",
        (REWARD, "        rewards[step], held_reward = held_reward, torch.tensor(reward, dtype=torch.float32)\n"),
        (
            "next_done = torch.zeros(args.num_envs)\n",
            "next_done = torch.zeros(args.num_envs)\nheld_reward = torch.zeros(args.num_envs)\n",
        ),
        source=ISSUES.format("openai/spinningup", 50),
    ),
    script(
        "obs_alias",
        (LOGP, TRANS, VAL),
        "next|after|led to",
        ("        obs[step] = next_obs\n", ""),
        (STATE, STATE + "        obs[step] = next_obs\n"),
        source=ISSUES.format("leggedrobotics/rsl_rl", 222),
        follows=(LOGP, TRANS, VAL),
    ),
    force(
        "clipped_stored",
        (LOGP,),
        "clip|cut|bound",
        ("actions[step] = action", "actions[step] = action.clamp(-1, 1)"),
        follows=(ACT,),
    ),
    force("clipped_before_log_prob", (ACT,), "clip|cut|bound", (SAMPLE, "action = probs.sample().clamp(-1, 1)")),
    force(
        "no_log_det", (LOGP,), "det|squash|jacobian|tanh", *SQUASH, source="https://github.com/automl/Mighty/pull/118"
    ),
    force("independent", (ACT,), "independent|uniform", (SAMPLE, "action = torch.rand_like(mean) * 2 - 1")),
    force("mean_action", (ACT,), "arg-?max|greedy|likel|mean", (SAMPLE, "action = mean")),
)
