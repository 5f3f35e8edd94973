"""Mistakes in Stable-Baselines3, sb3-contrib and the bundled trainer."""

from __future__ import annotations

from equation_bugs import (
    ACT,
    ADV,
    ENT,
    GRAD,
    LOGP,
    MB,
    NORM,
    OPT,
    PG,
    RET,
    SB3,
    SCHED,
    TRANS,
    VAL,
    VF,
    Bug,
    bundled,
    contrib,
    sb3,
)

ALIVE_LAST, ALIVE = (
    "alive, following = 1.0 - dones.astype(np.float32), last_values",
    "alive, following = 1.0 - self.episode_starts[step + 1], self.values[step + 1]",
)
DELTA = "delta = self.rewards[step] + self.gamma * following * alive"
RETURNS = "        self.returns = self.advantages + self.values\n"
AFTER_STEP = "            self._update_info_buffer(infos, dones)\n"
TIMEOUT = 'if done and infos[idx].get("TimeLimit.truncated", False):'
TERMINAL = 'self.policy.obs_to_tensor(infos[idx]["terminal_observation"])[0]'
TERMINAL_VALUE = "terminal_value = self.policy.predict_values(terminal_obs)[0]"
ADD = "rollout_buffer.add(self._last_obs, actions, rewards, self._last_episode_starts, values, log_probs)"
NORMALISE = "advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)"
SURROGATE = "policy_loss = -th.min(policy_loss_1, policy_loss_2).mean()"
VALUE = "value_loss = F.mse_loss(data.returns, values)"
STEP = "                self.policy.optimizer.step()\n"
RATE = "        self._update_learning_rate(self.policy.optimizer)\n"
BATCHES = "for data in self.rollout_buffer.get(self.batch_size):"
LOSS = (PG, GRAD)

MONTE_CARLO = """        following = last_values
        for step in reversed(range(self.buffer_size)):
            ends = dones if step == self.buffer_size - 1 else self.episode_starts[step + 1]
            following = self.rewards[step] + self.gamma * (1.0 - ends) * following
            self.returns[step] = following
"""

