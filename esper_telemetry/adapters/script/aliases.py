"""What single-file PPO scripts call things, the commonest first."""

from __future__ import annotations

LOG_RATIO = ("logratio", "log_ratio", "logratios", "log_ratios", "logprob_diff")
RATIO = ("ratio", "ratios", "prob_ratio", "rho", "imp_weights", "ratio_batch")
NEW_LOG_PROBS = (
    "newlogprob",
    "new_logprob",
    "new_log_prob",
    "new_logprobs",
    "new_log_probs",
    "curr_log_probs",
    "logp",
    "log_probs",
)
OLD_LOG_PROBS = (
    "mb_logprobs",
    "old_logprob",
    "old_log_prob",
    "old_logprobs",
    "old_log_probs",
    "mb_old_logprobs",
    "logp_old",
)
ADVANTAGES = (
    "mb_advantages",
    "mb_adv",
    "mb_advs",
    "advantages_mb",
    "batch_advantages",
    "minibatch_advantages",
    "advantage",
    "adv",
    "advs",
)
VALUES = ("newvalue", "new_value", "new_values", "newvalues", "values_pred", "value_pred", "vpred", "mb_newvalue")
OLD_VALUES = ("mb_values", "old_values", "old_value", "values_old", "mb_old_values")
RETURNS = ("mb_returns", "returns_mb", "batch_returns", "target", "targets", "return_batch", "ret")
ROWS = ("mb_inds", "mb_indices", "mb_idx", "minibatch_ind", "inds", "indices", "idx", "rows", "index")
POLICY_LOSS = (
    "pg_loss",
    "policy_loss",
    "actor_loss",
    "loss_pi",
    "pi_loss",
    "policy_gradient_loss",
    "surrogate_loss",
    "action_loss",
)
VALUE_LOSS = ("v_loss", "value_loss", "critic_loss", "vf_loss", "loss_v")
ENTROPY = ("entropy", "ent", "dist_entropy", "mean_entropy")
LOSS = ("loss", "total_loss")
EPOCH = ("epoch", "epoch_num", "update_epoch", "_epoch")

FLAT_ADVANTAGES = ("b_advantages", "b_adv", "batch_advantages", "flat_advantages")
FLAT_VALUES = ("b_values", "batch_values", "flat_values")
FLAT_RETURNS = ("b_returns", "batch_returns", "flat_returns")
FLAT_LOG_PROBS = ("b_logprobs", "b_log_probs", "batch_log_probs", "flat_logprobs")

REWARDS = ("rewards", "rews", "rewards_buf", "reward_buf", "rew_buf")
ROLLOUT_VALUES = ("values", "vals", "values_buf", "val_buf", "value_buf")
ROLLOUT_ADVANTAGES = ("advantages", "advs", "adv_buf", "advantages_buf")
ROLLOUT_RETURNS = ("returns", "rets", "ret_buf", "returns_buf")
ROLLOUT_LOG_PROBS = ("logprobs", "log_probs", "logprobs_buf", "logp_buf", "old_logprobs")
DONES = ("dones", "terminations", "dones_buf", "done_buf", "terminateds")
NEXT_DONE = ("next_done", "next_termination", "last_done")
NEXT_VALUE = ("next_value", "last_value", "next_values", "last_values", "bootstrap_value")
ACTIONS = ("actions", "acts", "actions_buf", "act_buf")
GLOBAL_STEP = (
    "global_step",
    "global_steps",
    "total_steps_done",
    "num_timesteps",
    "timestep",
    "env_steps",
    "step_count",
    "agent_steps",
)

FACTS = {
    "clip": (
        "clip_coef",
        "clip_eps",
        "clip_range",
        "clip_param",
        "clip_epsilon",
        "eps_clip",
        "clip_ratio",
        "clip",
        "CLIP",
    ),
    "gamma": ("gamma", "GAMMA", "discount"),
    "gae_lambda": ("gae_lambda", "lam", "lambda_", "gae_lam", "LAMBDA"),
    "num_steps": ("num_steps", "n_steps", "NUM_STEPS", "rollout_length"),
    "num_envs": ("num_envs", "n_envs", "NUM_ENVS"),
    "num_epochs": ("update_epochs", "num_epochs", "n_epochs", "epochs", "EPOCHS", "K_epochs"),
    "num_minibatches": ("num_minibatches", "n_minibatches", "MINIBATCHES"),
    "learning_rate": ("learning_rate", "lr", "LEARNING_RATE", "LR"),
    "value_coef": ("vf_coef", "value_coef", "critic_coef", "VF_COEF"),
    "entropy_coef": ("ent_coef", "entropy_coef", "ENT_COEF"),
    "total_steps": ("total_timesteps", "total_steps", "TOTAL_STEPS", "TOTAL_TIMESTEPS", "max_steps"),
    "target_kl": ("target_kl", "TARGET_KL"),
    "env": ("env_id", "env_name", "ENV_ID", "env"),
}
"""Settings that detectors read, by the names that scripts have for them."""

NORMALIZES = ("norm_adv", "normalize_advantage", "normalize_advantages", "norm_advantages")
CLIPS_VALUES = ("clip_vloss", "clip_value_loss", "clip_vf")

ACTOR = r"(^|\.|_)(actor|policy|pi|action|act|logits|mean|mu|log_?std|dist|heads?)(_|\.|\d|$|net|head|mean|log_?std)"
CRITIC = r"(^|\.|_)(critic|value|vf|v|val|q)(_|\.|\d|$|net|head)"
"""Names of parameters, as regular expressions; the critic's are tried first. What matches neither serves both."""