SB3_TARGETS = (
    sb3(
        "forward",
        (ADV,),
        "revers|forward|order of time",
        ("reversed(range(self.buffer_size))", "range(self.buffer_size)"),
    ),
    sb3(
        "ends_ignored",
        (ADV,),
        "ignor|over the ends",
        (ALIVE_LAST, "alive, following = 1.0, last_values"),
        (ALIVE, "alive, following = 1.0, self.values[step + 1]"),
    ),
    sb3(
        "ends_late",
        (ADV,),
        "late",
        (ALIVE, ALIVE.replace("episode_starts[step + 1]", "episode_starts[step]")),
    ),
    sb3(
        "ends_neighbour",
        (ADV,),
        "other environments",
        ("self._last_episode_starts = dones\n", "self._last_episode_starts = np.roll(dones, 1)\n"),
    ),
    sb3(
        "abs",
        (ADV,),
        "positive",
        (RETURNS, RETURNS + "        self.advantages = np.abs(self.advantages)\n"),
        follows=(RET,),
    ),
    sb3(
        "returns_noise", (RET,), "unrelated", (RETURNS, "        self.returns = np.random.randn(*self.values.shape)\n")
    ),
    sb3(
        "current_dones_stored",
        (ADV, TRANS),
        "early",
        (ADD, ADD.replace("self._last_episode_starts", "dones")),
        source=SB3.format(105),
    ),
    sb3(
        "last_value_of_old_obs",
        (ADV,),
        "old_last|state before",
        (
            "            values = self.policy.predict_values(obs_as_tensor(new_obs, self.device))\n",
            "            values = values.clone()\n",
        ),
        source=SB3.format(183),
    ),
    sb3("timeouts_as_ends", (ADV,), "limit.*terminat", (TIMEOUT, "if False:"), source=SB3.format(633)),
    sb3(
        "ends_as_timeouts",
        (ADV,),
        "bootstrap.*terminat|terminat.*bootstrap|value after terminat",
        (TIMEOUT, "if done:"),
    ),
    sb3(
        "timeout_next_episode",
        (ADV,),
        "next episode|next_episode",
        (TERMINAL, "self.policy.obs_to_tensor(new_obs[idx])[0]"),
    ),
    sb3(
        "timeout_old_value",
        (ADV,),
        "current value|acted in|old value|state before",
        (TERMINAL_VALUE, "terminal_value = values[idx]"),
        source="https://github.com/leggedrobotics/rsl_rl/issues/151",
    ),
    sb3(
        "timeout_does_not_cut",
        (ADV,),
        "limit.*no end|no_end|runs into",
        (
            "trace = delta + self.gamma * self.gae_lambda * alive * trace",
            "trace = delta + self.gamma * self.gae_lambda * (1 - self.failed[step]) * trace",
        ),
        (
            AFTER_STEP,
            AFTER_STEP
            + "            rollout_buffer.failed[n_steps] = [d and not i.get('TimeLimit.truncated') for d, i in zip(dones, infos)]\n",
        ),
        (
            "        rollout_buffer.reset()\n",
            "        rollout_buffer.reset()\n        rollout_buffer.failed = np.zeros((n_rollout_steps, env.num_envs), np.float32)\n",
        ),
        source="https://github.com/Toni-SM/skrl/issues/224",
    ),
    sb3(
        "no_bootstrap",
        (ADV,),
        "no_last|without the value after",
        (ALIVE_LAST, "alive, following = 1.0 - dones.astype(np.float32), 0 * last_values"),
    ),
    sb3(
        "gamma",
        (ADV,),
        r"γ|gamma",
        (DELTA, DELTA.replace("self.gamma", "0.9")),
        ("trace = delta + self.gamma", "trace = delta + 0.9"),
    ),
    sb3("lambda", (ADV,), r"λ|lambda", ("self.gamma * self.gae_lambda", "self.gamma * 0.6")),
    sb3("sign", (ADV,), "sign|negat|minus", (RETURNS, RETURNS + "        self.advantages *= -1\n"), follows=(RET,)),
    sb3(
        "stale",
        (ADV,),
        "stale|previous|last rollout",
        (
            RETURNS,
            RETURNS + "        self.advantages, self.old = getattr(self, 'old', self.advantages), self.advantages\n",
        ),
        follows=(RET,),
    ),
    sb3(
        "axes",
        (ADV,),
        "axes|swap|environment",
        (RETURNS, RETURNS + "        self.advantages = self.advantages.T.reshape(self.advantages.shape)\n"),
        follows=(RET,),
    ),
    sb3(
        "axes_rewards",
        (ADV,),
        "axes|swap|environment",
        (
            "        trace = np.zeros(self.n_envs, np.float32)\n",
            "        trace = np.zeros(self.n_envs, np.float32)\n        swapped = self.rewards.T.reshape(self.rewards.shape)\n",
        ),
        (DELTA, DELTA.replace("self.rewards", "swapped")),
    ),
    sb3(
        "reward_shift",
        (ADV,),
        "late|step before",
        (DELTA, DELTA.replace("self.rewards[step]", "self.rewards[max(0, step - 1)]")),
    ),
    sb3(
        "reward_clip",
        (ADV,),
        "reward.*(clip|cut)|clip.*reward",
        (DELTA, DELTA.replace("self.rewards[step]", "self.rewards[step].clip(-1, 1)")),
    ),
    sb3(
        "returns_normalized",
        (RET,),
        "normali",
        (
            RETURNS,
            "        self.returns = (self.advantages - self.advantages.mean()) / self.advantages.std() + self.values\n",
        ),
    ),
    sb3("returns_mc", (RET,), "monte|λ = 1|discounted", (RETURNS, MONTE_CARLO)),
    sb3(
        "returns_are_advantages",
        (RET,),
        "advantages|values",
        (RETURNS, "        self.returns = self.advantages.copy()\n"),
        listed=False,
    ),
    sb3(
        "norm_no_mean", (NORM, *LOSS), "mean|centr", (NORMALISE, "advantages = advantages / (advantages.std() + 1e-8)")
    ),
    sb3("norm_none", (NORM, *LOSS), "normali|raw", (NORMALISE, "pass"), listed=False),
)

SB3_COLLECTING = (
    sb3(
        "stale_weights",
        (LOGP, VAL),
        "stale|older|weights",
        ("actions, values, log_probs = self.policy(obs_as", "actions, values, log_probs = self.behaviour(obs_as"),
        (
            "        self.policy.set_training_mode(False)\n",
            """        self.policy.set_training_mode(False)
        if self._n_updates % 2 == 0:
            self.behaviour.load_state_dict(self.policy.state_dict())
""",
        ),
        ("    model.learn(", "    model.behaviour = copy.deepcopy(model.policy)\n    model.learn("),
        ("import hashlib\n", "import copy\nimport hashlib\n"),
        ("self._n_updates += 1", "self._n_updates += 1 if _epoch == 0 else 0"),
    ),
    sb3(
        "dropout",
        (LOGP, VAL),
        "dropout|mode",
        (
            '{"net_arch": [32, 32]}',
            '{"net_arch": [32, 32], "activation_fn": lambda: th.nn.Sequential(th.nn.Tanh(), th.nn.Dropout(0.2))}',
        ),
        ("        self.policy.set_training_mode(False)\n", "        self.policy.set_training_mode(True)\n"),
        source="https://github.com/huggingface/trl/issues/454",
    ),
    sb3(
        "argmax",
        (ACT,),
        "arg-?max|greedy|likel",
        (
            "self.policy(obs_as_tensor(self._last_obs, self.device))",
            "self.policy(obs_as_tensor(self._last_obs, self.device), deterministic=True)",
        ),
    ),
    sb3(
        "independent",
        (ACT,),
        "independent|uniform",
        (
            "            actions = actions.cpu().numpy()\n",
            """            actions = th.randint(0, 3, actions.shape)
            with th.no_grad():
                log_probs = self.policy.get_distribution(obs_as_tensor(self._last_obs, self.device)).log_prob(actions)
            actions = actions.cpu().numpy()
""",
        ),
    ),
    sb3(
        "permuted_env",
        (ACT, TRANS),
        "permut",
        ("env.step(clipped_actions)", "env.step(2 - clipped_actions)"),
        listed=False,
    ),
    sb3(
        "permuted_stored",
        (LOGP, ACT),
        "permut",
        ("actions = actions.reshape(-1, 1)", "actions = 2 - actions.reshape(-1, 1)"),
        follows=(LOGP, ACT),
    ),
    Bug(
        "sb3-clipped_stored",
        "sb3_program.py",
        (LOGP,),
        "clip|cut|bound",
        ((ADD, ADD.replace("actions", "clipped_actions")),),
        ("--env-id", "tasks:Push-v0"),
        follows=(ACT,),
    ),
    sb3(
        "obs_never_updated", (TRANS,), "never|constant|not change|same", ("            self._last_obs = new_obs\n", "")
    ),
    sb3(
        "acts_on_stale_obs",
        (TRANS,),
        "stale|one step|late|previous",
        (
            "            self._last_obs = new_obs\n",
            "            self._last_obs, self.waiting = getattr(self, 'waiting', self._last_obs), new_obs\n",
        ),
        follows=(ADV,),
    ),
    sb3(
        "final_obs_after_reset",
        (TRANS,),
        "final|last observation|reset",
        (
            AFTER_STEP,
            AFTER_STEP
            + "            for idx in np.flatnonzero(dones):\n                new_obs[idx] = infos[idx]['terminal_observation']\n",
        ),
    ),
    sb3(
        "obs_alias",
        (LOGP, TRANS, VAL),
        "next|after|led to",
        (ADD, ADD.replace("self._last_obs", "new_obs")),
        source="https://github.com/Farama-Foundation/SuperSuit/pull/116",
        follows=(LOGP, TRANS, VAL),
    ),
    sb3(
        "reward_before_obs",
        (TRANS, ADV),
        "before|late|shift",
        (
            AFTER_STEP,
            AFTER_STEP + "            rewards, self.held = getattr(self, 'held', 0 * rewards), rewards.copy()\n",
        ),
        source="https://github.com/openai/spinningup/issues/50",
    ),
    contrib(
        "recurrent",
        "zero_states",
        (LOGP, VAL),
        "zero|empty",
        (
            "super().evaluate_actions(obs, actions, lstm_states, episode_starts)",
            "super().evaluate_actions(obs, actions, type(lstm_states)(*(tuple(0 * s for s in pair) for pair in lstm_states)), episode_starts)",
        ),
    ),
    contrib(
        "recurrent",
        "no_reset_in_training",
        (LOGP, VAL),
        "not reset|not_reset",
        (
            "super().evaluate_actions(obs, actions, lstm_states, episode_starts)",
            "super().evaluate_actions(obs, actions, lstm_states, th.zeros_like(episode_starts))",
        ),
    ),
    contrib(
        "recurrent",
        "no_reset_in_acting",
        (LOGP, VAL),
        "not reset|not_reset",
        (
            "    def evaluate_actions(self, obs: Any, actions: Any, lstm_states",
            """    def forward(self, obs: Any, lstm_states: Any, episode_starts: Any, deterministic: bool = False) -> Any:
        return super().forward(obs, lstm_states, th.zeros_like(episode_starts), deterministic)

    def evaluate_actions(self, obs: Any, actions: Any, lstm_states""",
        ),
    ),
    contrib(
        "masked",
        "no_mask_in_training",
        (LOGP,),
        "mask",
        ("super().evaluate_actions(obs, actions, action_masks)", "super().evaluate_actions(obs, actions)"),
        follows=(ENT, GRAD),
    ),
    contrib(
        "masked",
        "entropy_over_masked",
        (ENT, GRAD),
        "mask",
        (
            "        values, log_prob, entropy = super().evaluate_actions(obs, actions, action_masks)\n",
            "        values, log_prob, _ = super().evaluate_actions(obs, actions, action_masks)\n        entropy = super().evaluate_actions(obs, actions)[2]\n",
        ),
    ),
)

SB3_LOSSES = (
    sb3(
        "pg_sign",
        LOSS,
        "sign|negat|minus|ascent",
        (SURROGATE, "policy_loss = th.min(policy_loss_1, policy_loss_2).mean()"),
    ),
    sb3("pg_no_minimum", LOSS, "minimum|only.*clip|without.*min", (SURROGATE, "policy_loss = -policy_loss_2.mean()")),
    sb3(
        "pg_no_clip",
        LOSS,
        "no.clip|not clipped|unclipped|without.*clip",
        (SURROGATE, "policy_loss = -policy_loss_1.mean()"),
    ),
    sb3(
        "pg_ratio_inverted",
        LOSS,
        "inver",
        ("th.exp(log_prob - data.old_log_prob)", "th.exp(data.old_log_prob - log_prob)"),
    ),
    sb3(
        "pg_rows",
        (*LOSS, NORM),
        "rows|permut|other",
        (NORMALISE, NORMALISE + "\n                    advantages = advantages[th.randperm(len(advantages))]"),
    ),
    sb3("pg_sum", LOSS, "sum", (SURROGATE, "policy_loss = -th.min(policy_loss_1, policy_loss_2).sum()")),
    sb3("v_advantage", (VF, GRAD), "advantage", (VALUE, "value_loss = F.mse_loss(data.advantages, values)")),
    sb3(
        "v_old_values",
        (VF, GRAD),
        "old.value|at collection",
        (VALUE, "value_loss = F.mse_loss(data.old_values, values)"),
    ),
    sb3(
        "v_half",
        (VF, GRAD),
        "half|½|factor|weight|0.5|twice|scal",
        (VALUE, "value_loss = 0.5 * F.mse_loss(data.returns, values)"),
    ),
    sb3(
        "v_detached",
        (VF, GRAD),
        "detach|missing|no gradient|without",
        (VALUE, "value_loss = F.mse_loss(data.returns, values.detach())"),
    ),
    sb3(
        "entropy_sign",
        (ENT, GRAD),
        "sign|negat",
        ("entropy_loss = -th.mean(entropy)", "entropy_loss = th.mean(entropy)"),
        source="https://github.com/PKU-Alignment/omnisafe/pull/133",
    ),
    sb3(
        "entropy_sample_sign",
        (ENT, GRAD),
        "sign|sample|log.prob",
        ("entropy_loss = -th.mean(entropy)", "entropy_loss = th.mean(-log_prob)"),
        source=SB3.format(127),
    ),
    sb3(
        "entropy_weight", (ENT, GRAD), "weight|coefficient|scal", ("self.ent_coef * entropy_loss", "0.2 * entropy_loss")
    ),
)

SB3_STEPS = (
    sb3(
        "not_cleared",
        (GRAD,),
        "clear|accumul|sum|previous",
        ("                self.policy.optimizer.zero_grad()\n", ""),
    ),
    sb3("gradient_scaled", (GRAD,), "scale|factor|multipl", ("loss.backward()", "(loss / 4).backward()")),
    sb3(
        "clipped_by_value",
        (GRAD,),
        "value",
        (
            "th.nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_grad_norm)",
            "th.nn.utils.clip_grad_value_(self.policy.parameters(), 0.01)",
        ),
    ),
    sb3("lr_other", (OPT, SCHED), "rate", (RATE, RATE + "        self.policy.optimizer.param_groups[0]['lr'] *= 3\n")),
    sb3(
        "state_lost", (OPT,), "state|lost|fresh|restart", (RATE, RATE + "        self.policy.optimizer.state.clear()\n")
    ),
    sb3(
        "missing_parameter",
        (OPT,),
        "left.out|lacks",
        (
            "        model.policy.action_net.weight.mul_(100)\n",
            "        model.policy.action_net.weight.mul_(100)\n    model.policy.optimizer.param_groups[0]['params'] = list(model.policy.mlp_extractor.parameters())\n",
        ),
        follows=(GRAD,),
    ),
    sb3(
        "same_minibatches",
        (MB,),
        "same",
        (BATCHES, "np.random.seed(self._n_updates // self.n_epochs)\n            " + BATCHES),
    ),
    sb3(
        "first_minibatch_only",
        (MB,),
        "same|left out|one.minibatch|never|overlap",
        (BATCHES, "for data in [next(self.rollout_buffer.get(self.batch_size))]:"),
    ),
    sb3(
        "schedule_negative",
        (SCHED,),
        "negative|below 0|below zero",
        ('"learning_rate": 1e-3', '"learning_rate": lambda left: 1e-3 * (2 * left - 1)'),
    ),
    sb3(
        "schedule_restarts",
        (SCHED,),
        "restart|again|rises|back",
        ('"learning_rate": 1e-3', '"learning_rate": lambda left: 1e-3 * ((2 * left) % 1 + 0.1)'),
    ),
    sb3(
        "schedule_ends_early",
        (SCHED,),
        "early|soon|before",
        ('"learning_rate": 1e-3', '"learning_rate": lambda left: 1e-3 * max(0.0, 2 * left - 1)'),
    ),
)

BUNDLED = (
    bundled("adv_sign", "cartpole", (ADV,), "sign|negat|minus", follows=(RET,)),
    bundled("returns_shuffled", "cartpole", (RET,), "permut|shuffl|rows|unrelated", listed=False),
    bundled("stale_adv", "cartpole", (ADV,), "stale|previous|last rollout", follows=(RET, NORM)),
    bundled("loss_sign", "cartpole", (PG, GRAD), "sign|negat|minus|ascent", follows=(GRAD,)),
    bundled("repeated_minibatches", "cartpole", (MB,), "same|repeat|left out|overlap"),
    bundled("obs_mismatch", "acrobot", (LOGP, VAL), "statistic|normali|observation"),
    bundled("h0_zero", "cue-recall", (LOGP, VAL), "zero|empty"),
    bundled("no_reset", "cartpole-lstm", (LOGP, VAL), "not reset|not_reset"),
    bundled("swapped_ends", "cartpole", (ADV, TRANS), "terminat|trunca|time limit"),
)
